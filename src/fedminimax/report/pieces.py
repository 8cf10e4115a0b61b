"""Tables, badges and numbers as HTML. What is not said to be HTML is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from fedminimax.report import charts
from fedminimax.report.runs import Group, Spread

NONE = '<span class="none">\N{EN DASH}</span>'
MANY = 20  # rows beyond which a table scrolls


def details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Headings are text, cells are HTML; the first `text` columns are not numbers."""

    def kind(column: int) -> str:
        return "" if column < text else ' class="number"'

    head = "".join(f'<th scope="col"{kind(n)}>{escape(h)}</th>' for n, h in enumerate(headings))
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>'
        + "".join(f"<td{kind(n)}>{cell}</td>" for n, cell in enumerate(cells[1:], start=1))
        + "</tr>"
        for cells in rows
    )
    tall = " tall" if len(rows) > MANY else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="Table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def named(group: Group) -> str:
    return f'<span class="run">{charts.key(group.number)}{escape(group.label)}</span>'


def legend(groups: Sequence[Group]) -> str:
    """Of several groups; one needs none."""
    if len(groups) == 1:
        return ""
    return charts.legend([charts.Series(group.label, group.number, ()) for group in groups])


def badge(word: str, kind: str = "bad") -> str:
    return f' <span class="badge {kind}">{word}</span>'


def over_runs(found: Spread | None, text: Callable[[float], str] | None = None) -> str:
    """The median; the range below it where runs differ."""
    text = text or value_text
    if found is None:
        return NONE
    if text(found.low) == text(found.high):
        return text(found.middle)
    return f"{text(found.middle)}<small>{text(found.low)} to {text(found.high)}</small>"


def number_or_dash(found: Spread | None) -> str:
    return NONE if found is None else value_text(found.middle)


def pair(interval: Sequence[float] | None) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else NONE


def bound(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if value >= 5e-5 else "less than 0.0001"


def count(value: float) -> str:
    return f"{value:,.0f}"


def value_text(value: float) -> str:
    """Three decimals, or three digits where these would say nothing.

    >>> value_text(0.87771), value_text(0), value_text(12345.6)
    ('0.878', '0', '12,346')
    """
    size = abs(value)
    if size == 0:
        return "0"
    if size < 5e-3 or size >= 1e7:
        mantissa, _, power = f"{value:.2e}".partition("e")
        text = f"{mantissa} \N{MULTIPLICATION SIGN} {charts.power_text(int(power))}"
    else:
        text = f"{value:,.0f}" if size >= 1000 else f"{value:.{3 if size < 100 else 1}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def seconds_text(value: float) -> str:
    """
    >>> seconds_text(0.02), seconds_text(75), seconds_text(7300)
    ('0.02 s', '1 min 15 s', '2 h 1 min')
    """
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
