"""A line per site while a run trains: `fedminimax run ... --sites`."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fedminimax import cli
from fedminimax.data.clients import Clients
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import build, experiment_of
from fedminimax.report.progress import NO_SITES, RunProgress, site_lines

HEART = """
[data]
name = "heart"
[model]
name = "linear"
[problem]
name = "auc"
[method]
name = "codasca"
local_steps = 1
[run]
rounds = 4
evaluate_every = 2
executor = "vectorised"
"""
HOSPITALS = ("cleveland", "hungary", "switzerland", "va")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("heart.toml").write_text(HEART)


def records(folder):
    return RunFolder(folder).read_history()


def test_where_there_is_no_terminal_each_evaluation_is_followed_by_its_sites(home, capsys):
    assert cli.main(["run", "heart.toml", "--folder", "seen", "--sites"]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("round ")]
    made, built = records("seen"), build(experiment_of("seen"))
    sizes = built.clients.splits["validation"].sizes.tolist()
    assert len(starts) == len(made) == 3
    for start, record in zip(starts, made, strict=True):
        told = lines[start + 1 : start + 5]
        assert [line.split()[0] for line in told] == list(HOSPITALS)
        assert [line.split()[1:4] for line in told] == [
            [str(size), "validation", "rows"] for size in sizes
        ]
        found = record["validation"]
        assert [line.split()[4] for line in told] == [f"{v:.4g}" for v in found["sites"].values()]
        worst = [line.split()[0] for line in told if line.endswith("worst")]
        assert worst == [found["worst_site"]]
        small = [
            line.split()[0] for line in told if line.endswith("too few rows of a class to judge")
        ]
        assert small == found["sites_too_small"]


def test_nothing_is_computed_for_it(home, capsys):
    for folder, more in (("seen", ["--sites"]), ("unseen", [])):
        assert cli.main(["run", "heart.toml", "--folder", folder, *more]) == 0
    seen, unseen = records("seen"), records("unseen")
    for record in seen + unseen:
        del record["seconds"]
    assert seen == unseen
    assert (
        Path("seen/final.safetensors").read_bytes() == Path("unseen/final.safetensors").read_bytes()
    )


def test_on_a_terminal_the_sites_stand_below_the_bar(home, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["run", "heart.toml", "--sites"]) == 0
    said = capsys.readouterr().out
    last = said[said.rindex("4/4") :]
    places = [re.search(rf"{name} +\d+ validation rows", last).start() for name in HOSPITALS]  # type: ignore[union-attr]
    assert places == sorted(places)
    assert "worst" in last
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")  # the cursor is back


def test_a_resumed_run_shows_them_too(home, capsys, monkeypatch):
    def stop(self, round):
        if round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "on_round", stop)
        assert cli.main(["run", "heart.toml", "--folder", "cut"]) == 130
    capsys.readouterr()
    assert cli.main(["run", "cut", "--resume", "--sites"]) == 0
    assert "cleveland" in capsys.readouterr().out


def test_a_problem_without_sites_says_so_once(home, capsys):
    other = ["problem.name=fair", "method.name=local_sgda"]
    assert cli.main(["run", "heart.toml", *other, "--sites"]) == 0
    assert capsys.readouterr().out.count(NO_SITES) == 1


def test_sites_that_weigh_groups_are_shown_by_their_accuracies(home, capsys):
    other = ["problem.name=worst_site", "method.name=local_sgda"]
    assert cli.main(["run", "heart.toml", *other, "--sites", "--folder", "seen"]) == 0
    said = capsys.readouterr().out
    found = records("seen")[-1]["validation"]
    assert f"{found['site_accuracies']['va']:.4g}" in said
    assert said.count("worst\n") == 3


def test_a_site_of_one_class_is_no_worst_site():
    rows = [(np.zeros((2, 1)), np.zeros(2)), (np.zeros((30, 1)), np.arange(30) % 2.0)]
    clients = Clients(rows, names=["lone", "other"], validation=rows)
    found = {
        "sites": {"lone": None, "other": 0.5},
        "worst_site": "other",
        "sites_too_small": ["lone"],
        "one_class_sites": ["lone"],
    }
    assert site_lines(found, clients, "validation") == [
        "lone       2 validation rows       -  one class",
        "other     30 validation rows     0.5  worst",
    ]
