"""A paper's claim, and whether the lines of a comparison bear it out.

    [[claims]]      says = "LocalSCGDAM outperforms all"    the claim
                    rule = "better"                         one of RULES
                    method = "LocalSCGDAM"                  whose claim it is
                    over = ["CODA", "LocalSGDAM"]           whom it is compared with
                    key = "method.local_steps"              what a rule looks along
                    value = 0.98, tolerance = 0.002         the paper's number; how near is near
                    where = {"data.sort" = "OP"}            the lines that count
    [[questions]]   the same, asked by us and not claimed by the paper

A claim holds when it holds in each of these lines' settings: those that differ in varied keys, but
not in the key that the rule looks along. "better", "fewer_rounds" and "grows" ask that the ranges
over seeds do not meet; the other rules compare medians. A claim is confirmed, or not, by at least
three seeds; one or two runs are only ahead or behind.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fedminimax.config import ConfigError, options_for, suggest
from fedminimax.report.comparison import Line, Plan, shown
from fedminimax.report.tables import Span

CONFIRMED, REFUTED, UNREACHED = "confirmed", "not confirmed", "not reachable here"
NOT_RUN = "not run yet"
MOST = 3  # settings that are all told
ENOUGH = 3  # seeds, for a verdict
SEEDS = re.compile(r"range over (\d+)(?: to \d+)? seeds")  # on a page; of lines, the fewest


class Row(NamedTuple):
    """A line of a comparison's table."""

    varied: dict[str, str]
    method: str
    last: Span  # on test rows, where there are any
    rounds: Span | None  # to the target, if there is one
    bytes_up: float  # of the whole run
    length: float  # of the run, in rounds
    seeds: int = 1


class Verdict(NamedTuple):
    text: str
    measured: str
    seeds: int = 0  # the fewest of any line that it rests on


@dataclass(frozen=True)
class Claim:
    says: str
    rule: str
    method: str
    over: tuple[str, ...] = ()
    key: str = ""
    value: float = 0.0
    tolerance: float = 0.0
    where: Any = field(default_factory=dict)
    ours: bool = False

    @staticmethod
    def of(given: dict[str, Any], where: str, ours: bool = False) -> Claim:
        claim = replace(Claim(**options_for(Claim, given, where)), ours=ours)
        if claim.rule not in RULES:
            raise ConfigError(f"{where} rule is {claim.rule!r}; {suggest(claim.rule, RULES)}")
        return claim


def judge(claim: Claim, rows: Sequence[Row], larger: bool) -> Verdict | None:
    """Whether the claim holds, and what was measured; None if the lines it needs are not there."""
    wanted = {key: shown(value) for key, value in claim.where.items()}
    rows = [row for row in rows if all(row.varied.get(k) == v for k, v in wanted.items())]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        setting = tuple((k, v) for k, v in row.varied.items() if k not in _tied(rows, claim.key))
        groups.setdefault(setting, []).append(row)
    found = []
    for setting, own in groups.items():
        along = {row.varied.get(claim.key) for row in own}
        if not {claim.method, *claim.over} <= {row.method for row in own}:
            return None
        if claim.key and (None in along or len(along) < 2):
            return None
        holds, text = RULES[claim.rule](claim, own, larger)
        place = ", ".join(f"{k} = {v}" for k, v in _telling(setting, groups))
        found.append((holds, f"{place}: {text}" if place else text))
    if not found:
        return None
    good = [text for holds, text in found if holds]
    seeds = min(row.seeds for row in rows if row.method in (claim.method, *claim.over))
    verdict = _verdict(len(good) == len(found), seeds)
    if len(found) <= MOST:
        return Verdict(verdict, "; ".join(text for _, text in found), seeds)
    example = next((text for holds, text in found if not holds), good[0] if good else "")
    return Verdict(verdict, f"in {len(good)} of {len(found)} settings; for one, {example}", seeds)


def _verdict(holds: bool, seeds: int) -> str:
    if seeds >= ENOUGH:
        return CONFIRMED if holds else REFUTED
    return f"{'one run' if seeds == 1 else 'two runs'}: {'ahead' if holds else 'behind'}"


def rows_of(plan: Plan, lines: Iterable[Line]) -> list[Row]:
    """The rows of a comparison that has been run."""
    rows = []
    for line in lines:
        last = line.histories[0][-1]
        values = [plan.final(history) for history in line.histories]
        ends = Span.of([_worst(plan.larger) if value is None else value for value in values])
        rounds = None if plan.target is None else Span.of(line.rounds)
        varied = {key: shown(value) for key, value in line.varied}
        length, seeds = last["round"], len(line.histories)
        rows.append(Row(varied, line.label, ends, rounds, last["bytes_up"], length, seeds))
    return rows


def rows_of_page(text: str, larger: bool, length: int) -> list[Row]:
    """The rows of the first table of a page; `length` is that of its runs, if it is not varied."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("|---")), len(lines))
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start - 1 :]))
    if not table:
        return []
    heads, _, *body = map(_cells, table)
    own = heads.index("method")
    seeds = int(match[1]) if (match := SEEDS.search(text)) else 1
    # "last" is what methods were chosen by, if there is also a "test".
    ends = max(i for i, head in enumerate(heads) if head.startswith(("last ", "test ")))
    reached = next((i for i, head in enumerate(heads) if head.startswith("rounds to ")), None)
    rows = []
    for cells in body:
        varied = dict(zip(heads[:own], cells, strict=False))
        rounds = None if reached is None else _read_span(cells[reached], math.inf)
        sent = _read_bytes(cells[heads.index("up")])
        many = float(varied.get("run.rounds", length))
        last = _read_span(cells[ends], _worst(larger))
        rows.append(Row(varied, cells[own], last, rounds, sent, many, seeds))
    return rows


# The rules. Each gets the rows of one setting, and says whether the claim holds there, and why.


def _better(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method's last value is better than that of each of the others."""
    own = _of(claim.method, rows)
    others = [row for row in rows if row.method in claim.over]
    best = (max if larger else min)(others, key=lambda row: row.last.middle)
    clear = all(
        own.last.low > row.last.high if larger else own.last.high < row.last.low for row in others
    )
    ahead = own.last.middle > best.last.middle if larger else own.last.middle < best.last.middle
    noise = ", within the spread of the seeds" if ahead and not clear else ""
    return clear, f"{claim.method} {own.last}, best other {best.method} {best.last}{noise}"


def _reaches(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method's last value is as good as the paper's, but for the tolerance."""
    own = _of(claim.method, rows).last
    short = claim.value - own.middle if larger else own.middle - claim.value
    return short <= claim.tolerance, f"{own}, claimed {claim.value:g}"


def _fewer_rounds(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method comes to the target in fewer rounds than each of the others."""
    own = _rounds(_of(claim.method, rows))
    others = [row for row in rows if row.method in claim.over]
    holds = all(own.high < _rounds(row).low for row in others)
    told = ", ".join(f"{row.method} {_rounds(row)}" for row in others)
    return holds, f"{own} rounds; {told}"


def _fewer_bytes(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method comes to the target for fewer bytes than each of the others."""

    def sent(row: Row) -> float:
        return row.bytes_up * _rounds(row).middle / row.length

    own, others = _of(claim.method, rows), [row for row in rows if row.method in claim.over]
    told = ", ".join(f"{row.method} {_megabytes(sent(row))}" for row in others)
    return all(sent(own) < sent(row) for row in others), f"{_megabytes(sent(own))}; {told}"


def _falls(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method comes to the target in fewer rounds where the key is larger."""
    own = _along(claim, rows, claim.method)
    rounds = [_rounds(row).middle for _, row in own]
    holds = all(b < a for a, b in itertools.pairwise(rounds))
    told = ", ".join(f"{_rounds(row)} at {value}" for value, row in own)
    return holds, f"rounds {told}"


def _grows(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method's last value is better at the largest key than at the smallest."""
    own = _along(claim, rows, claim.method)
    least, most = own[0][1].last, own[-1][1].last
    told = ", ".join(f"{row.last} at {value}" for value, row in own)
    return most.low > least.high if larger else most.high < least.low, told


def _advantage(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """How many times fewer rounds the method needs grows as the key falls."""
    own = dict(_along(claim, rows, claim.method))
    holds, told = True, []
    for other in claim.over:
        times = [
            (value, _rounds(row).middle / _rounds(own[value]).middle)
            for value, row in _along(claim, rows, other)
        ]
        holds &= all(b[1] < a[1] for a, b in itertools.pairwise(times))
        told.append(f"{other} " + ", ".join(f"{t:.3g} times at {value}" for value, t in times))
    return holds, "; ".join(told)


def _window(claim: Claim, rows: list[Row], larger: bool) -> tuple[bool, str]:
    """The method's largest key without loss is `value` times that of the other; a loss is more
    than the tolerance below its own value at the smallest key."""
    widest = {}
    for method in (claim.method, *claim.over):
        (_, first), *_ = own = _along(claim, rows, method)
        good = [value for value, row in own if _short(first, row, larger) <= claim.tolerance]
        widest[method] = float(good[-1])
    own, other = widest[claim.method], max(widest[method] for method in claim.over)
    told = ", ".join(f"{method} {number:g}" for method, number in widest.items())
    return own >= claim.value * other, f"{told}: {own / other:.3g} times, claimed {claim.value:g}"


RULES: dict[str, Callable[[Claim, list[Row], bool], tuple[bool, str]]] = {
    "better": _better,
    "reaches": _reaches,
    "fewer_rounds": _fewer_rounds,
    "fewer_bytes": _fewer_bytes,
    "falls": _falls,
    "grows": _grows,
    "advantage": _advantage,
    "window": _window,
}


def _short(first: Row, row: Row, larger: bool) -> float:
    loss = first.last.middle - row.last.middle
    return loss if larger else -loss


def _along(claim: Claim, rows: list[Row], method: str) -> list[tuple[str, Row]]:
    """The rows of a method, by the rising value of the claim's key."""
    own = [(row.varied[claim.key], row) for row in rows if row.method == method]
    return sorted(own, key=lambda pair: float(pair[0]))


def _of(method: str, rows: list[Row]) -> Row:
    return next(row for row in rows if row.method == method)


def _rounds(row: Row) -> Span:
    if row.rounds is None:
        raise ConfigError("a claim counts rounds, but [compare] has no below or above to count to")
    return row.rounds


def _tied(rows: Sequence[Row], key: str) -> set[str]:
    """The varied keys that change together with this one, and itself."""
    names = {name for row in rows for name in row.varied}
    if key not in names:
        return set()
    values = {name: {(row.varied[key], row.varied[name]) for row in rows} for name in names}
    count = len(values[key])
    return {
        name
        for name, pairs in values.items()
        if name == key or (len(pairs) == count and len({v for _, v in pairs}) > 1)
    }


def _telling(setting: tuple, groups: dict[tuple, Any]) -> list[tuple[str, str]]:
    """Of a setting, the keys in which it differs from the others, but for lengths of runs."""
    several = {k for k, _ in setting if len({dict(other).get(k) for other in groups}) > 1}
    return [(k, v) for k, v in setting if k in several and not k.startswith("run.")]


def _worst(larger: bool) -> float:
    return -math.inf if larger else math.inf


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _read_span(text: str, never: float) -> Span:
    """0.5, 0.5 (0.4 to 0.6), or never."""
    words = text.replace("(", " ").replace(")", " ").replace(" to ", " ").split()
    found = [never if word == "never" else float(word) for word in words]
    return Span(*found) if len(found) == 3 else Span.of(found)


def _read_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def _megabytes(number: float) -> str:
    return f"{number / 1e6:.3g} MB" if math.isfinite(number) else "never"
