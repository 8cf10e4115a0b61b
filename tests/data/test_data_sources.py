"""Where files are looked for, how they are fetched and verified, and what the commands say.

The server of these tests runs on this machine; nothing leaves it.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import official
import pytest
from official import DATA

from fedminimax.cli import main
from fedminimax.data import DATASETS, SOURCES
from fedminimax.data.download import fetch
from fedminimax.data.fama_french import FamaFrench
from fedminimax.data.image_sets import CIFAR10, MEDMNIST, MNIST, FashionMNIST, MedMNIST
from fedminimax.data.sites import DataError
from fedminimax.data.sources import OURS, Copy, File, Source, cache, find, places, record_of, verify
from fedminimax.report.datasets import markdown

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 4000
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDMINIMAX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT under any name; `fault` says how it fails, `ranges` what was asked for."""

    fault, ranges = "", []

    def do_GET(self):
        wanted = self.headers.get("Range", "")
        Handler.ranges.append(wanted)
        if Handler.fault == "gone":
            self.send_error(404)
            return
        start = int(wanted[6:-1]) if wanted and Handler.fault != "no ranges" else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        body = CONTENT[start:] if Handler.fault != "other" else bytes(10)
        self.send_response(206 if start else 200)
        if Handler.fault != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if Handler.fault == "cut" else body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    Handler.fault, Handler.ranges = "", []
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()
    thread.join()


def made(url: str, digest: str = MD5, by: str = "the test") -> Source:
    file = File(f"{url}/a.bin", (Copy("a.bin", digest, by),))
    return Source("made", "Made up", "made-up", "none", "https://example.org", (file,))


# Where files are looked for


def test_the_places_are_searched_in_order(tmp_path, monkeypatch):
    source = made("")
    found = []
    for place in ("cache/fedminimax", "mine", "given"):
        folder = tmp_path / place / "made-up"
        folder.mkdir(parents=True)
        (folder / "A.bin").touch()
        if place == "mine":
            monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path / "mine"))
        found.append(find(source, ("a.bin",), str(tmp_path / "given")))
    assert [path.relative_to(tmp_path).parts[0] for path in found] == ["cache", "mine", "given"]
    assert places(tmp_path / "given") == [
        *(tmp_path / "given", tmp_path / "mine", tmp_path / "cache" / "fedminimax")
    ]
    # The folder itself comes before the data set's own in it; the first name before the others.
    (tmp_path / "given" / "a.bin").touch()
    assert find(source, ("a.bin",), str(tmp_path / "given")) == tmp_path / "given" / "a.bin"
    (tmp_path / "given" / "b.bin").touch()
    assert find(source, ("b.bin", "a.bin"), str(tmp_path / "given")).name == "b.bin"


@pytest.mark.parametrize(
    ("platform", "variables", "wanted"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/fedminimax"),
        ("linux", {}, "/home/me/.cache/fedminimax"),
        ("darwin", {}, "/home/me/Library/Caches/fedminimax"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/fedminimax"),
    ],
)
def test_the_cache_is_where_the_platform_has_it(monkeypatch, platform, variables, wanted):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", platform)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache() == Path(wanted)


def test_every_data_set_with_files_is_searched_for_alike(tmp_path):
    for name, kind in DATASETS.items():
        if not hasattr(kind, "source") or name == "heart":
            continue
        data = kind(folder=str(tmp_path / "none"))
        read = getattr(data, "client_rows", None) or data.read
        with pytest.raises(DataError) as caught:
            read()
        said = str(caught.value)
        assert str(tmp_path / "none") in said
        assert str(tmp_path / "cache" / "fedminimax") in said
        command = re.search(r"`fedminimax data fetch (\w+)`", said)
        assert name == "gusto" if command is None else command[1] in SOURCES


# Fetching


def test_a_file_is_fetched_checked_and_kept(server, tmp_path):
    told = []
    source = made(server)
    found = fetch(source, tmp_path, lambda *args: told.append(args))
    path = tmp_path / "made-up" / "a.bin"
    assert found == {path: True}
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]
    assert told[0] == ("a.bin", 0, len(CONTENT))
    assert told[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    assert fetch(source, tmp_path) == {path: False}
    assert len(Handler.ranges) == 1
    assert fetch(source) == {tmp_path / "cache/fedminimax/made-up/a.bin": True}


def test_what_is_wrong_is_thrown_away(server, tmp_path):
    Handler.fault = "other"
    with pytest.raises(DataError, match=f"has the checksum md5:.*, but the test says {MD5}"):
        fetch(made(server), tmp_path)
    assert list((tmp_path / "made-up").iterdir()) == []


@pytest.mark.parametrize("then", ["", "no ranges", "no length"])
def test_an_interrupted_download_goes_on(server, tmp_path, then):
    Handler.fault = "cut"
    with pytest.raises(DataError, match="what has come is kept, and the next try goes on from"):
        fetch(made(server), tmp_path)
    part = tmp_path / "made-up" / "a.bin.part"
    assert part.stat().st_size == len(CONTENT) // 2
    assert not (tmp_path / "made-up" / "a.bin").exists()
    Handler.fault = then
    (path,) = fetch(made(server), tmp_path)
    assert path.read_bytes() == CONTENT
    assert not part.exists()
    assert Handler.ranges == ["", f"bytes={len(CONTENT) // 2}-"]


def test_a_download_that_only_lacked_its_name_is_taken(server, tmp_path):
    folder = tmp_path / "made-up"
    folder.mkdir()
    (folder / "a.bin.part").write_bytes(CONTENT)
    (path,) = fetch(made(server), tmp_path)
    assert path.read_bytes() == CONTENT


def test_without_a_checksum_the_first_download_is_recorded(server, tmp_path):
    source = made(server, digest="", by="")
    (tmp_path / "made-up").mkdir()
    (tmp_path / "made-up" / "a.bin.part").write_bytes(b"of another day")
    (path,) = fetch(source, tmp_path)
    # Nothing would tell that two halves do not fit: it began anew.
    assert Handler.ranges == [""]
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert record_of(path).read_text() == f"{sha256}  a.bin\n"
    copy = source.files[0].copies[0]
    assert verify(path, copy) == (True, "sha256 as when it came")
    path.write_bytes(CONTENT[:-1])
    assert verify(path, copy).good is False
    record_of(path).unlink()
    assert verify(path, copy).good is None


def test_a_server_that_fails_is_told(server, tmp_path):
    Handler.fault = "gone"
    with pytest.raises(DataError, match=r"a\.bin cannot be fetched \(HTTP Error 404.*try again"):
        fetch(made(server), tmp_path)
    with pytest.raises(DataError, match=r"cannot be fetched .*download it by hand to"):
        fetch(made("http://127.0.0.1:1"), tmp_path)
    source = Source("b", "B", "b", "", "", (File("", (Copy("b.csv"),)),), "ask its owner")
    with pytest.raises(DataError, match=r"B is not offered for download .*: ask its owner"):
        fetch(source, tmp_path)


# Verifying


def test_a_file_that_was_packed_again_is_good(tmp_path):
    content = b"many bytes" * 100
    inside = {"": "md5:" + hashlib.md5(content).hexdigest()}
    copy = Copy("a.gz", "md5:" + 32 * "0", "the test", inside)
    file = tmp_path / "a.gz"
    for written, good in (
        (gzip.compress(content, 1), True),
        (gzip.compress(content[1:]), False),
        (gzip.compress(content)[:-4], False),
    ):
        file.write_bytes(written)
        assert verify(file, copy).good is good
    files = official.cifar10_files()
    inside = {
        Path(name).name: "sha256:" + hashlib.sha256(held).hexdigest()
        for name, held in files.items()
    }
    copy = Copy("a.tar.xz", "md5:" + 32 * "0", OURS, inside)
    file = tmp_path / "a.tar.xz"
    file.write_bytes(official.tar(files, "xz"))
    assert verify(file, copy) == (True, "packed again; what it holds is as published")
    last = list(files)[-1]
    for changed in ({last: b"x"}, {}):
        others = {name: held for name, held in files.items() if name != last}
        file.write_bytes(official.tar(others | changed, "xz"))
        assert verify(file, copy) == (False, "not as published: test_batch.bin")


def test_an_unpacked_archive_is_found_and_verified(tmp_path, capsys):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    assert main(["data", "fetch", "cifar10", "--folder", str(tmp_path)]) == 0
    assert "cifar-10-batches-bin is there" in capsys.readouterr().out
    assert main(["data", "verify", "cifar10", "--folder", str(tmp_path)]) == 1
    assert "WRONG: not as published: data_batch_1.bin" in capsys.readouterr().out
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.bin").write_bytes(CONTENT)
    good = verify(tmp_path / "a", Copy("a", inside={"b.bin": MD5}))
    assert good == (True, "unpacked; what it holds is as published")
    assert verify(tmp_path / "a", Copy("a")).good is None


def test_verdicts(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(CONTENT)
    assert verify(file, Copy("a.bin", MD5, "the test")) == (True, "md5 as the test says")
    file.write_bytes(b"")
    assert verify(file, Copy("a.bin", MD5, "the test")).good is False
    assert verify(file, Copy("a.bin", MD5, OURS)).good is None


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="the real files are not at hand")
def test_the_real_files_are_good(monkeypatch, capsys):
    monkeypatch.setenv("FEDMINIMAX_DATA", str(DATA))
    names = ["fashion_mnist", "mnist", "gusto", "fama_french", "heart", "cifar10"]
    assert main(["data", "verify", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + 4 + 1 + 1 + 4 + 1
    assert all(" good: " in line for line in lines)
    # Somebody packed two files of MNIST again.
    assert sum("packed again" in line for line in lines) == 2


# The sources


def test_every_file_has_an_address_a_name_and_whose_checksum_it_is():
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.title
        assert source.licence
        assert source.page.startswith("http")
        for file in source.files:
            first = file.copies[0]
            assert file.url.startswith("http") or source.instead
            assert not file.url or first.name in file.url
            for copy in file.copies:
                assert bool(copy.digest) == bool(copy.by)
                for digest in (copy.digest, *copy.inside.values()):
                    assert re.fullmatch(r"|md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", digest)
    assert {"fashion_mnist", "mnist", "cifar10", "cifar100", "stl10", "heart"} <= set(SOURCES)
    assert len(MEDMNIST) == 12
    assert MedMNIST(subset="octmnist").source.name == "octmnist"
    assert [file.copies[0].name for file in FamaFrench.source.files] == [
        "100_Portfolios_10x10_Daily_CSV.zip",
        "100_Portfolios_ME_OP_10x10_Daily_CSV.zip",
        "100_Portfolios_ME_INV_10x10_Daily_CSV.zip",
    ]


# The commands


@pytest.fixture
def local(server, monkeypatch):
    """A data set that the test's own server offers."""
    monkeypatch.setitem(SOURCES, "made", made(server))


def test_fetch_and_verify_from_the_command_line(local, tmp_path, capsys):
    path = tmp_path / "here" / "made-up" / "a.bin"
    folder = ["--folder", str(tmp_path / "here")]
    assert main(["data", "verify", "made", *folder]) == 1
    said = capsys.readouterr().out
    assert "made: a.bin is missing: type `fedminimax data fetch made`" in said
    assert main(["data", "fetch", "made", *folder]) == 0
    assert capsys.readouterr().out == f"made: {path} fetched\n"
    assert main(["data", "fetch", "made", *folder]) == 0
    assert capsys.readouterr().out == f"made: {path} is there\n"
    assert main(["data", "verify", "made", *folder]) == 0
    assert capsys.readouterr().out == f"made: {path} good: md5 as the test says\n"
    path.write_bytes(b"?")
    assert main(["data", "verify", *folder]) == 1
    assert f"made: {path} WRONG: not the md5 of the test" in capsys.readouterr().out


def test_a_fetch_goes_where_the_variable_says(local, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path / "mine"))
    assert main(["data", "fetch", "made"]) == 0
    assert (tmp_path / "mine" / "made-up" / "a.bin").exists()


def test_a_terminal_shows_a_bar(local, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["data", "fetch", "made", "--folder", str(tmp_path)]) == 0
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().out)  # without colours
    assert "a.bin ━" in plain


def test_list_says_what_is_here(tmp_path, capsys):
    official.write_idx(tmp_path / "fashion-mnist")
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert main(["data", "list", "--folder", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert set(SOURCES) <= set(lines)
    assert "3 of 4" in lines["fashion_mnist"]
    assert "4 of 4" in lines["heart"]
    assert "0 of 1" in lines["cifar10"]


def test_a_name_that_is_none_is_told(capsys):
    assert main(["data", "fetch", "fashion_mnit"]) == 2
    assert "did you mean 'fashion_mnist'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "fetch"])
    assert main(["data", "fetch", "heart"]) == 0  # it comes with the package


# The page


def test_the_page_has_the_table_that_the_code_makes():
    page = (ROOT / "docs" / "data.md").read_text()
    assert markdown() in page


def test_the_page_says_what_is_true():
    page = " ".join((ROOT / "docs" / "data.md").read_text().split())
    order = [page.index(word) for word in ("`data.folder`", "`FEDMINIMAX_DATA`", "cache")]
    assert order == sorted(order)
    for kind in (FashionMNIST, MNIST, CIFAR10):
        assert f"`{kind.source.folder}`" in page
    for count in ("3,333", "30,000", "2,777", "25,000"):
        assert count in page  # counted on the real files in test_data_images.py
    assert "stand-in for CATvsDOG" in page
    for command in re.findall(r"`fedminimax (data [^`]*)`", page):
        assert command.split()[1] in ("list", "fetch", "verify")
    for name in re.findall(r'name = "(\w+)"', page):
        assert name in DATASETS
