"""What watches over a run and over FLARE's processes, without FLARE."""

import os
import socket
import threading
from dataclasses import replace

import pytest
from deployment import EXPERIMENTS, HEART, SITES, experiment, in_process
from flare import free_port, until
from test_served import Broken, Lost

from fedminimax.cli import main
from fedminimax.config import CHOICES, ConfigError, write_toml
from fedminimax.remote.calls import Faults
from fedminimax.remote.consortium import FOLDER, Consortium
from fedminimax.remote.flare import processes as flare
from fedminimax.remote.flare.processes import PID, Supervisor
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.served import Served, serve
from fedminimax.remote.site_file import EXAMPLE, register
from fedminimax.remote.wire import Message

WHICH = EXPERIMENTS["controls"]


@pytest.fixture(autouse=True)
def no_flare(monkeypatch):
    def away(consortium):
        raise OSError("there is no FLARE")

    monkeypatch.setattr(flare, "flare_missing", lambda: None)
    monkeypatch.setattr(flare, "flare_session", away)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "consortium"
    made.mkdir()
    Consortium("consortium", SITES, "localhost", 8702, True).write(made / FOLDER)
    return made


@pytest.fixture
def asked(folder):
    served = Served(folder, "controls")
    served.ask_for(WHICH, Faults(pause=0.0, patience=0.0), SITES)
    return served


class Here(Supervisor):
    """A submitted run is served in this process."""

    def __init__(self, served, transport):
        super().__init__(served.consortium, served, say=lambda text: None)
        self.transport = transport

    def _submitted(self):
        serve(self.served.consortium, self.served.name, self.transport)
        return True


@pytest.mark.parametrize("transport", [Lost, Broken])
def test_a_run_without_a_new_round_in_three_sessions_is_given_up(asked, transport, tmp_path):
    ended = Here(asked, transport(in_process(WHICH, tmp_path).handlers)).watch()
    assert asked.session() == 3
    assert not ended["good"]
    assert "started 3 times without a new round, and is given up" in ended["outcome"]
    assert str(asked.path / "sites.log") in ended["outcome"]
    if transport is Lost:
        assert "site 'va' in round 0: no reply" in ended["outcome"]
        assert "need longer than 60 s for an answer, raise --timeout" in ended["outcome"]
    else:
        assert "failed with OSError: no space left" in ended["outcome"]


class OneRound(InProcess):
    """An engine that breaks at the second phase of a session."""

    session = 0

    def call(self, sites, message, timeout):
        about = Message.from_bytes(message).about
        if about["kind"] == "phase":
            if about["call"][0] == self.session:
                raise OSError("broken")
            self.session = about["call"][0]
        return super().call(sites, message, timeout)


def test_a_run_that_gets_on_is_submitted_as_often_as_it_needs(asked, tmp_path):
    ended = Here(asked, OneRound(in_process(WHICH, tmp_path).handlers)).watch()
    assert (ended["outcome"], asked.session()) == ("finished", WHICH.run.rounds)


def test_a_run_that_the_server_s_process_cannot_read_ends_with_its_sentence(asked, monkeypatch):
    def unknown(self):
        raise ConfigError("[allow] model.ours: ModuleNotFoundError: No module named 'ours'")

    monkeypatch.setattr(Served, "request", unknown)
    ended = Here(asked, InProcess({})).watch()
    assert "No module named 'ours'" in ended["outcome"]
    assert asked.session() == 1


class Slow(InProcess):
    """Sites that answer a phase when they are allowed to."""

    def __init__(self, handlers):
        super().__init__(handlers)
        self.begun, self.allowed = threading.Event(), threading.Event()

    def call(self, sites, message, timeout):
        if Message.from_bytes(message).about["kind"] == "phase":
            self.begun.set()
            self.allowed.wait()
        return super().call(sites, message, timeout)


class Watching(Supervisor):
    """It submits nothing."""

    def _submitted(self):
        raise AssertionError("the run is at work already")


@pytest.mark.parametrize(
    ("stopped", "outcome"), [(False, "finished"), (True, "stopped: interrupted after round 1")]
)
def test_the_watch_over_a_run_at_work_is_taken_up_again(stopped, outcome, asked, tmp_path):
    serve(asked.consortium, "controls", Lost(in_process(WHICH, tmp_path).handlers))
    assert asked.ended()["again"]  # the end of a session before
    slow = Slow(in_process(WHICH, tmp_path).handlers)
    server = threading.Thread(target=serve, args=(asked.consortium, "controls", slow))
    server.start()
    try:
        slow.begun.wait()
        if stopped:
            asked.stop()
        watching = Watching(asked.consortium, asked, print, look=slow.allowed.set)
        ended = watching.watch()
    finally:
        slow.allowed.set()
        server.join()
    assert (ended["outcome"], ended["session"]) == (outcome, 2)


def test_a_run_that_another_job_has_finished_is_not_waited_for(asked, tmp_path):
    serve(asked.consortium, "controls", in_process(WHICH, tmp_path))
    assert Here(asked, Broken({})).watch()["outcome"] == "finished"
    assert asked.session() == 1


def test_a_run_that_waits_for_its_sites_is_stopped(asked):
    class Waiting(Supervisor):
        def _submitted(self):
            self.served.stop()
            return True

    ended = Waiting(asked.consortium, asked, print).watch()
    assert ended["outcome"] == "stopped before it began"


def test_a_run_that_no_server_takes_is_stopped(asked):
    asked.stop()
    said = []
    ended = Supervisor(asked.consortium, asked, said.append).watch()
    assert ended["outcome"] == "stopped before it began"
    assert said == ["the server did not take the run: there is no FLARE; it is tried again"]
    # Runs that are submitted at the same time have jobs of their own.
    assert (asked.path / "job" / "meta.json").exists()


def test_without_flare_nothing_is_submitted(asked, monkeypatch):
    monkeypatch.setattr(flare, "flare_missing", lambda: "NVIDIA FLARE is not installed")
    with pytest.raises(ConfigError, match="is not installed"):
        Supervisor(asked.consortium, asked, print)


def test_ctrl_c_ends_the_watch_and_says_that_the_run_goes_on(asked, monkeypatch, tmp_path, capsys):
    def pressed(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "watch", pressed)
    file = tmp_path / "controls.toml"
    file.write_text(write_toml(WHICH.to_table()))
    assert main(["deploy", "run", str(asked.consortium), str(file)]) == 130
    said = capsys.readouterr().err
    assert "controls is no longer watched; what has begun goes on by itself" in said
    assert "--resume" not in said


@pytest.fixture
def ours(monkeypatch):
    """A model that is not built in."""
    monkeypatch.setitem(CHOICES["model"], "ours", CHOICES["model"]["linear"])
    which = experiment(HEART, "auc", {"name": "codasca"}, rounds=2).to_table()
    table = which | {"model": {"name": "ours"}}
    monkeypatch.delitem(CHOICES["model"], "ours")
    return table


def test_the_server_takes_what_its_own_file_allows(folder, ours, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Supervisor, "watch", lambda self: {"outcome": "finished", "good": True})
    file = tmp_path / "ours.toml"
    file.write_text(write_toml(ours))
    command = ["deploy", "run", str(folder), str(file)]
    assert main(command) == 2
    assert "'ours'" in capsys.readouterr().err
    linear = CHOICES["model"]["linear"]
    place = f"{linear.__module__}:{linear.__qualname__}"
    (folder / "allow.toml").write_text(f'model.ours = "{place}"\n')
    assert main(command) == 0
    del CHOICES["model"]["ours"]  # as in the process that serves it
    assert Served(folder, "ours").request()[0].to_table()["model"]["name"] == "ours"


# Sites


def test_a_site_whose_rows_are_not_there_does_not_start(tmp_path, capsys):
    (tmp_path / "site.toml").write_text(EXAMPLE.format(name="va"))
    assert main(["deploy", "site", str(tmp_path)]) == 2
    assert "There is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "data", "sentence"),
    [
        ("age,disease\n40,0\n50,1\n", 'path = "rows.csv"\nlabel = "diseas"', "no label column"),
        ("age,disease\n", 'path = "rows.csv"\nlabel = "disease"', "has no rows"),
        ("", 'path = "rows.csv"\nlabel = "disease"', "rows.csv is empty"),
        ("", 'name = "heart"', "The data have no site 'hull'; they have cleveland"),
        ("", 'name = "fama_french"\nfolder = "nowhere"', "nowhere"),
    ],
)
def test_a_site_whose_rows_cannot_be_used_does_not_start(
    rows, data, sentence, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("FEDMINIMAX_DATA", raising=False)
    (tmp_path / "rows.csv").write_text(rows)
    (tmp_path / "site.toml").write_text(f'name = "hull"\n[data]\n{data}\n')
    assert main(["deploy", "site", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("raises_here:Net", r"model.ours: raises_here:Net .*\(RuntimeError: no licence\)"),
        ("no_python:Net", r"model.ours: no_python:Net .*\(SyntaxError: "),
        (".relative:Net", r"model.ours: .relative:Net .*\(TypeError: "),
        ("os:Net", r"model.ours: os:Net .*no attribute 'Net'"),
        (":Net", "model.ours is ':Net'; write \"package.module:Class\""),
        ("os:", "model.ours is 'os:'; write"),
    ],
)
def test_what_is_allowed_and_cannot_be_imported_is_told(place, sentence, tmp_path, monkeypatch):
    (tmp_path / "raises_here.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "no_python.py").write_text("def")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        register({"model": {"ours": place}})


def test_a_job_at_a_site_that_cannot_be_opened_refuses_and_tells_no_path(tmp_path, monkeypatch):
    pytest.importorskip("nvflare", reason="pip install 'fedminimax[nvflare]'")
    from fedminimax.remote.flare.job import RunSite

    (tmp_path / "site.toml").write_text(EXAMPLE.format(name="va"))
    monkeypatch.setenv("FEDMINIMAX_SITE", str(tmp_path))
    monkeypatch.setenv("FEDMINIMAX_HOME", "/home/of/the/user")
    monkeypatch.setenv("HOME", str(tmp_path))
    site = RunSite()
    site.open()
    about = Message.from_bytes(site.handle(b"")).about
    assert about["kind"] == "refusal"
    assert about["reason"] == "it cannot open its site folder; its log says more"
    assert os.environ["HOME"] == "/home/of/the/user"


def keep(folder, module, over):
    with flare._only_one(folder) as lock:
        flare._keep(folder, "kit", (module,), "FEDMINIMAX_SITE", lock, over)


def test_no_second_flare_is_started_beside_one_that_outlived_its_keeper(tmp_path, monkeypatch):
    kit = tmp_path / "kit"
    kit.mkdir()
    text = "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(1000)\n"
    (kit / "waits.py").write_text(text)
    left = []
    monkeypatch.setattr(flare, "_end", left.append)  # as if the keeper were killed
    over = threading.Event()
    keeper = threading.Thread(target=keep, args=(tmp_path, "waits", over))
    keeper.start()
    try:
        until((kit / "began").exists, "the process")
        until(lambda: len((tmp_path / PID).read_text().split()) == 2, "its number")
        numbers = [int(text) for text in (tmp_path / PID).read_text().split()]
    finally:
        over.set()
        keeper.join()
    try:
        assert numbers == [os.getpid(), left[0].pid]
        with pytest.raises(ConfigError, match=r"another process is at work in .*kill \$\(cat"):
            keep(tmp_path, "waits", over)
    finally:
        left[0].kill()
        left[0].wait()
    (tmp_path / PID).write_text(f"{os.getpid()}\n")  # the number of another, in a container
    keep(tmp_path, "waits", over)


class Counted(threading.Event):
    """Set after so many pauses, none of which takes its time."""

    def __init__(self, most):
        super().__init__()
        self.most, self.pauses = most, []

    def wait(self, timeout=None):
        if timeout is not None and timeout >= 1:
            self.pauses.append(timeout)
            if len(self.pauses) == self.most:
                self.set()
            return self.is_set()
        return super().wait(timeout)


def test_a_flare_that_ends_at_once_is_started_ever_less_often(tmp_path, capsys):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "ends.py").write_text("raise SystemExit(3)")
    over = Counted(5)
    keep(tmp_path, "ends", over)
    assert over.pauses == [2.0, 4.0, 8.0, 16.0, 32.0]
    first, *_, last = capsys.readouterr().err.splitlines()
    log = f"({tmp_path / 'kit'}.log says more)"
    assert first == f"FLARE ended with code 3; started again in 2 s {log}"
    assert last == f"FLARE ended with code 3 for the 5th time in a row; started again in 32 s {log}"


@pytest.fixture
def taken(tmp_path):
    """A consortium whose port another process has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield Consortium("consortium", SITES, "localhost", other.getsockname()[1], True)


@pytest.mark.parametrize("host", ["localhost", "server.hospital.org"])
def test_a_server_whose_port_is_taken_does_not_start(taken, host, tmp_path, monkeypatch, capsys):
    replace(taken, host=host).write(tmp_path / FOLDER)
    monkeypatch.setattr(flare, "check_date", lambda file, remedy: None)
    assert main(["deploy", "server", str(tmp_path)]) == 2
    told = f"the server cannot listen at port {taken.port}: Address already in use. End what"
    assert told in capsys.readouterr().err


def test_a_site_says_that_its_server_is_not_there(taken, capsys):
    flare.look_for(taken)
    assert not capsys.readouterr().err
    free = replace(taken, port=free_port())
    flare.look_for(free)
    assert f"note: there is no server at localhost:{free.port} yet" in capsys.readouterr().err
