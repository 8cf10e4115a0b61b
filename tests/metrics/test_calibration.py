"""Calibration and operating points from sums: against pooled references, and where they end."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_curve

from fedminimax.metrics.calibration import (
    LEAST_SLOPE,
    Isotonic,
    Platt,
    answer,
    at_score,
    federated_counts,
    federated_platt,
    from_json,
    isotonic_from,
    operating_point,
    sigmoid,
)
from fedminimax.metrics.federated_auc import LARGEST


def sites_of(seed=0, rows=(80, 30, 7), scale=1.0, gap=1.5, shift=0.0):
    random = np.random.default_rng(seed)
    found = []
    for count in rows:
        labels = (random.random(count) < 0.3).astype(int)
        found.append((scale * (random.standard_normal(count) + gap * labels) + shift, labels))
    return found


def asked(sites, least=0, log=None):
    def ask(question, *arrays):
        replies = [answer(question, *site, *arrays, least=least) for site in sites]
        if log is not None:
            log.extend((question, reply.size) for reply in replies)
        return np.sum(replies, axis=0)

    return ask


def pooled(sites):
    return (np.concatenate(parts) for parts in zip(*sites, strict=True))


def platt_loss(at, scores, labels):
    """Platt's objective, written from his paper: cross-entropy with smoothed targets."""
    positives, negatives = labels.sum(), (1 - labels).sum()
    target = np.where(labels == 1, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    p = np.clip(1 / (1 + np.exp(-(at[0] * scores + at[1]))), 1e-300, 1 - 1e-16)
    return -np.sum(target * np.log(p) + (1 - target) * np.log(1 - p))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_platt_is_the_minimum_of_the_pooled_objective(scale):
    sites = sites_of(scale=scale, shift=3 * scale)
    scores, labels = pooled(sites)
    found = federated_platt(asked(sites))
    unit = minimize(
        lambda at: platt_loss((at[0] / scale, at[1]), scores, labels),
        [1.0, -3.0],
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 5000},
    )
    np.testing.assert_allclose([found.slope * scale, found.offset], unit.x, rtol=1e-5)
    # and stationary far beyond what a search without derivatives can tell
    positives, negatives = labels.sum(), (1 - labels).sum()
    target = np.where(labels == 1, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    error = found.probabilities(scores) - target
    assert abs(error.sum()) < 1e-9
    assert abs(error @ scores) < 1e-9 * scale


def test_platt_does_not_depend_on_who_holds_a_row():
    sites = sites_of()
    together = [tuple(pooled(sites))]
    one, other = federated_platt(asked(sites)), federated_platt(asked(together))
    np.testing.assert_allclose(one, other, rtol=1e-10)


def test_a_site_sends_three_numbers_and_then_six():
    log = []
    sites = sites_of()
    exchanges = federated_platt(asked(sites, log=log)).exchanges
    assert log == [("size", 3)] * 3 + [("platt", 6)] * 3 * (exchanges - 1)
    assert exchanges < 15


def test_the_answer_is_the_loss_with_its_own_derivatives():
    scores, labels = sites_of(rows=(40,))[0]
    targets, at, step = np.array([0.1, 0.8]), np.array([0.7, -0.4]), 1e-5

    def loss(at):
        return answer("platt", scores, labels, at, targets)[0]

    _, *rest = answer("platt", scores, labels, at, targets)
    slopes = [(loss(at + d) - loss(at - d)) / (2 * step) for d in step * np.eye(2)]
    np.testing.assert_allclose(rest[:2], slopes, rtol=1e-7)
    gradients = [
        (answer("platt", scores, labels, at + d, targets)[1:3]
        - answer("platt", scores, labels, at - d, targets)[1:3]) / (2 * step)
        for d in step * np.eye(2)
    ]  # fmt: skip
    hessian = [gradients[0][0], gradients[0][1], gradients[1][1]]
    np.testing.assert_allclose(rest[2:], hessian, rtol=1e-6)


def test_separated_classes_have_a_finite_slope():
    sites = [(np.array([-1.0, -2.0, 1.0, 2.0]), np.array([0, 0, 1, 1]))]
    found = federated_platt(asked(sites))
    assert 0.5 < found.slope < 5
    # Platt's targets are (2 + 1) / (2 + 2): nothing is certain from four rows.
    assert 0.5 < found.probabilities(2.0) < 0.95


@pytest.mark.parametrize("gap", [-2.0, 0.0])
def test_a_ranking_is_never_reversed(gap):
    sites = sites_of(gap=gap, seed=3)
    if gap == 0:
        sites = [(np.full(4, 0.3), np.array([0, 1, 0, 0]))]  # scores that are all alike
    scores, labels = pooled(sites)
    found = federated_platt(asked(sites))
    size = np.sqrt(np.mean(scores**2))
    assert found.slope >= LEAST_SLOPE / size * (1 - 1e-9)
    assert np.all(np.diff(found.probabilities(np.sort(np.unique(scores)))) > 0)
    smoothed = (labels.sum() * (labels.sum() + 1) / (labels.sum() + 2)
                + (1 - labels).sum() / ((1 - labels).sum() + 2)) / len(labels)  # fmt: skip
    assert found.probabilities(scores).mean() == pytest.approx(smoothed, abs=1e-4)


def test_one_class_cannot_be_calibrated():
    sites = [(np.array([0.1, 0.2]), np.array([1, 1]))]
    with pytest.raises(ValueError, match="0 negatives and 2 positives; both are needed"):
        federated_platt(asked(sites))
    with pytest.raises(ValueError, match="0 negatives and 2 positives; both are needed"):
        operating_point(federated_counts(asked(sites)), "sensitivity", 0.9)


def test_the_sigmoid_is_right_far_out():
    values = np.array([-800.0, -40.0, 0.0, 40.0, 800.0])
    expected = [0.0, np.exp(-40.0), 0.5, 1.0, 1.0]
    np.testing.assert_allclose(sigmoid(values), expected, rtol=1e-15)


def test_isotonic_is_that_of_the_pooled_rows():
    sites = sites_of()
    scores, labels = pooled(sites)
    found = isotonic_from(federated_counts(asked(sites)))
    pooled_fit = IsotonicRegression(out_of_bounds="clip").fit(scores, labels)
    # Rows that share a bin are not told apart: hardly any do.
    assert np.mean(np.abs(found.probabilities(scores) - pooled_fit.predict(scores)) > 1e-9) < 0.05
    grid = np.linspace(-10, 10, 1001)
    assert np.all(np.diff(found.probabilities(grid)) >= 0)
    assert found.probabilities(scores).mean() == pytest.approx(labels.mean())


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_the_score_at_a_probability_divides_the_rows(kind):
    sites = sites_of(seed=5)
    scores, _ = pooled(sites)
    ask = asked(sites)
    found = federated_platt(ask) if kind == "platt" else isotonic_from(federated_counts(ask))
    for probability in (0.05, 0.2, 0.5, 0.77, 0.99):
        above = scores > found.score_at(probability)
        np.testing.assert_array_equal(above, found.probabilities(scores) > probability)


def test_an_isotonic_map_may_have_all_rows_on_one_side():
    flat = Isotonic(np.array([0.0]), np.array([0.3]))
    assert flat.score_at(0.5) == LARGEST
    assert flat.score_at(0.1) == -LARGEST


def test_maps_survive_json():
    ask = asked(sites_of())
    grid = np.linspace(-4, 4, 50)
    for found in (federated_platt(ask), isotonic_from(federated_counts(ask))):
        again = from_json(found.to_json())
        assert type(again) is type(found)
        np.testing.assert_array_equal(again.probabilities(grid), found.probabilities(grid))


@pytest.mark.parametrize("value", [0.5, 0.8, 0.9, 0.99])
@pytest.mark.parametrize("wanted", ["sensitivity", "specificity"])
def test_an_operating_point_is_a_corner_of_the_pooled_roc_curve(wanted, value):
    sites = sites_of(rows=(200, 100, 50))
    scores, labels = pooled(sites)
    found = operating_point(federated_counts(asked(sites)), wanted, value)
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    best = (1 - false)[true >= value].max() if wanted == "sensitivity" else (
        true[1 - false >= value].max())  # fmt: skip
    other = found.specificity if wanted == "sensitivity" else found.sensitivity
    assert getattr(found, wanted) >= value
    assert other == pytest.approx(best, abs=1e-12)
    # The rates are those of the rows themselves, not of the bins.
    above = scores > found.score
    assert found.sensitivity == above[labels == 1].mean()
    assert found.specificity == (~above)[labels == 0].mean()


def test_rates_at_any_score_are_those_of_the_bins():
    histogram = federated_counts(asked(sites_of()))
    edge = histogram.edges[len(histogram.edges) // 2]
    just = at_score(histogram, np.nextafter(edge, -np.inf))
    inside = at_score(histogram, edge)
    assert just.sensitivity >= inside.sensitivity
    assert just.specificity <= inside.specificity
    assert at_score(histogram, LARGEST)[1:] == (0.0, 1.0)
    assert at_score(histogram, -LARGEST).sensitivity == 1.0


def test_an_unknown_rate_is_refused():
    histogram = federated_counts(asked(sites_of()))
    with pytest.raises(ValueError, match="'precision' is no rate to choose by"):
        operating_point(histogram, "precision", 0.9)


def test_small_counts_are_withheld_here_too():
    sites = sites_of(rows=(300, 200, 6))
    counted = federated_counts(asked(sites, least=5), least=5)
    assert counted.withheld[1] == 1  # the small site has fewer than five positives
    assert counted.counts[1].sum() == sum(s[1].sum() for s in sites[:2])
    for scores, labels in sites[:2]:
        own = answer("histogram", scores, labels, counted.edges)
        assert not ((own > 0) & (own < 5)).any()


def test_platt_is_plain_arithmetic():
    found = Platt(2.0, -1.0)
    assert found.score_at(0.5) == 0.5
    assert found.probabilities(found.score_at(0.8)) == pytest.approx(0.8)


def test_scores_that_lie_on_an_edge_count_as_above_it():
    labels = np.array([0, 0, 0, 1, 0, 1, 1, 1])
    sites = [(np.array([0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0]), labels)]
    ((scores, _),) = sites
    for value, expected in ((0.5, 1.0), (0.9, 0.5)):
        found = operating_point(federated_counts(asked(sites)), "sensitivity", value)
        np.testing.assert_array_equal(scores > found.score, scores >= expected)
        assert found.sensitivity == (scores >= expected)[labels == 1].mean()
