"""An exported file says what `predict` says, missing values and codes included."""

import json

import numpy as np
import pytest
import torch

from fedminimax.cli import main
from fedminimax.data.tables import read_table
from fedminimax.experiment import load, outputs_of, preparation
from fedminimax.report import export as module
from fedminimax.report.export import export

FILE = """
[data]
name = "folder"
path = "sites"
label = "sick"
missing = ["", "?"]
[split]
validation = 0.2
bins = {bins}
[model]
name = "mlp"
hidden = [4]
[problem]
name = "auc"
[method]
name = "codasca"
lr = 0.1
local_steps = 2
[run]
rounds = 2
batch_size = 8
executor = "vectorised"
"""


@pytest.fixture(params=[0, 4])
def trained(request, tmp_path, monkeypatch):
    """The folder of a run, without encoding and with."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    (tmp_path / "sites").mkdir()
    for site in ("east", "west"):
        lines = [
            f"{random.normal():.3f},{random.choice(['', 'a', 'b', 'c'])},{k % 2},{k % 3 == 0:d}"
            for k in range(60)
        ]
        text = "\n".join(["age,ward,sex,sick", *lines, "?,a,1,1\n"])
        (tmp_path / "sites" / f"{site}.csv").write_text(text)
    (tmp_path / "mine.toml").write_text(FILE.format(bins=request.param))
    assert main(["run", "mine.toml", "--folder", "run"]) == 0
    return tmp_path / "run"


def by_predict(folder):
    schema, inputs = preparation(folder)
    table = read_table("sites/east.csv", schema, "refuse")
    outputs = outputs_of(load(folder), torch.from_numpy(inputs.transform(table.features)))
    return table.features, torch.sigmoid(outputs).numpy()


@pytest.mark.slow
def test_an_onnx_file_scores_as_predict_does(trained, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    capsys.readouterr()
    assert main(["export", "run", "model.onnx"]) == 0
    assert "it takes rows of 5 numbers, NaN where one is missing" in capsys.readouterr().out
    features, expected = by_predict(trained)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    score, probability = session.run(None, {"features": features})
    np.testing.assert_allclose(score, expected, atol=1e-6)
    held = session.get_modelmeta().custom_metadata_map
    assert json.loads(held["columns"]) == ["age", "ward=a", "ward=b", "ward=c", "sex"]
    main(["predict", "run", "sites/east.csv", "-o", "scores.csv"])
    told = np.loadtxt("scores.csv", delimiter=",", skiprows=1, usecols=(1, 2))
    np.testing.assert_allclose(np.stack([score, probability], 1), told, atol=1e-5)


def test_a_torch_export_file_scores_as_predict_does(trained):
    assert export(trained, trained / "model.pt2")[0] == "age"
    features, expected = by_predict(trained)
    program = torch.export.load(trained / "model.pt2").module()
    for rows in (features, features[:1]):
        score, _ = program(torch.from_numpy(rows))
        np.testing.assert_allclose(score.numpy(), expected[: len(rows)], atol=1e-6)


def test_what_cannot_be_exported_is_a_sentence(trained, monkeypatch, capsys):
    assert main(["export", "run", "model.pickle"]) == 2
    assert "model.pickle ends in '.pickle'; give a file ending in" in capsys.readouterr().err
    assert main(["export", "run", "new/model.pt2"]) == 0
    before = (trained.parent / "new" / "model.pt2").read_bytes()
    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    assert main(["export", "run", "new/model.pt2"]) == 2
    assert "differ from those of predict by" in capsys.readouterr().err
    assert [path.read_bytes() for path in (trained.parent / "new").iterdir()] == [before]
