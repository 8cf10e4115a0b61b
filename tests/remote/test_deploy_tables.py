"""Sites with tables of their own: they agree on columns, codes and labels as one folder would."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deployment import assert_same

from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment, Part
from fedminimax.experiment import load, preparation, run_experiment
from fedminimax.remote.calls import Faults, SiteFailedError, Sites
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.rows import agree
from fedminimax.remote.server import run_sites
from fedminimax.remote.setup import sent_experiment, set_up
from fedminimax.remote.site import Site
from fedminimax.remote.site_file import SiteFile
from fedminimax.remote.wire import Message

NAMES = ("hull", "leeds", "york")
SITE = """\
name = "{name}"
[data]
path = "rows.csv"
label = "disease"
positive = "yes"
drop = ["patient"]
[limits]
least_per_bin = 1
least_rows = 4
"""


def table(number):
    """A code that one site alone has, a column that one site has not filled, and a site without
    sick patients."""
    random = np.random.default_rng(number)
    lines = ["patient,age,ward,marker,disease"]
    for i in range(24):
        sick = i % 3 == 0 and number != 2
        ward = "icu" if number == 1 and i % 4 == 0 else random.choice(["a", "b"])
        marker = "" if number == 0 else f"{random.normal() + sick:.3f}"
        lines.append(
            f"{i},{60 + 9 * random.normal():.1f},{ward},{marker},{'yes' if sick else 'no'}"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture
def sites(tmp_path):
    (tmp_path / "pooled").mkdir()
    for number, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.csv").write_text(table(number))
        (tmp_path / name / "site.toml").write_text(SITE.format(name=name))
        shutil.copy(tmp_path / name / "rows.csv", tmp_path / "pooled" / f"{name}.csv")
    return tmp_path


def experiment(path, **split):
    folder = {"name": "folder", "path": str(path), "label": "disease", "positive": "yes"}
    return Experiment.from_table(
        {
            "data": {**folder, "drop": ["patient"]},
            "split": split,
            "model": {"name": "linear"},
            "problem": {"name": "auc"},
            "method": {"name": "codasca", "local_steps": 2},
            "run": {"rounds": 3, "batch_size": 4, "dtype": "float64", "executor": "debug"},
        }
    )


def test_tables_at_sites_give_what_one_folder_gives(sites):
    which = experiment(sites / "pooled")
    handlers = {name: Site.open(sites / name).handle for name in NAMES}
    run = run_sites(which, InProcess(handlers), NAMES, sites / "run", log=lambda text: None)
    alike = run_experiment(which, sites / "simulated")
    assert_same(run.point, alike.point)
    mine, theirs = (preparation(sites / folder) for folder in ("run", "simulated"))
    assert mine[0] == theirs[0]
    assert "ward=icu" in mine[0].features
    np.testing.assert_allclose(mine[1].mean, theirs[1].mean, rtol=1e-12)
    assert load(sites / "run").history[-1]["test"]["sites"]["york"] is None


@pytest.mark.parametrize("least", [1, 3])
def test_sites_encode_as_the_simulator_does(least, sites):
    which = experiment(sites / "pooled", bins=4, rare=3)
    which = replace(which, problem=Part("auc", {"least_per_bin": least}))
    handlers = {name: Site.open(sites / name).handle for name in NAMES}
    run = run_sites(which, InProcess(handlers), NAMES, sites / "run", log=lambda text: None)
    alike = run_experiment(which, sites / "simulated")
    assert_same(run.point, alike.point)
    (_, mine), (_, theirs) = (preparation(sites / folder) for folder in ("run", "simulated"))
    assert mine.to_json() == theirs.to_json()
    assert {"age bin 1", "ward=a", "marker: missing"} <= set(mine.outputs)


def test_counts_that_no_rows_have_are_refused(sites):
    which = experiment(sites / "pooled", bins=4, rare=3)
    site = Site.open(sites / "leeds")

    def liar(content):
        reply = Message.from_bytes(site.handle(content))
        if reply.about["kind"] == "counts":
            reply.vectors["counts"][0] = 0.5
        return reply.to_bytes()

    handlers = {name: Site.open(sites / name).handle for name in NAMES} | {"leeds": liar}
    with pytest.raises(SiteFailedError, match="its counts of values are from 0 to"):
        run_sites(which, InProcess(handlers), NAMES, sites / "run", log=lambda text: None)


@pytest.mark.parametrize("bins", [0, 4])
def test_new_rows_are_scored_by_a_run_of_sites(bins, sites, capsys):
    which = experiment(sites / "pooled", bins=bins, rare=3)
    handlers = {name: Site.open(sites / name).handle for name in NAMES}
    run_sites(which, InProcess(handlers), NAMES, sites / "run", log=lambda text: None)
    assert main(["predict", str(sites / "run"), str(sites / "hull" / "rows.csv")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 25
    file = sites / "hull" / "rows.csv"
    file.write_text(file.read_text() + "99,60,attic,1.5,no\n")  # a ward that training never saw
    assert main(["predict", str(sites / "run"), str(file)]) == (0 if bins else 2)
    assert ("'attic', which is not one of its codes" in capsys.readouterr().err) == (not bins)


def asked(site, kind, vectors=None, **about):
    message = Message({"kind": kind, "run": "run", **about}, vectors or {})
    return Message.from_bytes(site.handle(message.to_bytes()))


def test_rows_that_change_during_a_run_are_noticed(sites):
    which = experiment(sites / "pooled")
    handlers = {name: Site.open(sites / name).handle for name in NAMES}
    run_sites(which, InProcess(handlers), NAMES, sites / "run", log=lambda text: None)
    question = {"question": "loss", "split": "train"}
    file = sites / "hull" / "rows.csv"
    told = asked(Site.open(sites / "hull"), "phase", round=0).about["reason"]
    assert "KeyError" in told  # the call is none, but the rows are right
    lines = file.read_text().splitlines()
    lines[5] = lines[5].replace(",", ",1", 1)  # the patient's number stays, the age does not
    file.write_text("\n".join(lines))
    for kind, about in (("phase", {"round": 0}), ("ask", question)):
        told = asked(Site.open(sites / "hull"), kind, **about).about["reason"]
        assert told.startswith("the rows of site 'hull' are not those with which it began the run")


def test_sums_of_few_rows_do_not_leave_a_site(sites):
    file = sites / "leeds" / "rows.csv"
    lines = file.read_text().splitlines()
    for i, line in enumerate(lines[4:], 4):  # three values of the marker are left
        cells = line.split(",")
        lines[i] = ",".join([*cells[:3], "", cells[4]])
    file.write_text("\n".join(lines))
    site = Site.open(sites / "leeds")
    schema = agree({"leeds": site._held.outline()}).schema
    assert schema is not None
    table = divided(sent_experiment(experiment(sites / "pooled")), train=1.0)
    setup = {"experiment": table, "names": list(NAMES), "schema": schema.to_json()}
    moments = asked(site, "moments", setup=setup).vectors["moments"]
    sums = dict(zip(schema.features, moments.T, strict=True))
    assert sums["age"][0] == 24
    assert sums["marker"].tolist() == [0.0, 0.0, 0.0]


def divided(table, train, test=0.0):
    parts = {"train": train, "validation": 1.0 - train - test, "test": test}
    return table | {"split": table["split"] | parts}


@pytest.mark.parametrize("kind", ["moments", "sizes", "ask", "begin"])
def test_nothing_is_told_of_a_split_of_few_rows(kind, sites):
    handlers = {name: Site.open(sites / name).handle for name in NAMES}
    called = Sites(InProcess(handlers), NAMES, "run", Faults(), log=print)
    (setup, answers), _ = set_up(experiment(sites / "pooled"), called)
    question = {"question": "positive_share", "split": "train"} if kind == "ask" else {}
    vectors = answers if kind == "begin" else {}
    site = Site.open(sites / "hull")
    assert asked(site, kind, vectors, setup=setup, **question).about["kind"] == kind
    for few, split in {"train": {"train": 0.1}, "test": {"train": 0.6, "test": 0.1}}.items():
        other = setup | {"experiment": divided(setup["experiment"], **split)}
        told = asked(site, kind, vectors, setup=other, **question).about["reason"]
        assert re.search(f"tells of at least 4 rows together, and has [1-3] {few} rows", told)


def test_a_site_that_came_to_want_more_rows_takes_no_further_part(sites):
    which = experiment(sites / "pooled")
    handlers = {name: Site.open(sites / name).handle for name in NAMES}
    run_sites(which, InProcess(handlers), NAMES, sites / "run", log=lambda text: None)
    file = sites / "hull" / "site.toml"
    file.write_text(file.read_text().replace("least_rows = 4", "least_rows = 9"))
    for kind, about in (("phase", {"round": 0}), ("ask", {"question": "loss", "split": "train"})):
        told = asked(Site.open(sites / "hull"), kind, **about).about["reason"]
        assert re.search("tells of at least 9 rows together, and has [1-8] validation rows", told)


def outline(columns, **changes):
    options = {"label": "disease", "positive": "", "classes": "two", "missing": [""]}
    listed = [{"name": n, "kind": kind, "codes": codes} for n, kind, codes in columns]
    found = {"columns": listed, "empty": [], "labels": ["0", "1"], "options": options}
    return found | changes


AGE, WARD = ("age", "number", []), ("ward", "text", ["a"])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (outline([AGE]), "column 'ward' is at hull and not at leeds"),
        (outline([WARD, AGE]), "the order: hull has 'age' where leeds has 'ward'"),
        (outline([AGE, ("ward", "number", [])]), "is a number at leeds and text at hull"),
        (outline([AGE, WARD], labels=["maybe"]), "has the values '0', '1', 'maybe'"),
        ({"facts": {"dimension": 3}}, "hold data of different kinds"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused(other, sentence):
    with pytest.raises(ValueError, match=sentence):
        agree({"hull": outline([AGE, WARD]), "leeds": other})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[data]\nname = 'heart'", "has no name"),
        ("name = 'va'", r"no section \[data\]"),
        ("name = 'va'\nlimit = 3\n[data]\nname = 'heart'", "no key 'limit'; did you mean 'limits'"),
        ("name = 'va'\n[data]\nname = 'heart'\n[limits]\nround = 3", "no key 'round'"),
        ("name = 'va'\n[data]\nname = 'heart'\n[allow]\nmodel = 'x'", "write SECTION.NAME"),
        ("name = 'va'\n[data]\nname = 'heart'\n[allow]\nmodel.x = 5", "write SECTION.NAME"),
        ("name = 'va'\nallow = 'x'\n[data]\nname = 'heart'", r"make it a section, \[allow\]"),
        ("name = 'va'\nlimits = 5\n[data]\nname = 'heart'", r"make it a section, \[limits\]"),
    ],
)
def test_a_site_file_that_cannot_be_used_says_why(text, sentence, tmp_path):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        SiteFile.read(tmp_path)


@pytest.mark.parametrize(
    "action",
    ["init", "join", "approve", "server", "site", "run", "status", "stop", "measure", "flower"],
)
def test_each_command_has_an_example(action, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["deploy", action, "--help"])
    assert ended.value.code == 0
    assert f"example:\n  fedminimax deploy {action} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("init", "c", "--sites", "a,a"), "each its own name"),
        (("init", "c", "--sites", "a/b"), "use letters, digits"),
        (("status", "nowhere"), "make the consortium first"),
        (("site", "nowhere"), "there is no file"),
        (("join", "va"), "give --invitation to make a request"),
    ],
)
def test_commands_that_cannot_be_carried_out_say_why(
    arguments, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("c").exists()
