"""fedminimax list: what an experiment can name, and every key of it."""

from __future__ import annotations

import argparse
import inspect
import json

from fedminimax.algorithms import METHODS
from fedminimax.config import CHOICES, FIXED, described, suggest
from fedminimax.messages import REDUCERS, STAGES
from fedminimax.report.keys import as_json, json_schema, keys_table, sections
from fedminimax.report.tables import console, list_table, names_table
from fedminimax.report.traits import trait_table, traits_table

PLURALS = {"methods": "method", "problems": "problem", "data": "data", "models": "model"}
WORDS = (*PLURALS, *FIXED, "messages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "what",
        nargs="?",
        help="methods, problems, data, models, messages, run, split, or one name, with its keys "
        "and what it costs",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--schema", action="store_true", help="print a JSON Schema of experiment files, for editors"
    )


def command(options: argparse.Namespace) -> int:
    """Prints a table of names, or all about one."""
    what = options.what
    found = [(section, name, kind) for section, name, kind in sections() if what in (section, name)]
    if options.schema:
        print(json.dumps(json_schema(), indent=1))
    elif what is not None and what not in WORDS and not found:
        known = [*WORDS, *(name for _, name, _ in sections() if name)]
        raise ValueError(f"nothing is called {what!r}; {suggest(what, known)}")
    elif options.json:
        chosen = PLURALS.get(what or "", what)
        entries = [entry for entry in sections() if chosen in (None, *entry[:2])]
        print(json.dumps([as_json(*entry) for entry in entries], indent=1))
    elif what == "methods":
        console().print(traits_table(METHODS))
        print("fedminimax list METHOD says what one costs, and its options")
    elif what is None or what in PLURALS:
        for section in CHOICES if what is None else [PLURALS[what]]:
            console().print(list_table(section))
        if what is None:
            console().print(names_table("other sections", FIXED))
            print("fedminimax list NAME says its keys, their types and defaults")
    elif what == "messages":
        console().print(names_table("messages", {**STAGES, **REDUCERS}))
    else:
        for entry in found:
            _show(*entry)
    return 0


def _show(section: str, name: str, kind: type) -> None:
    """All about one class."""
    text = inspect.cleandoc(kind.__doc__ or "") if name else described(kind)
    print("\n".join([f"[{section}]", *([f'name = "{name}"'] if name else []), "", text, ""]))
    if section == "method":
        console().print(trait_table(name, METHODS[name]))
        print()
    console().print(keys_table(section, kind))
