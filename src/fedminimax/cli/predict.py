"""fedminimax predict: scores, probabilities and classes of new rows by a finished run."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedminimax.config import suggest
from fedminimax.data.columns import Texts
from fedminimax.data.encoding import Encoder
from fedminimax.data.sites import DataError, Schema, listed, nearest, plain
from fedminimax.data.tables import Rows, open_table, read_table
from fedminimax.engine.session import Run
from fedminimax.experiment import experiment_of, load, outputs_of, preparation
from fedminimax.metrics.ranking import auc
from fedminimax.report.operating import calibration_of

RATES = ("probability", "sensitivity", "specificity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument(
        "table", type=Path, help="a CSV, Parquet or npz file with the columns of the training data"
    )
    parser.add_argument("-o", "--output", type=Path, help="where to write (default: the screen)")
    parser.add_argument(
        "--last",
        action="store_true",
        help="the model of the last round, not of the best by validation",
    )
    parser.add_argument(
        "--at",
        type=operating,
        default="probability=0.5",
        metavar="RATE=VALUE",
        help="where the class turns positive: %(default)s, or sensitivity=0.9 or specificity=0.9 "
        "on the validation rows",
    )
    parser.add_argument(
        "--id",
        metavar="COLUMN",
        help="to write beside the scores (default: one left out of the "
        "training that has another value in every row)",
    )


def operating(text: str) -> tuple[str, float]:
    """The rate and its value of an operating point."""
    name, _, value = text.partition("=")
    if name not in RATES:
        raise argparse.ArgumentTypeError(f"{text!r} has no rate; {suggest(name, RATES)}")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a value between 0 and 1")
    return name, number


def command(options: argparse.Namespace) -> int:
    """Writes a line for each row."""
    run = load(options.folder)
    best = False if options.last else None
    schema, inputs = preparation(options.folder)
    unknown = "other" if isinstance(inputs, Encoder) else "refuse"
    table = read_table(options.table, schema, unknown)
    features = torch.from_numpy(inputs.transform(table.features))
    outputs = outputs_of(run, features, best)
    if outputs.ndim > 1:
        return predict_labels(options, run, schema, table, outputs)
    found = torch.sigmoid(outputs).tolist()
    columns: dict[str, Sequence[Any]] = {"line": table.lines, **identifier(options)}
    columns["score"] = list(map(repr, found))
    calibration = calibration_of(options.folder, run.best is not None and not options.last)
    if calibration is None:
        note(
            "scores only: the run has no calibration, which needs validation rows of both classes "
            "in a simulated run"
        )
    else:
        positive = outputs.numpy() > calibration.score_at(*options.at)
        chances = calibration.platt.probabilities(outputs.numpy())
        columns["probability"] = [f"{chance:.6g}" for chance in chances]
        columns["class"] = [class_names(schema)[int(row)] for row in positive]
        if not positive.any():
            note(
                "no row counts as positive: with --at sensitivity=0.9, or a lower "
                "--at probability=..., more do"
            )
    write(columns, options.output)
    if table.labels is not None:
        value = auc(found, table.labels)
        text = "not defined: the labels are of one class" if value is None else f"{value:.4f}"
        print(f"AUC on the {len(found)} labelled rows: {text}", file=sys.stderr)
    return 0


def predict_labels(
    options: argparse.Namespace, run: Run, schema: Schema, table: Rows, outputs: torch.Tensor
) -> int:
    """The same for a run of several labels or classes: three columns for each label; for classes
    the probabilities add up to 1, and the class is the one with the largest."""
    labels: tuple[str, ...] = run.problem.labels  # type: ignore[attr-defined]
    best = run.best is not None and not options.last
    scores, raw = torch.sigmoid(outputs).numpy(), outputs.numpy()
    columns: dict[str, Sequence[Any]] = {"line": table.lines, **identifier(options)}
    chances, known = np.full_like(raw, np.nan), []
    for place, name in enumerate(labels):
        columns[f"score {name}"] = list(map(repr, scores[:, place].tolist()))
        calibration = calibration_of(options.folder, best, name)
        known.append(calibration is not None)
        if calibration is None:
            continue
        chances[:, place] = calibration.platt.probabilities(raw[:, place])
        if not schema.classes:
            columns[f"probability {name}"] = [f"{chance:.6g}" for chance in chances[:, place]]
            positive = raw[:, place] > calibration.score_at(*options.at)
            columns[f"class {name}"] = positive.astype(int).tolist()
    if lack := [name for name, there in zip(labels, known, strict=True) if not there]:
        note(f"scores only, without validation rows of both classes: {', '.join(lack)}")
    elif schema.classes:
        chances /= chances.sum(axis=1, keepdims=True)
        for place, name in enumerate(labels):
            columns[f"probability {name}"] = [f"{chance:.6g}" for chance in chances[:, place]]
        columns["class"] = [labels[place] for place in chances.argmax(axis=1)]
    write(columns, options.output)
    if table.labels is not None:
        places = np.arange(len(labels))
        marks = table.labels if table.labels.ndim > 1 else table.labels[:, None] == places
        for place, name in enumerate(labels):
            there = marks[:, place] >= 0
            value = auc(raw[there, place], marks[there, place]) if there.any() else None
            text = "not defined: the rows are of one class" if value is None else f"{value:.4f}"
            print(f"AUC of {name} on {there.sum()} labelled rows: {text}", file=sys.stderr)
    return 0


def note(sentence: str) -> None:
    """Prints a remark beside the output."""
    print(f"note: {sentence}", file=sys.stderr)


def class_names(schema: Schema) -> tuple[str, str]:
    """The negative and the positive class, as the label has them if each is one."""
    sides = zip(("negative", "positive"), (schema.negative, schema.positive), strict=True)
    negative, positive = (texts[0] if len(texts) == 1 else name for name, texts in sides)
    return negative, positive


def identifier(options: argparse.Namespace) -> dict[str, list[str]]:
    """The column that --id names; else the first that was left out of the training and has another
    value in every row, if there is one."""
    left_out = experiment_of(options.folder).data.options.get("drop", ())
    names = [options.id] if options.id else [name for name in left_out if name]
    raw = open_table(options.table, None, names.__contains__, names) if names else None
    if raw is None:
        return {}
    if options.id and options.id not in raw.cells:
        raise DataError(
            f"--id is {options.id!r}, but the columns of {raw.file} are {listed(raw.names, 30)}."
            f"{nearest(options.id, raw.names)}"
        )
    for name in names:
        values = [plain(cell) for cell in Texts.of(raw.cells.get(name, []))]
        if options.id or (values and len(set(values)) == len(values)):
            return {name: values}
    return {}


def write(columns: dict[str, Sequence[Any]], output: Path | None) -> None:
    """The columns as CSV, to a file or to the screen."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    if output:
        output.write_text(text.getvalue(), encoding="utf-8")
    else:
        print(text.getvalue(), end="")
