"""How far apart clients are at the end of a round, from means alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedminimax.messages.stage import Message, Stage, bytes_of
from fedminimax.types import Clock, Point


class Ends(NamedTuple):
    """A reply, and where its client ended."""

    up: Message
    moves: tuple[Tensor, ...]  # of x and of y, from the server's point
    squares: Tensor  # of their lengths


class Found(NamedTuple):
    drift_x: Tensor
    drift_y: Tensor
    bytes: Tensor  # what the stage added to the replies of a round


@dataclass(frozen=True)
class Drift(Stage):
    """Measures client drift in a round, whose training it does not change.

    The drift of x is the root of the weighted mean of |x_k - mean|^2, with x_k where client k is
    after its local steps; that of y likewise. The server learns means only: of x_k - x and of
    |x_k - x|^2, with x its own point when the round began. In a level-wise synchronisation a client
    sends where it moves next; compared is its x before that last move.
    """

    point: Point  # the server's, when the round begins

    def init_server(self, up: Message) -> Found:
        zero = self.point.x.new_zeros(())
        return Found(zero, zero, zero)

    def at_client(
        self, down: Any, client: Any, up: Any, kept: Any, clock: Clock
    ) -> tuple[Ends, Any]:
        ends = zip(self.point, (getattr(client, name, None) for name in Point._fields), strict=True)
        # In a phase that does not move a player a client need not have it.
        moves = tuple(start[:0] if end is None else end - start for start, end in ends)
        return Ends(up, moves, torch.stack([move.square().sum() for move in moves])), kept

    def at_server(
        self, state: Found, down: Message, mean: Ends, clock: Clock
    ) -> tuple[Message, Found]:
        pairs = zip(mean.squares, mean.moves, strict=True)
        x, y = ((square - move.square().sum()).clamp(min=0).sqrt() for square, move in pairs)
        added = state.bytes + clock.replies * bytes_of(mean[1:])
        return mean.up, Found(x, y, added)

    def inside(self, up: Ends) -> Message:
        return up.up  # what is added is not training
