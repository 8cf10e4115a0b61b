"""The search itself: trials by Optuna, kept in a folder, judged on validation rows.

given.toml     the settings that the search began with
search.json    what is searched, how many trials, repeats and cuts
trials.db      the trials and the repeats, in Optuna's own SQLite storage
best.toml      the settings of the best trial, or those given if they were better when repeated

Trial 0 is the settings given. What Optuna proposes for trial n depends on the seed, on n and on the
trials before it, so a search that was killed goes on to the same trials as one that was not.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedminimax.config import CHOICES, Experiment, write_toml
from fedminimax.engine.job import ClientError
from fedminimax.engine.state.checkpoint import CheckpointError, write_bytes
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.trainer import FINISHED, succeeded
from fedminimax.experiment import Read, assemble, read, run_experiment, settled
from fedminimax.metrics.paired import Difference, paired_difference
from fedminimax.random import key
from fedminimax.tuning.held_out import cut_again, without_test
from fedminimax.tuning.space import Range, given_value, ranges, rates, with_values

GIVEN, SEARCH, TRIALS, BEST = "given.toml", "search.json", "trials.db", "best.toml"
CUT_OFF = "cut off"
STARTUP = 5  # trials that are never cut off, because there is nothing to hold them against


class Trial(NamedTuple):
    """One setting: what was tried, its last validation metric, and how its run ended."""

    number: int
    values: dict[str, float]
    value: float | None  # the mean over the cuts; None if a run did not come to its end
    outcome: str


class Found(NamedTuple):
    """What a search has come to."""

    trials: list[Trial]
    best: Trial | None = None  # None if no run came to its end
    gain: Difference | None = None  # of the best over the settings given; above 0 is better
    broken: Trial | None = None  # the one of the two that broke down, if there is no gain for it

    @property
    def chosen(self) -> Trial | None:
        """The better of the best trial and of the settings given, as far as was seen."""
        if self.broken is not None:
            return self.best if self.broken.number == 0 else self.trials[0]
        if self.gain is not None and self.gain.mean <= 0:
            return self.trials[0]
        return self.best


class Search:
    """A search for better values of some options of an experiment.

    cuts: in how many ways training and validation rows are cut to judge a trial, the data's own
    being the first. repeats: of the best trial and the settings given, at the end.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        searched: Sequence[str] = (),
        trials: int = 30,
        repeats: int = 5,
        cuts: int = 1,
    ):
        _optuna()  # before anything is written
        for name, number in {"trials": trials, "repeats": repeats, "cuts": cuts}.items():
            if number < (least := 1 if name == "cuts" else 2):
                raise ValueError(f"{name} is {number}; give at least {least}")
        self.folder, self.experiment = folder, experiment
        self.searched, self.trials, self.repeats, self.cuts = searched, trials, repeats, cuts
        self.space = ranges(searched, experiment) if searched else rates(experiment)
        self.given = {one.key: given_value(experiment, one.key) for one in self.space}
        problem = CHOICES["problem"][experiment.problem.name]
        self.metric: str = problem.monitor
        self.larger: bool = problem.larger_is_better
        seed = experiment.run.seed
        self.found: Read = without_test(read(experiment), seed)
        again = (cut_again(self.found, key(seed, "cut", number)) for number in range(1, cuts))
        self.judges = [self.found, *again]

    @staticmethod
    def resumed(folder: Path, trials: int | None = None, repeats: int | None = None) -> Search:
        """The search in a folder; it may be made longer."""
        if not (folder / SEARCH).exists():
            raise CheckpointError(f"there is no {SEARCH} in {folder}: it holds no search to resume")
        about = RunFolder(folder).read_json(SEARCH)
        given = tomllib.loads(RunFolder(folder).read_toml_text(GIVEN))
        experiment = Experiment.from_table(given)
        lengths = (trials or about["trials"], repeats or about["repeats"], about["cuts"])
        search = Search(folder, experiment, about["searched"], *lengths)
        search._write()
        return search

    def create(self) -> None:
        if (self.folder / SEARCH).exists() or (self.folder / TRIALS).exists():
            raise FileExistsError(
                f"{self.folder} already holds a search: resume it, or give another folder "
                f"(fedminimax tune --resume {self.folder})"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        RunFolder(self.folder).write_text(GIVEN, write_toml(settled(self.experiment)))
        self._write()

    def _write(self) -> None:
        lengths = {"trials": self.trials, "repeats": self.repeats, "cuts": self.cuts}
        RunFolder(self.folder).write_json(SEARCH, {"searched": list(self.searched), **lengths})

    def _withdraw(self) -> None:
        """Settings that no run can begin with leave nothing behind."""
        for name in (GIVEN, SEARCH, TRIALS):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # there is more in it
            self.folder.rmdir()

    def run(self, on_trial: Callable[[Trial], None] = lambda trial: None) -> Found:
        """All trials that are missing, then the repeats of the best."""
        with self._study() as study:
            while len(done := _finished(study)) < self.trials:
                self._try(study, len(done))
                on_trial(self._as_trial(len(done), _finished(study)[-1]))
            trials = [self._as_trial(number, one) for number, one in enumerate(_finished(study))]
            ended = [(trial.value, trial) for trial in trials if trial.value is not None]
            if not ended:
                return Found(trials)
            _, best = (max if self.larger else min)(ended, key=lambda pair: pair[0])
            if best.number == 0 or trials[0].value is None:
                return Found(trials, best, broken=None if best.number == 0 else trials[0])
            return Found(trials, best, *self._confirm(study, trials[0], best))

    def settings(self, trial: Trial) -> Experiment:
        return with_values(self.experiment, trial.values)

    def write_best(self, trial: Trial, about: str) -> Path:
        """The settings of a trial as a file for `fedminimax run`."""
        path = self.folder / BEST
        comment = "".join(f"# {line}\n" for line in about.splitlines())
        write_bytes(path, (comment + write_toml(settled(self.settings(trial)))).encode())
        return path

    def at_the_edge(self, trial: Trial) -> list[Range]:
        """The ranges that this trial is at an end of: better values may lie beyond."""
        return [one for one in self.space if _near_an_end(one, trial.values[one.key])]

    @contextmanager
    def _study(self) -> Iterator[Any]:
        optuna = _optuna()
        from sqlalchemy.engine import URL

        # SQLite, because it forgets what a killed process had half written.
        url = URL.create("sqlite", database=str(self.folder / TRIALS)).render_as_string()
        storage = optuna.storages.RDBStorage(url)
        try:
            study = optuna.create_study(
                storage=storage,
                study_name="trials",
                direction="maximize" if self.larger else "minimize",
                pruner=optuna.pruners.MedianPruner(STARTUP, self.experiment.run.rounds // 4),
                load_if_exists=True,
            )
            for left in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
                study.tell(left.number, state=optuna.trial.TrialState.FAIL)  # its process is gone
            yield study
        finally:
            storage.engine.dispose()

    def _try(self, study: Any, number: int) -> None:
        """Trial `number`; only of the settings given is a mistake an error."""
        optuna, state = _optuna(), _optuna().trial.TrialState
        seed = key(self.experiment.run.seed, "tune", number)
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        if number:
            trial = study.ask(_distributions(self.space))
        elif all(self.given[one.key] in one for one in self.space):
            if not study.get_trials(states=(state.WAITING,)):  # killed right here
                study.enqueue_trial(self.given)
            trial = study.ask(_distributions(self.space))
        else:
            trial = study.ask()  # outside of the ranges, Optuna learns nothing from it

        def report(round: int, value: float) -> None:
            trial.report(value, round)
            if number and trial.should_prune():
                raise _CutOffError(f"{CUT_OFF} at round {round}: worse than the median before it")

        try:
            value, outcome = self._judged(trial.params, report)
        except _CutOffError as cut:
            value, outcome = None, str(cut)
        except (ValueError, ClientError) as error:
            if number == 0:
                self._withdraw()
                raise
            value, outcome = None, str(error)
        trial.set_user_attr("outcome", outcome)
        # A run that broke down tells Optuna where not to look; as failed it would be forgotten.
        study.tell(trial, value, state.PRUNED if value is None else state.COMPLETE)

    def _judged(
        self, values: dict[str, float], report: Callable[[int, float], None]
    ) -> tuple[float | None, str]:
        """The mean over the cuts; a trial may be cut off in the first."""
        found: list[float] = []
        outcome = FINISHED
        for rows in self.judges:
            first = rows is self.found
            value, outcome = self._trained(values, rows, report=report if first else None)
            if value is None:
                return None, outcome
            found.append(value)
        return statistics.fmean(found), outcome

    def _trained(
        self,
        values: dict[str, float],
        found: Read,
        seed: int | None = None,
        report: Callable[[int, float], None] | None = None,
    ) -> tuple[float | None, str]:
        """The last validation metric of a run, if it came to its end, and how it ended."""
        experiment = with_values(self.experiment, values)
        if seed is not None:
            settings = dataclasses.replace(experiment.run, seed=seed)
            experiment = dataclasses.replace(experiment, run=settings)
        seen: list[float | None] = []

        def on_record(record: dict[str, Any]) -> None:
            value = record["validation"].get(self.metric)
            seen.append(value if value is not None and math.isfinite(value) else None)
            if seen[-1] is not None and report is not None:
                report(record["round"], seen[-1])

        built = assemble(experiment, found, experiment.make("method"))
        run = run_experiment(experiment, built=built, on_record=on_record)
        if not succeeded(run.outcome):
            return None, run.outcome
        if seen[-1] is None and any(value is not None for value in seen):
            return None, f"validation {self.metric} is no finite number at the end: lower the rates"
        if seen[-1] is None:
            raise ValueError(
                f"the validation rows have no {self.metric} (one class only?), so there is nothing "
                "to judge a trial by: give others"
            )
        return seen[-1], run.outcome

    def _confirm(
        self, study: Any, given: Trial, best: Trial
    ) -> tuple[Difference | None, Trial | None]:
        """The best against the settings given, on other seeds and other cuts of the rows: the best
        of many is flattered by the rows that chose it. Instead, the first that breaks down."""
        values: dict[int, list[float]] = {best.number: [], 0: []}
        used = self.experiment.run.seed
        for seed in range(used + 1, used + 1 + self.repeats):
            for trial in (best, given):
                value, outcome = self._repeated(study, trial, seed)
                if value is None:
                    return None, trial._replace(value=None, outcome=f"{outcome} (seed {seed})")
                values[trial.number].append(value if self.larger else -value)
        return paired_difference(values[best.number], values[0]), None

    def _repeated(self, study: Any, trial: Trial, seed: int) -> tuple[float | None, str]:
        """A trial's settings with another seed, which also cuts the rows."""
        name = f"trial {trial.number}, seed {seed}"
        if name not in study.user_attrs:
            tried = trial.values if trial.number else {}
            try:
                ended = self._trained(tried, cut_again(self.found, seed), seed)
            except (ValueError, ClientError) as error:
                ended = None, str(error)
            study.set_user_attr(name, ended)
        value, outcome = study.user_attrs[name]
        return value, outcome

    def _as_trial(self, number: int, kept: Any) -> Trial:
        # Of a run that was cut short, Optuna takes the last report for its value.
        value = kept.value if kept.state.name == "COMPLETE" else None
        return Trial(number, kept.params or self.given, value, kept.user_attrs["outcome"])


class _CutOffError(Exception):
    """A trial that is worse than the others were."""


def _finished(study: Any) -> list[Any]:
    state = _optuna().trial.TrialState
    return study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))


def _distributions(space: Sequence[Range]) -> dict[str, Any]:
    kinds = _optuna().distributions
    return {
        one.key: kinds.IntDistribution(int(one.low), int(one.high), log=one.log)
        if one.whole
        else kinds.FloatDistribution(one.low, one.high, log=one.log)
        for one in space
    }


def _near_an_end(one: Range, value: float) -> bool:
    """Within a twentieth of the range."""
    low, high, place = (math.log(v) if one.log else v for v in (one.low, one.high, value))
    return not 0.05 <= (place - low) / (high - low) <= 0.95


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError("tune needs Optuna: install fedminimax[tune]") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
