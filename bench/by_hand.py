"""AUC and cross-entropy over clients as one would write them without a library, in two ways of
which the faster one counts: a module with `loss.backward`, and one vector with `functional_call`.

Careful versions: updates in place and of all parameters at once, nothing copied that need not be.
`tests/bench/test_bench.py` compares a round of each method in each way with the engine's.
"""

# torch's own optimisers update by its functions on lists of tensors, which have no public name.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bench.measure import Effort, alone, in_turn
from bench.ours import Steady
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.network import channels_last, pool_first

List = list[Tensor]


class Objective(NamedTuple):
    """A loss of the module's outputs, the labels and so many numbers of its own, of which the last
    is the dual."""

    loss: Callable[..., Tensor]
    numbers: int = 0


def objective_of(problem: Any) -> Objective:
    """The problem's, by hand: that of AUC, with a, b and alpha, or cross-entropy."""
    if isinstance(problem, AUC):
        assert problem.positive_share is not None
        return Objective(partial(auc, problem.positive_share), numbers=3)
    assert isinstance(problem, CrossEntropy)
    return Objective(cross_entropy)


def auc(p: float, outputs: Tensor, labels: Tensor, a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    s, negative = torch.sigmoid(outputs.reshape(-1)), 1 - labels
    squares = (1 - p) * (s - a) ** 2 * labels + p * (s - b) ** 2 * negative
    difference = p * s * negative - (1 - p) * s * labels
    return (squares + 2 * (1 + alpha) * difference).mean() - p * (1 - p) * alpha**2


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.reshape(-1), labels)


class Worker:
    """One copy of the variables: the module's parameters and the objective's own numbers. The
    dual's gradient has its sign turned, so that all variables descend."""

    way = "a module, loss.backward"

    def __init__(self, module: nn.Module, columns: Sequence[Tensor], objective: Objective):
        self.module = pool_first(copy.deepcopy(module))
        for part in self.module.modules():
            if isinstance(part, nn.BatchNorm2d):  # nobody uses running statistics in training
                part.track_running_stats = False
                part.running_mean = part.running_var = part.num_batches_tracked = None
        weights = list(self.module.parameters())
        own = [weights[0].new_zeros(()).requires_grad_() for _ in range(objective.numbers)]
        self.variables = [*weights, *own]
        self.columns, self.objective, self.parameters = columns, objective, len(weights)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        features, labels = self.columns
        return channels_last(features[rows]), labels[rows]

    def gradient(self, features: Tensor, labels: Tensor) -> List:
        with torch.enable_grad():
            own = self.variables[self.parameters :]
            self.objective.loss(self.module(features), labels, *own).backward()
        grads: Any = [v.grad for v in self.variables]
        for variable in self.variables:
            variable.grad = None
        if self.objective.numbers:
            grads[-1].neg_()
        return grads

    def primal(self, values: List) -> List:
        """Of variables, or of what is shaped like them, all but the dual's."""
        return values[:-1]

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


class FlatWorker(Worker):
    """The variables are one vector, of which the module's parameters are views."""

    way = "one vector, functional_call"

    def __init__(self, module: nn.Module, columns: Sequence[Tensor], objective: Objective):
        super().__init__(module, columns, objective)
        self.names = [name for name, _ in self.module.named_parameters()]
        self.shapes = [v.shape for v in self.variables]
        self.sizes = [v.numel() for v in self.variables]
        flat = torch.cat([v.detach().reshape(-1) for v in self.variables])
        self.variables = [flat.requires_grad_()]

    def gradient(self, features: Tensor, labels: Tensor) -> List:
        (flat,) = self.variables
        with torch.enable_grad():
            parts = zip(flat.split(self.sizes), self.shapes, strict=True)
            variables = [part.view(shape) for part, shape in parts]
            weights, own = variables[: self.parameters], variables[self.parameters :]
            named = dict(zip(self.names, weights, strict=True))
            outputs = functional_call(self.module, named, (features,))
            (grad,) = torch.autograd.grad(self.objective.loss(outputs, labels, *own), flat)
        if self.objective.numbers:
            grad[-1:].neg_()
        return [grad]

    def primal(self, values: List) -> List:
        return [values[0][:-1]]


class Loop(ABC):
    """A run of a method client by client, from where the engine's run stands: a call is a round,
    each with the same cohort."""

    def __init__(
        self, run: Steady, module: nn.Module, threads: int = 1, worker: type[Worker] = Worker
    ):
        federation, state = run.federation, run.state
        objective, columns = objective_of(federation.problem), federation.clients.train.columns
        self.method: Any = federation.algorithm
        self.workers = [worker(module, columns, objective) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        weights = federation.weights[run.cohort()]
        self.weights = (weights / weights.sum()).tolist()
        # The batches of this round, in every round: drawing them costs this side nothing.
        self.rows = [own.unbind() for own in run.index()[:, 0].unbind(1)]
        self.load(self.workers[0], state.server, run.store)

    def load(self, worker: Worker, server: Any, store: Any) -> None:
        self.server = worker.split(server.x, server.y)

    @abstractmethod
    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        """What the client sends, in lists like the variables."""

    def aggregate(self, *means: List) -> None:
        self.server = means[0]

    @torch.no_grad()  # it is told to each thread
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
        totals = list(self.pool.map(self.share_of, range(len(self.workers))))
        for other in totals[1:]:
            for held, part in zip(totals[0], other, strict=True):
                torch._foreach_add_(held, part)
        self.aggregate(*totals[0])

    @torch.no_grad()
    def one_client(self) -> None:
        self.client(self.workers[0], 0)


def fastest(loop: type[Loop], run: Steady, module: nn.Module, threads: int = 1) -> tuple[str, Loop]:
    """The loop in the way that takes a client the least time, after the name of that way."""
    found = {kind.way: loop(run, module, threads, kind) for kind in (Worker, FlatWorker)}
    calls = {way: alone(one.one_client) for way, one in found.items()}
    times = in_turn(calls, Effort(0.3, 3))
    way = min(times, key=lambda way: times[way].median)
    return way, found[way]


class SGDALoop(Loop):
    rate = "primal_lr"

    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        worker.goes_from(self.server)
        lr = getattr(self.method, self.rate)
        for rows in self.rows[number]:
            grads = worker.gradient(*worker.batch(rows))
            torch._foreach_add_(worker.variables, grads, alpha=-lr)
        return (worker.variables,)


class FedAvgLoop(SGDALoop):
    rate = "lr"


class CodascaLoop(Loop):
    def load(self, worker: Worker, server: Any, store: Any) -> None:
        super().load(worker, server, store)
        self.control = worker.falling(server.control_x, server.control_y)
        kept = [store.states[k] for k in range(len(self.weights))]
        self.own = [worker.falling(k.control_x, k.control_y) for k in kept]
        self.center = worker.primal(worker.split(kept[0].center, server.y))

    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        worker.goes_from(self.server)
        ahead = torch._foreach_sub(self.control, self.own[number])
        sums = [torch.zeros_like(v) for v in worker.variables]
        for rows in self.rows[number]:
            grads = worker.gradient(*worker.batch(rows))
            pull = torch._foreach_sub(worker.primal(worker.variables), self.center)
            torch._foreach_add_(worker.primal(grads), pull, alpha=self.method.proximal)
            torch._foreach_add_(sums, grads)
            torch._foreach_add_(grads, ahead)
            torch._foreach_add_(worker.variables, grads, alpha=-self.method.lr.value)
        torch._foreach_div_(sums, len(self.rows[number]))
        self.own[number] = sums
        return worker.variables, sums

    def aggregate(self, *means: List) -> None:
        self.server, self.control = means


class MergedCodascaLoop(CodascaLoop):
    """In fewer passes: what is the same in each step, of the controls and of the proximal term, is
    one vector, and new controls follow from how far a client has gone (eq. 6), which is right for
    a constant rate and no sets."""

    def client(self, worker: Worker, number: int) -> tuple[List, ...]:
        worker.goes_from(self.server)
        lr, proximal, batches = self.method.lr.value, self.method.proximal, self.rows[number]
        ahead = torch._foreach_sub(self.control, self.own[number])
        constant = [v.clone() for v in ahead]
        torch._foreach_sub_(worker.primal(constant), self.center, alpha=proximal)
        for rows in batches:
            grads = worker.gradient(*worker.batch(rows))
            torch._foreach_add_(grads, constant)
            pulled = worker.primal(worker.variables)
            torch._foreach_add_(worker.primal(grads), pulled, alpha=proximal)
            torch._foreach_add_(worker.variables, grads, alpha=-lr)
        control = list(torch._foreach_sub(self.server, worker.variables))
        torch._foreach_div_(control, lr * len(batches))
        torch._foreach_sub_(control, ahead)
        self.own[number] = control
        return worker.variables, control


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
