"""What the parallelised methods share that estimate each level's Jacobian as a matrix.

They were written for one machine. The Fed-DR-SCGD paper runs them at every client and averages x,
the inner values and the Jacobians in every round (papers/fed-dr-scgd.txt, Section 5.1).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from fedminimax.algorithms._tracked import check_weight
from fedminimax.blocks.schedules import Rate, at
from fedminimax.problems.gradients import gradients, inner_jacobian
from fedminimax.types import Algorithm, Batch, Clock, Draw, Phase, Point, Problem

Sent = Literal["dense", "structured"]


class Levels(NamedTuple):
    """x and what is known of every level, level 1 first: at a client, and on the way."""

    x: Tensor
    inner: tuple[Tensor, ...]  # of the levels before the last
    jacobians: tuple[Tensor, ...]  # of all; the last one's is its gradient


class Server(NamedTuple):
    x: Tensor
    y: Tensor  # of length 0
    inner: tuple[Tensor, ...] = ()  # nothing before the first replies
    jacobians: tuple[Tensor, ...] = ()


class Level(NamedTuple):
    """A level on one batch. The last level's value is nobody's input, so it has none."""

    problem: Problem
    number: int
    batch: Batch

    def value(self, at: Tensor) -> Tensor:
        if self.number == self.problem.depth:
            return at[:0]
        return self.problem.inner(self.number, at, self.batch)

    def value_and_jacobian(self, at: Tensor) -> tuple[Tensor, Tensor]:
        if self.number == self.problem.depth:
            return at[:0], gradients(self.problem, Point(at, at[:0]), (self.batch,)).x
        return inner_jacobian(self.problem, self.number, at, self.batch)


@dataclass(frozen=True)
class JacobianMethod(Algorithm):
    """Each client moves along the product of its Jacobians, and then tracks every level, from the
    first to the last, on one fresh batch per level; the server averages x, values and Jacobians.

    A method without Jacobian estimates of its own has those of its last step averaged, and its next
    step moves along the product of the averages.

    sent: "dense" sends every entry of a Jacobian, as the Fed-DR-SCGD paper counts. "structured"
    sends only those that differ between rows or points, if the problem says which they are
    (`jacobian_structure`); the receiver fills in the others, and the numbers are the same. The last
    level's gradient always travels whole.
    most_gb: a client is refused if its Jacobians would need more memory in a step: those that it
    has, and those that the step takes. How many clients step at a time is the executor's affair,
    and what a product or a difference of Jacobians needs on the way is not counted.
    """

    lr: Rate = 1e-3
    averaging_rate: Rate = 0.95  # the paper's coefficient of the momentum
    local_steps: int = 4  # p
    sent: Sent = "dense"
    most_gb: float = 2.0
    keep: ClassVar[tuple[str, ...]] = ("inner", "jacobians")  # for the first round
    init_batches: ClassVar[int] = 1
    maximises: ClassVar[bool] = False
    levels: ClassVar[int | None] = None
    step_gradients: ClassVar[int] = 1  # points at which a step takes Jacobians

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_weight(name, "averaging_rate", self.averaging_rate)
        if self.sent not in get_args(Sent):
            raise ValueError(
                f"{name}: sent is {self.sent!r}; give {' or '.join(map(repr, get_args(Sent)))}"
            )
        if not self.most_gb > 0:
            raise ValueError(f"{name}: most_gb is {self.most_gb!r}; give a number above 0")

    @abstractmethod
    def track(
        self,
        level: Level,
        value: Tensor,
        jacobian: Tensor,
        old: Tensor,
        new: Tensor,
        rate: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        """The level's new value and Jacobian, from those before; its input goes from `old` to
        `new`."""

    def direction(self, client: Any, jacobians: tuple[Tensor, ...]) -> Tensor:
        return product(jacobians)

    def bounded(self, jacobian: Tensor) -> Tensor:
        """An estimate of a Jacobian, as it is kept."""
        return jacobian

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(*start)

    def init_client(self, problem: Problem, down: Levels, batch: Draw | None) -> Any:
        assert batch is not None
        values = [down.x]
        for number in range(1, problem.depth):
            values.append(problem.inner(number, values[-1], batch[number - 1]))
        self.check_memory(values)
        jacobians = tuple(
            self.bounded(Level(problem, number, rows).value_and_jacobian(value)[1])
            for number, (value, rows) in enumerate(zip(values, batch, strict=True), start=1)
        )
        return Levels(down.x, tuple(values[1:]), self.packed(problem, jacobians))

    def phases(self, round: int) -> tuple[Phase, ...]:
        receive = self.receive if round else self.receive_first
        return (self.phase(receive=receive, gradients=self.step_gradients),)

    def broadcast(self, server: Server, clock: Clock) -> Levels:
        return Levels(server.x, server.inner, server.jacobians)

    def receive_first(self, down: Levels, client: Any, clock: Clock) -> Any:
        """Before there are averages, every client has its own."""
        return Levels(down.x, client.inner, client.jacobians)

    def receive(self, down: Levels, client: Any, clock: Clock) -> Any:
        return down

    def local_step(
        self, problem: Problem, down: Levels, client: Any, batch: Draw, clock: Clock
    ) -> Any:
        rate, before = at(self.averaging_rate, clock), self.unpacked(problem, client.jacobians)
        along = self.direction(client, before)
        x = problem.project_x(client.x - at(self.lr, clock) * along)
        old, new, inner, jacobians = client.x, x, (), ()
        # What the last level has for a value is of length 0, as is what it is tracked from.
        values = (*client.inner, client.x[:0])
        for number, (value, jacobian) in enumerate(zip(values, before, strict=True), start=1):
            level = Level(problem, number, batch[number - 1])
            tracked, fresh = self.track(level, value, jacobian, old, new, rate)
            jacobians = (*jacobians, fresh)
            old, new, inner = value, tracked, (*inner, tracked)
        return self.stepped(Levels(x, inner[:-1], self.packed(problem, jacobians)), along, rate)

    def stepped(self, reached: Levels, along: Tensor, rate: Tensor | float) -> Any:
        """The client after a step along `along`."""
        return reached

    def send(self, down: Levels, client: Any, clock: Clock) -> tuple[Levels, Any]:
        return Levels(client.x, client.inner, client.jacobians), client

    def aggregate(self, problem: Problem, server: Server, mean: Levels, clock: Clock) -> Server:
        return Server(mean.x, server.y, mean.inner, mean.jacobians)

    def packed(self, problem: Problem, jacobians: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The Jacobians as they are kept and sent."""
        return tuple(
            jacobian
            if known is None
            else jacobian.flatten().index_select(0, known[1].to(jacobian.device))
            for jacobian, known in self._structures(problem, jacobians)
        )

    def unpacked(self, problem: Problem, packed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            entries
            if known is None
            else _filled(known[0].to(entries), known[1].to(entries.device), entries)
            for entries, known in self._structures(problem, packed)
        )

    def _structures(self, problem: Problem, jacobians: tuple[Tensor, ...]) -> Any:
        if self.sent == "dense":
            return [(jacobian, None) for jacobian in jacobians]
        told = problem.jacobian_structure
        inner = [(jacobian, told(k)) for k, jacobian in enumerate(jacobians[:-1], start=1)]
        return [*inner, (jacobians[-1], None)]

    def check_memory(self, values: list[Tensor]) -> None:
        sizes = [value.numel() for value in values]
        entries = sum(a * b for a, b in pairwise(sizes)) + sizes[-1]
        copies = 1 + self.step_gradients
        need = copies * entries * values[0].element_size() / 1e9
        if need > self.most_gb:
            raise ValueError(
                f"{type(self).__name__}: the Jacobians of levels of lengths "
                f"{', '.join(map(str, sizes))} have {entries:,} entries, and a step holds {copies} "
                f"copies: {need:.3g} GB for each client at work, but most_gb is {self.most_gb:g}: "
                "use Fed-DR-SCGD, which keeps products of Jacobians and vectors, or raise most_gb"
            )


def product(jacobians: tuple[Tensor, ...]) -> Tensor:
    """J_1' J_2' ... J_K', the gradient of the composition if every factor is exact."""
    *inner, slope = jacobians
    for jacobian in reversed(inner):
        slope = slope @ jacobian
    return slope


def _filled(constant: Tensor, varying: Tensor, entries: Tensor) -> Tensor:
    return constant.flatten().scatter(0, varying, entries).reshape(constant.shape)
