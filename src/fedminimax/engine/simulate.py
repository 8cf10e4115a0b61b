"""`simulate`: a whole run from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.local import Local
from fedminimax.engine.profile import Profile
from fedminimax.engine.session import Run, Session
from fedminimax.engine.settings import Callbacks, Settings
from fedminimax.messages.stage import Messages, Reducer, Stage
from fedminimax.privacy.settings import Privacy
from fedminimax.types import Algorithm, Point, Problem


def simulate(
    problem: Problem,
    algorithm: Algorithm,
    clients: Clients,
    rounds: int,
    seed: int = 0,
    cohort: int | None = None,
    executor: str = "auto",
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    precision: torch.dtype | None = None,
    evaluate_every: int = 10,
    stop_early: int | None = None,
    target: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    start: Point | Tensor | nn.Module | None = None,
    allow_partial: bool = False,
    checkpoint_every: int | None = None,
    measures: Sequence[str] = (),
    store: str = "memory",
    messages: Messages | Sequence[Stage | Reducer] | None = None,
    privacy: Privacy | None = None,
    evaluate_clients: int | None = None,
    resume: bool = False,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    on_round: Callable[[int], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    profile: Profile | None = None,
    backend: Backend | None = None,
) -> Run:
    """Runs `algorithm` on `problem` across `clients` for `rounds` rounds.

    Returns the `Run`: the last point, the record of each evaluation, how the run ended, and the
    trained module.

    - seed: decides every batch and cohort; the same seed gives the same run.
    - cohort: clients per round, drawn anew in each; None: all.
    - executor: "auto", "debug", "threads", "vectorised" or "compiled": how clients are mapped, not
      what is computed.
    - device: "cpu", "cuda" or "mps": where all of it is computed; None: on the CPU.
    - precision: torch.bfloat16 computes the network's forward and backward pass of training in that
      precision, while all vectors stay as they are.
    - evaluate_every: rounds between evaluations, on the validation and test rows, or on the
      training rows if there are neither.
    - stop_early: end after so many evaluations without a better monitored metric on validation
      rows.
    - target: end when the monitored metric is this good, on validation rows, or on training rows if
      there are neither validation nor test rows.
    - folder: where to write environment, history, checkpoints and result; with `resume`, where to
      go on from.
    - start: a warm start: a point, the vector x, or a module with the weights to start from.
    - allow_partial: let a method that is defined for all clients run with some.
    - checkpoint_every: rounds between checkpoints; None: as often as evaluations.
    - measures: optimality measures (metrics/optimality.py) to log with each evaluation, computed on
      all training rows.
    - store: where clients' states are between rounds, "memory" or "disk": in the folder of the run,
      or in a temporary one; for many clients, of which only a cohort is in memory at a time.
    - messages: what happens to replies on their way: stages such as Clip(1.0), and last at most one
      reducer such as Median() in place of the weighted mean (fedminimax.messages).
    - privacy: the promise of the run, such as Privacy("record", epsilon=3.0); None: none.
    - evaluate_clients: how many clients evaluations ask, drawn once by the seed; None: all. Their
      weights add up to one. What the problem learns before the first round it asks all clients.
    - on_record: called with each record. on_round: called with the number of rounds played, after
      each round, or after several that were played at once.
    - interrupted: asked after each round, or after several; once it is true, a checkpoint is
      written to the folder and Interrupted, a KeyboardInterrupt, raised.
    - profile: told where the time goes.
    - backend: who carries the clients, such as the processes that `join_processes()` of
      engine/backends/torchrun.py gives; None: this process.
    """
    settings = Settings(
        rounds=rounds,
        seed=seed,
        cohort=cohort,
        allow_partial=allow_partial,
        executor=executor,  # type: ignore[arg-type]  any text: it is checked when it is made
        dtype=_name(dtype),
        store=store,  # type: ignore[arg-type]  as above
        device=_name(device),
        precision=_name(precision),
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        stop_early=stop_early,
        target=target,
        measures=tuple(measures),
        evaluate_clients=evaluate_clients,
    )
    return Session(
        problem=problem,
        algorithm=algorithm,
        clients=clients,
        settings=settings,
        messages=Messages.of(messages),
        privacy=privacy or Privacy(),
        start=start,
        folder=folder,
        resume=resume,
        backend=backend or Local(),
        callbacks=Callbacks(on_record, on_round, interrupted, profile),
    ).run()


def _name(given: Any) -> Any:
    """A device or a precision as a setting."""
    return None if given is None else str(given).removeprefix("torch.")
