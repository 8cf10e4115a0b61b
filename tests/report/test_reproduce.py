"""`fedminimax reproduce`: entries that are run, resumed, written down and judged."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedminimax import cli, experiment
from fedminimax.cli import reproduce as cli_reproduce
from fedminimax.config import ConfigError
from fedminimax.data import SOURCES
from fedminimax.data.sources import look
from fedminimax.report import comparison_runs
from fedminimax.report.claims import CONFIRMED, REFUTED, Claim, Row, judge, rows_of, rows_of_page
from fedminimax.report.comparison import Comparison, merged
from fedminimax.report.comparison_runs import compared
from fedminimax.report.comparison_table import markdown
from fedminimax.report.papers import read_contents, read_entries, read_entry, read_queue, shortened
from fedminimax.report.summaries import all_judged
from fedminimax.report.tables import Span

PAPERS = Path(__file__).parents[2] / "experiments" / "papers"

SADDLE = """
# A paper, Figure 1
[paper]
title = "A paper, Figure 1"
length = "24 rounds"
reported = {corrected = [0.1]}
[[claims]]
says = "Corrections help."
rule = "better"
method = "corrected"
over = ["plain"]
[[questions]]
says = "Is it fast?"
rule = "reaches"
method = "corrected"
[budget.quick]
rounds = 0.25
improves = 0.01
[data]
name = "quadratic"
clients = 4
dimension = 2
spread = 50.0
[problem]
name = "quadratic"
[run]
rounds = 24
batch_size = 0
evaluate_every = 4
executor = "vectorised"
[compare]
repeats = 2
seeds = ["run.seed", "data.seed"]
[methods.plain]
name = "local_sgda"
local_steps = 8
primal_lr = 0.05
dual_lr = 0.05
[methods.corrected]
name = "codasca"
lr = {kind = "constant", value = 0.05}
stage_rounds = 100
proximal = 0.0
local_steps = 8
"""
WORSE = """
# A paper, Figure 2
[paper]
title = "A paper, Figure 2"
extends = "saddle.toml"
[[claims]]
says = "Corrections hurt."
rule = "better"
method = "plain"
over = ["corrected"]
[budget.quick]
rounds = 0.25
improves = 1e9
"""
IMAGES = """
# A paper, Table 1
[paper]
title = "A paper, Table 1"
[[claims]]
says = "It learns."
rule = "reaches"
method = "plain"
value = 0.9
[data]
name = "mnist"
task = "first_half"
[model]
name = "lenet5"
[problem]
name = "auc"
[methods.plain]
name = "local_sgda"
"""
CONTENTS = """
[a-paper]
title = "A paper (2024)"
summary = "Corrections help."
items = [
  {what = "Figure 1", entries = ["saddle"]},
  {what = "Figure 2", entries = ["worse"]},
  {what = "Table 1", entries = ["images"]},
  {what = "Table 2", reason = "needs a telescope", claim = "Stars shine."},
  {what = "Table 3", measures = false, reason = "a list of symbols"},
]
"""


def project(home, monkeypatch):
    """Three entries, and no image data."""
    folder = home / "experiments" / "papers"
    folder.mkdir(parents=True)
    for name, text in (("saddle", SADDLE), ("worse", WORSE), ("images", IMAGES)):
        (folder / f"{name}.toml").write_text(text)
    (folder / "contents.toml").write_text(CONTENTS)
    monkeypatch.chdir(home)
    monkeypatch.setenv("FEDMINIMAX_DATA", str(home / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "nothing"))
    return folder


@pytest.fixture
def papers(tmp_path, monkeypatch):
    return project(tmp_path, monkeypatch)


COMMAND = ["reproduce", "saddle", "-o", "docs", "--folder"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project in which an entry was run to its end."""
    home = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        project(home, patch)
        assert cli.main([*COMMAND, "here"]) == 0
    return home


@pytest.fixture
def done(papers, finished):
    """A copy of its runs, here, and of its pages and records, in docs."""
    for name in ("here", "docs"):
        shutil.copytree(finished / name, name)


def said(capsys, *arguments):
    code = cli.main(["reproduce", *arguments])
    out, err = capsys.readouterr()
    return code, out + err


def test_the_list_names_every_item_with_its_entries_or_the_reason(papers, capsys):
    code, text = said(capsys, "--list")
    assert code == 0
    lines = {line.split("  ")[1].strip(): line for line in text.splitlines() if "a-paper" in line}
    assert "saddle" in lines["Figure 1"]
    assert "not reachable" not in lines["Figure 1"]
    assert "the data of images are not here" in lines["Table 1"]
    assert "not reachable here" in lines["Table 2"]
    assert "needs a telescope" in lines["Table 2"]
    assert "nothing to run" in lines["Table 3"]
    assert not Path("runs").exists()


def test_an_entry_is_run_written_down_and_judged(papers, capsys):
    code, text = said(capsys, "saddle", "-o", "results")
    assert code == 0
    assert "saddle: two runs: ahead: Corrections help." in text
    page = Path("results/saddle.md").read_text()
    assert page.startswith("# A paper, Figure 1\n\nMade by `fedminimax reproduce saddle`, commit ")
    assert "4 runs" in page
    assert "over 2 seeds" in page
    assert "| corrected | 0.1 |" in page
    assert "- **two runs: ahead**: Corrections help. Measured: corrected " in page
    assert Path("results/saddle.svg").read_bytes().startswith(b"<?xml")
    with open("results/saddle.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (label, seed) for label in ("plain", "corrected") for seed in "01"
    ]
    assert all(float(row["distance"]) > 0 and row["rounds"] == "24" for row in rows)
    claims, questions = Path("results/claims.md").read_text().split("## Our own questions")
    first, second, _, last = claims.partition("|---")[2].splitlines()[1:5]
    assert first.startswith("| a-paper | Corrections help. | two runs: ahead | 2 | corrected ")
    assert first.endswith("| [saddle](saddle.md) |")
    assert second.endswith("| not run yet | - | - | `fedminimax reproduce worse` |")
    assert "| Stars shine. | not reachable here | - | not measured: needs a telescope |" in last
    assert "| a-paper | Is it fast? | one run: " not in claims
    assert "| a-paper | Is it fast? | two runs: " in questions
    paper = Path("results/a-paper.md").read_text()
    assert paper.startswith(
        "# A paper (2024)\n\nCorrections help.\n\n```bash\nfedminimax reproduce "
    )
    assert "| Figure 1 | [saddle](saddle.md) | 24 rounds | 2 | 4 runs, " in paper
    assert "| Figure 2 | `worse` | - | not run yet | - |" in paper
    assert "| Table 2 | not reachable here: needs a telescope | - | - | - |" in paper
    assert "| Table 3 | a list of symbols | - | - | - |" in paper
    assert "| corrected | 0.1 | " in paper
    assert "![distance](saddle.svg)\n\n- **two runs: ahead**: Corrections help.\n" in paper


def test_what_is_done_is_read_and_not_run_again(papers, capsys, monkeypatch):
    assert said(capsys, "saddle", "--seeds", "1")[0] == 0
    runs = sorted(p.name for p in Path("runs/reproduce/saddle/full").iterdir())
    assert runs == ["corrected_seed=0", "plain_seed=0"]
    first = Path("runs/reproduce/saddle.csv").read_text()
    monkeypatch.setattr(comparison_runs, "run_experiment", None)
    assert said(capsys, "saddle", "--seeds", "1")[0] == 0
    assert Path("runs/reproduce/saddle.csv").read_text() == first


def test_an_interrupted_run_goes_on(papers, capsys, monkeypatch):
    assert said(capsys, "saddle", "--seeds", "1", "--folder", "whole")[0] == 0
    played = []

    def stopped(experiment_, folder, **calls):
        def stop(record):
            played.append(record["round"])
            if len(played) == 4:
                raise KeyboardInterrupt

        return experiment.run_experiment(experiment_, folder, on_record=stop, **calls)

    monkeypatch.setattr(comparison_runs, "run_experiment", stopped)
    code, text = said(capsys, "saddle", "--seeds", "1")
    assert code == 130
    assert "the same command goes on" in text
    assert "Traceback" not in text
    assert not list(Path("runs/reproduce/saddle/full").glob("*/final.safetensors"))
    monkeypatch.undo()
    os.chdir(papers.parent.parent)
    resumed = []

    def watched(folder):
        resumed.append(folder.name)
        return experiment.resume(folder)

    monkeypatch.setattr(comparison_runs, "resume", watched)
    assert said(capsys, "saddle", "--seeds", "1")[0] == 0
    assert resumed == ["plain_seed=0"]

    def without_seconds(folder):
        with open(f"{folder}/saddle.csv", newline="") as file:
            return [{**row, "seconds": 0} for row in csv.DictReader(file)]

    assert without_seconds("runs/reproduce") == without_seconds("whole")


def test_only_finished_runs_are_written_down_on_request(papers, capsys):
    assert said(capsys, "saddle", "--seeds", "1")[0] == 0
    shutil.rmtree("runs/reproduce/saddle/full/corrected_seed=0")
    code, _text = said(capsys, "saddle", "--done", "-o", "results")
    assert code == 0
    page = Path("results/saddle.md").read_text()
    assert "1 of 4 runs finished" in page
    assert "| plain |" in page
    assert "| corrected |" not in page
    assert "- **not run yet**: Corrections help." in page
    assert not Path("runs/reproduce/saddle/full/corrected_seed=0").exists()
    assert "worse: not run yet" in said(capsys, "worse", "--done", "-o", "results")[1]


def test_a_quick_run_is_short_and_judges_nothing(papers, capsys):
    code, text = said(capsys, "saddle", "--budget", "quick")
    assert code == 0
    assert "saddle: ran to its end" in text
    assert "confirmed" not in text
    with open("runs/reproduce/saddle_quick.csv", newline="") as file:
        assert {row["rounds"] for row in csv.DictReader(file)} == {"6"}
    assert "confirmed" not in Path("runs/reproduce/saddle_quick.md").read_text()
    assert (
        "Corrections help. | not run yet | - | - |" in Path("runs/reproduce/claims.md").read_text()
    )


def test_too_little_improvement_breaks_an_entry_and_the_others_go_on(papers, capsys):
    code, text = said(capsys, "--budget", "quick", "--seeds", "1")
    assert code == 1
    assert "worse: broke: plain improved its distance by" in text
    assert "less than 1e+09" in text
    assert "saddle: ran to its end" in text
    # Nobody asked for the images by name: what cannot be reached breaks nothing.
    assert "images: not reachable here: MNIST: there is no " in text
    (papers / "worse.toml").unlink()
    (papers / "contents.toml").write_text(CONTENTS.replace('["worse"]', "[]"))
    assert said(capsys, "--budget", "quick", "--seeds", "1")[0] == 0


def test_a_run_that_diverges_is_told_on_its_page_and_breaks_a_quick_entry(papers, capsys):
    text = WORSE.replace("[budget.quick]", "[methods.plain]\nprimal_lr = 1e9\n[budget.quick]")
    (papers / "worse.toml").write_text(text)
    told = "a run of plain was last measured after round"
    code, text = said(capsys, "worse", "--budget", "quick", "--seeds", "1")
    assert code == 1
    assert f"worse: broke: {told}" in text
    code, text = said(capsys, "worse", "--budget", "half", "--seeds", "1")
    assert code == 0
    assert f"- {told}" in Path("runs/reproduce/worse_half.md").read_text()


def test_an_error_breaks_an_entry_with_a_sentence(papers, capsys):
    text = WORSE.replace("improves = 1e9", 'drop = ["run"]\nchange.run = {rounds = 2, cohort = 99}')
    (papers / "worse.toml").write_text(text)
    code, text = said(capsys, "worse", "--budget", "quick")
    assert code == 1
    assert "worse: broke: 99 clients per round were asked for" in text
    assert "Traceback" not in text


def test_missing_data_are_a_sentence_and_a_failure_where_asked_for(papers, capsys):
    code, text = said(capsys, "images")
    assert code == 1
    assert "images: not reachable here: MNIST: there is no " in text
    assert "fedminimax data fetch mnist" in text
    assert not Path("runs/reproduce/images").exists()


QUEUE = """
items = [{name = "worse", budget = "quick"}, {name = "saddle", seeds = 1}]
"""


def test_the_queue_is_worked_through_in_its_order_and_gone_on_with(papers, capsys, monkeypatch):
    aside = []
    monkeypatch.setattr(cli_reproduce, "stand_aside", lambda: aside.append(True))
    (papers / "queue.toml").write_text(QUEUE.replace("budget =", "seeds = 1, budget ="))
    code, text = said(capsys, "--queue", "-o", "docs")
    assert code == 1  # worse does not improve by enough
    assert text.index("worse: broke") < text.index("saddle: one run: ahead")
    assert aside == [True]
    assert len(list(Path("docs/records/saddle/full").iterdir())) == 2
    assert not Path("docs/records/worse").exists()
    monkeypatch.setattr(comparison_runs, "run_experiment", None)  # to call it would fail
    (papers / "queue.toml").write_text('items = [{name = "saddle", seeds = 1}]')
    assert said(capsys, "--queue", "-o", "docs", "--folder", "elsewhere")[0] == 0


def test_the_queue_takes_one_core_at_the_lowest_priority():
    script = (
        "import os, torch; from fedminimax.cli.reproduce import stand_aside; stand_aside(); "
        "print(os.nice(0), torch.get_num_threads())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["19", "1"]


def test_mistakes_in_the_queue_are_sentences(papers, capsys):
    (papers / "queue.toml").write_text(QUEUE.replace("worse", "worst"))
    assert "queue.toml names the entry 'worst'; did you mean 'worse'" in said(capsys, "--queue")[1]
    (papers / "queue.toml").write_text(QUEUE.replace("seeds", "seed"))
    assert "has no key 'seed'; did you mean 'seeds'" in said(capsys, "--queue")[1]
    code, text = said(capsys, "saddle", "--queue")
    assert code == 2
    assert "--queue takes names, budgets and seeds from queue.toml" in text


def test_without_matplotlib_nothing_is_begun(papers, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, text = said(capsys, "saddle")
    assert code == 2
    assert text.endswith("a figure needs matplotlib: install fedminimax[plots]\n")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("sadle",), "there is no entry 'sadle'; did you mean 'saddle'?"),
        (("--seeds", "0"), "--seeds is 0; give at least 1"),
        (("--workers", "0"), "--workers is 0; give at least 1"),
        (("--entries", "elsewhere"), "there is no elsewhere/contents.toml: go to the folder"),
    ],
)
def test_mistakes_on_the_command_line_are_sentences(papers, capsys, arguments, sentence):
    code, text = said(capsys, *arguments)
    assert code == 2
    assert sentence in text


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('rule = "better"', 'rule = "beter"', "rule is 'beter'; did you mean 'better'?"),
        ("[budget.quick]", "[budget.fast]", "there is no budget 'fast'"),
        ("improves = 0.01", "improve = 0.01", "has no key 'improve'; did you mean 'improves'?"),
        ('title = "A paper, Figure 1"', "", "needs the key 'title'"),
        ("[paper]", "[papr]", "has no section [paper]"),
    ],
)
def test_mistakes_in_an_entry_are_sentences(papers, old, new, sentence):
    (papers / "saddle.toml").write_text(SADDLE.replace(old, new).replace("reported", "#"))
    with pytest.raises(ConfigError) as error:
        read_entry(papers / "saddle.toml")
    assert sentence in str(error.value)


def test_contents_name_entries_that_are_there(papers):
    (papers / "contents.toml").write_text(CONTENTS.replace("worse", "worst"))
    with pytest.raises(ConfigError, match="names the entry 'worst'; did you mean 'worse'"):
        read_contents(papers, read_entries(papers))


def test_shortened_shrinks_rounds_schedules_and_stages_together():
    table = {
        "run": {"rounds": 100, "evaluate_every": 10},
        "compare": {"tuning_rounds": 30, "repeats": 3},
        "methods": {"a": {"lr": {"value": 0.1, "at": [50, 75]}, "run": {"rounds": 9}}},
        "vary": {"method.local_steps, run.rounds": [[4, 100], [8, 50]], "run.rounds": [8, 80]},
    }
    assert shortened(table, 0.1) == {
        "run": {"rounds": 10, "evaluate_every": 10},
        "compare": {"tuning_rounds": 3, "repeats": 3},
        "methods": {"a": {"lr": {"value": 0.1, "at": [5, 8]}, "run": {"rounds": 1}}},
        "vary": {"method.local_steps, run.rounds": [[4, 10], [8, 5]], "run.rounds": [1, 8]},
    }
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {
        "a": {"b": 3, "c": 2},
        "d": 4,
    }


def test_a_page_gives_back_the_rows_that_it_was_written_from(papers, tmp_path):
    entry = read_entry(papers / "saddle.toml")
    table = merged(
        entry.table("quick"), {"compare": {"below": 2.0}, "vary": {"data.spread": [1, 5]}}
    )
    done = Comparison(entry.path, table=table)
    lines = compared(done, tmp_path / "runs")
    rows, read = (
        rows_of(done.plan, lines),
        rows_of_page(markdown(entry.path, done, lines), False, 6),
    )
    assert len(rows) == len(read) == 4
    for row, again in zip(rows, read, strict=True):
        assert (row.varied, row.method, row.length) == (again.varied, again.method, again.length)
        assert again.last == pytest.approx(row.last, rel=1e-3)
        assert again.rounds == pytest.approx(row.rounds, rel=1e-3)
        assert again.bytes_up == pytest.approx(row.bytes_up, rel=0.1)


# Verdicts, on rows made up for them.


def span(value):
    return Span(value, value, value) if isinstance(value, int | float) else value


def row(method, last, rounds=None, sent=100.0, length=100, seeds=3, **varied):
    settings = {key.replace("__", "."): str(value) for key, value in varied.items()}
    return Row(settings, method, span(last), span(rounds), sent, length, seeds)


def verdict(rows, larger=True, **claim):
    found = judge(Claim("It is so.", method="new", **claim), rows, larger)
    assert found is not None
    return found


def test_without_the_lines_that_it_needs_a_claim_is_not_judged():
    better = Claim("It is so.", "better", "new", over=("old",))
    assert judge(better, [row("new", 1)], True) is None
    assert judge(better, [row("new", 1, k=1), row("old", 0, k=1), row("new", 1, k=2)], True) is None
    assert judge(Claim("It is so.", "falls", "new", key="k"), [row("new", 1, 5, k=1)], True) is None


@pytest.mark.parametrize(("larger", "good"), [(True, 0.9), (False, 0.7)])
def test_better_means_better_than_each_of_the_others(larger, good):
    rows = [row("new", good), row("old", 0.8), row("older", 0.79 if larger else 0.81)]
    assert verdict(rows, larger, rule="better", over=("old", "older")).text == CONFIRMED
    assert verdict(rows, not larger, rule="better", over=("old", "older")).text == REFUTED


@pytest.mark.parametrize(
    ("seeds", "holds", "fails"),
    [
        (1, "one run: ahead", "one run: behind"),
        (2, "two runs: ahead", "two runs: behind"),
        (3, CONFIRMED, REFUTED),
    ],
)
def test_a_verdict_needs_three_seeds_of_every_line_that_it_compares(seeds, holds, fails):
    rows = [row("new", 2, seeds=5), row("old", 1, seeds=seeds), row("other", 3, seeds=0)]
    found = verdict(rows, rule="better", over=("old",))
    assert (found.text, found.seeds) == (holds, seeds)
    assert verdict(rows, False, rule="better", over=("old",)).text == fails


def test_better_within_the_spread_of_the_seeds_is_not_confirmed():
    rows = [row("new", Span(0.9, 0.7, 0.95)), row("old", Span(0.8, 0.75, 0.82))]
    found = verdict(rows, rule="better", over=("old",))
    assert found.text == REFUTED
    assert "within the spread of the seeds" in found.measured


def test_reaches_allows_for_the_tolerance():
    assert (
        verdict([row("new", 0.979)], rule="reaches", value=0.98, tolerance=0.002).text == CONFIRMED
    )
    assert verdict([row("new", 0.979)], rule="reaches", value=0.98).text == REFUTED
    assert verdict([row("new", 0.979)], False, rule="reaches", value=0.98).text == CONFIRMED


def test_fewer_rounds_and_fewer_bytes_count_to_the_target():
    rows = [
        row("new", 1, 10, sent=1000.0),
        row("old", 1, 20, sent=100.0),
        row("no", 1, float("inf")),
    ]
    assert verdict(rows, rule="fewer_rounds", over=("old", "no")).text == CONFIRMED
    assert verdict(rows, rule="fewer_bytes", over=("old",)).text == REFUTED
    assert verdict(rows, rule="fewer_bytes", over=("no",)).text == CONFIRMED
    with pytest.raises(ConfigError, match="no below or above"):
        verdict([row("new", 1), row("old", 1)], rule="fewer_rounds", over=("old",))


def test_falls_looks_along_a_key_in_its_order():
    rows = [row("new", 1, rounds, k=k) for k, rounds in ((16, 10), (2, 80), (4, 40))]
    assert verdict(rows, rule="falls", key="k").text == CONFIRMED
    assert verdict([*rows, row("new", 1, 10, k=32)], rule="falls", key="k").text == REFUTED


def test_grows_compares_the_ends():
    rows = [row("new", value, k=k) for k, value in ((1, 0.8), (2, 0.7), (10, 0.9))]
    assert verdict(rows, rule="grows", key="k").text == CONFIRMED
    assert verdict(rows, False, rule="grows", key="k").text == REFUTED


def test_advantage_grows_as_the_key_falls():
    rows = [row("new", 1, 10, k=k) for k in (1, 2)]
    rows += [row("old", 1, 40, k=1), row("old", 1, 20, k=2)]
    rows += [row("odd", 1, 20, k=1), row("odd", 1, 40, k=2)]
    assert verdict(rows, rule="advantage", over=("old",), key="k").text == CONFIRMED
    assert verdict(rows, rule="advantage", over=("odd",), key="k").text == REFUTED


def test_window_is_the_largest_key_without_loss():
    rows = [row("new", 0.9, k=k, run__rounds=128 // k) for k in (1, 32, 128)]
    rows += [
        row("old", 0.9 - loss, k=k, run__rounds=128 // k)
        for k, loss in ((1, 0), (32, 0.005), (128, 0.1))
    ]
    found = verdict(rows, rule="window", over=("old",), key="k", value=4, tolerance=0.01)
    assert found == (CONFIRMED, "new 128, old 32: 4 times, claimed 4", 3)
    assert (
        verdict(rows, rule="window", over=("old",), key="k", value=8, tolerance=0.01).text
        == REFUTED
    )


def test_a_claim_must_hold_in_every_setting_that_counts():
    rows = [
        row(m, v, sort=s)
        for s, m, v in (("A", "new", 2), ("A", "old", 1), ("B", "new", 1), ("B", "old", 2))
    ]
    found = verdict(rows, rule="better", over=("old",))
    assert found.text == REFUTED
    assert found.measured.startswith("sort = A: new 2, best other old 1; ")
    assert verdict(rows, rule="better", over=("old",), where={"sort": "A"}).text == CONFIRMED
    many = [row(m, v, k=k) for k in range(5) for m, v in (("new", 2), ("old", 1 if k else 3))]
    assert verdict(many, rule="better", over=("old",)).measured.startswith(
        "in 4 of 5 settings; for one, k = 0: new 2, best other old 3"
    )


# The entries of the project.


def test_every_entry_is_in_the_contents_and_has_claims_and_a_quick_budget():
    entries = read_entries(PAPERS)
    papers = read_contents(PAPERS, entries)
    assert [p.name for p in papers] == [
        "local-scgdam",
        "codasca",
        "adafgda",
        "fess-gda",
        "fed-dr-scgd",
    ]
    assert {name for p in papers for item in p.items for name in item.entries} == set(entries)
    assert {item.name for item in read_queue(PAPERS, entries)} <= set(entries)
    for item in (item for p in papers for item in p.items):
        assert item.entries or item.reason, item.what
    for entry in entries.values():
        first = entry.path.read_text().splitlines()[0]
        assert first.startswith("# ")
        assert "Table" in first or "Figure" in first or "paper," in first
        assert entry.claims, entry.name
        for budget in ("quick", "half", "full"):
            found = Comparison(entry.path, table=entry.table(budget))
            for claim in entry.claims:
                assert {claim.method, *claim.over} <= set(found.methods), entry.name
        for label in Comparison(entry.path, table=entry.table("quick")).methods:
            assert entry.budget("quick").improvement(label) is not None, (entry.name, label)


def test_no_verdict_of_the_documents_rests_on_fewer_than_three_seeds():
    entries = read_entries(PAPERS)
    results = PAPERS.parent.parent / "docs" / "results"
    found = list(all_judged(read_contents(PAPERS, entries), entries, results))
    settled = [judged for judged in found if judged.verdict.text in (CONFIRMED, REFUTED)]
    assert {judged.verdict.text for judged in settled} == {CONFIRMED, REFUTED}
    for judged in settled:
        # The page itself says so, beside the command that made it.
        assert judged.page is not None
        seeds = re.search(r"^Made by .*range over (\d+)", judged.page.read_text(), re.MULTILINE)
        assert seeds is not None, judged
        assert int(seeds[1]) >= 3, judged


@pytest.mark.slow
def test_the_pages_of_the_documents_are_made_of_the_records_without_data(
    tmp_path, capsys, monkeypatch
):
    # Figures take most of the time and are not compared; tests/docs/test_documents.py draws them.
    monkeypatch.setattr("fedminimax.report.reproduce.draw", lambda *given: None)
    results = PAPERS.parent.parent / "docs" / "results"
    shutil.copytree(results, tmp_path / "results")
    monkeypatch.chdir(PAPERS.parent.parent)
    monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    entries = read_entries(PAPERS)
    recorded = [name for name in entries if (results / "records" / name).exists()]
    assert recorded
    for name in recorded:
        (tmp_path / "results" / f"{name}.md").unlink()
    code, _ = said(
        capsys, "--done", "--folder", str(tmp_path / "none"), "-o", str(tmp_path / "results")
    )
    assert code == 0
    papers = [paper.name for paper in read_contents(PAPERS, entries)]
    for page in (f"{name}.md" for name in ("claims", *papers, *recorded)):
        assert (tmp_path / "results" / page).read_text() == (results / page).read_text(), page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafgda_robust_mnist"])
def test_a_real_entry_runs_at_the_quick_budget(name, tmp_path, capsys, monkeypatch):
    source = SOURCES["mnist"]
    if any(look(source, [c.name for c in file.copies]) is None for file in source.files):
        pytest.skip("MNIST is not here")
    monkeypatch.chdir(PAPERS.parent.parent)
    code, text = said(capsys, name, "--budget", "quick", "--folder", str(tmp_path))
    assert code == 0
    assert f"{name}: ran to its end" in text
    assert (tmp_path / f"{name}_quick.md").exists()


@pytest.mark.usefixtures("done")
def test_finished_runs_are_recorded_and_not_run_again_elsewhere(monkeypatch):
    page = Path("docs/saddle.md").read_text()
    kept = sorted(Path("docs/records/saddle/full").iterdir())
    assert [path.name for path in kept] == [
        f"{label}_seed={seed}.jsonl" for label in ("corrected", "plain") for seed in (0, 1)
    ]
    monkeypatch.setattr(comparison_runs, "run_experiment", None)  # to call it would fail
    assert cli.main([*COMMAND, "there"]) == 0
    assert not Path("there").exists()
    assert Path("docs/saddle.md").read_text() == page
    assert cli.main([*COMMAND, "there", "--done"]) == 0
    assert Path("docs/saddle.md").read_text() == page


@pytest.mark.usefixtures("done")
def test_an_interrupted_entry_goes_on_elsewhere_with_what_was_recorded():
    table = Path("docs/saddle.csv").read_text()
    missing = ["plain_seed=0", "plain_seed=1"]
    for name in missing:
        Path(f"docs/records/saddle/full/{name}.jsonl").unlink()
    assert cli.main([*COMMAND, "there"]) == 0
    assert sorted(path.name for path in Path("there/saddle/full").iterdir()) == missing
    again = Path("docs/saddle.csv").read_text()
    cut = [[row.rpartition(",")[0] for row in text.splitlines()] for text in (again, table)]
    assert cut[0] == cut[1]  # all but the seconds


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text.replace('"rounds": 24', '"rounds": 25', 1), "other settings"),
        (lambda text: text.replace('"proximal": 0.0', '"proxima": 0.0', 1), "other settings"),
        (lambda text: text.splitlines()[0], "cut short"),
        (lambda text: text.rstrip().rpartition("\n")[0], "cut short"),
        (lambda text: text[:50], "damaged"),
        (lambda text: "[1]\n[2]", "damaged"),
    ],
)
@pytest.mark.usefixtures("done")
def test_a_record_that_is_not_of_this_run_is_refused(capsys, change, sentence):
    record = Path("docs/records/saddle/full/corrected_seed=0.jsonl")
    record.write_text(change(record.read_text()))
    assert cli.main([*COMMAND, "there"]) == 1
    out = capsys.readouterr().out
    assert sentence in out
    assert "corrected_seed=0.jsonl" in out


@pytest.mark.usefixtures("done")
def test_a_record_is_good_without_options_that_came_later():
    record = Path("docs/records/saddle/full/corrected_seed=0.jsonl")
    shorter = record.read_text().replace('"allow_partial": false, ', "", 1)
    assert shorter != record.read_text()
    record.write_text(shorter)
    assert cli.main([*COMMAND, "there"]) == 0
    assert not Path("there").exists()


@pytest.mark.usefixtures("done")
def test_a_record_goes_before_an_unfinished_run(monkeypatch):
    Path("here/saddle/full/plain_seed=0/final.safetensors").unlink()
    monkeypatch.setattr(comparison_runs, "resume", None)
    assert cli.main([*COMMAND, "here", "--done"]) == 0
    assert cli.main([*COMMAND, "here"]) == 0


def test_quick_runs_leave_no_record(papers):
    assert cli.main(["reproduce", "saddle", "--budget", "quick", "-o", "docs"]) == 0
    assert not Path("docs/records").exists()


CHAIN = """
[data]
name = "heart"
[model]
name = "mlp"
hidden = [2]
[problem]
name = "auc"
[run]
rounds = 1
executor = "debug"
[methods.first]
name = "local_sgda"
[methods.second]
name = "local_sgda"
start = "first"
[methods.third]
name = "local_sgda"
start = "second"
"""


def test_runs_that_begin_with_recorded_runs_have_these_made_again(tmp_path):
    path, kept = tmp_path / "chain.toml", tmp_path / "kept"
    path.write_text(CHAIN)
    lines = compared(Comparison(path), tmp_path / "here", kept=kept)
    assert sorted(f.stem for f in kept.iterdir()) == [
        f"{label}_seed=0" for label in ("first", "second", "third")
    ]
    text = (kept / "third_seed=0.jsonl").read_text()
    assert str(tmp_path) not in text
    again = compared(Comparison(path), tmp_path / "there", kept=kept)
    assert not (tmp_path / "there").exists()
    (kept / "third_seed=0.jsonl").unlink()
    anew = compared(Comparison(path), tmp_path / "there", kept=kept)
    assert len(list((tmp_path / "there").iterdir())) == 3

    def losses(lines):
        return [line.histories[0][-1]["test"]["loss"] for line in lines]

    assert losses(again) == losses(anew) == losses(lines)
    path.write_text(CHAIN.replace("[methods.first]", "[methods.first]\nprimal_lr = 0.3"))
    with pytest.raises(ValueError, match="other settings"):  # another beginning is another run
        compared(Comparison(path), tmp_path / "elsewhere", kept=kept)
