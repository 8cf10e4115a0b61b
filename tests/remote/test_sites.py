"""Runs between sites: they compute what the simulator does, whatever happens on the way."""

import itertools
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from deployment import (
    EXPERIMENTS,
    HEART,
    SHORT,
    SITES,
    acquainted,
    assert_same,
    at_sites,
    data_of,
    deployed,
    experiment,
    in_process,
    one_of_each,
    simulated_without,
    site_file,
    write_site,
)
from rows import federation_of
from safetensors.torch import save
from torch import nn

from fedminimax.blocks.trees import flat
from fedminimax.config import ConfigError, Part
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.query import LocalQuery
from fedminimax.engine.round import play_round
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.state.lock import locked
from fedminimax.engine.state.store import Store
from fedminimax.experiment import load, run_experiment
from fedminimax.messages import Clip, Messages
from fedminimax.problems.auc import AUC
from fedminimax.problems.fair import Fair
from fedminimax.problems.maml import MAML
from fedminimax.problems.portfolio import Portfolio
from fedminimax.problems.ratio_loss import RatioLoss
from fedminimax.problems.robust import Robust
from fedminimax.remote.calls import Faults, SiteFailedError
from fedminimax.remote.flower.runs import answered
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.server import check_experiment, run_sites
from fedminimax.remote.setup import problem_of
from fedminimax.remote.site import SETUP, Site
from fedminimax.remote.site_file import Limits, SiteFile
from fedminimax.remote.wire import Message
from fedminimax.types import batch_of

simulation = cache(lambda name: run_experiment(EXPERIMENTS[name]))


def reference(name):
    return simulation(name).point


class Killed(BaseException):
    """As SIGKILL: nothing is caught or cleaned up."""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_sites_compute_what_the_simulator_does(name, tmp_path):
    run = deployed(EXPERIMENTS[name], in_process(EXPERIMENTS[name], tmp_path), tmp_path)
    assert run.outcome == "finished"
    assert_same(run.point, reference(name))
    expected = simulation(name).history[-1]
    spent = ("gradients", "rows", "bytes_up", "bytes_down", "exchanges")
    assert [run.history[-1][n] for n in spent] == [expected[n] for n in spent]


def test_measures_are_those_of_the_simulator_without_what_only_it_sees(tmp_path):
    which = EXPERIMENTS["codasca"]
    run = deployed(which, in_process(which, tmp_path), tmp_path)
    expected = simulation("codasca").history[-1]["test"]
    found = run.history[-1]["test"]
    assert set(expected) - set(found) == {"auc_weighted", "auc_interval"}
    assert abs(found["auprc"] - expected["auprc"]) <= found["auprc_bound"] + 1e-12
    assert found["sites"] == expected["sites"]
    assert found["auc_federated"] == pytest.approx(expected["auc_federated"], abs=1e-12)
    again = load(tmp_path / "run")
    assert torch.equal(again.point.x, run.point.x)
    assert again.module()(torch.zeros(1, 22, dtype=torch.float64)).shape == (1, 1)


def test_a_site_whose_file_says_otherwise_refuses_the_stages_of_an_experiment(tmp_path):
    which = EXPERIMENTS["robust"]
    strict = site_file(SITES[0], tmp_path, data_of(which), messages=Messages((Clip(0.5),)))
    handlers = {**in_process(which, tmp_path).handlers, SITES[0]: Site(strict).handle}
    with pytest.raises(SiteFailedError, match=r"agree on one \[messages\]"):
        deployed(which, InProcess(handlers), tmp_path)
    agreed = site_file(SITES[0], tmp_path, data_of(which), messages=which.messages)
    handlers[SITES[0]] = Site(agreed).handle
    assert deployed(which, InProcess(handlers), tmp_path).outcome == "finished"


class Unreliable(InProcess):
    """Sites that fail as `trouble(number of the call, site, handler, message)` says."""

    def __init__(self, handlers, trouble):
        self.trouble, self.count = trouble, 0
        super().__init__({name: self._wrapped(name, h) for name, h in handlers.items()})

    def _wrapped(self, name, handler):
        return lambda message: self.trouble(self.count, name, handler, message)

    def call(self, sites, message, timeout):
        self.count += 1
        return super().call(sites, message, timeout)


def phase_of(content):
    """The round and phase of a call, if it is one of training."""
    about = Message.from_bytes(content).about
    return (about["round"], about["phase"]) if about["kind"] == "phase" else None


# Calls between two deaths of the server: all of the set-up, and then every phase of a round.
GAPS = {
    "controls": (1, 2, 3, 4, 5),
    "stages": (8, 9, 7, 8, 9, 10),
    "compressed": (1, 2, 3, 4, 5),
    "masked": (2, 3, 4, 5),
}


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_server_killed_in_any_call_goes_on_to_the_same_end(name, when, tmp_path):
    handlers, deaths = in_process(EXPERIMENTS[name], tmp_path).handlers, 0
    for gap in itertools.cycle(GAPS[name]):

        def die(count, site, handler, message, gap=gap):
            # Nobody has computed; some have, the others have not; or all, and nobody hears of it.
            if count == gap and when == "before":
                raise Killed
            reply = handler(message)
            if count == gap and site == (SITES[1] if when == "between" else SITES[-1]):
                raise Killed
            return reply

        try:
            run = deployed(EXPERIMENTS[name], Unreliable(handlers, die), tmp_path)
            break
        except Killed:
            deaths += 1
    assert deaths >= 5
    assert_same(run.point, reference(name))  # type: ignore[reportPossiblyUnbound]  # the loop has set it


@pytest.mark.parametrize("name", ["controls", "stages", "compressed", "sagda", "masked"])
def test_a_site_killed_before_or_after_any_reply_goes_on_to_the_same_end(name, tmp_path):
    which = EXPERIMENTS[name]
    peers = acquainted(tmp_path)
    files = {n: site_file(n, tmp_path, data_of(which), peers=peers[n]) for n in SITES}
    sites = {n: Site(files[n], log=lambda text: None) for n in SITES}

    def die(count, site, _, message):
        if site == SITES[count % 4]:  # at every call another one is started again, and asked again
            if count % 3:
                sites[site].handle(message)  # what it computed is on its disk; nobody hears of it
            sites[site] = Site(files[site], log=lambda text: None)
            raise ConnectionError("the link is broken")
        return sites[site].handle(message)

    flaky = Unreliable(in_process(which, tmp_path).handlers, die)
    run = deployed(which, flaky, tmp_path, Faults("wait", pause=0.0))
    assert_same(run.point, reference(name))


def test_a_kill_while_a_file_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    which, real = EXPERIMENTS["controls"], checkpoint.os.replace
    deaths, left = 0, 0

    def replace(source, target):
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        real(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", replace)
    for gap in itertools.cycle((3, 5, 8, 13, 17, 20, 35, 37, 40)):  # files written until then
        left = gap
        try:
            # Server and sites, all at once.
            run = deployed(which, in_process(which, tmp_path), tmp_path)
            break
        except Killed:
            deaths += 1
    assert deaths > 4
    assert_same(run.point, reference("controls"))  # type: ignore[reportPossiblyUnbound]  # the loop has set it


def test_a_late_call_is_not_carried_out(tmp_path):
    which, held = EXPERIMENTS["controls"], []

    def delay(count, site, handler, message):
        if site == "va" and phase_of(message) == (1, 0) and not held:
            held.append(message)
            raise TimeoutError("no reply within 60 s")
        if site == "va" and phase_of(message) == (3, 0) and len(held) == 1:
            held.append(Message.from_bytes(handler(held[0])))
        return handler(message)

    late = Unreliable(in_process(which, tmp_path).handlers, delay)
    run = deployed(which, late, tmp_path, Faults("wait", pause=0.0))
    assert "which replaced it" in held[1].about["reason"]
    assert_same(run.point, reference("controls"))


def test_a_process_of_a_site_that_was_left_over_deletes_no_state(tmp_path):
    which, held = EXPERIMENTS["controls"], []
    left_over = Site(site_file("va", tmp_path, data_of(which)), log=lambda text: None)

    def delay(count, site, handler, message):
        if site == "va" and phase_of(message) == (0, 0):
            left_over.handle(message)
            held.append(message)
        if site == "va" and phase_of(message) == (3, 0):
            held.append(Message.from_bytes(left_over.handle(held[0])))
        return handler(message)

    run = deployed(which, Unreliable(in_process(which, tmp_path).handlers, delay), tmp_path)
    assert "which replaced it" in held[1].about["reason"]
    assert_same(run.point, reference("controls"))


def test_a_call_that_is_answered_from_the_disk_replaces_earlier_ones_too(tmp_path):
    which, seen = EXPERIMENTS["controls"], []
    handlers = in_process(which, tmp_path).handlers

    def repeat(count, site, handler, message):
        if site == "va" and phase_of(message) == (1, 0):
            first = handler(message)
            asked = Message.from_bytes(message)
            later = asked._replace(about=asked.about | {"call": [1, 1000]}).to_bytes()
            assert handler(later) == first
            left_over = Site(site_file("va", tmp_path, data_of(which)), log=lambda text: None)
            seen.append(Message.from_bytes(left_over.handle(message)).about)
            raise Killed
        return handler(message)

    with pytest.raises(Killed):
        deployed(which, Unreliable(handlers, repeat), tmp_path)
    assert "comes after call [1, 1000]" in seen[0].get("reason", "")


def test_a_call_with_other_vectors_is_computed_anew(tmp_path):
    which, replies = EXPERIMENTS["controls"], []

    def change(count, site, handler, message):
        if site == "va" and phase_of(message) == (1, 0):
            asked = Message.from_bytes(message)
            moved = {name: vector + 1 for name, vector in asked.vectors.items()}
            for vectors in (asked.vectors, moved):
                replies.append(handler(asked._replace(vectors=vectors).to_bytes()))
            raise Killed
        return handler(message)

    with pytest.raises(Killed):
        deployed(which, Unreliable(in_process(which, tmp_path).handlers, change), tmp_path)
    first, other = (Message.from_bytes(reply).vectors["x"] for reply in replies)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["phase", "begin"])
def test_a_site_at_work_in_another_process_is_waited_for(kind, tmp_path, monkeypatch):
    for module in ("worker", "site"):
        monkeypatch.setattr(f"fedminimax.remote.{module}.WAIT", 0.0)
    which, told, left = EXPERIMENTS["controls"], [], iter([1])

    def work(count, site, handler, message):
        if Message.from_bytes(message).about["kind"] == kind and site == "va" and next(left, 0):
            folder = tmp_path / "va" / "runs" / "run"
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                return handler(message)
        return handler(message)

    unreliable = Unreliable(in_process(which, tmp_path).handlers, work)
    run = run_logged(which, unreliable, tmp_path, told, Faults("wait", pause=0.0))
    assert told == [
        "site 'va' in round 0: it is still at work on an earlier call; it is waited for"
    ]
    assert_same(run.point, reference("controls"))


def test_a_site_folder_on_flower_serves_several_runs_at_once(tmp_path):
    (tmp_path / "va").mkdir()
    write_site(tmp_path / "va", data_of(EXPERIMENTS["controls"]))
    ping = Message({"kind": "ping", "run": "r"}, {}).to_bytes()
    with locked(tmp_path / "va"):
        reply = Message.from_bytes(answered({"site": str(tmp_path / "va")}, ping))
    assert reply.about["kind"] == "ping"


def wrong(change):
    """A reply with something changed."""

    def changed(content):
        reply = Message.from_bytes(content)
        name = next(iter(reply.vectors))
        return change(reply, name).to_bytes()

    return changed


def vector(function):
    return wrong(lambda reply, name: reply._replace(vectors=_with(reply, name, function)))


def _with(reply, name, function):
    return {**reply.vectors, name: function(reply.vectors[name])}


def about(**changes):
    return wrong(lambda reply, _: reply._replace(about=reply.about | changes))


def nested(times):
    """A message of lists within lists."""
    text = f'{{"kind": "phase", "run": {"[" * times + "]" * times}}}'
    return save({}, {"fedminimax": text})


WRONG = {
    "nan": (vector(lambda v: v * float("nan")), "NaN or an infinity"),
    "shape": (vector(lambda v: torch.cat([v, v])), "shape (6,), not torch.float64 of shape (3,)"),
    "type": (vector(lambda v: v.float()), "is torch.float32 of shape (3,), not torch.float64"),
    "names": (
        wrong(lambda reply, name: reply._replace(vectors={"z": reply.vectors[name]})),
        "it holds z, not",
    ),
    "round": (about(round=1), "it is of round 1, not 2"),
    "phase": (about(phase=1), "it is of phase 1, not 0"),
    "run": (about(run="other"), "it is of run 'other', not 'run'"),
    "site": (about(site="hungary"), "it is of site 'hungary', not 'va'"),
    "large": (
        wrong(lambda r, _: r._replace(vectors={n: 1000 * v for n, v in r.vectors.items()})),
        "more than 100 times the median of this round",
    ),
    "bytes": (lambda content: b"no message", "not a message of fedminimax"),
    "object": (lambda content: 5, "not a message of fedminimax"),
    "narrow": (
        vector(lambda v: v.to(torch.float8_e4m3fn)),
        "is torch.float8_e4m3fn of shape (3,), not",
    ),
    "endless": (lambda content: nested(200_000), "not a message of fedminimax (maximum recursion"),
    "nested": (lambda content: nested(60), "(nested more than 50 times)"),
    "digest": (about(digest="../../other"), "it has no digest"),
    "long": (
        wrong(lambda r, _: r._replace(vectors={"\x1b" + "z" * 9999: torch.zeros(1)})),
        f"is refused: it holds ?{'z' * 499}, not",
    ),
}


def spoiling(change, times, phase=(2, 0), site="va"):
    """A site whose first replies in a phase are wrong."""
    left = iter(range(times))

    def spoil(count, name, handler, message):
        reply = handler(message)
        if name == site and phase_of(message) == phase and next(left, None) is not None:
            return change(reply)
        return reply

    return spoil


@cache
def without_va(name):
    return simulated_without(everyone(name), {2: "va"})


@pytest.mark.parametrize("kind", WRONG)
def test_a_reply_that_stays_wrong_leaves_its_site_out_of_the_round(kind, tmp_path):
    (change, sentence), told = WRONG[kind], []
    unreliable = Unreliable(in_process(everyone("fess"), tmp_path).handlers, spoiling(change, 2))
    faults = Faults("skip", norm_factor=100.0)
    run = run_logged(everyone("fess"), unreliable, tmp_path, told, faults)
    assert_same(run.point, without_va("fess"))
    assert sum(sentence in line for line in told) == 2, told
    assert all("'va'" in line for line in told if sentence in line)


def test_a_reply_that_is_right_when_asked_for_once_more_is_taken(tmp_path):
    (change, sentence), told = WRONG["nan"], []
    which = EXPERIMENTS["controls"]
    unreliable = Unreliable(in_process(which, tmp_path).handlers, spoiling(change, 1))
    run = run_logged(which, unreliable, tmp_path, told, Faults("fail"))
    assert_same(run.point, reference("controls"))
    assert [sentence in line for line in told] == [True]


OPTIONS = {"label": "x", "positive": "", "classes": "two", "missing": []}
OUTLINE = {"columns": [], "empty": [], "labels": [], "options": OPTIONS}
UNTRUE = {
    "look": [
        ({"outline": None}, "its outline is none"),
        ({"outline": {"facts": {"dimension": "3"}}}, "dimension is '3'"),
        ({"outline": {"facts": {"path": 3}}}, "path is 3"),
        ({"outline": {"schema": {"columns": 5}}}, "its outline is none"),
        ({"outline": OUTLINE}, "hold data of different kinds"),
        ({"outline": OUTLINE | {"labels": [[]]}}, "[[]] is no list of texts"),
        ({"outline": OUTLINE | {"options": {"label": "x"}}}, "its options are path, label"),
        ({"outline": OUTLINE | {"columns": [{"name": "age", "kind": "date"}]}}, "a column kind"),
        ({"least_per_bin": float("nan")}, "does not tell its least_per_bin"),
        ({"version": "0" * 9999}, f"has fedminimax {'0' * 500}, the server"),
    ],
    "sizes": [
        ({"sizes": {"test": 4}}, "does not tell its sizes"),
        ({"sizes": {"train": "many"}}, "its sizes are {'train': 'many'}"),
        ({"sizes": {"train": 12, "test": 3}}, "site 'va' has splits ['test', 'train'], site"),
        ({"columns": [[[3], "Tensor"]]}, "its columns are [[[3], 'Tensor']]"),
        ({"columns": [[[3.5], "float64"]]}, "its columns are"),
        ({"columns": [[[4], "float64"]]}, "all must have the same"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [(kind, *case) for kind, cases in UNTRUE.items() for case in cases],
)
def test_what_a_site_tells_before_the_run_is_checked(kind, changes, sentence, tmp_path):
    which = EXPERIMENTS["controls"]

    def lie(count, site, handler, message):
        found = Message.from_bytes(handler(message))
        untrue = changes if (site, found.about["kind"]) == ("va", kind) else {}
        return found._replace(about=found.about | untrue).to_bytes()

    unreliable = Unreliable(in_process(which, tmp_path).handlers, lie)
    with pytest.raises((SiteFailedError, ConfigError)) as error:
        deployed(which, unreliable, tmp_path)
    assert "'va'" in str(error.value)
    assert sentence in str(error.value)


def answering(kind, value, home, which, faults=None):
    """A run in which the answers of one site to a question, or its moments, are others."""

    def lie(count, site, handler, message):
        found, about = Message.from_bytes(handler(message)), Message.from_bytes(message).about
        if site == "va" and kind in (about["kind"], about.get("question")):
            found = found._replace(vectors={n: value(v) for n, v in found.vectors.items()})
        return found.to_bytes()

    return deployed(which, Unreliable(in_process(which, home).handlers, lie), home, faults)


WHOLE = experiment(HEART, "auc", {"name": "fess_gda", **SHORT}, rounds=2)


def placed(row, value):
    """A row of a table of sums replaced."""
    return lambda v: torch.cat([v[:row], torch.full_like(v[:1], value), v[row + 1 :]])


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        ("positive_share", lambda v: v * 0 + 1000, "its shares are from 1000 to 1000"),
        ("positive_share", lambda v: v * 0 - 1, "its shares are from -1 to -1"),
        ("moments", lambda v: -3 * v, "its counts of values are from"),
        ("moments", placed(0, 2.5), "its counts of values are from 2.5"),
        ("moments", placed(0, 1e6), "training rows, and told sums of 1000000"),
        ("moments", placed(1, 1e307), "its sums are of values beyond 1e+100"),
        ("moments", placed(2, 1e307), "its sums are of values beyond 1e+100"),
        ("moments", placed(2, -1.0), "its sums of squares are smaller than its sums allow"),
        ("moments", placed(1, 1e50), "its sums of squares are smaller than its sums allow"),
    ],
)
def test_answers_before_the_run_that_no_rows_give_stop_it_by_name(kind, value, sentence, tmp_path):
    with pytest.raises(SiteFailedError, match="the reply of site 'va' in round 0 is refused") as e:
        answering(kind, value, tmp_path, WHOLE, Faults("skip"))
    assert sentence in str(e.value)


def test_a_site_whose_answers_no_rows_give_is_left_out_of_the_evaluation(tmp_path):
    run = answering("ranking", lambda v: v * 0 + 7, tmp_path, WHOLE, Faults("skip"))
    assert run.outcome == "finished"
    assert list(run.history[-1]["test"]["sites"]) == list(SITES[:-1])


COUNTED = "it has 5 rows"
NOT_WHOLE = "not whole numbers of at least 0"
IMPOSSIBLE = [
    (AUC, "histogram", ([[0.0, -1.0], [2.0, 1.0]],), NOT_WHOLE),
    (AUC, "histogram", ([[0.0, 0.5], [2.0, 1.0]],), NOT_WHOLE),
    (AUC, "histogram", ([[1.0, 1.0], [2.0, 2.0]],), COUNTED),
    (AUC, "ranking", ([7.0, 2.0, 3.0],), "its AUC is 7"),
    (AUC, "ranking", ([-0.5, 2.0, 3.0],), "its AUC is -0.5"),
    (AUC, "ranking", ([0.5, 3.0, 3.0],), COUNTED),
    (AUC, "supported", ([0.5, 1.0, 0.0, 0.0],), "its marks are from 0 to 1"),
    (AUC, "supported", ([1.0, 0.0, 0.0, 0.0],), "its marks are from 0 to 1"),
    (AUC, "positive_share", (1.5,), "its shares are from 1.5 to 1.5"),
    (RatioLoss, "class_counts", (2.0, 1e300), COUNTED),
    (Fair, "labels_outside", ([-1],), NOT_WHOLE),
    (Fair, "group_shares", ([0.5, -0.5],), "its shares are from -0.5 to 0.5"),
    (Fair, "group_outside", ([6.0],), COUNTED),
    (Fair, "group_counts", ([1.0, 1.0], [3.0, 3.0]), COUNTED),
    (Robust, "right", ([6.0, 5.0, 5.0],), COUNTED),
    (MAML, "tasks", ([1e300],), "not a whole number from 1 to 1000000"),
    (MAML, "shares", ([[2.0], [0.0]],), "its shares are from 0 to 2"),
    (Portfolio, "present", ([1e9], [1.1]), "its shares are from 1.1 to 1.1"),
]


@pytest.mark.parametrize(("problem", "question", "reply", "sentence"), IMPOSSIBLE)
def test_a_reply_that_no_five_rows_give_is_known(problem, question, reply, sentence):
    told = tuple(torch.tensor(vector, dtype=torch.float64) for vector in reply)
    assert sentence in problem.checks[question](told, 5)


SINUSOIDS = {"name": "sinusoids", "clients": 2, "tasks": 2}


@pytest.mark.parametrize(
    ("data", "problem", "method"),
    [
        (HEART, {"name": "auc", "least_per_bin": 3}, "codasca"),
        (HEART, {"name": "ratio_loss", "least_per_bin": 3}, "fedavg"),
        (HEART, "fair", "fess_gda"),
        (HEART, "robust", "fess_gda"),
        (SINUSOIDS, {"name": "maml", "depth": 2}, "fed_dr_scgd"),
        ({"name": "returns", "clients": 2, "missing": 0.1}, "portfolio", "fed_dr_scgd"),
    ],
)
def test_what_rows_give_stands_the_checks(data, problem, method, monkeypatch):
    which = experiment(data, problem, {"name": method, **SHORT}, rounds=1, dtype="float32")
    if data == SINUSOIDS:
        which = replace(which, model=Part("mlp", {"hidden": (2,)}))
    asked, real = set(), LocalQuery.answer

    def answer(self, question, vectors, client):
        found = real(self, question, vectors, client)
        check = self.problem.checks.get(question, lambda reply, rows: None)
        assert check(found, int(self.shards.sizes[client])) is None
        asked.add(question)
        return found

    monkeypatch.setattr(LocalQuery, "answer", answer)
    # Shares of several labels are asked by problems that have some.
    assert set(run_experiment(which).problem.checks) - {"label_shares"} <= asked


def test_a_site_lost_in_a_question_of_the_set_up_stops_the_run_by_name(tmp_path):
    def lose(count, site, handler, message):
        if site == "va" and Message.from_bytes(message).about["kind"] == "ask":
            raise TimeoutError("no reply within 60 s")
        return handler(message)

    unreliable = Unreliable(in_process(WHOLE, tmp_path).handlers, lose)
    with pytest.raises(SiteFailedError, match="site 'va' in round 0: no reply within 60 s"):
        deployed(WHOLE, unreliable, tmp_path, Faults("skip"))


def test_vectors_that_nobody_asked_for_are_refused(tmp_path):
    def add(count, site, handler, message):
        found = Message.from_bytes(handler(message))
        vectors = {"x": torch.zeros(1)} if found.about["kind"] == "begin" else found.vectors
        return found._replace(vectors=vectors).to_bytes()

    which = EXPERIMENTS["controls"]
    with pytest.raises(SiteFailedError, match="it holds x, not none"):
        deployed(which, Unreliable(in_process(which, tmp_path).handlers, add), tmp_path)


def test_the_reason_of_a_refusal_is_cut(tmp_path):
    def refuse(count, site, handler, message):
        told = {"kind": "refusal", "run": "run", "site": site, "reason": "\x1b[2J" * 9999}
        return Message(told, {}).to_bytes()

    which = EXPERIMENTS["controls"]
    with pytest.raises(SiteFailedError, match=r"refuses: \?\[2J\?") as error:
        deployed(which, Unreliable(in_process(which, tmp_path).handlers, refuse), tmp_path)
    assert len(str(error.value)) < 700


@cache
def everyone(name):
    """All four sites, so that the one left out is missed."""
    table = EXPERIMENTS["sagda" if name == "sagda" else "fess_gda"].to_table()
    table["run"]["cohort"] = None
    return type(EXPERIMENTS["sagda"]).from_table(table)


def run_logged(which, transport, home, told, faults):
    return run_sites(which, transport, SITES, home / "run", faults, log=told.append)


def test_a_second_phase_that_fails_takes_the_site_out_of_the_first_too(tmp_path):
    which = everyone("sagda")
    change, _ = WRONG["nan"]
    unreliable = Unreliable(in_process(which, tmp_path).handlers, spoiling(change, 2, (2, 1)))
    run = deployed(which, unreliable, tmp_path, Faults("skip"))
    assert_same(run.point, without_va("sagda"))


@pytest.mark.parametrize("policy", ["wait", "fail"])
def test_a_reply_that_stays_wrong_stops_other_policies_and_the_run_can_go_on(policy, tmp_path):
    which = EXPERIMENTS["controls"]
    change, sentence = WRONG["nan"]
    handlers = in_process(which, tmp_path).handlers
    run = deployed(which, Unreliable(handlers, spoiling(change, 2)), tmp_path, Faults(policy))
    assert "site 'va' in round 2" in run.outcome
    assert sentence in run.outcome
    assert run.rounds == 2
    assert not (tmp_path / "run" / "final.safetensors").exists()
    assert_same(deployed(which, InProcess(handlers), tmp_path).point, reference("controls"))


def test_a_site_that_is_lost_is_not_waited_for_every_round_and_comes_back(tmp_path):
    which = everyone("fess")
    table = which.to_table()
    table["run"]["rounds"] = 12
    which, tried = type(which).from_table(table), []

    def lose(count, site, handler, message):
        about = Message.from_bytes(message).about
        if site == "va" and about["kind"] in ("phase", "ping"):
            tried.append(about["kind"])
            if len(tried) < 5:
                raise TimeoutError("no reply within 60 s")
        return handler(message)

    told = []
    unreliable = Unreliable(in_process(which, tmp_path).handlers, lose)
    run = run_logged(which, unreliable, tmp_path, told, Faults("skip"))
    # One call in round 0, then short looks in rounds 1, 3 and 7; the next would be in round 15.
    assert tried == ["phase", "ping", "ping", "ping"]
    assert told == [
        "site 'va' in round 0: no reply within 60 s. Round 0 goes on without it",
    ]
    assert_same(run.point, simulated_without(which, dict.fromkeys(range(12), "va")))


def test_a_run_that_is_started_again_looks_at_once_for_those_that_were_away(tmp_path):
    which, told = everyone("fess"), []
    handlers = in_process(which, tmp_path).handlers

    def lose(count, site, handler, message):
        if phase_of(message) == (4, 0):
            raise Killed
        if site == "va" and phase_of(message):
            raise TimeoutError("no reply within 60 s")
        if site == "va" and Message.from_bytes(message).about["kind"] == "ping":
            raise TimeoutError("no reply within 2 s")
        return handler(message)

    with pytest.raises(Killed):
        deployed(which, Unreliable(handlers, lose), tmp_path, Faults("skip"))
    # Looked for in rounds 1 and 3, it would have been next in round 7.
    run = run_logged(which, InProcess(handlers), tmp_path, told, Faults("skip"))
    assert told == ["site 'va' is back in round 4"]
    assert_same(run.point, simulated_without(which, dict.fromkeys(range(4), "va")))


def test_a_site_that_is_away_and_drawn_alone_does_not_stop_the_run(tmp_path):
    table = EXPERIMENTS["fess_gda"].to_table()
    table["run"] |= {"cohort": 1, "rounds": 8}
    which, told = type(EXPERIMENTS["sagda"]).from_table(table), []

    def lose(count, site, handler, message):
        about = Message.from_bytes(message).about
        if site == "va" and about["kind"] in ("phase", "ping"):
            raise TimeoutError("no reply within 60 s")
        return handler(message)

    unreliable = Unreliable(in_process(which, tmp_path).handlers, lose)
    run = run_logged(which, unreliable, tmp_path, told, Faults("skip"))
    assert sum("'va'" in line for line in told) == 1
    assert (run.outcome, run.rounds) == ("finished", 8)


def test_all_sites_lost_in_an_evaluation_end_the_run_with_a_sentence(tmp_path):
    which = experiment(HEART, "auc", {"name": "codasca", **SHORT}, rounds=2, allow_partial=True)

    def lose(count, site, handler, message):
        about = Message.from_bytes(message).about
        if about.get("question") == "histogram":
            raise ConnectionError("the link is broken")
        return handler(message)

    unreliable = Unreliable(in_process(which, tmp_path).handlers, lose)
    run = deployed(which, unreliable, tmp_path, Faults("skip"))
    assert "0 of the sites that should take part are there" in run.outcome


def test_fewer_sites_than_wanted_stop_the_run(tmp_path):
    def lose(count, site, handler, message):
        if site != "va" and phase_of(message) == (2, 0):
            raise TimeoutError("no reply within 60 s")
        return handler(message)

    which = everyone("fess")
    unreliable = Unreliable(in_process(which, tmp_path).handlers, lose)
    run = deployed(which, unreliable, tmp_path, Faults("skip", least_replies=2))
    assert "1 of the sites" in run.outcome
    assert "least_replies is 2" in run.outcome
    assert run.rounds == 2


def test_a_site_lost_under_fail_stops_the_run_by_name(tmp_path):
    def lose(count, site, handler, message):
        if site == "hungary" and phase_of(message) == (1, 0):
            raise TimeoutError("no reply within 60 s")
        return handler(message)

    which = EXPERIMENTS["controls"]
    unreliable = Unreliable(in_process(which, tmp_path).handlers, lose)
    run = deployed(which, unreliable, tmp_path, Faults("fail"))
    assert run.outcome.startswith("site 'hungary' in round 1: no reply within 60 s")


def test_a_method_for_all_clients_is_refused_skip_before_anybody_is_asked(tmp_path):
    with pytest.raises(ConfigError, match="Codasca is defined for rounds in which all sites"):
        deployed(EXPERIMENTS["codasca"], InProcess({}), tmp_path, Faults("skip"))


@pytest.mark.parametrize(
    ("section", "changes", "sentence"),
    [
        ("run", {"device": "cuda"}, "device is 'cuda', but sites compute on the processor"),
        ("run", {"precision": "bfloat16"}, "precision is 'bfloat16', but sites compute"),
        ("split", {"sites": 2}, "sites is 2, but a run between sites is of all"),
    ],
)
def test_settings_that_sites_would_not_follow_are_refused(section, changes, sentence):
    table = EXPERIMENTS["codasca"].to_table()
    table[section] |= changes
    which = type(EXPERIMENTS["codasca"]).from_table(table)
    with pytest.raises(ConfigError, match=sentence):
        check_experiment(which, SITES, Faults())


@pytest.mark.parametrize(
    ("section", "changes", "sentence"),
    [
        ("split", {"train": 0.9}, r"The fractions are \(0.9, 0.2, 0.2\)"),
        ("split", {"positive_share": 2.0}, "The share of positives is 2.0"),
        ("problem", {"least_per_bin": -3}, "least_per_bin is -3; give 0 or more rows"),
        ("problem", {"margin": -1.0}, "margin is -1.0"),
        ("model", {"hidden": []}, r"hidden is \[\]"),
        ("run", {"cohort": 9}, "9 clients per round were asked for, but there are 4"),
        ("run", {"cohort": 0}, "cohort is 0; give a whole number of at least 1"),
        ("run", {"rounds": 0}, "rounds is 0; give a whole number of at least 1"),
        ("run", {"batch_size": -1}, "batch_size is -1"),
        ("run", {"measures": ["nonsense"]}, "nonsense"),
        ("run", {"stop_early": 0}, "stop_early is 0"),
    ],
)
def test_mistakes_of_the_server_are_told_as_the_simulator_does_before_anybody_is_asked(
    section, changes, sentence
):
    table = EXPERIMENTS["codasca"].to_table()
    table[section] |= changes
    which = type(EXPERIMENTS["codasca"]).from_table(table)
    for refuse in (run_experiment, lambda which: check_experiment(which, SITES, Faults())):
        with pytest.raises(ValueError, match=sentence):
            refuse(which)


def test_mistakes_that_show_once_the_data_are_known_are_told_by_the_server(tmp_path):
    table = EXPERIMENTS["fed_dr_scgd"].to_table()
    table["problem"]["depth"] = 0
    which = type(EXPERIMENTS["codasca"]).from_table(table)
    with pytest.raises(ValueError, match="depth is 0"):
        deployed(which, in_process(which, tmp_path), tmp_path)


@pytest.mark.parametrize("who", ["site", "server"])
def test_a_run_that_another_version_began_is_refused(who, tmp_path, monkeypatch):
    which = EXPERIMENTS["controls"]
    handlers = in_process(which, tmp_path).handlers
    deployed(which, InProcess(handlers), tmp_path)
    monkeypatch.setattr(f"fedminimax.remote.{who}.__version__", "99.0")
    with pytest.raises((SiteFailedError, ConfigError), match=r"was begun with fedminimax .* 99.0"):
        deployed(which, in_process(which, tmp_path), tmp_path)
    if who == "site":
        va = Site(site_file("va", tmp_path, data_of(which)), log=lambda text: None)
        told = refusal(va, run="run", kind="phase", round=0)
        assert "install the version of the run, or begin a new one" in told


def test_a_site_begins_no_run_of_another_version(tmp_path):
    begun(tmp_path)
    setup = checkpoint.read(tmp_path / "run" / SETUP)[1]["setup"]
    told = refusal(heart_site(tmp_path), run="new", kind="begin", setup=setup | {"version": "0.0"})
    assert "was begun with fedminimax 0.0, and site 'va' has" in told
    assert not (tmp_path / "va" / "runs" / "new").exists()


def test_a_name_whose_folder_was_deleted_at_the_server_is_not_taken_again(tmp_path):
    which = EXPERIMENTS["controls"]
    handlers = in_process(which, tmp_path).handlers
    deployed(which, InProcess(handlers), tmp_path)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(SiteFailedError, match="another run called 'run': give this one another"):
        deployed(which, InProcess(handlers), tmp_path)


def test_a_client_without_query_rows_answers_with_a_number():
    problem = MAML(nn.Linear(1, 1), depth=2)
    support = batch_of(torch.ones(3, 1), torch.ones(3), torch.zeros(3), torch.zeros(3))
    (own,) = problem.answer("own", (problem.start().x, torch.tensor(1)), support)
    assert own.tolist() == [-1.0]


# What a site does not do


def heart_site(home, **options):
    return Site(site_file("va", home, HEART, **options), log=lambda text: None)


def refusal(site, **about):
    reply = Message.from_bytes(site.handle(Message({"run": "r", **about}, {}).to_bytes()))
    assert reply.about["kind"] == "refusal"
    return reply.about["reason"]


def begun(home):
    """A site that has the set-up of a run."""
    which = EXPERIMENTS["codasca"]

    def stop(count, site, handler, message):
        if phase_of(message):
            raise Killed
        return handler(message)

    with pytest.raises(Killed):
        deployed(which, Unreliable(in_process(which, home).handlers, stop), home)
    return heart_site(home)


def test_scores_of_rows_do_not_leave_a_site(tmp_path):
    site = begun(tmp_path)
    told = refusal(site, run="run", kind="ask", question="scores", split="test")
    assert "do not leave site 'va'" in told


def test_a_site_does_not_begin_a_run_that_counts_fewer_rows_than_it_allows(tmp_path):
    begun(tmp_path)
    strict = Site(SiteFile("va", tmp_path / "va", HEART), log=lambda text: None)
    told = refusal(strict, run="run", kind="ask", question="histogram", split="test")
    assert "at least 5 rows per bin of a histogram, and not 1" in told


@pytest.mark.parametrize("least", [float("nan"), 9.5, True])
def test_a_least_number_of_rows_that_is_none_is_refused(least, tmp_path):
    begun(tmp_path)
    limits = Limits(least_batch=1)
    strict = Site(SiteFile("va", tmp_path / "va", HEART, limits), log=lambda text: None)
    setup = checkpoint.read(tmp_path / "run" / SETUP)[1]["setup"]
    told = refusal(strict, kind="sizes", setup=setup | {"least_per_bin": least})
    assert f"at least 5 rows per bin of a histogram, and not {least}" in told
    assert vars(problem_of(EXPERIMENTS["codasca"], setup, least=5))["least_per_bin"] == 5


def test_a_round_that_is_no_number_is_refused(tmp_path):
    told = refusal(begun(tmp_path), run="run", kind="phase", round=float("nan"))
    assert "so not in round nan" in told


@pytest.mark.parametrize(
    ("section", "name", "known"),
    [
        ("model", "os.system", "mlp"),
        ("method", "subprocess:run", "which is code of your own"),
        ("problem", "x", "auc"),
    ],
)
def test_a_received_configuration_names_only_what_is_known(section, name, known, tmp_path):
    table = {"problem": {"name": "auc"}, "method": {"name": "codasca"}, "model": {"name": "mlp"}}
    setup = {"experiment": table | {section: {"name": name}}, "names": list(SITES)}
    told = refusal(heart_site(tmp_path), kind="look", setup=setup)
    assert f"[{section}] name is {name!r}" in told
    assert known in told


def test_a_received_configuration_names_no_data(tmp_path):
    table = {"problem": {"name": "auc"}, "method": {"name": "codasca"}, "data": HEART}
    setup = {"experiment": table, "names": list(SITES)}
    assert "names no data" in refusal(heart_site(tmp_path), kind="look", setup=setup)


def test_what_the_site_file_allows_can_be_named_and_nothing_built_in_replaced(tmp_path):
    site = heart_site(tmp_path, allow={"model": {"our_mlp": "fedminimax.models.tabular:MLP"}})
    table = {
        "problem": {"name": "auc"},
        "method": {"name": "codasca"},
        "model": {"name": "our_mlp"},
    }
    setup = {"experiment": table, "names": list(SITES)}
    message = Message({"run": "r", "kind": "look", "setup": setup}, {})
    assert Message.from_bytes(site.handle(message.to_bytes())).about["kind"] == "look"
    with pytest.raises(ConfigError, match="is built in"):
        heart_site(tmp_path, allow={"model": {"mlp": "fedminimax.models.tabular:Linear"}})


@pytest.mark.parametrize("run", ["../other", "", None, ".hidden", "a/b"])
def test_the_name_of_a_run_is_no_path(run, tmp_path):
    assert "is not the name of a run" in refusal(heart_site(tmp_path), run=run, kind="ping")


def test_a_state_is_named_by_its_key_and_by_no_path(tmp_path):
    site = begun(tmp_path)
    call = {"kind": "phase", "run": "run", "round": 0, "phase": 0, "call": [9, 9], "again": []}
    call |= {"accepted": [[0, 0, "../../other", "f"]], "complete": [], "clock": {}, "form": None}
    assert "is not the key of a state" in refusal(site, **call)


def test_an_error_that_may_quote_rows_stays_at_the_site(tmp_path):
    (tmp_path / "va").mkdir()
    (tmp_path / "va" / "rows.csv").write_text("age,disease\n61,1\nMiller,0\n58,0\n")
    logged = []
    site = Site(
        site_file("va", tmp_path, {"path": "rows.csv", "label": "disease"}), log=logged.append
    )
    table = {"problem": {"name": "auc"}, "method": {"name": "codasca"}, "model": {"name": "mlp"}}
    told = refusal(site, kind="look", setup={"experiment": table, "names": list(SITES)})
    assert "Miller" not in told
    assert "DataError" in told
    assert any("Miller" in text for text in logged)


def test_the_paths_of_a_site_stay_there(tmp_path):
    which, logged = EXPERIMENTS["controls"], []
    handlers = in_process(which, tmp_path).handlers
    va = Site(site_file("va", tmp_path, data_of(which)), log=logged.append)

    def damage(count, site, handler, message):
        if site == "va" and phase_of(message) == (2, 0):
            for file in (tmp_path / "va" / "runs" / "run").glob("state-*"):
                file.write_bytes(b"nothing")
        return handler(message)

    run = deployed(which, Unreliable({**handlers, "va": va.handle}, damage), tmp_path)
    assert "DamagedError, of which the log of site 'va' says more" in run.outcome
    assert str(tmp_path) not in run.outcome
    assert f"refused: {tmp_path / 'va'}" in logged[0]
    assert "is damaged or cut short" in logged[0]


def test_a_site_that_lost_its_state_says_so(tmp_path):
    which = EXPERIMENTS["controls"]

    def wipe(count, site, handler, message):
        if site == "va" and phase_of(message) == (2, 0):
            for file in (tmp_path / "va" / "runs" / "run").glob("state-*"):
                file.unlink()
        return handler(message)

    unreliable = Unreliable(in_process(which, tmp_path).handlers, wipe)
    run = deployed(which, unreliable, tmp_path)
    assert "no longer has its state after round 1, phase 0" in run.outcome


def test_a_site_keeps_its_last_states_for_a_server_that_goes_back(tmp_path):
    which = EXPERIMENTS["controls"]
    killed = tmp_path / "va" / "runs" / "run" / ".state-0000000-00-x.safetensors.partial"
    killed.parent.mkdir(parents=True)
    killed.touch()
    deployed(which, in_process(which, tmp_path), tmp_path)
    assert not killed.exists()
    held = sorted(p.name[:13] for p in (tmp_path / "va" / "runs" / "run").glob("state-*"))
    assert held == ["state-0000002", "state-0000003", "state-0000004"]
    assert RunFolder(tmp_path / "run").read_json("session.json") == {"session": 1}


# Every method of the common table, phase by phase


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in one_of_each()])
def test_every_method_computes_at_sites_what_it_does_in_the_simulator(row, tmp_path):
    federation, state, store = federation_of(row.problem(), row.algorithm, row.clients())
    remote = at_sites(federation, tmp_path)
    mine, theirs = state, state
    for _ in range(3):
        mine = play_round(remote, mine, Store(()), Debug())
        theirs = play_round(federation, theirs, store, Debug())
    for found, expected in zip(flat(mine.server), flat(theirs.server), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert mine.cost[2:] == theirs.cost[2:]


def test_a_site_lost_at_the_very_end_is_left_out_of_the_statistics(tmp_path):
    table = experiment(HEART, "cross_entropy", {"name": "fedavg"}, rounds=2).to_table()
    table["model"]["batch_norm"] = True
    which, asked = type(EXPERIMENTS["codasca"]).from_table(table), []

    def lose(count, site, handler, message):
        about = Message.from_bytes(message).about
        if about.get("question") == "moments" and site == "va":
            asked.append(about["question"])
            if len(asked) == 3:  # after those of the first and the last evaluation
                raise ConnectionError("the link is broken")
        return handler(message)

    unreliable = Unreliable(in_process(which, tmp_path).handlers, lose)
    told: list[str] = []
    run = run_logged(which, unreliable, tmp_path, told, Faults("skip"))
    assert run.outcome == "finished"
    assert run.moments is not None
    assert "site 'va'" in told[-1]
    assert (tmp_path / "run" / "final.safetensors").exists()
