"""A finished run as one file for other programs: raw columns in, score and probability out."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedminimax.config import ConfigError
from fedminimax.data.encoding import Encoder, Part
from fedminimax.data.prepare import Inputs
from fedminimax.experiment import load, outputs_of, preparation
from fedminimax.report.operating import calibration_of

FORMATS = (".onnx", ".pt2")
TOLERANCE = 1e-6  # between what the file says and what `predict` says
CHECKED = 64  # rows


class Exported(nn.Module):
    """What `predict` does with the columns of a table, as operations of torch.

    Takes (rows, columns) in double precision, NaN where a value is missing, and returns the score
    of each row and, where the run has a calibration, its probability.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, inputs: Inputs, line: tuple[float, float] | None):
        super().__init__()
        self.module, self.line = module, line
        encoded = isinstance(inputs, Encoder)
        self.parts = inputs.parts if encoded else None
        self.dtype = next((p.dtype for p in module.parameters()), torch.float64)
        self.register_buffer("mean", torch.from_numpy(inputs.mean))
        scale = np.full_like(inputs.mean, 0.5) if encoded else inputs.scale
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        raw = features if self.parts is None else _encoded(features, self.parts)
        ready = (raw - self.mean) / self.scale
        ready = torch.where(ready.isnan(), torch.zeros_like(ready), ready).to(self.dtype)
        output = self.module(ready).reshape(-1).double()
        score = torch.sigmoid(output)
        if self.line is None:
            return (score,)
        slope, offset = self.line
        return score, torch.sigmoid(slope * output + offset)


def _encoded(features: Tensor, parts: Sequence[Part]) -> Tensor:
    """`Encoder.transform` before it is centred."""
    found: list[Tensor] = []
    start = 0
    for part in parts:
        own = features[:, start : start + part.width]
        start += part.width
        if not part.outputs:
            continue
        if len(part.edges) > 1:
            edges = torch.tensor(part.edges, dtype=torch.float64)
            inside = ((own[:, :1] - edges[:-1]) / edges.diff()).clamp(0.0, 1.0)
        else:
            inside = own[:, list(part.kept)]
            if not part.other:
                some = (inside != 0).any(1, keepdim=True)
                inside = torch.where(some, inside, torch.full_like(inside, torch.nan))
        found.append(inside)
        if part.other:
            found.append(1.0 - inside.sum(1, keepdim=True))
        if part.missing:
            found.append(own[:, :1].isnan().double())
    return torch.cat(found, 1)


def export(folder: Path, file: Path, best: bool | None = None) -> list[str]:
    """Writes the model of a run with its encoding and calibration, and compares the file's answers
    with those of `predict` on rows drawn for it.

    Arguments:
        folder: of a finished run that was trained on tables.
        file: ending in .onnx, or in .pt2 for `torch.export.load`.
        best: as for `Run.module`.

    Returns the names of the columns that the file takes, in their order.
    """
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file} ends in {file.suffix!r}; give a file ending in .onnx or .pt2")
    run = load(folder)
    if labels := getattr(run.problem, "labels", ()):
        raise ConfigError(
            f"the run in {folder} ranks {len(labels)} labels, but an exported file has one score "
            "per row: use fedminimax predict, or load(folder).module() from Python"
        )
    schema, inputs = preparation(folder)
    calibration = calibration_of(folder, run.best is not None and best is not False)
    line = calibration and (calibration.platt.slope, calibration.platt.offset)
    model = Exported(run.module(best), inputs, line).eval().requires_grad_(False)
    rows = _drawn(inputs)
    expected = outputs_of(run, torch.from_numpy(inputs.transform(rows)), best)
    names = ["score", "probability"][: 1 if line is None else 2]
    about = {"columns": json.dumps(inputs.columns), "positive": json.dumps(schema.positive)}
    file.parent.mkdir(parents=True, exist_ok=True)
    unchecked = file.with_stem(f"{file.stem}-unchecked")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # torch's own
                warnings.simplefilter("ignore", kind)
            score = _write(model, torch.from_numpy(rows), unchecked, names, about)
        error = float((score - torch.sigmoid(expected)).abs().max())
        if not error <= TOLERANCE:
            raise ValueError(
                f"the file's scores differ from those of predict by {error:.2g}, more than "
                f"{TOLERANCE:g}: nothing was written"
            )
        unchecked.replace(file)
    finally:
        unchecked.unlink(missing_ok=True)
    return [*inputs.columns]


def _drawn(inputs: Inputs) -> np.ndarray:
    """Rows such as the run was trained on, some of their values missing."""
    random = np.random.default_rng(0)
    if not isinstance(inputs, Encoder):
        rows = inputs.mean + inputs.scale * random.standard_normal((CHECKED, len(inputs.mean)))
        return np.where(random.random(rows.shape) < 0.1, np.nan, rows)
    found = []
    for part in inputs.parts:
        if part.edges:
            low, high = part.edges[0], part.edges[-1]
            own = random.uniform(low, high + (high - low) / 8, (CHECKED, part.width))
        else:
            codes = random.integers(part.width + 1, size=(CHECKED, 1))
            own = (codes == np.arange(part.width)).astype(np.float64)
        found.append(np.where(random.random((CHECKED, 1)) < 0.1, np.nan, own))
    return np.hstack(found)


def _write(
    model: nn.Module, rows: Tensor, file: Path, names: Sequence[str], about: dict[str, str]
) -> Tensor:
    """The scores of these rows by the file that was written."""
    if file.suffix == ".pt2":
        shape = {"features": {0: torch.export.Dim("rows", min=1)}}
        exported = torch.export.export(model, (rows,), dynamic_shapes=shape)
        torch.export.save(exported, file, extra_files=about)
        return exported.module()(rows)[0]
    try:
        import onnxruntime
        import onnxscript  # noqa: F401, which torch.onnx needs
    except ImportError as error:
        raise ConfigError(
            "an ONNX file is written with onnxscript and checked with onnxruntime, which are not "
            "installed: pip install 'fedminimax[export]'"
        ) from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # says that torchvision is missing
    program: Any = torch.onnx.export(
        model,
        (rows,),
        dynamo=True,
        verbose=False,
        input_names=["features"],
        output_names=[*names],
        dynamic_shapes={"features": {0: "rows"}},
    )
    program.model.metadata_props.update(about)
    program.save(file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["score"], {"features": rows.numpy()})[0])
