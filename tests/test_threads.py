"""A client per thread: what clients return is stacked as it is, copied once or not."""

import torch

from fedminimax.engine.threads import Stacked


def test_what_stands_twice_is_stacked_once():
    stacked = Stacked(2)
    for position in range(2):
        sent = torch.full((3,), float(position))
        stacked.put(position, [sent, sent + 10, sent])
    first, other, again = stacked.whole()
    assert again is first
    assert first[:, 0].tolist() == [0, 1]
    assert other[:, 0].tolist() == [10, 11]


def test_clients_of_which_only_some_return_a_tensor_twice_keep_what_is_theirs():
    stacked = Stacked(3)
    one, two, three = (torch.full((3,), float(k)) for k in range(3))
    stacked.put(0, [one, one])
    stacked.put(1, [two, two + 10])
    stacked.put(2, [three, three])
    first, second = stacked.whole()
    assert first[:, 0].tolist() == [0, 1, 2]
    assert second[:, 0].tolist() == [0, 11, 2]
