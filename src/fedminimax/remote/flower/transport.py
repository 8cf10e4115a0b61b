"""Calls to sites over Flower (extra `flower`), by the messages of its grid.

Only bytes are handed to Flower: it opens none of them, and pickles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

RECORD = "fedminimax"
PAUSE = 1.0  # seconds between two looks for replies
# A site fetches its messages every 3 s and starts a process for each, which imports torch.
LEAST_TIMEOUT = 60.0
# Flower drops a reply that is late by the site's clock, and admits clocks that differ by 305 s.
CLOCKS_DIFFER = 600.0


def packed(content: bytes) -> RecordDict:
    """As an array, which Flower carries in pieces, so that there is no bound on its size."""
    array = Array(np.frombuffer(content, np.uint8))
    return RecordDict({RECORD: ArrayRecord({"message": array})})


def unpacked(message: Message) -> bytes:
    """What `packed` packed; nothing, if it is something else."""
    try:
        return message.content.array_records[RECORD]["message"].numpy().tobytes()
    except (KeyError, TypeError, ValueError, EOFError):
        return b""


def registered(names: Sequence[str], nodes: Iterable[NodeInfo]) -> dict[str, list[int]]:
    """The nodes of each site that are connected.

    A name is what the SuperLink's table of registered keys has for a node's key. A node has no say
    in it.
    """
    found: dict[str, list[int]] = {name: [] for name in names}
    for node in nodes:
        if node.name in found:
            found[node.name].append(node.node_id)
    return found


class FlowerTransport:
    """For use in a ServerApp; the ClientApp answers queries."""

    rejoins = True

    def __init__(self, grid: Grid):
        self.grid = grid

    def call(
        self, sites: Sequence[str], message: bytes, timeout: float
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        timeout = max(timeout, LEAST_TIMEOUT)
        replies: dict[str, bytes] = {}
        failures: dict[str, str] = {}
        asked: dict[str, Message] = {}
        for name, nodes in registered(sites, self.grid.get_nodes()).items():
            if len(nodes) == 1:
                lives = timeout + CLOCKS_DIFFER
                asked[name] = Message(packed(message), nodes[0], MessageType.QUERY, ttl=lives)
            else:
                failures[name] = (
                    f"{len(nodes) or 'no'} SuperNodes whose keys are registered under this name "
                    "are connected; there must be one"
                )
        deadline = time.monotonic() + timeout
        numbers = self.grid.push_messages(list(asked.values()))
        # Of a message that it does not take, Flower returns no number, or none at all.
        waiting = {n: name for n, name in zip(numbers, asked, strict=False) if n}
        failures |= {n: "the SuperLink did not take the message" for n in asked}
        failures |= {n: f"no reply within {timeout:g} s" for n in waiting.values()}
        while waiting and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(waiting)):
                name = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    failures[name] = f"Flower says: {reply.error.reason}"
                else:
                    replies[name] = unpacked(reply)
            if waiting:
                time.sleep(PAUSE)
        return replies, {name: why for name, why in failures.items() if name not in replies}
