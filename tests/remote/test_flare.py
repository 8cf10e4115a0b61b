"""Runs on NVIDIA FLARE: real processes, mutual TLS, kills. They compute what the simulator does."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployment import EXPERIMENTS, HEART, SITES, assert_same, experiment, simulated
from flare import LONG, Flare, descendants, free_port, provisioned, running, until

from fedminimax.config import Experiment
from fedminimax.remote.consortium import check_certificate, enrol, init

pytest.importorskip("nvflare", reason="pip install 'fedminimax[nvflare]'")

pytestmark = pytest.mark.slow

CODASCA = {"name": "codasca", "lr": 0.5, "local_steps": 2, "stage_rounds": 7}
TWENTY = experiment(HEART, "auc", CODASCA, rounds=20)
LONG_RUN = experiment(HEART, "auc", CODASCA, rounds=60)
FESS = experiment(
    {"name": "quadratic", "clients": 4, "dimension": 3, "noise": 0.5, "rows": 12},
    "quadratic",
    {"name": "fess_gda", "local_steps": 2},
    rounds=60,
)


@pytest.fixture(scope="module")
def flare(tmp_path_factory):
    with running(tmp_path_factory.mktemp("flare")) as made:
        yield made


def test_codasca_on_four_hospitals_with_mutual_tls(flare):
    assert_same(flare.run(TWENTY, "twenty"), simulated(TWENTY))


def handshake(known, folder=None, kit="kit"):
    """What the server says to one who connects with the certificate of that folder, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if folder is not None:
        startup = folder / kit / "startup"
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
    try:
        with (
            socket.create_connection(("127.0.0.1", known.port), timeout=20) as link,
            context.wrap_socket(link) as secure,
        ):
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            return secure.recv(100)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_the_server_speaks_to_nobody_without_a_certificate_of_its_authority(flare, tmp_path):
    other = provisioned(tmp_path)  # another authority, with sites of the same names
    until(lambda: handshake(flare.known, flare.home / "va"), "the server")
    assert not handshake(flare.known)
    assert not handshake(flare.known, other.home / "va")
    # And it listens on this machine only.
    rows = [line.split() for kind in ("tcp", "tcp6") for line in sockets(kind)]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    listening = {address for address, port in places if int(port, 16) == flare.known.port}
    assert listening
    assert listening <= LOOPBACK


# 127.0.0.1, the same written in IPv6, and ::1, as the kernel lists them
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def sockets(kind):
    return Path(f"/proc/net/{kind}").read_text().splitlines()[1:]


def test_a_site_without_a_fitting_certificate_is_told_so(tmp_path):
    one, two = provisioned(tmp_path / "one"), provisioned(tmp_path / "two")
    one.hold(HEART)
    startup = one.home / "va" / "kit" / "startup"
    (startup / "client.crt").rename(startup / "away.crt")
    one.start("va")
    assert one.processes.pop("va").wait(300) == 2
    assert "there is no client.crt in" in one.said("va")
    foreign = two.home / "va" / "kit" / "startup"
    for name in ("client.crt", "client.key", "rootCA.pem"):
        (startup / name).write_bytes((foreign / name).read_bytes())
    one.start("va")
    assert one.processes.pop("va").wait(300) == 2
    assert "is not of the authority that the invitation names" in one.said("va")


def test_a_site_joins_again_with_a_new_key_in_a_folder_of_another_name(tmp_path):
    folder, site = tmp_path / "consortium", tmp_path / "elsewhere"
    known = init(folder, ("va",))
    (site / "packaging" / "old").mkdir(parents=True)  # of an installation that failed
    enrol(folder, site, "va")
    check_certificate(site, known, "va")
    with pytest.raises(ValueError, match=r"is of 'va', but .*site.toml says name = 'hungary'"):
        check_certificate(site, known, "hungary")
    first = (site / "kit" / "startup" / "client.crt").read_bytes()
    with pytest.raises(ValueError, match="to join again with a new key"):
        enrol(folder, site, "va")
    for name in ("request", "kit"):
        shutil.rmtree(site / name)
    enrol(folder, site, "va")
    check_certificate(site, known, "va")
    assert (site / "kit" / "startup" / "client.crt").read_bytes() != first


def test_no_key_leaves_the_folder_it_was_made_in_and_no_code_comes_with_a_job(flare):
    for file in (flare.folder / "approved").glob("*.zip"):
        assert not [n for n in zipfile.ZipFile(file).namelist() if n.endswith(".key")]
    keys = [p.relative_to(flare.home).parts[0] for p in flare.home.rglob("*.key")]
    # A site has its key, in the request and in its kit, and its identity.
    assert sorted(keys) == sorted(["consortium"] * 3 + [n for n in SITES for _ in range(3)])
    for name in SITES:
        local = flare.home / name / "kit" / "local"
        rights = json.loads((local / "authorization.json").read_text())["permissions"]
        assert all(role.get("byoc", "none") == "none" for role in rights.values())
        allowed = json.loads((local / "resources.json").read_text())["class_allow_list"]
        assert allowed[1:] == ["fedminimax.remote.flare.job.RunSite"]


# What sites compute is tested without FLARE: here one that keeps states and has several phases.
OTHERS = ("ada_fgda", "fess_gda", "local_scgdam", "fed_dr_scgd", "sagda", "compressed")


@pytest.mark.parametrize(
    "name", ["stages", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_methods_on_flare(name, flare):
    assert_same(flare.run(EXPERIMENTS[name], name), simulated(EXPERIMENTS[name]))


@pytest.mark.full
def test_server_and_site_killed_at_random_moments_change_nothing(flare):
    chance = random.Random(7)
    long = replace(LONG_RUN, run=replace(LONG_RUN.run, rounds=400))  # it must outlast the kills
    process = flare.begin(long, "killed", "--timeout", "10")
    for victims in (("server",), ("va",), ("server", "hungary")):
        done = flare.served("killed").beat().get("round", 0)
        flare.reached("killed", done + chance.randrange(2, 8))
        time.sleep(chance.random())
        session = flare.served("killed").session()
        for victim in victims:
            flare.kill(victim)
        while flare.served("killed").session() == session:
            assert process.poll() is None, flare.said("killed")
            time.sleep(0.2)
    assert process.wait(LONG) == 0, flare.said("killed")
    assert flare.served("killed").session() >= 4
    assert_same(flare.point("killed"), simulated(long))


def test_a_masked_run_goes_through_the_death_of_a_site_to_the_bits_of_the_simulation(flare):
    masked = Experiment.from_table(LONG_RUN.to_table() | {"messages": {"reduce": "masked"}})
    process = flare.begin(masked, "masked")
    flare.reached("masked", 5)
    flare.kill("va")
    assert process.wait(LONG) == 0, flare.said("masked")
    assert flare.served("masked").session() > 1
    for mine, theirs in zip(flare.point("masked"), simulated(masked), strict=True):
        assert torch.equal(mine, theirs)


def test_who_watches_is_killed_and_started_again(flare):
    long = replace(LONG_RUN, run=replace(LONG_RUN.run, rounds=400))
    served = flare.served("unwatched")
    watch = flare.begin(long, "unwatched", "--timeout", "10")
    flare.reached("unwatched", 3)
    keeper = flare.processes.pop("server")
    orphans = descendants(keeper.pid)
    try:
        for process in (watch, keeper):
            process.kill()
            process.wait()
        flare.reached("unwatched", served.beat()["round"] + 2)  # FLARE and the run go on
        flare.start("server")
        assert flare.processes.pop("server").wait(300) == 2
        assert "another process is at work in" in flare.said("server")
    finally:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        flare.start("server")
    watch = flare.begin(long, "unwatched", "--timeout", "10")
    assert watch.wait(LONG) == 0, flare.said("unwatched")
    assert served.session() >= 2
    assert_same(flare.point("unwatched"), simulated(long))


@pytest.mark.full
def test_a_site_that_stands_still_for_a_while_changes_nothing(flare):
    process = flare.begin(LONG_RUN, "stalled", "--timeout", "5")
    flare.reached("stalled", 5)
    flare.kill("hungary", signal.SIGSTOP)
    time.sleep(20)
    flare.kill("hungary", signal.SIGCONT)
    assert process.wait(LONG) == 0, flare.said("stalled")
    assert_same(flare.point("stalled"), simulated(LONG_RUN))
    log = (flare.served("stalled").path / "sites.log").read_text()
    assert "site 'hungary'" in log


@pytest.mark.parametrize("policy", ["skip", pytest.param("fail", marks=pytest.mark.full)])
def test_a_site_that_dies_for_good(policy, tmp_path):
    with running(tmp_path) as flare:
        process = flare.begin(FESS, policy, "--policy", policy, "--timeout", "5")
        flare.reached(policy, 3)
        struck = flare.processes.pop("va")
        struck.send_signal(signal.SIGSTOP)  # so that it does not start FLARE again
        flare.processes["dead"] = struck
        flare.kill("dead")
        struck.kill()
        code = process.wait(LONG)
        ended = flare.served(policy).ended()
        if policy == "skip":
            assert (code, ended["outcome"], ended["rounds"]) == (0, "finished", 60)
            log = (flare.served(policy).path / "sites.log").read_text()
            assert "site 'va'" in log
            assert "goes on without it" in log
        else:
            assert code == 1
            assert "site 'va' in round" in ended["outcome"]
            assert "The run stops" in ended["outcome"]


def test_a_method_for_all_sites_is_refused_skip_at_once(flare):
    process = flare.begin(TWENTY, "refused", "--policy", "skip")
    assert process.wait(300) == 2
    assert "all sites take part, so none can be skipped" in flare.said("refused")


def test_kits_made_centrally_and_plain_links_work_and_are_warned_of(tmp_path):
    flare = Flare(tmp_path / "c" / "sites", tmp_path / "c")
    made = subprocess.run(
        flare.command(
            *("init", flare.folder, "--sites", ",".join(SITES), "--port", free_port()),
            *("--plain", "--central"),
        ),
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert "NOT encrypted" in made.stderr
    assert "can pose as any site" in made.stderr
    try:
        flare.hold(HEART)
        for name in ("server", *SITES):
            flare.start(name)
        which = EXPERIMENTS["sagda"]
        assert_same(flare.run(which, "plain"), simulated(which))
        assert "NOT encrypted" in flare.said("server")
    finally:
        flare.stop()
