"""The AUC and AUPRC of pooled scores, without the scores leaving the clients.

Clients count their scores per class in common bins, the server adds the counts (it needs nothing
but sums, so secure aggregation fits underneath) and reports

    auc   = ( sum_b n+_b n-_{<b}  +  half of sum_b n+_b n-_b ) / (n+ n-)
    bound =                         half of sum_b n+_b n-_b   / (n+ n-)

Pairs in different bins have the order of their scores; a pair in one bin counts as half and is
wrong by at most a half. So |auc - exact| <= bound, always. Bins that contain one floating-point
number only are left out of the bound's sum: their pairs are exact ties, for which a half is right.

The first exchange uses a grid that suits all scores; each further one uses edges refined where
pairs still share bins. Two exchanges of 4,096 bins bring the bound of a typical model below 1e-3.
Many ties at values other than -1, 0, 1/2 and 1 (scores in half precision, small decision trees) may
stay in the bound until further exchanges have isolated them.

Edges are the interior ones, finite and increasing: bin b is [edges[b-1], edges[b]), the first bin
has no lower end and the last no upper one, so no score is outside.

Small counts. A fine histogram of few rows reveals their scores. With `least` > 1 a client sends
only counts that are 0 or at least `least`: before each histogram the server proposes edges, each
client marks those it can support, and the server keeps the edges that all clients support. A
proposal is tested together with all edges used before, so that the difference of two histograms of
one evaluation contains no smaller count either. A client with fewer than `least` rows of a class
leaves these rows out, and the result counts such clients; AUC and bound are then those of the
reported rows. This is a rule on counts, not differential privacy: the marks reveal a little, and so
do many evaluations of the same rows.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedminimax.metrics.precision_recall import auprc_from_counts
from fedminimax.metrics.ranking import Flags, Floats, scores_and_labels

Ask = Callable[..., np.ndarray]
AskEach = Callable[..., Sequence[np.ndarray]]  # a sum for each label

FEWEST_BINS = 16
LARGEST = float(np.finfo(np.float64).max)


class FederatedAUC(NamedTuple):
    """|auc - exact AUC of the reported rows| <= bound; both are None if a class is missing. So are
    `auprc` and its bound, from the same histograms (see `precision_recall`).

    `bins` is that of the histogram used, `exchanges` the number of histograms asked for.
    `withheld_positives` and `withheld_negatives` count the clients with too few rows of the class
    to report any.
    """

    auc: float | None
    bound: float | None
    bins: int
    exchanges: int
    positives: int
    negatives: int
    withheld_positives: int = 0
    withheld_negatives: int = 0
    auprc: float | None = None
    auprc_bound: float | None = None


class Histogram(NamedTuple):
    """The clients' scores, counted per class and bin. `withheld` counts the clients with too few
    negatives, and those with too few positives, to report any."""

    edges: Floats
    counts: Floats  # (2, bins), negatives first
    withheld: tuple[int, int]


def federated_auc(
    ask: Ask, bins: int = 4096, exchanges: int = 2, least: int = 0, target: float = 0.0
) -> FederatedAUC:
    """The federated AUC with the smallest bound of several exchanges.

    Arguments:
        ask: `ask(question, *arrays)` sends a question to every client and returns the SUM of their
            answers, each computed by `answer`.
        bins: the most bins of a histogram.
        exchanges: the most histograms to ask for.
        least: the smallest count above 0 that a client reports.
        target: a bound with which no further histogram is asked for.

        >>> sites = [([0.1, 0.9], [0, 1]), ([0.4, 0.3], [0, 1])]
        >>> ask = lambda question, *arrays: sum(answer(question, *site, *arrays) for site in sites)
        >>> federated_auc(ask).auc
        0.75
    """
    return federated_aucs(_alone(ask), 1, bins, exchanges, least, target)[0]


def federated_aucs(
    ask: AskEach,
    labels: int,
    bins: int = 4096,
    exchanges: int = 2,
    least: int = 0,
    target: float = 0.0,
) -> list[FederatedAUC]:
    """The federated AUC of each of several labels, in the exchanges of one.

    Arguments as in `federated_auc`, but `ask` sends as many arrays for each label, those of the
    first label first, and returns a sum for each label.
    """
    results: list[list[FederatedAUC]] = [[] for _ in range(labels)]
    for found in label_histograms(ask, labels, bins, exchanges, least):
        for own, histogram in zip(results, found, strict=True):
            own.append(_measured(histogram))
        if all(own[-1].bound is None or own[-1].bound <= target for own in results):
            break
    return [_closest(own) for own in results]


def _measured(found: Histogram) -> FederatedAUC:
    edges, counts, withheld = found
    negatives, positives = (int(total) for total in counts.sum(axis=1))
    value, bound = auc_from_counts(counts, edges) or (None, None)
    auprc, auprc_bound = auprc_from_counts(counts, edges) or (None, None)
    return FederatedAUC(
        auc=value,
        bound=bound,
        bins=edges.size + 1,
        exchanges=0,
        positives=positives,
        negatives=negatives,
        withheld_negatives=withheld[0],
        withheld_positives=withheld[1],
        auprc=auprc,
        auprc_bound=auprc_bound,
    )


def _closest(results: list[FederatedAUC]) -> FederatedAUC:
    """The smallest bound of each measure."""
    best = min(results, key=lambda result: result.bound or 0.0)
    closest = min(results, key=lambda result: result.auprc_bound or 0.0)
    return best._replace(
        exchanges=len(results), auprc=closest.auprc, auprc_bound=closest.auprc_bound
    )


def histograms(
    ask: Ask, bins: int = 4096, exchanges: int = 2, least: int = 0
) -> Iterator[Histogram]:
    """The histograms of `federated_auc`, each finer than the one before where classes overlap."""
    return (found[0] for found in label_histograms(_alone(ask), 1, bins, exchanges, least))


def label_histograms(
    ask: AskEach, labels: int, bins: int = 4096, exchanges: int = 2, least: int = 0
) -> Iterator[list[Histogram]]:
    """Those of several labels, together; see `federated_aucs`."""
    if exchanges < 1:
        raise ValueError(
            f"exchanges is {exchanges}; expected at least 1: nothing is known without a histogram."
        )
    edges, used = [first_edges(bins)] * labels, [np.empty(0)] * labels
    withheld = [(0, 0)] * labels
    for exchange in range(1, exchanges + 1):
        if least > 1:
            marks = ask("supported", *chain(*zip(edges, used, strict=True)))
            agreed = [_agreed(*own) for own in zip(edges, marks, strict=True)]
            edges, withheld = [own[0] for own in agreed], [own[1] for own in agreed]
        counts = [_whole(*own) for own in zip(ask("histogram", *edges), edges, strict=True)]
        used = [np.union1d(*own) for own in zip(used, edges, strict=True)]
        yield [Histogram(*own) for own in zip(edges, counts, withheld, strict=True)]
        if exchange < exchanges:
            edges = [refine(*own, bins) for own in zip(edges, counts, strict=True)]


def _alone(ask: Ask) -> AskEach:
    return lambda question, *arrays: [ask(question, *arrays)]


# The client's side: pure functions of its own rows and of what the server sent.


def answer(
    question: str, scores: ArrayLike, labels: ArrayLike, *arrays: np.ndarray, least: int = 0
) -> Floats:
    """A client's answer to a question; the server needs the sum over clients only.

    Arguments:
        question: "histogram" or "supported".
        scores, labels: the client's rows.
        arrays: what the server sent: the edges, and for "supported" also the edges used before.
        least: the smallest count above 0 that the client reports.

    Returns, for "histogram", the counts, of shape (2, bins), negatives first; for "supported", a
    0/1 mark per edge and three numbers whose sums count the clients that answered, those that
    withhold their negatives, and those that withhold their positives.
    """
    if question == "histogram":
        (edges,) = arrays
        return _guarded(histogram(*_reported(scores, labels, least), edges), least)
    if question == "supported":
        edges, used = arrays
        _, positive = scores_and_labels(scores, labels)
        totals = np.array([np.sum(~positive), np.sum(positive)])
        return np.concatenate(
            [supported(scores, labels, edges, least, used), [1.0], _small(totals, least)]
        )
    raise ValueError(f"question is {question!r}; expected 'histogram' or 'supported'.")


def histogram(scores: ArrayLike, labels: ArrayLike, edges: ArrayLike) -> Floats:
    """Counts per class and bin, shape (2, len(edges) + 1), negatives first."""
    values, positive = scores_and_labels(scores, labels)
    edges = _increasing(edges)
    which = np.searchsorted(edges, values, side="right")
    rows = [
        np.bincount(which[members], minlength=edges.size + 1) for members in (~positive, positive)
    ]
    return np.array(rows, dtype=np.float64)


def supported(
    scores: ArrayLike, labels: ArrayLike, edges: ArrayLike, least: int, used: ArrayLike = ()
) -> Floats:
    """Marks with 1 a set of edges with which, and with those `used`, each count is 0 or at least
    `least`.

    All clients try the edges in the same order, by repeated halving, so that they agree on the
    coarse edges. From left to right, each client would support other edges and few would be common
    to all. Any subset of the marked edges is allowed too, because joining two bins keeps "0 or at
    least `least`".
    """
    edges, used = _increasing(edges), _increasing(used)
    values, positive = _reported(scores, labels, least)
    # A client that did not agree on `used` may have small counts already.
    if _small(histogram(values, positive, used), least).any():
        return np.zeros(edges.size)
    classes = [np.sort(values[~positive]), np.sort(values[positive])]

    def below(points: Floats) -> list[tuple[int, int]]:
        negatives, positives = (
            np.searchsorted(members, points, side="left").tolist() for members in classes
        )
        return list(zip(negatives, positives, strict=True))

    def enough(low: tuple[int, int], high: tuple[int, int]) -> bool:
        return all(count == 0 or count >= least for count in (high[0] - low[0], high[1] - low[1]))

    # An edge is given by its cut (negatives below, positives below): two edges with no row of this
    # client between them are the same.
    cuts = sorted({(0, 0), (classes[0].size, classes[1].size), *below(used)})
    marks, proposed = np.zeros(edges.size), below(edges)
    for edge in _halving_order(edges.size):
        cut = proposed[edge]
        place = bisect_left(cuts, cut)
        if cuts[place] == cut:
            marks[edge] = 1
        elif enough(cuts[place - 1], cut) and enough(cut, cuts[place]):
            marks[edge] = 1
            insort(cuts, cut)
    return marks


# The server's side: pure functions of sums.


def first_edges(bins: int = 4096) -> Floats:
    """At most bins - 1 edges that suit all scores: logits, probabilities, margins, of any scale.

    They are logarithmic in |score| (dense from 2^-24 to 2^24, sparse to the ends of float64), in
    1 - score for the upper end of a sigmoid, and in |score - 1/2| for the sigmoid of a model that
    has learnt little. The values with many ties, -1, 0, 1/2 and 1, have bins of their own.
    """
    if bins < FEWEST_BINS:
        raise ValueError(
            f"bins is {bins}; expected at least {FEWEST_BINS}: the bound would say nothing."
        )
    piles = np.array([-1.0, 0.0, 0.5, 1.0])
    rest = bins - 1 - 2 * piles.size
    near_one = 1 - 2.0 ** -np.linspace(1, 53, rest // 5)
    off_half = 2.0 ** -np.linspace(3, 24, rest // 32)
    ends = np.concatenate([near_one, -near_one[::2], 0.5 - off_half, 0.5 + off_half])
    side = (rest - ends.size) // 2
    exponents = [np.linspace(-1022, 1023, side // 4), np.linspace(-24, 24, side - side // 4)]
    sizes = 2.0 ** np.concatenate(exponents)
    return np.unique(np.concatenate([piles, np.nextafter(piles, np.inf), ends, sizes, -sizes]))


def refine(edges: ArrayLike, counts: np.ndarray, bins: int = 4096) -> Floats:
    """At most bins - 1 edges, placed where pairs of opposite class share a bin.

    A bin with c = n+ n- pairs that is split in k keeps about c / k of them, so the sum of c_b / k_b
    is smallest for k_b ~ sqrt(c_b). To make room, neighbouring bins are joined: first those whose
    union has one class only, which costs nothing, then those with the fewest new pairs.
    """
    edges = _increasing(edges)
    counts = _whole(counts, edges)
    edges, counts = _keep_edges(edges, counts, _separating(counts))
    while edges.size + 1 > bins // 2:
        edges, counts = _keep_edges(
            edges, counts, _dearest(edges, counts, edges.size + 1 - bins // 2)
        )
    weights = np.sqrt(_unordered(counts, edges))
    if not weights.any():
        return edges
    pieces = 1 + np.floor((bins - weights.size) * weights / weights.sum()).astype(int)
    ends = np.concatenate([[-LARGEST], edges, [LARGEST]])
    parts = [split_bin(ends[b], ends[b + 1], pieces[b]) for b in np.flatnonzero(pieces > 1)]
    return np.unique(np.concatenate([edges, *parts]))


def auc_from_counts(
    counts: np.ndarray, edges: ArrayLike | None = None
) -> tuple[float, float] | None:
    """(AUC, bound) of counts of shape (2, bins), negatives first; None if a class is missing.

    If edges are given, bins that contain a single number are ties and left out of the bound.
    """
    counts = np.asarray(counts, dtype=np.float64)
    negatives, positives = counts
    pairs = negatives.sum() * positives.sum()
    if pairs == 0:
        return None
    lower = np.cumsum(negatives) - negatives
    ordered, shared = positives @ lower, positives @ negatives
    unknown = shared if edges is None else _unordered(counts, _increasing(edges)).sum()
    return float((ordered + shared / 2) / pairs), float(unknown / 2 / pairs)


class ROC(NamedTuple):
    """Points (false positive rate, true positive rate) from (0, 0) to (1, 1) of three curves.

    The curve of the scores themselves is between the step functions `lower` and `upper`, and meets
    `middle` at its corners. The area under `middle` is the federated AUC; the area between `lower`
    and `upper` is twice its bound.
    """

    middle: Floats  # (points, 2)
    lower: Floats
    upper: Floats


def roc_from_counts(counts: np.ndarray, edges: ArrayLike) -> ROC | None:
    """The ROC curve of counts of shape (2, bins), negatives first; None if a class is missing.

    A threshold at an edge gives a point of the curve. Between two of these the curve may go up
    first or right first; if the bin contains a single number, it is the straight line.
    """
    counts = np.asarray(counts, dtype=np.float64)
    totals = counts.sum(axis=1)
    if not totals.all():
        return None
    held = counts.any(axis=0)
    open_bins = (_unordered(counts, _increasing(edges)) > 0)[held][::-1]
    # From the highest scores down.
    corners = np.cumsum(np.insert(counts[:, held][:, ::-1], 0, 0, axis=1), axis=1).T / totals
    before, after = corners[:-1][open_bins], corners[1:][open_bins]
    places = np.flatnonzero(open_bins) + 1
    right_first = np.insert(corners, places, np.c_[after[:, 0], before[:, 1]], axis=0)
    up_first = np.insert(corners, places, np.c_[before[:, 0], after[:, 1]], axis=0)
    return ROC(corners, right_first, up_first)


def _agreed(edges: Floats, total: np.ndarray) -> tuple[Floats, tuple[int, int]]:
    """The edges that all clients support, and the clients that withhold (negatives, positives)."""
    if np.shape(total) != (edges.size + 3,):
        raise ValueError(
            f"the sum of the answers to 'supported' has shape {np.shape(total)}, expected "
            f"{(edges.size + 3,)}: add up the arrays that `answer` returns."
        )
    # The answers are whole numbers; a half allows for rounding on the way.
    marks, (clients, negatives, positives) = total[:-3], np.rint(total[-3:]).astype(int)
    return edges[marks > clients - 0.5], (int(negatives), int(positives))


def _whole(counts: np.ndarray, edges: Floats) -> Floats:
    """The counts as whole numbers. Others are refused, because the bound would not hold."""
    counts = np.asarray(counts, dtype=np.float64)
    if counts.shape != (2, edges.size + 1):
        raise ValueError(
            f"the counts have shape {counts.shape}, expected {(2, edges.size + 1)} for "
            f"{edges.size} edges: add up the arrays that `histogram` returns for these edges."
        )
    whole = np.rint(counts)
    # Written so that a NaN fails as well.
    if not (np.all(np.abs(counts - whole) < 1e-3) and np.all(whole >= 0)):
        raise ValueError(
            f"the counts range from {counts.min()} to {counts.max()} and are not all whole numbers "
            ">= 0; the bound holds for plain sums of counts only: send them without "
            "noise, weights or averaging."
        )
    return whole


def _increasing(edges: ArrayLike) -> Floats:
    edges = np.asarray(edges, dtype=np.float64)
    if edges.ndim != 1 or not np.all(np.isfinite(edges)) or not np.all(edges[1:] > edges[:-1]):
        raise ValueError(
            f"edges of shape {edges.shape} are not a finite, strictly increasing vector; pass the "
            "interior edges, as `first_edges` and `refine` make them."
        )
    return edges


def _unordered(counts: Floats, edges: Floats) -> Floats:
    """Per bin, the number of pairs of opposite class whose order the counts do not give."""
    single = np.zeros(edges.size + 1, dtype=bool)
    single[1:-1] = edges[1:] <= np.nextafter(edges[:-1], np.inf)
    return np.where(single, 0.0, counts[0] * counts[1])


def _keep_edges(edges: Floats, counts: Floats, keep: Flags) -> tuple[Floats, Floats]:
    starts = np.concatenate([[0], np.flatnonzero(keep) + 1])
    return edges[keep], np.add.reduceat(counts, starts, axis=1)


def _separating(counts: Floats) -> Flags:
    """The edges that remain after joining neighbouring bins, from the left, as long as their union
    has one class only."""
    columns = counts.T.tolist()
    negatives, positives = columns[0]
    keep = np.ones(len(columns) - 1, dtype=bool)
    for edge, (more_negatives, more_positives) in enumerate(columns[1:]):
        if (negatives + more_negatives) * (positives + more_positives) == 0:
            negatives, positives, keep[edge] = (
                negatives + more_negatives,
                positives + more_positives,
                False,
            )
        else:
            negatives, positives = more_negatives, more_positives
    return keep


def _dearest(edges: Floats, counts: Floats, surplus: int) -> Flags:
    """All edges but at most `surplus` of the cheapest; of two neighbours at most one is removed,
    because their costs would add."""
    joined = counts[:, 1:] + counts[:, :-1]
    open_pairs = _unordered(counts, edges)
    cost = joined[0] * joined[1] - open_pairs[1:] - open_pairs[:-1]
    every_other = np.arange(0, edges.size, 2)
    number = min(surplus, (every_other.size + 1) // 2)
    keep = np.ones(edges.size, dtype=bool)
    keep[every_other[np.argsort(cost[every_other], kind="stable")[:number]]] = False
    return keep


GRID = np.concatenate([[-LARGEST], first_edges(), [LARGEST]])


def split_bin(low: float, high: float, pieces: int) -> Floats:
    """At most pieces - 1 new edges inside [low, high).

    If there are at least two, two of them give the roundest number a bin of its own, because scores
    in float32 or half precision, saturated ones, and those with few distinct values have ties at
    numbers with few digits. The others are evenly spaced inside a cell of the first grid, and
    over cells if there are several: even spacing would put all edges of [1, infinity) above 1e300.
    """
    pile = _roundest(low, high)
    alone = [pile, np.nextafter(pile, np.inf)] if pieces > 2 else []
    pieces -= len(alone)
    first = np.searchsorted(GRID, low, side="right") - 1
    last = np.searchsorted(GRID, high, side="left")
    if last - first <= 1:
        return np.concatenate([alone, np.linspace(low, high, pieces + 1)[1:-1]])
    cells = np.arange(GRID.size, dtype=np.float64)
    start, stop = np.interp([low, high], GRID, cells)
    inner = np.linspace(start, stop, pieces + 1)[1:-1]
    return np.concatenate([alone, np.interp(inner, cells, GRID)])


def _roundest(low: float, high: float) -> float:
    """The number in [low, high) with the fewest binary digits, from the bit patterns of float64.

    Patterns of positive floats have the order of the floats. Of the integers in (below, top], the
    one with most trailing zeros is top with all bits below the first differing one cleared.
    """
    if low <= 0 < high:
        return 0.0
    sign = 1.0 if low > 0 else -1.0
    start, stop = (int(pattern) for pattern in np.abs([low, high]).view(np.int64))
    below, top = (start - 1, stop - 1) if low > 0 else (stop, start)
    zeros = (below ^ top).bit_length() - 1
    return sign * float(np.int64(top >> zeros << zeros).view(np.float64))


# Small counts, on the client.


def _small(counts: np.ndarray, least: int) -> Flags:
    return (counts > 0) & (counts < least)


def _reported(scores: ArrayLike, labels: ArrayLike, least: int) -> tuple[Floats, Flags]:
    """The rows of the classes that have at least `least` rows."""
    values, positive = scores_and_labels(scores, labels)
    totals = np.array([np.sum(~positive), np.sum(positive)])
    report = ~_small(totals, least)[positive.astype(int)]
    return values[report], positive[report]


def _guarded(counts: Floats, least: int) -> Floats:
    """The counts; refused if one is too small, whatever the server asked for."""
    small = counts[_small(counts, least)]
    if small.size:
        raise ValueError(
            f"the histogram asked for has {small.size} counts between 1 and {least - 1}, and this "
            f"client sends none below least = {least}: call federated_auc with least={least}, so "
            "that edges are agreed on first."
        )
    return counts


def _halving_order(number: int) -> list[int]:
    order, spans = [], deque([(0, number)])
    while spans:
        start, stop = spans.popleft()
        if start < stop:
            middle = (start + stop) // 2
            order.append(middle)
            spans.extend([(start, middle), (middle + 1, stop)])
    return order
