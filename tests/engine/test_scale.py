"""Many clients: ranges of shared columns, evaluations of some of them, and what a round costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import scale
from bench.measure import QUICK
from bench.table import PASS, measured
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.config import Experiment
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients, Numbers, Ranges
from fedminimax.engine import query as asking
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.simulate import simulate
from fedminimax.problems.functions import Minimax
from fedminimax.problems.worst_site import WorstSite, add_numbers
from fedminimax.random import distinct, key

D = torch.float64
ONES = torch.ones(3, dtype=D) / 3


def square(x, y, batch):
    return batch.mean((batch.rows[0] - x).square().sum(-1)) / 2


def labelled(sizes=(6, 4, 9)) -> list[tuple[torch.Tensor, ...]]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 2, dtype=D, generator=random), (torch.arange(n) % 3 == 0).to(D))
        for n in sizes
    ]


def joined(rows: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


# ------------------------------------------------------------------ ranges


@pytest.mark.parametrize("sampling", ["epoch", "iid", "balanced"])
@pytest.mark.parametrize("kind", ["tensor", "array", "map", "file"])
def test_ranges_are_the_clients_that_they_describe(kind, sampling, tmp_path):
    rows = labelled()
    columns = joined(rows)
    for number, column in enumerate(columns):
        np.save(tmp_path / f"{number}.npy", column.numpy())
    files = [tmp_path / f"{number}.npy" for number in range(2)]
    given = {
        "tensor": columns,
        "array": [column.numpy() for column in columns],
        "map": [np.load(file, mmap_mode="r") for file in files],
        "file": files,
    }[kind]
    options = {"batch_size": 4, "sampling": sampling}
    one = Clients(rows, **options, validation=rows)
    two = Clients(Ranges(given, [6, 4, 9]), **options, validation=Ranges(given, [6, 4, 9]))
    assert len(one) == len(two) == 3
    assert list(one.names) == list(two.names)
    for split in ("train", "validation"):
        for k in range(3):
            pairs = zip(one.splits[split].rows(k), two.splits[split].rows(k), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    cohort = np.arange(3)
    indices = [Sampler(c, 2, 7).draw(cohort, 3, 5).source.index for c in (one, two)]
    assert torch.equal(*indices)


def test_clients_may_share_rows():
    columns = joined(labelled((5, 5)))
    clients = Clients(
        Ranges(columns, [4, 6, 3], [0, 2, 7]), batch_size=4, sampling="balanced", weights="size"
    )
    assert clients.weight_vector("size").tolist() == [4 / 13, 6 / 13, 3 / 13]
    assert torch.equal(clients.train.rows(1)[0], columns[0][2:8])
    rows = Sampler(clients, 1, 0).draw(np.arange(3), 0, 20).source.index[:, 0]
    labels = columns[1][rows]
    assert (labels.sum(2) == 2).all()
    for k, (first, last) in enumerate([(0, 4), (2, 8), (7, 10)]):
        assert set(rows[:, k].flatten().tolist()) == set(range(first, last))


def test_a_run_on_ranges_is_the_run_on_the_clients(tmp_path):
    rows = labelled()
    problem = Minimax(square, torch.zeros(2, dtype=D))
    for name, clients in (
        ("list", Clients(rows, batch_size=2)),
        ("ranges", Clients(Ranges(joined(rows), [6, 4, 9]), batch_size=2)),
    ):
        simulate(problem, FedAvg(), clients, 4, cohort=2, executor="debug", folder=tmp_path / name)
    files = [tmp_path / name / "final.safetensors" for name in ("list", "ranges")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_other_ranges_of_the_same_columns_are_another_experiment(tmp_path):
    columns = [torch.arange(8.0)[:, None]]

    def go(rounds, starts, **options):
        clients = Clients(Ranges(columns, [2, 2], starts), batch_size=1)
        options |= {"executor": "debug", "folder": tmp_path, "evaluate_every": 1}
        simulate(Minimax(square, torch.zeros(1)), FedAvg(), clients, rounds, **options)

    go(1, [0, 2])
    with pytest.raises(ValueError, match="are of another experiment"):
        go(2, [4, 6], resume=True)
    go(2, [0, 2], resume=True)


def test_a_file_that_is_no_column_is_a_sentence(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros(2))
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    for name, sentence in (
        ("nothing.npy", "could not be read as a column .*No such file"),
        ("x.npz", "could not be read as a column .*give a file of numpy.save"),
        ("text.npy", "a column cannot be used: .*str"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Clients(Ranges([tmp_path / name], [2]))


def test_a_column_of_the_run_s_type_stays_on_the_disk(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((6, 1), dtype=np.float32))
    clients = Clients(Ranges([tmp_path / "x.npy"], [3, 3]))
    column = clients.train.columns[0]
    assert clients.to(torch.float32).train.columns[0].data_ptr() == column.data_ptr()


COLUMN = torch.zeros(6, 1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Ranges([COLUMN], []), "no clients"),
        (Ranges([], [1]), "give at least one"),
        (Ranges([COLUMN, COLUMN[:5]], [6]), "same number of rows"),
        (Ranges([COLUMN], [3, 2]), "add up to 5, but the columns have 6"),
        (Ranges([COLUMN], [6, 0]), "client 1 has 0 rows"),
        (Ranges([COLUMN], [3, 3], [0, 4]), "client 1 has 3 rows from row 4"),
        (Ranges([COLUMN], [3, 3], [0]), "give as many"),
        (Ranges([torch.tensor([0.0, 1.0, float("inf")])], [1, 2]), "infinity in row 2"),
    ],
)
def test_ranges_that_cannot_be_used_are_refused_with_a_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Clients(given)


def test_ranges_have_no_auxiliary_rows_and_both_classes_are_needed():
    with pytest.raises(ValueError, match="not with Ranges"):
        Clients(Ranges([COLUMN], [6]), auxiliary=(COLUMN,))
    labels = torch.tensor([0, 1, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="client 1 has rows of one class only"):
        Clients(Ranges([COLUMN, labels], [4, 2]), batch_size=2, sampling="balanced")


def test_numbers_are_names():
    names = Numbers(10**6)
    assert (len(names), names[-1], names[3:5]) == (10**6, "999999", ("3", "4"))
    assert "12" in names


# ------------------------------------------------------------------ questions


def test_evaluations_may_ask_some_of_the_clients_only():
    values = torch.arange(1.0, 41.0, dtype=D)
    clients = Clients(Ranges([values[:, None]], [1] * 40), batch_size=None)
    problem = Minimax(square, torch.zeros(1, dtype=D))
    asked = distinct(key(5, "evaluation"), 7, 40)
    still = FedAvg(lr=0.0)
    options = {"seed": 5, "executor": "debug", "cohort": 3, "evaluate_every": 1}
    run = simulate(problem, still, clients, 2, evaluate_clients=7, **options)
    expected = float((values[torch.from_numpy(asked)] ** 2).mean() / 2)
    assert [r["train"]["loss"] for r in run.history] == pytest.approx([expected] * 3)
    assert run.history[0]["evaluation_bytes"] == 7 * (8 + 8)
    every = simulate(problem, still, clients, 2, **options)
    assert every.history[0]["train"]["loss"] == pytest.approx(float((values**2).mean() / 2))
    # What is trained is not touched by who is asked.
    moving = FedAvg(lr=0.1)
    runs = [simulate(problem, moving, clients, 3, evaluate_clients=n, **options) for n in (1, None)]
    assert torch.equal(runs[0].point.x, runs[1].point.x)


def test_those_asked_count_by_their_weights():
    clients = Clients(Ranges([torch.arange(6.0)[:, None]], [1, 2, 3]), weights="size")
    problem = Minimax(square, torch.zeros(1))
    weights = clients.weight_vector("size")
    ask = LocalQuery(problem, clients, "train", weights, np.array([0, 2]))
    assert ask.names == ("0", "2")
    assert ask.weights.tolist() == [0.25, 0.75]
    (loss,) = ask.mean("loss", torch.zeros(1), torch.zeros(0))
    assert float(loss) == pytest.approx(0.75 * (9 + 16 + 25) / 6)


def test_sites_keep_their_names_when_some_of_them_are_asked():
    rows = add_numbers([(torch.randn(4, 2), torch.arange(4) % 2) for _ in range(3)])
    clients = Clients(rows, names=["north", "west", "south"])
    asked = LocalQuery(problem := WorstSite(torch.nn.Linear(2, 2), 3), clients, "train", ONES)
    known = problem.prepare(asked)
    some = LocalQuery(known, clients, "train", ONES, np.array([1]))
    point = known.start()
    assert list(known.variables(point, some)) == ["site north", "site west", "site south"]
    assert list(known.evaluate(point, some)["site_accuracies"]) == ["west"]


@pytest.mark.parametrize("together", [1, 2, 5, 100])
def test_sums_do_not_depend_on_how_many_replies_are_added_at_once(together, monkeypatch):
    monkeypatch.setattr(asking, "_TOGETHER", together)
    clients = Clients(Ranges([torch.arange(5.0)[:, None]], [1] * 5))
    ask = LocalQuery(Minimax(square, torch.zeros(1)), clients, "train", torch.ones(5) / 5)
    (total,) = ask.sum("loss", torch.zeros(1), torch.zeros(0))
    assert float(total) == 15
    assert ask.cost.bytes_up == 5 * 4
    assert len(ask.each("loss", torch.zeros(1), torch.zeros(0))) == 5


@pytest.mark.parametrize("number", [0, 4, 1.5])
def test_a_number_of_clients_to_ask_that_makes_no_sense_is_refused(number):
    clients = Clients([(torch.zeros(1, 1),)] * 3)
    with pytest.raises(ValueError, match=r"evaluate_clients is .*from 1 to 3"):
        simulate(Minimax(square, torch.zeros(1)), FedAvg(), clients, 1, evaluate_clients=number)


def test_a_file_may_say_how_many_are_asked():
    table = {"data": {"name": "quadratic"}, "problem": {"name": "quadratic"}}
    table |= {"method": {"name": "codasca"}, "run": {"evaluate_clients": 3}}
    assert Experiment.from_table(table).run.evaluate_clients == 3


# ------------------------------------------------------------------ a million


def test_a_million_clients_are_a_few_arrays(tmp_path):
    """Nothing that is made for each client, and nothing that goes over all of them in a round."""
    columns = [torch.arange(1000.0)[:, None]]
    starts = np.arange(10**6) % 990
    clients = Clients(Ranges(columns, np.full(10**6, 10), starts), batch_size=2)
    before = scale.resident()["VmRSS"]
    problem = Minimax(square, torch.zeros(1))
    run = simulate(
        problem,
        Scaffold(local_steps=1),
        clients,
        5,
        cohort=100,
        executor="vectorised",
        evaluate_clients=10,
        folder=tmp_path,
        store="disk",
    )
    assert run.outcome == "finished"
    assert scale.resident()["VmRSS"] - before < 100


def test_the_measurements_are_plain_numbers():
    found = scale.round_times(small=200, large=2_000, rounds=2)
    assert len(found["small"]) == len(found["large"]) == 2
    assert min(found["small"] + found["large"]) > 0
    own = scale.round_times(small=200, large=400, rounds=1, own_rows=3)
    assert min(own["small"]) > 0
    kept = scale.store_on_disk(clients=300, rounds=4)
    assert kept["clients_met"] > 100
    assert kept["state_megabytes"] == pytest.approx(kept["clients_met"] * 2113 * 4 / 1e6)


@pytest.mark.slow
def test_a_million_clients_take_the_memory_of_a_thousand_and_the_store_little():
    memory, kept = [row for row in scale.rows() if row.name != "scale.time"]
    for row in (memory, kept):
        assert measured(row, QUICK).verdict == PASS
