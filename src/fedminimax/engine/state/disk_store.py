"""Client states in files: memory for a cohort, however many clients there are.

    field.NAME.npy  a row per client; `field.inner.0.npy` is the first part of a field `inner`
    sums.npy        a checksum of each client's row in all fields; 0: it has none
    undo-NNNNNNN    what brings the rows back to the checkpoint of that round
    KIND/           the same files for what clients keep for message stages, by kind of message

A checkpoint of such a run does not hold the states; they are what the files hold once the journals
are undone. So the order of writes matters, and this is why a run may be killed, or lose its power,
at any moment:

- Before a row is first written over after a checkpoint, the old one is in the journal of that
  checkpoint, on the disk.
- At a checkpoint, first the rows reach the disk, then the checkpoint takes its name, then its own
  journal begins. If that has not happened, no row has changed since.
- Of the checkpoints in the run folder each has its journal, or is the last: older journals go when
  their checkpoints are gone.
- Undoing a journal twice is undoing it once. Journals are removed when the rows that they brought
  back are on the disk, the newest first.

A checkpoint holds a digest of all checksums, so that rows that are not those of the checkpoint, or
that were damaged since, are never gone on with.
"""

# torch gives `from_numpy` no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedminimax.blocks.trees import build_tree, form_of, leaves, tree_map
from fedminimax.engine.job import MESSAGES, kept_type, stack
from fedminimax.engine.state.checkpoint import CheckpointError, DamagedError, digest_of
from fedminimax.engine.state.row_file import Journal, RowFile, Undo, remove
from fedminimax.engine.state.store import ClientStore, Store, rows_of

STORES = ("memory", "disk")
_SUMS = "sums"
_TOGETHER = 1024  # clients whose old rows are in memory at once


def check_kind(kind: str) -> None:
    """Refuses a kind of client store that there is none of."""
    if kind not in STORES:
        raise ValueError(f'store is {kind!r}; give "memory" or "disk"')


def make(
    kind: str, fields: tuple[str, ...], clients: int, folder: Path | None, stages: bool = False
) -> ClientStore:
    """A store of that kind for as many clients; `folder` is where one on disk lives on. `stages`:
    do clients keep something for message stages?"""
    # Clients that keep nothing need no files.
    on_disk = kind == "disk" and (fields or stages)
    return DiskStore(fields, clients, folder) if on_disk else Store(fields)


class DiskStore(ClientStore):
    def __init__(self, fields: tuple[str, ...], clients: int, folder: Path | None = None):
        """Without a folder, one that goes with the store, and nothing to go back to."""
        super().__init__(fields)
        self._count, self._lives_on = clients, folder is not None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="fedminimax-"))
        self._names: list[str] = []  # of the tensors that a client keeps
        self._form: Any = None  # how they are put together
        self._files: list[RowFile] = []
        self._sums_file: RowFile | None = None
        self._journal: Journal | None = None
        self._round = 0  # of the last checkpoint
        self._device = torch.device("cpu")
        self._sums = np.zeros(clients, dtype=np.uint32)  # 0: the client was not met
        self._noted = np.zeros(clients, dtype=bool)  # in the journal already

    def checkpoint(self) -> tuple[dict[str, Tensor], Any]:
        with self._report_errors():
            self.settle()
            for file in self._every_file():
                file.sync()
        stages = {kind: own.checkpoint()[1] for kind, own in (self.stages or {}).items()}
        about = {"after": self._round, "tensors": self._kinds(), "form": self._form}
        return {}, {**about, "sums": digest_of(self._sums.tobytes()), "stages": stages}

    @property
    def stage_forms(self) -> dict[str, Any]:
        return {}  # they are in the files' own part of a checkpoint

    def checkpointed(self, round: int) -> None:
        for own in (self.stages or {}).values():
            own.checkpointed(round)
        before = self._round
        with self._report_errors():
            self._begin_journal(round)
            for number, path in sorted(self._journals().items()):
                if number < before:
                    remove(path)

    def roll_back(self, round: int, about: dict[str, Any]) -> None:
        """To the checkpoint of that round, which says this about the store."""
        self._make_folder()
        journals = self._journals()
        later = sorted(number for number in journals if number >= round)
        # Without a journal of its own the checkpoint was the last thing that happened.
        if round not in journals and (later or about["after"] not in journals):
            raise CheckpointError(
                f"the client states in {self._folder} are not those of the checkpoint of round "
                f"{round}, and what would bring them back is gone: start anew"
            )
        self._form = about["form"]
        if about["tensors"]:
            self._open(about["tensors"])
        with self._report_errors():
            for number in reversed(later):
                for undo in Journal.backwards(journals[number], self._files):
                    self._undo(undo)
            if digest_of(self._sums.tobytes()) != about["sums"]:
                raise DamagedError(
                    f"the client states in {self._folder} are not those of the checkpoint of round "
                    f"{round}: put the folder back from a copy, or start anew"
                )
            for file in self._every_file():
                file.sync()
            for number in reversed(later):
                if number != round:
                    remove(journals[number])
            # Emptied, not removed: it says that the rows are those of the round.
            self._begin_journal(round)
        self.stages = {}
        for kind, own in about["stages"].items():
            self.stages[kind] = stage = self._stage_store(kind)
            stage.roll_back(round, own)

    def close(self) -> None:
        for own in (self.stages or {}).values():
            own.close()
        for file in (*self._every_file(), *([self._journal] if self._journal else [])):
            file.close()
        self._files, self._sums_file, self._journal = [], None, None
        if not self._lives_on:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _new_stage(self, kind: str) -> ClientStore:
        own = self._stage_store(kind)
        own.restore(self._round, {})
        return own

    def _stage_store(self, kind: str) -> DiskStore:
        own = DiskStore((MESSAGES,), self._count, self._folder / kind)
        own._lives_on = self._lives_on
        return own

    def _known(self, cohort: np.ndarray) -> np.ndarray:
        return self._sums[cohort] != 0

    def _read(self, cohort: np.ndarray) -> Any:
        values = [file.read(cohort) for file in self._files]
        wrong = cohort[_checksums(cohort, values) != self._sums[cohort]]
        if len(wrong):
            raise DamagedError(
                f"the state of client {wrong[0]} in {self._folder} is damaged: put the folder back "
                "from a copy, or start anew"
            )
        rows = (torch.from_numpy(value).to(self._device) for value in values)
        named = dict(zip(self._names, rows, strict=True))
        return kept_type(self.fields)(*build_tree(self._form, named))

    def _all(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for part in _parts(np.flatnonzero(self._sums)):
            loaded = Store(self.fields)
            loaded.save(part, self._read(part))
            found |= loaded.states
        return found

    def _read_some(self, cohort: np.ndarray, held: np.ndarray, places: np.ndarray) -> Any:
        inside, outside = (torch.from_numpy(np.flatnonzero(which)) for which in (held, ~held))

        def merged(own: Tensor, rest: Tensor) -> Tensor:
            both = rest.new_empty((len(cohort), *rest.shape[1:]))
            both[outside], both[inside] = rest, own
            return both

        return tree_map(merged, rows_of(self._stacked, places), self._read(cohort[~held]))

    def _write(self, clients: np.ndarray, places: np.ndarray, stacked: Any) -> None:
        named = dict(leaves(stacked))
        self._device = next(iter(named.values())).device
        values = [tensor.detach().cpu().numpy() for tensor in named.values()]
        if not bool((np.diff(clients) > 0).all()):
            # Of a client that is there twice, the last state counts.
            clients, back = np.unique(clients[::-1], return_index=True)
            places = places[::-1][back]
        whole = len(places) == len(values[0])
        with self._report_errors():
            if not self._files:
                self._form = form_of(stacked)
                self._create(named, values)
            self._check_alike(named, values)
            self._note(clients)
            values = values if whole else [rows[places] for rows in values]
            for file, rows in zip(self._files, values, strict=True):
                file.write(clients, rows)
            self._mark(clients, _checksums(clients, values))

    def _replace(self, round: int, states: dict[int, Any]) -> None:
        self._make_folder()
        with self._report_errors():
            # Without journals, what is left of the rows is never taken for whole.
            for path in sorted(self._journals().values(), reverse=True):
                remove(path)
            for path in self._folder.glob("*.npy"):
                remove(path)
        for part in _parts(np.array(sorted(states), dtype=np.int64)):
            stacked = stack([states[client] for client in part.tolist()])
            self._write(part, np.arange(len(part)), stacked)
        with self._report_errors():
            self._begin_journal(round)

    def _make_folder(self) -> None:
        with self._report_errors():
            self._folder.mkdir(parents=True, exist_ok=True)

    def _note(self, clients: np.ndarray) -> None:
        """The old rows go to the journal, if they are not in it."""
        new = clients[~self._noted[clients]]
        if self._journal is None or not len(new):
            return
        for part in _parts(new):
            met = self._sums[part] != 0
            rows = [file.read(part[met]) for file in self._files]
            self._journal.append(Undo(part, self._sums[part], rows))
        self._journal.sync()
        self._noted[new] = True

    def _undo(self, undo: Undo) -> None:
        for file, rows in zip(self._files, undo.rows, strict=True):
            file.write(undo.clients[undo.sums != 0], rows)
        self._mark(undo.clients, undo.sums)

    def _mark(self, clients: np.ndarray, sums: np.ndarray) -> None:
        assert self._sums_file is not None
        self._sums[clients] = sums
        self._sums_file.write(clients, sums)

    def _create(self, named: dict[str, Tensor], values: list[np.ndarray]) -> None:
        self._names = list(named)
        self._sums_file = RowFile(self._path(_SUMS), np.dtype(np.uint32), (), self._count)
        for name, rows in zip(named, values, strict=True):
            path = self._path(f"field.{name}")
            self._files.append(RowFile(path, rows.dtype, rows.shape[1:], self._count))

    def _open(self, kinds: list[Any]) -> None:
        for name, _ in kinds:
            self._names.append(name)
            self._files.append(RowFile.at(self._path(f"field.{name}")))
        self._sums_file = RowFile.at(self._path(_SUMS))
        expected = [np.dtype(np.uint32).str, self._count]
        if self._kinds() != kinds or self._sums_file.kind != expected:
            raise DamagedError(
                f"the files in {self._folder} have other types or shapes than the checkpoint says: "
                "put the folder back from a copy, or start anew"
            )
        self._sums = self._sums_file.read(np.arange(self._count))

    def _kinds(self) -> list[Any]:
        return [[n, file.kind] for n, file in zip(self._names, self._files, strict=True)]

    def _check_alike(self, named: dict[str, Tensor], values: list[np.ndarray]) -> None:
        found = [(n, v.shape[1:], v.dtype) for n, v in zip(named, values, strict=True)]
        files = [(n, f.shape, f.dtype) for n, f in zip(self._names, self._files, strict=True)]
        if found != files:
            raise ValueError(
                f"clients keep {_text(found)}, but kept {_text(files)} when they were first met; "
                'the files of a store on disk have room for that only: use store = "memory"'
            )

    def _begin_journal(self, round: int) -> None:
        if self._journal is not None:
            self._journal.close()
        self._round, self._noted[:] = round, False
        if self._lives_on:
            self._journal = Journal(self._folder / f"undo-{round:07d}")

    def _journals(self) -> dict[int, Path]:
        return {int(path.name[5:]): path for path in self._folder.glob("undo-*")}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _every_file(self) -> list[RowFile]:
        return [*self._files, *([self._sums_file] if self._sums_file is not None else [])]

    @contextmanager
    def _report_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            advice = "the last checkpoint is intact. Free some space and resume"
            if not self._lives_on:
                advice = "free some space there, or give the run a folder"
            where = error.filename or self._folder
            raise CheckpointError(f"could not write {where}: {error.strerror}; {advice}") from error


def _checksums(clients: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
    """Of each client's row in all fields, and of its number; never 0."""
    sums = np.empty(len(clients), dtype=np.uint32)
    rows = [np.ascontiguousarray(v).reshape(len(clients), -1).view(np.uint8) for v in values]
    for place, client in enumerate(clients.tolist()):
        found = client & 0xFFFFFFFF
        for field in rows:
            found = zlib.crc32(field[place], found)
        sums[place] = found or 1
    return sums


def _parts(clients: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(clients), _TOGETHER):
        yield clients[first : first + _TOGETHER]


def _text(kept: list[tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in kept)
