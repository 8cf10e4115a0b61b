"""Writes the parts of the pages that come from the code: `make pages`.

Pages are Markdown, written by hand. What the code already says stands between two marks,

    <!-- made: method codasca -->
    <!-- end -->

and is made here: from docstrings, from the costs that `fedminimax list METHOD` counts, from the
tables in docs/results, from scripts and what they print. tests/docs/test_pages.py holds that no
page would change.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diagram

from fedminimax.algorithms import METHODS
from fedminimax.config import described, options_of
from fedminimax.data import SOURCES
from fedminimax.data.sources import look
from fedminimax.report.keys import keys_of, sections
from fedminimax.report.papers import read_contents, read_entries, read_entry
from fedminimax.report.summaries import all_judged, glance
from fedminimax.report.traits import HEADINGS, cells, traits

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = re.compile(r"<!-- made: (\w+)(?: ([^\n]+))? -->\n(.*?)<!-- end -->\n", re.DOTALL)
COMMAND = re.compile(
    r"^Made by `(fedminimax (?:compare (experiments/\w+\.toml)|reproduce (\w+)))`", re.MULTILINE
)
OVERVIEWS = ("methods_saddle", "methods_heart")  # comparisons that have a line for most methods
DIFFERS = "*Differs from the paper*: "


def family_of(name: str) -> str:
    """Which of the three tables a method belongs to."""
    solved = traits(METHODS[name]).solves
    return next(f for f in ("compositional", "minimisation", "minimax") if solved.startswith(f))


def costs(family: str) -> str:
    """What `fedminimax list METHOD` says of those of one family, but for the references."""
    lines = [_row(HEADINGS[:-1]), _row(["---"] * len(HEADINGS[:-1]))]
    for name in METHODS:
        if family_of(name) == family:
            linked, *others = cells(name, METHODS[name])[:-1]
            lines.append(_row([f"[{linked}](methods/{linked}.md)", *others]))
    return "\n".join(lines)


def index() -> str:
    """Every method with a sentence, for the first page of the folder."""
    lines = ["| method | what it is |", "|---|---|"]
    lines += [f"| [{name}]({name}.md) | {described(kind)} |" for name, kind in METHODS.items()]
    return "\n".join(lines)


def method(name: str) -> str:
    """The problem, the update, and what travels."""
    kind, found = METHODS[name], traits(METHODS[name])
    lead, _, update = inspect.cleandoc(kind.__doc__ or "").partition(DIFFERS)[0].partition("\n\n")
    file = Path(inspect.getfile(kind)).relative_to(ROOT)
    named = dict(zip(HEADINGS[2:-1], cells(name, kind)[2:-1], strict=True))
    lengths = {
        "minimax": "dx and dy are the lengths of x and y.",
        "minimisation": "dx is the length of x.",
        "compositional": "d0 = dx is the length of x, d1 and d2 those of the inner values, dy that "
        "of y; a composition of three levels.",
    }[family_of(name)]
    if "N" in found.up:
        lengths += " N is the number of clients."
    return "\n".join(
        [
            lead,
            "",
            f"`{name}` in an experiment, `fm.methods.{kind.__name__}` in Python, `{file}` to read.",
            "",
            "## Problem",
            "",
            _posed(found.solves),
            "",
            'A client counts by its training rows, or with `run.weights = "uniform"`, as in most '
            "papers, like any other.",
            "",
            "## Update",
            "",
            fenced(update.rstrip()),
            "",
            "## What travels",
            "",
            _row(named),
            _row(["---"] * len(named)),
            _row(named.values()),
            "",
            f"Per client, with default settings in an ordinary round. {lengths}",
        ]
    )


def _posed(solved: str) -> str:
    """The problem in plain maths, and the theory's condition."""
    problem, _, condition = solved.partition(": ")
    maths = {
        "minimax": "min over x  max over y    mean over clients of f_k(x, y)",
        "minimisation": "min over x    mean over clients of f_k(x)",
        "minimisation of the worst client's loss": "min over x    largest of the clients' f_k(x)",
        "minimisation with class weights": "min over x    mean over clients of f_k(x, y)",
        "compositional minimax": "min over x  max over y    F_K( ... F_2( F_1(x) ) ... , y)",
        "compositional minimisation": "min over x    F_K( ... F_2( F_1(x) ) ... )",
    }[problem]
    after = {
        "minimisation with class weights": "The server sets the class weights y.",
        "compositional minimax": "Every F_k is a mean over clients.",
        "compositional minimisation": "Every F_k is a mean over clients.",
    }.get(problem, "")
    if condition:
        after += f" Its theory is for problems that are {condition} (in x, then in y)."
    return f"```text\n{maths}\n```" + (f"\n\n{after.strip()}" if after else "")


def methods_of(made: re.Match[str]) -> dict[str, Any]:
    """Those that a page's command compares, by the labels that it gives them."""
    if made[3]:
        return read_entry(ROOT / "experiments" / "papers" / f"{made[3]}.toml").comparison["methods"]
    return tomllib.loads((ROOT / made[2]).read_text(encoding="utf-8"))["methods"]


def measured(name: str) -> str:
    """Its lines in the comparisons of all methods, and the others that it appears in."""
    parts, others = [], []
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        made = COMMAND.search(text := page.read_text(encoding="utf-8"))
        if made is None:
            continue
        labels = [k for k, v in methods_of(made).items() if v["name"] == name]
        link = f"[{page.stem}](../results/{page.name})"
        if page.stem not in OVERVIEWS:
            others += [link] if labels else []
        elif labels:
            head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
            kept = [row for row in rows if row.split(" | ")[0].removeprefix("| ") in labels]
            parts += [f"{link}, by `{made[1]}`:", "", head, rule, *kept, ""]
    if others:
        parts.append(f"Measured in: {', '.join(others)}.")
    return "\n".join(parts).rstrip() or "No comparison in [results](../results/README.md) has it."


def claims() -> str:
    """The papers' claims, with their verdicts."""
    folder = ROOT / "experiments" / "papers"
    entries = read_entries(folder)
    papers = read_contents(folder, entries)
    return glance(list(all_judged(papers, entries, ROOT / "docs" / "results")))


def details(name: str) -> str:
    """Its paper, how it differs from it, and its options."""
    kind = METHODS[name]
    differs = inspect.cleandoc(kind.__doc__ or "").partition(DIFFERS)[2]
    options = options_of(kind, "method").items()
    return "\n".join(
        [
            "## The paper",
            "",
            f"{kind.reference[0].upper()}{kind.reference[1:].removesuffix('.')}.",
            "",
            fenced(DIFFERS + differs),
            "",
            "## Options",
            "",
            _row(("key", "default")),
            _row(("---", "---")),
            *(_row((f"`{key}`", f"`{default}`")) for key, default in options),
        ]
    )


def script(path: str) -> str:
    return f"```python\n{(ROOT / path).read_text(encoding='utf-8').strip()}\n```"


def output(arguments: str) -> str | None:
    """What a script prints: `examples/a.py`, and `with NAME` if it needs a data set's files; then
    None where they are not at hand."""
    path, _, needed = arguments.partition(" with ")
    files = SOURCES[needed].files if needed else ()
    if not all(look(SOURCES[needed], [copy.name for copy in file.copies]) for file in files):
        return None
    with tempfile.TemporaryDirectory() as empty:
        places = (
            {} if needed else dict.fromkeys(("FEDMINIMAX_DATA", "XDG_CACHE_HOME", "HOME"), empty)
        )
        done = subprocess.run(
            [sys.executable, str(ROOT / path)],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **places},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"{path} failed:\n{done.stderr}")
    return f"```text\n{done.stdout.strip()}\n```"


def modules(package: str = "") -> str:
    """The modules of a package, each with the first sentence of its docstring, and those of the
    packages in it; methods, which have pages of their own, are left out."""
    lines = [_row(("module", "what it holds")), _row(("---", "---"))]
    above = ROOT if package.startswith("bench") else ROOT / "src" / "fedminimax"
    for file in sorted((above / package).glob("*.py")):
        own_page = package == "algorithms" and not file.name.startswith("_")
        if file.stem not in ("__init__", "__main__") and not own_page:
            lines.append(_row((f"`{file.name}`", _sentence(file).replace("|", "\\|"))))
    for inner in sorted((above / package).glob("*/__init__.py")) if package else ():
        name = inner.parent.relative_to(above).as_posix()
        lines += ["", f"### {name}", "", f"{_sentence(inner)}.", "", modules(name)]
    return "\n".join(lines)


def keys(wanted: str) -> str:
    """Every key of a section, for each class that it may name."""
    parts = []
    for section, name, kind in sections():
        # What somebody has added is not of this page.
        if section != wanted or not kind.__module__.startswith("fedminimax."):
            continue
        held = keys_of(section, kind)
        if name:
            linked = f"[{name}](methods/{name}.md)" if section == "method" else name
            parts += [f"### {linked}", "", described(kind), ""]
        if not held:
            parts += ["It has no keys." if name else "", ""]
            continue
        parts += [_row(("key", "type", "default", "meaning")), _row(["---"] * 4)]
        for key in held:
            cells = (f"`{key.name}`", key.type, f"`{key.default}`", key.meaning)
            parts.append(_row(cell.replace("|", "\\|") for cell in cells))
        parts.append("")
    return "\n".join(parts).rstrip()


def _sentence(file: Path) -> str:
    """The first sentence of a module's docstring, without the full stop."""
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`]\.) (?=[A-Z])", first)[0].rstrip(".")


def fenced(text: str) -> str:
    """Markdown whose indented blocks are fenced, so that a page says what each block is."""
    lines, inside = [], False
    for line in text.splitlines():
        code = line.startswith("    ")
        if code and not inside:
            lines.append("```text")
        elif inside and line and not code:
            while not lines[-1]:
                lines.pop()
            lines += ["```", ""]
        inside = code or (inside and not line)
        lines.append(line[4:] if code else line)
    return "\n".join(lines + ["```"] * inside)


def _row(values) -> str:
    return f"| {' | '.join(values)} |"


MAKERS: dict[str, Callable[..., str | None]] = {
    "costs": costs,
    "index": index,
    "method": method,
    "measured": measured,
    "details": details,
    "glance": claims,
    "modules": modules,
    "keys": keys,
    "script": script,
    "output": output,
}


def made(text: str, makers: Mapping[str, Callable[..., str | None]] = MAKERS) -> str:
    """The page with its made parts as they should be; those of other makers stay."""

    def replaced(found: re.Match) -> str:
        kind, arguments, _ = found.groups()
        fresh = makers[kind](*filter(None, [arguments])) if kind in makers else None
        if fresh is None:
            return found[0]
        asked = " ".join(filter(None, (kind, arguments)))
        return f"<!-- made: {asked} -->\n\n{fresh}\n\n<!-- end -->\n"

    return MADE.sub(replaced, text)


def main() -> None:
    diagram.FILE.write_text(diagram.drawing(), encoding="utf-8")
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = made(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
