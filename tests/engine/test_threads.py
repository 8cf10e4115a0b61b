"""A client per thread: what clients return is stacked as it is, copied once or not."""

import pytest
import torch

from fedminimax.blocks.parted import Parted
from fedminimax.engine.executors.choose import Choice, _settle
from fedminimax.engine.executors.threads import Stacked


def test_what_stands_twice_is_stacked_once():
    stacked = Stacked(2)
    for position in range(2):
        sent = torch.full((3,), float(position))
        stacked.put(position, [sent, sent + 10, sent])
    first, other, again = stacked.stack()
    assert again is first
    assert first[:, 0].tolist() == [0, 1]
    assert other[:, 0].tolist() == [10, 11]


def test_clients_of_which_only_some_return_a_tensor_twice_keep_what_is_theirs():
    stacked = Stacked(3)
    one, two, three = (torch.full((3,), float(k)) for k in range(3))
    stacked.put(0, [one, one])
    stacked.put(1, [two, two + 10])
    stacked.put(2, [three, three])
    first, second = stacked.stack()
    assert first[:, 0].tolist() == [0, 1, 2]
    assert second[:, 0].tolist() == [0, 11, 2]


def test_what_clients_keep_unchanged_is_not_copied():
    before = torch.arange(6.0).reshape(2, 3)
    stacked = Stacked(2, [before])
    for position in range(2):
        stacked.put(position, [before[position], before[position] + 10])
    kept, new = stacked.stack()
    assert kept is before
    assert new.tolist() == (before + 10).tolist()


def test_what_only_some_clients_keep_unchanged_is_theirs():
    before = torch.arange(6.0).reshape(2, 3)
    stacked = Stacked(2, [before])
    stacked.put(0, [before[0]])
    stacked.put(1, [before[1] + 10])
    (kept,) = stacked.stack()
    assert kept.tolist() == [[0, 1, 2], [13, 14, 15]]
    assert before.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_kept_matrix_that_is_turned_is_another_one():
    before = torch.arange(8.0).reshape(2, 2, 2)
    stacked = Stacked(2, [before])
    for position in range(2):
        stacked.put(position, [before[position].T])
    (kept,) = stacked.stack()
    assert torch.equal(kept, before.transpose(1, 2))


def test_a_vector_in_parts_is_a_row():
    stacked = Stacked(2, [torch.zeros(2, 3)])
    for position in range(2):
        sent = Parted([torch.full((2,), float(position)), torch.ones(1)])
        stacked.put(position, [sent, sent])
    first, again = stacked.stack()
    assert again is first
    assert first.tolist() == [[0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 1.2, 0.8), 0),  # a close race of short steps
        ((2.0, 1.2, 1.1), 2),
        ((2.0, 1.0, 1.2), 2),
        ((2.0, 1.0, 1.5), 1),
        ((13.0, 12.0, 10.0), 2),  # long steps
        ((10.0, 12.0, 12.0), 0),
        ((90.0, 60.0, 200.0), 0),
    ],
)
def test_a_close_race_is_not_decided_by_noise(seconds, chosen):
    names = (("vectorised", 1), ("vectorised", 2), ("threads", 2))
    timed = [Choice(*of, s / 1000) for of, s in zip(names, seconds, strict=True)]
    assert _settle(timed) is timed[chosen]
