"""The bench compares like with like: what stands beside the engine computes what the engine
computes."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import pytest
import torch

import bench as benches
import fedminimax
from bench import all_rows, batched, bench, choose, environments, portfolio, scale
from bench.by_hand import FedAvgLoop, FlatWorker, Loop, Worker, fastest
from bench.environments import FLOWER, JAX, TORCH, Folder, Peer, talking
from bench.measure import Effort, Ratio, Times, in_turn, times_faster
from bench.methods import BATCH, METHODS
from bench.mlp import Drawing
from bench.ours import Steady, labelled, mlp
from bench.peers import the_job
from bench.portfolio_cpp import CppRun
from bench.table import (
    Asked,
    CannotMeasureError,
    Found,
    Row,
    at_least,
    at_most,
    cells,
    measured,
)
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.cli import main
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.compiled import executor as compiled
from fedminimax.problems.auc import AUC
from fedminimax.problems.cross_entropy import CrossEntropy


def small_run(method, executor: str = "debug") -> Steady:
    data = labelled([3 * BATCH, 2 * BATCH, 5 * BATCH], (64,), torch.float64)
    problem = AUC(mlp(torch.float64), positive_share=0.1)
    clients = Clients(data, batch_size=BATCH)
    return Steady(problem, method.algorithm, clients, executor, first="debug")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [Worker, FlatWorker], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("which", ["plain", "best"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_loops_by_hand_compute_what_the_engine_computes(method, which, kind, threads):
    run = small_run(method)
    loop = getattr(method, which)(run, mlp(torch.float64), threads, kind)
    check_same_round(loop, run)


def check_same_round(loop: Loop, run: Steady) -> None:
    before = run.state.server.x
    loop()
    run()
    expected = loop.workers[0].split(run.state.server.x, run.state.server.y)
    assert not torch.allclose(run.state.server.x, before)
    for found, wanted in zip(loop.server, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [Worker, FlatWorker], ids=lambda kind: kind.__name__)
def test_fedavg_by_hand_computes_what_the_engine_computes_with_a_cohort(kind, threads):
    job = the_job()
    rows = job.rows("mlp")[:7]
    data = [(x[15 * k :].double(), y[15 * k :].double()) for k, (x, y) in enumerate(rows, 1)]
    method = FedAvg(lr=job.LR, local_steps=job.STEPS)
    problem, clients = CrossEntropy(mlp(torch.float64)), Clients(data, batch_size=8)
    problem.client_weights = "size"
    run = Steady(problem, method, clients, "debug", cohort=3, first="debug")
    check_same_round(FedAvgLoop(run, mlp(torch.float64), threads, kind), run)


@pytest.mark.parametrize("faster", [Worker, FlatWorker])
def test_the_faster_way_by_hand_is_the_one_to_compare_with(faster, monkeypatch):
    def timed(calls, effort):
        for call in calls.values():
            call()
        return {way: Times((1.0 if way == faster.way else 2.0,)) for way in calls}

    monkeypatch.setattr("bench.by_hand.in_turn", timed)
    way, loop = fastest(METHODS[0].best, small_run(METHODS[0]), mlp(torch.float64))
    assert (way, type(loop.workers[0])) == (faster.way, faster)


def test_rounds_by_hand_have_the_batches_of_the_engine_round_after_round():
    run = small_run(METHODS[0])
    drawing = Drawing(run)
    first, second = drawing.next(), drawing.next()
    drawing.settled(lambda: None)
    assert run.state.round == 2  # where the engine stands; by hand it begins at the beginning
    third = drawing.next()
    assert torch.equal(third.index, run.index()[:, 0])
    assert not torch.equal(first.index, second.index)


def written_in_groups(given: batched.Given) -> tuple[torch.Tensor, torch.Tensor]:
    return batched.added(map(batched.written_out, batched.in_groups(given, 2)))


@pytest.mark.parametrize("by_hand", [batched.vmapped, batched.written_out, written_in_groups])
def test_batched_rounds_by_hand_compute_what_the_engine_computes(by_hand):
    run = small_run(METHODS[0])
    x, y = by_hand(batched.given_by(run))
    run()
    torch.testing.assert_close(x, run.state.server.x, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(y, run.state.server.y, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("sweep", [portfolio.sweep, portfolio.merged_sweep])
def test_numpy_computes_what_the_engine_computes(sweep, monkeypatch):
    monkeypatch.setattr(portfolio, "ASSETS", 5)
    monkeypatch.setattr(portfolio, "ROUNDS", 1)
    run = portfolio.run_of("debug")
    other = portfolio.NumpyRun(run, sweep)
    other()
    run()
    np.testing.assert_allclose(other.now.x[0], run.state.server.x.numpy(), rtol=1e-10)
    np.testing.assert_allclose(other.now.v1[0], run.state.server.momentum[0].numpy(), rtol=1e-10)


def test_the_loop_in_cpp_computes_what_the_engine_computes(monkeypatch):
    monkeypatch.setattr(portfolio, "ASSETS", 5)
    run = portfolio.run_of("debug")
    run.rounds = 3
    other = CppRun(run, 3, portfolio.LR, portfolio.RATE)
    other()
    run()
    x, weights, v1, v2 = other.vectors
    server = run.state.server
    np.testing.assert_allclose(x, server.x.numpy(), rtol=1e-10)
    np.testing.assert_allclose(weights, server.inner[0][1:].numpy(), rtol=1e-10)
    np.testing.assert_allclose(v1, server.momentum[0].numpy(), rtol=1e-10)
    np.testing.assert_allclose(v2, server.momentum[1][1:].numpy(), rtol=1e-10)
    assert np.full(1, np.finfo(float).tiny)[0] / 4 > 0  # it has left subnormal numbers alone


def test_calls_are_timed_in_turn_and_may_measure_themselves():
    order = []

    def slow() -> float:
        order.append("slow")
        return 0.5

    def fast() -> float:
        order.append("fast")
        return 0.25

    times = in_turn({"fast": fast, "slow": slow}, Effort(0.0, 3))
    assert times_faster(times["fast"], times["slow"]) == Ratio(2.0, 2.0, 2.0)
    # After two calls of each to warm up; within a turn, short calls are repeated.
    assert [name for name, _ in groupby(order[4:])] == ["fast", "slow"] * 3


def test_what_is_drawn_ahead_is_there_when_the_other_side_has_its_turn():
    run = small_run(METHODS[0])
    ahead = set()
    for _ in range(20):
        run()
        coming = run.federation.sampler._coming
        ahead.add(coming is not None)
        assert coming is None or coming.done()
    assert True in ahead


def test_where_the_time_of_a_round_goes_is_asked_of_whatever_auto_chose(monkeypatch):
    monkeypatch.setattr("bench.ours.LONG", 1)  # nothing is compiled
    run = small_run(METHODS[0], "auto")
    run()
    told = run.parts(seconds=0.0)
    assert told.startswith(f"a round ({run.executor.name}, {run.executor.threads} threads) is data")
    for part in ("local steps", "averaging", "server step", "other"):
        assert part in told


# Rows.


def found(median: float, asked=lambda: "the profile") -> Found:
    return Found(Ratio(median, median, median), "1 ms", asked, "2 ms")


def cannot(effort: Effort) -> Found:
    raise CannotMeasureError("no compiler")


def fails(effort: Effort) -> Found:
    raise ZeroDivisionError("division by zero\nand a long story")


def some_rows(asked=lambda: "the profile") -> list[Row]:
    return [
        Row("a", "", "", at_least(2.0), lambda effort: found(2.0, asked)),
        Row("d", "", "", at_least(2.0), cannot),
        Row("e", "", "", at_least(2.0), fails),
        Row("c", "", "", at_most(2.0, "ms"), lambda effort: found(1.9, asked)),
    ]


def test_a_row_passes_falls_short_or_says_why_it_was_not_measured():
    def never() -> str:
        raise AssertionError("only rows that fall short need a profile")

    short = Row("b", "", "", at_least(2.0), lambda effort: found(1.9))
    results = [measured(row, Effort(0.0, 1)) for row in [*some_rows(never), short]]
    assert [cells(r)[-1] for r in results] == [
        "pass",
        "not measured: no compiler",
        "failed: ZeroDivisionError: division by zero",
        "pass",
        "falls short: the profile",
    ]


def test_a_row_that_fails_is_a_row_and_the_exit_code(tmp_path, monkeypatch, capsys):
    output = tmp_path / "bench.md"
    monkeypatch.setattr(benches, "all_rows", lambda *_: some_rows())
    assert bench(output=output) == 1
    assert "1 not measured, 1 failed." in output.read_text()
    assert len(json.loads(output.with_suffix(".json").read_text())["rows"]) == 4
    assert bench(only=["a", "d"]) == 0
    assert "division by zero" in capsys.readouterr().out


def test_what_is_measured_outlives_an_interruption(tmp_path, monkeypatch, capsys):
    def interrupted(effort: Effort) -> Found:
        raise KeyboardInterrupt

    output = tmp_path / "bench.md"
    rows = [*some_rows()[:1], Row("late", "", "", at_least(1.0), interrupted)]
    monkeypatch.setattr(benches, "all_rows", lambda *_: rows)
    with pytest.raises(KeyboardInterrupt):
        bench(output=output)
    assert "1 pass, 0 fall short, 0 not measured, 0 failed; 1 rows to come." in output.read_text()
    (row,) = json.loads(output.with_suffix(".json").read_text())["rows"]
    assert (row["row"], row["verdict"]) == ("a", "pass")
    assert "pass" in capsys.readouterr().out


def test_every_row_of_the_table_is_there_with_its_bound():
    rows = {row.name: row.asked for row in all_rows(True, None)}
    assert len(rows) == len(all_rows(True, None))
    methods = [method.name for method in METHODS]
    least = {f"mlp.100.{m}": 60 for m in methods} | {f"mlp.1000.{m}": 30 for m in methods}
    least |= {f"networks.cnn.{m}": 1.9 for m in methods}
    least |= {"networks.resnet20.local_sgda": 1.85, "compositional.step": 0.87}
    least |= {"portfolio.numpy": 4, "portfolio.jax": 0.4}
    least |= {"tables.csv": 0.5, "tables.parquet": 0.5}
    others = ("flower", "pfl", "fedlab")
    least |= {f"peers.{p}.mlp": 5 for p in others} | {f"peers.{p}.cnn": 1.5 for p in others}
    least |= {"peers.libauc": 1}
    # Every path, against the same work by hand.
    least |= {f"mlp.{n}": 0.9 for n in ("100.compiled", "1000.compiled", "100.vectorised")}
    least |= {"portfolio.cpp": 0.9}
    least |= {f"networks.{n}": 0.9 for n in ("cnn.threads", "resnet20.threads", "cnn.evaluation")}
    assert {name: rows[name] for name in least} == {n: at_least(b) for n, b in least.items()}
    most = {
        "overhead.compiled": at_most(100, "microseconds"),
        "overhead.vectorised": at_most(1000, "microseconds"),
        "masks.4": at_most(1.5, "x"),
        "masks.32": at_most(5, "x"),
        "masks.100": at_most(14, "x"),
        "scale.time": at_most(1.2, "x"),
        "scale.memory": at_most(200, "MB more"),
        "scale.store": at_most(1000, "MB"),
    }
    assert {name: rows[name] for name in most} == most
    assert all(isinstance(asked, Asked) for asked in rows.values())


# Compilers and other processes.


def test_a_row_that_needs_a_compiler_says_that_there_is_none(monkeypatch):
    monkeypatch.setattr("bench.ours.missing_compiler", lambda: "install g++ or clang")
    with pytest.raises(CannotMeasureError, match="not compiled: install g"):
        small_run(METHODS[0], "compiled")


def test_a_row_does_not_go_on_without_its_machine_code(monkeypatch):
    def faulty(module, given):
        raise RuntimeError("cc1plus: killed\nmore")

    monkeypatch.setattr(compiled, "inductor", faulty)
    with pytest.raises(CannotMeasureError, match=r"^not compiled: RuntimeError: cc1plus: killed$"):
        small_run(METHODS[0], "compiled")


@contextmanager
def child(tmp_path, monkeypatch, code: str):
    """A peer whose job is this code."""
    (tmp_path / "other_job.py").write_text(code)
    monkeypatch.setattr(environments, "JOBS", tmp_path)
    monkeypatch.setattr(Folder, "python", lambda self, peer: sys.executable)
    with talking(Peer("other", ()), Folder(tmp_path)) as talk:
        yield talk


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("raise SystemExit(3)", "other ended before its job was done: no message, exit status 3"),
        ("raise ValueError('no Ray')", "other ended .*: ValueError: no Ray"),
        ("print('x' * 3_000_000)", "other printed 1,000,000 characters or more where a line"),
        ("print('hello')", "other printed 6 characters where a line of JSON was expected: 'hello"),
    ],
)
def test_a_peer_that_fails_is_a_sentence(code, sentence, tmp_path, monkeypatch):
    with (
        pytest.raises(CannotMeasureError, match=sentence),
        child(tmp_path, monkeypatch, code),
    ):
        pass


def test_a_peer_must_do_the_same_job(tmp_path, monkeypatch):
    run = small_run(METHODS[0])
    batch = run.federation.clients.train.batch(0)

    def loss(at) -> float:
        return float(run.federation.problem.outer(at.x, at.y, batch).detach())

    code = "import json; print(json.dumps({{'rounds': 4, 'loss': {}}})); input()"
    with (
        child(tmp_path, monkeypatch, code.format(1e3)) as talk,
        pytest.raises(RuntimeError, match="other did another job: loss after 4 rounds 1000"),
    ):
        talk.compared(run, loss)
    assert run.state.round == 4
    with child(tmp_path, monkeypatch, code.format(loss(run.state.server))) as talk:
        assert talk.compared(run, loss).startswith("loss after 4 rounds")


def test_a_measurement_that_dies_is_a_sentence(monkeypatch):
    monkeypatch.setattr(scale.sys, "executable", "/bin/false")
    with pytest.raises(CannotMeasureError, match=r"measures no_such ended .* no message, exit"):
        scale._apart("no_such", 0)


def test_an_environment_with_another_torch_is_made_anew(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(environments.venv, "create", lambda place, **_: made.append(place.name))
    monkeypatch.setattr(environments, "_install", lambda *_: None)
    for peer in (FLOWER, JAX):
        (tmp_path / peer.name).mkdir()
    folder = Folder(tmp_path)
    for peer in (FLOWER, FLOWER, JAX):
        folder.python(peer)
    assert made == ["flower", "jax"]
    assert TORCH in (tmp_path / "flower" / "ready").read_text()
    monkeypatch.setattr(environments, "TORCH", "torch==1.0")
    folder.python(FLOWER)
    folder.python(JAX)  # which has no torch
    assert made == ["flower", "jax", "flower"]


def test_the_loss_of_the_job_is_that_of_its_start():
    job = the_job()
    assert job.level(job.network("mlp"), "mlp") == pytest.approx(0.7, abs=0.05)


def test_a_group_is_chosen_by_its_name_and_an_unknown_one_is_refused():
    rows = all_rows(False, None)
    assert [row.name for row in choose(rows, ["overhead"])] == [
        "overhead.compiled",
        "overhead.vectorised",
    ]
    with pytest.raises(ValueError, match="no row or group 'speed'; give one of overhead"):
        choose(rows, ["speed"])


def test_the_table_is_written_as_markdown_and_json(tmp_path, capsys):
    output = tmp_path / "results" / "bench.md"
    assert bench(quick=True, only=["overhead.vectorised"], output=output) == 0
    assert "overhead.vectorised" in capsys.readouterr().out
    text = output.read_text()
    assert "`fedminimax bench --quick --only overhead.vectorised`" in text
    assert text.count("\n| overhead.vectorised |") == 1
    (row,) = json.loads(output.with_suffix(".json").read_text())["rows"]
    assert row["figure"]["low"] <= row["figure"]["median"] <= row["figure"]["high"]
    assert row["asked"] == {"bound": 1000.0, "least": False, "unit": "microseconds"}


def test_the_command_runs_the_bench_of_the_checkout(capsys):
    assert main(["bench", "--only", "speed"]) == 2
    assert "there is no row or group 'speed'; give one of overhead" in capsys.readouterr().err


def test_the_command_says_that_an_installed_package_has_no_bench(tmp_path, monkeypatch, capsys):
    installed = tmp_path / "lib" / "site-packages" / "fedminimax" / "__init__.py"
    monkeypatch.setattr(fedminimax, "__file__", str(installed))
    assert main(["bench"]) == 2
    assert "clone the repository" in capsys.readouterr().err
