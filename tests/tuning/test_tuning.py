"""`fedminimax tune`: what is searched, which rows judge, and what a kill costs."""

import dataclasses
import importlib.util
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from fedminimax import cli
from fedminimax.blocks.schedules import Stagewise
from fedminimax.config import ConfigError, Experiment, changed, read_toml
from fedminimax.experiment import Read, read
from fedminimax.metrics.paired import Difference
from fedminimax.report.tuning import verdict
from fedminimax.tuning import search as searching
from fedminimax.tuning.held_out import cut_again, without_test
from fedminimax.tuning.search import Found, Search, Trial
from fedminimax.tuning.space import Range, given_value, ranges, rates, with_values

ROOT = Path(__file__).parents[2]
HEART = """
[data]
name = "heart"
[model]
name = "linear"
[problem]
name = "auc"
[method]
name = "codasca"
lr = {kind = "stagewise", value = 0.5, factor = 3}
local_steps = 2
[run]
rounds = 4
evaluate_every = 2
executor = "vectorised"
"""
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="the extra `tune` is not installed"
)


def experiment(*changes):
    return Experiment.from_table(changed(tomllib.loads(HEART), changes))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("heart.toml").write_text(HEART)
    return tmp_path


# What is searched


def test_the_rates_of_a_method_are_searched_around_the_given_ones():
    assert rates(experiment()) == [
        Range("method.lr", 0.05, 5.0),
        Range("method.server_lr", 0.1, 10.0),
    ]
    found = rates(experiment("method.name=fgda", "method.primal_rate=0.2", "method.dual_rate=0"))
    assert [one.key for one in found] == [
        "method.lr",
        "method.primal_lr",
        "method.dual_lr",
        "method.primal_rate",
    ]
    assert found[-1] == Range("method.primal_rate", 0.02, 1.0)
    momentum = rates(experiment("method.name=local_sgdam"))
    assert momentum[-1].high == 3.3  # times lr, it is below 1
    with pytest.raises(ConfigError, match="fedavg has no rate above 0"):
        rates(experiment("problem.name=cross_entropy", "method.name=fedavg", "method.lr=0"))


def test_a_schedule_is_searched_by_its_value():
    given = experiment()
    assert given_value(given, "method.lr") == 0.5
    method = with_values(given, {"method.lr": 2.0, "method.server_lr": 0.3}).make("method")
    assert (method.lr, method.server_lr) == (Stagewise(2.0, factor=3), 0.3)
    assert given_value(given, "method.lr") == 0.5
    assert with_values(given, {}).to_table() == given.to_table()


def test_ranges_are_read():
    assert ranges(["lr=1e-3..1 log", " run.batch_size = 8..64"], experiment()) == [
        Range("method.lr", 0.001, 1.0, log=True),
        Range("run.batch_size", 8, 64, log=False, whole=True),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("method.lr", "'method.lr' is no range; write it as"),
        ("method.lr=1..2 lin", "is no range; write it as"),
        ("method.lrr=1..2", "did you mean 'method.lr'"),
        ("method.name=1..2", "method.name is no number of"),
        ("run.seed=1..2", "run.seed is no number of"),
        ("split.train=0.1..0.5", "split.train is no number of"),
        ("method.lr=a..b", "has an end that is no number"),
        ("method.lr=2..1", "has no numbers in between"),
        ("method.lr=0..inf", "has no numbers in between"),
        ("method.lr=0..1 log", "begins at 0: a log scale begins above 0"),
        ("method.local_steps=1..2.5", "give whole numbers"),
    ],
)
def test_what_is_no_range_is_refused(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ranges([text], experiment())


def test_a_key_is_searched_once():
    with pytest.raises(ConfigError, match=r"method.lr is searched twice"):
        ranges(["method.lr=1..2", "method.lr=3..4"], experiment())


# Which rows judge


def as_set(clients):
    return [{tuple(row) for row in np.column_stack([x, y])} for x, y in clients]


def test_test_rows_are_not_even_there():
    given = read(experiment())
    seen = without_test(given, seed=0)
    assert set(seen.rows) == {"train", "validation"}
    assert seen.rows["train"] is given.rows["train"]
    assert seen.notes == given.notes


def test_where_there_are_no_validation_rows_some_training_rows_are_held_out():
    given = read(experiment("split.train=0.8", "split.validation=0"))
    seen = without_test(given, seed=0)
    assert "25% of each client's training rows are held out to judge by" in seen.notes[-1]
    for name in ("train", "validation"):
        for part, whole in zip(as_set(seen.rows[name]), as_set(given.rows["train"]), strict=True):
            assert part <= whole
    for train, held, whole in zip(
        seen.rows["train"], seen.rows["validation"], given.rows["train"], strict=True
    ):
        assert len(train[0]) + len(held[0]) == len(whole[0])
        assert abs(len(held[0]) / len(whole[0]) - 0.25) < 0.02
        assert abs(held[1].mean() - whole[1].mean()) < 0.05  # each class is cut alike


def test_rows_are_cut_again_by_another_seed_and_no_test_row_comes_in():
    given = read(experiment())
    seen = without_test(given, seed=0)
    again, other = cut_again(seen, seed=1), cut_again(seen, seed=2)
    for name in ("train", "validation"):
        sizes = [[len(rows[0]) for rows in found.rows[name]] for found in (seen, again)]
        assert all(abs(a - b) <= 1 for a, b in zip(*sizes, strict=True))
        assert as_set(again.rows[name]) != as_set(seen.rows[name])
        assert as_set(again.rows[name]) != as_set(other.rows[name])
        for part, held in zip(as_set(again.rows[name]), as_set(given.rows["test"]), strict=True):
            assert len(part & held) <= 1  # two patients may be alike


def test_two_rows_of_different_classes_are_still_two_parts():
    rows = [(np.arange(2.0)[:, None], np.arange(2.0))]
    seen = without_test(Read({"train": rows}, {"classes": 2}, {}, None, []), seed=0)
    assert [len(seen.rows[name][0][0]) for name in ("train", "validation")] == [1, 1]


QUADRATIC = ["data.name=quadratic", "problem.name=quadratic", "method.name=local_sgda"]


@needs_optuna
def test_nothing_is_tuned_where_nothing_can_be_held_out(home, capsys):
    assert cli.main(["tune", "heart.toml", *QUADRATIC]) == 2
    said = capsys.readouterr().err
    assert "client 0 has 1 training row, too few to hold some out" in said
    assert not Path("runs").exists()


# The search


def test_without_optuna_a_sentence_names_the_extra(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["tune", "heart.toml"]) == 2
    assert "tune needs Optuna: install fedminimax[tune]" in capsys.readouterr().err
    assert not Path("runs").exists()


@needs_optuna
def test_a_search_ends_with_a_table_a_verdict_and_settings_that_run(home, capsys):
    arguments = ["tune", "heart.toml", "--trials", "3", "--repeats", "2", "method.lr=0.001"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "searching method.lr = 0.0001..0.01 log, method.server_lr = 0.1..10 log" in said
    assert "trial 0/2 (the settings given): method.lr = 0.001, method.server_lr = 1: auc" in said
    assert "0, given" in said
    assert "3 trials: 3 came to their end\n" in said
    assert "improve" in said
    best = Path("runs/heart-tune-1/best.toml")
    assert f": fedminimax run {best}\n" in said
    given = Experiment.from_table(read_toml("runs/heart-tune-1/given.toml"))
    assert given.to_table() == experiment("method.lr=0.001").to_table()
    found = Experiment.from_table(read_toml(best))
    assert found.run == given.run
    assert best.read_text().startswith("# Trial ")
    assert cli.main(["run", str(best), "--quiet"]) == 0
    assert "finished" in capsys.readouterr().out
    assert cli.main([*arguments, "--folder", "runs/heart-tune-1"]) == 2
    assert "runs/heart-tune-1 already holds a search" in capsys.readouterr().err


@needs_optuna
def test_trials_and_repeats_have_other_seeds_and_see_no_test_rows(home, monkeypatch):
    seen = []
    real = searching.run_experiment

    def watched(given, built, on_record):
        seen.append((given.run.seed, given.make("method").lr.value, set(built.clients.splits)))
        return real(given, built=built, on_record=on_record)

    monkeypatch.setattr(searching, "run_experiment", watched)
    # The settings given are too slow to be the best.
    slow = experiment("run.seed=7", 'method.lr={kind="stagewise", value=1e-6}')
    search = Search(Path("found"), slow, ["method.lr=0.1..1 log"], trials=2, repeats=2)
    search.create()
    found = search.run()
    assert [seed for seed, _, _ in seen] == [7, 7, 8, 8, 9, 9]
    assert {frozenset(splits) for _, _, splits in seen} == {frozenset({"train", "validation"})}
    rates = [lr for _, lr, _ in seen]
    assert rates[0] == 1e-6  # given, though it is outside of what is searched
    assert rates[1:] == [rates[1], rates[1], 1e-6, rates[1], 1e-6]
    assert 0.1 <= rates[1] <= 1
    assert found.best is not None
    assert found.best.number == 1
    assert found.gain is not None
    assert found.gain.pairs == 2
    # All is kept: nothing is trained again.
    assert Search.resumed(Path("found")).run() == found
    assert len(seen) == 6


@needs_optuna
def test_runs_that_break_down_are_trials_with_a_sentence(home, capsys):
    wild = ["--search", "method.lr=1e30..1e38 log", "--search", "method.local_steps=0..1"]
    assert cli.main(["tune", "heart.toml", "--trials", "5", *wild]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial ")]
    assert "auc 0." in lines[0]
    later = "\n".join(lines[1:5])
    assert "non-finite" in later
    assert "local_steps is 0; give a whole number" in later


@needs_optuna
def test_a_metric_that_leaves_the_numbers_is_a_run_that_broke_down(home, capsys):
    far = ["data.rows=8", "data.noise=1.0", "run.rounds=20", "--search", "primal_lr=100..1000"]
    assert cli.main(["tune", "heart.toml", *QUADRATIC, *far, "--trials", "2"]) == 0
    said = capsys.readouterr().out
    assert "distance is no finite number at the end" in said or "non-finite x at round" in said
    assert "2 trials: 1 came to their end, 1 broke down" in said


@needs_optuna
def test_validation_rows_of_one_class_are_a_mistake(home, capsys, monkeypatch):
    monkeypatch.setattr(searching, "without_test", lambda found, seed: one_class(found))
    assert cli.main(["tune", "heart.toml"]) == 2
    assert "the validation rows have no auc (one class only?)" in capsys.readouterr().err


def one_class(found):
    held = [tuple(c[rows[1] == 0] for c in rows) for rows in found.rows["validation"]]
    return found._replace(rows={"train": found.rows["train"], "validation": held})


@needs_optuna
def test_settings_given_that_break_down_are_improved_on(home, capsys):
    ranges = ["--search", "method.lr=0.1..1 log"]
    assert cli.main(["tune", "heart.toml", "method.lr=1e38", "--trials", "2", *ranges]) == 0
    said = capsys.readouterr().out
    assert "2 trials: 1 broke down, 1 came to their end" in said
    assert "improved on the settings given, which broke down: non-finite" in said
    assert "settings of trial 1: fedminimax run runs/heart-tune-1/best.toml" in said


@needs_optuna
def test_a_best_trial_that_breaks_down_when_repeated_is_not_chosen(home, monkeypatch):
    real = searching.run_experiment

    def unlucky(given, built, on_record):
        run = real(given, built=built, on_record=on_record)
        broken = given.run.seed > 0 and given.make("method").lr.value > 0.1
        return dataclasses.replace(run, outcome="non-finite x") if broken else run

    monkeypatch.setattr(searching, "run_experiment", unlucky)
    slow = experiment('method.lr={kind="stagewise", value=1e-6}')
    search = Search(Path("found"), slow, ["method.lr=0.2..1 log"], trials=2, repeats=2)
    search.create()
    found = search.run()
    assert found.broken is not None
    assert (found.broken.number, found.broken.outcome) == (1, "non-finite x (seed 1)")
    assert found.chosen == found.trials[0]


@needs_optuna
def test_settings_given_that_cannot_run_are_a_mistake(home, capsys):
    assert cli.main(["tune", "heart.toml", "run.cohort=9"]) == 2
    assert "9 clients per round were asked for" in capsys.readouterr().err
    assert not Path("runs/heart-tune-1").exists()


@needs_optuna
def test_a_trial_may_be_judged_on_several_cuts_of_the_rows(home, monkeypatch):
    seen = []
    real = searching.run_experiment

    def watched(given, built, on_record):
        run = real(given, built=built, on_record=on_record)
        held = built.clients.splits["validation"].columns[0]
        seen.append((given.run.seed, held, run.history[-1]["validation"]["auc"]))
        return run

    monkeypatch.setattr(searching, "run_experiment", watched)
    search = Search(Path("found"), experiment(), trials=2, repeats=2, cuts=3)
    search.create()
    found = search.run()
    for number in (0, 1):
        runs = seen[3 * number : 3 * number + 3]
        assert {seed for seed, _, _ in runs} == {0}
        assert found.trials[number].value == pytest.approx(np.mean([auc for _, _, auc in runs]))
    assert torch.equal(seen[0][1], seen[3][1])  # the same cuts for all trials
    kept = {held.sum().item() for _, held, _ in seen}
    assert len(kept) == 3 + (2 if len(seen) > 6 else 0)  # and others for the repeats
    assert Search.resumed(Path("found")).cuts == 3


@needs_optuna
def test_a_worse_trial_is_cut_off(home, monkeypatch):
    monkeypatch.setattr(searching, "STARTUP", 2)
    given = experiment("run.rounds=8", "method.lr=1")
    search = Search(Path("found"), given, ["method.lr=1e-9..1 log"], trials=8, repeats=2)
    search.create()
    trials = search.run().trials
    cut = [trial for trial in trials if trial.outcome.startswith("cut off at round")]
    assert cut
    assert all(trial.value is None for trial in cut)
    assert trials[0].value is not None


@needs_optuna
def test_a_search_is_resumed_as_it_was_and_may_become_longer(home, capsys):
    assert cli.main(["tune", "heart.toml", "--trials", "2", "--repeats", "2"]) == 0
    before = capsys.readouterr().out
    assert cli.main(["tune", "heart.toml", "--resume"]) == 0
    again = capsys.readouterr().out
    assert "trial " not in again.split("validation auc")[0]
    assert again.split("validation auc")[1] == before.split("validation auc")[1]
    assert cli.main(["tune", "runs/heart-tune-1", "--resume", "--trials", "3"]) == 0
    assert capsys.readouterr().out.count("\ntrial 2/2: ") == 1
    assert cli.main(["tune", "heart.toml", "--resume", "method.lr=1"]) == 2
    assert "'method.lr=1' cannot be changed" in capsys.readouterr().err
    assert cli.main(["tune", "heart.toml", "--resume", "--folder", "none"]) == 2
    assert "there is no search.json in none" in capsys.readouterr().err
    assert cli.main(["tune", "heart.toml", "--trials", "1"]) == 2
    assert "trials is 1; give at least 2" in capsys.readouterr().err
    assert cli.main(["tune", "heart.toml", "--resume", "--cuts", "2"]) == 2
    assert "'--cuts' cannot be changed" in capsys.readouterr().err


@needs_optuna
def test_ctrl_c_says_how_to_go_on(home, capsys, monkeypatch):
    def pressed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "run_experiment", pressed)
    assert cli.main(["tune", "heart.toml", "--folder", "a cut"]) == 130
    assert "go on with: fedminimax tune 'a cut' --resume" in capsys.readouterr().err


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "fedminimax", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def in_state(folder, *states):
    """The trials in one of these states, as they stand in the storage, with when they ended."""
    marks = ", ".join("?" for _ in states)
    with closing(sqlite3.connect(f"{folder}/trials.db", timeout=60)) as connection:
        query = f"select number, datetime_complete from trials where state in ({marks})"
        return sorted(connection.execute(query, states).fetchall())


@needs_optuna
@pytest.mark.slow
def test_a_killed_search_goes_on_and_repeats_no_finished_trial(home):
    whole = Search(Path("whole"), experiment("run.rounds=20"), trials=6, repeats=2)
    whole.create()
    expected = whole.run()
    process = start(
        *("tune", "heart.toml", "run.rounds=20", "--trials", 6, "--repeats", 2, "--folder", "cut")
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("trial 2/5"):
        assert process.poll() is None
    while not in_state("cut", "RUNNING"):  # until the next trial has begun
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = in_state("cut", "COMPLETE", "PRUNED")
    assert 3 <= len(before) < 6
    process = start("tune", "cut", "--resume")
    said, _ = process.communicate()
    assert process.returncode == 0, said
    after = in_state("cut", "COMPLETE", "PRUNED")
    assert len(after) == 6
    assert after[: len(before)] == before
    retold = [line for line in said.splitlines() if line.startswith("trial ") and "/" in line]
    assert len(retold) == 6 - len(before)
    assert Search.resumed(Path("cut")).run() == expected


# What is said of it


GIVEN, BETTER = Trial(0, {}, 0.8, "finished"), Trial(1, {}, 0.9, "finished")
DIVERGED = Trial(0, {}, None, "non-finite x")


def found_with(gain=None, broken=None, best=BETTER):
    return Found([GIVEN, BETTER], best, gain, broken)


@pytest.mark.parametrize(
    ("found", "chosen", "sentence"),
    [
        (
            found_with(Difference(0.02, 0.01, 0.03, 5)),
            1,
            r"^improved on .* by 0.0200 \(95 % interval \+0.0100 to \+0.0300, over 5 repeats",
        ),
        (
            found_with(Difference(0.02, -0.01, 0.05, 5)),
            1,
            r"^did not improve .* by more than chance: \+0.0200 \(95 % interval -0.0100",
        ),
        (
            found_with(Difference(-0.02, -0.03, -0.01, 5)),
            0,
            r"^did not improve on the settings given: -0.0200",
        ),
        (found_with(broken=DIVERGED), 1, "^improved on .*, which broke down: non-finite x"),
        (
            found_with(broken=BETTER._replace(outcome="non-finite x (seed 3)")),
            0,
            r"^did not improve .*: trial 1 broke down when it was repeated: .* \(seed 3\)",
        ),
        (found_with(best=GIVEN), 0, "^did not improve .*: no trial was better"),
        (Found([DIVERGED]), None, "^did not improve .*: no trial came to its end"),
    ],
)
def test_the_verdict_is_a_sentence_and_the_better_one_is_chosen(found, chosen, sentence):
    assert re.search(sentence, verdict(found))
    assert (None if found.chosen is None else found.chosen.number) == chosen
