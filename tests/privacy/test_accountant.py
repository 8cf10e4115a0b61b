"""The accountant against dp-accounting and Opacus, and against itself."""

from itertools import product

import dp_accounting
import pytest
from dp_accounting import pld

from fedminimax.privacy.accountant import (
    delta_of,
    epsilon_of,
    mu2_of,
    noise_for,
    sampled_epsilon,
    sampled_noise,
)

QUICK = [(2.0, 1, 1e-5), (40.0, 240, 1e-5), (40.0, 2000, 1e-7)]
GRID = list(product((5.0, 10.0, 40.0), (1, 24, 240, 1000), (1e-5, 1e-7, 1e-3)))


def by_pld(noise: float, times: int, delta: float) -> float:
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.GaussianDpEvent(noise / times**0.5)
    accountant.compose(event)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("noise", "times", "delta"),
    [*QUICK, *(pytest.param(*point, marks=pytest.mark.slow) for point in GRID)],
)
def test_all_rows_in_closed_form_agree_with_dp_accounting(noise, times, delta):
    found = epsilon_of(times / noise**2, delta)
    assert found == pytest.approx(by_pld(noise, times, delta), rel=1e-2)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_calibrated_noise_spends_the_budget_and_no_more(epsilon, delta):
    noise = noise_for(epsilon, delta, 300)
    assert epsilon_of(300 / noise**2, delta) == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(mu2_of(epsilon, delta) ** 0.5, epsilon) == pytest.approx(delta, rel=1e-6)


def test_nothing_released_spends_nothing_and_too_much_is_infinite():
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(1e13, 1e-5) == float("inf")
    assert epsilon_of(2.0, 1e-5) > epsilon_of(1.0, 1e-5) > epsilon_of(1.0, 1e-3)


@pytest.mark.slow
def test_secret_samples_spend_less_and_all_rows_the_same():
    assert sampled_epsilon(1.0, 6.0, 240, 1e-5) == epsilon_of(240 / 36, 1e-5)
    assert sampled_epsilon(0.44, 6.0, 240, 1e-5) == pytest.approx(5.160, rel=1e-2)
    assert sampled_epsilon(0.44, 6.0, 240, 1e-5) < sampled_epsilon(1.0, 6.0, 240, 1e-5)
    noise = sampled_noise(3.0, 1e-5, 0.16, 100)
    assert 2.99 < sampled_epsilon(0.16, noise, 100, 1e-5) <= 3.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("share", "noise", "times"), [(0.01, 1.0, 1000), (0.16, 3.0, 300), (0.44, 6.0, 240)]
)
def test_secret_samples_agree_with_the_prv_accountant_of_opacus(share, noise, times):
    accountants = pytest.importorskip("opacus.accountants", reason="a check of full tests only")
    other = accountants.PRVAccountant()
    other.history = [(noise, share, times)]
    known = other.get_epsilon(1e-5, eps_error=0.005)
    assert sampled_epsilon(share, noise, times, 1e-5) == pytest.approx(known, rel=1e-2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: epsilon_of(1.0, 0.0), "delta is 0.0; give a number between 0 and 0.5"),
        (lambda: epsilon_of(-1.0, 1e-5), "give a sum of squares, of at least 0"),
        (lambda: mu2_of(0.0, 1e-5), "epsilon is 0.0; give a number above 0"),
        (lambda: noise_for(1.0, 1e-5, 0), "give how many there are, at least 1"),
    ],
)
def test_what_is_no_budget_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
