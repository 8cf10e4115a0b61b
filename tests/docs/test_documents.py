"""Every block of the documents runs, parses, or says that it is text; and every link leads
somewhere."""

from __future__ import annotations

import glob
import importlib
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fedminimax as fm
from fedminimax import cli
from fedminimax.config import Experiment
from fedminimax.data.heart import FILES, HEADER
from fedminimax.data.synthetic import QuadraticData
from fedminimax.remote.site_file import SiteFile
from fedminimax.report.comparison import Comparison

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# Scripts that a page shows are run by test_pages.py, which also looks at what they print.
SHOWN = re.compile(r"<!-- made: script .*?<!-- end -->", re.DOTALL)
LANGUAGES = ("python", "bash", "toml", "csv", "text")
# Why a command is not run here, for the reader to see: it takes long, or needs what is not here.
NOT_RUN = re.compile(r"# (takes|needs) ")
# Their commands need the reader's own files, torchrun, a server, or minutes: test_quickstart,
# test_distributed, test_tuning_page and test_deploying_page run them.
ELSEWHERE = ("docs/quickstart.md", "docs/cluster.md", "docs/tuning.md", "docs/deploying.md")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    shown: bool  # a script, which stands in a file of its own


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    scripts = [found.span() for found in SHOWN.finditer(text)]
    found = []
    for fence in FENCE.finditer(text):
        line = text[: fence.start()].count("\n") + 1
        shown = any(start < fence.start() < end for start, end in scripts)
        name = page.relative_to(ROOT).as_posix()
        found.append(Block(name, line, fence[2], fence[3], shown))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def params(language: str) -> list:
    chosen = [b for b in BLOCKS if b.language == language and not b.shown]
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in chosen]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_fenced_and_says_what_it_is(page):
    text = page.read_text(encoding="utf-8")
    marks = [line for line in text.splitlines() if line.strip().startswith("```")]
    assert len(marks) == 2 * len(blocks_of(page)), "a fence is not closed"
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block.page}:{block.line} names no language"
    listed = False
    for before, line in zip(
        ["", *FENCE.sub("", text).splitlines()], FENCE.sub("", text).splitlines(), strict=False
    ):
        if line and not line.startswith(" "):
            listed = bool(re.match(r"([-*]|\d+\.) ", line))
        indented = line.startswith("    ") and not before.strip()
        assert listed or not indented, f"{page.name}: fence this block: {line.strip()}"


@pytest.mark.parametrize("block", params("python"))
def test_python_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "__main__"}
    exec(compile(block.text, f"{block.page}:{block.line}", "exec"), scope)
    if "search" in scope:
        assert scope["best"].outcome_ == "finished"
        assert scope["search"].score(scope["X_test"], scope["y_test"]) > 0.85
        again = fm.FederatedClassifier.load("runs/heart-model")
        assert again.operating_point_["sensitivity"] >= 0.9
    elif "model" in scope and "run" not in scope:
        assert scope["model"].score(scope["X"], scope["y"]) > 0.95
    else:
        assert scope["run"].outcome == "finished"


@pytest.mark.parametrize("block", params("toml"))
def test_settings_are_those_of_an_experiment(block, tmp_path):
    table = tomllib.loads(block.text)
    if block.page == "docs/deploying.md":
        (tmp_path / "site.toml").write_text(block.text)
        assert SiteFile.read(tmp_path).data["label"] in block.text
        return
    if "methods" in table:
        (tmp_path / "comparison.toml").write_text(block.text)
        assert Comparison(tmp_path / "comparison.toml").methods
        return
    usual = {"data": "heart", "model": "linear", "problem": "auc", "method": "codasca"}
    others = {name: {"name": choice} for name, choice in usual.items()}
    assert Experiment.from_table({**others, **table})


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder as the reader of a page has it: the clone's files, and some rows to score."""
    monkeypatch.chdir(tmp_path)
    for name in ("experiments", "examples", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.setenv("FEDMINIMAX_DATA", str(tmp_path))
    raw = ROOT / "src/fedminimax/data/heart_disease" / f"processed.{FILES['hungary']}.data"
    rows = raw.read_text().splitlines()[:9]
    Path("patients.csv").write_text("\n".join([",".join(HEADER), *rows]) + "\n")
    return tmp_path


def commands(page: str) -> list[str]:
    found = [b.text for b in BLOCKS if b.page == page and b.language == "bash"]
    return [line for text in found for line in text.replace("\\\n", " ").splitlines() if line]


PAGES_WITH_COMMANDS = sorted({b.page for b in BLOCKS if b.language == "bash"} - {*ELSEWHERE})
MANY_FIGURES = "docs/results/README.md"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page == MANY_FIGURES else [])
        for page in PAGES_WITH_COMMANDS
    ],
)
def test_commands_run_one_after_the_other(page, clone):
    for line in commands(page):
        program, *words = shlex.split(line, comments=True)
        run = not NOT_RUN.search(line)
        if program == "make":
            done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True)
            assert done.returncode == 0, line
        elif program == "python" and words[0].startswith("examples/"):
            assert (ROOT / words[0]).exists(), line
            assert any(f"made: output {words[0]}" in p.read_text() for p in PAGES), line
        elif program != "fedminimax":
            assert not run, f'{page}: say why this is not run, as in "# needs ...": {line}'
        elif run:
            given = [name for word in words for name in sorted(glob.glob(word)) or [word]]
            assert cli.main(given) == 0, line
        else:
            options = cli.parse(words)
            for path in [getattr(options, "config", None), *getattr(options, "folders", [])]:
                assert path is None or path.suffix != ".toml" or path.exists(), line


def test_no_block_is_left_out():
    counted = {language: len(params(language)) for language in ("python", "toml")}
    counted["bash"] = sum(
        b.language == "bash" and b.page in (*PAGES_WITH_COMMANDS, *ELSEWHERE) for b in BLOCKS
    )
    counted["shown"] = sum(b.shown for b in BLOCKS)
    counted["not code"] = sum(b.language in ("csv", "text") for b in BLOCKS)
    fences = sum(
        line.strip().startswith("```") for p in PAGES for line in p.read_text().splitlines()
    )
    assert 2 * sum(counted.values()) == fences, counted
    assert all(counted.values()), counted


LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as Git hosts and the site make addresses of them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {re.sub(r" ", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.is_file(), f"{page.name}: {target}"
        assert found.is_relative_to(ROOT), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}"


def test_newcomers_objective_is_at_most_ten_lines():
    page = (ROOT / "docs" / "adding_a_problem.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    lines = [s for s in block.splitlines() if s.strip() and not s.startswith(("#", "import"))]
    assert len(lines) <= 10


def test_a_copy_of_the_template_is_a_method_that_converges(tmp_path, monkeypatch):
    source = (ROOT / "src/fedminimax/algorithms/_template.py").read_text()
    (tmp_path / "my_method.py").write_text(source.replace("class Template", "class MyMethod"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_method")
    clients = fm.Clients(QuadraticData(spread=0.0).client_rows(), batch_size=None)
    method = module.MyMethod(primal_lr=0.05, dual_lr=0.05)
    runs = [
        fm.simulate(
            fm.problems.Quadratic(10),
            method,
            clients,
            rounds=60,
            dtype=torch.float64,
            executor=executor,
        )
        for executor in ("debug", "vectorised")
    ]
    assert runs[0].history[-1]["train"]["distance"] < 1e-6
    torch.testing.assert_close(runs[0].point.x, runs[1].point.x, rtol=1e-10, atol=1e-14)
