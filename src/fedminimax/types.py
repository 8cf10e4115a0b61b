"""The contract: what a problem, an algorithm and the engine say to each other.

Everything an algorithm handles is a 1-D tensor or a NamedTuple of 1-D tensors; everything it does
is a pure function. That is what lets the same method run client by client, under vmap, compiled and
at real sites.
"""

# torch gives `tensordot` and `tolist` no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedminimax.blocks.precision import counting
from fedminimax.blocks.schedules import Schedule

Weights = Literal["uniform", "size"]
Vectors = tuple[Tensor, ...]  # of a question to the clients, and of their answers
Measures = dict[str, Any]  # by name; what is not a number is shown, not ranked
# What is wrong with the reply of a client that has so many rows, if anything is.
AnswerCheck = Callable[[Vectors, int], str | None]
# The four NamedTuples of a method; `Algorithm` alone stands for a method with any of them.
Server = TypeVar("Server", default=Any)
Down = TypeVar("Down", default=Any)
Client = TypeVar("Client", default=Any)
Up = TypeVar("Up", default=Any)
MOST_VARIABLES = 50  # that a record of a run holds
HOST = torch.device("cpu")


class NonFiniteError(ValueError):
    """A NaN or an infinity where a number is needed; the message says where."""


class Point(NamedTuple):
    """The two players: `x` descends, `y` ascends. A problem without a maximisation has a `y` of
    length 0."""

    x: Tensor
    y: Tensor


class Batch(NamedTuple):
    """Rows of one client. `weight` sums to one, so that a mean over rows is a weighted sum and
    padding is exact.

    >>> batch = batch_of(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]))
    >>> batch.mean(batch.features[:, 0])
    tensor(2.)
    """

    rows: tuple[Tensor, ...]
    weight: Tensor
    # 1 where a row only fills up the shape; of length 0 when every row is real and counts the same
    padding: Tensor

    @property
    def features(self) -> Tensor:
        """The first column, which may have several dimensions."""
        return self.rows[0]

    @property
    def labels(self) -> Tensor:
        """The second column."""
        return self.rows[1]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over rows of `values`, whose first dimension counts the rows."""
        return torch.tensordot(self.weight.to(values.dtype), values, dims=1)


def batch_of(*rows: Tensor) -> Batch:
    """A batch in which every given row counts the same."""
    n = len(rows[0])
    dtype = rows[0].dtype if rows[0].is_floating_point() else torch.get_default_dtype()
    weight = torch.full((n,), 1.0 / n, dtype=dtype, device=rows[0].device)
    return Batch(rows, weight, weight[:0])


Draw = tuple[Batch, ...]
"""What a local step receives: one independent batch per level of the problem, level 1 first."""


class Clock(NamedTuple):
    """Where a run stands, as 0-d tensors: a rate that depends on it never makes a compiled round
    compile again. Counts are float64, so that dividing them loses nothing.

    In `send`, `step` is the number of steps taken; in `broadcast` and `aggregate`, `steps` is that
    of the client that takes most, and `iteration` that at the start of the phase.
    """

    round: Tensor
    phase: Tensor
    step: Tensor  # the local step within the phase
    iteration: Tensor  # local steps since the run began, this one not counted
    stage: Tensor
    client: Tensor  # this client's number
    steps: Tensor  # how many local steps this client takes in this phase
    replies: Tensor  # how many clients take part in this phase
    clients: Tensor  # how many there are
    share: Tensor  # the weight of those that take part, of 1 in all

    @staticmethod
    def at(device: torch.device = HOST, **numbers: float) -> Clock:
        """A clock with the given numbers; the others are 0, and 1 for the counts.

        >>> int(Clock.at(round=3).round), float(Clock.at().steps)
        (3, 1.0)
        """
        get, kind = numbers.get, counting(device)
        return Clock(
            *[integer(int(get(name, 0)), device) for name in _PLACES],
            *[_real(float(get(name, 1.0)), kind, device) for name in _COUNTS],
        )


_COUNTS = ("steps", "replies", "clients", "share")
_PLACES = tuple(name for name in Clock._fields if name not in _COUNTS)


# Most numbers of a clock are those of the round before.


@lru_cache(256)
def integer(number: int, device: torch.device = HOST) -> Tensor:
    """A whole number as a 0-d tensor."""
    return torch.tensor(number, device=device)


@lru_cache(256)
def _real(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(number, dtype=dtype, device=device)


class Query(Protocol):
    """How a problem learns from its clients outside training: a question goes out, vectors come
    back.

    `mean` weights clients as the run does, `sum` does not, `each` returns one reply per client and
    is meant for what a client may publish (its own AUC, its counts). `sees_rows` is true only in
    the simulator, where exact pooled measures can be had. `tells_each` is false at the sites of a
    masked run, where `each` is refused. Every call is counted.

    >>> from fedminimax.data.clients import Clients
    >>> from fedminimax.engine.query import LocalQuery
    >>> from fedminimax.problems.functions import Minimax
    >>> problem = Minimax(lambda x, y, b: b.mean((b.rows[0] - x) ** 2).sum(), torch.zeros(1))
    >>> clients = Clients([(torch.full((2, 1), 1.0),), (torch.full((5, 1), 3.0),)])
    >>> ask = LocalQuery(problem, clients, "train", clients.weight_vector("uniform"))
    >>> ask.mean("loss", torch.zeros(1), torch.zeros(0))
    (tensor(5.),)
    """

    sees_rows: bool
    tells_each: bool
    names: Sequence[str]
    weights: Tensor
    sampled_positive_share: float | None  # of every batch, when batches are class-balanced

    def each(self, question: str, *vectors: Tensor) -> list[tuple[Tensor, ...]]:
        """The reply of each client, in the order of `names`."""
        ...

    def mean(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        """The mean of the replies, weighted as the run weights its clients."""
        ...

    def sum(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        """The sum of the replies."""
        ...


class Problem(ABC):
    """min over x, max over y of F_K( ... F_1(x) ... , y), each F_k a mean over clients of what is
    written here.

    A least-squares problem in full:

    >>> class LeastSquares(Problem):
    ...     def start(self):
    ...         return Point(torch.zeros(2), torch.zeros(0))
    ...     def outer(self, value, y, batch):
    ...         return batch.mean((batch.features @ value - batch.labels) ** 2)
    >>> batch = batch_of(torch.eye(2), torch.tensor([1.0, 3.0]))
    >>> LeastSquares().outer(torch.tensor([1.0, 1.0]), torch.zeros(0), batch)
    tensor(2.)
    """

    depth: int = 1  # K, the number of levels
    monitor: str = "loss"  # the metric that chooses the best round
    larger_is_better: bool = False
    client_weights: Weights = "size"  # unless the run says otherwise
    # Is every level a mean over rows, of which each is computed from its own row alone?
    by_rows: bool = False
    maximised: bool = True  # does y ascend? If not, it is a method's to set, or stays as it is
    # A problem whose best y for a given x follows from means over rows says how: rows -> numbers,
    # mean numbers -> y.
    dual_statistics: Any = None
    dual_from: Any = None
    best_dual_from: Any = None  # if the best y does not follow as a method's rule (CODA's) has it
    # Has each client entries of its own in what is summed up? Then masks would hide nothing.
    own_entries: ClassVar[bool] = False
    # Of questions whose answers have bounds: sites' replies are checked before they are used.
    checks: ClassVar[Mapping[str, AnswerCheck]] = {}

    @property
    def sweep_gradients(self) -> int:
        """What a pass through all levels and back costs, in gradients of one level."""
        return self.depth

    @abstractmethod
    def start(self) -> Point:
        """Where a run begins unless it is given a point."""

    def start_from(self, module: nn.Module) -> Tensor:
        """The x that a module's weights give to begin with."""
        raise ValueError(f"{type(self).__name__} has no torch module: start from a point or vector")

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        """F_level at one client, for level = 1 .. depth - 1."""
        raise ValueError(
            f"{type(self).__name__} has depth {self.depth}: it has no inner level {level}"
        )

    def reference(self, level: int, value: Tensor) -> Tensor | None:
        """A part of an inner level that no row changes, from which privacy for rows measures how
        far a row moves the level; None: zero."""
        return None

    def row_scale(self, level: int) -> float:
        """The size of what a row adds to that level, in units of a gradient: `row_clip` is times
        this for the level's values, and for its Jacobian."""
        return 1.0

    def jacobian_structure(self, level: int) -> tuple[Tensor, Tensor] | None:
        """Of an inner level whose Jacobian has entries that no row and no point changes: the matrix
        with these, and where in it, flattened, the others stand."""
        return None

    @abstractmethod
    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """F_K at one client: a number."""

    def project_x(self, x: Tensor, /) -> Tensor:
        """The nearest x in the set that x is limited to; as it is if there is none."""
        return x

    def project_y(self, y: Tensor, /) -> Tensor:
        """The nearest y in the set that y is limited to; as it is if there is none."""
        return y

    def prepare(self, ask: Query) -> Problem:
        """The problem with what only the clients' training rows can tell (a prior, say), before
        round 0."""
        return self

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        """A client's reply, computed on all its rows of the split asked about."""
        if question == "inner":
            return (self.inner(int(vectors[1]), vectors[0], batch),)
        if question == "loss":
            return (self.outer(vectors[0], vectors[1], batch),)
        from fedminimax.problems import questions  # derivatives are taken one layer above

        return questions.answer(self, question, vectors, batch)

    def moments(self, point: Point, ask: Query) -> Tensor | None:
        """What evaluating at a point needs to know of the training rows: batch-norm moments."""
        return None

    def module(self, point: Point, moments: Tensor | None = None) -> nn.Module:
        """The torch module that a point describes."""
        raise ValueError(f"{type(self).__name__} has no torch module; its solution is the point")

    def variables(self, point: Point, ask: Query) -> dict[str, float]:
        """The few numbers of a point that mean something one by one, for the record of a run: the
        dual, if it is short. Clients are not asked anything; `ask` has their names."""
        if point.y.numel() > MOST_VARIABLES:
            return {}
        return {f"y{number}": value for number, value in enumerate(point.y.tolist(), start=1)}

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        """Named measures at the server's point. A name that is not a number (a list of sites, say)
        is shown, not ranked."""
        value = point.x
        for level in range(1, self.depth):
            (value,) = ask.mean("inner", value, torch.tensor(level))
        (loss,) = ask.mean("loss", value, point.y)
        return {"loss": float(loss)}


class Phase(NamedTuple):
    """One exchange of a round: the server broadcasts, the clients receive, step and send, the
    server aggregates."""

    broadcast: Callable[..., Any]
    receive: Callable[..., Any]
    local_step: Callable[..., Any]
    send: Callable[..., Any]
    aggregate: Callable[..., Any]
    steps: int | None = None  # None: what `Algorithm.steps` says for each client
    data: Literal["minibatch", "whole"] = "minibatch"
    draw: Literal["fresh", "same"] = "fresh"  # same: the batches of the phase before
    # same: that of the phase before; auxiliary: the rows that the server itself holds
    cohort: Literal["same", "redraw", "all", "auxiliary"] = "same"
    weights: Literal["run", "uniform"] = "run"  # of the clients in the mean
    gradients: int = 1  # gradient evaluations per local step; of a composition, through all levels


@dataclass(frozen=True)
class Algorithm(Generic[Server, Down, Client, Up]):
    """A method: its hyper-parameters, and pure functions between four kinds of NamedTuple.

    `Server` is the server's state, `Down` is all that travels down, `Client` is a client's state
    during a phase, `Up` is all that travels up; a method names its own in square brackets. The
    server sees only the weighted mean of `Up`. A method inherits what it does not define, and what
    it inherits is plain averaging of a Point. So local gradient descent is one function:

    >>> from fedminimax.problems.gradients import gradients
    >>> @dataclass(frozen=True)
    ... class Descent(Algorithm[Point, Point, Point, Point]):
    ...     lr: float = 0.5
    ...     local_steps: int = 1
    ...     def local_step(self, problem, down, client, batch, clock):
    ...         return client._replace(x=client.x - self.lr * gradients(problem, client, batch).x)
    >>> from fedminimax.problems.functions import Minimax
    >>> problem = Minimax(lambda x, y, batch: batch.mean((batch.rows[0] - x) ** 2), torch.zeros(1))
    >>> draw = (batch_of(torch.tensor([4.0])),)
    >>> Descent().local_step(problem, None, problem.start(), draw, Clock.at()).x
    tensor([4.])
    """

    keep: ClassVar[tuple[str, ...]] = ()  # the Client fields that live on between rounds
    carry: ClassVar[tuple[str, ...]] = ()  # those that live on between the phases of one round
    init_batches: ClassVar[int] = 0  # mini-batches that init_client needs, per level
    partial: ClassVar[bool] = False  # does its theory allow some clients to be away?
    auxiliary: ClassVar[bool] = False  # does it need rows at the server? Then only in simulations
    maximises: ClassVar[bool] = True  # does it move y?
    robust: ClassVar[bool] = True  # may a robust reducer stand in for the mean of its replies?
    levels: ClassVar[int | None] = 1  # the depth of problem that it solves; None: any
    solves: ClassVar[str] = ""  # in words, where `maximises` and `levels` do not say it
    reference: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_rate(type(self).__name__, field.name, getattr(self, field.name))

    def for_clients(self, count: int) -> Algorithm:
        """The method for a run with that many clients."""
        return self

    def for_problem(self, problem: Problem) -> Algorithm:
        """The method for a run on that problem."""
        return self

    # What is inherited works on Points: of a method with other states, `Any` stands for the fields
    # x and y that these have too.

    def init_server(self, problem: Problem, start: Point) -> Server:
        """The server's state before the first round."""
        point: Any = start
        return point

    def init_client(self, problem: Problem, down: Down, batch: Draw | None) -> Client:
        """The state of a client met for the first time; only its `keep` fields are stored."""
        nothing: Any = None
        return nothing

    def broadcast(self, server: Server, clock: Clock) -> Down:
        """What travels down."""
        state: Any = server
        point: Any = Point(state.x, state.y)
        return point

    def receive(self, down: Down, client: Client, clock: Clock) -> Client:
        """The client at the start of a phase. `client` has only the fields that it kept from the
        round before (`keep`) or carries from the phase before (`carry`)."""
        sent: Any = down
        point: Any = Point(sent.x, sent.y)
        return point

    def local_step(
        self, problem: Problem, down: Down, client: Client, batch: Draw, clock: Clock
    ) -> Client:
        """One step of a client; a method whose phases all name their own needs none."""
        raise TypeError(f"{type(self).__name__} does not say what a local step is: add local_step")

    def send(self, down: Down, client: Client, clock: Clock) -> tuple[Up, Client]:
        """What travels up, and the client that stays behind."""
        state: Any = client
        point: Any = Point(state.x, state.y)
        return point, client

    def aggregate(self, problem: Problem, server: Server, mean: Up, clock: Clock) -> Server:
        """The server's state after a phase, from the weighted mean of what clients sent."""
        state: Any = server
        point: Any = mean
        return state._replace(x=point.x, y=point.y)

    def phase(self, **changes: Any) -> Phase:
        """The usual exchange, with changes."""
        hooks = self.broadcast, self.receive, self.local_step, self.send, self.aggregate
        usual = Phase(*hooks)
        return usual._replace(**changes) if changes else usual

    def phases(self, round: int) -> tuple[Phase, ...]:
        """The exchanges of a round, in order."""
        return (self.phase(),)

    def draw_cohort(self, server: Server, phase: int, uniform: np.ndarray) -> np.ndarray | None:
        """The clients of a phase, if the method draws them from its own state: ascending numbers,
        possibly repeated. `uniform` holds one number in [0, 1) per client asked for. None: the
        engine draws them evenly and without repetition."""
        return None

    def steps(self, round: int, client: int) -> int:
        """Local steps of a client in a round, for the phases that do not say it themselves."""
        return int(getattr(self, "local_steps", 1))

    def stage(self, round: int) -> int:
        """The stage that a round belongs to; rates may depend on it."""
        return 0

    def point(self, server: Server) -> Point:
        """What the run returns and evaluates."""
        state: Any = server
        return Point(state.x, state.y)


def check_rate(owner: str, name: str, value: Any) -> None:
    """A hyper-parameter that no method could use is refused where it is given."""
    if name == "local_steps" or name.endswith(("_rounds", "_batches")):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{owner}: {name} is {value!r}; give a whole number of at least 1")
    elif name == "lr" or name.endswith(("_lr", "_rate", "proximal")):
        number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
        if not number and not isinstance(value, Schedule):
            raise ValueError(
                f"{owner}: {name} is {value!r}; give a finite number of at least 0, or a schedule"
            )


class Cost(NamedTuple):
    """What a run has spent so far, summed over clients."""

    gradients: int = 0  # mini-batch (or whole-data) gradient evaluations
    rows: int = 0  # rows that those went over
    bytes_up: int = 0
    bytes_down: int = 0
    exchanges: int = 0  # sequential: the latency of a run is this many round trips

    # Unchecked: the sum of costs, not a longer tuple.
    def __add__(self, other: tuple[int, ...]) -> Cost:  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))
