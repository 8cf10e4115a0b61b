"""What docs/build.py makes stands in the pages, examples print what they show, the site builds."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fedminimax import cli
from fedminimax.algorithms import METHODS
from fedminimax.data import SOURCES
from fedminimax.data.sources import look
from fedminimax.estimator import OBJECTIVES

ROOT = Path(__file__).parents[2]
METHOD_PAGES = {path.stem: path for path in (ROOT / "docs" / "methods").glob("[!R]*.md")}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
REFRESH = "run `make pages`"


def builder():
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = builder()
# Numbers that are trained differ in their last digits between machines: compared further below.
EXACT = {name: make for name, make in BUILD.MAKERS.items() if name != "output"}
PARTS = [found.groups() for page in BUILD.PAGES for found in BUILD.MADE.finditer(page.read_text())]
OUTPUTS = {arguments: text for kind, arguments, text in PARTS if kind == "output"}


@pytest.mark.parametrize("page", BUILD.PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_made_parts_are_what_the_code_says(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- made: ") == len(BUILD.MADE.findall(text)), "a made part has no end"
    assert BUILD.made(text, EXACT) == text, REFRESH


def test_every_method_has_a_page_with_its_sections():
    assert METHOD_PAGES.keys() == METHODS.keys()
    wanted = ["Problem", "Update", "What travels", "When to use it", "When it fails", "Measured"]
    for path in METHOD_PAGES.values():
        found = re.findall(r"^## (.*)$", path.read_text(), re.MULTILINE)
        assert found == [*wanted, "The paper", "Options"], path.name


def test_the_costs_on_the_page_are_those_that_the_command_prints(capsys):
    shown = {}
    for line in (ROOT / "docs" / "choosing.md").read_text().splitlines():
        name, *cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        method = re.fullmatch(r"\[(\w+)\]\(methods/\1\.md\)", name)
        if method and len(cells) == 7:
            shown[method[1]] = cells
    assert shown.keys() == METHODS.keys()
    for name, cells in shown.items():
        assert cli.main(["list", name]) == 0
        printed = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
        assert [line[1] for line in printed if line[0] in BUILD.HEADINGS[1:-1]] == cells


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_page_advises_what_the_estimator_does_by_default(name):
    objective = OBJECTIVES[name]
    page = (ROOT / "docs" / "choosing.md").read_text()
    advised = re.findall(r"\| `(\w+)` \| \[(\w+)\]", page)
    assert (objective.problem, objective.method) in advised


def test_every_example_is_shown_with_what_it_prints():
    scripts = {arguments for kind, arguments, _ in PARTS if kind == "script"}
    names = {path.relative_to(ROOT).as_posix() for path in EXAMPLES}
    assert names == scripts == {name.partition(" with ")[0] for name in OUTPUTS}


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def assert_alike(printed: str, shown: str) -> None:
    """The same words, and numbers that differ by no more than other processors make them."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), REFRESH
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=0.03, abs=0.03), REFRESH


def shown_in(text: str) -> str:
    return re.fullmatch(r"\s*```text\n(.*)```\s*", text, re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_print_what_their_pages_show(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # No data set is here but what ships with the package, whatever this machine has.
    for name in ("FEDMINIMAX_DATA", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    runpy.run_path(str(path), run_name="__main__")
    assert_alike(capsys.readouterr().out, shown_in(OUTPUTS[path.relative_to(ROOT).as_posix()]))


@pytest.mark.slow
@pytest.mark.parametrize("example", [name for name in OUTPUTS if " with " in name])
def test_examples_print_the_same_with_data_sets(example, tmp_path, monkeypatch, capsys):
    script, _, needed = example.partition(" with ")
    copies = [[copy.name for copy in file.copies] for file in SOURCES[needed].files]
    if not all(look(SOURCES[needed], names) for names in copies):
        pytest.skip(f"{needed} is not here: fedminimax data fetch {needed}")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert_alike(capsys.readouterr().out, shown_in(OUTPUTS[example]))


@pytest.mark.slow
def test_the_site_builds_and_asks_nothing_of_the_network(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {path.name for path in pages} >= {"index.html", "choosing.html", "codasca.html"}
    for path in pages:
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?([^\s\">]+)", text)
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], path
    for path in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?https?:", path.read_text()), path
