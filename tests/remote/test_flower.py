"""Runs on Flower. The commands of docs/deploying.md are run, with TLS and registered keys; without
services, the app's two halves speak to each other in this process."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deployment import (
    EXPERIMENTS,
    ROOT,
    SITES,
    assert_same,
    data_of,
    deployed,
    make_clone,
    simulated,
    write_site,
)
from flare import LONG, free_port

from fedminimax.cli import main
from fedminimax.config import ConfigError, Experiment, Part, write_toml
from fedminimax.experiment import load
from fedminimax.remote.calls import Faults
from fedminimax.remote.flower.runs import NotFinishedError, answered, serve_app, write_app
from fedminimax.remote.served import Served
from fedminimax.remote.setup import sent_experiment
from fedminimax.remote.wire import Message

pytest.importorskip("flwr", reason="pip install 'fedminimax[flower]'")

from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.config import flatten_dict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedminimax.remote.flower.app import client
from fedminimax.remote.flower.transport import FlowerTransport, packed

WHICH = EXPERIMENTS["controls"]


class HereGrid(Grid):
    """Flower's grid, with the ClientApp of each node run in this process."""

    def __init__(self, nodes, folders):
        self.nodes, self.folders, self.replies = nodes, folders, {}
        self.spoiled = {}  # node -> what comes in place of its reply

    def set_run(self, run): ...
    def create_message(self, *given, **named): ...  # type: ignore[override]  # as narrow as the test needs
    def send_and_receive(self, messages, *, timeout=None): ...  # type: ignore[override]  # as narrow as the test needs

    @property
    def run(self): ...  # type: ignore[override]

    def get_node_ids(self):
        return [node.node_id for node in self.nodes]

    def get_nodes(self):
        return self.nodes

    def push_messages(self, messages):
        return [self.push(message) for message in messages]

    def push(self, message):
        number, node = str(len(self.replies)), message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = number  # as Flower does
        if node in self.spoiled:
            reply = FlowerMessage(self.spoiled[node], reply_to=message)
        else:
            context = Context(1, node, {"site": str(self.folders[node])}, RecordDict(), {})
            reply = client(message, context)
        self.replies[number] = reply
        return number

    def pull_messages(self, message_ids):
        return [self.replies[number] for number in message_ids]


def nodes(*names):
    return [NodeInfo(node_id=number + 1, name=name) for number, name in enumerate(names)]


@pytest.fixture
def grid(tmp_path, monkeypatch):
    for number in ("_run_id", "_node_id", "_task_id"):  # those of the process of a ServerApp
        monkeypatch.setattr(TaskIdentity, number, 1)
    for name in SITES:
        (tmp_path / name).mkdir()
        write_site(tmp_path / name, data_of(WHICH))
    return HereGrid(nodes(*SITES), {k + 1: tmp_path / name for k, name in enumerate(SITES)})


@pytest.fixture
def app(tmp_path):
    """The settings of an app, as Flower hands them to a ServerApp."""
    file = tmp_path / "controls.toml"
    file.write_text(write_toml(WHICH.to_table()))
    told = ["--sites", ",".join(SITES), "--home", str(tmp_path / "home"), "--policy", "fail"]
    assert main(["deploy", "flower", str(tmp_path / "app"), str(file), *told]) == 0
    table = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    return flatten_dict(table["tool"]["flwr"]["app"]["config"])


def test_an_app_is_served_to_the_end_and_not_begun_again(grid, app, tmp_path, capsys):
    serve_app(app, FlowerTransport(grid))
    assert_same(load(tmp_path / "home" / "runs" / "controls").point, simulated(WHICH))
    assert "round 5/5  train" in capsys.readouterr().out
    assert main(["deploy", "status", str(tmp_path / "home")]) == 0
    assert capsys.readouterr().out == "controls: round 5/5, finished\n"
    with pytest.raises(ConfigError, match="is finished: give another --name"):
        serve_app(app, FlowerTransport(grid))


@pytest.mark.parametrize("name", ["stages", "compressed"])
def test_message_stages_on_flower(name, grid, tmp_path):
    which = EXPERIMENTS[name]
    for name in SITES:
        write_site(tmp_path / name, data_of(which))
    run = deployed(which, FlowerTransport(grid), tmp_path)
    assert_same(run.point, simulated(which))


def test_a_run_that_was_ended_goes_on_when_the_app_is_run_again(grid, app, tmp_path):
    served = Served(tmp_path / "home", "controls")
    calls = FlowerTransport(grid)
    pushed = grid.push_messages

    def stopping(messages):
        served.stop()
        return pushed(messages)

    grid.push_messages = stopping
    with pytest.raises(NotFinishedError, match="interrupted after round 1"):
        serve_app(app, calls)
    grid.push_messages = pushed
    serve_app(app, calls)
    assert served.session() == 2
    assert_same(load(served.path).point, simulated(WHICH))


def test_an_app_tells_nothing_of_the_servers_data_but_its_name(tmp_path):
    data = {"name": "folder", "path": "/srv/our patients", "label": "died", "drop": ["nhs_number"]}
    table = EXPERIMENTS["codasca"].to_table() | {"data": data}
    write_app(
        tmp_path, Experiment.from_table(table), Faults(), SITES, Path("/srv/flower"), "controls"
    )
    app = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    sent = Experiment.from_table(tomllib.loads(app["config"]["experiment"]))
    assert sent.data == Part("folder", {"path": "", "label": ""})
    assert sent_experiment(sent) == sent_experiment(Experiment.from_table(table))


def test_a_folder_that_holds_an_app_is_not_overwritten(app, tmp_path, capsys):
    told = ["--sites", ",".join(SITES), "--home", str(tmp_path)]
    file = str(tmp_path / "controls.toml")
    assert main(["deploy", "flower", str(tmp_path / "app"), file, *told]) == 2
    assert "already: give another folder" in capsys.readouterr().err


def test_a_name_is_that_of_the_registered_key_and_of_one_node_only(grid):
    grid.nodes = nodes("cleveland", "va", "va", "")
    ping = Message({"kind": "ping", "run": "r"}, {}).to_bytes()
    replies, failures = FlowerTransport(grid).call(["cleveland", "hungary", "va"], ping, 1.0)
    assert Message.from_bytes(replies["cleveland"]).about["site"] == "cleveland"
    assert set(failures) == {"hungary", "va"}
    assert failures["hungary"].startswith("no SuperNodes whose keys are registered under this")
    assert failures["va"].startswith("2 SuperNodes whose keys")


def test_a_node_that_has_the_folder_of_another_site_is_refused(grid, app):
    grid.folders[2], grid.folders[3] = grid.folders[3], grid.folders[2]
    with pytest.raises(NotFinishedError, match="it is of site 'switzerland', not 'hungary'"):
        serve_app(app, FlowerTransport(grid))


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Error(8, "the ClientApp has crashed"), "Flower says: the ClientApp has crashed"),
        (RecordDict(), "the reply of site 'va' in round 0 is refused"),
        (packed(b"nothing"), "the reply of site 'va' in round 0 is refused"),
    ],
)
def test_what_is_no_reply_ends_the_run_with_a_sentence(grid, app, reply, sentence):
    grid.spoiled[4] = reply
    with pytest.raises(NotFinishedError, match=sentence):
        serve_app(app, FlowerTransport(grid))


def reason(reply):
    about = Message.from_bytes(reply).about
    assert about["kind"] == "refusal"
    return about["reason"]


def test_a_site_without_a_folder_says_so_and_tells_no_path(tmp_path, capsys):
    assert "start it with --node-config" in reason(answered({}, b""))
    gone = {"site": str(tmp_path / "gone")}
    assert reason(answered(gone, b"")).startswith("it cannot open its site folder; the log of its")
    assert str(tmp_path / "gone") in capsys.readouterr().err
    (tmp_path / "site.toml").write_text("nothing")
    assert str(tmp_path) not in reason(answered({"site": str(tmp_path)}, b""))
    said = capsys.readouterr().err
    assert str(tmp_path / "site.toml") in said
    assert "Traceback" not in said


PAGE = (ROOT / "docs" / "deploying.md").read_text().partition("\n## On Flower\n")[2]
COMMANDS = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]
# Every question about a split is a call, and every call starts four processes.
ALL_FOR_TRAINING = ["split.train=1.0", "split.validation=0.0", "split.test=0.0"]
CHANGES = ["rounds=5", "dtype=float64", *ALL_FOR_TRAINING]
# Before the commands that stop all: a SuperNode with a key that nobody has registered.
STRANGER = """
ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f flower/stranger
port=$(free_port)
flower-supernode --superlink 127.0.0.1:8000 --root-certificates flower/superlink.pem \\
  --host 127.0.0.1 --port $port --auth-supernode-private-key flower/stranger \\
  > stranger.out 2>&1 || true
"""
AGAIN = """
for attempt in 1 2 3 4 5; do
  flwr run heart-app consortium --stream
  if [ -e flower/runs/heart_codasca/ended.json ]; then break; fi
done
"""


def processes(folder):
    """All that were started with `folder` as the home of Flower, whoever their parent is."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={folder}/flower".encode() in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The page's commands, in double precision, on ports that are free."""
    folder = tmp_path_factory.mktemp("flower")
    make_clone(folder)
    look = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
    before = f"""
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
free_port() {{ "{sys.executable}" -c "{look}"; }}
"""
    text = COMMANDS.replace("kill $(jobs -p)", STRANGER).replace("rounds=5", " ".join(CHANGES))
    # Where a machine is so busy that Flower misses a heartbeat, it gives the run up.
    text = text.replace("flwr run heart-app consortium --stream", AGAIN)
    text = text.replace("--format json", "--format json > list.json")
    text = text.replace("port=$((port + 1))", "port=$(free_port)")
    text = re.sub(r"\b8000\b", str(free_port()), before + text)
    programs = Path(sys.executable).parent
    told = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    with open(folder / "said", "w") as said:
        script = subprocess.Popen(
            ["bash", "-e", "-c", text], cwd=folder, env=told, stdout=said, stderr=said
        )
    try:
        code = script.wait(6 * LONG)
    finally:
        for pid in processes(folder):  # none, unless something hangs
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        script.kill()
    assert code == 0, (folder / "said").read_text()[-5000:]
    return folder


@pytest.mark.slow
def test_the_commands_of_the_page_train_what_the_simulator_does(followed):
    served = Served(followed / "flower", "heart_codasca")
    assert served.ended()["outcome"] == "finished"
    listed = json.loads((followed / "list.json").read_text())
    states = [run["status"] for run in sorted(listed["runs"], key=lambda run: run["pending-at"])]
    assert states[-1] == "finished:completed"
    assert "heart_codasca: round 5/5, finished" in (followed / "said").read_text()
    which = Experiment.from_file(ROOT / "experiments" / "heart_codasca.toml", CHANGES)
    assert_same(load(served.path).point, simulated(which))


@pytest.mark.slow
def test_a_key_that_is_not_registered_is_refused(followed):
    said = (followed / "stranger.out").read_text()
    assert "Exit Code: 305" in said
    assert "Failed to activate SuperNode" in said
