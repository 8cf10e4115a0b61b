"""docs/quickstart.md as its reader follows it: the five commands, and every mistake it names."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedminimax import cli
from fedminimax.config import Experiment
from fedminimax.experiment import load, read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
COMMANDS = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]
HEADER = re.search(r"```csv\n(.*?)\n", PAGE)[1]  # type: ignore[index]
SITES = ("hull", "leeds", "york")
SENTENCES, NOTES = (
    dict(re.findall(r"\*\*(.*?)\*\*\n\n```text\n(.*?)```", part, re.DOTALL))
    for part in PAGE.split("## If it begins with a note")
)
RUN = next(line for line in PAGE.splitlines() if line.startswith("fedminimax run experiments"))
PREDICT = COMMANDS.splitlines()[-1]


def table(number, rows=60):
    """A site's rows under the page's header: one in four is sick, and the marker tells."""
    random = np.random.default_rng(number)
    lines = [HEADER]
    for i in range(rows):
        sick = i % 4 == 0
        marker = "" if i % 9 == 8 else f"{random.normal() + 1.5 * sick:.2f}"
        sex, age = random.choice(["f", "m"]), 60 + 10 * random.normal()
        lines.append(f"{number}-{i},{age:.0f},{sex},{marker},{'yes' if sick else 'no'}")
    return "\n".join(lines) + "\n"


def columns(text, *chosen):
    """The text with these columns only, in this order."""
    rows = [line.split(",") for line in text.splitlines()]
    places = [rows[0].index(name) for name in chosen]
    return "\n".join(",".join(row[place] for place in places) for row in rows) + "\n"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """What the commands use of a clone, with a reader's files; `make install` was done."""
    monkeypatch.chdir(tmp_path)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "activate").write_text(f'export PATH="{bin}:$PATH" PYTHONPATH="{ROOT / "src"}"\n')
    (bin / "fedminimax").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedminimax "$@"\n')
    (bin / "fedminimax").chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()
    (tmp_path / "my-sites").mkdir()
    for number, name in enumerate(SITES):
        (tmp_path / "my-sites" / f"{name}.csv").write_text(table(number))
    new = columns(table(9, rows=8), *HEADER.split(",")[:-1])
    (tmp_path / "new-patients.csv").write_text(new)
    return tmp_path


def arguments(line, *changes):
    """A command of the page as the command line gets it, with changes made by the reader."""
    words = [word.strip("'") for word in line.split()[1:]]
    for change in changes:
        key = change.partition("=")[0]
        assert any(word.startswith(f"{key}=") for word in words), key
        words = [change if word.startswith(f"{key}=") else word for word in words]
    return words


def test_there_are_five_commands():
    assert len(COMMANDS.splitlines()) == 5


def test_the_first_command_installs():
    made = subprocess.run(
        ["make", "-n", "-B", "install"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m venv .venv" in made.stdout
    assert "pip install" in made.stdout


@pytest.mark.slow
def test_the_commands_run_as_written_and_end_with_scores(clone):
    done = subprocess.run(
        ["bash", "-e", "-c", COMMANDS], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "left out are 'patient'" in done.stdout
    assert "run folder: runs/my-sites-1" in done.stdout
    assert "95 % interval of the AUC" in done.stdout
    run = load("runs/my-sites-1")
    assert run.history[-1]["test"]["auc"] > 0.7
    assert f"test auc {run.kept['test']['auc']:.4g}" in done.stdout
    with open("scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["line"]) for row in rows] == list(range(2, 10))
    assert [*rows[0]] == ["line", "patient", "score", "probability", "class"]
    assert all(0 <= float(row["score"]) <= 1 for row in rows)
    assert {row["class"] for row in rows} <= {"no", "yes"}


def at_york(change):
    def make():
        path = Path("my-sites/york.csv")
        path.write_text(change(path.read_text()))
        return arguments(RUN)

    return make


def everywhere(change):
    def make():
        for name in SITES:
            path = Path(f"my-sites/{name}.csv")
            path.write_text(change(path.read_text()))
        return arguments(RUN)

    return make


def line_5(pattern, replacement):
    def change(text):
        lines = text.splitlines()
        lines[4] = re.sub(pattern, replacement, lines[4], count=1)
        return "\n".join(lines) + "\n"

    return change


def unlabelled():
    return [word for word in arguments(RUN) if not word.startswith("data.positive")]


def in_another_encoding():
    path = Path("my-sites/york.csv")
    path.write_bytes(path.read_bytes().replace(b",f,", b",\xe4,", 1))
    return arguments(RUN)


def unknowing():
    """Rows to score that lack a column."""
    words = ["--folder", "runs/my-sites-1", "run.rounds=1", "--quiet"]
    assert cli.main([*arguments(RUN), *words]) == 0
    path = Path("new-patients.csv")
    path.write_text(columns(path.read_text(), "patient", "age", "sex"))
    return arguments(PREDICT)


NAMES = HEADER.split(",")
MISTAKES = {
    "The label column has another name.": lambda: arguments(RUN, "data.label=desease"),
    "Labels are texts, and nobody said which is positive.": unlabelled,
    "The positive label is written in another way.": lambda: arguments(RUN, "data.positive=Yes"),
    "A label is missing.": at_york(line_5(r"(yes|no)$", "")),
    "All labels are the same, everywhere.": everywhere(
        lambda text: text.replace(",no\n", ",yes\n")
    ),
    "A file is empty.": at_york(lambda text: ""),
    "A file has a header and no rows.": at_york(lambda text: HEADER + "\n"),
    "A site has too few rows.": at_york(lambda text: "\n".join(text.splitlines()[:4]) + "\n"),
    "A column is missing at one site.": at_york(
        lambda text: columns(text, "patient", "age", "marker", "disease")
    ),
    "One site has a column more.": at_york(
        lambda text: text.replace("\n", ",1\n").replace("disease,1", "disease,smoker")
    ),
    "The columns are in another order at one site.": at_york(
        lambda text: columns(text, "patient", "sex", "age", "marker", "disease")
    ),
    "A number is a text at one site.": at_york(line_5(r",\d+,", ",old,")),
    "The cells are separated by semicolons.": at_york(lambda text: text.replace(",", ";")),
    "Numbers have a decimal comma.": at_york(lambda text: text.replace(".", ",")),
    "There is no header row.": at_york(lambda text: text.partition("\n")[2]),
    "The file was saved in another encoding.": in_another_encoding,
    "A column with names or numbers of patients was left in.": lambda: [
        word for word in arguments(RUN) if not word.startswith("data.drop")
    ],
    "The quotes around the columns to leave out were forgotten, and the shell took those within.": (
        lambda: arguments(RUN, "data.drop=[patient]")
    ),
    "A column to leave out is misspelt.": lambda: arguments(RUN, 'data.drop=["pateint"]'),
    "The folder is somewhere else.": lambda: arguments(RUN, "data.path=my-site"),
    "The path is that of a file.": lambda: arguments(RUN, "data.path=my-sites/york.csv"),
    "New rows lack a column.": unknowing,
}


def test_every_mistake_of_the_page_is_made_here():
    assert list(SENTENCES) == list(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_the_sentence_of_the_page(clone, capsys, mistake):
    given = MISTAKES[mistake]()
    before = set(Path().rglob("*"))
    capsys.readouterr()
    assert cli.main(given) == 2
    said = capsys.readouterr()
    assert said.err.split() == SENTENCES[mistake].split()
    assert set(Path().rglob("*")) == before


def without_marker(text):
    rows = [line.split(",") for line in text.splitlines()]
    place = rows[0].index("marker")
    changed = [rows[0], *([*row[:place], "", *row[place + 1 :]] for row in rows[1:])]
    return "\n".join(map(",".join, changed)) + "\n"


def with_a_spreadsheet():
    Path("my-sites/york.xlsx").write_bytes(b"PK")
    return arguments(RUN)


ODDITIES = {
    "A site has one class only. It trains along.": at_york(
        lambda text: text.replace(",yes\n", ",no\n")
    ),
    "There are more than two labels.": at_york(lambda text: text.replace(",no\n", ",maybe\n", 1)),
    "A code is known at one site only.": at_york(lambda text: text.replace(",f,", ",d,", 3)),
    "A site never measured something.": at_york(without_marker),
    "The folder has other files.": with_a_spreadsheet,
}


def test_every_note_of_the_page_is_seen_here():
    assert list(NOTES) == list(ODDITIES)


@pytest.mark.parametrize("oddity", ODDITIES)
def test_an_oddity_is_noted_in_the_words_of_the_page(clone, oddity):
    _, config, *changes = ODDITIES[oddity]()
    notes = read(Experiment.from_file(config, changes)).notes
    assert [f"note: {note}" for note in notes] == [" ".join(NOTES[oddity].split())]
