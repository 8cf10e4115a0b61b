"""The page of runs as they go: what it says, and whom it answers."""

import http.client
import json
import re
import subprocess
import sys
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest
from browser import CHROMIUM, Browser

from fedminimax import cli
from fedminimax.cli.web import serve
from fedminimax.report.live import Going

EVIL = "<img src=x onerror=alert(1)>"
SETTINGS = """
[data]
name = "folder"
path = "{path}"
label = "disease"
[model]
name = "linear"
[problem]
name = "auc"
[method]
name = "codasca"
[run]
rounds = 4
evaluate_every = 2
executor = "debug"
"""


@pytest.fixture
def mine(tmp_path):
    """A file of an experiment on two sites, one with a name that would be a tag."""
    random = np.random.default_rng(0)
    (tmp_path / "sites").mkdir()
    for name in ("east", EVIL):
        lines = ["marker,disease", *(f"{random.normal() + (i % 3 == 0):.3f},{int(i % 3 == 0)}"
                                     for i in range(60))]  # fmt: skip
        (tmp_path / "sites" / f"{name.replace('/', '')}.csv").write_text("\n".join(lines) + "\n")
    path = tmp_path / "mine.toml"
    path.write_text(SETTINGS.format(path=tmp_path / "sites"))
    return path


def events(address):
    """What the page is told, one text after the other."""
    parts = urlsplit(address)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    link.request("GET", f"{parts.path}events")
    reply = link.getresponse()
    assert reply.headers["Content-Type"] == "text/event-stream"
    for line in reply:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])["html"]


def test_the_page_follows_a_run(mine, tmp_path):
    folder = tmp_path / "run"
    going = Going("mine", folder, "running", {"east": 2.0}, ["site 'west' is away"])
    with serve("mine", lambda: [going]) as address:
        told = events(address)
        assert "It has not been evaluated yet" in next(told)
        assert cli.main(["run", str(mine), "--quiet", "--folder", str(folder)]) == 0
        text = next(text for text in told if "<dd>4<small>of 4" in text)
    record = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])
    assert f"<dd>{record['validation']['auc']:.3f}<small>95 % interval" in text
    assert "2.00 s ago" in text
    assert "site &#x27;west&#x27; is away" in text
    assert EVIL not in text
    assert "&lt;img src=x" in text


def test_only_the_printed_address_is_answered_and_only_with_get():
    with serve("runs", list) as address:
        with urlopen(address) as reply:
            text = reply.read().decode()
            assert "connect-src 'self'" in text
            assert reply.headers["Cache-Control"] == "no-store"
            assert reply.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        base = re.match(r"http://127\.0\.0\.1:\d+/", address)
        assert base is not None
        for asked, code in (
            (base[0], 404),
            (f"{base[0]}{'x' * 22}/", 404),
            (f"{address}..", 404),
            (Request(address, headers={"Host": "example.org"}), 403),
            (Request(address, data=b"x"), 501),
        ):
            with pytest.raises(HTTPError) as refused:
                urlopen(asked)
            refused.value.close()
            assert refused.value.code == code
    with pytest.raises(OSError, match="refused"):
        urlopen(address)


def test_a_run_says_where_it_is_watched(mine, tmp_path, capsys):
    folder = tmp_path / "run"
    assert cli.main(["run", str(mine), "--web", "--quiet", "--folder", str(folder)]) == 0
    said = capsys.readouterr().err
    assert re.search(r"watch it at http://127\.0\.0\.1:\d+/[\w-]{22}/", said)


def test_a_consortium_without_runs_has_a_page(tmp_path):
    """By the command itself, until it is told to end."""
    (tmp_path / "runs").mkdir()
    code = "import sys; from fedminimax.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "deploy", "status", str(tmp_path), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            assert "No run has been asked for yet" in next(events(address))
        finally:
            process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_live_page_in_chromium(mine, tmp_path, dark):
    folder = tmp_path / "run"
    state = ["round 0/4, running"]
    with (
        serve("mine", lambda: [Going("mine", folder, state[0])]) as address,
        Browser(tmp_path / "profile") as browser,
    ):
        for width in (1280, 390):
            browser.open(address, width, dark)
            assert browser.wait("document.querySelector('main').innerText.includes('running')")
            assert browser.value("document.documentElement.scrollWidth") == width
        assert cli.main(["run", str(mine), "--quiet", "--folder", str(folder)]) == 0
        state[0] = "round 4/4, finished"
        assert browser.wait("document.querySelector('main').innerText.includes('finished')")
        assert browser.wait("document.querySelectorAll('main .chart').length == 2")
        assert browser.value("document.images.length") == 0  # a name is no tag
        browser.picture(tmp_path / "live.png")
        assert browser.value("document.documentElement.scrollWidth") == 390
        assert browser.complaints == []
        asked = {place for place in browser.asked if not place.startswith("data:")}
        assert asked == {address, f"{address}events"}
