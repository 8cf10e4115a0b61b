"""What `fedminimax list methods` says, against the papers' own counts."""

from __future__ import annotations

import pytest

from fedminimax.algorithms import METHODS
from fedminimax.report.traits import traits

FLOATS = {
    # method: up, down, in an ordinary round
    "fedavg": ("dx", "dx"),
    "local_sgdm": ("2 dx", "2 dx"),
    "scaffold": ("2 dx", "2 dx"),
    "coda_plus": ("dx + dy", "dx + dy"),
    "codasca": ("2 (dx + dy)", "2 (dx + dy)"),
    "ada_fgda": ("2 (dx + dy)", "3 (dx + dy)"),
    "fed_norm_sgda": ("dx + dy + 1", "dx + dy"),
    "fednest": ("2 dx + 10 dy", "2 dx + 11 dy"),
    "drfa": ("2 dx + N", "2 dx"),
    "afl": ("dx + N", "dx + N"),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_those_of_the_papers(name):
    found = traits(METHODS[name])
    assert (found.up, found.down) == FLOATS[name]


@pytest.mark.parametrize(
    ("name", "gradients", "exchanges", "partial"),
    [
        ("local_sgda", "1", 1, False),
        ("fgda", "2", 1, False),
        ("cdma_one", "2 + 1 on all rows a round", 2, True),
        ("sagda", "1 + 1 a round", 2, True),
        ("fednest", "2 + 6 on all rows a round", 12, True),
    ],
)
def test_work_is_that_of_the_papers(name, gradients, exchanges, partial):
    found = traits(METHODS[name])
    assert (found.gradients, found.exchanges, found.partial) == (gradients, exchanges, partial)
