"""Clients one by one in the calling thread: breakpoints work, and an error says where it was."""

from __future__ import annotations

from fedminimax.blocks.parted import join_parts
from fedminimax.blocks.trees import tree_map
from fedminimax.engine.job import (
    ClientError,
    ClientResult,
    Executor,
    PhaseJob,
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

    def run(self, job: PhaseJob) -> ClientResult:
        return stack([run_client(job, position) for position in range(len(job.cohort))])


def run_client(job: PhaseJob, position: int) -> ClientResult:
    """A whole phase of one client."""
    return tree_map(join_parts, run_in_parts(job, position))


def run_in_parts(job: PhaseJob, position: int) -> ClientResult:
    """`run_client`, with vectors that may be in parts."""
    clock, steps = job.client_clock(position), int(job.steps[position])
    number = 0
    try:
        client = begin(job, job.client_kept(position), clock)
        for number in range(steps):
            draw = job.draws.client(position, number, job.problem.depth)
            client = step(job, client, draw, at_step(clock, number))
        return finish(job, client, at_step(clock, steps))
    except Exception as error:
        raise ClientError(f"{place(job, position, number)}: {error}") from error


def find_non_finite(job: PhaseJob) -> str | None:
    """The phase again, step by step, to name the first variable that is not finite."""
    for position in range(len(job.cohort)):
        clock = job.client_clock(position)
        client = begin(job, job.client_kept(position), clock)
        for number in range(int(job.steps[position])):
            draw = job.draws.client(position, number, job.problem.depth)
            client = step(job, client, draw, at_step(clock, number))
            if bad := bad_field(client.client):
                return f"non-finite {bad} at {place(job, position, number)}"
    return None
