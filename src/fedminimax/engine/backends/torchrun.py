"""A run shared by the processes that torchrun started.

Each process runs the same program on the same data and holds the same server. It computes the local
steps of its own clients only, those whose number leaves its rank when divided by the number of
processes, and keeps their states. A mean is the sum over processes of each one's part of it, by
all_reduce; questions are answered by each process for its clients, and the answers go to all.

Before anything else is exchanged, every process says where it is in the run and whether it has
failed. So an error at one ends all, with its sentence, and processes that have come apart notice.
Nothing is pickled: what has no fixed shape travels as safetensors or JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import zlib
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from fedminimax.blocks.trees import build_tree, flat, form_of, leaves, rebuild, tree_map
from fedminimax.data.clients import Clients
from fedminimax.engine.backends.base import Backend
from fedminimax.engine.backends.local import Local
from fedminimax.engine.device import usable_cores
from fedminimax.engine.executors import choose
from fedminimax.engine.job import (
    ClientResult,
    Executor,
    InitialState,
    PhaseJob,
    Reduced,
    bad_field,
    initial_state,
)
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.state.folder import RunFolder
from fedminimax.messages.stage import MessageState
from fedminimax.types import Cost, Problem

if TYPE_CHECKING:
    from fedminimax.engine.round import Federation

TIMEOUT = 1800.0  # seconds
STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a process
NUMBERS = 2  # that a process can tell at once
PIECE = 1 << 28  # bytes in one message


class PeerError(RuntimeError):
    """Another process of the run has failed: its sentence."""


class LostError(PeerError):
    """Another process is gone, or does not answer."""


def started_by_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return all(name in os.environ for name in STARTED)


def rank() -> int:
    """This process's number, also before it has joined the others."""
    return int(os.environ["RANK"]) if started_by_torchrun() else 0


@contextmanager
def join_processes(timeout: float = TIMEOUT) -> Iterator[Backend]:
    """The backend of a program that torchrun may have started: all of its processes, or this one.

    A process that has not heard from the others for `timeout` seconds gives up.
    """
    if not started_by_torchrun():
        yield Local()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with _lost_connection(timeout):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    peers = Torchrun(dist.get_rank(), dist.get_world_size(), timeout)
    try:
        with peers.together(), _ended_by_torchrun():
            yield peers
            peers.share("the end")
    except LostError:
        raise
    except BaseException:
        peers.wait_for_the_first()
        raise
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Ends the process. One of several ends at once: a thread of gloo's that still holds a tensor
    would abort a Python that is being taken down."""
    if not started_by_torchrun():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Torchrun(Backend):
    """All processes of a run, seen from one of them."""

    def __init__(self, rank: int, size: int, timeout: float = TIMEOUT):
        self.rank, self.size, self.timeout = rank, size, timeout
        self._over = False  # has a process failed?

    def owns(self, client: int) -> bool:
        return client % self.size == self.rank

    def own(self, cohort: np.ndarray) -> np.ndarray:
        return np.flatnonzero(cohort % self.size == self.rank)

    def device(self, chosen: torch.device) -> torch.device:
        if chosen.type != "cuda" or chosen.index is not None:
            return chosen
        number = int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def executor(self, name: str, threads: int | None, rounds: int) -> Executor:
        # A compiled round has the mean and the server's step inside, between which others come in.
        name = "vectorised" if name == "compiled" else name
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        cores = max(1, usable_cores() // beside)
        return choose.make(name, threads, cores=cores)

    def query(
        self,
        problem: Problem,
        clients: Clients,
        split: str,
        weights: Tensor,
        numbers: np.ndarray | None = None,
    ) -> LocalQuery:
        return TorchrunQuery(problem, clients, split, weights, numbers, self)

    def folder(self, path: str | os.PathLike) -> RunFolder:
        return RunFolder(path) if self.leads else ReadOnlyFolder(path)

    def map(self, job: PhaseJob, executor: Executor) -> ClientResult:
        return executor.run(job) if len(job.cohort) else ClientResult((), job.leave())

    def reduce(self, job: PhaseJob, found: ClientResult) -> Reduced:
        place = f"round {int(job.clock.round)}, phase {int(job.clock.phase)}"
        if job.messages.reducer.linear:
            return self._mean(job, found, place)
        return self._gather_replies(job, found, place)

    def _mean(self, job: PhaseJob, found: ClientResult, place: str) -> Reduced:
        """The sum over processes of each one's part of the weighted mean."""
        here, reducer = len(job.cohort), job.messages.reducer
        own = reducer.part(found.up, job.weights) if here else None
        like = tree_map(lambda field: field[0], found.up) if here else None
        # Words of what is not finite do not tell of it.
        told_of = found.up if reducer.masked else own
        flawed = bool(here) and bad_field(told_of, found.kept) is not None
        told = self.share(place, here, int(flawed))
        busy = [rank for rank, numbers in enumerate(told) if numbers[0]]
        if sum(numbers[0] for numbers in told) != int(job.clock.replies):
            raise ValueError(f"{place}: the processes have not drawn the same clients")
        if len(busy) < self.size:
            # A process without clients in this phase does not know what they send.
            forms = json.loads(self.text_of(busy[0], json.dumps([_form(own), _form(like)])))
            if not here:
                own, like = (_blank(form, job.clock.round.device) for form in forms)
        arrived = reducer.finish(self._sum_of(own), like)
        return Reduced(arrived, job.held, any(numbers[1] for numbers in told))

    def _gather_replies(self, job: PhaseJob, found: ClientResult, place: str) -> Reduced:
        """What the reducer makes of all replies, at every process."""
        here = len(job.cohort)
        flawed = bool(here) and bad_field(found.up, found.kept) is not None
        told = self.share(place, int(flawed))
        own: dict[str, Tensor] = {}
        if here:
            own = dict(leaves(found.up))
            own |= {"": job.weights, " ": torch.from_numpy(job.cohort)}
        parts = [load(c) for c in self.from_all(f"the replies of {place}", _pack(own))]
        source = next(rank for rank, part in enumerate(parts) if part)
        form = json.loads(self.text_of(source, json.dumps(form_of(found.up) if own else None)))
        joined = {n: torch.cat([part[n] for part in parts if part]) for n in parts[source]}
        # In client order, whichever process has which.
        order = joined.pop(" ").argsort(stable=True)
        weights, device = joined.pop("")[order], job.clock.round.device
        ups = build_tree(form, {n: v[order].to(device) for n, v in joined.items()})
        arrived, held = job.messages.reduce(job.held, job.down, ups, weights, job.clock)
        return Reduced(arrived, held, any(numbers[0] for numbers in told))

    def _sum_of(self, own: Any) -> Any:
        """The sum over processes of values that are built alike: one message per type of number."""
        parts = flat(own)
        for kind in dict.fromkeys(part.dtype for part in parts):
            places = [number for number, part in enumerate(parts) if part.dtype == kind]
            joined = self.sum(torch.cat([parts[p].reshape(-1) for p in places]))
            apart = joined.split([parts[p].numel() for p in places])
            for number, part in zip(places, apart, strict=True):
                parts[number] = part.reshape(parts[number].shape)
        return rebuild(own, parts)

    def initial_state(self, job: PhaseJob) -> InitialState:
        own = initial_state(job) if len(job.cohort) else None
        told = self.share("first messages", int(own is not None))
        source = next(rank for rank, numbers in enumerate(told) if numbers[0])
        text = json.dumps(None if own is None else [own.kind, _form(own.held)])
        kind, form = json.loads(self.text_of(source, text))
        held = MessageState(*_blank(form, job.clock.round.device))
        return own or InitialState(kind=kind, kept=None, held=held)

    def end_round(self, federation: Federation, cost: Cost) -> Cost:
        told = self.share("the cost", cost.gradients, cost.rows)
        return cost._replace(gradients=sum(n[0] for n in told), rows=sum(n[1] for n in told))

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {name: value for name, value in tensors.items() if name.startswith("client.")}
        content = b"" if self.leads else _pack(own)
        sizes = [told[0] for told in self.share("a checkpoint", len(content))]
        with self._heard():
            if not self.leads:
                for piece in _bytes(content).split(PIECE):
                    dist.send(piece, 0)
                return tensors
            for other in range(1, self.size):
                received = torch.empty(sizes[other], dtype=torch.uint8)
                for piece in received.split(PIECE):
                    dist.recv(piece, other)
                tensors = tensors | load(received.numpy().tobytes())
        return tensors

    def first_sentence(self, sentence: str | None) -> str | None:
        told = self.share("what was found", int(sentence is not None))
        found = [rank for rank, numbers in enumerate(told) if numbers[0]]
        return self.text_of(found[0], sentence or "") if found else None

    def any(self, answer: bool) -> bool:
        return any(numbers[0] for numbers in self.share("a question", int(answer)))

    def check_alike(self, identity: str) -> None:
        told = self.share("the start", int(identity[:15], 16))
        other = [rank for rank, numbers in enumerate(told) if numbers != told[0]]
        if other:
            raise ValueError(
                f"process {other[0]} has other data, another problem, method or seed than process "
                "0: give all machines the same files and the same version of fedminimax"
            )

    # ---------------------------------------------------------------- messages

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails here ends the run at all processes."""
        try:
            yield
        except LostError:
            self._over = True
            raise
        except BaseException as error:
            if not self._over:
                with suppress(PeerError):
                    self._fail(str(error) or type(error).__name__)
            raise

    def share(self, place: str, *numbers: int) -> list[list[int]]:
        """The numbers that each process gives at this place in the run."""
        told = self._share(0, place, numbers)
        failed = [rank for rank, row in enumerate(told) if row[0]]
        if failed:
            self._over = True
            raise PeerError(f"process {failed[0]} of {self.size}: {self.text_of(failed[0], '')}")
        if any(row[1] != told[0][1] for row in told):
            raise ValueError(
                f"the processes of this run have come apart ({place} is where process {self.rank} "
                "is, and not all are there): give all machines the same files and versions, and go "
                "on with --resume"
            )
        return [row[2:] for row in told]

    def text_of(self, source: int, text: str) -> str:
        """The text of one process, at all of them."""
        content = _bytes(text.encode())
        length = torch.tensor([len(content)])
        with self._heard():
            dist.broadcast(length, source)
            if self.rank != source:
                content = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(content, source)
        return content.numpy().tobytes().decode()

    def from_all(self, place: str, content: bytes) -> list[bytes]:
        """What each process has, at all of them."""
        sizes = [told[0] for told in self.share(place, len(content))]
        parts = []
        for source, size in enumerate(sizes):
            own = _bytes(content) if source == self.rank else torch.empty(size, dtype=torch.uint8)
            with self._heard():
                for piece in own.split(PIECE):
                    dist.broadcast(piece, source)
            parts.append(own.numpy().tobytes())
        return parts

    def sum(self, vector: Tensor) -> Tensor:
        """The sum over processes, in the same bits at all of them."""
        # Only CUDA has a way of its own between processes.
        wire = vector.contiguous() if vector.is_cuda else vector.cpu().contiguous()
        with self._heard():
            dist.all_reduce(wire)
        return wire.to(vector.device)

    def wait_for_the_first(self) -> None:
        """Until process 0 has ended, who says why: torchrun ends all when one has ended."""
        if not self.leads:
            with suppress(RuntimeError):
                dist.recv(torch.empty(1), 0)

    def _share(self, failed: int, place: str, numbers: tuple[int, ...]) -> list[list[int]]:
        padded = [*numbers, *[0] * (NUMBERS - len(numbers))]
        row = torch.tensor([failed, zlib.crc32(place.encode()), *padded])
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with self._heard():
            dist.all_gather(rows, row)
        return [row.tolist() for row in rows]

    def _fail(self, sentence: str) -> None:
        """Tells the others, wherever they are to meet next."""
        self._over = True
        told = self._share(1, "a failure", ())
        source = next(rank for rank, row in enumerate(told) if row[0])
        self.text_of(source, sentence)

    def _heard(self) -> Any:
        return _lost_connection(self.timeout)


class TorchrunQuery(LocalQuery):
    """Each process asks its own clients; all get all answers."""

    def __init__(self, problem, clients, split, weights, numbers, peers: Torchrun):
        super().__init__(problem, clients, split, weights, numbers)
        self._peers = peers

    def answers(self, question: str, vectors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        own = {
            f"{client}.{number}": value
            for client in self.numbers
            if self._peers.owns(client)
            for number, value in enumerate(self.answer(question, vectors, client))
        }
        found: dict[str, Tensor] = {}
        for content in self._peers.from_all(f"the question {question}", _pack(own)):
            found |= load(content)
        replies: dict[int, list[Tensor]] = {client: [] for client in self.numbers}
        for client, number in sorted(tuple(map(int, name.split("."))) for name in found):
            replies[client].append(found[f"{client}.{number}"].to(self.device))
        return map(tuple, replies.values())


class ReadOnlyFolder(RunFolder):
    """The folder of a run for the processes that only read there."""

    def create(self) -> None:
        pass

    def save_checkpoint(self, *_: Any) -> None:  # type: ignore[reportIncompatibleMethodOverride]  # takes any, and does nothing
        pass

    def save_final(self, *_: Any) -> None:  # type: ignore[reportIncompatibleMethodOverride]  # takes any, and does nothing
        pass

    def last_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return self._last_whole(self.list_checkpoints())

    def append(self, record: dict[str, Any]) -> None:
        pass

    def cut_history(self, round: int, count: int) -> list[dict[str, Any]]:
        return self._kept(round, count)

    def write_text(self, name: str, text: str) -> None:
        pass


@contextmanager
def _lost_connection(timeout: float) -> Iterator[None]:
    """An error of the connection, as a sentence."""
    try:
        yield
    except LostError:
        raise
    except RuntimeError as error:
        raise LostError(
            f"another process of this run is gone, or has not answered for {timeout:g} s; start "
            "the run again with --resume: it goes on from the last checkpoint"
        ) from error


@contextmanager
def _ended_by_torchrun() -> Iterator[None]:
    """When one process dies, torchrun ends the others, who may be in the middle of a step."""

    def end(number: int, frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise LostError(
            "this process was told to end, because another one of the run is gone or the job was "
            "cancelled; start the run again with --resume: it goes on from the last checkpoint"
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        # Whoever is told to end again is ending already, and has a sentence to say.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


def _pack(tensors: dict[str, Tensor]) -> bytes:
    return save({name: value.cpu().contiguous().clone() for name, value in tensors.items()})


def _bytes(content: bytes) -> Tensor:
    # Of no bytes torch makes no tensor; a copy, because torch warns of what cannot be written.
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _form(value: Any) -> Any:
    """How a value is built, as JSON: fields by name, tuples as lists, tensors as texts."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return " ".join([str(value.dtype).removeprefix("torch."), *map(str, value.shape)])
    if hasattr(value, "_fields"):
        return {name: _form(part) for name, part in value._asdict().items()}
    return [_form(part) for part in value]


def _blank(form: Any, device: torch.device) -> Any:
    """Zeros, built as `_form` says."""
    if isinstance(form, str):
        kind, *shape = form.split()
        return torch.zeros([int(n) for n in shape], dtype=getattr(torch, kind), device=device)
    if isinstance(form, dict):
        parts = [_blank(part, device) for part in form.values()]
        return namedtuple("Mean", form)(*parts)  # type: ignore[call-arg]  fields from a message
    return tuple(_blank(part, device) for part in form)
