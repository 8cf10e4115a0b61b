"""A site's ledger, and runs between sites with privacy for rows."""

import json
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import HEART, RANGES, SITES, deployed, experiment, site_file

from fedminimax.cli import main
from fedminimax.config import Experiment
from fedminimax.engine.state.lock import locked
from fedminimax.privacy.accountant import epsilon_of, mu2_of
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.ledger import Ledger, LedgerError, Release
from fedminimax.remote.site import Site
from fedminimax.remote.site_file import Limits, SiteFile
from fedminimax.remote.wire import Message

PRIVACY = {"level": "record", "epsilon": 3.0}
SPLIT = {"train": 0.8, "validation": 0.0, "ranges": RANGES}


def private(method: str = "codasca", split: Any = None, share: float | None = 0.5, **run: Any):
    usual = {"rounds": 3, "batch_size": 0}
    table = experiment(HEART, "auc", {"name": method, "local_steps": 2}, **{**usual, **run})
    given = table.to_table() | {"split": split or SPLIT, "privacy": PRIVACY}
    given["model"] = {"name": "linear"}
    given["problem"] = {"name": "auc"} | ({} if share is None else {"positive_share": share})
    given["run"] = {k: v for k, v in given["run"].items() if v is not None}
    return Experiment.from_table(given)


def release(call: str = "a", run: str = "run", **changes: Any) -> Release:
    usual: dict[str, Any] = {"round": 0, "phase": 0, "noise": 2.0, "whole": 1}
    return Release("rows", run, call=call, **{**usual, **changes})


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    made = Ledger(tmp_path)
    made.secret()
    return made


def test_each_call_is_charged_once_and_runs_add_up(ledger):
    assert ledger.charge(release()) == 0.25
    assert ledger.charge(release()) == 0.25  # sent again
    assert ledger.charge(release("b")) == 0.5
    assert ledger.charge(release(run="another")) == 0.75
    (spent,) = Ledger(ledger.folder).spent()
    assert (spent.mu2, spent.calls, spent.runs) == (0.75, 3, 2)


def test_batches_of_one_pass_are_of_different_rows_and_the_same_batch_adds_up(ledger):
    def batches(call: str, first: int) -> float:
        return ledger.charge(
            release(call, whole=0, first=first, steps=2, each=(1, 2), passes=4, noise=1.0)
        )

    assert batches("a", 0) == 3  # 1 on the first level, 2 on the second
    assert batches("b", 2) == 3  # the other half of the same pass
    assert batches("c", 4) == 6
    assert batches("d", 0) == 9  # the server asks for the first batches again
    assert batches("d", 0) == 9


def test_nothing_is_released_beyond_the_limit(ledger):
    ledger.charge(release(), limit=0.6)
    ledger.charge(release("b"), limit=0.6)
    with pytest.raises(LedgerError, match="would spend more than the limit of this site"):
        ledger.charge(release("c"), limit=0.6)
    assert ledger.spent()[0].mu2 == 0.5


def edit(ledger: Ledger) -> None:
    ledger.file.write_text(ledger.file.read_text().replace('"noise": 2.0', '"noise": 9.0', 1))


def cut(ledger: Ledger) -> None:
    ledger.file.write_text(ledger.file.read_text().splitlines(keepends=True)[0])


def delete(ledger: Ledger) -> None:
    ledger.file.unlink()


def delete_both(ledger: Ledger) -> None:
    ledger.file.unlink()
    ledger.head.unlink()


def delete_head(ledger: Ledger) -> None:
    ledger.head.unlink()


def delete_secret(ledger: Ledger) -> None:
    (ledger.folder / "ledger.secret").unlink()


@pytest.mark.parametrize("damage", [edit, cut, delete, delete_both, delete_head, delete_secret])
def test_a_damaged_ledger_releases_nothing_until_a_person_confirms(ledger, damage):
    ledger.charge(release())
    ledger.charge(release("b"))
    damage(ledger)
    again = Ledger(ledger.folder)

    def use() -> None:
        again.secret()
        again.charge(release("c"))

    with pytest.raises(LedgerError, match="before a person has found out why"):
        use()
    again.confirm("the disk was restored")
    (spent,) = again.spent()
    assert spent.mu2 == (0.0 if damage is delete_both else 0.5)
    use()
    assert sum(own.mu2 for own in again.spent()) == spent.mu2 + 0.25


def test_a_line_more_than_the_head_tells_was_written_before_a_kill(ledger):
    ledger.charge(release())
    head = ledger.head.read_text()
    ledger.charge(release("b"))
    ledger.head.write_text(head)
    assert ledger.charge(release("c")) == 0.75


def test_a_clock_that_is_set_back_changes_nothing(ledger, monkeypatch):
    ledger.charge(release())
    monkeypatch.setattr(time, "gmtime", lambda *_: time.struct_time((1999, 1, 1, 0, 0, 0, 4, 1, 0)))
    assert ledger.charge(release("b")) == 0.5
    assert ledger.charge(release("b")) == 0.5


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a size, as on a disk that is full."""
    limit, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, heard)


def test_with_a_full_disk_nothing_is_released(ledger):
    ledger.charge(release())
    before = ledger.file.read_bytes()
    with (
        pytest.raises(LedgerError, match=r"cannot be written .*: nothing is released"),
        full_disk(len(before) + 20),
    ):
        ledger.charge(release("b"))
    assert ledger.file.read_bytes() == before
    assert ledger.charge(release("b")) == 0.5


def test_it_is_written_while_the_engine_of_the_site_holds_its_folder(ledger):
    with locked(ledger.folder):
        assert ledger.charge(release("a")) > 0


# ------------------------------------------------------------------------------------------- runs


def sites(home: Path, **limits: Any) -> InProcess:
    files = [
        SiteFile(name, home / name, HEART, Limits(least_per_bin=1, least_rows=1, **limits))
        for name in SITES
    ]
    for file in files:
        file.folder.mkdir(parents=True, exist_ok=True)
    return InProcess({file.name: Site(file, log=lambda text: None).handle for file in files})


def test_a_run_between_sites_spends_what_it_says_and_sites_count_the_same(tmp_path):
    run = deployed(private(), sites(tmp_path), tmp_path)
    assert run.outcome == "finished"
    assert run.history[-1]["privacy"]["epsilon"] == pytest.approx(3.0)
    for name in SITES:
        (spent,) = Ledger(tmp_path / name).spent()
        assert (spent.data, spent.calls, spent.runs) == ("heart", 3, 1)
        assert epsilon_of(spent.mu2, 1e-5) == pytest.approx(3.0)
    secrets = {(tmp_path / name / "ledger.secret").read_bytes() for name in SITES}
    assert len(secrets) == len(SITES)


@pytest.mark.parametrize("method", ["fgda", "coda_plus"])
def test_first_states_and_batches_are_counted_as_planned(tmp_path, method):
    run = deployed(private(method, batch_size=16, rounds=4), sites(tmp_path), tmp_path)
    spent = [Ledger(tmp_path / name).spent()[0].mu2 for name in SITES]
    assert [epsilon_of(own, 1e-5) for own in spent] == pytest.approx([3.0] * 4)
    assert run.history[-1]["privacy"]["epsilon"] == pytest.approx(3.0)


def test_the_share_of_positives_has_noise_and_is_charged(tmp_path):
    deployed(private(share=None), sites(tmp_path), tmp_path)
    (spent,) = Ledger(tmp_path / "va").spent()
    assert spent.calls == 4
    assert epsilon_of(spent.mu2, 1e-5) == pytest.approx(3.0)


def test_what_is_sent_again_costs_nothing_and_has_the_same_noise(tmp_path):
    calls: list[tuple[bytes, bytes]] = []
    transport = sites(tmp_path)
    plain = transport.handlers["va"]

    def noted(content: bytes) -> bytes:
        reply = plain(content)
        if Message.from_bytes(content).about["kind"] == "phase":
            calls.append((content, reply))
        return reply

    handlers = {**transport.handlers, "va": noted}
    deployed(private(), InProcess(handlers), tmp_path)
    before = Ledger(tmp_path / "va").spent()
    content, reply = calls[-1]
    again = Site(site_file("va", tmp_path, HEART), log=lambda text: None).handle(content)
    first, second = (Message.from_bytes(own).vectors for own in (reply, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert Ledger(tmp_path / "va").spent() == before
    # Another model in the same round is another release, with other noise.
    message = Message.from_bytes(content)
    vectors = {n: v + 1e-9 if v.is_floating_point() else v for n, v in message.vectors.items()}
    other = Message.from_bytes(plain(Message(message.about, vectors).to_bytes()))
    assert Ledger(tmp_path / "va").spent()[0].calls == before[0].calls + 1
    assert (other.vectors["x"] - first["x"]).abs().max() > 1e-3


def test_a_site_ends_a_run_that_would_spend_more_than_its_limit(tmp_path):
    which, limit = private(), mu2_of(4.0, 1e-5)
    assert deployed(which, sites(tmp_path, epsilon=4.0), tmp_path / "one").outcome == "finished"
    handlers = sites(tmp_path, epsilon=4.0)
    with pytest.raises(Exception, match="would spend more than the limit of this site"):
        raise RuntimeError(_second(which, handlers, tmp_path / "two"))
    assert Ledger(tmp_path / "va").spent()[0].mu2 <= limit


def _second(which: Experiment, transport: InProcess, home: Path) -> str:
    from fedminimax.remote.calls import Faults
    from fedminimax.remote.server import run_sites

    faults = Faults(policy="fail")
    run = run_sites(which, transport, SITES, home / "second", faults, log=lambda text: None)
    return run.outcome


@pytest.mark.parametrize(
    ("which", "limits", "sentence"),
    [
        (
            experiment(HEART, "auc", {"name": "codasca"}, rounds=2),
            {"epsilon": 5.0},
            "trains with privacy for rows alone",
        ),
        (
            private(split={"train": 0.6, "validation": 0.2, "ranges": RANGES}),
            {},
            "validation rows choose a round",
        ),
        (private(split={"train": 0.8, "validation": 0.0}), {}, "no noise: give the public ranges"),
    ],
)
def test_what_would_tell_of_rows_is_refused_by_a_site(tmp_path, which, limits, sentence):
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        raise RuntimeError(_second(which, sites(tmp_path, **limits), tmp_path))


def test_a_server_cannot_ask_about_training_rows(tmp_path):
    transport = sites(tmp_path)
    deployed(private(), transport, tmp_path)
    for question in ("gradients", "loss", "histogram", "inner"):
        about = {"kind": "ask", "run": "run", "question": question, "split": "train"}
        vectors = {"0": torch.zeros(25, dtype=torch.float64), "1": torch.zeros(1).double()}
        reply = Message.from_bytes(transport.handlers["va"](Message(about, vectors).to_bytes()))
        assert reply.about["kind"] == "refusal", question
    assert Ledger(tmp_path / "va").spent()[0].calls == 3


def test_the_command_tells_and_confirms(tmp_path, capsys):
    (tmp_path / "site.toml").write_text(
        'name = "va"\n[data]\nname = "heart"\n[limits]\nepsilon = 5'
    )
    assert main(["deploy", "ledger", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing was released yet\n"
    ledger = Ledger(tmp_path)
    ledger.secret()
    ledger.charge(release(whole=4))
    assert main(["deploy", "ledger", str(tmp_path)]) == 0
    told = "rows: epsilon 4.377 spent, at delta 1e-05; limit epsilon 5; 1 runs, 1 calls\n"
    assert capsys.readouterr().out == told
    edit(ledger)
    assert main(["deploy", "ledger", str(tmp_path)]) == 2
    assert main(["deploy", "ledger", str(tmp_path), "--confirm", "a test"]) == 0
    assert "epsilon 4.377 spent" in capsys.readouterr().out
    assert json.loads(ledger.file.read_text())["confirmed"] == "a test"
