"""What the site needs beyond the Markdown: README.md as its first page, and menus by folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages outside docs that pages link to, and where the site has them.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_config(config: Any) -> Any:
    """A `*` in the menu stands for all pages that no other line names."""
    docs = Path(config.docs_dir)
    there = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")} | {*OUTSIDE.values()}
    named = {page for page in _named(config.nav) if page in there}
    config.nav = _expanded(config.nav, sorted(there - named))
    return config


def _named(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in _named(part)]


def _expanded(nav: Any, rest: list[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(part, rest) for title, part in nav.items()}
    found: list[Any] = []
    for part in nav if isinstance(nav, list) else [nav]:
        if isinstance(part, str) and part.endswith("*"):
            folder = part[:-1]
            found += [p for p in rest if p.rpartition("/")[0] == folder.rstrip("/")]
        else:
            found.append(_expanded(part, rest) if isinstance(part, dict) else part)
    return found if isinstance(nav, list) else found[0]


def on_files(files: Files, config: Any) -> Files:
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        # From the root of the repository to the folder of the pages.
        text = re.sub(r"\]\(docs/", "](", text)
        for other, inside in OUTSIDE.items():
            text = text.replace(f"]({other})", f"]({inside})")
        files.append(File.generated(config, page, content=text))
    return files
