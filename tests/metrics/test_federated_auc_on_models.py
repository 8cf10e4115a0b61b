"""The federated AUC on the scores of trained models: exact within its bound, and the bound small.

The heart data ship with the package. GUSTO-I and Fashion-MNIST are used where their files are: in
the folder named by FEDMINIMAX_DATA, or in shared/data beside the repository.
"""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedminimax as fm
from fedminimax.data.heart import Heart
from fedminimax.data.pooled import Pooled
from fedminimax.data.prepare import Split, prepare

BESIDE = Path(__file__).parents[3] / "shared" / "data"
DATA = Path(os.environ.get("FEDMINIMAX_DATA", BESIDE))


def tabular(reading) -> fm.Clients:
    prepared = prepare(reading, Split(train=0.5, validation=0.0, test=0.5))
    rows = prepared.rows
    return fm.Clients(rows["train"], test=rows["test"], names=prepared.names)


def heart() -> tuple[fm.Clients, nn.Module]:
    return tabular(Heart().read()), nn.Linear(22, 1)


def gusto() -> tuple[fm.Clients, nn.Module]:
    path = str(DATA / "gusto" / "gusto.csv.gz")
    drop = ("tpa", "tx", "grpl", "grps")
    reading = Pooled(path, "day30", partition="column", column="regl", drop=drop).read()
    return tabular(reading), nn.Linear(len(reading.schema.features), 1)


def fashion() -> tuple[fm.Clients, nn.Module]:
    def idx(name: str, header: int) -> np.ndarray:
        raw = gzip.decompress((DATA / "fashion-mnist" / name).read_bytes())
        return np.frombuffer(raw, np.uint8, offset=header)

    images = idx("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784).astype(np.float32) / 255
    labels = (idx("t10k-labels-idx1-ubyte.gz", 8) < 5).astype(np.float32)
    sites = [(images[k::4], labels[k::4]) for k in range(4)]
    train = [(x[:1250], y[:1250]) for x, y in sites]
    test = [(x[1250:], y[1250:]) for x, y in sites]
    return fm.Clients(train, test=test), nn.Linear(784, 1)


AT_HAND = [
    heart,
    *([gusto] if (DATA / "gusto" / "gusto.csv.gz").exists() else []),
    *([fashion] if (DATA / "fashion-mnist" / "t10k-images-idx3-ubyte.gz").exists() else []),
]


@pytest.mark.parametrize("score", ["logit", "sigmoid"])
@pytest.mark.parametrize("source", AT_HAND)
def test_bound_on_trained_models(source, score):
    torch.manual_seed(0)
    clients, module = source()
    if score == "sigmoid":  # scores that pile up at 0 and 1
        module = nn.Sequential(module, nn.Sigmoid())
    problem = fm.AUC(module, score="raw" if score == "sigmoid" else "sigmoid")
    run = fm.simulate(problem, fm.Codasca(lr=0.5), clients, rounds=20, evaluate_every=20)
    found = run.history[-1]["test"]
    assert found["auc"] > run.history[0]["test"]["auc"]
    assert found["auc"] > 0.7
    assert abs(found["auc_federated"] - found["auc"]) <= found["auc_bound"] + 1e-12
    assert found["auc_bound"] <= 1e-3
