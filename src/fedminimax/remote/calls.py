"""Calls to the sites of a run: who is there, what is done about one that is away or answers
wrongly, and what was accepted from whom.

An engine (NVIDIA FLARE, Flower, or the sites of a test in this process) supplies one function:

    call(sites, message, timeout) -> replies, failures

by which the same bytes go to the named sites, and bytes or a sentence come back from each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedminimax.engine.backends.base import RunEndedError
from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.engine.trainer import Interrupted
from fedminimax.remote.wire import Message, busy, grouped, quoted

NORM_FACTOR = 10.0
MOST_TEXT = 16_000_000  # bytes of a reply beside its vectors
MOST_ROUNDS_AWAY = 32  # between two looks for a site that stays away
Check = Callable[[str, Message], str | None]  # what is wrong with a site's reply
Outliers = Callable[[Sequence[str]], dict[str, str]]  # which replies do not go with the others


class Transport(Protocol):
    """What an engine supplies.

    `rejoins` tells whether a site that was started again can be reached without the run being
    started again too.
    """

    rejoins: bool

    def call(
        self, sites: Sequence[str], message: bytes, timeout: float
    ) -> tuple[dict[str, bytes], dict[str, str]]: ...


@dataclass(frozen=True)
class Faults:
    """What is done about a site that does not answer, or answers wrongly.

    policy: "wait" asks until it answers; "skip" plays the round without it, from the round's start,
    and looks for it in later ones; "fail" stops the run. After a second wrong answer, "wait" stops
    too: time does not mend it. timeout: seconds for an answer. least_replies: with fewer sites in a
    round the run stops. norm_factor: a reply is refused if it is longer than this many times the
    median of its round, and sums before the run whose values are ten times that far beyond the
    other sites'; 0: no such bound; None: 10, and none where masks hide replies. largest_share: the
    most of the weight that one site may have.
    """

    policy: Literal["wait", "skip", "fail"] = "wait"
    timeout: float = 60.0
    least_replies: int = 1
    norm_factor: float | None = None
    largest_share: float = 0.9
    pause: float = 0.5  # seconds before a site that is away is asked again, at first
    # seconds, where a site that was started again can only be reached by a run that is, too
    patience: float = 30.0

    def __post_init__(self) -> None:
        if self.policy not in ("wait", "skip", "fail"):
            raise ValueError(f'policy is {self.policy!r}; give "wait", "skip" or "fail"')
        if not self.timeout > 0 or not self.pause >= 0:
            raise ValueError(
                f"timeout is {self.timeout} and pause {self.pause}; give seconds, above 0 and "
                "of at least 0"
            )
        if self.least_replies < 1:
            raise ValueError(f"least_replies is {self.least_replies}; give at least 1")
        if self.norm_factor and not self.norm_factor > 1:
            raise ValueError(
                f"norm_factor is {self.norm_factor}; give a number above 1, or 0 for no bound"
            )
        if not 0 < self.largest_share <= 1:
            raise ValueError(
                f"largest_share is {self.largest_share}; give a share above 0, at most 1"
            )

    @property
    def norm_bound(self) -> float:
        return NORM_FACTOR if self.norm_factor is None else self.norm_factor


class SiteFailedError(RunEndedError):
    """A run that its policy ends, with the site and the reason."""


class SitesLostError(RuntimeError):
    """A run that cannot go on before it is started again."""


class LeftOutError(Exception):
    """Sites that a round is to be played without, and why."""

    def __init__(self, reasons: dict[str, str]):
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


class Away(NamedTuple):
    due: int  # the round in which it is looked for
    wait: int  # how many rounds later it will be next


@dataclass
class Traffic:
    """Bytes of messages, as they were handed to the engine and came from it."""

    down: int = 0
    up: int = 0
    calls: int = 0
    seconds: float = 0.0  # spent in calls


@dataclass
class Roster:
    """Where each site stands: what a server has to know of its sites when it starts again."""

    names: tuple[str, ...]
    accepted: dict[str, list] = field(default_factory=dict)  # site -> key of its last state
    complete: dict[str, list] = field(default_factory=dict)  # the same, at the round's beginning
    away: dict[str, Away] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)  # who is just back: how long it waited

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.away)

    def due(self, round: int) -> list[str]:
        """Those to be looked for in that round."""
        return [name for name, away in self.away.items() if away.due <= round]

    def welcome(self, name: str) -> None:
        self.returned[name] = self.away.pop(name).wait

    def miss(self, name: str, round: int) -> None:
        """It is away, and will be looked for ever less often, so that nobody waits for it."""
        before = self.away[name].wait if name in self.away else self.returned.pop(name, 0)
        wait = min(max(1, 2 * before), MOST_ROUNDS_AWAY)
        self.away[name] = Away(round + wait, wait)

    def undo_round(self) -> None:
        self.accepted = dict(self.complete)

    def end_round(self) -> list[str]:
        """What was accepted stays; returns the sites that were met for the first time."""
        new = [name for name in self.accepted if name not in self.complete]
        self.complete, self.returned = dict(self.accepted), {}
        return new

    def to_json(self) -> dict[str, Any]:
        away = {name: list(times) for name, times in self.away.items()}
        return {"accepted": self.complete, "away": away}

    def restore(self, about: dict[str, Any]) -> None:
        self.accepted = dict(about["accepted"])
        self.complete = dict(self.accepted)
        # A run that is started again looks at once for those that were away.
        self.away = {name: Away(0, wait) for name, (_, wait) in about["away"].items()}


@dataclass
class Sites:
    """The sites of a run, as its server calls them."""

    transport: Transport
    names: tuple[str, ...]
    run: str
    faults: Faults
    log: Callable[[str], None]
    session: int = 1  # how often the server was started
    stopping: Callable[[], bool] = field(default=lambda: False)
    round: int = 0
    calls: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.roster = Roster(self.names)

    def enough(self, cohort: np.ndarray) -> bool:
        """Can a round be played with those of the cohort that are there?"""
        return not self.roster.away or len(self._there(cohort)) >= self.faults.least_replies

    def _there(self, cohort: np.ndarray) -> set[int]:
        return {k for k in cohort.tolist() if self.names[k] not in self.roster.away}

    def only_present(self, cohort: np.ndarray) -> np.ndarray:
        away, least = self.roster.away, self.faults.least_replies
        if not away:
            return cohort
        there = self._there(cohort)
        if len(there) < least:
            raise SiteFailedError(
                f"round {self.round}: {len(there)} of the sites that should take part are "
                f"there, but least_replies is {least}; away: {', '.join(away)}. Bring them back "
                "and run again: it goes on from the last complete round"
            )
        return cohort[[k in there for k in cohort.tolist()]]

    def begin_round(self, round: int) -> None:
        """Looks for those that were away."""
        self.round = round
        for name in self.roster.due(round):
            content = Message({"kind": "ping", "run": self.run}, {}).to_bytes()
            replies, _ = self.transport.call([name], content, min(2.0, self.faults.timeout))
            if name in replies:
                self.log(f"site {name!r} is back in round {round}")
                self.roster.welcome(name)
            else:
                self.roster.miss(name, round)

    def leave_out(self, reasons: dict[str, str]) -> None:
        """The round begins anew without them."""
        self.roster.undo_round()
        for name, reason in reasons.items():
            self.log(f"{reason}. Round {self.round} goes on without it")
            self.roster.miss(name, self.round)

    def exchange(
        self,
        names: Sequence[str],
        message: Message,
        expected: dict[str, Tensor],
        check: Check | None = None,
        needed: bool = False,
        outliers: Outliers | None = None,
    ) -> dict[str, Message]:
        """A reply of each of these sites that holds vectors like the expected and has stood the
        check; `needed`: no policy can do without any of them. Once all are there, `outliers` tells
        of those that do not go with the others."""
        policy = "fail" if needed and self.faults.policy == "skip" else self.faults.policy
        good: dict[str, Message] = {}
        reasons: dict[str, str] = {}
        twice: set[str] = set()  # asked once more because a reply was wrong
        left, pause, begun = list(names), self.faults.pause, time.monotonic()
        while left:
            replies, failures = self._call(left, message, sorted(twice))
            lost, again = [], []
            for name in left:
                if name not in replies:
                    told = quoted(failures.get(name, "no reply"))
                    reasons[name] = f"site {name!r} in round {self.round}: {told}"
                    lost.append(name)
                    continue
                reply, wrong = self._read(name, replies[name], message, expected, check)
                if wrong is None:
                    good[name] = reply
                elif name in twice or reply.about.get("kind") == "refusal":
                    reasons[name] = wrong
                    if policy != "skip":
                        raise SiteFailedError(f"{wrong}. The run stops; its last round is kept")
                else:
                    self.log(f"{wrong}; it is asked once more")
                    twice.add(name)
                    again.append(name)
            if lost and policy == "fail":
                raise SiteFailedError(f"{reasons[lost[0]]}. The run stops; its last round is kept")
            if lost and policy == "wait":
                self._wait(lost, reasons, pause, time.monotonic() - begun)
                pause, again = min(2 * pause, 8.0), again + lost
            left = again
            far = outliers(list(good)) if outliers and good and not left else {}
            for name, wrong in far.items():
                del good[name]
                told = f"the reply of site {name!r} in round {self.round} is refused: {wrong}"
                if name not in twice:
                    self.log(f"{told}; it is asked once more")
                    twice.add(name)
                    left.append(name)
                elif policy != "skip":
                    raise SiteFailedError(f"{told}. The run stops; its last round is kept")
                reasons[name] = told
        if len(good) < len(set(names)):
            raise LeftOutError({name: reasons[name] for name in names if name not in good})
        return good

    def _wait(self, lost: list[str], reasons: dict[str, str], pause: float, since: float) -> None:
        for name in lost:
            self.log(f"{reasons[name]}; it is waited for")
        if since > self.faults.patience and not self.transport.rejoins:
            raise SitesLostError("; ".join(reasons[name] for name in lost))
        if self.stopping():
            raise Interrupted(self.round)
        time.sleep(pause)

    def _call(
        self, names: list[str], message: Message, again: list[str]
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        self.calls += 1
        told = {
            "run": self.run,
            "call": [self.session, self.calls],
            "again": again,
            "accepted": grouped(self.roster.accepted, self.names),
            "complete": grouped(self.roster.complete, self.names),
        }
        content = message._replace(about=message.about | told).to_bytes()
        begun = time.perf_counter()
        found, failures = self.transport.call(names, content, self.faults.timeout)
        # An engine hands on whatever a site returns; what is not bytes is no message.
        replies = {name: r if isinstance(r, bytes) else b"" for name, r in found.items()}
        self.traffic.seconds += time.perf_counter() - begun
        self.traffic.calls += 1
        self.traffic.down += len(content) * len(names)
        self.traffic.up += sum(map(len, replies.values()))
        for name in [n for n in replies if replies[n] == busy(self.run, n)]:
            del replies[name]
            failures[name] = "it is still at work on an earlier call"
        return replies, failures

    def _read(
        self,
        name: str,
        content: bytes,
        asked: Message,
        vectors: dict[str, Tensor],
        check: Check | None,
    ) -> tuple[Message, str | None]:
        """The reply, and what is wrong with it."""
        where = f"the reply of site {name!r} in round {self.round}"
        most = MOST_TEXT + sum(vector.nbytes for vector in vectors.values())
        if len(content) > most:
            told = f"it has {len(content)} bytes, where at most {most} are expected"
            return Message({}, {}), f"{where} is refused: {told}"
        try:
            reply = Message.from_bytes(content)
        except CheckpointError as error:
            return Message({}, {}), f"{where} is refused: {quoted(error)}"
        about = reply.about
        if about.get("kind") == "refusal":
            reason = quoted(about.get("reason"))
            return reply, f"site {name!r} in round {self.round} refuses: {reason}"
        expected = {"kind": asked.about["kind"], "run": self.run, "site": name}
        expected |= {n: asked.about[n] for n in ("round", "phase", "question") if n in asked.about}
        for what, value in expected.items():
            if about.get(what) != value:
                found = quoted(repr(about.get(what)))
                return reply, f"{where} is refused: it is of {what} {found}, not {value!r}"
        wrong = differs(reply.vectors, vectors)
        if wrong is None and check is not None:
            wrong = check(name, reply)
        return reply, None if wrong is None else f"{where} is refused: {wrong}"


def differs(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """What is wrong with the names, shapes, types or numbers of vectors."""
    if set(found) != set(expected):
        names = quoted(", ".join(sorted(found))) or "no vectors"
        return f"it holds {names}, not {', '.join(sorted(expected)) or 'none'}"
    for name, vector in expected.items():
        given = found[name]
        if (given.shape, given.dtype) != (vector.shape, vector.dtype):
            return (
                f"{name} is {given.dtype} of shape {tuple(given.shape)}, not {vector.dtype} of "
                f"shape {tuple(vector.shape)}"
            )
        if not bool(torch.isfinite(given).all()):
            return f"{name} has a NaN or an infinity"
    return None
