"""Exact and federated ranking measures, against scikit-learn and direct transcriptions."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from fedminimax.metrics import federated_auc as federated
from fedminimax.metrics.federated_auc import FederatedAUC, answer, federated_auc
from fedminimax.metrics.ranking import auc, auc_interval, auprc, worst_site

Site = tuple[np.ndarray, np.ndarray]


def ask_all(sites: Sequence[Site], least: int = 0, heard: list | None = None):
    """The sum over sites of their answers; `heard` collects each single answer and its question."""

    def ask(question: str, *arrays: np.ndarray) -> np.ndarray:
        answers = [answer(question, *site, *arrays, least=least) for site in sites]
        if heard is not None:
            heard.append((question, arrays, answers))
        return np.sum(answers, axis=0)

    return ask


def pooled(sites: Sequence[Site]) -> Site:
    return np.concatenate([s for s, _ in sites]), np.concatenate([y for _, y in sites])


def split(rng: np.random.Generator, scores: np.ndarray, labels: np.ndarray, clients: int):
    owner = rng.integers(clients, size=scores.size)
    return [(scores[owner == k], labels[owner == k]) for k in range(clients)]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-logits))


KINDS = {
    "logits": lambda z: z,
    "float32 logits": lambda z: z.astype(np.float32),
    "sigmoid": lambda z: sigmoid(z),
    "float32 sigmoid": lambda z: sigmoid(z.astype(np.float32)),
    "saturated": lambda z: sigmoid((12 * z + 8).astype(np.float32)),
    "saturated hard": lambda z: sigmoid((1e4 * z).astype(np.float32)),
    "tanh": lambda z: np.tanh((6 * z).astype(np.float32)),
    "half precision": lambda z: sigmoid(z).astype(np.float16),
    "few values": lambda z: np.round(z),
    "thirds": lambda z: np.round(3 * z) / 3,
    "huge": lambda z: z * 1e300,
    "small": lambda z: z * 1e-300,
    "subnormal": lambda z: z * 1e-320,
    "both": lambda z: np.sign(z) * 10.0 ** (100 * z.clip(-3, 3)),
    "constant": lambda z: np.full_like(z, 0.37),
    "zero": lambda z: np.where(z > 0, 0.0, -0.0),
}


@st.composite
def federations(draw):
    """Sites whose scores are of one of many kinds; some have one class, some have no rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.sampled_from([2, 3, 10, 100, 1000]))
    labels = (rng.random(rows) < draw(st.sampled_from([0.5, 0.1, 0.02]))).astype(int)
    if draw(st.integers(0, 19)) == 0:
        rows = 10_000
        labels = np.zeros(rows, dtype=int)
        labels[rng.integers(rows)] = 1
    logits = rng.standard_normal(rows) + draw(st.sampled_from([-1.0, 0.0, 1.0, 4.0])) * labels
    scores = KINDS[draw(st.sampled_from(sorted(KINDS)))](logits)
    sites = split(rng, scores, labels, draw(st.integers(1, 5)))
    if draw(st.booleans()):
        sites += [(scores[labels == 1], labels[labels == 1])]
    return sites


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sites=federations(),
    bins=st.sampled_from([16, 64, 512, 4096]),
    exchanges=st.integers(1, 4),
    least=st.sampled_from([0, 0, 2, 5]),
)
def test_federated_auc_is_within_its_bound(sites, bins, exchanges, least):
    heard = []
    result = federated_auc(ask_all(sites, least, heard), bins, exchanges, least)
    rows = [
        (scores[labels == label], labels[labels == label])
        for scores, labels in sites
        for label in (0, 1)
        if np.sum(labels == label) >= least
    ]
    scores, labels = pooled(rows) if rows else (np.empty(0), np.empty(0))
    assert (result.positives, result.negatives) == (np.sum(labels == 1), np.sum(labels == 0))
    for column, label in (("withheld_negatives", 0), ("withheld_positives", 1)):
        few = sum(0 < np.sum(site[1] == label) < least for site in sites)
        assert getattr(result, column) == few
    assert result.bins <= bins
    assert result.exchanges <= exchanges
    if result.auc is None or result.bound is None:
        assert result.bound is None
        assert min(result.positives, result.negatives) == 0
    else:
        exact = roc_auc_score(labels, scores.astype(np.float64))
        assert abs(result.auc - exact) <= result.bound + 1e-12
        precision = average_precision_score(labels, scores.astype(np.float64))
        assert result.auprc is not None
        assert result.auprc_bound is not None
        assert abs(result.auprc - precision) <= result.auprc_bound + 1e-9
        assert auc(scores, labels) == pytest.approx(exact, abs=1e-12)
    check_small_counts(sites, heard, least)


def check_small_counts(sites, heard, least):
    """Each site's counts, also those that differences would tell, are 0 or >= least."""
    histograms = [(arrays[0], answers) for question, arrays, answers in heard if question[0] == "h"]
    used = np.unique(np.concatenate([edges for edges, _ in histograms]))
    for site, (scores, labels) in enumerate(sites):
        joint = federated.histogram(scores, labels, used)
        withheld = joint.sum(axis=1) < least
        joint[withheld] = 0
        for counts in (joint, *(answers[site] for _, answers in histograms)):
            assert np.all((counts == 0) | (counts >= least))
            assert np.array_equal(counts.sum(axis=1), joint.sum(axis=1))


# Heavy ties at numbers with many digits, and scales unheard of, take more than two exchanges.
ODD = ("constant", "thirds", "huge", "small", "subnormal", "both")


@pytest.mark.parametrize("separation", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ODD])
def test_two_exchanges_reach_one_in_a_thousand(kind, separation):
    rng = np.random.default_rng(1)
    labels = (rng.random(20_000) < 0.2).astype(int)
    scores = KINDS[kind](rng.standard_normal(labels.size) + separation * (labels - 0.5))
    result = federated_auc(ask_all(split(rng, scores, labels, 5)))
    assert result.bound is not None
    assert result.bound <= 1e-3
    assert result.bins <= 4096


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("output", ["logit", "sigmoid"])
def test_bound_of_fitted_logistic_models(scale, output):
    rng = np.random.default_rng(2)
    features = rng.standard_normal((6000, 12))
    labels = (rng.random(6000) < sigmoid(features @ rng.standard_normal(12) - 2)).astype(int)
    model = LogisticRegression().fit(features[:1000], labels[:1000])
    logits = (scale * model.decision_function(features[1000:])).astype(np.float32)
    scores = logits if output == "logit" else sigmoid(logits)
    result = federated_auc(ask_all(split(rng, scores, labels[1000:], 4)))
    assert result.bound is not None
    assert result.bound <= 1e-3
    assert result.auc == pytest.approx(roc_auc_score(labels[1000:], scores), abs=1e-3)


def test_refinement_helps_and_isolates_ties():
    rng = np.random.default_rng(3)
    labels = rng.integers(2, size=4000)
    logits = rng.standard_normal(labels.size) + labels
    once, twice = (bound_of([(logits, labels)], exchanges) for exchanges in (1, 2))
    assert twice < once / 4
    # A tree with five leaves: in the end each leaf has a bin of its own, and the bound knows it.
    leaves = np.array([0.1, 1 / 3, 0.37, 0.5, 0.99])[np.digitize(logits, [-1, 0, 1, 2])]
    assert bound_of([(leaves, labels)], 2) > 0
    assert bound_of([(leaves, labels)], 8) == 0
    for constant in (0.37, -1e6 / 3, 1e-200, 0.0):
        scores = np.full(labels.size, constant)
        result = federated_auc(ask_all([(scores, labels)]), exchanges=12)
        assert (result.auc, result.bound) == (0.5, 0.0)


def test_few_bins_are_spent_near_the_optimum():
    rng = np.random.default_rng(10)
    labels = rng.integers(2, size=20_000)
    scores = rng.standard_normal(labels.size) + labels
    # The best B bins reach (integral of sqrt(p+ p-))^2 / 2B = exp(-1/4) / 2B = 0.39 / B.
    result = federated_auc(ask_all([(scores, labels)]), bins=64, exchanges=4)
    assert result.bound is not None
    assert result.bound < 2 * 0.39 / 64


def bound_of(sites: Sequence[Site], exchanges: int) -> float:
    bound = federated_auc(ask_all(sites), exchanges=exchanges).bound
    assert bound is not None
    return bound


def test_exchanges_stop_at_the_target():
    rng = np.random.default_rng(4)
    labels = rng.integers(2, size=4000)
    ask = ask_all([(rng.standard_normal(labels.size) + labels, labels)])
    assert federated_auc(ask, exchanges=9, target=0.1).exchanges == 1
    assert federated_auc(ask, exchanges=9, target=1e-3).exchanges == 2


def test_order_and_grouping_of_clients_do_not_matter():
    rng = np.random.default_rng(5)
    labels = (rng.random(3000) < 0.3).astype(int)
    sites = split(rng, rng.standard_normal(labels.size) + labels, labels, 7)
    for least in (0, 5):
        results = [
            federated_auc(ask_all([sites[k] for k in order], least), least=least)
            for order in (range(7), reversed(range(7)), rng.permutation(7))
        ]
        assert results[0] == results[1] == results[2]
    merged = [pooled(sites[:3]), pooled(sites[3:])]
    assert federated_auc(ask_all(merged)) == federated_auc(ask_all(sites))


def test_least_still_gives_a_useful_bound():
    rng = np.random.default_rng(6)
    labels = rng.integers(2, size=8000)
    sites = split(rng, rng.standard_normal(labels.size) + labels, labels, 8)
    result = federated_auc(ask_all(sites, least=5), least=5)
    # Eight sites of 500 rows per class: were edges tried from left to right, few would be common.
    assert result.bound is not None
    assert result.bound < 0.03


def test_supported_marks_as_many_edges_as_a_lone_client_can_bear():
    scores, labels = np.arange(40.0), np.arange(40) % 2
    marks = federated.supported(scores, labels, np.arange(1.0, 40.0), least=5)
    assert 2 <= marks.sum() <= 3
    everywhere = np.linspace(-90.0, -10.0, 50)
    assert federated.supported(scores, labels, everywhere, least=5).all()
    assert not federated.supported(scores, labels, [20.0], least=5, used=[3.0]).any()


def test_a_client_refuses_a_histogram_that_tells_too_much():
    site = (np.arange(40.0), np.arange(40) % 2)
    with pytest.raises(ValueError, match=r"2 counts between 1 and 4.*call federated_auc with"):
        answer("histogram", *site, np.array([4.0]), least=5)
    with pytest.raises(ValueError, match="least = 5"):
        federated_auc(ask_all([site], least=5))
    with pytest.raises(ValueError, match="question is 'scores'"):
        answer("scores", *site)


def test_a_small_class_is_withheld_and_reported():
    rng = np.random.default_rng(7)
    large = (rng.standard_normal(200), rng.integers(2, size=200))
    small = (np.array([9.0, 9.0, -9.0]), np.array([0, 0, 1]))
    result = federated_auc(ask_all([large, small], least=5), least=5)
    assert (result.withheld_negatives, result.withheld_positives) == (1, 1)
    assert result.positives == large[1].sum()
    assert result.positives + result.negatives == 200
    exact = roc_auc_score(large[1], large[0])
    assert result.auc is not None
    assert result.bound is not None
    assert abs(result.auc - exact) <= result.bound + 1e-12


def test_one_class_has_no_federated_auc():
    ask = ask_all([(np.arange(3.0), np.zeros(3))])
    assert federated_auc(ask) == FederatedAUC(None, None, federated.first_edges().size + 1, 1, 0, 3)


@pytest.mark.parametrize("bins", [16, 100, 4096])
def test_edges_are_increasing_finite_and_few(bins):
    edges = federated.first_edges(bins)
    assert edges.size <= bins - 1
    assert np.all(np.diff(edges) > 0)
    assert np.all(np.isfinite(edges))
    extremes = np.array([-np.finfo(float).max, -1.0, 0.0, 5e-324, 1.0, np.finfo(float).max])
    counts = federated.histogram(extremes, np.ones(6), edges)
    assert counts.sum() == 6
    assert counts[1, 0] == 1
    assert counts[1, -1] == 1
    refined = federated.refine(edges, np.full((2, edges.size + 1), 3.0), bins)
    assert refined.size <= bins - 1
    assert np.all(np.diff(refined) > 0)


def test_auc_from_counts_by_hand():
    # Two positives in the upper bin: above one negative, beside the other.
    counts = np.array([[1.0, 1.0], [0.0, 2.0]])
    assert federated.auc_from_counts(counts) == (0.75, 0.25)
    assert federated.auc_from_counts(counts[:, 1:]) == (0.5, 0.5)
    assert federated.auc_from_counts(np.array([[1.0], [0.0]])) is None
    alone = np.array([0.3, np.nextafter(0.3, 1)])
    assert federated.auc_from_counts(np.array([[0.0, 2, 0], [0, 3, 0]]), alone) == (0.5, 0.0)
    assert federated.auc_from_counts(np.array([[2.0, 0, 0], [3, 0, 0]]), alone) == (0.5, 0.5)


@pytest.mark.parametrize("spoil", ["noise", "negative", "nan", "shape"])
def test_sums_that_are_not_counts_are_refused(spoil):
    def ask(question, edges):
        counts = federated.histogram([0.1, 0.2], [0, 1], edges)
        if spoil == "shape":
            return counts[:, 1:]
        counts[0, 0] = {"noise": 0.3, "negative": -1.0, "nan": math.nan}[spoil]
        return counts

    with pytest.raises(ValueError, match="the counts .* add up" if spoil == "shape" else "noise"):
        federated_auc(ask)


@pytest.mark.parametrize(
    "call",
    [
        lambda: federated.first_edges(15),
        lambda: federated_auc(ask_all([]), exchanges=0),
        lambda: federated.histogram([0.0], [0], [1.0, 1.0]),
        lambda: federated.histogram([0.0], [0], [-np.inf, 1.0]),
        lambda: federated_auc(lambda *_: np.zeros(3), least=5),
    ],
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ValueError, match=r"expected|pass the"):
        call()


@pytest.mark.parametrize("ties", [False, True])
def test_exact_measures_equal_scikit_learn(ties):
    rng = np.random.default_rng(8)
    labels = rng.integers(2, size=500)
    scores = rng.standard_normal(500) + labels
    scores = np.round(scores) if ties else scores
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-13)
    assert auprc(scores, labels) == pytest.approx(
        average_precision_score(labels, scores), abs=1e-13
    )
    weights = rng.random(500) + 0.1
    weighted = roc_auc_score(labels, scores, sample_weight=weights)
    assert auc(scores, labels, weights) == pytest.approx(weighted, abs=1e-13)
    assert auc(scores, np.ones(500)) is None
    assert auprc(scores, np.zeros(500)) is None
    assert auc([], []) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(bad):
    measures = [auc, auprc, auc_interval, lambda s, y: federated.histogram(s, y, [0.0])]
    for measure in measures:
        with pytest.raises(ValueError, match=r"1 of 3 scores are not finite .* at row 2"):
            measure([0.0, 1.0, bad], [0, 1, 1])


def test_wrong_shapes_and_labels_are_refused():
    with pytest.raises(ValueError, match="same length"):
        auc([0.0, 1.0], [0])
    with pytest.raises(ValueError, match="flatten"):
        auc([[0.0], [1.0]], [[0], [1]])
    with pytest.raises(ValueError, match="labels hold -1"):
        auc([0.0, 1.0], [-1, 1])


def delong_by_pairs(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """AUC and variance by DeLong's formulae (1988), pair by pair."""
    positives, negatives = scores[labels == 1], scores[labels == 0]
    wins = (positives[:, None] > negatives) + 0.5 * (positives[:, None] == negatives)
    by_positive, by_negative, mean = wins.mean(axis=1), wins.mean(axis=0), wins.mean()
    s10 = np.sum((by_positive - mean) ** 2) / (len(positives) - 1)
    s01 = np.sum((by_negative - mean) ** 2) / (len(negatives) - 1)
    return mean, s10 / len(positives) + s01 / len(negatives)


@pytest.mark.parametrize("seed", range(6))
def test_interval_equals_a_direct_transcription(seed):
    rng = np.random.default_rng(seed)
    labels = (rng.random(150) < 0.2).astype(int)
    scores = np.round(rng.standard_normal(150) + labels, seed % 3)
    centre, variance = delong_by_pairs(scores, labels)
    half = NormalDist().inv_cdf(0.95) * math.sqrt(variance) / (centre * (1 - centre))
    expected = sigmoid(np.log(centre / (1 - centre)) + np.array([-half, half]))
    assert auc_interval(scores, labels, level=0.9) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("separation", "rows"), [(0.0, 60), (1.0, 60), (2.0, 80)])
def test_interval_covers_the_truth_as_often_as_it_says(separation, rows):
    rng = np.random.default_rng(9)
    truth = NormalDist().cdf(separation / math.sqrt(2))
    labels = np.arange(rows) % 2
    hits, trials = 0, 1500
    for _ in range(trials):
        interval = auc_interval(rng.standard_normal(rows) + separation * labels, labels)
        assert interval is not None
        hits += interval[0] <= truth <= interval[1]
    assert 0.93 <= hits / trials <= 0.98


def test_interval_in_degenerate_cases():
    labels = np.array([0] * 10 + [1] * 10)
    perfect = auc_interval(np.arange(20), labels)
    assert perfect == pytest.approx((0.025**0.1, 1.0))
    assert auc_interval(-np.arange(20), labels) == pytest.approx((0.0, 1 - 0.025**0.1))
    assert auc_interval(np.zeros(20), labels) is None
    assert auc_interval([0.1, 0.2, 0.3], [0, 0, 1]) is None
    assert auc_interval([0.1, 0.2], [1, 1]) is None
    with pytest.raises(ValueError, match="level is 95"):
        auc_interval([0.1, 0.2], [0, 1], level=95)


def test_worst_site_leaves_small_sites_out_and_names_them():
    aucs = {"a": 0.8, "b": 0.7, "c": 0.1, "d": None, "e": 0.7}
    counts = {"a": (50, 50), "b": (90, 5), "c": (900, 4), "d": (9, 0), "e": (50, 50)}
    assert worst_site(aucs, counts) == ("b", 0.7, ("c", "d"))
    assert worst_site(aucs, counts, least=4) == ("c", 0.1, ("d",))
    assert worst_site(aucs, counts, least=1000) == (None, None, tuple("abcde"))


@pytest.mark.parametrize(
    ("aucs", "counts", "least", "words"),
    [
        ({"a": None}, {"a": (9, 9)}, 5, "site 'a' has AUC None"),
        ({"a": math.nan}, {"a": (9, 9)}, 5, "site 'a' has AUC nan"),
        ({"a": 0.5}, {}, 5, "site 'a' has an AUC or counts but not both"),
        ({}, {}, 0, "least is 0"),
    ],
)
def test_worst_site_refuses_contradictions(aucs, counts, least, words):
    with pytest.raises(ValueError, match=words):
        worst_site(aucs, counts, least)
