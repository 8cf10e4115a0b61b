"""AUC over clients as one would write it without a library: a module, autograd, updates in place.

A careful version: gradients by one call of autograd, updates of all parameters at once, nothing
copied that need not be. `tests/test_bench.py` compares a round of each method with the engine's.
"""

# torch's own optimisers update by its functions on lists of tensors, which have no public name.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from fedminimax.bench.ours import Steady
from fedminimax.problems.network import channels_last, pool_first

List = list[Tensor]


class Worker:
    """One copy of the variables: the module's parameters, a, b and alpha. The dual's gradient has
    its sign turned, so that all variables descend."""

    def __init__(self, module: nn.Module, columns: Sequence[Tensor], positive_share: float):
        self.module = pool_first(copy.deepcopy(module))
        for part in self.module.modules():
            if isinstance(part, nn.BatchNorm2d):  # nobody uses running statistics in training
                part.track_running_stats = False
                part.running_mean = part.running_var = part.num_batches_tracked = None
        weights = list(self.module.parameters())
        own = [weights[0].new_zeros(()).requires_grad_() for _ in range(3)]
        self.variables = [*weights, *own]
        self.columns, self.share = columns, positive_share

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        features, labels = self.columns
        return channels_last(features[rows]), labels[rows]

    def gradient(self, features: Tensor, labels: Tensor) -> List:
        p, (a, b, alpha) = self.share, self.variables[-3:]
        with torch.enable_grad():
            s = torch.sigmoid(self.module(features).reshape(-1))
            negative = 1 - labels
            squares = (1 - p) * (s - a) ** 2 * labels + p * (s - b) ** 2 * negative
            difference = p * s * negative - (1 - p) * s * labels
            loss = (squares + 2 * (1 + alpha) * difference).mean() - p * (1 - p) * alpha**2
            grads = list(torch.autograd.grad(loss, self.variables))
        grads[-1] = -grads[-1]
        return grads

    def split(self, x: Tensor, y: Tensor) -> List:
        """The vectors of the engine as tensors shaped like the variables."""
        flat = torch.cat([x, y])
        parts = flat.split([v.numel() for v in self.variables])
        return [p.reshape(v.shape).clone() for p, v in zip(parts, self.variables, strict=True)]

    def falling(self, x: Tensor, y: Tensor) -> List:
        """The same, of gradients."""
        return self.split(x, -y)

    def goes_from(self, server: List) -> None:
        torch._foreach_copy_(self.variables, server)


class Loop:
    """A run of a method client by client, from where the engine's run stands: a call is a round."""

    def __init__(self, run: Steady, module: nn.Module, threads: int = 1):
        federation, state = run.federation, run.state
        share = federation.problem.positive_share  # type: ignore[attr-defined]
        columns = federation.clients.train.columns
        self.method: Any = federation.algorithm
        self.workers = [Worker(module, columns, share) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.weights = (federation.weights / federation.weights.sum()).tolist()
        count, steps = len(self.weights), self.method.local_steps
        # The batches of this round, in every round: drawing them costs this side nothing.
        draws = federation.sampler.draw(federation.everyone, state.iteration, steps)
        self.rows = [[draws._index[t, 0, k] for t in range(steps)] for k in range(count)]  # type: ignore[index]
        self.load(self.workers[0], state.server, run.store)

    def load(self, worker: Worker, server: Any, store: Any) -> None:
        self.server = worker.split(server.x, server.y)

    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        """What the client sends, in lists like the variables."""
        raise NotImplementedError

    def aggregate(self, *means: List) -> None:
        self.server = means[0]

    def share_of(self, position: int) -> tuple[List, ...]:
        """The weighted sum over the clients of one worker."""
        total: tuple[List, ...] = ()
        worker = self.workers[position]
        for k in range(position, len(self.weights), len(self.workers)):
            sent = self.client(worker, k)
            if not total:
                total = tuple([torch.zeros_like(v) for v in part] for part in sent)
            for held, part in zip(total, sent, strict=True):
                torch._foreach_add_(held, part, alpha=self.weights[k])
        return total

    @torch.no_grad()
    def __call__(self) -> None:
        if len(self.workers) == 1:
            self.aggregate(*self.share_of(0))
            return
        totals = list(self.pool.map(self._share_without_graph, range(len(self.workers))))
        for other in totals[1:]:
            for held, part in zip(totals[0], other, strict=True):
                torch._foreach_add_(held, part)
        self.aggregate(*totals[0])

    def _share_without_graph(self, position: int) -> tuple[List, ...]:
        with torch.no_grad():  # it is told to each thread
            return self.share_of(position)


class SGDALoop(Loop):
    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        worker.goes_from(self.server)
        for rows in self.rows[number]:
            grads = worker.gradient(*worker.batch(rows))
            torch._foreach_add_(worker.variables, grads, alpha=-self.method.primal_lr)
        return (worker.variables,)


class CodascaLoop(Loop):
    def load(self, worker: Worker, server: Any, store: Any) -> None:
        super().load(worker, server, store)
        self.control = worker.falling(server.control_x, server.control_y)
        kept = [store.states[k] for k in range(len(self.weights))]
        self.own = [worker.falling(k.control_x, k.control_y) for k in kept]
        self.center = worker.split(kept[0].center, server.y)[:-1]

    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        worker.goes_from(self.server)
        ahead = torch._foreach_sub(self.control, self.own[number])
        sums = [torch.zeros_like(v) for v in worker.variables]
        for rows in self.rows[number]:
            grads = worker.gradient(*worker.batch(rows))
            pull = torch._foreach_sub(worker.variables[:-1], self.center)
            torch._foreach_add_(grads[:-1], pull, alpha=self.method.proximal)
            torch._foreach_add_(sums, grads)
            torch._foreach_add_(grads, ahead)
            torch._foreach_add_(worker.variables, grads, alpha=-self.method.lr.value)
        torch._foreach_div_(sums, len(self.rows[number]))
        self.own[number] = sums
        return worker.variables, sums

    def aggregate(self, *means: List) -> None:
        self.server, self.control = means


class AdaFGDALoop(Loop):
    def load(self, worker: Worker, server: Any, store: Any) -> None:
        super().load(worker, server, store)
        self.momentum = worker.falling(server.momentum_x, server.momentum_y)
        self.memory = worker.split(server.memory_x, server.memory_y)

    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        method = self.method
        worker.goes_from(self.server)
        momentum = [v.clone() for v in self.momentum]
        scale = torch._foreach_sqrt(self.memory)
        torch._foreach_add_(scale, method.scale_floor)
        for rows in self.rows[number]:
            batch = worker.batch(rows)
            before = worker.gradient(*batch)
            torch._foreach_addcdiv_(
                worker.variables, momentum, scale, value=-method.lr * method.primal_lr
            )
            torch._foreach_sub_(momentum, before)
            torch._foreach_mul_(momentum, 1 - method.primal_rate)
            torch._foreach_add_(momentum, worker.gradient(*batch))
        return worker.variables, momentum

    def aggregate(self, *means: List) -> None:
        self.server, self.momentum = means
        rate = self.method.scale_rate
        torch._foreach_mul_(self.memory, 1 - rate)
        torch._foreach_addcmul_(self.memory, self.momentum, self.momentum, value=rate)
