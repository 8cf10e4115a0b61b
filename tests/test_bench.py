"""The bench compares like with like: what stands beside the engine computes what the engine
computes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedminimax.bench import all_rows, batched, bench, choose, portfolio
from fedminimax.bench.by_hand import Worker
from fedminimax.bench.measure import Effort, Ratio, in_turn, times_faster
from fedminimax.bench.methods import BATCH, METHODS
from fedminimax.bench.ours import Steady, labelled, mlp
from fedminimax.bench.table import CannotMeasureError, Found, Row, at_least, at_most, measured
from fedminimax.data.clients import Clients
from fedminimax.problems.auc import AUC


def small_run(method) -> Steady:
    data = labelled([3 * BATCH, 2 * BATCH, 5 * BATCH], (64,), torch.float64)
    problem = AUC(mlp(torch.float64), positive_share=0.1)
    clients = Clients(data, batch_size=BATCH)
    return Steady(problem, method.algorithm, clients, "debug", first="debug")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_loops_by_hand_compute_what_the_engine_computes(method, threads):
    run = small_run(method)
    loop = method.loop(run, mlp(torch.float64), threads)
    before = run.state.server.x
    loop()
    run()
    worker: Worker = loop.workers[0]
    expected = worker.split(run.state.server.x, run.state.server.y)
    assert not torch.allclose(run.state.server.x, before)
    for found, wanted in zip(loop.server, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("by_hand", [batched.vmapped, batched.written_out])
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


def test_calls_are_timed_in_turn_and_may_measure_themselves():
    order = []

    def slow() -> float:
        order.append("slow")
        return 0.5

    def fast() -> float:
        order.append("fast")
        return 0.1

    times = in_turn({"fast": fast, "slow": slow}, Effort(0.0, 3))
    assert times_faster(times["fast"], times["slow"]) == Ratio(5.0, 5.0, 5.0)
    assert order[4:] == ["fast", "slow"] * 3  # after two calls of each to warm up


def found(median: float) -> Found:
    return Found(Ratio(median, median, median), "1 ms", "2 ms", "the profile")


def test_a_row_passes_falls_short_or_says_why_it_was_not_measured():
    def fails(effort: Effort) -> Found:
        raise CannotMeasureError("no compiler")

    rows = [
        Row("a", "", "", at_least(2.0), lambda effort: found(2.0)),
        Row("b", "", "", at_least(2.0), lambda effort: found(1.9)),
        Row("c", "", "", at_most(2.0, "ms"), lambda effort: found(1.9)),
        Row("d", "", "", at_least(2.0), fails),
    ]
    results = [measured(row, Effort(0.0, 1)) for row in rows]
    assert [r.verdict for r in results] == ["pass", "falls short", "pass", "not measured"]
    assert results[3].reason == "no compiler"


def test_every_row_of_the_table_is_there():
    names = [row.name for row in all_rows(True, None)]
    assert len(set(names)) == len(names)
    methods = [method.name for method in METHODS]
    wanted = [f"mlp.{n}.{m}" for n in (100, 1000) for m in methods]
    wanted += [f"networks.cnn.{m}" for m in methods]
    wanted += ["networks.resnet20.local_sgda", "compositional.step", "portfolio.numpy"]
    wanted += ["portfolio.jax", "overhead.compiled", "overhead.vectorised", "peers.libauc"]
    wanted += [f"peers.{p}.{k}" for p in ("flower", "pfl", "fedlab") for k in ("mlp", "cnn")]
    assert set(wanted) <= set(names)


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
