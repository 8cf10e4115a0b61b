"""Options within an argument of the estimator, as `method__lr`: for grids of settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from sklearn.base import BaseEstimator

from fedminimax.estimator.files import table_of

NESTED = ("objective", "method", "module")


class NestedParameters(BaseEstimator):
    """`get_params` and `set_params` that also know the options of tables and methods."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments, and, deep, the options within them."""
        found = super().get_params(deep=False)
        for name in NESTED if deep else ():
            found |= {f"{name}__{key}": value for key, value in _options(found[name]).items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Sets arguments, and options within `objective`, `method` and `module`."""
        inside = {key: value for key, value in params.items() if key.split("__")[0] in NESTED}
        inside = {key: value for key, value in inside.items() if "__" in key}
        super().set_params(**{k: v for k, v in params.items() if k not in inside})
        for key, value in inside.items():
            name, _, option = key.partition("__")
            setattr(self, name, _changed(name, self._usual(name), option, value))
        return self

    def _usual(self, name: str) -> Any:
        """What an argument stands for; a None is the usual choice."""
        return getattr(self, name)


def _options(choice: Any) -> dict[str, Any]:
    if isinstance(choice, Mapping):
        return {str(key): value for key, value in choice.items()}
    if dataclasses.is_dataclass(choice) and not isinstance(choice, type):
        return {f.name: getattr(choice, f.name) for f in dataclasses.fields(choice) if f.init}
    return {}


def _changed(name: str, choice: Any, option: str, value: Any) -> Any:
    if isinstance(choice, str | Mapping):
        return {**table_of(choice), option: value}
    known = _options(choice)
    if option not in known:
        options = f"; its options are {', '.join(known)}" if known else ""
        raise ValueError(f"{name}__{option}: {name} has no option {option!r}{options}")
    return dataclasses.replace(choice, **{option: value})
