"""What FGDA and AdaFGDA share: Algorithm 1 of the AdaFGDA paper, in its two readings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fedminimax.algorithms._tracked import MoveThenTrack, Tracked, check_weight, storm_tracked
from fedminimax.blocks.schedules import Rate, at
from fedminimax.blocks.vectors import plus
from fedminimax.types import Clock, Draw, Phase, Point, Problem

Sync = Literal["track", "reaverage"]


@dataclass(frozen=True)
class FederatedDescentAscent(MoveThenTrack):
    """Iterations t = 1, 2, ... of which every `local_steps`-th one is a synchronisation.

    It leaves open what clients track there, because lines 14-16 stand in the other branch.

    - track: clients go on from the averages of all four vectors, as if these were their own. The
      move of a synchronisation starts from the same averages everywhere, so every client makes it
      itself, and the server's point after a round is the average before that move. The first round
      has local_steps - 1 iterations, the others local_steps.
    - reaverage: the server moves; every client tracks from its own point before the average to the
      moved one, and the estimates are averaged once more. A round has local_steps - 1 iterations
      and the synchronisation that ends it, in an exchange of its own.
    """

    lr: Rate = 1.0  # eta_t
    primal_lr: Rate = 0.1  # gamma
    dual_lr: Rate = 0.1  # lambda
    primal_rate: Rate = 0.5  # beta_{t+1}
    dual_rate: Rate = 0.5  # alpha_{t+1}
    local_steps: int = 8  # q
    sync: Sync = "track"
    carry: ClassVar[tuple[str, ...]] = ("x", "y")  # own points, for the exchanges that need them

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("primal_rate", "dual_rate"):
            check_weight(type(self).__name__, name, getattr(self, name))
        if self.sync not in get_args(Sync):
            known = " or ".join(get_args(Sync))
            raise ValueError(f"{type(self).__name__}: sync is {self.sync!r}; give {known}")

    @property
    def init_batches(self) -> int:  # type: ignore[override]
        return self.local_steps  # line 2: q samples

    def steps(self, round: int, client: int) -> int:
        whole = self.sync == "track" and round > 0
        return self.local_steps if whole else self.local_steps - 1

    def phases(self, round: int) -> tuple[Phase, ...]:
        phases = self.local_phases(round)
        if self.sync == "track":
            return phases
        again = self.phase(
            broadcast=self.broadcast_point,
            receive=self.receive_own,
            local_step=self.track_from_own,
            send=self.send_momenta,
            aggregate=super().aggregate,
            steps=1,
            gradients=2,
        )
        return *phases[:-1], phases[-1]._replace(aggregate=self.aggregate_and_move), again

    def local_phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(gradients=2) if round else self.first_phase(gradients=2),)

    def direction(self, state: Any, down: Any) -> Point:
        """A^-1 times the primal's estimate and B^-1 times the dual's: new vectors, or the estimates
        themselves."""
        raise TypeError(f"{type(self).__name__} does not say where it moves: add direction")

    def moved(self, problem: Problem, state: Any, down: Any, clock: Clock) -> Point:
        lr, direction = at(self.lr, clock), self.direction(state, down)
        made = direction.x is not state.momentum_x
        return Point(
            problem.project_x(plus(state.x, -lr * at(self.primal_lr, clock), direction.x, made)),
            problem.project_y(plus(state.y, lr * at(self.dual_lr, clock), direction.y)),
        )

    def tracked(
        self, problem: Problem, client: Any, new: Point, batch: Draw, clock: Clock
    ) -> Tracked:
        rates = at(self.primal_rate, clock), at(self.dual_rate, clock)
        return storm_tracked(problem, client, new, batch, *rates)

    def local_step(
        self, problem: Problem, down: Any, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        new = self.moved(problem, client, down, clock)  # lines 7-8 and 11-12
        return self.tracked(problem, client, new, batch, clock)  # lines 14-16

    def aggregate_and_move(self, problem: Problem, server: Any, mean: Tracked, clock: Clock) -> Any:
        server = self.aggregate(problem, server, mean, clock)  # lines 5-6
        now = clock._replace(iteration=clock.iteration + self.local_steps - 1)
        new = self.moved(problem, server, self.broadcast(server, now), now)  # lines 7-8
        return server._replace(x=new.x, y=new.y)

    def receive_own(self, down: Any, client: Any, clock: Clock) -> Tracked:
        """The client as it was at the end of the phase before."""
        return Tracked(client.x, client.y, client.momentum_x, client.momentum_y)

    def track_from_own(
        self, problem: Problem, down: Point, client: Tracked, batch: Draw, clock: Clock
    ) -> Tracked:
        return self.tracked(problem, client, down, batch, clock)
