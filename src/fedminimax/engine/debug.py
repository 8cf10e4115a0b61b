"""Clients one by one in the calling thread: breakpoints work, and an error says where it was."""

from __future__ import annotations

from fedminimax.blocks.parted import whole
from fedminimax.blocks.trees import tree_map
from fedminimax.engine.work import (
    ClientError,
    Executor,
    Result,
    Work,
    at_step,
    bad_field,
    begin,
    finish,
    place,
    stack,
    step,
)


class Debug(Executor):
    name = "debug"

    def run(self, work: Work) -> Result:
        return stack([run_client(work, position) for position in range(len(work.cohort))])


def run_client(work: Work, position: int) -> Result:
    """A whole phase of one client."""
    return tree_map(whole, run_in_parts(work, position))


def run_in_parts(work: Work, position: int) -> Result:
    """`run_client`, with vectors that may be in parts."""
    clock, steps = work.client_clock(position), int(work.steps[position])
    number = 0
    try:
        client = begin(work, work.client_kept(position), clock)
        for number in range(steps):
            draw = work.draws.client(position, number, work.problem.depth)
            client = step(work, client, draw, at_step(clock, number))
        return finish(work, client, at_step(clock, steps))
    except Exception as error:
        raise ClientError(f"{place(work, position, number)}: {error}") from error


def find_non_finite(work: Work) -> str | None:
    """The phase again, step by step, to name the first variable that is not finite."""
    for position in range(len(work.cohort)):
        clock = work.client_clock(position)
        client = begin(work, work.client_kept(position), clock)
        for number in range(int(work.steps[position])):
            draw = work.draws.client(position, number, work.problem.depth)
            client = step(work, client, draw, at_step(clock, number))
            if bad := bad_field(client.client):
                return f"non-finite {bad} at {place(work, position, number)}"
    return None
