"""Every tensor is made where its inputs are; a network may compute in another precision.

There is no accelerator here. Tensors on torch's device "meta" have shapes and types but no numbers,
and an operation between them and tensors of the host fails as it would on an accelerator.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import table
import torch
from rows import Row, federation_of, labelled
from torch import Tensor, nn

from fedminimax import cli
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.precision import counting
from fedminimax.blocks.schedules import SCHEDULES
from fedminimax.blocks.trees import flat, tree_map
from fedminimax.data.batches import Sampler, gather
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.job import PhaseJob, PhaseResult
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import simulate
from fedminimax.engine.state.store import Store
from fedminimax.messages.stage import mean
from fedminimax.problems.auc import AUC
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.network import Network
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Clock

HEART = Path(__file__).parents[2] / "experiments" / "heart_codasca.toml"
THERE = torch.device("meta")
# DRFA draws its cohort by numbers of the server, which tensors there do not have.
FAST = ("codasca", "adafgda", "sgdm-rl", "fed-norm", "scgdam")
ROWS = [
    pytest.param(row, id=row.name, marks=() if row.name in FAST else pytest.mark.slow)
    for row in {type(row.algorithm): row for row in reversed(table.ROWS)}.values()
    if not isinstance(row.algorithm, DRFA)
]


class Placed:
    """A phase without the question whether its numbers are finite."""

    def exchange(self, job: PhaseJob) -> PhaseResult:
        up, kept = self.run(job)  # type: ignore[attr-defined]
        new = job.phase.aggregate(job.problem, job.server, mean(up, job.weights), job.clock)
        for value in flat((up, kept, new, job.clock, job.down)):
            assert value.device == THERE
        return PhaseResult(new, kept, 0, 0, None)


class PlacedDebug(Placed, Debug):
    pass


class PlacedVectorised(Placed, Vectorised):
    pass


@pytest.mark.parametrize("executor", [PlacedDebug(), PlacedVectorised()], ids=lambda e: e.name)
@pytest.mark.parametrize("row", ROWS)
def test_rounds_stay_on_their_device(row: Row, executor):
    federation, state, _ = federation_of(row.problem(), row.algorithm, row.clients())
    moved = federation.clients.to(torch.float64, THERE)
    there = replace(
        federation,
        clients=moved,
        sampler=Sampler(moved, federation.problem.depth, 0),
        first_sampler=federation.first_sampler
        and Sampler(moved, federation.problem.depth, 0, "first"),
    )
    state = state._replace(server=tree_map(lambda v: v.to(THERE), state.server))
    store = Store(row.algorithm.keep)
    for _ in range(2):
        state = play_round(there, state, store, executor)


@pytest.mark.parametrize("filled", [[], [3, 2]])
def test_batches_are_where_their_rows_are(filled):
    columns = (torch.ones(9, 2, device=THERE), torch.ones(9, device=THERE))
    rows = torch.zeros(2, 3, dtype=torch.int64, device=THERE)
    batch = gather(columns, rows, torch.tensor(filled, dtype=torch.int64, device=THERE))
    assert all(value.device == THERE for value in flat(batch))


@pytest.mark.parametrize("schedule", [*SCHEDULES.values()], ids=[*SCHEDULES])
def test_a_schedule_is_where_its_clock_is(schedule):
    rate = schedule(0.1)(Clock.at(THERE, round=3))
    assert rate.device == THERE
    assert rate.dtype == torch.float64


def test_counts_are_as_precise_as_the_device_can():
    assert counting(torch.device("cuda")) == torch.float64
    assert counting(torch.device("mps")) == torch.float32


class Shifted(nn.Module):
    """A network with more than weights."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("shift", torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows) + self.shift


def test_a_network_goes_where_its_weights_are():
    network = Network(Shifted())
    vector, rows = network.start().to(THERE), torch.ones(5, 3, device=THERE)
    assert network(vector, rows).device == THERE
    moments = network.moments(vector, rows)
    assert network.outputs(vector, rows, moments).device == THERE
    assert network(network.start(), torch.ones(5, 3)).device.type == "cpu"


def quadratic_run(**options):
    clients = Clients([(torch.zeros(4), torch.randn(4, 3))])
    return simulate(Quadratic(3), LocalSGDA(), clients, 1, executor="debug", **options)


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("cuda", "torch sees no such devices on this machine: leave device out"),
        ("cuda:3", "torch sees no such devices"),
        ("mps", "torch sees no such devices"),
        ("cpu:1", "torch sees 1 such device on this machine"),
        ("meta", "device is 'meta'; give one of cpu, cuda, mps"),
        ("gpu", "device is 'gpu'; give one of cpu, cuda, mps"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, sentence):
    if device != "cpu" and getattr(getattr(torch, device[:4], None), "is_available", bool)():
        pytest.skip("this machine has one")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        quadratic_run(device=device)


def test_a_file_names_the_device(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    folder = tmp_path / "run"
    assert cli.main(["run", str(HEART), "device=cuda", "--folder", str(folder)]) == 2
    assert "device is 'cuda', but torch sees no such devices" in capsys.readouterr().err
    assert not folder.exists()
    assert cli.main(["run", str(HEART), "device=gpu"]) == 2
    assert "[run] device is 'gpu'" in capsys.readouterr().err


class Watched(nn.Module):
    """Remembers in which precision it computes."""

    seen: ClassVar[set[torch.dtype]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, rows: Tensor) -> Tensor:
        made = self.layer(rows)
        self.seen.add(made.dtype)
        return self.last(torch.tanh(self.norm(made)))


@pytest.fixture
def plain_kernels(monkeypatch):
    """Some virtual machines name instructions for bfloat16 that they then refuse."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


METHODS = {AUC: Codasca(lr=0.1), CrossEntropy: FedAvg(lr=0.1), CompositionalAUC: LocalSCGDAM()}


def trained(precision: torch.dtype | None, executor: str = "debug", problem=AUC):
    torch.manual_seed(0)
    method = METHODS[problem]
    options = {"executor": executor, "evaluate_every": 5, "dtype": torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return simulate(problem(Watched()), method, labelled(), 5, precision=precision, **options)


@pytest.mark.parametrize(
    ("executor", "problem"),
    [
        ("threads", AUC),
        ("vectorised", AUC),
        ("debug", CrossEntropy),
        ("threads", CompositionalAUC),
        ("vectorised", CompositionalAUC),
    ],
)
def test_a_network_in_bfloat16_keeps_vectors_in_float32(executor, problem, plain_kernels):
    Watched.seen.clear()
    full, short = (trained(p, executor, problem) for p in (None, torch.bfloat16))
    assert Watched.seen == {torch.float32, torch.bfloat16}
    assert short.outcome == "finished"
    assert short.point.x.dtype == short.point.y.dtype == torch.float32
    moved = full.point.x - full.problem.start().x
    apart = (short.point.x - full.point.x).norm() / moved.norm()
    assert 1e-5 < apart < 0.2
    assert short.history[-1]["train"]["loss"] == pytest.approx(
        full.history[-1]["train"]["loss"], rel=0.1
    )
    # The weights that come out are evaluated as they are.
    assert {p.dtype for p in short.module().parameters()} == {torch.float32}


def test_batch_norm_in_bfloat16_where_no_batch_is_padded(plain_kernels):
    torch.manual_seed(0)
    clients = Clients([(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(3)], batch_size=6)
    problem, method = AUC(Watched()), LocalSGDA(0.1, 0.1, local_steps=2)
    one, all_at_once = (
        simulate(problem, method, clients, 3, executor=executor, precision=torch.bfloat16)
        for executor in ("debug", "vectorised")
    )
    torch.testing.assert_close(one.point.x, all_at_once.point.x, rtol=0, atol=1e-3)


def test_precision_is_part_of_what_a_run_is(tmp_path, plain_kernels):
    run = ["run", str(HEART), "rounds=2", "executor=debug", "--quiet"]
    assert cli.main([*run, "precision=bfloat16", "--folder", str(tmp_path / "run")]) == 0
    config = tmp_path / "run" / "config.toml"
    assert 'precision = "bfloat16"' in config.read_text()
    (tmp_path / "run" / "final.safetensors").unlink()
    assert cli.main(["run", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    config.write_text(config.read_text().replace('precision = "bfloat16"', ""))
    assert cli.main(["run", str(tmp_path / "run"), "--resume", "--quiet"]) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": torch.bfloat16}, "Quadratic has none: leave precision out"),
        (
            {"precision": torch.float16},
            "give torch.bfloat16 (float16 would need its losses",
        ),
        ({"precision": torch.bfloat16, "dtype": torch.float64}, "is for runs in float32"),
    ],
)
def test_a_precision_that_makes_no_sense_is_refused(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        quadratic_run(**options)
