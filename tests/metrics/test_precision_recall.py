"""Average precision from counts, against all orders of the scores in a bin and scikit-learn."""

import itertools

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, precision_recall_curve

from fedminimax.metrics.federated_auc import first_edges, histogram
from fedminimax.metrics.precision_recall import auprc_from_counts, precision_recall_from_counts


@pytest.mark.parametrize(
    "counts", [[[2, 1], [0, 2]], [[1, 1], [1, 1]], [[0, 2], [1, 2]], [[1, 2], [2, 0]]]
)
def test_the_bound_is_reached_by_some_order_and_ties(counts):
    """All weak orders of the rows in each of two bins."""
    counts = np.array(counts, float)
    value, bound = auprc_from_counts(counts, [0.5]) or (0.0, 0.0)
    labels = [label for b in (0, 1) for label in (0, 1) for _ in range(int(counts[label, b]))]
    bins = [b for b in (0, 1) for label in (0, 1) for _ in range(int(counts[label, b]))]
    places = [[b + step / 10 for step in range(bins.count(b))] for b in bins]
    exact = [average_precision_score(labels, scores) for scores in itertools.product(*places)]
    assert min(exact) == pytest.approx(value - bound)
    assert max(exact) == pytest.approx(value + bound)


@pytest.mark.parametrize("bins", [17, 64, 4096])
def test_the_band_holds_the_curve_of_the_scores(bins):
    random = np.random.default_rng(bins)
    labels = random.random(400) < 0.3
    scores = np.round(random.normal(size=400) + labels, 2)  # with ties
    edges = first_edges(bins)
    counts = histogram(scores, labels, edges)
    curve, found = precision_recall_from_counts(counts, edges), auprc_from_counts(counts, edges)
    assert curve is not None
    assert found is not None
    lower, upper = (np.trapezoid(part[:, 1], part[:, 0]) for part in (curve.lower, curve.upper))
    assert lower <= found[0] - found[1] + 1e-12
    assert upper == pytest.approx(found[0] + found[1])
    precision, recall, _ = precision_recall_curve(labels, scores)
    # Where the recall rises; at thresholds that let in negatives only, the curve falls upright.
    for x in np.unique(recall[recall > 0]):
        y = precision[recall == x].max()
        low = np.interp(x, *curve.lower.T) if x < 1 else curve.lower[-1, 1]
        # Steps have several heights at a recall where two bins meet.
        near = np.isclose(curve.lower[:, 0], x)
        low = min([low, *curve.lower[near, 1]])
        right = np.searchsorted(curve.upper[1::2, 0], x - 1e-12)
        assert low - 1e-12 <= y <= curve.upper[2 * right, 1] + 1e-12


def test_a_single_number_is_no_band():
    edges = np.array([0.5, np.nextafter(0.5, 1)])
    scores, labels = [0.2, 0.2, 0.5, 0.5, 0.5], [0, 0, 1, 1, 0]
    found = auprc_from_counts(histogram(scores, labels, edges), edges)
    assert found == (average_precision_score(labels, scores), 0.0)
    assert auprc_from_counts(np.array([[1.0, 0, 0], [0, 0, 0]]), edges) is None
