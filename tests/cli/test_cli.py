"""The command line as a user meets it: results, notes, and a sentence for every mistake."""

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
import warnings
import zipfile
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from pyarrow import csv as arrow_csv
from pyarrow import parquet
from sklearn.metrics import roc_auc_score

from fedminimax import cli
from fedminimax.algorithms import METHODS
from fedminimax.cli import init
from fedminimax.config import CHOICES, options_of
from fedminimax.data.tables import read_table
from fedminimax.engine.state.folder import RunFolder
from fedminimax.experiment import load, preparation
from fedminimax.report import demo
from fedminimax.report.progress import RunProgress

ROOT = Path(__file__).parents[2]
HEART = ROOT / "experiments" / "heart_codasca.toml"
SITES = ("east", "north", "west")
MINE = """
[data]
name = "folder"
path = "sites"
label = "disease"
drop = ["patient"]
[model]
name = "linear"
[problem]
name = "auc"
[method]
name = "codasca"
[run]
rounds = 6
evaluate_every = 2
executor = "vectorised"
"""


def site_text(number, rows=60, label=lambda i: int(i % 3 == 0)):
    """A site's table: the marker tells the classes apart, the age hardly, and some cells lack."""
    random = np.random.default_rng(number)
    lines = ["patient,age,sex,marker,disease"]
    for i in range(rows):
        marker = "" if i % 10 == 9 else f"{random.normal() + 1.5 * (i % 3 == 0):.3f}"
        sex, age = random.choice(["f", "m"]), 50 + 10 * random.normal()
        lines.append(f"{number}-{i},{age:.1f},{sex},{marker},{label(i)}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's directory: three sites and an experiment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    for number, name in enumerate(SITES):
        (tmp_path / "sites" / f"{name}.csv").write_text(site_text(number))
    (tmp_path / "mine.toml").write_text(MINE)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Calls the command line; the code that it returns is part of what is expected."""

    def call(*arguments, code=0):
        assert cli.main([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return call


@pytest.fixture
def refused(run):
    """The one sentence that a mistake ends in."""

    def call(*arguments):
        said = run(*arguments, code=2).err
        assert said.startswith("fedminimax: ")
        assert "Traceback" not in said
        return said

    return call


def final(folder):
    return (Path(folder) / "final.safetensors").read_bytes()


def records(folder):
    return RunFolder(folder).read_history()


def interrupted(monkeypatch, run, *arguments, after):
    """A run that the user stops with Ctrl-C after so many rounds."""

    def stop(self, round):
        if round == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "on_round", stop)
        return run("run", *arguments, code=130)


# run


def test_a_run_tells_of_its_rounds_and_where_it_is(home, run):
    said = run("run", "mine.toml")
    lines = said.out.splitlines()
    rounds = [line for line in lines if line.startswith("round ")]
    assert [line.split()[1] for line in rounds] == ["0/6", "2/6", "4/6", "6/6"]
    history = records("runs/mine-1")
    for line, record in zip(rounds, history, strict=True):
        assert f"validation auc {record['validation']['auc']:.4g}" in line
    last = history[-1]
    assert lines[-5].startswith("finished; validation auc ")
    assert f"test auc {last['test']['auc']:.4g}" in lines[-5]
    assert lines[-4] == f"AUPRC {last['test']['auprc']:.4g}, on the same rows"
    low, high = last["test"]["auc_interval"]
    assert f"{low:.3f} to {high:.3f}; worst site " in lines[-3]
    assert f"{last['exchanges']} exchanges, {last['gradients']} gradients" in lines[-2]
    assert lines[-1] == "run folder: runs/mine-1"
    assert said.err == ""
    assert {path.name for path in Path("runs/mine-1").iterdir()} == {
        *("config.toml", "lock", "preparation.json", "environment.json", "history.jsonl"),
        *("checkpoints", "final.safetensors", "calibration.json"),
    }


def test_folders_are_numbered_or_named(home, run):
    for _ in range(2):
        run("run", "mine.toml", "rounds=1", "--quiet")
    run("run", "mine.toml", "rounds=1", "--quiet", "--folder", "elsewhere/here")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["mine-1", "mine-2"]
    assert final("runs/mine-1") == final("runs/mine-2") == final("elsewhere/here")


def test_quiet_prints_the_result_only(home, run):
    lines = run("run", "mine.toml", "--quiet").out.splitlines()
    assert lines[0].startswith("finished; ")
    assert lines[-1] == "run folder: runs/mine-1"
    assert not [line for line in lines if line.startswith(("round", "note"))]


def test_json_is_one_line_with_everything(home, run):
    result = json.loads(run("run", "mine.toml", "--json").out)
    assert (result["folder"], result["outcome"], result["rounds"]) == ("runs/mine-1", "finished", 6)
    last = records("runs/mine-1")[-1]
    assert result["test"] == last["test"]
    assert result["bytes_up"] == last["bytes_up"] > 0


def test_changes_take_effect_and_are_recorded(home, run):
    run("run", "mine.toml", "method.name=local_sgda", "primal_lr=0.25", "rounds=1", "--quiet")
    written = Path("runs/mine-1/config.toml").read_text()
    assert 'name = "local_sgda"' in written
    assert "primal_lr = 0.25" in written
    assert "stage_rounds" not in written


def test_notes_are_shown(home, run):
    text = site_text(1).replace(",f,", ",x,")
    Path("sites/north.csv").write_text(text)
    said = run("run", "mine.toml", "rounds=1").out
    assert "note: column 'sex' has the code 'x' at north and not at east, west" in said
    assert "note:" not in run("run", "mine.toml", "rounds=1", "--quiet").out


def test_a_warning_is_a_note(home, run):
    smoothed = ("method.name=fess_gda", "smoothing=50", "problem.name=auc", "rounds=1", "--quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = run("run", "mine.toml", *smoothed).err
    assert re.fullmatch(r"note: FESSGDA: in a round the anchor pulls x back by .*\n", said)


def test_a_run_that_stops_early_says_so_and_stays_stopped(home, run):
    said = run("run", "mine.toml", "rounds=500", "stop_early=1", "evaluate_every=1", "--quiet").out
    assert said.startswith("stopped early at round ")
    before = final("runs/mine-1")
    assert run("run", "runs/mine-1", "--resume", "--quiet").out == said
    assert final("runs/mine-1") == before


def test_a_run_that_diverges_says_where_and_fails(home, run):
    said = run(
        *("run", "mine.toml", "problem.score=raw", "proximal=0", "lr=1e30", "--quiet"), code=1
    ).out
    assert re.match(r"non-finite .* at round 0, client .*: lower the learning rate", said)


def test_another_folder_is_needed_for_another_run(home, run, refused):
    run("run", "mine.toml", "--quiet", "--folder", "here")
    before = final("here")
    said = refused("run", "mine.toml", "rounds=3", "--folder", "here")
    assert "here already holds a run" in said
    assert "--resume here" in said
    assert final("here") == before
    assert "rounds = 6" in Path("here/config.toml").read_text()


# --resume


def test_an_interrupted_run_goes_on_to_the_same_bytes(home, run, monkeypatch):
    run("run", "mine.toml", "--folder", "whole")
    said = interrupted(monkeypatch, run, "mine.toml", "--folder", "cut", after=5)
    assert said.err == "fedminimax: interrupted; a run goes on with --resume\n"
    assert not Path("cut/final.safetensors").exists()
    lines = run("run", "cut", "--resume").out.splitlines()
    assert lines[0].startswith("round 6/6")
    assert lines[-1] == "run folder: cut"
    assert final("cut") == final("whole")
    cut, whole = records("cut"), records("whole")
    for record in cut + whole:
        del record["seconds"]
    assert cut == whole


@pytest.mark.parametrize("after", [1, 2, 3])
def test_resume_finds_the_last_run_of_an_experiment(home, run, monkeypatch, after):
    run("run", "mine.toml", "--folder", "whole", "--quiet")
    interrupted(monkeypatch, run, "mine.toml", after=after)
    # A name that only begins alike belongs to another experiment.
    shutil.copytree("runs/mine-1", "runs/mine-too-1")
    said = run("run", "mine.toml", "--resume", "--quiet").out
    assert "run folder: runs/mine-1" in said
    assert final("runs/mine-1") == final("whole")


def test_resuming_a_finished_run_changes_nothing(home, run):
    first = run("run", "mine.toml", "--quiet").out
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    assert run("run", "runs/mine-1", "--resume", "--quiet").out == first
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_a_resumed_run_cannot_be_changed(home, run, refused):
    run("run", "mine.toml", "--quiet")
    assert "'rounds=9' cannot be changed" in refused("run", "mine.toml", "rounds=9", "--resume")
    assert "rounds = 6" in Path("runs/mine-1/config.toml").read_text()


def test_there_must_be_something_to_resume(home, run, refused):
    assert "there is no run of mine in runs/" in refused("run", "mine.toml", "--resume")
    assert "there is no config.toml in sites" in refused("run", "sites", "--resume")
    assert "no config.toml in no" in refused("run", "mine.toml", "--resume", "--folder", "no")


def test_the_checkpoint_of_another_experiment_is_refused(home, run, refused):
    run("run", "mine.toml", "--quiet")
    run("run", "mine.toml", "method.lr=0.3", "--quiet")
    shutil.rmtree("runs/mine-1/checkpoints")
    shutil.copytree("runs/mine-2/checkpoints", "runs/mine-1/checkpoints")
    said = refused("run", "runs/mine-1", "--resume")
    assert "are of another experiment" in said
    assert "resume with the settings of that run, or give another folder" in said


@pytest.mark.parametrize(
    "changes", [("seed = 0", "seed = 1"), ('"square"', '"margin"'), ("lr = 0.3", "lr = 0.2")]
)
def test_a_folder_whose_settings_were_edited_is_refused(home, run, refused, changes):
    run("run", "mine.toml", "method.lr=0.3", "--quiet")
    path = Path("runs/mine-1/config.toml")
    text = path.read_text()
    assert changes[0] in text
    path.write_text(text.replace(*changes))
    assert "config.toml is not as it was written" in refused("run", "runs/mine-1", "--resume")


def test_changed_data_are_another_experiment(home, run, refused):
    run("run", "mine.toml", "--quiet")
    Path("sites/east.csv").write_text(site_text(7))
    assert "of another experiment (other data" in refused("run", "runs/mine-1", "--resume")


@pytest.mark.filterwarnings("default")  # as a user sees them
def test_a_checkpoint_cut_in_half_is_named_and_the_one_before_it_serves(home, run):
    run("run", "mine.toml", "--quiet")
    whole = final("runs/mine-1")
    os.remove("runs/mine-1/final.safetensors")
    *_, last = sorted(Path("runs/mine-1/checkpoints").iterdir())
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    said = run("run", "runs/mine-1", "--resume", "--quiet").err
    assert f"note: {last} is damaged or cut short" in said
    assert "The run goes on from round-" in said
    assert final("runs/mine-1") == whole


def test_a_history_cut_in_the_middle_of_a_line_is_mended(home, run, monkeypatch):
    run("run", "mine.toml", "--folder", "whole", "--quiet")
    interrupted(monkeypatch, run, "mine.toml", "--folder", "cut", after=5)
    with open("cut/history.jsonl", "a") as file:
        file.write('{"round": 6, "gra')
    run("run", "cut", "--resume", "--quiet")
    assert [record["round"] for record in records("cut")] == [0, 2, 4, 6]
    assert final("cut") == final("whole")


def test_a_full_disk_ends_in_a_sentence_and_the_run_can_go_on(home, run, refused, monkeypatch):
    run("run", "mine.toml", "--folder", "whole", "--quiet")
    replace = os.replace

    def full(source, target):
        if Path(target).name == "round-0000006.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        said = refused("run", "mine.toml", "--folder", "cut")
    assert "could not write cut/checkpoints/round-0000006.safetensors: No space left" in said
    assert "Free some space and resume" in said
    assert not list(Path("cut/checkpoints").glob(".*"))
    run("run", "cut", "--resume", "--quiet")
    assert final("cut") == final("whole")


def test_a_disk_that_is_full_from_the_start_leaves_nothing(home, refused, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "could not write runs/mine-1/config.toml: No space" in refused("run", "mine.toml")


# compare


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "is nested too deeply; give tables of a few levels"),
        (MINE.replace('"codasca"', '"codasca"\nlr = 1' + "0" * 400), "lr has 1329 bits; give"),
        (
            MINE.replace('"codasca"', f'"codasca"\nlocal_steps = {10**30}'),
            "too large to compute with",
        ),
        (MINE + "[split]\ntrain = '" + "x" * 3_000_000 + "'", " letters) ... "),
    ],
)
def test_what_is_too_large_is_a_short_sentence(home, refused, text, sentence):
    Path("big.toml").write_text(text)
    said = refused("run", "big.toml")
    assert sentence in said
    assert len(said) < 3000


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError("Unable to allocate 8.00 EiB"), "more memory than there is"),
        (RecursionError("maximum"), "nested too deeply"),
        (OverflowError("int too large"), "too large to compute with"),
        (zlib.error("invalid block"), "a file is damaged"),
        (zipfile.BadZipFile("no zip"), "a file is damaged"),
        (RuntimeError("you can't allocate memory: tried 9 bytes"), "more memory than there is"),
    ],
)
def test_no_error_of_limits_ends_in_a_traceback(monkeypatch, refused, error, sentence):
    def fail(options):
        raise error

    monkeypatch.setattr("fedminimax.cli.list.command", fail)
    said = refused("list")
    assert sentence in said
    assert str(error) in said


def test_compare_ranks_by_validation_rows(home, run):
    for number, lr in enumerate(("1e-6", "0.5", "0.05"), start=1):
        run("run", "mine.toml", f"method.lr={lr}", "--quiet", "--folder", f"r{number}")
    history = {name: load(name).kept for name in ("r1", "r2", "r3")}
    ends = {name: records(name)[-1] for name in history}
    # Test rows must not decide: here they would decide otherwise.
    record = history["r1"] = ends["r1"]
    record["validation"]["auc"], record["test"]["auc"] = 0.01, 0.99
    Path("r1/history.jsonl").unlink()
    RunFolder("r1").append(record)
    order = sorted(history, key=lambda name: -history[name]["validation"]["auc"])
    assert order[-1] == "r1"
    shown = [
        json.loads(line) for line in run("compare", "r1", "r2", "r3", "--json").out.split("\n")[:-1]
    ]
    assert [entry["folder"] for entry in shown] == order
    assert shown[0]["validation"] == history[order[0]]["validation"]
    assert shown[0]["method"] == "codasca"
    lines = run("compare", "r1", "r2", "r3").out.splitlines()
    assert "auc (higher is better)" in lines[0]
    rows = [line.split() for line in lines if line.strip().startswith("r")][1:]
    assert [row[0] for row in rows] == order
    for row in rows:
        record = history[row[0]]
        assert row[1:5] == ["codasca", "auc", "linear", "6"]
        assert row[5:7] == [f"{record[split]['auc']:.4g}" for split in ("validation", "test")]
        assert row[7] == f"{record['test']['auprc']:.4g}"
        assert row[8] == "33.3%"
        assert row[9] == str(ends[row[0]]["gradients"])


def test_compare_refuses_different_rows(home, run, refused):
    run("run", "mine.toml", "--quiet", "--folder", "r1")
    run("run", "mine.toml", "split.seed=1", "--quiet", "--folder", "r2")
    run("run", "mine.toml", 'data.drop=["patient", "age"]', "--quiet", "--folder", "r3")
    said = refused("compare", "r1", "r2")
    assert "judged on different rows: split.seed is 0 in r1 and 1 in r2. Leave one out" in said
    assert "r2" in run("compare", "r1", "r2", "--anyway").out
    assert "r3" in run("compare", "r1", "r3").out  # other columns of the same rows


def test_lower_is_better_for_a_distance(home, run):
    quadratic = ROOT / "experiments" / "quadratic_codasca.toml"
    for rounds in (3, 9):
        run("run", quadratic, f"rounds={rounds}", "--quiet", "--folder", f"r{rounds}")
    said = run("compare", "r3", "r9").out
    assert "distance (lower is better)" in said
    assert said.index("r9") < said.index("r3")


def test_what_cannot_be_compared(home, run, refused):
    run("run", "mine.toml", "rounds=1", "--quiet")
    quadratic = ROOT / "experiments" / "quadratic_codasca.toml"
    run("run", quadratic, "rounds=1", "--quiet")
    said = refused("compare", "runs/mine-1", "runs/quadratic_codasca-1")
    assert "different metrics (auc, distance): compare like with like" in said
    assert "none of these is the folder of a finished run" in run("compare", "sites", code=2).err


def test_compare_leaves_out_what_is_unfinished_and_says_so(home, run, monkeypatch):
    run("run", "mine.toml", "--quiet")
    interrupted(monkeypatch, run, "mine.toml", after=3)
    Path("runs/demo-1").mkdir()
    said = run("compare", *sorted(Path("runs").iterdir()))
    assert "runs/mine-1" in said.out
    assert "runs/mine-2" not in said.out
    notes = said.err.splitlines()
    assert len(notes) == 2
    assert "note: left out: there is no config.toml in runs/demo-1" in notes[0]
    assert "runs/mine-2/final.safetensors" in notes[1]
    Path("runs/mine-1/history.jsonl").unlink()
    assert (
        "there is no record in runs/mine-1/history.jsonl"
        in run("compare", "runs/mine-1", code=2).err
    )


# list


@pytest.mark.parametrize(
    ("what", "section"),
    [("problems", "problem"), ("data", "data"), ("models", "model")],
)
def test_list_names_everything_with_a_sentence(run, what, section):
    lines = run("list", what).out.splitlines()
    assert lines[0].strip() == section
    entries = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert list(entries) == list(CHOICES[section])
    for sentence in entries.values():
        assert len(sentence) > 20
        assert sentence.endswith(".")


@pytest.mark.parametrize("terminal", [False, True])
def test_list_methods_fits_a_terminal(run, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    lines = run("list", "methods").out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {line.split()[0]: re.split(r"  +", line.strip()) for line in lines if line.strip()}
    assert set(METHODS) <= set(cells)
    assert cells["sagda"] == ["sagda", "minimax: nonconvex-PL", "2", "yes"]


def test_a_method_is_listed_with_all_that_it_costs(run):
    lines = [re.split(r"  +", line.strip()) for line in run("list", "sagda").out.splitlines()]
    cells = {line[0]: line[1] for line in lines if len(line) >= 2}
    expected = {
        "solves": "minimax: nonconvex-PL",
        "gradients per step": "1 + 1 a round",
        "exchanges": "2",
        "floats up": "2 (dx + dy)",
        "floats down": "2 (dx + dy)",
        "floats kept": "0",
        "partial": "yes",
        "reference": METHODS["sagda"].reference,
    }
    assert expected.items() <= cells.items()
    assert options_of(METHODS["sagda"], "method").items() <= cells.items()


def test_list_without_a_word_lists_all(run):
    said = run("list").out
    for names in CHOICES.values():
        for name in names:
            assert re.search(rf"^  {name} ", said, re.MULTILINE)


def test_a_command_that_lacks_something(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run"])
    assert ended.value.code == 2
    assert "usage: fedminimax run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "near"),
    [("rnu", "did you mean 'run'?"), ("--verison", "did you mean '--version'?"), ("xyz", "known:")],
)
def test_a_command_that_is_none(refused, given, near):
    said = refused(given)
    assert f"no command is called {given!r}; " in said
    assert near in said
    assert "demo, init, run, tune" in said


def test_alone_it_shows_a_short_help(run):
    said = run().out
    assert said == run("--help").out
    assert max(map(len, said.splitlines())) <= 80
    for name, told in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(told)}$", said, re.MULTILINE)


def test_every_command_is_a_module_and_every_module_a_command(capsys):
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py")}
    assert modules == {*cli.COMMANDS, "common", "web", "__init__"}
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: fedminimax {name}" in capsys.readouterr().out


# completion


@pytest.fixture
def completed(home, run, tmp_path):
    """What bash proposes for the last word of a line."""
    script = tmp_path / "completion.bash"
    script.write_text(run("completion", "bash").out)

    def call(*words):
        line = " ".join(f"'{word}'" for word in ("fedminimax", *words))
        told = (
            f"source '{script}'; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _fedminimax; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return call


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_files_and_keys(completed):
    assert completed("") == [*cli.COMMANDS]
    assert completed("re") == ["report", "reproduce"]
    assert completed("run", "") == ["mine.toml", "sites"]
    assert completed("run", "mine.toml", "run.ro") == ["run.rounds="]
    assert completed("run", "mine.toml", "method.server_l") == ["method.server_lr="]
    assert completed("run", "mine.toml", "--q") == ["--quiet"]
    assert completed("run", "mine.toml", "method.lr", "=", "0") == []
    assert completed("run", "mine.toml", "--folder", "") == []  # then bash completes any file
    assert completed("list", "codas") == ["codasca"]
    assert completed("data", "f") == ["fetch"]
    assert completed("data", "fetch", "cifar10") == ["cifar10", "cifar100"]
    assert completed("deploy", "run", "sites", "--po") == ["--policy"]
    assert completed("predict", "runs", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_read_its_script(run, shell, tmp_path):
    script = tmp_path / "script"
    script.write_text(run("completion", shell).out)
    for word in ("fedminimax", "*.toml" if shell != "fish" else "tune", "run.rounds=", "codasca"):
        assert word in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([shell, "-n", str(script)], check=True)


def test_one_name_is_listed_with_its_options(run):
    said = run("list", "codasca").out
    assert "*Differs from the paper*" in said
    assert re.search(r"^server_lr +1\.0", said, re.MULTILINE)
    assert "(needed)" in run("list", "folder").out


def test_a_name_that_nothing_has_is_refused_with_the_nearest(refused):
    assert "did you mean 'codasca'?" in refused("list", "codascaa")


def test_every_section_is_listed_with_types_and_meanings(run):
    said = run("list", "run").out
    assert re.search(r'^sampling +"epoch" +"epoch", "iid", "balanced" +batches', said, re.MULTILINE)
    assert re.search(
        r"^train +0\.6 +number +share of each site's rows", run("list", "split").out, re.M
    )
    assert "trimmed_mean" in run("list", "messages").out
    assert re.search(r"^norm +", run("list", "clip").out, re.MULTILINE)


def test_lists_as_json_have_every_key(run):
    told = json.loads(run("list", "--json").out)
    named = {(entry["section"], entry["name"]) for entry in told}
    assert {("run", ""), ("split", ""), ("messages", "clip")} <= named
    assert {(section, name) for section, kinds in CHOICES.items() for name in kinds} <= named
    (codasca,) = json.loads(run("list", "codasca", "--json").out)
    keys = {key["name"]: key["default"] for key in codasca["keys"]}
    assert keys == options_of(METHODS["codasca"], "method")
    assert {e["section"] for e in json.loads(run("list", "methods", "--json").out)} == {"method"}


def test_the_schema_describes_the_experiments_of_the_repository(run):
    """Each file's keys are known to the schema, and a mistyped one is not."""
    schema = json.loads(run("list", "--schema").out)

    def keys(section, name):
        part = schema["properties"][section]
        for choice in part.get("allOf", []):
            if choice["if"]["properties"]["name"]["const"] == name:
                part = choice["then"]
        assert part["additionalProperties"] is False
        return part

    for file in sorted((ROOT / "experiments").glob("*.toml")):
        table = tomllib.loads(file.read_text())
        for section, values in table.items() if "methods" not in table else ():
            known = keys(section, values.get("name"))
            assert {*values} <= {*known["properties"]}, file
            assert {*known.get("required", [])} <= {*values}, file
    assert "local_step" not in keys("method", "codasca")["properties"]


# init and doctor


def test_init_writes_an_experiment_that_runs(home, run):
    said = run("init", "sites").out
    assert re.search(r"^east +60 +33\.3%", said, re.MULTILINE)
    assert "'disease' is the label" in said
    assert "left out are 'patient': it has 180 different texts" in said
    assert said.endswith("go on with:  fedminimax run sites.toml\n")
    assert "# 'disease' is the label" in Path("sites.toml").read_text()
    assert "finished" in run("run", "sites.toml", "rounds=1", "--quiet").out
    assert "patient,score,probability,class" in run("predict", "runs/sites-1", "sites/east.csv").out


def test_init_has_the_settings_of_the_example():
    written = tomllib.loads(init.REST)
    example = tomllib.loads((ROOT / "experiments" / "my_sites.toml").read_text())
    assert written == {key: value for key, value in example.items() if key != "data"}


def one_file(*columns):
    """A table of 90 rows at three hospitals, in which a number counts the rows."""
    made = {
        "nr": lambda i: str(1000 + i),
        "hospital": lambda i: str(1 + i % 3),
        "dose": lambda i: "-" if i % 11 == 0 else f"{i * 0.37 % 5:.2f}",
        "stage": lambda i: str(1 + i % 4),
        "note": lambda i: f"text {i}",
        "outcome": lambda i: "bad" if i % 5 == 0 else "good",
        "sex": lambda i: "mf"[i // 3 % 2],
    }
    lines = [",".join(columns), *(",".join(made[c](i) for c in columns) for i in range(90))]
    return "\n".join(lines) + "\n"


def test_init_finds_sites_identifiers_codes_and_marks_in_one_file(home, run):
    text = one_file("nr", "hospital", "dose", "stage", "note", "sex", "outcome")
    Path("my patients.csv").write_text(text)
    said = run("init", "my patients.csv").out
    table = tomllib.loads(Path("my_patients.toml").read_text())
    assert table["data"]["partition"] == "column"
    assert table["data"]["column"] == "hospital"
    assert table["data"]["positive"] == "bad"
    assert table["data"]["drop"] == ["nr", "note"]
    assert "-" in table["data"]["missing"]
    assert '# categorical = ["stage"]' in Path("my_patients.toml").read_text()
    assert "'-' among numbers stand for missing values" in said
    assert "finished" in run("run", "my_patients.toml", "rounds=1", "--quiet").out


def test_init_does_what_it_is_told(home, run):
    Path("a.csv").write_text(one_file("hospital", "dose", "stage", "sex", "outcome"))
    asked = ["--label", "sex", "--positive", "m", "--site-column", "stage", "-o", "b.toml"]
    run("init", "a.csv", *asked)
    data = tomllib.loads(Path("b.toml").read_text())["data"]
    assert (data["label"], data["positive"], data["column"]) == ("sex", "m", "stage")
    Path("c.csv").write_text(one_file("dose", "stage", "outcome"))
    assert "rows are dealt out to 4 sites at random" in run("init", "c.csv").out
    run("init", "c.csv", "--label", "stage", "--force")
    assert tomllib.loads(Path("c.toml").read_text())["data"]["classes"] == "halves"
    assert "finished" in run("run", "c.toml", "rounds=1", "--quiet").out


def test_init_reads_npz_and_parquet(home, run):
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        Path("npz").mkdir(exist_ok=True)
        features = random.normal(size=(40, 3))
        np.savez(f"npz/{name}.npz", features=features, labels=np.arange(40) % 2)
    assert "finished" in (run("init", "npz"), run("run", "npz.toml", "rounds=1", "--quiet"))[1].out
    Path("tables").mkdir()
    for name in SITES:
        parquet.write_table(arrow_csv.read_csv(f"sites/{name}.csv"), f"tables/{name}.parquet")
    run("init", "tables")
    data = tomllib.loads(Path("tables.toml").read_text())["data"]
    assert data == {"name": "folder", "path": "tables", "label": "disease", "drop": ["patient"]}


def test_init_says_what_it_cannot_decide(home, run, refused):
    Path("a.csv").write_text(one_file("hospital", "dose", "outcome", "sex", "stage"))
    assert "sex" in refused("init", "a.csv", "--label", "sexx")
    assert "mean 'stage'?" in refused("init", "a.csv", "--site-column", "stag")
    Path("b.csv").write_text("x,z\n1,5\n2,6\n3,7\n")
    assert "Which column is the label? None has two" in refused("init", "b.csv")
    assert "--site-column is 'sex', but there are 3 files" in refused(
        "init", "sites", "--site-column", "sex"
    )
    assert "does not exist" in refused("init", "nowhere")
    run("init", "sites")
    assert "sites.toml is there already; give --force" in refused("init", "sites")


def test_doctor_tells_what_is_there(home, run, monkeypatch):
    said = run("doctor").out
    for what in ("Python", "torch", "C\\+\\+ compiler", "cores", "data sets", "plots", "nvflare"):
        assert re.search(rf"^{what} ", said, re.MULTILINE), what
    assert said.endswith("ready to run\n")
    monkeypatch.setattr("fedminimax.cli.doctor.missing_compiler", lambda: "none")
    assert "install g++ or clang" in run("doctor").out


def test_doctor_names_what_is_missing(home, run):
    Path("runs").write_text("no folder")
    assert "missing: run folder" in run("doctor", code=1).out


# predict


@pytest.fixture
def trained(home, run):
    run("run", "mine.toml", "--quiet")
    return Path("runs/mine-1")


def expected(trained, table):
    schema, standardiser = preparation(trained)
    rows = read_table(table, schema)
    features = torch.from_numpy(standardiser.transform(rows.features)).float()
    with torch.no_grad():
        return load(trained).module()(features).reshape(-1).numpy(), rows.labels


def test_predict_scores_every_line(trained, run):
    said = run("predict", trained, "sites/east.csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [int(row["line"]) for row in rows] == list(range(2, 62))
    outputs, labels = expected(trained, "sites/east.csv")
    scores = np.array([float(row["score"]) for row in rows])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-outputs)), atol=1e-6)
    auc = roc_auc_score(labels, outputs)
    assert auc > 0.7
    assert said.err == f"AUC on the 60 labelled rows: {auc:.4f}\n"


def test_predict_writes_who_each_row_is_and_the_class_at_an_operating_point(trained, run):
    def rows(*options):
        said = run("predict", trained, "sites/east.csv", *options)
        return list(csv.DictReader(io.StringIO(said.out)))

    (first, *_), half = rows(), rows()
    assert list(first) == ["line", "patient", "score", "probability", "class"]
    assert first["patient"] == "0-0"
    assert all((float(row["probability"]) > 0.5) == (row["class"] == "1") for row in half)
    order = sorted(half, key=lambda row: float(row["score"]))
    chances = [float(row["probability"]) for row in order]
    assert chances == sorted(chances)
    labels = [i % 3 == 0 for i in range(60)]
    many = [row["class"] == "1" for row in rows("--at", "sensitivity=0.95")]
    few = [row["class"] == "1" for row in rows("--at", "specificity=0.95")]
    assert sum(many) > sum(few)
    assert sum(m for m, label in zip(many, labels, strict=True) if label) >= 15
    assert "age" in rows("--id", "age")[0]
    calm = run("predict", trained, "sites/east.csv", "--at", "probability=0.9999")
    assert "note: no row counts as positive: with --at sensitivity=0.9" in calm.err


def test_predict_says_what_it_cannot_do(trained, run, refused, capsys):
    assert "--id is 'patien'" in refused("predict", trained, "sites/east.csv", "--id", "patien")
    for given, sentence in (("recall=0.5", "has no rate"), ("sensitivity=2", "between 0 and 1")):
        with pytest.raises(SystemExit):
            cli.main(["predict", str(trained), "sites/east.csv", "--at", given])
        assert sentence in capsys.readouterr().err
    os.remove(trained / "calibration.json")
    said = run("predict", trained, "sites/east.csv")
    assert said.out.startswith("line,patient,score\n")
    assert "note: scores only: the run has no calibration" in said.err


def test_predict_needs_neither_labels_nor_the_training_data(trained, run):
    with_labels = run("predict", trained, "sites/east.csv").out
    text = Path("sites/east.csv").read_text()
    shutil.rmtree("sites")
    Path("new.csv").write_text(re.sub(r",[^,]*$", "", text, flags=re.MULTILINE))
    said = run("predict", trained, "new.csv", "-o", "scores.csv")
    assert (said.out, said.err) == ("", "")
    assert Path("scores.csv").read_text() == with_labels


def test_columns_may_stand_in_another_order(trained, run):
    Path("a.csv").write_text("sex,marker,age\nm,1.5,60\nf,,50\n")
    Path("b.csv").write_text("age,patient,marker,sex\n60,x,1.5,m\n50,x,NA,f\n")
    assert run("predict", trained, "a.csv").out == run("predict", trained, "b.csv").out


def test_rows_of_one_class_have_no_auc(trained, run):
    Path("new.csv").write_text("age,sex,marker,disease\n60,m,1,1\n50,f,2,1\n")
    assert (
        "labelled rows: not defined: the labels are of one class"
        in run("predict", trained, "new.csv").err
    )


def test_a_large_output_does_not_tie(trained, run):
    """In single precision the sigmoid of all these outputs is 1."""

    def write(markers):
        lines = [f"50,m,{marker:.4f},{i % 2}" for i, marker in enumerate(markers)]
        Path("new.csv").write_text("\n".join(["age,sex,marker,disease", *lines]))
        return expected(trained, "new.csv")[0]

    at_0, at_1 = write([0, 1])
    outputs = write((np.array([20, 22, 24, 26]) - at_0) / (at_1 - at_0))
    np.testing.assert_allclose(outputs, [20, 22, 24, 26], atol=0.1)
    assert len(set(torch.sigmoid(torch.from_numpy(outputs)).tolist())) == 1
    assert run("predict", trained, "new.csv").err == "AUC on the 4 labelled rows: 0.7500\n"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            "age,Sexx\n60,m\n",
            ["lacks the columns 'sex', 'marker', which the model was trained on", "mean 'Sexx'?"],
        ),
        ("age,sex,marker\n60,q,1\n", ["new.csv, line 2: column 'sex' holds 'q'", "'f', 'm'"]),
        ("age,sex,marker\n60,m,high\n", ["column 'marker' holds 'high', but a number is needed"]),
        ("age,sex,marker\n60,m,inf\n", ["column 'marker' holds inf; a finite number is needed"]),
        ("age,sex,marker,disease\n60,m,1,2\n", ["the label 'disease' is '2'", "'0', '1'"]),
        ("age,sex,marker\n", ["new.csv has no rows; give at least one to score"]),
        ("", ["new.csv is empty"]),
    ],
)
def test_rows_that_do_not_fit_are_refused(trained, refused, text, sentences):
    Path("new.csv").write_text(text)
    said = refused("predict", trained, "new.csv")
    for sentence in sentences:
        assert sentence in said


def test_predict_needs_a_finished_run_on_tables(trained, run, refused):
    assert "There is no file 'no.csv'" in refused("predict", trained, "no.csv")
    assert "there is no config.toml in sites" in refused("predict", "sites", "sites/east.csv")
    assert "no/such" in refused("predict", trained, "sites/east.csv", "-o", "no/such/place.csv")
    quadratic = ROOT / "experiments" / "quadratic_codasca.toml"
    run("run", quadratic, "rounds=1", "--quiet")
    said = refused("predict", "runs/quadratic_codasca-1", "sites/east.csv")
    assert "was not trained on tables" in said
    os.truncate(trained / "final.safetensors", 100)
    said = refused("predict", trained, "sites/east.csv")
    assert "final.safetensors is damaged or cut short" in said
    os.remove(trained / "final.safetensors")
    assert "there is no file" in refused("predict", trained, "sites/east.csv")


def test_the_heart_data_are_scored_by_their_own_column_names(home, run):
    run("run", HEART, "rounds=1", "executor=vectorised", "--quiet")
    header = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal"
    Path("patients.csv").write_text(
        f"{header}\n63,1,1,145,233,1,2,150,0,2.3,3,0,6\n41,0,2,,,0,2,172,0,1.4,1,0,3\n"
    )
    lines = run("predict", "runs/heart_codasca-1", "patients.csv").out.splitlines()
    assert lines[0] == "line,score,probability,class"
    assert len(lines) == 3
    assert all(0 < float(line.split(",")[1]) < 1 for line in lines[1:])
    assert all(line.split(",")[3] in ("0", "positive") for line in lines[1:])


# Mistakes


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (["local_step=3"], ["no section has a key 'local_step'; did you mean 'local_steps'?"]),
        (["method.local_step=3"], ["[method] has no key 'local_step'", "mean 'local_steps'?"]),
        (["rounds=2.5"], ["[run] rounds is 2.5; give a whole number"]),
        (["rounds=0"], ["rounds is 0; give a whole number of at least 1"]),
        (["local_steps=0"], ["local_steps is 0; give a whole number of at least 1"]),
        (["lr=-1"], ["lr is -1.0; give a finite number of at least 0"]),
        (["batch_size=-1"], ["batch_size is -1; give at least 1"]),
        (["evaluate_every=0"], ["evaluate_every is 0; give a whole number of at least 1"]),
        (["checkpoint_every=-2"], ["checkpoint_every is -2; give a whole number of at least 1"]),
        (["stop_early=0"], ["stop_early is 0; give a whole number of at least 1"]),
        (["cohort=9"], ["9 clients per round were asked for, but there are 3"]),
        (["cohort=0"], ["cohort is 0; give a whole number of at least 1"]),
        (["cohort=2"], ["Codasca is defined for rounds in which all clients take part"]),
        (["method.name=fedavg"], ["FedAvg only minimises", "use a minimax method"]),
        (
            ["path=nowhere"],
            ["The folder 'nowhere' does not exist", "one CSV, Parquet or npz file per site"],
        ),
        (["label=outcome"], ["has no label column 'outcome'", "'age', 'sex', 'marker', 'disease'"]),
        (["data.drop=[]", "most_codes=20"], ["'patient' has 180 codes", "Name it in `drop`"]),
        (["sampling=balanced", "sampled_positives=2"], ["share between 0 and 1"]),
        (["split.validation=0"], ["The fractions are (0.6, 0.0, 0.2)", "add up to 1"]),
        (
            ["split.validation=0", "split.test=0.4", "stop_early=3"],
            ["stop_early needs validation rows"],
        ),
        (
            ["split.validation=0", "split.test=0.4", "run.target=0.8"],
            ["target needs validation rows"],
        ),
        (["model.hidden=[4]"], ["[model] has no key 'hidden'"]),
        (["problem.name=quadratic"], ["quadratic cannot be posed on [data] folder"]),
    ],
)
def test_a_bad_setting_ends_in_a_sentence_and_leaves_no_folder(home, refused, changes, sentences):
    said = refused("run", "mine.toml", *changes)
    for sentence in sentences:
        assert sentence in said
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize(
    ("text", "changes", "sentences"),
    [
        ("age,sex,marker\n60,m,1\n", [], ["no label column 'disease'", "Set `label` to one"]),
        (
            "patient,age,sex,marker,disease\n",
            [],
            ["Site 'north' has no rows", "or remove the file"],
        ),
        ("", [], ["north.csv is empty"]),
        (site_text(1, label=lambda i: i % 3), [], ["has the values '0', '1', '2'", "`positive`"]),
        (site_text(1, label=lambda i: ["no", "yes"][i % 2]), [], ["'no', 'yes'", "Set `positive`"]),
        (site_text(1, label=lambda i: ""), [], ["north.csv, line 2: the label 'disease' is missi"]),
        (re.sub(r"-0,[\d.]+", "-0,inf", site_text(1)), [], ["north.csv, line 2: column 'age' hol"]),
        (re.sub(r"-5,[\d.]+", "-5,old", site_text(1)), [], ["'age' is a number", "text 'old'"]),
        (
            site_text(1, label=lambda i: 0),
            ["sampling=balanced"],
            ["client north has rows of one class only", 'use sampling "epoch"'],
        ),
        (site_text(1, rows=1), [], ["Site 'north' has 1 rows, too few for", "set split."]),
        (site_text(1).replace("marker", "Marker"), [], ["column 'Marker' is at north and not at"]),
    ],
)
def test_bad_data_end_in_a_sentence_and_leave_no_folder(home, refused, text, changes, sentences):
    Path("sites/north.csv").write_text(text)
    said = refused("run", "mine.toml", *changes)
    for sentence in sentences:
        assert sentence in said
    assert not list(Path("runs").glob("*"))


def test_labels_of_one_class_everywhere_are_refused(home, refused):
    for number, name in enumerate(SITES):
        Path(f"sites/{name}.csv").write_text(site_text(number, label=lambda i: 1))
    assert "All rows of all 3 sites have the label 1; two classes" in refused("run", "mine.toml")


def test_a_column_without_any_value_is_refused(home, refused):
    for number, name in enumerate(SITES):
        text = re.sub(r"(,[fm]),[-\d.]*,", r"\1,NaN,", site_text(number))
        Path(f"sites/{name}.csv").write_text(text)
    said = refused("run", "mine.toml")
    assert "column 'marker' has no value at any site: name it in `drop`" in said


def test_nan_is_a_missing_value(home, run):
    run("run", "mine.toml", "--quiet")
    for name in SITES:
        path = Path(f"sites/{name}.csv")
        path.write_text(path.read_text().replace(",,", ",NaN,"))
    run("run", "mine.toml", "--quiet")
    assert final("runs/mine-1") == final("runs/mine-2")


def test_a_site_of_one_class_trains_along_and_is_named(home, run):
    Path("sites/north.csv").write_text(site_text(1, label=lambda i: 0))
    said = run("run", "mine.toml").out
    assert re.search(r"note: .*north", said)
    result = json.loads(run("run", "mine.toml", "--json").out)
    assert result["test"]["one_class_sites"] == ["north"]
    assert result["test"]["sites"]["north"] is None


def test_a_bad_file_ends_in_a_sentence(home, refused):
    assert "there is no file 'mien.toml'" in refused("run", "mien.toml")
    assert "sites cannot be read: Is a directory" in refused("run", "sites")
    Path("bad.toml").write_text("[run]\nrounds = = 3\n")
    assert "bad.toml is not valid TOML" in refused("run", "bad.toml")
    Path("bad.toml").write_text("rounds = 3\n" + MINE)
    assert "rounds = 3 stands outside the sections" in refused("run", "bad.toml")
    Path("bad.toml").write_text(MINE.replace("[problem]", "[problm]"))
    assert "unknown section [problm]; did you mean 'problem'?" in refused("run", "bad.toml")


def test_a_folder_that_cannot_be_made_ends_in_a_sentence(home, refused):
    assert "mine.toml" in refused("run", "mine.toml", "--folder", "mine.toml/here")


# The terminal


@pytest.mark.parametrize("stopped", [False, True])
def test_a_terminal_has_a_bar_and_its_cursor_back(home, run, capsys, monkeypatch, stopped):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    if stopped:
        said = interrupted(monkeypatch, run, "mine.toml", after=3).out
    else:
        said = run("run", "mine.toml").out
        assert "6/6" in said
        assert "validation auc" in said
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert hide in said
    assert said.rindex(show) > said.rindex(hide)


# demo


@pytest.mark.slow
def test_the_demonstration_prints_what_it_computed(home, run, monkeypatch):
    monkeypatch.setattr(demo, "ROUNDS", 2)
    monkeypatch.setenv("COLUMNS", "200")  # no cell is folded
    said = run("demo", "--splits", 2).out
    place = Path("runs/demo-1")
    found = json.loads((place / "results.json").read_text())
    tables = said.split("Test, ")[1:]
    assert len(tables) == len(found) == 2
    for text, (name, results) in zip(tables, found.items(), strict=True):
        assert text.startswith(name)
        rows = {
            cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
            for cells in (re.split("[│|]", line) for line in text.splitlines())
            if len(cells) == 6
        }
        assert [*rows] == [*results]
        for row, cells in rows.items():
            for cell, measure in zip(cells, demo.MEASURES, strict=True):
                values = [run[measure] for run in results[row]]
                mean, spread = statistics.mean(values), statistics.stdev(values)
                assert re.findall(r"\d\.\d{3}", cell) == [f"{mean:.3f}", f"{spread:.3f}"]
        # The numbers of the federated rows are those of the run folders, and so is the picture.
        for row, short in ((demo.AUTO, "auto"), (demo.FEDAVG, "fedavg")):
            folders = [place / name / f"split-{split}" / short for split in range(2)]
            assert [load(folder).kept["test"]["auc"] for folder in folders] == [
                run["auc"] for run in results[row]
            ]
        picture = ElementTree.parse(place / f"{name}.svg").getroot()
        dots = picture.findall("{http://www.w3.org/2000/svg}circle")
        assert len(dots) == 2 * sum(map(len, results.values()))  # AUC and AUPRC
    page = place / "report.html"
    assert said.rstrip().endswith(f"the federated runs as a page: {page}")
    assert "auto chose" in page.read_text(encoding="utf-8")


def test_one_split_shows_no_spread(home, refused):
    assert "splits is 1; give at least 2" in refused("demo", "--splits", 1)
    assert not Path("runs").exists()


# Real processes


def command(*arguments):
    return [sys.executable, "-m", "fedminimax", *map(str, arguments)]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(process):
    said, _ = process.communicate(timeout=300)
    return process.returncode, said.decode()


@pytest.mark.parametrize("words", [["--version"], ["--help"], [], ["rnu"]])
def test_help_does_not_wait_for_torch(words):
    told = "import sys; from fedminimax.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", told, *words], env=environment(), capture_output=True, text=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "fedminimax" in loaded
    assert not {"torch", "numpy", "rich", "sklearn"} & loaded


def test_public_names_are_loaded_when_asked_for():
    told = (
        "import sys, fedminimax as fm; assert 'torch' not in sys.modules; "
        "fm.AUC, fm.simulate; assert not {'sklearn', 'scipy', 'pyarrow'} & set(sys.modules); "
        "assert set(fm.__all__) <= set(dir(fm)); [getattr(fm, name) for name in fm.__all__]; "
        "from fedminimax import *; print(methods.LocalSGDA, hasattr(fm, 'no_such_name'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", told], env=environment(), capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("LocalSGDA'> False"), done.stderr


def test_a_mistake_in_a_real_process(home):
    done = subprocess.run(
        command("run", "mine.toml", "cohort=9"), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fedminimax: 9 clients per round were asked for")
    assert len(done.stderr.splitlines()) == 1


def test_a_limit_on_file_sizes_is_like_a_full_disk(home, run):
    run("run", "mine.toml", "--folder", "whole", "--quiet")
    limited = ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash"]
    done = subprocess.run(
        [*limited, *command("run", "mine.toml", "--folder", "cut")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "could not write cut/" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    run("run", "cut", "--resume", "--quiet")
    assert final("cut") == final("whole")


def wait_for(process, folder, round):
    """Until the run has written a checkpoint of this round or a later one."""
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        found = sorted((Path(folder) / "checkpoints").glob("round-*.safetensors"))
        if found and int(found[-1].stem.removeprefix("round-")) >= round:
            return
        assert process.poll() is None, ended(process)
        time.sleep(0.002)
    raise AssertionError(f"no checkpoint of round {round} in two minutes")


def kill(process):
    process.send_signal(signal.SIGKILL)
    code, _ = ended(process)
    assert code == -signal.SIGKILL


# Clients one by one: slow enough that a kill meets the run before its end.
KILLED = (HEART, "run.executor=debug", "run.checkpoint_every=5")


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(home):
    process = start("run", *KILLED, "run.rounds=40", "--folder", "cut")
    wait_for(process, "cut", 5)
    kill(process)
    assert not Path("cut/final.safetensors").exists()
    both = [
        start("run", "cut", "--resume"),
        start("run", *KILLED, "run.rounds=40", "--folder", "whole"),
    ]
    for process in both:
        code, said = ended(process)
        assert code == 0, said
    assert final("cut") == final("whole")


@pytest.mark.slow
def test_ctrl_c_finishes_the_round_and_says_how_to_go_on(home, run):
    # Clients one by one: slow enough that Ctrl-C meets the run before its end.
    settings = ("mine.toml", "executor=debug", "rounds=60", "checkpoint_every=1000")
    process = start("run", *settings, "--folder", "a cut")
    assert process.stdout is not None
    while not process.stdout.readline().startswith(b"round 0/60"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code == 130
    assert "finishing the round; Ctrl-C again stops at once" in said
    (left,) = Path("a cut/checkpoints").iterdir()
    round = int(left.stem.removeprefix("round-"))
    assert 0 < round < 60
    assert said.splitlines()[-1] == (
        f"fedminimax: interrupted after round {round}, of which there is a checkpoint; go on with: "
        "fedminimax run 'a cut' --resume"
    )
    assert not Path("a cut/final.safetensors").exists()
    run("run", "a cut", "--resume", "--quiet")
    run("run", *settings, "--folder", "whole", "--quiet")
    assert final("a cut") == final("whole")


@pytest.mark.parametrize("after", [1, 2, 5, 6])
def test_ctrl_c_after_any_round_goes_on_to_the_same_bytes(home, run, monkeypatch, after):
    run("run", "mine.toml", "--folder", "whole", "--quiet")
    with monkeypatch.context() as patch:
        pressed = lambda self, round: round == after and signal.raise_signal(signal.SIGINT)  # noqa: E731
        patch.setattr(RunProgress, "on_round", pressed)
        handler = signal.getsignal(signal.SIGINT)
        said = run("run", "mine.toml", "--folder", "cut", code=0 if after == 6 else 130)
        assert signal.getsignal(signal.SIGINT) is handler
    if after < 6:  # after the last round there is nothing to stop
        assert f"interrupted after round {after}, of which there is a checkpoint" in said.err
        run("run", "cut", "--resume", "--quiet")
    assert final("cut") == final("whole")
    cut, whole = records("cut"), records("whole")
    for record in cut + whole:
        del record["seconds"]
    assert cut == whole


def test_ctrl_c_twice_stops_at_once(home, run, monkeypatch):
    run("run", "mine.toml", "--folder", "whole", "--quiet")

    def pressed(self, round):
        if round == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "on_round", pressed)
        said = run("run", "mine.toml", "--folder", "cut", code=130)
    assert said.err.splitlines()[-1] == "fedminimax: interrupted; a run goes on with --resume"
    assert [path.name for path in Path("cut/checkpoints").iterdir()] == [
        "round-0000002.safetensors"
    ]
    run("run", "cut", "--resume", "--quiet")
    assert final("cut") == final("whole")


@pytest.mark.full
def test_a_run_killed_again_and_again_goes_on_to_the_same_bytes(home):
    """The experiment as it stands in the repository."""
    whole = start("run", HEART, "--folder", "whole")
    process = start("run", HEART, "--folder", "cut")
    for number, round in enumerate((20, 60, 100, 140, 180)):
        wait_for(process, "cut", round)
        time.sleep(0.013 * number)  # not always just after a checkpoint
        kill(process)
        assert not Path("cut/final.safetensors").exists()
        process = start("run", "cut", "--resume")
    assert ended(process)[0] == 0
    assert ended(whole)[0] == 0
    assert final("cut") == final("whole")
    assert [record["round"] for record in records("cut")] == list(range(0, 201, 20))


def test_a_profile_says_where_the_time_went(tmp_path, capsys):
    config = ROOT / "experiments" / "quadratic_codasca.toml"
    options = ["run.rounds=4", "run.evaluate_every=2", "run.executor=vectorised", "--quiet"]
    run = ["run", str(config), *options, "--folder"]
    assert cli.main([*run, str(tmp_path / "a"), "--profile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {line[2:50].split("  ")[0]: line.split() for line in lines if "%" in line}
    parts = {"local steps", "data", "averaging", "server step", "evaluation", "checkpoint", "other"}
    assert set(table) == parts
    assert sum(float(cells[-1]) > 0 for cells in table.values()) == len(parts)
    assert table["evaluation"][-3] == "3"
    assert table["local steps"][-3] == "4"
    assert cli.main([*run, str(tmp_path / "b")]) == 0
    assert "where the time went" not in capsys.readouterr().out
