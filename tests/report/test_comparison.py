"""`fedminimax compare FILE.toml`: methods tuned alike, repeated, and set side by side."""

import dataclasses
import json
import math
import os
import sys

import pytest
import torch

from fedminimax import cli
from fedminimax.config import ConfigError
from fedminimax.engine import device
from fedminimax.experiment import experiment_of, load, run_experiment
from fedminimax.report import figures
from fedminimax.report.comparison import Comparison, Job, Line, Plan
from fedminimax.report.comparison_runs import compare
from fedminimax.report.comparison_table import fitted, markdown, ranking_table, tuning
from fedminimax.report.equal_cost import rank
from fedminimax.report.tables import number_text

FILE = """
[data]
name = "quadratic"
clients = 4
dimension = 2
[problem]
name = "quadratic"
[run]
rounds = 12
batch_size = 0
evaluate_every = 1
executor = "vectorised"
[methods.plain]
name = "local_sgda"
local_steps = 4
[methods.corrected]
name = "codasca"
proximal = 0.0
local_steps = 4
[grid]
"method.lr" = [0.001, 0.05]
[vary]
"data.spread" = [1.0, 5.0]
[compare]
below = 0.5
repeats = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "both.toml"
    path.write_text(FILE)
    return path


def test_each_method_is_tuned_over_its_own_options_and_repeated(file, tmp_path):
    comparison, lines = compare(file, tmp_path / "runs", workers=1)
    assert [(line.varied[0][1], line.label) for line in lines] == [
        (1.0, "plain"),
        (1.0, "corrected"),
        (5.0, "plain"),
        (5.0, "corrected"),
    ]
    for line in lines:
        # LocalSGDA has no option `lr`; CODASCA's small one does not arrive in 12 rounds.
        assert line.chosen == (() if line.label == "plain" else (("method.lr", 0.05),))
        assert len(line.rounds) == len(line.histories) == 2
    folder = tmp_path / "runs" / "corrected_spread=5_lr=0.05_seed=1"
    last = load(folder).history[-1]
    assert lines[3].histories[1][-1]["train"]["distance"] == last["train"]["distance"]
    assert lines[3].rounds[0] == comparison.plan.reached(load(folder).history)
    table = markdown(file, comparison, lines)
    assert f"| 5 | corrected | 0.05 | {lines[3].rounds[0]:g} |" in table
    assert "median and range over 2 seeds; gradients, up and exchanges are those of the" in table


@pytest.mark.parametrize(
    ("own", "parts", "shares"),
    [([0, 1, 2], 2, [[0, 2], [1]]), ([4, 5], 3, [[4], [5], [4]]), ([], 2, [[], []])],
)
def test_processes_share_the_cores_that_there_are(own, parts, shares, monkeypatch):
    monkeypatch.setattr(device, "_own_cores", lambda: own)
    assert [device.share_of_cores(number, parts) for number in range(parts)] == shares


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_runs_at_the_same_time_are_the_same_runs_each_on_cores_of_its_own(file, tmp_path):
    file.write_text(FILE.replace('"vectorised"', '"threads"').replace("[1.0, 5.0]", "[5.0]"))
    one, both = (compare(file, tmp_path / str(count), count)[1] for count in (1, 2))
    assert [line._replace(histories=[]) for line in one] == [
        line._replace(histories=[]) for line in both
    ]
    for alone, beside in zip(one, both, strict=True):
        for histories in zip(alone.histories, beside.histories, strict=True):
            distances = [[r["train"]["distance"] for r in history] for history in histories]
            assert distances[0] == pytest.approx(distances[1], rel=1e-12)
    for count in (1, 2):
        places = list((tmp_path / str(count)).glob("*/environment.json"))
        threads = {json.loads(path.read_text())["threads"] for path in places}
        assert threads
        assert threads <= {len(device.share_of_cores(number, count)) for number in range(count)}


@pytest.mark.slow
def test_an_error_in_one_of_several_runs_ends_the_others(file, tmp_path):
    file.write_text(FILE.replace("[compare]", '[compare]\nmetric = "nothing"'))
    with pytest.raises(ConfigError, match="metric is 'nothing', which no record of"):
        compare(file, tmp_path / "runs", workers=2)
    assert len(list((tmp_path / "runs").iterdir())) < 12  # of all


def line(label, rounds, length=40):
    record = {"round": length, "train": {"distance": 1.0}}
    cost = {"gradients": 1, "bytes_up": 1, "exchanges": 1}
    return Line((), label, (), rounds, [[{**record, **cost}] for _ in rounds])


def test_who_never_arrives_needs_more_than_the_run_has(file):
    file.write_text(FILE.replace("repeats = 2", "repeats = 1"))
    lines = [line("fast", [8]), line("slow", [20]), line("lost", [math.inf])]
    table = markdown(file, Comparison(file), lines)
    assert f"compare {file}`; 1 seed.\n" in table
    for cells in ("fast |  | 8 | 1 |", "slow |  | 20 | 2.5 |", "lost |  | never | > 5 |"):
        assert cells in table
    assert "lost |  | never | - |" in markdown(file, Comparison(file), lines[2:])


def test_keys_that_change_together_and_a_grid_of_a_method_s_own(file, tmp_path):
    own = """
[methods.plain.grid]
"method.primal_lr, method.dual_lr" = [[0.001, 0.001], [0.05, 0.05]]
[vary]
"data.spread, data.clients" = [[1.0, 3], [5.0, 2]]
"""
    file.write_text(FILE.replace('[vary]\n"data.spread" = [1.0, 5.0]\n', own))
    comparison, lines = compare(file, tmp_path / "runs", workers=1)
    assert [line.varied for line in lines[::2]] == [
        (("data.spread", 1.0), ("data.clients", 3)),
        (("data.spread", 5.0), ("data.clients", 2)),
    ]
    assert lines[0].chosen == (("method.primal_lr", 0.05), ("method.dual_lr", 0.05))
    assert lines[1].chosen == (("method.lr", 0.05),)
    table = markdown(file, comparison, lines)
    assert "| data.spread | data.clients | method | method.primal_lr | method.dual_lr |" in table
    assert "| 5 | 2 | plain | 0.05 | 0.05 |  |" in table
    file.write_text(
        FILE.replace('"method.lr" = [0.001, 0.05]', '"method.lr, method.proximal" = [1]')
    )
    with pytest.raises(ConfigError, match="has the value 1; give 2 numbers"):
        compare(file, tmp_path / "others", workers=1)


def test_a_method_may_have_sections_of_its_own_and_seeds_may_be_of_the_data(file, tmp_path):
    own = """
[methods.corrected.run]
rounds = 6
[methods.corrected.problem]
name = "quadratic"
tau = 5.0
[compare]
seeds = ["run.seed", "data.seed"]
"""
    file.write_text(FILE.replace("[compare]\n", own))
    comparison = Comparison(file)
    plain, corrected = (
        comparison.experiment(Job((), label, (), 3)) for label in ("plain", "corrected")
    )
    assert (plain.run.rounds, corrected.run.rounds) == (12, 6)
    assert (plain.problem.options, corrected.problem.options) == ({}, {"tau": 5.0})
    assert corrected.run.seed == corrected.data.options["seed"] == 3


WARM = """
[data]
name = "heart"
[model]
name = "mlp"
hidden = [2]
[problem]
name = "auc"
[run]
rounds = 2
evaluate_every = 2
executor = "debug"
[compare]
repeats = 2
[methods.first]
name = "fedavg"
problem = {name = "cross_entropy"}
[methods."then AUC"]
name = "local_sgda"
primal_lr = 0.0
start = "first"
"""


def test_a_method_may_begin_with_the_network_of_another(tmp_path):
    path, folder = tmp_path / "warm.toml", tmp_path / "runs"
    path.write_text(WARM)
    _, lines = compare(path, folder, workers=1)
    for seed in (0, 1):
        first, then = (load(folder / f"{name}_seed={seed}") for name in ("first", "then-AUC"))
        # At a rate of 0 the weights stay; a and b, which cross-entropy has not, begin at 0.
        torch.testing.assert_close(first.point.x, then.point.x[:-2])
    again = compare(path, folder, workers=1)[1]
    assert again == lines


def test_what_a_run_starts_from_must_be_there_and_fit(tmp_path):
    path = tmp_path / "warm.toml"
    path.write_text(WARM)
    experiment = Comparison(path).experiment(Job((), "then AUC", (), 0))

    def begun_with(folder):
        settings = dataclasses.replace(experiment.run, start=str(folder))
        return run_experiment(dataclasses.replace(experiment, run=settings), tmp_path / "new")

    with pytest.raises(ValueError, match=r"there is no config\.toml in"):
        begun_with(tmp_path / "nowhere")
    path.write_text(WARM.replace("[2]", "[3]").replace("repeats = 2", ""))
    compare(path, tmp_path / "wider", workers=1)
    with pytest.raises(ValueError, match="give a module of the same architecture"):
        begun_with(tmp_path / "wider" / "first_seed=0")
    assert not (tmp_path / "new").exists()


def test_the_exponent_of_a_key_is_fitted(file, tmp_path):
    lines = [
        Line((("data.clients", n), ("data.spread", 1)), "plain", (), [rounds] * 2, [])
        for n, rounds in ((1, 80), (2, 40), (4, 20))
    ]
    found = list(fitted("data.clients", lines))
    assert found == ["- plain, data.spread = 1: rounds grow as data.clients to the power -1.00."]
    both = [
        line._replace(varied=(*line.varied[:1], ("data.rows", 2 * n)))
        for n, line in zip((1, 2, 4), lines, strict=True)
    ]
    assert list(fitted("data.clients", both)) == [
        "- plain: rounds grow as data.clients to the power -1.00."
    ]
    never = lines[0]._replace(rounds=[math.inf, math.inf])
    assert "no exponent" in next(fitted("data.clients", [never, *lines[1:]]))


def test_tuning_may_be_shorter_than_what_is_reported(file, tmp_path):
    file.write_text(FILE.replace("[compare]\n", "[compare]\ntuning_rounds = 3\n"))
    lines = compare(file, tmp_path / "runs", workers=1)[1]
    assert {len(history) for line in lines for history in line.histories} == {13}
    tuned = load(tmp_path / "runs" / "corrected_spread=5_lr=0.05_seed=2_rounds=3")
    assert tuned.rounds == 3


def test_runs_that_tune_may_have_settings_of_their_own(file, tmp_path):
    schedule = 'lr = {kind = "step_decay", value = 0.05, at = [6]}'
    grid = 'grid = {"method.lr.value" = [0.001, 0.05]}'
    text = FILE.replace("proximal = 0.0\n", f"proximal = 0.0\n{schedule}\n{grid}\n")
    text += "tuning_rounds = 4\n[tuning.run]\nevaluate_every = 2\n"
    file.write_text(text + "[tuning.methods.corrected.lr]\nat = [2]\n")
    comparison, lines = compare(file, tmp_path / "runs", workers=1)
    chosen = {line.chosen for line in lines if line.label == "corrected"}
    assert chosen == {(("method.lr.value", 0.05),)}
    for name, at, every in (
        ("corrected_spread=5_value=0.05_seed=2_rounds=4", (2,), 2),
        ("corrected_spread=5_value=0.001_seed=2_rounds=4", (2,), 2),
        ("corrected_spread=5_value=0.05_seed=0", (6,), 1),
    ):
        found = experiment_of(tmp_path / "runs" / name)
        assert found.method.options["lr"].at == at
        assert f"value={found.method.options['lr'].value:g}_" in name
        assert found.run.evaluate_every == every
    heads, _, *rows = tuning(comparison, lines)
    assert heads == "| data.spread | method | tuned | tried: distance |"
    assert len(rows) == 2  # a line of a method that has no grid was not tuned
    slow, fast = (
        load(tmp_path / "runs" / f"corrected_spread=5_value={value}_seed=2_rounds=4").history[-1]
        for value in (0.001, 0.05)
    )
    ends = [number_text(record["train"]["distance"]) for record in (slow, fast)]
    assert rows[1] == (f"| 5 | corrected | method.lr.value | 0.001: {ends[0]}; 0.05: {ends[1]} |")
    broken = lines[-1]._replace(trials=[((("method.lr.value", 9.0),), [None])])
    assert list(tuning(comparison, [*lines[:-1], broken]))[-1].endswith("| 9: broke down |")


def test_a_grid_may_hold_keys_of_a_method_s_problem(file):
    text = FILE.replace("[methods.plain]", '[methods.plain]\ngrid = {"problem.tau" = [1, 2]}')
    file.write_text(text)
    comparison = Comparison(file)
    jobs = [Job((), "plain", chosen, 0) for chosen in comparison.candidates("plain")]
    assert [comparison.experiment(job).problem.options["tau"] for job in jobs] == [1, 2]
    file.write_text(text.replace("problem.tau", "problem.tua"))
    with pytest.raises(ConfigError, match=r"tunes 'problem.tua', .* did you mean 'problem.tau'"):
        Comparison(file)


def test_tuning_may_take_several_seeds(file, tmp_path):
    file.write_text(FILE.replace("[compare]\n", "[compare]\ntuning_repeats = 2\n"))
    lines = compare(file, tmp_path / "runs", workers=1)[1]
    tuned = {p.name for p in (tmp_path / "runs").glob("corrected_spread=5*seed=[23]")}
    assert tuned == {f"corrected_spread=5_lr={lr}_seed={s}" for lr in (0.001, 0.05) for s in (2, 3)}
    assert {line.chosen for line in lines if line.label == "corrected"} == {(("method.lr", 0.05),)}


def test_tuning_may_go_by_another_metric(file, tmp_path):
    plan = Plan("worst", larger=True, target=0.5, tuning_metric="mean").for_tuning()
    values = ({"worst": 0.6, "mean": 0.7}, {"worst": 0.0, "mean": 0.9})
    fair, good = ([{"round": 1, "test": found}] for found in values)
    assert plan.badness(good, "finished") < plan.badness(fair, "finished")
    file.write_text(FILE + 'tuning_metric = "distanc"')
    with pytest.raises(ConfigError, match=r"tuning_metric is 'distanc', .* mean 'distance'"):
        compare(file, tmp_path / "runs", workers=1)


def test_what_is_done_is_not_done_again(file, tmp_path):
    first = compare(file, tmp_path / "runs", workers=1)[1]
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("final.safetensors")}
    # Two repeats each; CODASCA's two rates are tuned on a third seed, LocalSGDA has none to tune.
    assert len(stamps) == 2 * (2 + 2 + 2)
    tuned = (tmp_path / "runs").glob("*seed=2")
    assert {path.name for path in tuned} == {
        f"corrected_spread={s}_lr={lr}_seed=2" for s in (1, 5) for lr in (0.001, 0.05)
    }
    assert compare(file, tmp_path / "runs", workers=1)[1] == first
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps


def test_runs_of_other_settings_are_not_taken_for_these(file, tmp_path):
    compare(file, tmp_path / "runs", workers=1)
    file.write_text(FILE.replace("rounds = 12", "rounds = 13"))
    with pytest.raises(ValueError, match="other settings: delete it"):
        compare(file, tmp_path / "runs", workers=1)


def test_rounds_to_a_target():
    records = [{"round": r, "train": {"loss": v}} for r, v in enumerate([3.0, 2.0, math.nan, 0.5])]
    assert Plan("loss", larger=False, target=2.0).reached(records) == 1
    assert Plan("loss", larger=False, target=0.1).reached(records) == math.inf
    assert Plan("loss", larger=True, target=3.0).reached(records) == 0
    assert Plan("loss", larger=False, target=2.0, settles=True).reached(records) == 3
    assert Plan("loss", larger=False, target=3.0, settles=True).reached(records[:2]) == 0
    assert Plan("loss", larger=False, target=0.1, settles=True).reached(records) == math.inf
    assert Plan("loss", larger=False).badness(records, "died") == (math.inf, math.inf)


def test_the_command_writes_the_table_it_prints(file, tmp_path, capsys):
    output = tmp_path / "deep" / "table.md"
    arguments = ["compare", str(file), "--folder", str(tmp_path / "runs"), "-o", str(output)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.endswith(output.read_text())
    assert output.read_text().count("\n| ") == 4 + 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (FILE.replace("below", "bellow"), "did you mean 'below'"),
        (FILE.split("[methods.plain]")[0], "has no \\[methods.LABEL\\]"),
        (FILE.replace('"local_sgda"', '"local_sgdaa"'), "did you mean 'local_sgda'"),
        (
            FILE.replace('"codasca"', '"codaska"'),
            r"\[methods.corrected\] name is 'codaska'; did you mean 'codasca'",
        ),
        (FILE.replace('name = "codasca"\n', ""), r"\[methods.corrected\] has no name; add name"),
        ("methods.plain = 3\n" + FILE.split("[methods.plain]")[0], "methods.plain is 3; write"),
        (FILE + "[methods.corrected.run.rounds]", "with .*corrected.*: .*run.* rounds is {}"),
        (FILE.replace("[methods.corrected]", '[methods.corrected]\nrun = "x"'), "run is 'x'; give"),
        (FILE.replace("repeats = 2", "repeats = 0"), "repeats is 0; give a whole number"),
        (FILE.replace("repeats = 2", "repeats = 2.5"), "repeats is 2.5; give a whole number"),
        (FILE + "tuning_rounds = 0", "tuning_rounds is 0; give a whole number"),
        (FILE + "tuning_repeats = 0", "tuning_repeats is 0; give a whole number"),
        (FILE.replace("below = 0.5", 'below = "low"'), "below is 'low'; give a number"),
        (FILE.replace("below = 0.5", "above = true"), "above is True; give a number"),
        (FILE + "above = 1", "both below and above; leave out one"),
        (FILE.replace("[1.0, 5.0]", "[]"), r"\[vary\] 'data.spread' is \[\]; give a list"),
        (FILE.replace("[1.0, 5.0]", "1.0"), r"\[vary\] 'data.spread' is 1.0; give a list"),
        (FILE.replace("[0.001, 0.05]", "[]"), r"\[grid\] 'method.lr' is \[\]; give a list"),
        (
            FILE.replace("[grid]", '[methods.corrected.grid]\n"method.lr" = 1\n[grid]'),
            r"\[methods.corrected.grid\] 'method.lr' is 1; give a list",
        ),
        (FILE + 'fit = "data.clients"', "fit is 'data.clients', which .* known: data.spread"),
        (FILE + 'seeds = "run.seed"', "seeds is 'run.seed'; give a list of keys"),
        (FILE + "seeds = []", r"seeds is \[\]; give a list of keys"),
        (FILE + "seeds = [3]", r"seeds is \[3\]; give a list of keys"),
        (FILE + 'seeds = ["seed"]', r"seeds is \['seed'\]; give a list of keys"),
        (FILE + 'seeds = ["data.sed"]', r"\[data\] has no key 'sed'; did you mean 'seed'"),
        (
            FILE.replace('"method.lr"', '"method.lrr"'),
            "none of plain, corrected has; did you mean 'method.lr'",
        ),
        (
            FILE.replace('"method.lr"', '"methd.lr"'),
            "none of plain, corrected has; did you mean 'method.lr'",
        ),
        (
            FILE.replace("[grid]", '[methods.plain.grid]\n"method.lr" = [1]\n[grid]'),
            r"\[methods.plain.grid\] tunes 'method.lr', which none of plain has; .* method.dual_lr",
        ),
        (FILE.replace('"data.spread"', '"dta.spread"'), r"unknown section \[dta\]; did you mean"),
        (FILE + "[gird]", r"unknown section \[gird\]; did you mean 'grid'"),
        (FILE + "[method]", "did you mean 'methods'.*known: data, .* compare, grid, vary"),
        ("grid = 3\n" + FILE.split("[grid]")[0], r"grid = 3 is no section; write \[grid\]"),
        (
            WARM.replace('start = "first"', 'start = "frist"'),
            "start is 'frist', which is no method above it; did you mean 'first'",
        ),
        (
            WARM.replace("[methods.first]", '[methods.first]\ngrid = {"method.lr" = [1, 2]}'),
            "start is 'first', which is tuned, so that it has several runs",
        ),
    ],
)
def test_mistakes_are_named(text, sentence, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Comparison(path)


def test_a_metric_that_no_record_has_is_refused_after_the_first_run(file, tmp_path):
    file.write_text(FILE + 'metric = "distanse"\n')
    with pytest.raises(
        ConfigError, match=r"'distanse', which no record .* mean 'distance'\?.*loss"
    ):
        compare(file, tmp_path / "runs", workers=1)
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_comparison_is_not_run(file, capsys):
    assert cli.main(["run", str(file)]) == 2
    assert f"use fedminimax compare {file}" in capsys.readouterr().err


# At equal cost


def run_of(values, gradients=10, sent=100, outcome="finished"):
    """A history with one record per value, and how it ended."""
    costs = [{"gradients": gradients * r, "bytes_up": sent * r, "bytes_down": 0} for r in range(99)]
    records = zip(values, costs, strict=False)
    return [{"round": r, "train": {"m": v}, **c} for r, (v, c) in enumerate(records)], outcome


def named(label, *runs):
    histories, outcomes = zip(*runs, strict=True)
    return Line((), label, (), [], list(histories), outcomes)


def test_methods_are_read_at_equal_cost():
    # Per round, "dear" takes twice the gradients and sends a fifth.
    dear = named("dear", run_of([9, 5, 3, 1], gradients=20, sent=20))
    cheap = named("cheap", run_of([9, 7, 4, 2], gradients=10))
    values = {}
    for at in ("rounds", "gradients", "bytes"):
        places = rank(Plan("m", larger=False, at=at), [cheap, dear])
        values[at] = [(place.line.label, place.values[0], place.budget) for place in places]
    assert values == {
        "rounds": [("dear", 1, 3), ("cheap", 2, 3)],
        "gradients": [("cheap", 2, 30), ("dear", 5, 30)],
        "bytes": [("dear", 1, 60), ("cheap", 9, 60)],
    }


def test_differences_are_paired_by_seed():
    # Seeds differ by far more than methods do.
    good = named("good", *(run_of([s, s]) for s in (10.0, 20.0, 30.0)))
    near = named("near", *(run_of([s, s + d]) for s, d in ((10.0, 1), (20.0, -1), (30.0, 0.3))))
    poor = named("poor", *(run_of([s, s + d]) for s, d in ((10.0, 1), (20.0, 1.1), (30.0, 0.9))))
    places = rank(Plan("m", larger=False, at="rounds"), [poor, near, good])
    assert [place.line.label for place in places] == ["good", "near", "poor"]
    assert [place.told_apart for place in places] == [None, False, True]
    behind = places[2].behind
    assert behind is not None
    half = 4.302652729 * 0.1 / math.sqrt(3)  # Student's t, two degrees of freedom
    assert behind == pytest.approx((1.0, 1.0 - half, 1.0 + half, 3))
    upwards = rank(Plan("m", larger=True, at="rounds"), [poor, near, good])
    assert [place.line.label for place in upwards] == ["poor", "near", "good"]


def test_who_breaks_down_comes_last_and_does_not_shorten_the_others():
    whole = named("whole", run_of([9, 8, 7, 6]), run_of([9, 8, 7, 6]))
    broken = named("broken", run_of([9, 1, 1, 1]), run_of([9, 1], outcome="non-finite x"))
    arrived = named("arrived", *[run_of([9, 5], outcome="reached the target")] * 2)
    places = rank(Plan("m", larger=False, at="rounds"), [broken, whole, arrived])
    assert [(place.line.label, place.budget) for place in places] == [
        ("arrived", 3),  # counts by where it stopped
        ("whole", 3),
        ("broken", 3),
    ]
    assert places[2].values == [1, None]
    assert places[2].behind is None
    table = ranking_table(Plan("m", larger=False, at="bytes"), [broken, broken])
    assert [list(column.cells) for column in table.columns[2:5]] == [
        ["300 B", "300 B"],
        ["1 of 2 broke down"] * 2,
        ["-", "-"],
    ]
    lost = named("lost", run_of([9, 1], outcome="non-finite x"))
    table = ranking_table(Plan("m", larger=False, at="bytes"), [lost])
    assert list(table.columns[2].cells) == ["-"]


def test_a_file_or_an_option_asks_for_a_ranking(file, tmp_path, capsys):
    arguments = ["compare", str(file), "--folder", str(tmp_path / "runs")]
    assert cli.main([*arguments, "--at", "gradients"]) == 0
    table = "Made by" + capsys.readouterr().out.split("Made by")[1]
    file.write_text(FILE.replace("[compare]\n", '[compare]\nat = "gradients"\n'))
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.endswith(table)
    assert table.splitlines()[0] == f"Made by `fedminimax compare {file} --at gradients`."
    assert (
        "| data.spread | rank | method | method.lr | gradients at most | distance | less the best "
        "| rounds | gradients | sent |" in table
    )
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith(("| 1", "| 5"))]
    assert [row[:2] for row in rows] == [["| 1", "1"], ["| 1", "2"], ["| 5", "1"], ["| 5", "2"]]
    assert [row[6] for row in rows[::2]] == ["-", "-"]
    assert all(" to " in row[6] for row in rows[1::2])
    assert "with Student's 95 % interval" in table
    file.write_text(FILE + 'at = "gradient"')
    with pytest.raises(ConfigError, match="at is 'gradient'; did you mean 'gradients'"):
        Comparison(file)


ONE = FILE.split("[methods.plain]")[0] + '[method]\nname = "local_sgda"\n'


def test_finished_runs_are_ranked_at_equal_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "one.toml").write_text(ONE)
    for seed in (0, 1):
        for lr in (0.01, 0.05):
            place = ["--folder", f"runs/{lr}-{seed}", "--quiet"]
            assert cli.main(["run", "one.toml", f"run.seed={seed}", f"primal_lr={lr}", *place]) == 0
    folders = sorted(map(str, (tmp_path / "runs").iterdir()))
    capsys.readouterr()
    assert cli.main(["compare", *folders, "--at", "bytes"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if "local_sgda" in line]
    assert [row[:2] for row in rows] == [["1", "local_sgda,"], ["2", "local_sgda,"]]
    assert "over 2 seeds" in said
    assert cli.main(["compare", *folders[:-1], "--at", "bytes"]) == 2
    said = capsys.readouterr().err
    assert f"the seeds of the runs like {folders[0]} (2) and of those like {folders[2]} (1)" in said
    assert cli.main(["run", "one.toml", "data.spread=2", "--folder", "runs/x", "--quiet"]) == 0
    assert cli.main(["compare", folders[0], "runs/x", "--at", "bytes"]) == 2
    assert "[data] of" in capsys.readouterr().err


# Figures


@pytest.mark.parametrize("figure", ["last", "curves"])
def test_a_figure_is_drawn_beside_the_table_and_is_the_same_every_time(file, tmp_path, figure):
    file.write_text(FILE.replace("[compare]", f'[compare]\nfigure = "{figure}"'))
    table = tmp_path / "page.md"
    arguments = ["compare", str(file), "--folder", str(tmp_path / "runs"), "-o", str(table)]
    assert cli.main(arguments) == 0
    drawn = (tmp_path / "page.svg").read_text()
    assert "![distance](page.svg)" in table.read_text()
    for text in ("plain", "corrected", "distance"):
        assert f">{text}</text>" in drawn
    panels = {
        "last": ["data.spread"],
        "curves": ["data.spread = 1", "data.spread = 5", "gradients"],
    }
    for text in panels[figure]:
        assert f">{text}</text>" in drawn
    assert cli.main(arguments) == 0
    assert (tmp_path / "page.svg").read_text() == drawn


def history_of(values, sent=1e6):
    costs = [{"round": i, "gradients": i, "bytes_up": 16 + i * sent} for i in range(len(values))]
    return [{**cost, "test": {"auc": value}} for cost, value in zip(costs, values, strict=True)]


def lines_of(*values, sent=1e6, varied=((),)):
    """A line for each variation and method, "a", "b", ..., of one run with these values."""
    return [
        Line(change, label, (), [], [history_of(numbers, 1e6 if i else sent)])
        for i, (label, numbers) in enumerate(zip("abc", values, strict=False))
        for change in varied
    ]


AUCS = ([0.3, 0.90, 0.91, 0.92], [0.3, 0.93, 0.94, 0.95])
MORE, LESS = Plan("auc", larger=True), Plan("auc", larger=False)


@pytest.mark.parametrize("others", [[], [[0.3, 0.31]], [[None, None, None, None]]])
def test_curves_that_start_far_off_fill_the_axis_without_their_start(others):
    axes = figures._curves(MORE, lines_of(*AUCS, *others)).axes
    for axis in axes:
        low, high = axis.get_ylim()
        assert 0.89 < low < 0.9
        assert 0.95 < high < 0.96
        assert axis.get_xscale() == "linear"
        assert axis.lines[0].get_xdata()[0] < 1
    assert axes[1].get_title(loc="right") == "the first evaluation lies outside"


@pytest.mark.parametrize(
    "values", [[each[:3] for each in AUCS], ([0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.7, 0.8])]
)
def test_curves_of_a_few_points_or_steady_ones_are_shown_whole(values):
    axes = figures._curves(MORE, lines_of(*values)).axes
    for axis in axes:
        assert axis.get_ylim()[0] < min(map(min, values))
    assert axes[1].get_title(loc="right") == ""


def test_a_curve_is_the_median_of_its_runs_where_each_has_a_value():
    runs = [[0.3, 0.9, 0.91], [0.3, 0.8, None], [0.3, 0.7, 0.99, 1.0]]
    line = Line((), "a", (), [], [history_of(values) for values in runs])
    assert list(figures._curves(MORE, [line]).axes[0].lines[0].get_ydata()) == [0.3, 0.8]


def test_methods_that_send_far_more_are_shown_on_a_log_scale_without_the_start():
    gradients, sent = figures._curves(MORE, lines_of(*AUCS, sent=1e8)).axes
    assert (gradients.get_xscale(), sent.get_xscale()) == ("linear", "log")
    assert list(sent.lines[0].get_xdata()) == pytest.approx([100, 200, 300], rel=1e-4)
    assert gradients.get_ylim() == sent.get_ylim()
    long = [0.3] + [0.9] * 50
    assert figures._curves(MORE, lines_of(long, long[:2])).axes[1].get_xscale() == "linear"


@pytest.mark.parametrize(("start", "scale"), [(0.3, "log"), (0.0, "linear"), (-1.0, "linear")])
def test_what_should_fall_is_on_a_log_scale_where_it_can_be(start, scale):
    values = [start, 0.2, 0.1, 0.05]
    for axis in figures._curves(LESS, lines_of(values, values, sent=1e8)).axes:
        assert axis.get_yscale() == scale
    lines = lines_of([start], [0.1], varied=[(("data.spread", 1),)])
    (axis,) = figures._last(LESS, lines).axes
    assert axis.get_yscale() == scale


def test_a_row_of_curves_is_named_by_what_tells_it_apart():
    varied = [
        (("method.local_steps", steps), ("run.rounds", 64 // steps), ("data.share", share))
        for steps in (1, 32)
        for share in (0.1, 0.3)
    ]
    axes = figures._curves(MORE, lines_of(*AUCS, varied=varied)).axes
    steps = [f"method.local_steps = {n}, data.share = {s}" for n in (1, 32) for s in (0.1, 0.3)]
    assert [axis.get_title(loc="left") for axis in axes[::2]] == steps
    assert {axis.get_title(loc="left") for axis in axes[1::2]} == {""}


@pytest.mark.parametrize(
    ("values", "scale"),
    [((1, 512), "log"), ((4, 16), "linear"), ((0, 512), "linear"), (("ME", "OP"), "linear")],
)
def test_last_values_stand_against_a_key_on_a_log_scale_if_it_is_wide(values, scale):
    lines = lines_of(*AUCS, varied=[(("data.key", value),) for value in values])
    (axis,) = figures._last(MORE, lines).axes
    assert (axis.get_xscale(), axis.get_yscale()) == (scale, "linear")
    if scale == "log":
        assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "512"]


def test_without_matplotlib_a_comparison_with_a_figure_is_not_begun(
    file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file.write_text(FILE.replace("[compare]", '[compare]\nfigure = "curves"'))
    folder, page = tmp_path / "runs", tmp_path / "page.md"
    assert cli.main(["compare", str(file), "--folder", str(folder), "-o", str(page)]) == 2
    assert "install fedminimax[plots], or leave [compare] figure out" in capsys.readouterr().err
    assert not folder.exists()


def test_a_figure_of_nothing_varied_is_refused(file, tmp_path, capsys):
    bare = FILE.replace('[vary]\n"data.spread" = [1.0, 5.0]\n', "")
    file.write_text(bare.replace("[compare]", '[compare]\nfigure = "last"'))
    arguments = ["compare", str(file), "--folder", str(tmp_path / "runs")]
    assert cli.main([*arguments, "-o", str(tmp_path / "page.md")]) == 2
    assert "draws against the first key of [vary]: add one" in capsys.readouterr().err
    file.write_text(FILE.replace("[compare]", '[compare]\nfigure = "pie"'))
    assert cli.main(arguments) == 2
    assert 'figure is \'pie\'; give "last" or "curves"' in capsys.readouterr().err


def test_a_varied_option_of_one_method_leaves_the_others_as_they_are(file):
    text = FILE.replace(
        '"data.spread" =', '"method.stage_rounds, run.rounds" = [[3, 6]]\n"data.spread" ='
    )
    file.write_text(text)
    comparison = Comparison(file)
    varied = next(comparison.variations())
    corrected, plain = (
        comparison.experiment(Job(varied, label, (), 0)) for label in ("corrected", "plain")
    )
    assert corrected.method.options["stage_rounds"] == 3
    assert "stage_rounds" not in plain.method.options
    assert corrected.run.rounds == plain.run.rounds == 6
    file.write_text(text.replace("method.stage_rounds", "method.stage_round"))
    with pytest.raises(
        ConfigError, match=r"which no method has; did you mean 'method.stage_rounds'"
    ):
        Comparison(file)


def test_a_metric_may_be_that_of_one_site():
    plan = Plan("sites.york", larger=True)
    record = {"validation": {"auc": 0.8, "sites": {"york": 0.7}}, "test": {"sites": {"york": 0.6}}}
    assert plan.value(record) == 0.7
    assert plan.final([record]) == 0.6
