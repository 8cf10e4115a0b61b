"""The three readings of a synchronisation in Algorithm 1 of the AdaFGDA paper: which iterations of
it are local steps of a round."""

from __future__ import annotations

from typing import Literal, get_args

from fedminimax.types import Clock

Sync = Literal["track", "reaverage", "literal"]


def steps_of(sync: Sync, local_steps: int, round: int) -> int:
    """The local steps of a round. The box has q - 1 of them, t = 1 to q - 1, before it synchronises
    at t = q; with "track" clients make that iteration's move themselves, at the start of the next
    round."""
    return local_steps if sync == "track" and round > 0 else local_steps - 1


def clock_of(sync: Sync, clock: Clock) -> Clock:
    """The clock with t - 1 as its iteration. The engine counts batches, of which the
    synchronisation of "literal" draws none."""
    return clock._replace(iteration=clock.iteration + clock.round) if sync == "literal" else clock


def check_sync(owner: str, sync: str, local_steps: int) -> None:
    if sync not in get_args(Sync):
        known = ", ".join(get_args(Sync))
        raise ValueError(f"{owner}: sync is {sync!r}; give one of {known}")
    if sync == "literal" and local_steps < 2:
        raise ValueError(
            f"{owner}: local_steps is {local_steps}, but with sync = 'literal' an iteration that "
            "synchronises updates no estimate, and no other would be left: give at least 2"
        )
