"""What `fedminimax list METHOD` says, against the papers' own counts."""

from __future__ import annotations

import re

import pytest

from fedminimax.algorithms import METHODS
from fedminimax.report.traits import _posed, _second_round, _sizes, gradients, traits

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
    ("name", "kept"),
    [
        ("sagda", "0"),
        ("scaffold", "dx"),  # its control
        ("codasca", "2 dx + dy + 1"),  # two controls, the centre, and which stage it is of
        ("local_scgdam", "d0 + d1 + d2 + dy"),  # momenta and inner values
    ],
)
def test_what_clients_keep_is_counted(name, kept):
    assert traits(METHODS[name]).kept == kept


@pytest.mark.parametrize(
    ("name", "gradients", "exchanges", "partial"),
    [
        ("local_sgda", "1", 1, False),
        ("fgda", "2", 1, False),
        ("cdma_one", "2 + 1 on all rows a round", 2, True),
        ("sagda", "1 + 1 a round", 2, True),
        ("fednest", "2 + 80 + 6 on all rows a round", 12, True),
        ("smoothed_agda", "2", 2, False),
        ("local_sgdm_rl", "1 + 2 on the server's rows a round", 2, False),
        ("levelwise_dr_scgda", "2", 6, False),
    ],
)
def test_work_is_that_of_the_papers(name, gradients, exchanges, partial):
    found = traits(METHODS[name])
    assert (found.gradients, found.exchanges, found.partial) == (gradients, exchanges, partial)


@pytest.mark.parametrize("name", METHODS)
def test_the_gradients_told_are_those_counted(name):
    method = METHODS[name]()
    sizes = _sizes(method)[0]
    problem = _posed(method, sizes)[0]
    method = method.for_problem(problem)
    told = re.fullmatch(
        r"(\d+)(?: \+ (\d+))?(?: \+ (\d+) on all rows)?(?: \+ (\d+) on the server's rows)?"
        r"(?: a round)?",
        gradients(method),
    )
    assert told, gradients(method)
    step, batches, whole, own = (int(number or 0) for number in told.groups())
    each = [step * method.steps(1, k) + batches + whole for k in range(sizes.clients)]
    counted = _second_round(method, sizes)[1].gradients
    assert counted == (sum(each) + own) * problem.sweep_gradients
