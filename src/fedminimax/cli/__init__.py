"""The command line. Each command is a module, loaded when it is asked for: help needs no torch."""

from __future__ import annotations

import argparse
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from zipfile import BadZipFile

import fedminimax
from fedminimax.cli.common import Stopped

ALLOW_CODE = "--allow-code"  # of every command that reads an experiment or the folder of a run
COMMANDS = {
    "demo": "train a classifier over the sites of two sets, and show it",
    "init": "look at your tables, and write an experiment file for them",
    "run": "run an experiment from a TOML file",
    "tune": "search for better rates, on validation rows",
    "compare": "finished runs side by side, or the methods of a comparison file",
    "report": "runs as one page: curves, ROC, sites, duals, costs",
    "reproduce": "the papers' tables and figures: run them, and judge the claims",
    "benchmark": "the default and the main methods on tables with rare positives",
    "frontier": "portfolio runs against the efficient frontier of their data",
    "list": "what an experiment can name, one sentence each",
    "data": "the files of data sets: list, fetch, verify",
    "predict": "score new rows with a finished run",
    "export": "a run's model as one ONNX or torch.export file",
    "deploy": "run an experiment between sites, with NVIDIA FLARE or Flower",
    "doctor": "what this machine has for it, and what to do about what it lacks",
    "bench": "how fast this is, beside loops by hand and other libraries",
    "completion": "a script that completes commands in bash, zsh or fish",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what a command line asks for; the number is the process's exit code."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0
    if given[0] == "--version":
        print(f"fedminimax {fedminimax.__version__}")
        return 0
    if given[0] not in COMMANDS:
        near = get_close_matches(given[0], [*COMMANDS, "--help", "--version"], n=1)
        advice = f"did you mean {near[0]!r}? (known: " if near else "(known: "
        known = ", ".join(COMMANDS)
        print(f"fedminimax: no command is called {given[0]!r}; {advice}{known})", file=sys.stderr)
        return 2
    options = parse([word for word in given if word != ALLOW_CODE])
    try:
        with _warnings_as_notes(), _code(ALLOW_CODE in given):
            return options.command(options)
    except (
        *(MemoryError, RecursionError, OverflowError),
        *(EOFError, zlib.error, BadZipFile),
    ) as error:
        kinds = [text for kind, text in _BEYOND.items() if isinstance(error, kind)]
        _say(f"{[*kinds, 'a file is damaged or holds something else'][0]} ({error})")
        return 2
    except OSError as error:
        _say(f"{error.filename}: {error.strerror}" if error.filename else error)
        return 2
    except (ValueError, RuntimeError) as error:
        from fedminimax.engine.backends.torchrun import LostError, PeerError
        from fedminimax.engine.job import ClientError

        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            error = ValueError(f"{_BEYOND[MemoryError]} ({str(error).splitlines()[0]})")
        if not isinstance(error, ValueError | ClientError | PeerError):
            raise
        # Process 0 may be the one that is gone, so every other says it.
        _say(error, all_say=isinstance(error, LostError))
        return 2
    except Stopped as stopped:
        _say(stopped)
        return 130
    except KeyboardInterrupt:
        resumes = hasattr(options, "resume")
        _say("interrupted; a run goes on with --resume" if resumes else "interrupted")
        return 130


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options that a command is given; `command` among them does it."""
    parser = parser_of(given[0])
    options, rest = parser.parse_known_args(given[1:])
    if rest:
        # argparse stops at the first option; changes may also stand behind it.
        if not hasattr(options, "changes") or any("=" not in r or r[0] == "-" for r in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.changes += rest
    return options


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command, which is loaded for it."""
    module, told = import_module(f"fedminimax.cli.{name}"), COMMANDS[name]
    sentence = f"{told[0].upper()}{told[1:]}."
    parser = argparse.ArgumentParser(f"fedminimax {name}", description=sentence)
    parser.set_defaults(command=getattr(module, "command", None))  # or each action has its own
    module.add_arguments(parser)
    return parser


def _help() -> str:
    listed = "\n".join(f"  {name:<12}{told}" for name, told in COMMANDS.items())
    usage = "usage: fedminimax [--help] [--version] COMMAND ..."
    more = (
        "fedminimax COMMAND --help says what a command takes.\n"
        "--allow-code lets a file name classes of your own, as my_module:MyProblem."
    )
    return f"{usage}\n\n{fedminimax.__doc__}\n\n{listed}\n\n{more}"


_BEYOND: dict[type, str] = {
    MemoryError: "this needs more memory than there is: make it smaller, or use a larger machine",
    RecursionError: "something here is nested too deeply: give fewer levels",
    OverflowError: "a number is too large to compute with: give a smaller one",
}
_LONGEST = 2000  # letters of a sentence


def _say(sentence: object, who: str = "fedminimax", all_say: bool = False) -> None:
    """Once, however many processes torchrun started, unless all of them say it."""
    from fedminimax.engine.backends.torchrun import rank

    text = str(sentence)
    if len(text) > _LONGEST:
        left_out = len(text) - _LONGEST
        text = f"{text[: _LONGEST // 2]} ... ({left_out} letters) ... {text[-_LONGEST // 2 :]}"
    if all_say or rank() == 0:
        print(f"{who}: {text}", file=sys.stderr, flush=True)


@contextmanager
def _code(allowed: bool) -> Iterator[None]:
    """With --allow-code an experiment may name code, also of a module in the working directory."""
    if not allowed:
        yield
        return
    from fedminimax.config import code_allowed

    path = [*sys.path]
    sys.path.insert(0, "")
    try:
        with code_allowed():
            yield
    finally:
        sys.path[:] = path


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """A warning is a sentence for the user; the line of source that gave it would not help."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(message, "note")
        yield
