"""A run's folder, between the one who asks for the run and the process that serves it."""

import dataclasses
import functools
import time

import pytest
from deployment import EXPERIMENTS, SITES, assert_same, in_process, simulated

from fedminimax.cli import main
from fedminimax.config import ConfigError
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.folder import json_text
from fedminimax.engine.state.lock import locked
from fedminimax.experiment import load
from fedminimax.remote import served as module
from fedminimax.remote.calls import Faults
from fedminimax.remote.consortium import FOLDER, Consortium
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.served import Served, serve

WHICH = EXPERIMENTS["controls"]


@pytest.fixture
def asked(tmp_path):
    """A consortium, and a run that was asked for."""
    folder = tmp_path / "consortium"
    folder.mkdir()
    Consortium("consortium", SITES, "localhost", 8702, True).write(folder / FOLDER)
    served = Served(folder, "controls")
    served.ask_for(WHICH, Faults(pause=0.0, patience=0.0), SITES)
    return served


def status(served, capsys):
    assert main(["deploy", "status", str(served.consortium)]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_a_run_that_is_asked_for_is_served_to_its_end(asked, tmp_path, capsys):
    assert status(asked, capsys).startswith("controls: round 0/5, silent")
    serve(asked.consortium, "controls", in_process(WHICH, tmp_path))
    ended = asked.ended()
    assert (ended["outcome"], ended["rounds"], ended["good"]) == ("finished", 5, True)
    assert_same(load(asked.path).point, simulated(WHICH))
    assert status(asked, capsys) == "controls: round 5/5, finished"
    # Each site was heard during the run, before its last beat.
    assert set(asked.heard()) == set(SITES)
    assert all(ago >= 0 for ago in asked.heard().values())


def test_a_full_disk_ends_a_run_with_that_reason_and_it_goes_on_later(asked, tmp_path, monkeypatch):
    real, transport = checkpoint.os.replace, in_process(WHICH, tmp_path)
    full_from = asked.path / "checkpoints" / "round-0000002.safetensors"

    def replace(source, target):
        full = full_from.exists() and (asked.path / module.RESERVE).exists()
        if full and asked.path in target.parents:
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", replace)
        ended = serve(asked.consortium, "controls", transport)
    assert "No space left on device" in ended["outcome"]
    assert asked.ended()["outcome"] == ended["outcome"]
    assert asked.over()
    assert serve(asked.consortium, "controls", transport)["outcome"] == "finished"
    assert_same(load(asked.path).point, simulated(WHICH))


class Stopping(InProcess):
    """Somebody stops the run while its sites are called."""

    def __init__(self, handlers, served):
        super().__init__(handlers)
        self.served = served

    def call(self, sites, message, timeout):
        self.served.stop()
        return super().call(sites, message, timeout)


def test_a_run_that_is_stopped_goes_on_when_it_is_asked_for_again(asked, tmp_path, capsys):
    transport = in_process(WHICH, tmp_path)
    assert main(["deploy", "stop", str(asked.consortium), "another"]) == 2
    assert "nobody has asked for a run called 'another'" in capsys.readouterr().err
    assert main(["deploy", "stop", str(asked.consortium), "controls"]) == 0
    serve(asked.consortium, "controls", Broken({}))  # no site is asked for anything
    assert asked.ended()["outcome"] == "stopped before it began"
    asked.ask_for(WHICH, Faults(), SITES)
    serve(asked.consortium, "controls", Stopping(transport.handlers, asked))
    assert asked.ended()["outcome"] == "stopped: interrupted after round 1"
    assert not asked.ended()["again"]
    asked.stop()
    serve(asked.consortium, "controls", Broken({}))
    assert status(asked, capsys) == "controls: round 1/5, stopped before it began"
    asked.ask_for(WHICH, Faults(), SITES)
    serve(asked.consortium, "controls", transport)
    assert asked.session() == 4
    assert_same(load(asked.path).point, simulated(WHICH))


class Lost(InProcess):
    """An engine that does not take a site back."""

    rejoins = False

    def call(self, sites, message, timeout):
        replies, _ = super().call([name for name in sites if name != "va"], message, timeout)
        return replies, {"va": "no reply within 60 s"}


def test_a_site_that_the_engine_cannot_take_back_has_the_run_started_again(asked, tmp_path):
    serve(asked.consortium, "controls", Lost(in_process(WHICH, tmp_path).handlers))
    assert asked.ended()["again"]
    assert "site 'va' in round 0: no reply within 60 s" in asked.ended()["outcome"]
    assert "the run is started again" in (asked.path / "sites.log").read_text()
    serve(asked.consortium, "controls", in_process(WHICH, tmp_path))
    assert_same(load(asked.path).point, simulated(WHICH))


class Broken(InProcess):
    def call(self, sites, message, timeout):
        raise OSError("no space left")


def test_an_error_that_nobody_expected_is_told(asked, tmp_path, capsys):
    serve(asked.consortium, "controls", Broken({}))
    told = "the server of the run failed with OSError: no space left"
    assert (asked.ended()["outcome"], asked.ended()["again"]) == (told, True)
    assert told in (asked.path / "sites.log").read_text()
    assert "Traceback" in capsys.readouterr().err


def test_a_run_that_another_process_serves_is_left_alone(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "locked", functools.partial(locked, seconds=0.0))
    with locked(asked.path):
        ended = serve(asked.consortium, "controls", in_process(WHICH, tmp_path))
    assert "another process is at work in" in ended["outcome"]
    assert not asked.beat()
    assert not asked.ended()


def test_a_run_in_its_first_second_is_running(asked, capsys):
    told(asked, time.monotonic())
    assert asked.at_work()
    assert status(asked, capsys) == "controls: round 0/5, running"


def told(served, clock):
    """A beat of that time."""
    (served.path / "beat.json").write_text(json_text({"round": 0, "clock": clock}))


def test_a_beat_of_before_the_machine_started_is_of_no_server_at_work(asked):
    told(asked, time.monotonic() + 3600)
    assert not asked.at_work()
    told(asked, time.monotonic() - module.SILENT - 1)
    assert not asked.at_work()


def test_a_server_at_work_does_not_seem_dead_when_the_clock_is_set(asked, monkeypatch):
    class Shifted(InProcess):
        def call(self, sites, message, timeout):
            now = time.time()
            monkeypatch.setattr(time, "time", lambda: now + 3600)
            raise ConfigError(f"at work: {asked.at_work()}")

    assert serve(asked.consortium, "controls", Shifted({}))["outcome"] == "at work: True"


def test_a_run_at_work_is_not_asked_for_with_other_settings(asked, tmp_path):
    class Asking(InProcess):
        def call(self, sites, message, timeout):
            asked.ask_for(WHICH, Faults(pause=0.0, patience=0.0), SITES)
            with pytest.raises(ConfigError, match="is at work with other settings: stop it first"):
                asked.ask_for(WHICH, Faults("fail"), SITES)
            return super().call(sites, message, timeout)

    serve(asked.consortium, "controls", Asking(in_process(WHICH, tmp_path).handlers))
    assert asked.ended()["outcome"] == "finished"


def test_another_experiment_is_not_taken_for_the_same_run(asked, tmp_path):
    transport = in_process(WHICH, tmp_path)
    serve(asked.consortium, "controls", Stopping(transport.handlers, asked))
    asked.ask_for(EXPERIMENTS["ada_fgda"], Faults(), SITES)
    serve(asked.consortium, "controls", transport)
    assert "is of another experiment or of other sites" in asked.ended()["outcome"]


def test_a_finished_run_stays_finished_whatever_is_served_later(asked, tmp_path):
    serve(asked.consortium, "controls", in_process(WHICH, tmp_path))
    files = [asked.path / name for name in ("ended.json", "session.json", "beat.json")]
    before = [file.read_bytes() for file in files]
    # A second job of the run was waiting in FLARE's queue.
    assert serve(asked.consortium, "controls", Broken({}))["outcome"] == "finished"
    assert [file.read_bytes() for file in files] == before


def test_what_cannot_even_be_read_ends_the_session_with_a_sentence(asked, capsys):
    (asked.consortium / "allow.toml").write_text('model.ours = "nowhere_to_be_found:Net"\n')
    ended = serve(asked.consortium, "controls", Broken({}))
    assert "[allow] model.ours" in ended["outcome"]
    assert "nowhere_to_be_found" in ended["outcome"]
    assert asked.over()
    assert (asked.session(), asked.ended()) == (1, {**ended, "session": 1})
    (asked.consortium / "allow.toml").unlink()
    assert status(asked, capsys) == f"controls: round 0/5, {ended['outcome']}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "hope"}, 'give "wait", "skip" or "fail"'),
        ({"timeout": 0.0}, "give seconds, above 0"),
        ({"least_replies": 0}, "give at least 1"),
        ({"largest_share": 1.5}, "give a share above 0"),
        ({"norm_factor": 0.5}, "give a number above 1"),
    ],
)
def test_faults_that_mean_nothing_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Faults(**options)


def test_a_run_between_sites_starts_from_no_other(asked):
    settings = dataclasses.replace(WHICH.run, start="runs/first")
    with pytest.raises(ConfigError, match="start is 'runs/first', but a run between sites begins"):
        asked.ask_for(dataclasses.replace(WHICH, run=settings), Faults(), SITES)


def test_more_replies_than_sites_are_refused_before_the_run(asked):
    with pytest.raises(ConfigError, match="least_replies is 5, but 4 sites take part"):
        asked.ask_for(WHICH, Faults(least_replies=5), SITES)
