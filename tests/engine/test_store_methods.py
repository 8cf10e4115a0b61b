"""Every method that keeps client states computes the same with a store in memory and on disk."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from rows import federation_of
from table import ROWS

from fedminimax.blocks.trees import flat
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.engine.state.disk_store import DiskStore
from fedminimax.engine.state.store import Store

KEEPING = [row for row in ROWS if row.algorithm.keep]
FAST = ("codasca", "scgdam", "nlasg")  # whole numbers, and fields with a part for each level


@pytest.mark.parametrize(
    "row",
    [row if row.name in FAST else pytest.param(row, marks=pytest.mark.slow) for row in KEEPING],
    ids=lambda row: row.name,
)
def test_a_method_computes_the_same_bits_with_either_store(row, tmp_path):
    found = []
    for kind in (Store, lambda keep: DiskStore(keep, 99, tmp_path)):
        federation, state, _ = federation_of(row.problem(), row.algorithm, row.clients())
        with closing(kind(federation.algorithm.keep)) as store:
            store.restore(0, {})
            for _ in range(2):
                state = play_round(federation, state, store, Debug())
                store.checkpoint()
                # Nothing is left in memory of what the next round needs.
                store._cohort, store._stacked = store._cohort[:0], None
            found.append((flat(state.server), {k: flat(v) for k, v in store.states.items()}))
    (server, states), (other_server, others) = found
    assert states
    assert states.keys() == others.keys()
    for a, b in [(server, other_server), *((states[k], others[k]) for k in states)]:
        assert all(torch.equal(v, w) and v.dtype == w.dtype for v, w in zip(a, b, strict=True))
