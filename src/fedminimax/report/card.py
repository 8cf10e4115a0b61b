"""A model card: what a finished run's model is, how good, on whose rows, and what it is not for.

It says what the run's folder and rows say, and no more, as Markdown and as HTML.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from fedminimax.config import CHOICES, described
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import PREPARATION
from fedminimax.report import pieces
from fedminimax.report.curves import DOUBLED, ROWS, words
from fedminimax.report.judged import Rule, wilson
from fedminimax.report.operating import CALIBRATION
from fedminimax.report.outcome import positive_share, subject
from fedminimax.report.page import whole
from fedminimax.report.roc import Asked, Interval, asked
from fedminimax.report.runs import Group, Told
from fedminimax.report.tables import privacy_text

FILES = ("config.toml", PREPARATION, CALIBRATION, "final.safetensors")
FEW_POSITIVES = 100  # below which an interval is said to be wide
NONE = "\N{EN DASH}"


class Table(NamedTuple):
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


class Part(NamedTuple):
    """A section: sentences, then a table."""

    title: str
    sentences: Sequence[str]
    table: Table | None = None


def write(run: Told) -> list[Path]:
    """Writes model-card.md and model-card.html into the folder of a finished run."""
    split = Group(0, "", (run,)).shown_split()
    judges_rows = "auc" in run.kept[split]
    found = asked(run.folder, split) if judges_rows else "the problem does not rank rows"
    title, parts = f"Model card: {subject(run)}", list(parts_of(run, split, found))
    written = []
    for name, text in (("md", markdown(title, parts)), ("html", html(title, parts))):
        written.append(run.folder / f"model-card.{name}")
        written[-1].write_text(text, encoding="utf-8")
    return written


def parts_of(run: Told, split: str, found: Asked | str) -> Iterator[Part]:
    """The sections of a card."""
    told = found if isinstance(found, Asked) else None
    yield _model(run)
    yield _measures(run, split, found)
    if told is not None:
        yield _sites(run, split, told)
        if told.seen is not None and told.seen.rules:
            yield _rules(split, told.seen.rules)
    yield _data(run)
    yield _privacy(run)
    yield Part("Limits", list(_limits(run, split, told)))
    versions = [(name, str(v)) for name, v in run.environment.items() if v is not None]
    yield Part("Versions", [], Table(("What", "Which"), versions))
    hashes = [
        (name, hashlib.sha256((run.folder / name).read_bytes()).hexdigest())
        for name in FILES
        if (run.folder / name).exists()
    ]
    yield Part("Files", ["SHA-256 of the files beside this card."], Table(("File", "Hash"), hashes))


def _model(run: Told) -> Part:
    parts = run.experiment
    rows = [("Objective", _described("problem", parts.problem.name))]
    if parts.model is not None:
        rows.append(("Model", f"{parts.model.name} {_options(run, 'model')}".strip()))
    method = f"{parts.method.name} {_options(run, 'method')}: "
    rows.append(("Method", method + _described("method", parts.method.name)))
    rows.append(("Rounds", f"{run.last['round']}; the model is that of round {run.kept['round']}"))
    rows.append(("Outcome", run.outcome))
    rows.append(("Seeds", ", ".join(f"{name} {value}" for name, value in run.seeds.items())))
    return Part("Model", [], Table(("What", "Which"), rows))


def _described(section: str, name: str) -> str:
    return described(CHOICES[section][name])


def _options(run: Told, section: str) -> str:
    own = {k.partition(".")[2]: v for k, v in run.settings.items() if k.startswith(f"{section}.")}
    return ", ".join(f"{key} = {value}" for key, value in own.items() if key != "name")


def _measures(run: Told, split: str, found: Asked | str) -> Part:
    record, rows = run.kept[split], []
    told = found if isinstance(found, Asked) else None
    for name, value in record.items():
        if isinstance(value, float) and name not in DOUBLED:
            interval: Interval = record.get(f"{name}_interval")
            if name == "auprc" and told is not None and told.seen is not None:
                interval = told.seen.auprc_interval
            rows.append((words(name), pieces.value_text(value), _pair(interval)))
    sentences = [f"On {ROWS[split]}, which no choice was made by."] if split == "test" else []
    if told is not None:
        sentences.append(
            f"They are {told.total:,} rows, {told.positives:,} of them positive "
            f"({positive_share(told):.1%}), which is also the AUPRC of chance."
        )
    else:
        sentences.append(f"Rows could not be asked again: {found}.")
    return Part("Measures", sentences, Table(("Measure", "Value", "95 % interval"), rows))


def _sites(run: Told, split: str, found: Asked) -> Part:
    record = run.kept[split]
    rows = []
    for name, (negatives, positive) in found.rows.items():
        own = record["sites"].get(name)
        interval = found.seen.intervals.get(name) if found.seen else None
        value = "one class" if own is None else f"{own:.3f}"
        few = " (few rows)" if name in record.get("sites_too_small", ()) else ""
        cells = (f"{negatives + positive:,}", f"{positive:,}", value + few, _pair(interval))
        rows.append((name, *cells))
    headings = ("Site", "Rows", "Positives", "AUC", "95 % interval")
    return Part("Sites", [f"On {ROWS[split]}."], Table(headings, rows))


def _rules(split: str, rules: Sequence[Rule]) -> Part:
    rows = []
    for rule in rules:
        above = rule.found + rule.alarms
        cells = [f"{rule.wanted} {rule.value:g}", f"{rule.probability:.3f}"]
        for count, of in ((rule.found, rule.positives), (rule.alarms, rule.negatives)):
            low, high = wilson(count, of)
            cells.append(f"{count / of:.1%} ({low:.1%} to {high:.1%})")
        rows.append([*cells, f"{rule.found / above:.1%}" if above else NONE])
    headings = ("Positive above", "Probability", "Positives found", "False alarms", "Precision")
    sentence = f"Chosen on validation rows, told on {ROWS[split]}; `predict --at` uses one."
    return Part("Operating points", [sentence], Table(headings, rows))


def _data(run: Told) -> Part:
    schema = RunFolder(run.folder).read_json(PREPARATION, missing={}).get("schema")
    split = run.experiment.split
    rows = [("Data", subject(run))]
    if schema is not None:
        names = ", ".join(column["name"] for column in schema["columns"])
        rows.append((f"Columns ({len(schema['columns'])})", names))
        if schema["labels"]:
            rows.append(("Labels", ", ".join(schema["labels"])))
        elif not schema["classes"]:
            rows.append(("Positive", ", ".join(schema["positive"]) or NONE))
            rows.append(("Negative", ", ".join(schema["negative"]) or NONE))
    left_out = run.experiment.data.options.get("drop", ())
    if left_out:
        rows.append(("Left out", ", ".join(left_out)))
    shares = f"{split.train:g} training, {split.validation:g} validation, {split.test:g} test"
    rows.append(("Rows of each site", shares))
    return Part("Data", [], Table(("What", "Which"), rows))


def _privacy(run: Told) -> Part:
    stages = {k: v for k, v in run.settings.items() if k.startswith("messages.") and v != '"none"'}
    least = run.experiment.problem.options.get("least_per_bin", 0)
    spent = run.last.get("privacy")
    bound = (
        "Nothing in this run bounds how much: it had no differential privacy."
        if spent is None
        else f"For training rows that is bounded: {privacy_text(spent)}, where neighbours differ "
        "by one row that is replaced by an empty one. The noise of a simulation follows from its "
        "seed, so the promise is that of a run between sites."
    )
    sentences = [
        f"Rows stayed at their sites; what methods send can tell something about them. {bound}",
        f"Clients report counts of scores of at least {least} rows."
        if least > 1
        else "Clients report counts of scores down to single rows.",
    ]
    rows = [(key.partition(".")[2], value) for key, value in stages.items()]
    return Part("Privacy", sentences, Table(("Message stage", "Value"), rows) if rows else None)


def _limits(run: Told, split: str, found: Asked | None) -> Iterator[str]:
    yield "The measures are of rows of the same sites and time; other sites may differ."
    if run.experiment.problem.name in ("auc", "compositional_auc"):
        yield "Training ranks rows: scores are no probabilities, only calibrated ones are."
    if (run.folder / CALIBRATION).exists():
        yield "Probabilities hold where positives are as common as on the validation rows."
    if found is not None and found.positives < FEW_POSITIVES:
        yield (
            f"There are only {found.positives} positives among the {ROWS[split]}: intervals are "
            "wide, and small differences between models mean nothing."
        )
    record = run.kept[split]
    if small := record.get("sites_too_small"):
        yield f"Too few rows of a class to judge: {', '.join(small)}."
    if one := record.get("one_class_sites"):
        yield f"Rows of one class only: {', '.join(one)}."


def _pair(interval: Interval) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else NONE


# Both forms.


def markdown(title: str, parts: Sequence[Part]) -> str:
    """The card as Markdown; names cannot break out of a cell."""
    lines = [f"# {_plain(title)}", ""]
    for part in parts:
        lines += [f"## {part.title}", ""]
        for sentence in part.sentences:
            lines += [_plain(sentence), ""]
        if part.table is not None:
            lines.append("| " + " | ".join(part.table.headings) + " |")
            lines.append("| " + " | ".join("---" for _ in part.table.headings) + " |")
            lines += ["| " + " | ".join(map(_plain, row)) + " |" for row in part.table.rows]
            lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    for sign in "\\|<>[]*_":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")


def html(title: str, parts: Sequence[Part]) -> str:
    """The card as a page like the report's."""
    bodies = []
    for part in parts:
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in part.sentences)
        table = "" if part.table is None else pieces.table(
            part.table.headings,
            [[escape(cell) for cell in row] for row in part.table.rows],
            text=2 if len(part.table.headings) == 2 else 1,
        )  # fmt: skip
        bodies.append(f"<section><h2>{part.title}</h2>{sentences}{table}</section>")
    return whole(title, "fedminimax model card", f"<main>{''.join(bodies)}</main>")
