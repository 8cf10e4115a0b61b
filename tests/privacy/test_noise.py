"""Noise: standard normal, the same for the same call, and independent of that of any other."""

import pytest
import torch
from scipy.stats import kstest

from fedminimax.privacy.noise import Secret, Seeded
from fedminimax.types import Clock

SOURCES = [Seeded(7), Secret(bytes(range(32)), "digest of a call")]
ZEROS = torch.zeros(20_000, dtype=torch.float64)


@pytest.mark.parametrize("source", SOURCES, ids=["seeded", "secret"])
def test_noise_is_standard_normal(source):
    drawn = source.at(Clock.at(client=2, round=5), False)(1, ZEROS)
    assert kstest(drawn.numpy(), "norm").pvalue > 1e-6
    halves = drawn.reshape(2, -1)
    assert abs(torch.corrcoef(halves)[0, 1]) < 0.05


@pytest.mark.parametrize("source", SOURCES, ids=["seeded", "secret"])
def test_each_call_has_its_own_noise_and_the_same_again(source):
    def drawn(call=1, begins=False, **when):
        return source.at(Clock.at(**when), begins)(call, ZEROS)

    first = drawn()
    assert torch.equal(first, drawn())
    others = [drawn(call=2), drawn(begins=True), drawn(step=1), drawn(phase=1), drawn(round=1)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.05


def test_noise_of_a_site_depends_on_its_secret_and_on_the_call():
    first = Secret(b"a" * 32, "one").at(Clock.at(), False)(1, ZEROS)
    for secret, digest in ((b"b" * 32, "one"), (b"a" * 32, "two")):
        other = Secret(secret, digest).at(Clock.at(), False)(1, ZEROS)
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.05


def test_a_secret_is_not_told_by_its_text():
    assert "aaaa" not in repr(Secret(b"a" * 32, "one"))


def test_seeded_noise_is_the_same_for_many_clients_at_once():
    clients = torch.arange(3)
    clock = Clock.at(round=4, step=2)
    alone = torch.stack(
        [Seeded(1).at(clock._replace(client=k), False)(1, ZEROS[:5]) for k in clients]
    )
    together = torch.func.vmap(
        lambda k: Seeded(1).at(clock._replace(client=k), False)(1, ZEROS[:5])
    )(clients)
    assert torch.equal(alone, together)
    assert not torch.equal(alone[0], alone[1])
