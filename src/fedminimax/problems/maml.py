"""Model-agnostic meta-learning with several inner steps, as a composition."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.problems.questions import shares
from fedminimax.types import AnswerCheck, Batch, Measures, Point, Query, Vectors

MOST_TASKS = 1_000_000  # that a site may report, because all others then send a share of each


class MAML(NetworkProblem):
    """Multi-step meta-learning: weights from which K - 1 gradient steps on a task's support rows
    fit its query rows (Finn et al., Model-Agnostic Meta-Learning, ICML 2017).

    There are T tasks, and each may have rows at many clients. The inner values hold the weights of
    all tasks, u = (u_1, ..., u_T), each of the network's length, and every level is a mean over
    clients, as in eq. 1 of the Fed-DR-SCGD paper:

        F^(1)(x)_t = x   - inner_lr * grad S_t(x)                        every task starts at x
        F^(k)(u)_t = u_t - inner_lr * grad S_t(u_t)                      k = 2 .. K - 1
        F^(K)(u)   = mean over tasks of Q_t(u_t)

    with S_t and Q_t the mean squared error over the federation's support and query rows of task t.
    So the objective is MAML's: the mean over tasks of Q_t after K - 1 steps on S_t. It is a
    composition, and not a mean of the clients' own objectives, because the step of a task uses rows
    of several clients. Depth 1 has no adaptation: plain regression on the query rows.

    A row is (input, target, task, query), query being 1 for query rows. Client n contributes its
    rows of task t, divided by the share of such rows in the federation, and 0 if it has none; so
    clients with few tasks differ much, in values and in Jacobians. Inner vectors, and what methods
    send for them, have T times the network's length. Derivatives are exact: the Jacobian of a step
    needs second derivatives of the network.

    Measures, on the rows of the split: `loss`, the query loss after adaptation; `loss_before` at x
    itself; `worst` and `worst_before`, the largest loss of a client on its own query rows.

    Arguments:
        module: the network, with one output per row.
        depth: K; there are depth - 1 inner steps.
        inner_lr: the length of an inner step.
    """

    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        "tasks": lambda reply, rows: _wrong_tasks(float(reply[0])),
        "shares": shares,
    }

    def __init__(self, module: nn.Module, depth: int = 3, inner_lr: float = 0.01):
        super().__init__(module)
        if depth < 1:
            raise ValueError(f"depth is {depth}; give at least 1: one more than the inner steps")
        if not (math.isfinite(inner_lr) and inner_lr >= 0):
            raise ValueError(f"inner_lr is {inner_lr!r}; give a finite number of at least 0")
        if self.network.has_norms:
            raise ValueError(
                "the module has batch-norm layers, which would mix the rows of tasks: use a "
                "network without them"
            )
        self.depth, self.inner_lr = depth, inner_lr
        self._shares: Tensor | None = None  # (2, T): of support and of query rows, per task

    def start(self) -> Point:
        return Point(self.network.start(), torch.zeros(0))

    def prepare(self, ask: Query) -> MAML:
        """Asks how many tasks there are, and for the share of each task's rows."""
        prepared = copy.copy(self)
        prepared._shares = self._asked_shares(ask)
        return prepared

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        if not 0 < level < self.depth:
            return super().inner(level, value, batch)
        return self._step(value, self._known_shares(value), batch)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return self._losses(value, self._known_shares(value)[1], batch, query=1).mean()

    def _step(self, value: Tensor, shares: Tensor, batch: Batch) -> Tensor:
        """One step of the weights of every task, with this client's part of the support loss."""
        blocks = self._blocks(value, shares.shape[1])
        slope = grad(lambda b: self._losses(b, shares[0], batch, query=0).sum())(blocks)
        return (blocks - self.inner_lr * slope).reshape(-1)

    def _losses(self, value: Tensor, share: Tensor, batch: Batch, query: int) -> Tensor:
        """This client's part of each task's loss: their mean over clients is the loss."""
        inputs, target, task, kind = batch.rows
        blocks = self._blocks(value, len(share))
        made = vmap(lambda weights: self.network(weights, inputs).flatten())(blocks)
        here = (task == torch.arange(len(share), device=task.device)[:, None]) & (kind == query)
        return batch.mean(((made - target).square() * here).T) / share

    def _blocks(self, value: Tensor, tasks: int) -> Tensor:
        """The weights of every task as a row of a matrix; x is repeated for each task."""
        return value.reshape(-1, self.network.length).expand(tasks, -1)

    def _known_shares(self, like: Tensor) -> Tensor:
        if self._shares is None:
            raise ValueError("MAML has not asked its clients about their tasks: call prepare first")
        return self._shares.to(like)

    def _asked_shares(self, ask: Query) -> Tensor:
        tasks = max(int(reply[0]) for reply in ask.each("tasks"))
        (shares,) = ask.mean("shares", torch.tensor(tasks))
        for kind, share in zip(("support", "query"), shares, strict=True):
            if lacking := [t for t in range(tasks) if not share[t] > 0]:
                raise ValueError(
                    f"task {lacking[0]} has no {kind} rows at any client: number the tasks 0, 1, "
                    "..., and give each of them support and query rows"
                )
        return shares

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        """- tasks (): the largest task number plus one.
        - shares (T): the shares of support and query rows of each task.
        - adapt (u, shares): a step of every task.
        - query (u, shares): this client's part of the loss of every task.
        - own (u, T): its loss over its own query rows; -1 if it has none.
        """
        _check_columns(batch)
        task, kind = batch.rows[2], batch.rows[3]
        if question == "tasks":
            return ((task.max() + 1).reshape(1),)
        if question == "shares":
            here = task[:, None] == torch.arange(int(vectors[0]), device=task.device)
            held = torch.stack([here & (kind == query)[:, None] for query in (0, 1)], dim=1)
            return (batch.mean(held.to(batch.weight.dtype)),)
        if question == "adapt":
            return (self._step(vectors[0], vectors[1], batch),)
        if question == "query":
            return (self._losses(vectors[0], vectors[1][1], batch, query=1),)
        if question == "own":
            tasks = int(vectors[1])
            total = self._losses(vectors[0], vectors[0].new_ones(tasks), batch, query=1).sum()
            share = batch.mean((kind == 1).to(total.dtype))
            return (torch.where(share > 0, total / share, -1.0).reshape(1),)
        return super().answer(question, vectors, batch)

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        # The rows of a split have shares of their own.
        shares, value = self._asked_shares(ask).to(point.x.dtype), point.x
        found, tasks = {}, torch.tensor(shares.shape[1])
        for name, steps in (("_before", 0), ("", self.depth - 1)):
            for _ in range(steps):
                value = ask.mean("adapt", value, shares)[0].to(point.x.dtype)
            (losses,) = ask.mean("query", value, shares)
            own = [float(reply[0]) for reply in ask.each("own", value, tasks)]
            found[f"loss{name}"] = float(losses.mean())
            # A client without query rows has no loss of its own.
            held = [loss for loss in own if loss >= 0]
            found[f"worst{name}"] = max(held, default=math.nan)
        return found


def _wrong_tasks(found: float) -> str | None:
    if found != round(found) or not 1 <= found <= MOST_TASKS:
        return f"its tasks are {found:g}, and not a whole number from 1 to {MOST_TASKS}"
    return None


def _check_columns(batch: Batch) -> None:
    shapes = [tuple(column.shape[1:]) for column in batch.rows]
    if len(shapes) != 4 or any(shapes[1:]):
        raise ValueError(
            f"a row has columns of shapes {', '.join(map(str, shapes))}; give (input, target, "
            "task, query): an input, and three numbers, query being 0 or 1"
        )
