"""fedminimax completion: a script with which a shell completes commands, options, experiment files
and the keys of their settings.

The script has all words in it: asking for them would load torch at every press of the tab key.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from fedminimax.cli import COMMANDS, parser_of
from fedminimax.config import CHOICES, FIXED, options_of
from fedminimax.data import SOURCES

BASH = """\
# fedminimax completion bash > ~/.local/share/bash-completion/completions/fedminimax
_fedminimax() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local place="${COMP_WORDS[*]:1:COMP_CWORD-1}" options= names= keys= files=
    COMPREPLY=()
    [[ $word == = || $before == = ]] && return
    case "$place" in
%s
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    elif [[ $before != -* ]]; then
        COMPREPLY=($(compgen -W "$names $keys" -- "$word"))
        if [[ ${COMPREPLY[0]} == *= ]]; then
            compopt -o nospace 2> /dev/null
        elif [[ -z ${COMPREPLY[0]} && -n $files ]]; then
            local IFS=$'\\n'
            compopt -o filenames 2> /dev/null
            COMPREPLY=($(compgen -f -X "!$files" -- "$word") $(compgen -d -- "$word"))
        fi
    fi
}
complete -o default -F _fedminimax fedminimax
"""
ZSH = """\
#compdef fedminimax
# fedminimax completion zsh > a folder of $fpath, as _fedminimax
_fedminimax() {
    local place="${words[2,CURRENT-1]}" options= names= keys= files=
    case "$place" in
%s
    esac
    if [[ $PREFIX == -* ]]; then
        compadd -- ${=options}
    elif [[ $words[CURRENT-1] == -* || $PREFIX == *=* ]]; then
        _files
    else
        compadd -- ${=names}
        compadd -S '' -- ${=keys}
        if [[ -n $files ]]; then
            _files -g $files
        elif [[ -z $names ]]; then
            _files
        fi
    fi
}
if [[ $funcstack[1] == _fedminimax ]]; then
    _fedminimax "$@"  # loaded from $fpath, at the first press of the key
else
    compdef _fedminimax fedminimax
fi
"""
FISH = """\
# fedminimax completion fish > ~/.config/fish/completions/fedminimax.fish
function __fedminimax_after
    set -l given (commandline -opc)
    set -e given[1]
    string match -q -- "$argv[1]" "$given"
end
%s
"""


class Words(NamedTuple):
    """What may stand at a place of a command line."""

    options: list[str]
    names: list[str]  # of commands, actions or what they are about
    keys: list[str]  # of settings: key=value
    files: str = ""  # a pattern, if not all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("shell", choices=SHELLS, help="the script's first lines say where it goes")


def command(options: argparse.Namespace) -> int:
    """Prints the script."""
    print(SHELLS[options.shell](places()), end="")
    return 0


def places() -> dict[str, Words]:
    """The words after each pattern of those that stand before them; the first pattern counts."""
    names = {name for kinds in CHOICES.values() for name in kinds}
    known = {
        "list": sorted({"methods", "problems", "data", "models", *names}),
        "data fetch": [*SOURCES],
        "data verify": [*SOURCES],
    }
    keys = [f"{section}.name=" for section in CHOICES]
    for section, kinds in {**CHOICES, **{name: {"": kind} for name, kind in FIXED.items()}}.items():
        owned = {key for kind in kinds.values() for key in options_of(kind, section)}
        keys += [f"{section}.{key}=" for key in sorted(owned)]
    found = {"": Words(["--help", "--version"], [*COMMANDS], [])}

    def add(place: str, parser: argparse.ArgumentParser) -> None:
        options, names, taken = (
            [],
            known.get(place, []),
            {action.dest for action in parser._actions},
        )
        for action in parser._actions:
            options += [word for word in action.option_strings if word.startswith("--")]
            if not action.option_strings and isinstance(action.choices, Mapping):
                names = [*action.choices]
                for name, below in action.choices.items():
                    if isinstance(below, argparse.ArgumentParser):
                        add(f"{place} {name}", below)
        files = "*.toml" if "config" in taken or place == "compare" else ""
        found[place] = Words(options, names, [], files)
        changes = keys if "changes" in taken else []
        found[f"{place} *"] = Words(options, known.get(place, []), changes, files)

    for name in COMMANDS:
        add(name, parser_of(name))
    return found


def _cases(found: dict[str, Words]) -> str:
    """The places as the cases of bash and of zsh."""
    lines = []
    for place, words in found.items():
        pattern = f"'{place[:-1]}'*" if place.endswith("*") else f"'{place}'"
        texts = {
            name: w if isinstance(w, str) else " ".join(w) for name, w in words._asdict().items()
        }
        sets = [f'{name}="{text}"' for name, text in texts.items() if text]
        lines.append(f"        {pattern}) {' '.join(sets)} ;;")
    return "\n".join(lines)


def _fish(found: dict[str, Words]) -> str:
    lines = []
    for place, words in found.items():
        line = f"complete -c fedminimax -n \"__fedminimax_after '{place}'\""
        lines += [f"{line} -l {option[2:]}" for option in words.options]
        if words.names or words.keys:
            only = " -f" * bool(words.names)
            lines.append(f"{line}{only} -a '{' '.join([*words.names, *words.keys])}'")
    return FISH % "\n".join(lines)


SHELLS = {
    "bash": lambda found: BASH % _cases(found),
    "zsh": lambda found: ZSH % _cases(found),
    "fish": _fish,
}
