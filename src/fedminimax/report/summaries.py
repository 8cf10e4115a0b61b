"""claims.md and a page for each paper, from the pages of the entries that are there."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedminimax.report.claims import NOT_RUN, UNREACHED, Claim, Verdict, rows_of_page
from fedminimax.report.comparison import Comparison
from fedminimax.report.papers import Entry, Paper
from fedminimax.report.reproduce import JUDGING, judged, page_name

RAN = re.compile(r"; (\d[^;]* runs?[^;]*), ([\d.]+ \w+) in all")
OVER = re.compile(r"over (\d[\d to]*) seeds")


class Judged(NamedTuple):
    """A claim or a question, and what is known of it."""

    paper: str
    says: str
    ours: bool
    verdict: Verdict
    page: Path | None  # where it was measured
    source: str  # in Markdown


def all_judged(
    papers: Sequence[Paper], entries: dict[str, Entry], output: Path
) -> Iterator[Judged]:
    """Every claim and every question, by paper."""
    for paper in papers:
        for name in dict.fromkeys(name for item in paper.items for name in item.entries):
            page, verdicts = from_page(entries[name], output)
            source = f"[{page.stem}]({page.name})" if page else f"`fedminimax reproduce {name}`"
            for claim, verdict in verdicts:
                yield Judged(paper.name, claim.says, claim.ours, verdict, page, source)
        for item in (item for item in paper.items if item.claim):
            verdict = Verdict(UNREACHED, f"not measured: {item.reason}")
            yield Judged(paper.name, item.claim, False, verdict, None, item.what)


def from_page(entry: Entry, output: Path) -> tuple[Path | None, list[tuple[Claim, Verdict]]]:
    """The page of the largest budget, and what it says about the entry's claims."""
    for budget in JUDGING:
        page = output / f"{page_name(entry, budget)}.md"
        if page.exists():
            comparison = Comparison(entry.path, table=entry.table(budget))
            length = comparison.base.get("run", {}).get("rounds", 0)
            larger = comparison.plan.larger
            rows = rows_of_page(page.read_text(encoding="utf-8"), larger, length)
            return page, list(judged(entry, rows, larger))
    return None, [(claim, Verdict(NOT_RUN, "-")) for claim in entry.claims]


def claims_text(found: Sequence[Judged]) -> str:
    """claims.md: every claim on a line, and every question of ours."""
    text = [
        "# Claims and questions",
        "",
        "Made by `fedminimax reproduce` from the pages of the runs. A verdict needs three seeds;",
        'with fewer, "ahead" says that the numbers are as claimed, "behind" that they are not.',
        "Last values, and rounds to a target, differ when their ranges over seeds do not meet. How",
        "rounds fall along a key, bytes, ratios, and numbers of the paper are compared by medians",
        "alone. A claim is confirmed if it holds in every setting of the page.",
    ]
    for heading, ours in (("The papers' claims", False), ("Our own questions", True)):
        text += ["", f"## {heading}", ""]
        text += [_row("paper", "claim", "verdict", "seeds", "measured", "from"), "|---" * 6 + "|"]
        for paper, says, asked_by_us, verdict, _, source in found:
            if asked_by_us == ours:
                seeds = str(verdict.seeds or "-")
                text.append(_row(paper, says, verdict.text, seeds, verdict.measured, source))
    return "\n".join(text) + "\n"


def glance(found: Sequence[Judged]) -> str:
    """The papers' claims, each with its verdict, and how many there are of each kind."""
    claims = [judged for judged in found if not judged.ours]
    kinds = dict.fromkeys(sorted(_kind(judged.verdict.text) for judged in claims))
    text = [_row("paper", *kinds), "|---" * (len(kinds) + 1) + "|"]
    for paper, own in itertools.groupby(claims, lambda judged: judged.paper):
        found_kinds = [_kind(judged.verdict.text) for judged in own]
        text.append(_row(f"[{paper}]({paper}.md)", *(str(found_kinds.count(k)) for k in kinds)))
    text += ["", _row("paper", "claim", "verdict"), "|---" * 3 + "|"]
    for paper, says, _, verdict, page, _ in claims:
        linked = f"[{verdict.text}]({page.name})" if page else verdict.text
        text.append(_row(paper, says, linked))
    return "\n".join(text)


def _kind(verdict: str) -> str:
    """one run: ahead -> one or two runs"""
    return "one or two runs" if verdict.startswith(("one run", "two runs")) else verdict


def paper_text(paper: Paper, entries: dict[str, Entry], output: Path) -> str:
    """A paper's page: what was found, what was run, and its tables and figures beside ours."""
    names = list(dict.fromkeys(name for item in paper.items for name in item.entries))
    text = [f"# {paper.title}", "", textwrap.fill(paper.summary, 130), "", "```bash"]
    width = max(map(len, names))
    text += [
        f"fedminimax reproduce {name:{width}} -o docs/results  # takes minutes or hours: see below"
        for name in names
    ]
    text += [
        "```",
        "",
        "## What was run",
        "",
        _row("table or figure", "by", "how long", "seeds", "took"),
    ]
    text.append("|---" * 5 + "|")
    for item in paper.items:
        if not item.entries:
            why = f"{UNREACHED}: {item.reason}" if item.measures else item.reason
            text.append(_row(item.what, why, "-", "-", "-"))
        remark = f"; {item.reason}" if item.reason else ""
        for name in item.entries:
            text.append(_row(item.what, *_ran(entries[name], remark, output)))
    for name in names:
        text += ["", *_section(entries[name], output)]
    return "\n".join(text) + "\n"


def _ran(entry: Entry, remark: str, output: Path) -> tuple[str, str, str, str]:
    """Where an entry's numbers are, how long its runs were beside the paper's, their seeds, and the
    time of all."""
    page, _ = from_page(entry, output)
    length = entry.about.length or "-"
    if page is None:
        return f"`{entry.name}`{remark}", length, NOT_RUN, "-"
    made = page.read_text(encoding="utf-8")
    over, ran = OVER.search(made), RAN.search(made)
    seeds, took = over[1] if over else "1", f"{ran[1]}, {ran[2]}" if ran else "-"
    return f"[{page.stem}]({page.name}){remark}", length, seeds, took


def _section(entry: Entry, output: Path) -> Iterator[str]:
    """An entry's numbers beside the paper's, its figure, and the verdicts."""
    page, verdicts = from_page(entry, output)
    yield from (f"## {entry.about.title}", "")
    if page is None:
        yield f"{NOT_RUN[:1].upper()}{NOT_RUN[1:]}."
        return
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if "| the paper's " in line), len(lines))
    if table := list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:])):
        yield from (*table, "")
    yield from (f"{line}\n" for line in lines if line.startswith("!["))
    for claim, verdict in verdicts:
        asked = " (asked by us)" if claim.ours else ""
        yield f"- **{verdict.text}**{asked}: {claim.says}"
    yield from ("", f"All numbers: [{page.stem}]({page.name}).")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def write_summaries(papers: Sequence[Paper], entries: dict[str, Entry], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    pages = {f"{paper.name}.md": paper_text(paper, entries, output) for paper in papers}
    claims = claims_text(list(all_judged(papers, entries, output)))
    for name, text in {"claims.md": claims, **pages}.items():
        (output / name).write_text(text, encoding="utf-8")
