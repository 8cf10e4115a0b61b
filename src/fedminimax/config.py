"""An experiment as a file: TOML sections, each read into the dataclass or class that it names.

No option is defined here. What a section accepts is what its class accepts, with the class's own
defaults and types.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import math
import string
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedminimax.algorithms import METHODS
from fedminimax.blocks.schedules import SCHEDULES, Schedule
from fedminimax.data import DATASETS
from fedminimax.data.prepare import Split
from fedminimax.engine.settings import Settings
from fedminimax.messages import COMPRESSORS, REDUCERS, STAGES, Mean, Messages
from fedminimax.models import MODELS
from fedminimax.privacy.settings import Privacy
from fedminimax.problems import PROBLEMS
from fedminimax.problems.auto import AUTO, NO_EXPERIMENT
from fedminimax.types import Algorithm, Problem

Table = dict[str, Any]


class ConfigError(ValueError):
    """A setting that cannot be used: what it is, what was expected, what to do."""


@dataclass(frozen=True)
class Part:
    """A section that names one of several classes, with the options given to it."""

    name: str
    options: Mapping[str, Any]


# What is supplied to the class of a section, so that a file does not give it.
SUPPLIED: dict[str, tuple[str, ...]] = {
    "problem": (
        *("dimension", "shape", "classes", "sites", "labels"),  # by the data
        *("module", "generator", "critic", "noise_size"),  # by the model
    )
}
CHOICES: dict[str, dict[str, Any]] = {
    "data": DATASETS,
    "model": MODELS,
    "problem": PROBLEMS,
    "method": METHODS,
}
# What a file of a machine may add to: the choices, and the kinds of parts of [messages].
ALLOWED: dict[str, dict[str, Any]] = {
    **CHOICES,
    "stage": STAGES,
    "compressor": COMPRESSORS,
    "reducer": REDUCERS,
}
OWN: dict[str, type] = {"problem": Problem, "method": Algorithm}  # of which a file may name code
_ALLOWED_CODE: ContextVar[bool] = ContextVar("code_allowed", default=False)
_BARE = frozenset(string.ascii_letters + string.digits + "_-")  # of keys without quotes
NEEDED = "(needed)"  # in place of the default of an option that has none
FIXED: dict[str, type] = {"split": Split, "run": Settings, "privacy": Privacy}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run."""

    data: Part
    problem: Part
    method: Part
    model: Part | None = None
    split: Split = dataclasses.field(default_factory=Split)
    run: Settings = dataclasses.field(default_factory=Settings)
    privacy: Privacy = dataclasses.field(default_factory=Privacy)
    messages: Messages = dataclasses.field(default_factory=Messages)

    @staticmethod
    def from_table(table: Table) -> Experiment:
        _check_sections(table)
        parts: Table = {}
        for section, choices in CHOICES.items():
            if section in table:
                parts[section] = part_of(section, table[section])
            elif section == "method" and parts["problem"].name == AUTO:
                parts[section] = Part(AUTO, {})  # it is found, not given
            elif section != "model":
                raise ConfigError(
                    f'there is no section [{section}]; add one with name = "...", one of: '
                    + ", ".join(choices)
                )
        for section, kind in FIXED.items():
            parts[section] = kind(**options_for(kind, table.get(section, {}), f"[{section}]"))
        return Experiment(**parts, messages=messages_of(table.get("messages", {})))

    @staticmethod
    def from_file(
        path: str | Path, changes: Iterable[str] = (), note: Callable[[str], None] | None = None
    ) -> Experiment:
        """The experiment in a TOML file, with key=value changes from a command line; `note` is told
        what they drop."""
        return Experiment.from_table(changed(read_toml(path), changes, note))

    def to_table(self) -> Table:
        """All settings, resolved: what a run folder records."""
        table: Table = {}
        for section in CHOICES:
            part = getattr(self, section)
            if part is not None and (section, part.name) != ("method", AUTO):
                kind = CHOICES[section].get(part.name)  # arrays in memory have none
                defaults = {} if kind is None else _defaults(kind, section)
                table[section] = {"name": part.name, **defaults, **part.options}
        for section in FIXED:
            fixed = getattr(self, section)
            table[section] = {f.name: getattr(fixed, f.name) for f in dataclasses.fields(fixed)}
        if self.messages != Messages():
            table["messages"] = messages_table(self.messages)
        return table

    def make(self, section: str, **supplied: Any) -> Any:
        """The object that a section describes."""
        part = getattr(self, section)
        if part is None:
            raise ConfigError(
                f'there is no section [{section}], but this problem needs one; add name = "...", '
                "one of: " + ", ".join(CHOICES[section])
            )
        if section == "method" and part.name == AUTO:
            raise ConfigError(NO_EXPERIMENT)
        kind = CHOICES[section][part.name]
        needed = [name for name in SUPPLIED.get(section, ()) if name in _parameters(kind)]
        if lack := [name for name in needed if name not in supplied]:
            model = "" if self.model is None else f" with [model] {self.model.name}"
            raise ConfigError(
                f"[{section}] {part.name} cannot be posed on [data] {self.data.name}{model}: they "
                f"do not give its {', '.join(lack)}; choose another {section}, or others of them"
            )
        return kind(**part.options, **{name: supplied[name] for name in needed})


def read_toml(path: str | Path) -> Table:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; give tables of a few levels") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def changed(
    table: Table, changes: Iterable[str], note: Callable[[str], None] | None = None
) -> Table:
    """The table with changes such as method.lr=0.05, or lr=0.05 where only one section has it. A
    change of a section's name keeps the options that the new one has too; `note` is told of the
    others."""
    _check_sections(table)
    table = {section: dict(values) for section, values in table.items()}
    # A name goes first: changing it drops options, but not those of this command line.
    for change in sorted(changes, key=lambda c: not c.partition("=")[0].strip().endswith(".name")):
        name, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"{change!r} is not a change; write section.key=value")
        section, dot, key = name.strip().partition(".")
        if not dot:
            section, key = _owner(table, name.strip()), name.strip()
        target = table.setdefault(section, {})
        if section in CHOICES and key == "name":
            _import_own(section, str(_value(text)))
        if section in CHOICES and key == "name" and target.get("name") != _value(text):
            known = CHOICES[section].get(str(_value(text)))
            kept = ["name", *_keys(known, section)] if known else ["name"]
            dropped = [option for option in target if option not in kept]
            for option in dropped:
                del target[option]
            if dropped and note:
                what = f"[{section}] {', '.join(dropped)}"
                note(f"{what} left out: {text.strip()} has no such option")
        target[key] = _value(text)
    return table


def write_toml(table: Table) -> str:
    """A table of sections as TOML text; options that are None are left out."""
    lines = []
    for section, values in table.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_text(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def messages_of(table: Table) -> Messages:
    """The stages and the reducer that a section [messages] describes.

    >>> messages_of({"clip": 1.0, "reduce": {"name": "trimmed_mean", "share": 0.2}})
    Messages(stages=(Clip(norm=1.0, dual_norm=None),), reducer=TrimmedMean(share=0.2))
    """
    known = [*STAGES, "compress", "reduce"]
    for name in table:
        if name not in known:
            raise ConfigError(f"[messages] has no stage {name!r}; {suggest(name, known)}")
    stages = [
        _configured(kind, table[name], f"[messages] {name}")
        for name, kind in STAGES.items()
        if name in table
    ]
    if table.get("compress", "none") != "none":
        stages.append(_chosen(COMPRESSORS, table["compress"], "[messages] compress"))
    reducer = _chosen(REDUCERS, table.get("reduce", "mean"), "[messages] reduce")
    return Messages(tuple(stages), reducer)


def _chosen(choices: dict[str, Any], given: Any, where: str) -> Any:
    """An object of one of some classes, from its name or from a table with the name."""
    options = dict(given) if isinstance(given, dict) else {"name": given}
    name = options.pop("name", None)
    if str(name) not in choices:
        raise ConfigError(f"{where} is {given!r}; {suggest(str(name), choices)}")
    return _configured(choices[name], options, where)


def _configured(kind: Any, given: Any, where: str) -> Any:
    """An object of a class, from a table of options or from the value of its first one."""
    if not isinstance(given, dict):
        keys = _keys(kind, "")
        if not keys:
            raise ConfigError(f"{where} is {given!r}, but it has no options: give {{}}")
        given = {keys[0]: given}
    options = options_for(kind, given, where)
    try:
        return kind(**options)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def messages_table(messages: Messages) -> Table:
    """What `messages_of` reads."""
    table = {
        name: _options(stage)
        for name, kind in STAGES.items()
        for stage in messages.stages
        if type(stage) is kind
    }
    for stage in messages.stages:
        if type(stage) in COMPRESSORS.values():
            table["compress"] = _named(COMPRESSORS, stage)
    if messages.reducer != Mean():
        table["reduce"] = _named(REDUCERS, messages.reducer)
    return table


def _named(choices: dict[str, Any], part: Any) -> Table:
    """What `_chosen` reads."""
    name = next(name for name, known in choices.items() if known is type(part))
    return {"name": name, **_options(part)}


def messages_text(messages: Messages) -> str:
    return _text(messages_table(messages))


def _options(part: Any) -> Table:
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return {name: value for name, value in fields.items() if value is not None}


def described(kind: Any) -> str:
    """The first sentence of a class's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return " ".join(text.split())


def _check_sections(table: Table) -> None:
    known = [*CHOICES, *FIXED, "messages"]
    for section, values in table.items():
        if not isinstance(values, dict):
            raise ConfigError(
                f"{section} = {values!r} stands outside the sections; put it below one of: "
                + ", ".join(f"[{name}]" for name in known)
            )
        if section not in known:
            raise ConfigError(f"unknown section [{section}]; {suggest(section, known)}")


def options_of(kind: Any, section: str) -> dict[str, str]:
    """The keys that a class accepts, with their defaults as a file would have them."""
    defaults = _defaults(kind, section)
    return {
        key: NEEDED
        if key not in defaults
        else "(none)"
        if defaults[key] is None
        else _text(defaults[key])
        for key in _keys(kind, section)
    }


def part_of(section: str, values: Table, where: str = "") -> Part:
    """The part that a table describes; `where` is what its owner calls it."""
    where, choices = where or f"[{section}]", CHOICES[section]
    if "name" not in values:
        raise ConfigError(
            f'section {where} has no name; add name = "...", one of: {", ".join(choices)}'
        )
    name = values["name"]
    _import_own(section, str(name))
    if str(name) not in choices:
        raise ConfigError(f"{where} name is {name!r}; {suggest(str(name), choices)}")
    rest = {key: value for key, value in values.items() if key != "name"}
    return Part(name, options_for(choices[name], rest, where, section))


def imported(place: str, where: str) -> Any:
    """The class at "package.module:Class", or a sentence that begins with `where`."""
    module, _, attribute = place.partition(":")
    if not module or not attribute:
        raise ConfigError(f'{where} is {place!r}; write "package.module:Class"')
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{where}: {place} cannot be imported ({reason}); correct the line, or install what it "
            "needs"
        ) from error


@contextmanager
def code_allowed(allowed: bool = True) -> Iterator[None]:
    """In this block an experiment may name a problem and a method of your own by the place of its
    class, as "package.module:Class", which is imported. Afterwards they are not known any more."""
    before = {section: dict(CHOICES[section]) for section in OWN}
    token = _ALLOWED_CODE.set(allowed)
    try:
        yield
    finally:
        _ALLOWED_CODE.reset(token)
        for section, known in before.items():
            for name in CHOICES[section].keys() - known.keys():
                if ":" in name:
                    del CHOICES[section][name]


def _import_own(section: str, name: str) -> None:
    """Makes a class of the user's own known by its place, where that is allowed."""
    choices = CHOICES[section]
    if section not in OWN or ":" not in name or name in choices:
        return
    if not _ALLOWED_CODE.get():
        raise ConfigError(
            f"[{section}] name is {name!r}, which is code of your own: add --allow-code to the "
            "command if you trust it, or allow it in the file of a site"
        )
    kind, base = imported(name, f"[{section}] name"), OWN[section]
    if not inspect.isclass(kind) or not issubclass(kind, base):
        raise ConfigError(
            f"[{section}] name is {name!r}, which is no {base.__name__}: give a class that "
            f"inherits from fedminimax.{base.__name__}"
        )
    choices[name] = kind


def options_for(kind: Any, values: Table, where: str, section: str = "") -> Table:
    """Options as the types that a class asks for, or a sentence that begins with `where`."""
    parameters = _parameters(kind)
    accepted = _keys(kind, section)
    for key in values:
        if key not in accepted:
            raise ConfigError(f"{where} has no key {key!r}; {suggest(key, accepted)}")
    for name in accepted:
        if parameters[name].default is inspect.Parameter.empty and name not in values:
            raise ConfigError(f"{where} needs the key {name!r}; add {name} = ...")
    hints = hints_of(kind)
    return {k: _coerced(v, hints.get(k, Any), f"{where} {k}") for k, v in values.items()}


def _defaults(kind: Any, section: str) -> Table:
    given = {name: _parameters(kind)[name].default for name in _keys(kind, section)}
    return {name: value for name, value in given.items() if value is not inspect.Parameter.empty}


def _keys(kind: Any, section: str) -> list[str]:
    """The keys that a section with this class accepts."""
    return [name for name in _parameters(kind) if name not in SUPPLIED.get(section, ())]


def _parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def hints_of(kind: Any) -> Table:
    """The types of what a class is made from."""
    target = kind if dataclasses.is_dataclass(kind) else kind.__init__
    return typing.get_type_hints(target)


def _coerced(value: Any, hint: Any, where: str) -> Any:
    """The value as the type that is asked for, or a sentence."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, arguments, where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} is {value!r}; {suggest(str(value), arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            sentence = f'{where} is {value!r}; give a list, such as ["a", "b"] or [1, 2]'
            if isinstance(value, str) and value.startswith("["):
                # A shell takes the inner quotes away if there are none around them.
                sentence += ", on the command line with 'single quotes' around key=value"
            raise ConfigError(sentence)
        return tuple(_coerced(item, arguments[0], where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {value!r}; give a table, such as {{name = ...}}")
        return {k: _coerced(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if inspect.isclass(hint) and issubclass(hint, Schedule):
        return _schedule(value, where)
    if hint is float and _is_number(value):
        if type(value) is int and value.bit_length() > 1000:
            raise ConfigError(f"{where} has {value.bit_length()} bits; give a number below 1e300")
        if not math.isfinite(value):
            raise ConfigError(f"{where} is {value}; give a finite number")
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if hint is str and isinstance(value, int | float) and where.startswith("["):
        return _text(value)  # a shell takes the quotes away, so that positive="1" comes as 1
    expected = {int: "a whole number", float: "a number", bool: "true or false"}
    raise ConfigError(f"{where} is {value!r}; give {expected.get(hint, 'a text, in quotes')}")


def _one_of(value: Any, hints: Sequence[Any], where: str) -> Any:
    """A value of an option that is a rate, or that may be left out."""
    if value is None and types.NoneType in hints:
        return None
    if Schedule in hints and not _is_number(value):
        return _schedule(value, where)
    plain = [hint for hint in hints if hint not in (Schedule, types.NoneType)]
    several = [hint for hint in plain if typing.get_origin(hint) is tuple]
    listed = several and isinstance(value, list | tuple)
    return _coerced(value, several[0] if listed else plain[0], where)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _schedule(value: Any, where: str) -> Schedule:
    if isinstance(value, Schedule):
        return value
    if not isinstance(value, dict) or "kind" not in value:
        raise ConfigError(
            f'{where} is {value!r}; give a number, or a schedule such as {{kind = "step_decay", '
            "value = 0.1, at = [50, 75]}"
        )
    kind = value["kind"]
    if str(kind) not in SCHEDULES:
        raise ConfigError(f"{where} kind is {kind!r}; {suggest(str(kind), SCHEDULES)}")
    options = {k: v for k, v in value.items() if k != "kind"}
    return SCHEDULES[kind](**options_for(SCHEDULES[kind], options, where))


def _owner(table: Table, key: str) -> str:
    """The section that a key without one belongs to."""
    keys: dict[str, list[str]] = {}
    for section in (*CHOICES, *FIXED):
        name = table.get(section, {}).get("name")
        kind: Callable | None = FIXED.get(section) or CHOICES[section].get(str(name))
        keys[section] = [] if kind is None else _keys(kind, section)
    owners = [section for section in keys if key in keys[section]]
    if len(owners) == 1:
        return owners[0]
    if owners:
        written = " or ".join(f"{section}.{key}" for section in owners)
        raise ConfigError(f"{key!r} is a key of several sections; write {written}")
    known = [name for names in keys.values() for name in names]
    raise ConfigError(f"no section has a key {key!r}; {suggest(key, known)}")


def suggest(given: str, known: Iterable[Any]) -> str:
    names = [str(name) for name in known]
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), lower, n=1)
    listed = "known: " + ", ".join(dict.fromkeys(names))
    return f"did you mean {lower[near[0]]!r}? ({listed})" if near else listed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _key_text(key: str) -> str:
    return key if key and set(key) <= _BARE else json.dumps(key, ensure_ascii=False)


def _text(value: Any) -> str:
    if isinstance(value, Schedule):
        kind = next(name for name, cls in SCHEDULES.items() if type(value) is cls)
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        inside = ", ".join(f"{k} = {_text(v)}" for k, v in {"kind": kind, **fields}.items())
        return "{" + inside + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key_text(k)} = {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    # JSON's strings and numbers are TOML's, but for infinities, which no option takes, and for the
    # one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
