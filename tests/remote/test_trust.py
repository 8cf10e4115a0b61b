"""What a curious server asks for, what a site tells it, and the log that the site keeps of it."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deployment import EXPERIMENTS, SITES, deployed, in_process

from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment, write_toml
from fedminimax.remote import audit
from fedminimax.remote.audit import AuditError, AuditLog
from fedminimax.remote.calls import Faults, SiteFailedError
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.rows import agree, told_moments
from fedminimax.remote.server import run_sites
from fedminimax.remote.site import Site
from fedminimax.remote.site_file import Limits, SiteFile
from fedminimax.remote.wire import Message, grouped, key_of

NAMES = ("hull", "york")


def write_rows(home, name):
    home.mkdir()
    random = np.random.default_rng(len(name))
    lines = ["age,ward,disease"]
    for i in range(60):
        ward = "icu" if i < 2 else "ab"[i % 2]
        lines.append(f"{30 + i + random.random():.1f},{ward},{i % 2}")
    (home / "rows.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def home(tmp_path):
    for name in NAMES:
        write_rows(tmp_path / name, name)
    return tmp_path


def site(home, name, **limits):
    data = {"path": "rows.csv", "label": "disease"}
    return Site(SiteFile(name, home / name, data, Limits(**limits)), log=lambda text: None)


def asked(**run):
    table = {
        "data": {"name": "folder", "path": "x", "label": "disease"},
        "model": {"name": "linear"},
        "problem": {"name": "auc"},
        "method": {"name": "codasca", "local_steps": 1},
        "run": {"rounds": 2, "batch_size": 10, "executor": "debug", **run},
    }
    return Experiment.from_table(table)


def play(home, which=None, change=None, **limits):
    """A run; `change` is a curious server's hand on what it sends to hull. Returns its calls."""
    sites = {name: site(home, name, **limits) for name in NAMES}
    heard = []

    def curious(content):
        message = Message.from_bytes(content)
        changed = message if change is None else change(message) or message
        heard.append((message, Message.from_bytes(sites["hull"].handle(changed.to_bytes()))))
        return heard[-1][1].to_bytes()

    handlers = {"york": sites["york"].handle, "hull": curious}
    which = asked() if which is None else which
    run_sites(which, InProcess(handlers), NAMES, home / "run", log=lambda text: None)
    return heard, sites["hull"]


def refused(home, match, which=None, change=None, **limits):
    with pytest.raises(SiteFailedError, match=match):
        play(home, which, change, **limits)


def test_a_run_under_the_default_limits_is_logged_call_by_call(home, capsys):
    heard, own = play(home)
    entries = AuditLog(home / "hull").entries()
    assert [entry["kind"] for entry in entries] == [m.about["kind"] for m, _ in heard]
    assert all(entry["answered"] and entry["run"] == "run" for entry in entries)
    assert {entry["rows"] for entry in entries if entry["kind"] == "phase"} == {36}
    assert [e["bytes"] for e in entries] == [len(reply.to_bytes()) for _, reply in heard]
    assert main(["deploy", "log", str(home / "nowhere")]) == 2
    assert "nowhere'; give that of a site" in capsys.readouterr().err
    assert main(["deploy", "log", str(home / "hull")]) == 0
    said = capsys.readouterr().out
    assert f"{len(heard)} lines, none edited or lost" in said
    assert "2 x phase (of 36 rows)" in said
    assert own.audit.answered("run", "phase") == 2


def test_batches_of_a_row_are_refused(home):
    refused(home, "batches of at least 10 rows, and batch_size is 1", asked(batch_size=1))
    refused(home, "of at least 3 rows", asked(batch_size=2), least_rows=1, least_batch=3)


def with_schema(change):
    def changed(message):
        setup = message.about.get("setup", {})
        if message.about["kind"] != "moments":
            return None
        about = json.loads(json.dumps({**message.about, "setup": setup}))
        change(about["setup"]["schema"])
        return message._replace(about=about)

    return changed


def test_ages_are_not_read_as_codes_so_that_each_is_counted(home):
    def as_codes(schema):
        ages = [f"{age / 10:.1f}" for age in range(300, 800)]
        schema["columns"][0] |= {"kind": "text", "codes": ages}

    refused(
        home, "'age' of the run is text, and at the site it is number", None, with_schema(as_codes)
    )


def test_values_are_not_named_missing_one_by_one(home):
    def mark(schema):
        schema["missing"].append("30.5")

    def mark_one(schema):
        schema["columns"][0]["missing"] = ["30.5"]

    refused(home, "labels or missing values of site 'hull' otherwise", None, with_schema(mark))
    refused(home, "has marks of its own", None, with_schema(mark_one))


def test_codes_are_not_left_out_and_labels_not_turned(home):
    def fewer(schema):
        schema["columns"][1]["codes"] = ["icu"]

    def turned(schema):
        schema["positive"], schema["negative"] = schema["negative"], schema["positive"]

    refused(home, "lacks codes that the site has", None, with_schema(fewer))
    refused(home, "reads the labels or missing", None, with_schema(turned))


def test_a_mark_of_few_rows_counts_as_none():
    features = np.zeros((20, 2))
    features[:3, 0], features[:6, 1] = 1.0, 1.0

    found = SimpleNamespace(splits={"train": SimpleNamespace(features=features)})
    few, enough = told_moments(found, None, 10, 5).T  # type: ignore[arg-type]
    assert few.tolist() == [20.0, 0.0, 0.0]
    assert enough.tolist() == [20.0, 6.0, 6.0]
    centred = told_moments(found, np.array([0.5, 0.5]), 10, 5)  # type: ignore[arg-type]
    assert centred[:, 0].tolist() == [20.0, -10.0, 5.0]


def test_planted_first_weights_are_refused(home):
    def plant(message):
        if message.about["kind"] != "phase":
            return None
        name = next(n for n in message.vectors if message.vectors[n].numel() > 1)
        planted = message.vectors[name].clone()
        planted[0] = 1e6  # a unit that fires for one row alone
        return message._replace(vectors={**message.vectors, name: planted})

    heard, _ = play(home, None, plant)
    assert heard[-1][1].about["kind"] == "refusal"
    assert "is not that of the model's own first weights" in heard[-1][1].about["reason"]


def test_a_question_is_answered_only_so_often(home):
    """By which edges could close in on every row."""
    heard, own = play(home, questions=3)
    message = next(m for m, _ in heard if m.about.get("question") == "histogram")
    already = own.audit.answered("run", "ask", "histogram")
    replies = [Message.from_bytes(own.handle(message.to_bytes())) for _ in range(40)]
    answered = [reply for reply in replies if reply.about["kind"] == "ask"]
    assert len(answered) == 3 * 5 - already
    assert "times, and no more often (questions in [limits]" in replies[-1].about["reason"]
    look = next(m for m, _ in heard if m.about["kind"] == "look")
    kinds = [Message.from_bytes(own.handle(look.to_bytes())).about["kind"] for _ in range(4)]
    assert kinds == ["look", "look", "refusal", "refusal"]
    # Another name for the run is another run, of which there are only so many.
    own.file = replace(own.file, limits=Limits(runs=1))
    other = look._replace(about={**look.about, "run": "another"})
    assert (
        "in at most 1 (runs in" in Message.from_bytes(own.handle(other.to_bytes())).about["reason"]
    )


@pytest.mark.parametrize("name", ["codasca", "levelwise"])
def test_the_log_alone_says_how_often_a_site_that_starts_again_has_answered(name, tmp_path):
    which = EXPERIMENTS[name]
    deployed(which, in_process(which, tmp_path), tmp_path)
    before = AuditLog(tmp_path / SITES[0]).answered("run", "phase")
    assert before == sum(e["kind"] == "phase" for e in AuditLog(tmp_path / SITES[0]).entries())
    assert before >= which.run.rounds


def test_a_log_that_was_edited_or_cut_answers_nothing(home):
    heard, own = play(home)
    content = own.audit.file.read_text()
    for wrong in (content.replace('"rows": 36', '"rows": 37', 1), content[: len(content) // 2], ""):
        own.audit.file.write_text(wrong)
        fresh = site(home, "hull")
        reply = Message.from_bytes(fresh.handle(heard[0][0].to_bytes()))
        assert "its own log says more" in reply.about["reason"]
        with pytest.raises(AuditError, match="was edited or cut"):
            fresh.audit.entries()
    own.audit.file.unlink()
    with pytest.raises(AuditError, match="was edited or cut"):
        site(home, "hull").audit.entries()
    own.audit.file.write_text(content)
    assert (
        Message.from_bytes(site(home, "hull").handle(heard[0][0].to_bytes())).about["kind"]
        == "look"
    )


def test_nothing_is_sent_while_the_log_cannot_be_written(home, monkeypatch):
    heard, own = play(home)
    before = own.audit.file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(audit.os, "fsync", full)
        reply = Message.from_bytes(own.handle(heard[1][0].to_bytes()))
    assert "it sends nothing" in reply.about["reason"]
    assert not reply.vectors
    assert own.audit.file.read_bytes() == before
    assert Message.from_bytes(own.handle(heard[1][0].to_bytes())).about["kind"] == "moments"
    assert os.path.getsize(own.audit.file) > len(before)


def test_limits_below_zero_are_sentences():
    with pytest.raises(ConfigError, match=r"\[limits\] least_rows is -1; give a number"):
        Limits(least_rows=-1)


def lying(which, home, kind, change, name="va"):
    """Sites of which one changes its replies to calls of a kind."""
    handlers = in_process(which, home).handlers
    honest = handlers[name]

    def lie(content):
        reply = Message.from_bytes(honest(content))
        return (change(reply) if reply.about["kind"] == kind else reply).to_bytes()

    return InProcess({**handlers, name: lie})


def test_a_site_that_claims_too_many_rows_is_named_before_training(tmp_path):
    which = EXPERIMENTS["codasca"]

    def claim(reply):
        sizes = {**reply.about["sizes"], "train": 2_000_000_000}
        return reply._replace(about={**reply.about, "sizes": sizes})

    transport = lying(which, tmp_path, "sizes", claim)
    with pytest.raises(ConfigError, match="site 'va' tells of 2000000000 training rows and would"):
        deployed(which, transport, tmp_path)


def test_sums_that_would_ruin_a_scale_are_named_before_training(tmp_path):
    which = EXPERIMENTS["codasca"]
    factors = torch.tensor([1.0, 1e4, 1e8], dtype=torch.float64)[:, None]

    def swell(reply):
        return reply._replace(vectors={"moments": reply.vectors["moments"] * factors})

    transport = lying(which, tmp_path, "moments", swell)
    with pytest.raises(ConfigError, match=r"site 'va' tells of values of .* in column 'age'"):
        deployed(which, transport, tmp_path)


def test_a_long_reply_is_refused_in_round_0_and_the_honest_sites_stay(tmp_path):
    which = EXPERIMENTS["controls"]

    def swell(reply):
        return reply._replace(vectors={n: 30 * v for n, v in reply.vectors.items()})

    told = []
    transport = lying(which, tmp_path, "phase", swell)
    run = run_sites(which, transport, SITES, tmp_path / "run", Faults("fail"), log=told.append)
    assert "site 'va' in round 0 is refused: its length is" in run.outcome
    assert "more than 10 times the median of this round" in run.outcome
    assert len(told) == 1


def test_invented_codes_and_labels_are_named_with_their_site():
    def outline(codes, labels):
        column = {
            "name": "ward",
            "kind": "text",
            "codes": codes,
            "drop_first": False,
            "missing": [],
        }
        options = {"label": "disease", "positive": ["1"], "classes": "two", "missing": []}
        return {"columns": [column], "empty": [], "labels": labels, "options": options}

    honest = outline(["a", "b"], ["0", "1"])
    many = [f"c{number}" for number in range(15_000)]
    with pytest.raises(
        ConfigError, match="15002 codes of column 'ward', 15000 of them at site 'b'"
    ):
        agree({"a": honest, "b": outline(many, ["0", "1"])})
    with pytest.raises(ConfigError, match="15002 values of the label, 15000 of them at site 'b'"):
        agree({"a": honest, "b": outline(["a"], many)})


def test_another_experiment_than_was_agreed_is_refused(home, capsys):
    file = home / "agreed.toml"
    file.write_text(write_toml(asked().to_table()))
    assert main(["deploy", "digest", str(home), str(file)]) == 0
    name, _, digest = capsys.readouterr().out.strip().partition(" = ")
    assert name == "agreed"

    def agreeing(which):
        sites = {name: site(home, name) for name in NAMES}
        sites["hull"].file = replace(sites["hull"].file, agreed={name: digest.strip('"')})
        handlers = {name: own.handle for name, own in sites.items()}
        place = home / f"run-{which.run.seed}"
        return run_sites(which, InProcess(handlers), NAMES, place, log=lambda text: None)

    assert agreeing(asked()).outcome == "finished"
    with pytest.raises(SiteFailedError, match="which site 'hull' has not agreed to"):
        agreeing(asked(seed=1))
    last = AuditLog(home / "hull").entries()[-1]
    assert not last["answered"]
    assert "has not agreed to" in last["why"]


def test_what_is_too_long_is_not_opened(home):
    _, own = play(home)
    own.file = replace(own.file, limits=Limits(megabytes=1))
    reply = Message.from_bytes(own.handle(b"x" * 1_000_001))
    assert "takes messages of at most 1 MB, and this has 1000001 bytes" in reply.about["reason"]
    which = EXPERIMENTS["controls"]
    handlers = in_process(which, home).handlers
    transport = InProcess({**handlers, "va": lambda content: b"x" * 40_000_000})
    with pytest.raises(SiteFailedError, match=r"site 'va' .* 40000000 bytes, where at most"):
        deployed(which, transport, home / "long")


def test_a_call_is_as_long_for_many_sites_as_for_few(tmp_path):
    which, lengths = EXPERIMENTS["controls"], set()

    class Weighed(InProcess):
        def call(self, sites, message, timeout):
            if Message.from_bytes(message).about["kind"] == "phase":
                lengths.add(len(Message.from_bytes(message)._replace(vectors={}).to_bytes()))
            return super().call(sites, message, timeout)

    deployed(which, Weighed(in_process(which, tmp_path).handlers), tmp_path)
    names = [f"site-{number}" for number in range(200)]
    many = grouped({name: [3, 0, "f" * 32] for name in names}, names)
    assert max(lengths) < 800
    assert len(json.dumps(many)) < 120
    assert [key_of(many, number) for number in (0, 199, 200)] == [[3, 0, "f" * 32]] * 2 + [None]


def test_records_tell_the_influence_of_each_site(tmp_path):
    which = EXPERIMENTS["codasca"]
    told = deployed(which, in_process(which, tmp_path), tmp_path).history[-1]["influence"]
    assert set(told) == set(SITES)
    assert sum(own["weight"] for own in told.values()) == pytest.approx(1.0)
    assert all(own["norm"] > 0 and -1 <= own["cosine"] <= 1 for own in told.values())
