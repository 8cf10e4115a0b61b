"""`problem.name = "auto"`: a few recipes are trained side by side, and validation rows choose.

Successive halving: all recipes begin, the better half or so go on, and the last few are trained to
the end. Each is an ordinary run in a folder of its own that is interrupted, and gone on with, so a
search that was killed loses no more than a run does. In the folder of the search:

asked.toml     what was asked
search/NAME/   the run of each recipe
search.json    what was found, and what it cost
and all files of the run that was chosen, so that the folder is that of an ordinary run
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fedminimax.algorithms import METHODS
from fedminimax.config import CHOICES, ConfigError, Experiment, Part, write_toml
from fedminimax.engine.session import Run
from fedminimax.engine.settings import Callbacks
from fedminimax.engine.state import checkpoint
from fedminimax.engine.state.checkpoint import write_bytes
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.trainer import Interrupted, succeeded
from fedminimax.experiment import (
    PREPARATION,
    Built,
    Read,
    assemble,
    read,
    run_experiment,
    settled,
)
from fedminimax.metrics.ranking import auc_error
from fedminimax.problems.auto import AUTO

ASKED, SEARCH, RECORD = "asked.toml", "search", "search.json"
FILES = ("config.toml", "environment.json", PREPARATION, "history.jsonl", "final.safetensors")
MOST = 3  # times the gradients of one run
UNTOLD = (
    "auto chooses by the {} of validation rows, and those of all sites tell none, with too few "
    "rows of a class: raise [split] validation, or name a problem, such as cross_entropy"
)
STAGES = ((None, 1 / 8), (3, 1 / 3), (2, 1.0))  # recipes, and until which part of the rounds

Say = Callable[[str], None]
Play = Callable[[Experiment, Path, int], None]  # plays the run in a folder until this round


@dataclass(frozen=True)
class Recipe:
    """An objective with a method, a rate, a network, and rows that are encoded or not."""

    name: str
    problem: str
    method: str
    lr: float
    linear: bool = False
    encoded: bool = True  # or are numbers left as they are?


# A short run tries the first few.
RECIPES = (
    Recipe("cross_entropy", "cross_entropy", "fedavg", 0.1),
    Recipe("linear", "cross_entropy", "fedavg", 0.1, linear=True),
    Recipe("cross_entropy_fast", "cross_entropy", "fedavg", 0.3),
    Recipe("auc", "auc", "codasca", 0.3),
    # Fewer features: a step of the same rate goes less far.
    Recipe("cross_entropy_numbers", "cross_entropy", "fedavg", 0.3, encoded=False),
)


class Trial(NamedTuple):
    """How far a recipe has come."""

    recipe: str
    rounds: int  # played
    value: float | None  # of its best round by validation rows
    round: int  # the best
    error: float | None  # the standard error of the value, where one is known
    gradients: int
    bytes: int
    outcome: str | None  # None while it can go on

    @property
    def rank(self) -> float:
        """The larger, the better; what broke down is last."""
        good = self.outcome is None or succeeded(self.outcome)
        return -math.inf if self.value is None or not good else self.value


class Automatic(NamedTuple):
    """What a search has come to: the run that it chose, with its objects, and the record."""

    run: Run
    experiment: Experiment
    built: Built
    record: dict[str, Any]


def is_auto(experiment: Experiment) -> bool:
    """Does the experiment leave the choice to validation rows?"""
    return experiment.problem.name == AUTO


def recipes_of(asked: Experiment, own_module: bool = False) -> dict[str, Experiment]:
    """The experiments of which one is to be chosen, by name; `own_module`: the user supplies the
    network, so that no other is tried."""
    if asked.method.name != AUTO:
        raise ConfigError(
            f'[method] is {asked.method.name}, but [problem] name = "auto" finds the method: leave '
            "[method] out, or name a problem"
        )
    if asked.privacy.by_record:
        raise ConfigError(
            "[privacy] bounds what one run tells, and auto makes several of the same rows: name a "
            "problem, or leave [privacy] out"
        )
    own_rows = hasattr(CHOICES["data"].get(asked.data.name), "client_rows")
    if not asked.split.validation and not own_rows:
        raise ConfigError(
            "[split] validation is 0, but auto chooses by validation rows: set it above 0"
        )
    partial = asked.run.cohort is not None and not asked.run.allow_partial
    wish = {"measure": "auc", "local_steps": 8, **asked.problem.options}
    kept = {k: v for k, v in wish.items() if k not in ("measure", "local_steps")}
    monitor = None if wish["measure"] == "auc" else wish["measure"]
    given = asked.model or Part("mlp", {})
    found: dict[str, Experiment] = {}
    for one in RECIPES:
        method = METHODS[one.method]
        network = Part("linear", {}) if one.linear else given
        experiment = replace(
            asked,
            problem=Part(one.problem, kept),
            method=Part(one.method, {"lr": one.lr, "local_steps": wish["local_steps"]}),
            model=None if own_module else network,
            split=asked.split if one.encoded else replace(asked.split, bins=0),
            run=replace(asked.run, monitor=monitor),
        )
        fits = method.partial or not partial, method.robust or asked.messages.reducer.linear
        if all(fits) and experiment not in found.values():
            found[one.name] = experiment
    return found


def stages_of(rounds: int, every: int, recipes: int) -> list[tuple[int, int]]:
    """How many recipes are trained until which round: together at most three runs.

    >>> stages_of(150, 10, 7)
    [(7, 20), (3, 50), (2, 150)]
    """
    ends = [min(rounds, max(every, round(part * rounds / every) * every)) for _, part in STAGES]
    ends[-1] = rounds
    for first in range(recipes, 0, -1):
        counts = [min(first, most or first) for most, _ in STAGES]
        steps = [end - before for before, end in zip([0, *ends], ends, strict=False)]
        if sum(c * s for c, s in zip(counts, steps, strict=True)) <= MOST * rounds:
            return list(zip(counts, ends, strict=True))
    raise AssertionError("one recipe is one run")


def run_auto(
    asked: Experiment,
    folder: str | os.PathLike | None = None,
    resume: bool = False,
    reader: Callable[[Experiment], Read] = read,
    say: Say = lambda text: None,
    **callbacks: Any,
) -> Automatic:
    """Searches, and returns the run that was chosen; with a folder, all of it is written there.

    Arguments:
        asked: an experiment whose problem is "auto".
        folder: of the search, and of the run that it chooses.
        resume: go on with the search in the folder.
        reader: what gives the data of a recipe, which may be encoded otherwise than another's.
        say: told, in sentences, how far each recipe has come.
        callbacks: those of `simulate`.
    """
    if folder is None:
        with TemporaryDirectory() as place:
            searched = run_auto(asked, Path(place), False, reader, say, **callbacks)
            return searched._replace(run=replace(searched.run, folder=None))
    held = {asked.split: reader(asked)}
    for note in held[asked.split].notes:
        say(f"note: {note}")
    recipes = recipes_of(asked, "module" in held[asked.split].supplied)
    place = begun(asked, Path(folder), resume)

    def built(experiment: Experiment) -> Built:
        if (split := experiment.split) not in held:
            held[split] = reader(experiment)
        return assemble(experiment, held[split], experiment.make("method"))

    def play(experiment: Experiment, own: Path, until: int) -> None:
        with stopping_at(until, Callbacks(**callbacks)) as calls:
            again = (own / "config.toml").exists()
            run_experiment(experiment, own, again, built(experiment), **calls)

    record = search(recipes, place, play, say)
    chosen = recipes[record["chosen"]]
    made, own = built(chosen), place.path / SEARCH / record["chosen"]
    run = run_experiment(chosen, own, resume=True, built=made)
    return Automatic(replace(run, folder=place), chosen, made, record)


@contextmanager
def stopping_at(until: int, callbacks: Callbacks) -> Iterator[dict[str, Any]]:
    """Callbacks with which a run is interrupted after that round, as it was wanted."""
    done = 0

    def on_round(round: int) -> None:
        nonlocal done
        done = round
        if callbacks.on_round:
            callbacks.on_round(round)

    def interrupted() -> bool:
        return done >= until or (callbacks.interrupted is not None and callbacks.interrupted())

    try:
        yield {**vars(callbacks), "on_round": on_round, "interrupted": interrupted}
    except Interrupted:
        if done < until:
            raise


def begun(asked: Experiment, folder: Path, resume: bool) -> RunFolder:
    """The folder of the search, which is new, or holds the same search."""
    place, text = RunFolder(folder), write_toml(settled(asked))
    if not resume:
        if (folder / ASKED).exists():
            raise FileExistsError(
                f"{folder} already holds a search: resume it, or give another folder "
                f"(fedminimax run --resume {folder})"
            )
        place.create()
        place.checkpoints.rmdir()
        place.write_text(ASKED, text)
    elif place.read_toml_text(ASKED) != text:
        raise ConfigError(f"the search in {folder} is of another experiment: give another folder")
    return place


def search(recipes: dict[str, Experiment], place: RunFolder, play: Play, say: Say) -> dict:
    """Plays the recipes as far as each deserves; writes the record and the run that is chosen."""
    run = next(iter(recipes.values())).run
    stages = stages_of(run.rounds, run.evaluate_every, len(recipes))
    trials: dict[str, Trial] = {}
    left = list(recipes)
    for count, until in stages:
        left = best_of(left, count, trials, recipes) if trials else left[:count]
        for name in left:
            own = place.path / SEARCH / name
            if played(own) < until:
                own.mkdir(parents=True, exist_ok=True)
                play(recipes[name], own, until)
            trials[name] = trial = trial_of(name, own, run.monitor, until)
            if trial.value is None and trial.outcome is None:
                raise ConfigError(UNTOLD.format(run.monitor or "auc"))
            say(f"{name}: round {trial.rounds}/{run.rounds}, {_told(trial, run.monitor)}")
    chosen = max(left, key=lambda name: trials[name].rank)
    if trials[chosen].rank == -math.inf:
        raise ValueError(f"no recipe could be judged; {chosen}: {trials[chosen].outcome}")
    record = record_of(list(trials.values()), chosen, run.monitor, run.rounds, stages)
    for file in FILES:
        if (found := place.path / SEARCH / chosen / file).exists():
            write_bytes(place.path / file, found.read_bytes())
    place.write_json(RECORD, record)
    return record


def best_of(
    names: Sequence[str], count: int, trials: dict[str, Trial], recipes: dict[str, Experiment]
) -> list[str]:
    """The best so many recipes, the best on encoded rows and the best on numbers among them.

    Numbers that are not encoded may start slowly and end first.
    """
    ranked = sorted(names, key=lambda name: -trials[name].rank)
    best = ranked[:count]
    others = [name for name in ranked[count:] if trials[name].rank > -math.inf]
    kinds = {recipes[name].split.bins for name in best}
    if count > 1 and (other := [n for n in others if recipes[n].split.bins not in kinds]):
        best[-1] = other[0]
    return best


def played(folder: Path) -> float:
    """Until which round the run in a folder has been played; one that has ended, for ever."""
    place = RunFolder(folder)
    found = [] if place.final.exists() else place.list_checkpoints()
    return math.inf if place.final.exists() else int(found[-1].stem.split("-")[1]) if found else 0


def trial_of(name: str, folder: Path, monitor: str | None, until: int) -> Trial:
    """What the folder of a recipe's run says of its rounds until that one."""
    place = RunFolder(folder)
    history = [record for record in place.read_history() if record["round"] <= until]
    ended = place.final.exists() and until >= checkpoint.read_about(place.final)["round"]
    outcome = checkpoint.read_about(place.final)["outcome"] if ended else None
    if not history or "validation" not in history[0]:
        raise ConfigError(
            "auto chooses by validation rows, and there are none: set [split] validation above 0"
        )
    judged = [(r["round"], r["validation"]) for r in history]
    known = [(v, -n, m) for n, m in judged if (v := m.get(monitor or "auc")) is not None]
    value, number, measured = max(known, key=lambda k: k[:2], default=(None, 0, {}))
    last = history[-1]
    counts = measured.get("positives", 0), measured.get("negatives", 0)
    error = auc_error(value, *counts) if monitor is None and value is not None else None
    sent = last["bytes_up"] + last["bytes_down"] + last["evaluation_bytes"] * len(history)
    return Trial(name, last["round"], value, -number, error, last["gradients"], sent, outcome)


def record_of(
    trials: Sequence[Trial],
    chosen: str,
    monitor: str | None,
    rounds: int,
    stages: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """What was chosen, by how much, what was within chance, and the cost; JSON, without times."""
    best = next(t for t in trials if t.recipe == chosen)
    others = [t for t in trials if t.recipe != chosen and t.rounds == best.rounds and t.value]
    next_best = max(others, key=lambda t: t.rank, default=None)
    reach = 0.0 if best.error is None else best.error
    near = [t.recipe for t in others if best.rank - t.rank <= reach]
    return {
        "measure": monitor or "auc",
        "chosen": chosen,
        "value": best.value,
        "round": best.round,
        "standard_error": best.error,
        "next": None if next_best is None else next_best.recipe,
        "gain": None if next_best is None else best.rank - next_best.rank,
        "within_chance": near,
        "stages": [{"recipes": count, "until": until} for count, until in stages],
        "trials": [t._asdict() for t in trials],
        "gradients": sum(t.gradients for t in trials),
        "bytes": sum(t.bytes for t in trials),
        "runs": sum(t.rounds for t in trials) / rounds,
    }


def verdict(record: dict[str, Any]) -> str:
    """The record as a sentence or three."""
    measure, gain = record["measure"], record["gain"]
    text = f"auto chose {record['chosen']}: validation {measure} {record['value']:.4f}"
    if gain is not None:
        text += f", {gain:.4f} above {record['next']}"
    if record["standard_error"] is not None:
        near = ", ".join(record["within_chance"]) or "no other that came as far"
        text += f"; within one standard error ({record['standard_error']:.4f}): {near}"
    return f"{text}. The search took the rounds of {record['runs']:.2f} runs"


def _told(trial: Trial, monitor: str | None) -> str:
    if trial.outcome and not succeeded(trial.outcome):
        return trial.outcome
    value = "none" if trial.value is None else f"{trial.value:.4f}"
    return f"best validation {monitor or 'auc'} {value}"
