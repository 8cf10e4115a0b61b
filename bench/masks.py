"""What masks cost: an exchange of messages that sites hide, beside one of messages in clear."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch

from bench.measure import Effort, in_turn, spread
from bench.overhead import nothing
from bench.table import Found, Row, at_most, milliseconds
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.blocks.trees import form_of, leaves
from fedminimax.data.clients import Clients
from fedminimax.engine.round import Federation
from fedminimax.messages.secure.masked import Masked
from fedminimax.messages.stage import Messages
from fedminimax.problems.functions import Minimax
from fedminimax.remote.backend import numbers
from fedminimax.remote.calls import Faults, Sites
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.masking import SentLog, SiteMasks
from fedminimax.remote.wire import Message
from fedminimax.remote.worker import Worker

NUMBERS = 1_000_000


def rows() -> list[Row]:
    return [
        Row(
            f"masks.{sites}",
            f"a masked exchange of {NUMBERS:,} doubles, {sites} sites: processor time of a site "
            "and of the server for it",
            "the same in clear",
            at_most(most, "x"),
            partial(masks, sites),
        )
        for sites, most in ((4, 1.5), (32, 5.0), (100, 14.0))
    ]


def masks(sites: int, effort: Effort) -> Found:
    """All sites do the same, so that one of them is measured, with the server's work for it."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"ours": Messages(reducer=Masked()), "plain": Messages()}
        calls = {n: exchange(sites, kind, Path(folder) / n) for n, kind in kinds.items()}
        found = in_turn(calls, effort)
    ours, clear = found["ours"], found["plain"]
    ratios = [a / b for a, b in zip(ours.turns, clear.turns, strict=True)]
    told = milliseconds(ours.median)
    why = f"{sites - 1} streams of masks for each message"
    return Found(spread(ratios), told, lambda: why, milliseconds(clear.median))


def exchange(sites: int, messages: Messages, folder: Path) -> Callable[[], float]:
    """A phase of FedAvg on an empty problem: what the site does, and the server for its reply."""
    problem = Minimax(nothing, torch.zeros(NUMBERS, dtype=torch.float64))
    names, number = [f"site-{k}" for k in range(sites)], sites // 2
    clients = Clients([(torch.zeros(8, 1).double(),)], batch_size=4).among(names, number)
    weights = torch.full((sites,), 1 / sites, dtype=torch.float64)
    federation = Federation.of(
        problem, FedAvg(local_steps=1), clients, weights, 0, sites, messages=messages
    )
    masks, rounds = None, count(1)
    if messages.masked:
        seeds = {k: os.urandom(32) for k in range(sites)}
        masks = SiteMasks(SentLog(folder), "run", seeds, number, "")
    site = Worker("run", names[number], number, federation, folder, masks=masks)
    server = Sites(InProcess({}), tuple(names), "run", Faults(), log=print)
    down = federation.algorithm.init_server(problem, problem.start())

    def called(round: int) -> Message:
        phase = federation.algorithm.phases(round)[0]
        clock, _ = federation.clock(round, 0, phase, np.array([number]), round)
        sent = phase.broadcast(down, clock)
        about = {"kind": "phase", "run": "run", "round": round, "phase": 0, "form": form_of(sent)}
        told = {"call": [1, round], "again": [], "accepted": {}, "complete": {}}
        return Message({**about, **told, "clock": numbers(clock)}, dict(leaves(sent)))

    form = site.phase(called(0)).vectors
    total = torch.zeros_like(form["x"])

    def exchanged() -> float:
        message, begun = called(next(rounds)), time.process_time()
        content = site.phase(message).to_bytes()
        reply, wrong = server._read(names[number], content, message, form, None)
        assert wrong is None, wrong
        total.add_(reply.vectors["x"])
        return time.process_time() - begun

    return exchanged
