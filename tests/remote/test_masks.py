"""Masked runs between sites: the bits of the simulation, and no message for a server to read."""

import resource
import shutil
import signal
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from deployment import (
    EXPERIMENTS,
    HEART,
    LEVELS,
    NETWORK,
    RANGES,
    SHORT,
    SITES,
    TWO_LEVELS,
    acquainted,
    at_sites,
    data_of,
    deployed,
    experiment,
    in_process,
    one_of_each,
    site_file,
    write_site,
)
from rows import federation_of
from scipy import stats

from fedminimax.blocks.trees import flat
from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.experiment import run_experiment
from fedminimax.messages import Masked, Messages
from fedminimax.remote.calls import Faults, SiteFailedError
from fedminimax.remote.flower.runs import answered
from fedminimax.remote.identity import Identity, spoken
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.ledger import Ledger
from fedminimax.remote.masking import MaskError, SentLog
from fedminimax.remote.server import check_experiment
from fedminimax.remote.site import Site
from fedminimax.remote.site_file import SiteFile
from fedminimax.remote.wire import Message

ONLY = {"messages": {"reduce": "masked"}}
TABLE = {"name": "folder", "label": "ill"}


def masked(which: Experiment, **sections) -> Experiment:
    return Experiment.from_table(which.to_table() | ONLY | sections)


CODASCA = masked(EXPERIMENTS["codasca"])
RUNS = {
    "codasca": CODASCA,
    # sites tell their shares of positives, in single precision
    "telling": masked(
        experiment(HEART, "auc", {"name": "codasca", **SHORT}, rounds=3, dtype="float32"),
        problem={"name": "auc"},
        split={},
    ),
    "bins": masked(CODASCA, split={"bins": 4, "positive_share": 0.2}),
    "local_scgdam": masked(EXPERIMENTS["local_scgdam"]),
    # phases that carry states, and kills within a round
    "levelwise": masked(experiment(LEVELS, TWO_LEVELS, {"name": "levelwise_dr_scgd"}, rounds=3)),
    "groups": masked(experiment(HEART, "fair", {"name": "fess_gda", **SHORT}, rounds=3, cohort=3)),
}

FAST = ("telling", "levelwise")


def assert_same_bits(found, expected):
    for mine, theirs in zip(flat(found), flat(expected), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_a_masked_run_has_the_bits_of_its_simulation(name, tmp_path):
    run = deployed(RUNS[name], in_process(RUNS[name], tmp_path), tmp_path)
    assert run.outcome == "finished"
    assert_same_bits(run.point, run_experiment(RUNS[name]).point)
    assert "sites" not in run.history[-1].get("test", {})  # no site's own measure


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in one_of_each()])
def test_every_method_that_is_not_refused_has_the_bits_of_the_simulation(row, tmp_path):
    if not row.algorithm.robust:
        pytest.skip("refused: each client has an entry of its own in the sum")
    clients = row.clients()
    some = len(clients) - 1 if row.algorithm.partial and len(clients) > 3 else len(clients)
    federation, state, store = federation_of(row.problem(), row.algorithm, clients, cohort=some)
    federation = replace(federation, messages=Messages(reducer=Masked(64)))
    remote, mine, theirs = at_sites(federation, tmp_path), state, state
    for _ in range(3):
        mine = play_round(remote, mine, type(store)(()), Debug())
        theirs = play_round(federation, theirs, store, Debug())
    assert_same_bits(mine.server, theirs.server)


def test_noise_for_rows_goes_under_the_masks_and_what_is_sent_again_is_the_same(tmp_path):
    """The share of positives and the steps have noise, which follows from the site's secret."""
    which = masked(
        experiment(HEART, "auc", {"name": "codasca", **SHORT}, rounds=2, batch_size=0),
        problem={"name": "auc"},
        split={"train": 0.8, "validation": 0.0, "ranges": RANGES},
        privacy={"level": "record", "epsilon": 3.0},
    )
    transport, sent = in_process(which, tmp_path), []

    def twice(name, content):
        first, second = (transport.handlers[name](content) for _ in range(2))
        sent.append(first == second)
        return first

    sites = {n: partial(twice, n) for n in SITES}
    run = deployed(which, InProcess(sites), tmp_path)
    assert run.outcome == "finished"
    assert all(sent)
    plain = run_experiment(masked(which, privacy={})).point
    assert 0 < (run.point.x - plain.x).norm() < 100  # noise, and not what masks leave
    assert Ledger(tmp_path / "va").spent()[0].calls == 3  # two rounds and the question


def test_on_flower_each_call_opens_the_site_anew(tmp_path):
    which = EXPERIMENTS["masked"]
    acquainted(tmp_path)
    for name in SITES:
        write_site(tmp_path / name, data_of(which))
    sites = {n: partial(answered, {"site": str(tmp_path / n)}) for n in SITES}
    run = deployed(which, InProcess(sites), tmp_path)
    assert_same_bits(run.point, run_experiment(which).point)


# What the server's side gets


def write_table(file: Path, seed: int) -> None:
    """Two columns, one of large values; only `ill` is the same with every seed."""
    rng = np.random.default_rng(seed)
    lines = [f"{rng.normal():.17g},{1e6 * rng.normal():.17g},{i % 2}" for i in range(40)]
    file.write_text("age,income,ill\n" + "\n".join(lines) + "\n")


def table_site(home: Path, name: str, seed: int, peers: dict) -> Site:
    write_table(home / name / "rows.csv", seed)
    data = {**TABLE, "path": "rows.csv"}
    return Site(site_file(name, home, data, peers=peers), log=lambda text: None)


@cache
def watched(home: Path) -> list[tuple[str, Message, Message, Message]]:
    """A run of tables with all that went in and out: of each call, the site, what it was asked,
    what it replied, and what it would have replied with other rows."""
    peers, found = acquainted(home), []
    real = {n: table_site(home, n, seed, peers[n]) for seed, n in enumerate(SITES)}
    for name in SITES:
        shutil.copytree(home / name, home / "others" / name)
    other = {n: table_site(home / "others", n, 9 + k, peers[n]) for k, n in enumerate(SITES)}

    def handler(name, content):
        reply = real[name].handle(content)
        asked = Message.from_bytes(content)
        if asked.about["kind"] == "keys":  # the masks are to be the same too
            folder = home / "others" / name / "runs" / "run"
            folder.mkdir(parents=True)
            shutil.copy(home / name / "runs" / "run" / "masks.sqlite", folder)
        would = Message.from_bytes(other[name].handle(content))
        found.append((name, asked, Message.from_bytes(reply), would))
        return reply

    sites = {name: lambda content, name=name: handler(name, content) for name in SITES}
    run = deployed(TABLES, InProcess(sites), home)
    assert run.outcome == "finished"
    assert_same_bits(run.point, run_experiment(simulated_tables(home)).point)
    return found


TABLES = masked(
    experiment(HEART, "auc", {"name": "codasca", **SHORT}, rounds=2),
    data={**TABLE, "path": "nowhere"},
    problem={"name": "auc", "least_per_bin": 1},
    split={},
)


def simulated_tables(home: Path) -> Experiment:
    folder = home / "all"
    folder.mkdir()
    for name in SITES:
        shutil.copy(home / name / "rows.csv", folder / f"{name}.csv")
    return masked(TABLES, data={**TABLE, "path": str(folder)}, messages=ONLY["messages"])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return watched(tmp_path_factory.mktemp("seen"))


# Of a reply: what stands beside the vectors. Names of columns, their codes, and numbers of rows are
# public; a digest is of the call.
TOLD = {
    "look": {"kind", "run", "site", "version", "least_per_bin", "outline"},
    "keys": {"kind", "run", "site", "offer"},
    "moments": {"kind", "run", "site"},
    "sizes": {"kind", "run", "site", "sizes", "columns"},
    "ask": {"kind", "run", "site", "question"},
    "begin": {"kind", "run", "site"},
    "phase": {"kind", "run", "site", "round", "phase", "digest"},
}


def form_of(message):
    return {name: (vector.shape, vector.dtype) for name, vector in message.vectors.items()}


def test_all_that_a_server_gets_is_listed_and_depends_on_no_row_but_for_masked_words(seen):
    kinds = {}
    for _, asked, reply, would in seen:
        kind = asked.about["kind"]
        assert reply.about == would.about
        assert set(reply.about) == TOLD[kind]
        assert form_of(reply) == form_of(would)
        kinds.setdefault(kind, []).append(reply)
        if reply.vectors:
            assert kind in ("moments", "ask", "phase")
        if kind == "moments":  # the masks are the same, the rows are not
            assert not torch.equal(reply.vectors["moments"], would.vectors["moments"])
    assert set(kinds) == set(TOLD)
    assert {r.about["question"] for r in kinds["ask"]} >= {"positive_share", "histogram", "loss"}


@pytest.mark.parametrize("kind", ["moments", "ask", "phase"])
def test_masked_words_are_uniform(kind, seen):
    replies = [reply for _, asked, reply, _ in seen if asked.about["kind"] == kind]
    parts = [v.numpy().view("u8").ravel() for reply in replies for v in reply.vectors.values()]
    words = np.concatenate(parts)
    assert len(words) > 100
    counts = np.bincount(words.view("u1"), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-6
    assert stats.kstest(words / 2.0**64, "uniform").pvalue > 1e-6


def test_no_two_messages_share_a_mask(seen):
    """Neither the sum nor the difference of two messages tells more than the two."""
    replies = [reply for _, asked, reply, _ in seen if asked.about["kind"] == "phase"]
    phases = [reply.vectors["x"].numpy().view("u8") for reply in replies]
    for i, one in enumerate(phases):
        for other in phases[:i]:
            for pair in (one - other, one + other):
                assert stats.kstest(pair / 2.0**64, "uniform").pvalue > 1e-9


# Keys


class AskedError(Exception):
    pass


def call_of(which, home, kind):
    """The sites of a run, and the first call of that kind, which nobody has answered yet."""
    transport = in_process(which, home)

    def watch(content):
        if Message.from_bytes(content).about["kind"] == kind:
            raise AskedError(content)
        return transport.handlers[SITES[0]](content)

    with pytest.raises(AskedError) as caught:
        deployed(which, InProcess({**transport.handlers, SITES[0]: watch}), home)
    return transport.handlers, Message.from_bytes(caught.value.args[0])


def refused(handler, message):
    reply = Message.from_bytes(handler(message.to_bytes()))
    assert reply.about["kind"] == "refusal"
    return reply.about["reason"]


def offer_of(name, home, run, setup):
    site = site_file(name, home, HEART, peers=acquainted(home)[name])
    message = Message({"kind": "keys", "run": run, "setup": setup}, {})
    return Message.from_bytes(Site(site).handle(message.to_bytes())).about["offer"]


def wrong_keys(home, setup):
    """For each way in which the key of hungary can be wrong: the offer, and what is said."""
    good, fresh = setup["keys"]["hungary"], home / "mallory"
    (fresh / "hungary").mkdir(parents=True)
    unsigned = {**good, "key": offer_of("hungary", home, "another", setup)["key"]}
    forged = offer_of("hungary", fresh, "run", setup)
    replayed = offer_of("hungary", home, "run", {**setup, "id": 32 * "0"})
    not_signed = "the key of site 'hungary' is not signed for this run"
    return {
        "unsigned": ({**good, "signature": 128 * "0"}, not_signed),
        "another's key": ({**unsigned, "key": setup["keys"]["va"]["key"]}, not_signed),
        "of another run's name": (offer_of("hungary", home, "another", setup), not_signed),
        "of another run": (replayed, not_signed),
        "of another identity": (forged, "who signs as site 'hungary' has the fingerprint"),
        "another site's": (setup["keys"]["va"], "who signs as site 'hungary' has the fingerprint"),
        "none": ({"key": good["key"]}, "tells a key of each site, and this one does not"),
    }


def test_a_key_that_is_wrong_in_any_way_is_refused_by_name(tmp_path):
    handlers, message = call_of(CODASCA, tmp_path, "moments")
    setup = message.about["setup"]
    for offer, sentence in wrong_keys(tmp_path, setup).values():
        changed = {**setup, "keys": {**setup["keys"], "hungary": offer}}
        told = refused(handlers["va"], message._replace(about=message.about | {"setup": changed}))
        assert sentence in told
    mine = {**setup, "keys": {**setup["keys"], "va": setup["keys"]["hungary"]}}
    told = refused(handlers["va"], message._replace(about=message.about | {"setup": mine}))
    assert "not the one that it has made" in told
    assert Message.from_bytes(handlers["va"](message.to_bytes())).about["kind"] == "moments"


def test_who_is_not_pinned_takes_no_part_and_all_who_are_do(tmp_path):
    handlers, message = call_of(CODASCA, tmp_path, "moments")
    setup = message.about["setup"]
    for names in (SITES[:3], (*SITES, "leeds"), (*SITES[1:], "va"), "va", None):
        other = {**setup, "names": names if names is None else [*names]}
        for kind in ("keys", "moments"):
            about = message.about | {"setup": other, "kind": kind}
            told = refused(handlers["va"], message._replace(about=about))
            assert "all who are pinned take part" in told
    lone = Site(site_file("va", tmp_path / "lone", HEART, peers={"hungary": "sha256:" + 64 * "0"}))
    Identity.made(tmp_path / "va")
    shutil.copytree(tmp_path / "va", tmp_path / "lone" / "va")
    two = {**setup, "names": ["va", "hungary"]}
    told = refused(lone.handle, message._replace(about=message.about | {"setup": two}))
    assert "at least 3" in told


def test_a_site_without_an_identity_says_how_to_make_one(tmp_path):
    peers = acquainted(tmp_path)
    (tmp_path / "va" / "identity.key").unlink()
    sites = {n: Site(site_file(n, tmp_path, HEART, peers=peers[n])).handle for n in SITES}
    with pytest.raises(SiteFailedError, match=r"no identity.*fedminimax deploy peers"):
        deployed(CODASCA, InProcess(sites), tmp_path)


def test_a_site_trusts_no_sizes_of_the_server_that_would_give_it_another_weight(tmp_path):
    handlers, message = call_of(RUNS["telling"], tmp_path, "ask")
    setup = message.about["setup"]
    sizes = {**setup["sizes"], "train": [*setup["sizes"]["train"][:3], 10**9]}
    about = message.about | {"setup": {**setup, "sizes": sizes}}
    assert "tells all of 1000000000" in refused(handlers["va"], message._replace(about=about))


@pytest.mark.parametrize("how", [None, "each"])
def test_no_question_is_answered_by_one_site_alone(how, tmp_path):
    handlers, message = call_of(RUNS["telling"], tmp_path, "ask")
    about = {name: value for name, value in message.about.items() if name != "how"}
    about |= {} if how is None else {"how": how}
    assert "takes part in means and sums of all" in refused(
        handlers["va"], message._replace(about=about)
    )


def test_a_site_that_is_not_in_the_cohort_of_a_phase_sends_nothing(tmp_path):
    which = EXPERIMENTS["masked_cohort"]
    handlers, message = call_of(which, tmp_path, "phase")
    told = [Message.from_bytes(handlers[n](message.to_bytes())).about for n in SITES]
    (reason,) = [about["reason"] for about in told if about["kind"] == "refusal"]
    assert "masks need it and at least two others" in reason


# One message under one mask


def test_a_site_answers_one_call_for_each_phase_also_after_a_kill(tmp_path):
    handlers, message = call_of(CODASCA, tmp_path, "phase")
    peers, va = acquainted(tmp_path), handlers["va"]
    first = va(message.to_bytes())
    assert Message.from_bytes(first).about["kind"] == "phase"

    def restarted():
        return Site(site_file("va", tmp_path, HEART, peers=peers["va"])).handle

    moved = message._replace(vectors={n: v + 1e-9 for n, v in message.vectors.items()})
    clock = message.about["clock"]
    later = message._replace(about=message.about | {"clock": {**clock, "iteration": 5}})
    for handler in (va, restarted()):
        for other in (moved, later):
            assert "one call for each phase" in refused(handler, other)
        assert handler(message.to_bytes()) == first
    # The states are lost, and are computed again.
    for state in (tmp_path / "va" / "runs" / "run").glob("state-*"):
        state.unlink()
    assert restarted()(message.to_bytes()) == first
    again = message._replace(about=message.about | {"again": ["va"], "call": [1, 99]})
    assert restarted()(again.to_bytes()) == first
    # Who deletes what was sent has deleted the key too.
    (tmp_path / "va" / "runs" / "run" / "masks.sqlite").unlink()
    assert "not the one that it has made" in refused(restarted(), moved)


def test_a_killed_site_sends_the_same_or_nothing(tmp_path, monkeypatch):
    """Killed after the call was noted, and after what it sends was."""
    handlers, message = call_of(CODASCA, tmp_path, "phase")
    sent = SentLog.send

    def dies(log, run, at, digest):
        if not at.startswith("round 0"):
            return sent(log, run, at, digest)
        if len(deaths) > 1:
            sent(log, run, at, digest)
        raise ConnectionError(deaths.pop())

    deaths = ["after", "before"]
    monkeypatch.setattr(SentLog, "send", dies)
    for _ in range(2):
        assert Message.from_bytes(handlers["va"](message.to_bytes())).about["kind"] == "refusal"
    monkeypatch.setattr(SentLog, "send", sent)
    moved = message._replace(vectors={n: v + 1e-9 for n, v in message.vectors.items()})
    assert "one call for each phase" in refused(handlers["va"], moved)
    assert Message.from_bytes(handlers["va"](message.to_bytes())).about["kind"] == "phase"


def test_the_same_call_with_other_numbers_is_not_sent(tmp_path):
    log = SentLog(tmp_path)
    log.call("a", "round 0, phase 0", "call")
    log.send("a", "round 0, phase 0", "numbers")
    log.send("a", "round 0, phase 0", "numbers")
    with pytest.raises(MaskError, match="has now come to other numbers"):
        log.send("a", "round 0, phase 0", "others")
    log.call("another run", "round 0, phase 0", "another call")
    assert log.secret("a") == SentLog(tmp_path).secret("a") != log.secret("b")
    assert (tmp_path / "masks.sqlite").stat().st_mode & 0o77 == 0


def test_with_a_full_disk_nothing_is_sent(tmp_path):
    log = SentLog(tmp_path)
    log.secret("a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
        with pytest.raises(MaskError, match=r"cannot be written down .* nothing is sent"):
            log.call("a", "round 0, phase 0", "call")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.call("a", "round 0, phase 0", "another")  # nothing is left of the first


def test_a_number_out_of_range_is_told_without_the_number(tmp_path):
    which = Experiment.from_table(
        CODASCA.to_table() | {"method": {"name": "codasca", "lr": 1e4, **SHORT}}
    )
    outcome = deployed(which, in_process(which, tmp_path), tmp_path).outcome
    assert "too large for a masked sum" in outcome
    assert "size" not in outcome


@pytest.mark.parametrize(
    ("changes", "faults", "sentence"),
    [
        ({}, Faults("skip"), 'use "wait" or "fail"'),
        ({}, Faults(norm_factor=4.0), "no reply has a length"),
        ({"run": {"rounds": 2, "cohort": 2, "allow_partial": True}}, Faults(), "at least 3"),
        ({"method": {"name": "afl"}}, Faults(), "only its own entry is not zero"),
        ({"messages": {"reduce": "masked", "compress": "top"}}, Faults(), 'compress = "random"'),
    ],
)
def test_what_masks_cannot_hide_is_refused_before_any_site_is_asked(changes, faults, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_experiment(masked(CODASCA, **changes), SITES, faults)


def test_a_problem_that_asks_each_site_is_refused(tmp_path):
    data = {"name": "sinusoids", "clients": 4}
    maml = experiment(data, "cross_entropy", {"name": "local_scgdm", **SHORT}, rounds=2).to_table()
    which = Experiment.from_table(maml | ONLY | {"problem": {"name": "maml"}, "model": NETWORK})
    with pytest.raises(ConfigError, match="asks each site for its own answer"):
        deployed(which, in_process(which, tmp_path), tmp_path)


# Identities


def test_two_people_make_their_sites_known_to_each_other(tmp_path, capsys):
    for name in ("va", "hungary"):
        (tmp_path / name).mkdir()
        text = f'name = "{name}"\n[data]\nname = "heart"\n\n[limits]\nrounds = 9  # ours\n'
        (tmp_path / name / "site.toml").write_text(text)
        assert main(["deploy", "peers", str(tmp_path / name)]) == 1  # nobody is pinned
    told = {n: Identity.read(tmp_path / n).fingerprint for n in ("va", "hungary")}
    assert f"this is va: {spoken(told['va'])}" in capsys.readouterr().out
    va, file = str(tmp_path / "va"), tmp_path / "va" / "site.toml"
    before = file.read_text()
    pinned = ["deploy", "peers", va, "--pin", "hungary", spoken(told["hungary"]).upper()]
    assert main(pinned) == 0
    assert SiteFile.read(tmp_path / "va").peers == {"hungary": told["hungary"]}
    assert file.read_text().startswith(before)
    assert main(pinned) == 0
    assert main(["deploy", "peers", va, "--pin", "hungary", "sha256:" + 64 * "0"]) == 2
    assert "delete its line" in capsys.readouterr().err
    for name, fingerprint, sentence in (
        ("leeds", "sha256:12", "64 digits"),
        ("leeds", told["hungary"], "have the same fingerprint"),
        ("va", told["hungary"], "which is this site"),
        ("leeds", told["va"], "is pinned with the fingerprint of this site"),
    ):
        assert main(["deploy", "peers", va, "--pin", name, fingerprint]) == 2
        assert sentence in capsys.readouterr().err


def test_a_damaged_identity_is_not_replaced(tmp_path):
    made = Identity.made(tmp_path)
    assert Identity.made(tmp_path).fingerprint == made.fingerprint
    (tmp_path / "identity.key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, and a key has 32"):
        Identity.made(tmp_path)
