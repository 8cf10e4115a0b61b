"""The frame of a page that needs nothing but itself: its style, its script, and what it may ask."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from fedminimax import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


ALONE = "One file: it asks nothing of any network."


def whole(
    title: str,
    kind: str,
    body: str,
    policy: str = POLICY,
    scripts: Sequence[str] = ("page.js",),
    foot: str = ALONE,
) -> str:
    """A page; title, kind and foot are text, the body is HTML."""
    name, code = escape(title), "".join(f"<script>{own(script)}</script>" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<title>{name}</title><link rel="icon" href="data:,">'
        f"<style>{own('page.css')}</style></head><body>"
        f'<header><div><p class="kind">{escape(kind)}</p><h1>{name}</h1></div>'
        f'<button type="button" id="theme" hidden>Dark</button></header>{body}'
        f"<footer>fedminimax {__version__}. {escape(foot)}</footer>{code}</body></html>\n"
    )


def own(name: str) -> str:
    """A file of the report."""
    return (files("fedminimax.report") / name).read_text(encoding="utf-8")
