"""The compiled executor: its graphs compute what the clients one by one compute, and are few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from rows import Row, federation_of, labelled, noisy_by_size
from table import ROWS, first_of_each, marked
from torch import Tensor, nn
from torch.fx import GraphModule

from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.fess_gda import FESSGDA
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgdm_rl import LocalSGDMRL
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.blocks.projections import simplex
from fedminimax.blocks.schedules import StepDecay
from fedminimax.blocks.trees import flat, tree_map
from fedminimax.data.clients import Clients
from fedminimax.engine.executors import choose
from fedminimax.engine.executors.compiled import executor as compiled
from fedminimax.engine.executors.compiled import graphs, shared
from fedminimax.engine.executors.compiled.executor import Compiled
from fedminimax.engine.executors.compiled.graphs import Graph
from fedminimax.engine.executors.compiled.inductor import Code, missing_compiler
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.executors.threads import Threads
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.job import ClientError, Executor, bad_field
from fedminimax.engine.round import play_round, play_rounds, play_with_drift
from fedminimax.engine.simulate import simulate
from fedminimax.engine.trainer import Trainer
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.functions import Minimax
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import NonFiniteError, Point, Problem

ROUNDS = 5  # at least two of each kind in the rows whose stages have two rounds
NEAR = [row for row in ROWS if row.distance is None]
FIRST = first_of_each(NEAR)
SIX = ("sgda", "codasca", "adafgda", "fess", "scgdam", "dr-scgd")
SIX_ROWS = [row for row in FIRST if row.name in SIX]
OTHERS = [row.name for row in NEAR if row not in SIX_ROWS]
THREE = ("codasca", "fess", "scgdam")  # of which the fast tests trace graphs


class AsTraced:
    """In the place of a compiler: the graph itself, operation by operation."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, module: GraphModule, given: list[Tensor]) -> Callable:
        self.made += 1
        return lambda tensors: module(*tensors)


class Lent(AsTraced):
    """The same, with what small machine code does: a call writes what it returns where the last
    one did."""

    def __call__(self, module: GraphModule, given: list[Tensor]) -> Callable:
        call, held = super().__call__(module, given), []

        def lending(tensors: list[Tensor]) -> list[Tensor]:
            made = [v.clone() for v in call(tensors)]
            if not held:
                held.extend(made)
            for place, value in zip(held, made, strict=True):
                place.copy_(value)
            return list(held)

        return Code(lending, None, lends=True)


@pytest.fixture(autouse=True)
def nothing_made_before(monkeypatch):
    monkeypatch.setattr(shared, "_MADE", {})
    monkeypatch.setattr(shared, "_TRACED", {})


def played(
    federation, state, store, executor: Executor, rounds: int = ROUNDS, together: int = ROUNDS
) -> Any:
    end = state.round + rounds
    while state.round < end:
        most = min(together, end - state.round)
        state = play_rounds(federation, state, store, executor, most)
    return state


def outcome(row: Row, executor: Executor) -> tuple[Any, Any, Any]:
    federation, state, store = federation_of(row.problem(), row.algorithm, row.clients())
    state = played(federation, state, store, executor)
    return state.server, store.states, state.cost


def same(row: Row, executor: Executor) -> None:
    alike(row, *outcome(row, executor))


def alike(row: Row, server: Any, states: Any, cost: Any) -> None:
    expected, kept, spent = outcome(row, Debug())
    assert cost == spent
    assert sorted(states) == sorted(kept)
    pairs = [(server, expected), *((states[k], kept[k]) for k in kept)]
    for found, wanted in pairs:
        for a, b in zip(flat(found), flat(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("row", marked(NEAR, lambda row: row.name in THREE, full=OTHERS))
def test_a_graph_computes_what_clients_one_by_one_compute(row):
    """Of the other methods test_rewrites.py plays the graphs that a compiler gets."""
    compiler = AsTraced()
    same(row, Compiled(compiler=compiler))
    phases = sum(len(row.algorithm.phases(round)) for round in range(ROUNDS))
    assert 0 < compiler.made < phases  # a graph serves all rounds of its kind


@pytest.mark.parametrize("row", marked(FIRST, lambda row: row.name == "fess", full=OTHERS))
def test_machine_code_computes_what_clients_one_by_one_compute(row):
    same(row, Compiled())


def test_machine_code_of_one_step_of_a_composition_computes_what_clients_one_by_one_compute():
    (row,) = (row for row in FIRST if row.name == "scgdam")
    fewer: Any = replace(row.algorithm, local_steps=1)  # type: ignore[call-arg]
    same(replace(row, algorithm=fewer), Compiled())


@pytest.mark.parametrize("row", marked(SIX_ROWS, lambda row: row.name in THREE))
def test_what_a_graph_lends_is_copied_before_the_next_call(row):
    federation, state, store = federation_of(row.problem(), row.algorithm, row.clients())
    executor, seen = Compiled(compiler=Lent()), []
    for _ in range(ROUNDS):
        state = play_round(federation, state, store, executor)
        seen.append((state.server, tree_map(Tensor.clone, state.server)))
    for held, then in seen:
        assert all(torch.equal(a, b) for a, b in zip(flat(held), flat(then), strict=True))
    alike(row, state.server, store.states, state.cost)


@pytest.mark.parametrize("row", marked(SIX_ROWS, lambda row: row.name in THREE))
def test_large_fields_have_the_same_mean(row, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 0)
    same(row, Compiled(compiler=AsTraced()))


def test_a_cohort_of_clients_with_states_and_lent_graphs():
    problem, method, ends = CrossEntropy(nn.Linear(3, 1)), Scaffold(0.05, local_steps=2), []
    for executor in (Compiled(compiler=Lent()), Debug()):
        given = federation_of(problem, method, labelled(), cohort=2)
        server = played(*given, executor, 8).server
        ends.append(flat((server, *(given[2].states[k] for k in sorted(given[2].states)))))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-13)


def test_six_methods_are_compiled_in_the_fast_and_slow_tests():
    assert {row.name for row in FIRST} >= set(SIX)


def single(row: Row, executor: Executor) -> None:
    """In float32, after two rounds: relative 1e-5, and 1e-4 where steps are divided by roots, or
    weighted by ratios of small differences."""
    ends = []
    for own in (executor, Debug()):
        given = federation_of(row.problem(), row.algorithm, row.clients(), dtype=torch.float32)
        ends.append(row.algorithm.point(played(*given, own, 2).server))
    most = 1e-4 if isinstance(row.algorithm, AdaFGDA | LocalSGDMRL) else 1e-5
    for found, wanted in zip(*ends, strict=True):
        assert found.dtype == torch.float32
        if wanted.numel():
            assert (found - wanted).abs().max() <= most * wanted.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize(
    "row",
    marked(NEAR, lambda row: row.name in SIX),
)
def test_executors_agree_in_single_precision(row):
    threads = Threads(2)
    for executor in (threads, Vectorised()):
        single(row, executor)
    threads.close()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            r,
            id=r.name,
            marks=pytest.mark.slow if r.name in THREE else pytest.mark.full,
        )
        for r in FIRST
    ],
)
def test_machine_code_in_single_precision(row):
    single(row, Compiled())


class Counting(Compiled):
    """How many rounds were played at once, each time."""

    def __init__(self) -> None:
        super().__init__(compiler=AsTraced())
        self.counts: list[int] = []

    def repeat(self, work, clocks):  # type: ignore[override]  # as narrow as the test needs
        done = super().repeat(work, clocks)
        self.counts.append(len(clocks.round) if done is not None else 0)
        return done


OF_STAGES = (
    CodaPlus(0.5, proximal=0.5, local_steps=1, stage_rounds=2, stage_output="last"),
    Codasca(0.1, proximal=0.5, local_steps=1, stage_rounds=2),
)


@pytest.mark.parametrize(
    ("method", "count"),
    [
        pytest.param(OF_STAGES[0], 1, id="coda_plus-1"),
        pytest.param(OF_STAGES[1], 1, id="codasca-1", marks=pytest.mark.slow),
        pytest.param(OF_STAGES[0], 3, id="coda_plus-3", marks=pytest.mark.slow),
        pytest.param(OF_STAGES[1], 3, id="codasca-3", marks=pytest.mark.slow),
    ],
)
def test_machine_code_plays_stages_in_a_row(method, count):
    """What one client keeps of the clock is the clock's own number, which the next round has
    another of. The vectors are too large for the stack, on which all that is returned is copied."""

    def loss(x, y, batch):
        return (y * (batch.rows[0] - x)).square().mean() - y.square().sum() + 0.01 * x @ x

    rows = torch.randn(count, 6, 3_000, generator=torch.Generator().manual_seed(0)).double() + 1
    clients = Clients([(own,) for own in rows], batch_size=2)
    start = torch.zeros(3_000, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
    problem = Minimax(loss, *start)
    ends = []
    for executor, together in ((Debug(), 1), (Compiled(), 1), (Compiled(), 10)):
        given = federation_of(problem, method, clients)
        ends.append(played(*given, executor, 10, together).server)
    torch.testing.assert_close(ends[1].x, ends[0].x, rtol=1e-10, atol=1e-12)
    assert torch.equal(ends[2].x, ends[1].x)


@pytest.mark.parametrize(
    ("project", "threads"),
    [
        pytest.param(torch.clone, 1, id="stack-1", marks=pytest.mark.slow),
        pytest.param(torch.clone, 2, id="stack-2"),
        pytest.param(simplex, 1, id="sorted-1", marks=pytest.mark.slow),
        pytest.param(simplex, 2, id="sorted-2", marks=pytest.mark.slow),
    ],
)
def test_machine_code_plays_rounds_in_a_row_to_the_same_bits(project, threads, monkeypatch):
    """Of the sort in the projection torch has no code of its own, and lends nothing then."""
    monkeypatch.setattr("fedminimax.engine.executors.compiled.executor.ALONE", 0)

    def loss(x, y, batch):
        return (y * (batch.rows[0] - x).square().mean(0)).sum() - y.square().sum()

    calls = []
    real = Graph.run_on
    monkeypatch.setattr(Graph, "run_on", lambda *given: calls.append(1) or real(*given))
    clients = Clients([(torch.randn(5, 2) + k,) for k in range(4)], batch_size=2)
    problem = Minimax(loss, torch.zeros(2), torch.full((2,), 0.5), project_y=project)
    ends = []
    for together in (1, 2, 12):
        federation, state, store = federation_of(problem, LocalSGDA(0.05, 0.05), clients)
        ends.append(played(federation, state, store, Compiled(threads), 12, together).server)
    assert all(torch.equal(end.x, ends[0].x) and torch.equal(end.y, ends[0].y) for end in ends)
    assert len(calls) == 6 + 1


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        (LocalSGDA(0.05, 0.05, local_steps=2), [9]),
        # The last round of a stage is of another kind, and the first makes the clients' states.
        (Codasca(lr=0.05, local_steps=2, stage_rounds=4), [2, 3]),
        (LocalSGDA(0.05, 0.05, local_steps=20), []),
        (FedNormSGDA(0.05, 0.05, client_steps=(1, 5, 2, 3, 4)), [9]),
    ],
    ids=["all", "stages", "long", "unequal"],
)
def test_how_many_rounds_are_played_together_changes_no_bit(method, counts):
    ends = []
    for together in (1, 9):
        executor = Counting()
        federation, state, store = federation_of(Quadratic(3), method, noisy_by_size())
        state = played(federation, state, store, executor, 9, together)
        ends.append((state, store.states))
    assert [n for n in executor.counts if n] == counts
    (one, kept), (other, also) = ends
    assert (one.round, one.iteration, one.cost) == (other.round, other.iteration, other.cost)
    for a, b in zip(
        flat((one.server, *kept.values())), flat((other.server, *also.values())), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_long_phases_are_compiled_in_parts(most, monkeypatch):
    monkeypatch.setattr(compiled, "UNROLLED", most)
    compiler = AsTraced()
    row = Row("long", Codasca(lr=0.05, local_steps=7), lambda: Quadratic(3), noisy_by_size)
    same(row, Compiled(compiler=compiler))
    assert compiler.made <= 2 * 3  # opening, middle and closing, in the first round and later


def test_clients_with_unequal_steps_stop_where_they_should(monkeypatch):
    monkeypatch.setattr(compiled, "UNROLLED", 2)
    method = FedNormSGDA(0.05, 0.05, client_steps=(1, 5, 2, 3, 4))
    same(Row("unequal", method, lambda: Quadratic(3), noisy_by_size), Compiled(compiler=AsTraced()))


def test_runs_that_differ_in_rates_share_their_graph():
    compiler = AsTraced()
    ends = []
    for rate in (0.1, 0.01):
        row = Row("", FESSGDA(rate, rate, local_steps=2), lambda: Quadratic(3), noisy_by_size)
        same(row, Compiled(compiler=compiler))
        ends.append(outcome(row, Compiled(compiler=compiler))[0].x)
    assert compiler.made == 1
    assert not torch.equal(*ends)


def test_runs_that_differ_in_rates_and_seeds_are_traced_once(monkeypatch):
    traced = []
    plain = graphs.trace
    monkeypatch.setattr(graphs, "trace", lambda *a: traced.append(1) or plain(*a))
    compiler = AsTraced()
    for rate in (0.1, 0.01):
        row = Row("", FESSGDA(rate, 0.05, local_steps=2), lambda: Quadratic(3), noisy_by_size)
        same(row, Compiled(compiler=compiler))
    assert len(traced) == 1
    other = FESSGDA(0.01, 0.05, local_steps=2, dual_proximal=0.3)  # another way, not another rate
    same(Row("", other, lambda: Quadratic(3), noisy_by_size), Compiled(compiler=compiler))
    assert len(traced) == 3  # once in vain, with the rates as inputs
    same(Row("", other, lambda: Quadratic(3), noisy_by_size), Compiled(compiler=compiler))
    assert len(traced) == 3


def test_a_problem_that_holds_a_function_is_traced_in_each_run(monkeypatch):
    clients = Clients([(torch.ones(4, 1),)] * 3, batch_size=2)
    ends = []
    for goal in (1.0, 3.0):
        problem = Minimax(lambda x, y, b, goal=goal: ((x - goal) ** 2).sum(), torch.zeros(2))
        given = federation_of(problem, FedAvg(0.1), clients)
        ends.append(played(*given, Compiled(compiler=AsTraced()), 1).server.x)
    assert not torch.equal(*ends)


def test_a_rate_that_decides_the_way_stays_a_number():
    method = FESSGDA(0.1, 0.1, local_steps=2, dual_proximal=0.3)  # left out where it is 0
    same(Row("", method, lambda: Quadratic(3), noisy_by_size), Compiled(compiler=AsTraced()))


def test_a_schedule_needs_no_second_graph():
    compiler = AsTraced()
    method = LocalSGDA(StepDecay(0.1, at=(1, 2, 3)), 0.1, local_steps=2)
    same(Row("", method, lambda: Quadratic(3), noisy_by_size), Compiled(compiler=compiler))
    assert compiler.made == 1


def test_a_network_in_single_precision():
    def problem() -> AUC:
        torch.manual_seed(0)
        return AUC(nn.Sequential(nn.Linear(3, 4), nn.ELU(), nn.Linear(4, 1)), positive_share=0.3)

    ends = []
    for executor in (Compiled(), Debug()):
        torch.manual_seed(0)
        method = LocalSGDA(0.1, 0.1, local_steps=2)
        given = federation_of(problem(), method, labelled(), dtype=torch.float32)
        ends.append(played(*given, executor, 2).server.x)
    assert ends[0].dtype == torch.float32
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_cohort_may_change_from_round_to_round():
    compiler, ends = AsTraced(), []
    for executor in (Compiled(compiler=compiler), Debug()):
        given = federation_of(
            Quadratic(3), FESSGDA(0.1, 0.1, local_steps=2), noisy_by_size(), cohort=2
        )
        ends.append(played(*given, executor).server.x)
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-13)
    assert compiler.made <= 2  # with padded clients, and without


def test_a_run_that_diverges_names_the_place():
    clients = Clients([(torch.ones(4, 1),)] * 3, batch_size=2)
    problem = Minimax(lambda x, y, b: (x**4).sum() - y @ y, torch.ones(2), torch.zeros(1))
    found = []
    for executor in (Compiled(compiler=AsTraced()), Compiled(compiler=Lent()), Vectorised()):
        federation, state, store = federation_of(problem, LocalSGDA(9.0, 0.1), clients)
        with pytest.raises(NonFiniteError) as error:
            played(federation, state, store, executor, 20)
        found.append(str(error.value))
    assert found[0] == found[1] == found[2]
    assert "client 0" in found[0]


def test_an_error_in_a_problem_names_the_client():
    def loss(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (x @ torch.ones(3)).sum()

    problem = Minimax(loss, torch.ones(2), torch.zeros(0))
    clients = Clients([(torch.ones(4, 1),)] * 3, batch_size=2)
    federation, state, store = federation_of(problem, LocalSGDA(), clients)
    with pytest.raises(ClientError, match="round 0, client 0, phase 0, step 0"):
        play_round(federation, state, store, Compiled(compiler=AsTraced()))


def test_drift_is_measured_beside_compiled_rounds(monkeypatch):
    monkeypatch.setattr(compiled, "inductor", AsTraced())

    def drifts(executor: str) -> list[float]:
        run = simulate(
            Quadratic(3),
            LocalSGDA(0.05, 0.05, local_steps=2),
            noisy_by_size(),
            3,
            executor=executor,
            evaluate_every=2,
            measures=("drift",),
        )
        return [record["optimality"]["drift_x"] for record in run.history[1:]]

    assert drifts("compiled") == pytest.approx(drifts("vectorised"), rel=1e-4)


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path):
    def run(folder: str, rounds: int, resume: bool = False) -> bytes:
        path = tmp_path / folder
        problem, method = Quadratic(3), LocalSGDA(0.05, 0.05, local_steps=2)
        options: dict[str, Any] = {"executor": "compiled", "folder": path, "evaluate_every": 2}
        simulate(problem, method, noisy_by_size(), rounds, resume=resume, **options)
        return (path / "final.safetensors").read_bytes()

    whole = run("whole", 6)
    run("parts", 4)
    assert run("parts", 6, resume=True) == whole


def test_a_machine_without_a_compiler_goes_on_with_a_sentence(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler()

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    missing_compiler.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler, so rounds are not compiled"):
            assert choose.make("compiled").name == "vectorised"
    finally:
        missing_compiler.cache_clear()


def test_auto_compiles_what_wins_it_back():
    assert choose.worth_compiling(1000, seconds=0.01, rounds=100_000)
    assert not choose.worth_compiling(1000, seconds=0.01, rounds=1000)
    # Arithmetic is not saved: a network whose operations are long gains little from fewer calls.
    assert not choose.worth_compiling(100, seconds=1.0, rounds=1000)


def all_at_once(monkeypatch) -> None:
    """As if that were the fastest without compiling, which on a busy machine is left to chance."""
    chosen = choose.Choice("vectorised", 1, 1e-3)
    monkeypatch.setattr(choose, "fastest", lambda work, cores: chosen)


@pytest.mark.parametrize(("rounds", "expected"), [(100, "vectorised"), (10**8, "compiled")])
def test_auto_knows_how_long_the_run_is(rounds, expected, monkeypatch):
    monkeypatch.setattr(compiled, "inductor", AsTraced())
    all_at_once(monkeypatch)
    executor = choose.make("auto", rounds=rounds)
    problem = Quadratic(3)
    federation, state, store = federation_of(problem, LocalSGDA(0.05, 0.05), noisy_by_size())
    play_round(federation, state, store, executor)
    assert executor.name == expected


# Graphs are shared only where they are the same.


class Step(NamedTuple):
    x: Tensor
    y: Tensor
    number: Tensor


@dataclass(frozen=True)
class Stepping(FedAvg):
    """Descent whose server has a third field, which `after` sets."""

    partial: ClassVar[bool] = True

    def init_server(self, problem, start):  # type: ignore[override]  # as narrow as the test needs
        return Step(start.x, start.y, self.first(start))

    def first(self, start):
        return start.x

    def aggregate(self, problem, server, mean, clock):  # type: ignore[override]  # as narrow as the test needs
        return Step(*self.after(server, mean))

    def after(self, server, mean) -> Any:
        return mean.x, mean.y, server.number


class SameTwice(Stepping):
    """Two fields are one tensor when the run begins, and two later."""

    def after(self, server, mean):
        return 0.5 * mean.x + 0.5 * server.number, mean.y, server.x


class Counted(Stepping):
    """A number of its own, moved by a rate."""

    def first(self, start):
        return start.x.new_zeros(())

    def after(self, server, mean):
        rate: Any = self.lr
        number = (1 - rate) * server.number + rate * mean.x.norm()
        return mean.x / (1 + number), mean.y, number


class Taken(Stepping):
    """Takes a Python number out of a tensor, which no graph can hold."""

    def after(self, server, mean):
        return mean.x / (1 + float(mean.x.norm())), mean.y, server.number


class Turning(Stepping):
    """Hooks that are made for each round, with what they need as a default."""

    def phases(self, round):
        factor = (0.1, -0.05)[round % 2]

        def turned(problem, server, mean, clock, factor=factor):
            return Step(mean.x * (1 + factor), mean.y, server.number)

        return (self.phase(aggregate=turned),)


GOAL = 1.0


class Global(Problem):
    """Depends on something beside its attributes."""

    def start(self):
        return Point(torch.zeros(2), torch.zeros(0))

    def outer(self, value, y, batch):
        return ((value - GOAL) ** 2).sum()


def toward(goal: Any) -> Minimax:
    return Minimax(lambda x, y, batch: ((x - goal) ** 2).sum(), torch.zeros(2))


ONES = Clients([(torch.ones(4, 1),)] * 3, batch_size=2)


def both(problem: Problem, method: Any, dtype: torch.dtype = torch.float64) -> None:
    ends = []
    for executor in (Compiled(compiler=AsTraced()), Debug()):
        given = federation_of(problem, method, ONES, dtype=dtype)
        ends.append(flat(played(*given, executor, 4).server))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", [SameTwice(0.1), Counted(0.1), Turning(0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_methods_with_a_state_of_their_own(method, dtype):
    both(toward(1.0), method, dtype)


@pytest.mark.parametrize("kind", [torch.tensor, lambda v: nn.Parameter(torch.tensor(v))])
def test_tensors_that_a_problem_holds_belong_to_its_graph(kind):
    for goal in (1.0, 3.0):
        both(toward(kind([goal, goal])), FedAvg(0.1))


def test_a_class_of_ones_own_may_depend_on_what_changes(monkeypatch):
    for goal in (1.0, 3.0):
        monkeypatch.setattr(f"{__name__}.GOAL", goal)
        both(Global(), FedAvg(0.1))


def test_what_cannot_be_compiled_runs_all_the_same(monkeypatch):
    with pytest.warns(UserWarning, match="must not take a Python number out of a tensor"):
        both(toward(1.0), Taken(0.1))
    all_at_once(monkeypatch)
    executor = choose.make("auto", rounds=10**8)
    with pytest.warns(UserWarning, match="cannot be compiled, so it is not"):
        played(*federation_of(toward(1.0), Taken(0.1), ONES), executor, 2)
    assert executor.name == "vectorised"


def test_a_run_that_is_always_watched_is_timed_too():
    run = choose.make("auto")
    federation, state, store = federation_of(toward(1.0), FedAvg(0.1), ONES)
    play_with_drift(federation, state, store, run)
    assert run.name != "debug"


def test_shapes_of_whole_data_do_not_depend_on_the_cohort():
    compiler, method = AsTraced(), Scaffold(0.05, option="I")
    given = federation_of(CrossEntropy(nn.Linear(3, 1)), method, labelled(), cohort=2)
    played(*given, Compiled(compiler=compiler), 8)
    assert compiler.made <= 4


def test_a_run_plays_together_what_fits_between_its_evaluations(monkeypatch):
    monkeypatch.setattr(compiled, "inductor", AsTraced())
    real, counts = Compiled.repeat, []
    monkeypatch.setattr(
        Compiled,
        "repeat",
        lambda s, w, clocks: counts.append(len(clocks.round)) or real(s, w, clocks),
    )
    told: list[int] = []
    ends = []
    for executor in ("compiled", "debug"):
        run = simulate(
            Quadratic(3),
            LocalSGDA(0.01, 0.01, local_steps=2),
            noisy_by_size(),
            300,
            dtype=torch.float64,
            executor=executor,
            evaluate_every=100,
            on_round=told.append,
        )
        ends.append(run)
    assert [record["round"] for record in ends[0].history] == [0, 100, 200, 300]
    torch.testing.assert_close(ends[0].point.x, ends[1].point.x, rtol=1e-10, atol=1e-13)
    assert 1 < max(counts) <= 100
    rounds = told[: told.index(300) + 1]
    assert rounds == sorted(rounds)
    assert len(rounds) < 300


def test_rounds_that_cannot_be_played_together_are_not_asked_for_in_ever_larger_numbers():
    trainer = object.__new__(Trainer)
    trainer._together = 1
    for _ in range(1_000):
        trainer._pace(played=1, seconds=1e-4)
    assert trainer._together == 2
    for played in (2, 4, 8, 16, 5):  # the last: what was left until an evaluation
        trainer._pace(played, seconds=1e-3)
    assert trainer._together == 32
    trainer._pace(played=32, seconds=1.0)
    assert trainer._together == 16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_and_what_is_large_is_not(value):
    large = torch.full((4,), 3e38)
    good = (large, torch.arange(3), torch.zeros(0), torch.tensor([True]))
    assert bad_field(good) is None
    spoilt = large.clone()
    spoilt[2] = value
    assert bad_field(good, (*good[1:], spoilt)) == "3"
    assert bad_field(good, (*good[1:], spoilt), known=good) == "3"
    assert bad_field(good, (*good[1:], spoilt), known=(spoilt,)) is None
