"""Runs of compositions: levels checked at the start, drift watched, evaluations accounted."""

from __future__ import annotations

import pytest
import torch

import fedminimax as fm
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD
from fedminimax.config import Experiment
from fedminimax.data.levels import LevelsData
from fedminimax.data.synthetic import QuadraticData
from fedminimax.experiment import load, run_experiment
from fedminimax.problems.levels import Levels


def test_drift_is_logged_before_each_evaluation_and_is_no_part_of_training():
    clients = fm.Clients(QuadraticData(clients=4, spread=3.0).client_rows(), batch_size=None)
    plain, watched = (
        fm.simulate(
            fm.problems.Quadratic(10),
            fm.Codasca(lr=0.02, local_steps=5),
            clients,
            5,
            evaluate_every=2,
            dtype=torch.float64,
            executor="vectorised",
            measures=measures,
        )
        for measures in ((), ("drift", "grad_x"))
    )
    assert torch.equal(plain.point.x, watched.point.x)
    assert [r["round"] for r in watched.history if "drift_x" in r["optimality"]] == [2, 4, 5]
    for a, b in zip(plain.history, watched.history, strict=True):
        for name in ("gradients", "rows", "bytes_up", "bytes_down", "exchanges"):
            assert a[name] == b[name]
        drift = 0 if b["round"] == 0 else 8 * (10 + 10 + 2) * 4
        assert b["evaluation_bytes"] - a["evaluation_bytes"] == drift + 8 * (20 + 20) * 4
        assert (a["evaluation_gradients"], b["evaluation_gradients"]) == (0, 4)
        assert b["evaluation_rows"] == 4
    assert watched.history[-1]["optimality"]["drift_x"] > 0


def test_the_evaluation_of_levels_costs_a_gradient_per_level_and_client():
    clients = fm.Clients(LevelsData(clients=3, depth=3).client_rows(), batch_size=None)
    run = fm.simulate(Levels(5), FedDRSCGD(), clients, 1, evaluate_every=1)
    assert run.history[0]["evaluation_gradients"] == 3 * 3


def test_levels_that_do_not_fit_end_a_run_before_it_begins(tmp_path):
    levels = [lambda x, batch: x[:2], lambda v, batch: torch.ones(3) @ v * v, lambda v, b: v @ v]
    problem = fm.Composition(levels, [1.0, 2.0, 3.0])
    clients = fm.Clients([(torch.ones(2),)])
    with pytest.raises(ValueError, match="level 2 of Composition"):
        fm.simulate(problem, LevelwiseDRSCGD(), clients, 1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_both_problems_run_from_a_file(tmp_path):
    meta = {
        "data": {"name": "sinusoids", "clients": 3, "tasks": 2},
        "model": {"name": "mlp", "hidden": [4]},
        "problem": {"name": "maml", "depth": 1},
        "method": {"name": "fedavg"},
        "run": {"rounds": 2, "evaluate_every": 1},
    }
    run = run_experiment(Experiment.from_table(meta), tmp_path / "meta")
    assert run.history[-1]["test"]["loss"] > 0
    assert load(tmp_path / "meta").module()(torch.zeros(1, 1)).shape == (1, 1)
    levels = {
        "data": {"name": "levels", "depth": 1},
        "problem": {"name": "levels", "depth": 1},
        "method": {"name": "fedavg"},
        "run": {"rounds": 2},
    }
    run = run_experiment(Experiment.from_table(levels), tmp_path / "levels")
    assert run.history[-1]["train"]["slope"] < run.history[0]["train"]["slope"]
