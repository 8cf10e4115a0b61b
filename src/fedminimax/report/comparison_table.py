"""The tables of a comparison: where each method ended, or a ranking at equal cost."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedminimax.report.comparison import Change, Comparison, Line, Plan, shown
from fedminimax.report.equal_cost import Place, rank
from fedminimax.report.tables import Span, bytes_text, number_text


def markdown(
    path: Path,
    comparison: Comparison,
    lines: list[Line],
    figure: str | None = None,
    made: str = "",
) -> str:
    """The table as a document, with the command that makes it, and perhaps its figure; `made` says
    what made it, if not `fedminimax compare`."""
    plan = comparison.plan
    at = "" if plan.at is None else f" --at {plan.at}"
    made = made or f"Made by `fedminimax compare {path}{at}`"
    if plan.at is None:
        text = [f"{made}; {_seeds(lines)}.", "", *_table(comparison, lines)]
    else:
        text = [f"{made}.", "", *_ranking(comparison, lines)]
    if figure is not None:
        text += ["", f"![{plan.metric}]({figure})"]
    if plan.fit is not None:
        text += ["", *fitted(plan.fit, lines)]
    return "\n".join(text) + "\n"


def _seeds(lines: Sequence[Line]) -> str:
    counts = [len(line.histories) for line in lines]
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "1 seed"
    over = f"{fewest} to {most}" if fewest < most else most
    rest = "gradients, up and exchanges are those of the first seed"
    return f"median and range over {over} seeds; {rest}"


def _table(comparison: Comparison, lines: list[Line]) -> Iterator[str]:
    """Each method with what it needed and where it ended."""
    plan = comparison.plan
    tuned = comparison.tuned()
    heads = [*comparison.varied(), "method", *tuned]
    if plan.target is not None:
        sign = ">=" if plan.larger else "<="
        heads += [f"rounds to {plan.metric} {sign} {plan.target:g}", "times the fewest"]
    tested = _is_tested(plan, lines)
    heads += [f"last {plan.metric}"] + ([f"test {plan.metric}"] if tested else [])
    heads += ["gradients", "up", "exchanges"]
    yield from _header(heads)
    for line in lines:
        cells = [*_varied(line), line.label, *_chosen(line, tuned)]
        if plan.target is not None:
            fewest = min(statistics.median(o.rounds) for o in lines if o.varied == line.varied)
            length = max(history[-1]["round"] for history in line.histories)
            cells += [_range(line.rounds), _times(statistics.median(line.rounds), fewest, length)]
        last = line.histories[0][-1]
        cells.append(_range([plan.value(history[-1]) for history in line.histories]))
        if tested:
            cells.append(_range([plan.final(history) for history in line.histories]))
        cells += [str(last["gradients"]), bytes_text(last["bytes_up"]), str(last["exchanges"])]
        yield _row(cells)


def _ranking(comparison: Comparison, lines: list[Line]) -> Iterator[str]:
    """The methods at equal cost, the best first, for each value of what varies."""
    plan, tuned, tested = comparison.plan, comparison.tuned(), _is_tested(comparison.plan, lines)
    rank_and_method, rest = _ranking_heads(plan, tested)
    yield from _header([*comparison.varied(), *rank_and_method, *tuned, *rest])
    near: list[str] = []
    for varied in dict.fromkeys(line.varied for line in lines):
        places = rank(plan, [line for line in lines if line.varied == varied])
        for place in places:
            rank_and_method, rest = _ranking_row(plan, place, tested)
            chosen = _chosen(place.line, tuned)
            yield _row([*_varied(place.line), *rank_and_method, *chosen, *rest])
        near += not_told_apart(places)
    yield from ("", explained(plan), *(f"- {sentence}" for sentence in near))


def ranking_table(plan: Plan, lines: Sequence[Line]) -> Table:
    """The same for runs side by side, on a screen."""
    tested = _is_tested(plan, lines)
    title = f"{plan.metric} ({'higher' if plan.larger else 'lower'} is better)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in itertools.chain(*_ranking_heads(plan, tested)):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    places = rank(plan, lines)
    for place in places:
        table.add_row(*itertools.chain(*_ranking_row(plan, place, tested)))
    table.caption = " ".join([explained(plan), *not_told_apart(places)])
    table.caption_justify = "left"
    return table


def _ranking_heads(plan: Plan, tested: bool) -> tuple[list[str], list[str]]:
    judged = [plan.metric, "less the best", *([f"test {plan.metric}"] if tested else [])]
    return ["rank", "method"], [f"{plan.at} at most", *judged, "rounds", "gradients", "sent"]


def _ranking_row(plan: Plan, place: Place, tested: bool) -> tuple[list[str], list[str]]:
    broken, first = sum(value is None for value in place.values), place.records[0]
    cells = [_budget(plan, place.budget)]
    cells.append(f"{broken} of {len(place.values)} broke down" if broken else _mean(place.values))
    cells.append(_behind(place))
    if tested:
        cells.append(_mean([record["test"].get(plan.metric) for record in place.records]))
    sent = bytes_text(first["bytes_up"] + first["bytes_down"])
    return [str(place.rank), place.line.label], [
        *cells,
        *(str(first["round"]), str(first["gradients"]), sent),
    ]


def _budget(plan: Plan, budget: float) -> str:
    if not math.isfinite(budget):
        return "-"  # no run came to its end
    return bytes_text(budget) if plan.at == "bytes" else f"{budget:.0f}"


def explained(plan: Plan) -> str:
    """What the numbers of a ranking are."""
    unit = {"bytes": "bytes, both directions together"}.get(str(plan.at), str(plan.at))
    text = (
        f"Ranked at equal cost in {unit}: what the cheapest run spends in all its rounds is the "
        "budget of all, and each counts by its last evaluation within it. "
    )
    if plan.repeats == 1:
        return text + "One seed: a difference has no interval, and may be chance."
    return text + (
        f"Mean (and range) over {plan.repeats} seeds; differences to the best are means over pairs "
        "of the same seed, with Student's 95 % interval, not corrected for the number of methods; "
        "rounds, gradients and sent are those of the first seed."
    )


def not_told_apart(places: Sequence[Place]) -> list[str]:
    """The methods whose interval does not say that they are behind the best."""
    best = places[0].line
    near = [place.line.label for place in places if place.told_apart is False]
    where = "".join(f" at {name} = {shown(value)}" for name, value in best.varied)
    return [f"Not told apart from {best.label}{where}: {', '.join(near)}."] if near else []


def _behind(place: Place) -> str:
    if place.behind is None:
        return "-"
    mean, low, high, _ = place.behind
    if abs(mean) < 1e-12 * max(abs(value) for value in place.values if value is not None):
        mean = 0.0  # but for rounding
    return f"{mean:+.3g}" + ("" if low is None else f" ({low:+.3g} to {high:+.3g})")


def _mean(found: Sequence[float | None]) -> str:
    values = [value for value in found if value is not None]
    if not values:
        return "-"
    text, low, high = map(number_text, (statistics.fmean(values), min(values), max(values)))
    return text if low == high else f"{text} ({low} to {high})"


def _is_tested(plan: Plan, lines: Sequence[Line]) -> bool:
    """Are there test rows beside those that judge?"""
    last = lines[0].histories[0][-1]
    return "test" in last and plan.split(last) != "test"


def _varied(line: Line) -> list[str]:
    return [shown(value) for _, value in line.varied]


def _chosen(line: Line, tuned: Sequence[str]) -> list[str]:
    chosen = dict(line.chosen)
    return [shown(chosen[key]) if key in chosen else "" for key in tuned]


def _header(heads: Sequence[str]) -> list[str]:
    return [_row(heads), "|" + "---|" * len(heads)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def fitted(key: str, lines: list[Line]) -> Iterator[str]:
    """For each method, and each value of what else varies, rounds ~ key^exponent."""
    groups: dict[tuple[str, Change], list[tuple[float, float]]] = {}
    for line in lines:
        rest = tuple(p for p in line.varied if p[0] != key and not tied(lines, p[0], key))
        point = (dict(line.varied)[key], statistics.median(line.rounds))
        groups.setdefault((line.label, rest), []).append(point)
    for (label, rest), points in groups.items():
        where = "".join(f", {name} = {shown(value)}" for name, value in rest)
        if any(not math.isfinite(rounds) or not rounds for _, rounds in points):
            yield f"- {label}{where}: no exponent, because a target was not reached."
            continue
        keys, rounds = np.log(np.array(points)).T
        slope = np.polyfit(keys, rounds, 1)[0]
        yield f"- {label}{where}: rounds grow as {key} to the power {slope:.2f}."


def tied(lines: Sequence[Line], name: str, key: str) -> bool:
    """Does this varied name change together with the key?"""
    pairs = {(dict(line.varied)[key], dict(line.varied)[name]) for line in lines}
    keys, names = ({pair[i] for pair in pairs} for i in (0, 1))
    return len(pairs) == len(keys) and len(names) > 1


def tuning(comparison: Comparison, lines: Sequence[Line]) -> Iterator[str]:
    """What was tried for each line, and where the runs that only tuned ended."""
    told = naming(lines)
    yield from _header([*told, "method", "tuned", f"tried: {comparison.plan.for_tuning().metric}"])
    for line in lines:
        if line.trials:
            keys = ", ".join(key for key, _ in line.chosen)
            tried = "; ".join(_tried(chosen, ends) for chosen, ends in line.trials)
            where = [shown(dict(line.varied)[key]) for key in told]
            yield _row([*where, line.label, keys, tried])


def _tried(chosen: Change, ends: Sequence[float | None]) -> str:
    values = list(dict.fromkeys(shown(value) for _, value in chosen))
    return f"{', '.join(values)}: {'broke down' if None in ends else _range(ends)}"


def naming(lines: Sequence[Line]) -> list[str]:
    """The varied keys that tell lines apart: of those that change together, the first."""
    names: list[str] = []
    for name, _ in lines[0].varied:
        many = len({dict(line.varied)[name] for line in lines}) > 1
        if many and not any(tied(lines, name, other) for other in names):
            names.append(name)
    return names


def _range(found: Sequence[float | None]) -> str:
    return str(Span.of([math.inf if value is None else value for value in found]))


def _times(rounds: float, fewest: float, length: int) -> str:
    """How many times the fewest rounds; of runs that never arrive, more than their length."""
    if not math.isfinite(fewest) or not fewest:
        return "-"
    return f"{rounds / fewest:.3g}" if math.isfinite(rounds) else f"> {length / fewest:.3g}"
