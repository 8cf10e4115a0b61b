"""What NLASG, SCSC and SMVR share, which estimate each level's Jacobian as a matrix: settings,
first estimates, what is sent, and the product of Jacobians.

They were written for one machine. In the experiments of the Fed-DR-SCGD paper (Gao, ICML 2024,
Section 5.1) every client runs them, and x, the inner values and the Jacobians are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from fedminimax.algorithms._compositions import SampledLevels
from fedminimax.algorithms._tracked import check_weight
from fedminimax.blocks.schedules import Rate
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem

Sent = Literal["dense", "structured"]


class Levels(NamedTuple):
    """x and what is known of every level, level 1 first: at a client, and on the way."""

    x: Tensor
    inner: tuple[Tensor, ...]  # of the levels before the last
    jacobians: tuple[Tensor, ...]  # of all; the last one's is its gradient


class Server(NamedTuple):
    x: Tensor
    y: Tensor  # of length 0
    inner: tuple[Tensor, ...]  # nothing before the first replies, as for the Jacobians
    jacobians: tuple[Tensor, ...]


@dataclass(frozen=True)
class JacobianMethod(Algorithm):
    """The server averages x, all inner values and all Jacobians; a client's first estimates are its
    own. A method without Jacobian estimates has those of its last step averaged, and its next step
    moves along the product of the averages.

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

    def init_server(self, problem: Problem, start: Point) -> Server:
        return Server(x=start.x, y=start.y, inner=(), jacobians=())

    def init_client(self, problem: Problem, down: Levels, batch: Draw | None) -> Any:
        assert batch is not None
        F, h = SampledLevels(problem, batch), [down.x]
        for k in range(1, problem.depth):
            h.append(F.value(k, h[k - 1]))
        self.check_memory(h)
        inner = [F.value_and_jacobian(k, h[k - 1])[1] for k in range(1, problem.depth)]
        jacobians = self.pack(problem, (*inner, F.slope(h[-1])))
        return Levels(x=down.x, inner=tuple(h[1:]), jacobians=jacobians)

    def phases(self, round: int) -> tuple[Phase, ...]:
        receive = self.receive if round else self.receive_first
        return (self.phase(receive=receive, gradients=self.step_gradients),)

    def broadcast(self, server: Server, clock: Clock) -> Levels:
        return Levels(x=server.x, inner=server.inner, jacobians=server.jacobians)

    def receive_first(self, down: Levels, client: Any, clock: Clock) -> Any:
        """Before there are averages, every client has its own."""
        return Levels(x=down.x, inner=client.inner, jacobians=client.jacobians)

    def receive(self, down: Levels, client: Any, clock: Clock) -> Any:
        return down

    def send(self, down: Levels, client: Any, clock: Clock) -> tuple[Levels, Any]:
        return Levels(x=client.x, inner=client.inner, jacobians=client.jacobians), client

    def aggregate(self, problem: Problem, server: Server, mean: Levels, clock: Clock) -> Server:
        return Server(x=mean.x, y=server.y, inner=mean.inner, jacobians=mean.jacobians)

    def pack(self, problem: Problem, jacobians: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The Jacobians as they are kept and sent."""
        return tuple(
            jacobian
            if known is None
            else jacobian.flatten().index_select(0, known[1].to(jacobian.device))
            for jacobian, known in self._structures(problem, jacobians)
        )

    def unpack(self, problem: Problem, packed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            entries
            if known is None
            else _fill(known[0].to(entries), known[1].to(entries.device), entries)
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


def _fill(constant: Tensor, varying: Tensor, entries: Tensor) -> Tensor:
    return constant.flatten().scatter(0, varying, entries).reshape(constant.shape)
