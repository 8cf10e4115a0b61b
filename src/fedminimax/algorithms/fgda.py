"""FGDA: descent ascent along STORM estimates for both players, synchronised every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, get_args

import torch
from typing_extensions import TypeVar

from fedminimax.algorithms._tracked import Momenta, Tracked, check_weight, state_at
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.storm import storm
from fedminimax.blocks.vectors import plus
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Clock, Draw, Phase, Point, Problem

Sync = Literal["track", "reaverage", "literal"]
Server = TypeVar("Server", default=Tracked)  # AdaFGDA's hold more
Down = TypeVar("Down", default=Tracked)


@dataclass(frozen=True)
class FGDA(Algorithm[Server, Down, Tracked, Tracked], Generic[Server, Down]):
    """FGDA (Huang et al., AISTATS 2024, Algorithm 1 with A = B = I).

    The estimates begin as gradients on `local_steps` batches. In iteration t = 1, 2, ... a client
    moves and, on one fresh batch, updates its estimates by the gradients at both ends of the move:

        x' = P_X( x - lr * primal_lr * momentum_x )
        y' = P_Y( y + lr * dual_lr   * momentum_y )
        momentum_x <- grad_x f_k(x', y') + (1 - primal_rate) * ( momentum_x - grad_x f_k(x, y) )
        momentum_y <- grad_y f_k(x', y') + (1 - dual_rate)   * ( momentum_y - grad_y f_k(x, y) )

    and x, y <- x', y'. If t is a multiple of `local_steps`, all four vectors are averaged first and
    the move starts from the averages. `sync` says what becomes of the estimates then:

        "track"      (default) they are updated from the averages, as if these were the client's own
        "reaverage"  they are updated from the client's own four vectors, and averaged once more
        "literal"    they stay the averages

    "literal" is the box to the letter: its lines 14 to 16 stand in the else-branch, so that nothing
    is tracked in an iteration that synchronises, and a round draws one batch less. "track" is the
    default since it updates the estimates in every iteration, as the paper's proofs do, in a single
    exchange. With clients far apart "track" and "literal" keep a floor of the order of LocalSGDA's
    at every rate: the jump to the average enters no estimate. The floor of "reaverage" falls with
    the rates.

    Up and down: 2 (dx + dy) floats, with "reaverage" 3 (dx + dy) in two exchanges; the first round
    sends dx + dy less down. The rates of the theory, eta_t = n K^(1/3) / (m + t)^(1/3) with t from
    1 and c eta_t^2, are InverseRoot(n K^(1/3), shift = m + 1, power = 1/3) for lr and
    InverseRoot(c n^2 K^(2/3), shift = m + 1, power = 2/3) for the two others; K is the number of
    clients.

    *Differs from the paper*: the box leaves open what the estimates are after an iteration that
    synchronises; with "literal" they are the averages of its line 5. The proofs need an update in
    every iteration (Lemma 8) and equal estimates after a synchronisation (Lemmas 10 and 11), which
    exclude each other; with "reaverage" the mean of the estimates obeys Lemma 8. With "track" the
    server's point after a round is the average before the common move, which each client then makes
    itself: the old and the new point need not both travel. The run returns the last point, not that
    of a random iteration. Section 4 subtracts where y ascends; the box and the proofs add, and so
    does this. Its prose calls lambda the primal and gamma the dual step size; the box has them the
    other way round, as here. Its runs have lr = 0.001 and primal_lr = dual_lr = 0.1; lr = 1 is our
    default, as the product is the step. The projections onto the problem's sets after every move
    are ours.
    """

    lr: Rate = 1.0  # eta_t
    primal_lr: Rate = 0.1  # gamma
    dual_lr: Rate = 0.1  # lambda
    primal_rate: Rate = 0.5  # beta_{t+1}
    dual_rate: Rate = 0.5  # alpha_{t+1}
    local_steps: int = 8  # q
    sync: Sync = "track"
    keep: ClassVar[tuple[str, ...]] = ("momentum_x", "momentum_y")  # for the first round
    carry: ClassVar[tuple[str, ...]] = ("x", "y")  # a client's own point, for "reaverage"
    solves: ClassVar[str] = "minimax: nonconvex-PL"
    reference: ClassVar[str] = (
        "Huang et al., Adaptive Federated Minimax Optimization with Lower Complexities, AISTATS "
        "2024, Alg. 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_weight(name, "primal_rate", self.primal_rate)
        check_weight(name, "dual_rate", self.dual_rate)
        if self.sync not in get_args(Sync):
            known = ", ".join(get_args(Sync))
            raise ValueError(f"{name}: sync is {self.sync!r}; give one of {known}")
        if self.sync == "literal" and self.local_steps < 2:
            raise ValueError(
                f"{name}: local_steps is {self.local_steps}, but with sync = 'literal' an "
                "iteration that synchronises updates no estimate, and no other would be left: give "
                "at least 2"
            )

    @property
    def init_batches(self) -> int:  # type: ignore[override]  a setting decides
        return self.local_steps  # line 2: q samples

    def steps(self, round: int, client: int) -> int:
        """The box has q - 1 local steps, t = 1 to q - 1, before it synchronises at t = q; with
        "track" clients make that iteration's move themselves, at the start of the next round."""
        return self.local_steps if self.sync == "track" and round > 0 else self.local_steps - 1

    def clock_of(self, clock: Clock) -> Clock:
        """The clock with t - 1 as its iteration. The engine counts batches, of which the
        synchronisation of "literal" draws none."""
        if self.sync != "literal":
            return clock
        return clock._replace(iteration=clock.iteration + clock.round)

    def init_server(self, problem: Problem, start: Point) -> Server:
        none_x, none_y = torch.zeros_like(start.x), torch.zeros_like(start.y)
        server: Any = Tracked(x=start.x, y=start.y, momentum_x=none_x, momentum_y=none_y)
        return server

    def init_client(self, problem: Problem, down: Any, batch: Draw | None) -> Tracked:
        assert batch is not None
        grad = gradients(problem, Point(down.x, down.y), batch)  # line 2
        return Tracked(x=down.x, y=down.y, momentum_x=grad.x, momentum_y=grad.y)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return self.add_synchronisation(
            self.phase(gradients=2) if round else self.first_phase(gradients=2)
        )

    def first_phase(self, **changes: Any) -> Phase:
        """The usual exchange, before there are averages that could travel down."""
        first = self.phase(broadcast=self.broadcast_point, receive=self.receive_point)
        return first._replace(**changes)

    def add_synchronisation(self, local: Phase) -> tuple[Phase, ...]:
        """The local steps, and what a synchronisation adds to them."""
        if self.sync == "track":
            return (local,)
        local = local._replace(aggregate=self.synchronise)
        if self.sync == "literal":
            return (local,)
        again = self.phase(
            broadcast=self.broadcast_point,
            receive=self.receive_target,
            local_step=self.track_to_target,
            send=self.send_momenta,
            aggregate=self.set_momenta,
            steps=1,
            gradients=2,
        )
        return local, again

    def broadcast_point(self, server: Any, clock: Clock) -> Point:
        return Point(server.x, server.y)

    def receive_point(self, down: Point, client: Tracked, clock: Clock) -> Tracked:
        """The server's point, and the client's own estimates."""
        return state_at(down, client)

    def broadcast(self, server: Any, clock: Clock) -> Any:
        return server

    def receive(self, down: Any, client: Tracked, clock: Clock) -> Tracked:
        return state_at(Point(down.x, down.y), down)

    def local_step(
        self, problem: Problem, down: Down, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        clock = self.clock_of(clock)
        new = self.move(problem, client, clock)  # lines 11-12
        return self.track(problem, client, new, batch, clock)  # lines 14-16

    def move(self, problem: Problem, state: Tracked, clock: Clock) -> Point:
        """The point after one step along the estimates."""
        lr = at(self.lr, clock)
        primal_lr, dual_lr = lr * at(self.primal_lr, clock), lr * at(self.dual_lr, clock)
        x = problem.project_x(plus(state.x, -primal_lr, state.momentum_x))
        y = problem.project_y(plus(state.y, dual_lr, state.momentum_y))
        return Point(x, y)

    def track(
        self, problem: Problem, client: Tracked, new: Point, batch: Draw, clock: Clock
    ) -> Tracked:
        """The client at the new point, with estimates that have come along."""
        old = gradients(problem, Point(client.x, client.y), batch)  # line 14: one sample for both
        grad = gradients(problem, new, batch)
        alpha, beta = at(self.dual_rate, clock), at(self.primal_rate, clock)
        v = storm(client.momentum_y, grad.y, old.y, alpha)  # line 15
        w = storm(client.momentum_x, grad.x, old.x, beta)  # line 16
        return Tracked(x=new.x, y=new.y, momentum_x=w, momentum_y=v)

    def send(self, down: Down, client: Tracked, clock: Clock) -> tuple[Tracked, Tracked]:
        return client, client

    def aggregate(self, problem: Problem, server: Any, mean: Tracked, clock: Clock) -> Any:
        return server._replace(**mean._asdict())  # line 5

    def synchronise(self, problem: Problem, server: Server, mean: Tracked, clock: Clock) -> Server:
        """The averages, and the move from them, which is the same for all clients."""
        averaged = self.aggregate(problem, server, mean, clock)
        new = self.move(problem, mean, self.last_clock(clock))  # lines 7-8
        return averaged._replace(x=new.x, y=new.y)

    def last_clock(self, clock: Clock) -> Clock:
        """The clock of the iteration that ends a round, from that at its start."""
        last = clock._replace(iteration=clock.iteration + self.local_steps - 1)
        return self.clock_of(last)

    # The second exchange of "reaverage": a client goes from its own point to the server's.

    def receive_target(self, down: Point, client: Tracked, clock: Clock) -> Tracked:
        return state_at(Point(client.x, client.y), client)

    def track_to_target(
        self, problem: Problem, down: Point, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        return self.track(problem, client, down, batch, clock)

    def send_momenta(self, down: Any, client: Tracked, clock: Clock) -> tuple[Momenta, Tracked]:
        sent = Momenta(momentum_x=client.momentum_x, momentum_y=client.momentum_y)
        return sent, client

    def set_momenta(self, problem: Problem, server: Any, mean: Momenta, clock: Clock) -> Any:
        return server._replace(momentum_x=mean.momentum_x, momentum_y=mean.momentum_y)
