"""A classifier with scikit-learn's interface, trained across sites."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from scipy import special
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import nn

from fedminimax.algorithms import METHODS
from fedminimax.algorithms._client_weights import ClientWeights
from fedminimax.config import (
    CHOICES,
    Experiment,
    Part,
    Settings,
    options_for,
    part_of,
    suggest,
)
from fedminimax.data.arrays import check_validation, on_host, reading_of, site_names
from fedminimax.data.prepare import Split, inputs_of
from fedminimax.data.sites import Column
from fedminimax.engine.session import Run
from fedminimax.engine.trainer import succeeded
from fedminimax.estimator import files
from fedminimax.estimator.files import plain_of, table_of
from fedminimax.estimator.frames import (
    dense,
    label_marks,
    label_names,
    numbers_of,
    text_columns,
)
from fedminimax.estimator.nested import NestedParameters
from fedminimax.experiment import (
    Built,
    Read,
    assemble,
    first_weights,
    outputs_for,
    read_tables,
    run_experiment,
)
from fedminimax.metrics import calibration as maps
from fedminimax.metrics.calibration import Isotonic, Platt
from fedminimax.metrics.federated_auc import LARGEST, Histogram
from fedminimax.problems.auto import AUTO
from fedminimax.problems.binary import BinaryProblem
from fedminimax.tuning.auto import run_auto
from fedminimax.types import Algorithm

Choice = str | Mapping[str, Any]

CALIBRATIONS = ("auto", "platt", "isotonic", "none")
LABELLED = np.array([0, 1])  # what each of several labels is
BINS = 16  # of a number
EXPECTED = 5  # positives among rows, of which none should not be found
_CHUNK = 4096


class Objective(NamedTuple):
    """What an objective's name stands for."""

    problem: str
    method: str  # unless another is given
    several: str | None  # the problem for more than two classes; None: two only
    measure: str  # what `score` returns
    lr: float | None = None  # of its method, for encoded rows; None: the method's own


OBJECTIVES = {
    "auto": Objective("auto", AUTO, None, "auc"),
    "auc": Objective("auc", "codasca", "auc", "auc", lr=0.3),
    "compositional_auc": Objective("compositional_auc", "local_scgdam", "compositional_auc", "auc"),
    "fair": Objective("fair", "fess_gda", "fair", "worst_class"),
    "robust": Objective("robust", "sagda", "robust", "accuracy"),
    "worst_site": Objective("worst_site", "local_sgda", "worst_site", "worst_site"),
    "cross_entropy": Objective("cross_entropy", "fedavg", "weighted_cross_entropy", "accuracy"),
}


class FederatedClassifier(ClassifierMixin, NestedParameters):
    """A classifier that sites train together, each row staying at its site.

    `fit(X, y, sites=...)` is `fedminimax run` on arrays: the same split, statistics, problem,
    method and rounds, and the same weights for the same seed, settings and executor.

    What to train:

    - objective: "auto" (the one of a few recipes of objective, method, rate and network that ranks
      best on validation rows; at most three times the gradients of one run), "auc" (ranking under
      imbalance), "compositional_auc" (the same after an inner step
      on cross-entropy), "fair" (the class that fares worst), "robust" (a shift of all inputs),
      "worst_site" (the site that fares worst) or "cross_entropy" (plain averaging). With options,
      a table as in a file: {"name": "auc", "form": "margin"}. Within
      `fedminimax.config.code_allowed()` also "my_module:MyProblem", a problem of your own with a
      network, trained by local_sgda unless a method is given.
    - method: a name of `fedminimax list methods`, a table {"name": "codasca", "proximal": 0.01},
      or an object, such as fm.Codasca(lr=0.1). None: the objective's usual one.
    - lr, dual_lr, local_steps: the method's own options of these names (lr: its `primal_lr`, where
      it has no `lr`); None: its defaults, and 0.3 for the usual method of "auc". Not with a method
      that is an object.
    - module: "mlp" (two hidden layers of 64), "linear", a table {"name": "mlp", "hidden": [32]}, a
      torch.nn.Module (its weights are where training begins; it is not changed), or a function
      (features, outputs) -> module, where features are counted as encoded.
      One output for two classes, else one per class.

    How: rounds, batch_size (None: all rows of a site), weights ("uniform" or "size"; None: by
    size), cohort (sites per round), evaluate_every, stop_early (evaluations without a
    better validation measure), keep ("best" round by validation rows, or "last"; None: the best, if
    there are validation rows), executor, dtype, and `settings`, a table with any other key of a
    file's [run]. random_state decides the split of the rows, the first weights and all draws.

    Rows: bins (numbers are encoded piecewise linearly over about so many quantile bins, learnt from
    counts that sites send as sums; 0: they stay numbers; None: 16, or 0 for a torch.nn.Module),
    standardise (of numbers without bins, with means and variances that sites send as sums; without
    it they are only centred), missing ("refuse" NaN, or put the federated "mean", and with bins
    mark the value), validation_share (of each site's rows of each class, kept for what follows).

    From scores to decisions, on the validation rows and by sums from the sites:

    - calibration: "platt", "isotonic", "none" or "auto": Platt for the two AUC objectives, whose
      scores only rank, if there are validation rows; none for the others, whose networks end in a
      logit (or one per class) that decides at 1/2 as it was trained to. The probabilities of
      "fair", "robust" and "worst_site" are then those of the reweighted or shifted rows.
    - threshold: a row counts as positive above this probability (a calibrated one seldom exceeds
      1/2 where positives are rare); or {"sensitivity": 0.9} or {"specificity": 0.9}: at least that
      rate on the validation rows, and the best other one. `operate_at` chooses another without
      training again.
    - pos_label: the class that sensitivity and threshold are about; None: the last of `classes_`.

    `score` is the measure of the objective: AUC for the two AUC objectives, the accuracy of the
    worst class for "fair", that of the worst site for "worst_site" if `sites` are given, and
    accuracy otherwise. GridSearchCV(scoring="accuracy") and the like ask for another.

    Options within an argument are set as `method__proximal=0.01`, `objective__form="margin"` or
    `module__hidden=[32]`, also in a grid of settings.

    Several labels: y may have a column for each, with 1, 0, and NaN where one is not known (a site
    may know some of them only), for "auc", "compositional_auc" and "cross_entropy". Then `predict`
    and `predict_proba` return a column per label, `score` the plain mean of the labels' AUCs (or
    the share of known labels that are predicted rightly), and classes_ has the labels' names. More
    than two classes are each ranked against all others by the two AUC objectives; the most probable
    one is predicted. calibration_, threshold_ and operating_point_ are then lists, one for each.

    After fit: search_ (what "auto" has found, with its cost; else None), model_ (the network,
    unless it is your own), classes_, n_features_in_, feature_names_in_ (of a data frame), history_
    (a record per evaluation), outcome_, rounds_, module_ (the trained module), dual_ (the
    maximising player: class or site weights, a shift, alpha), sites_, inputs_ (how rows are
    encoded), calibration_, threshold_ (the score that is the operating point) and operating_point_
    (its rates on the validation rows, and how many there are: a rate among 50 rows is known to 0.06
    or so).

    >>> random = np.random.default_rng(0)
    >>> y, sites = random.integers(0, 2, 90), np.repeat(["leeds", "york", "hull"], 30)
    >>> X = random.standard_normal((90, 2)) + 2 * y[:, None]
    >>> model = FederatedClassifier("auc", lr=0.5, module="linear").fit(X, y, sites=sites)
    >>> model.sites_, bool(model.score(X, y) > 0.9)
    (('hull', 'leeds', 'york'), True)
    """

    n_features_in_: int
    feature_names_in_: np.ndarray
    module_: Any
    operating_point_: Any
    threshold_: Any
    set_fit_request: Any
    set_score_request: Any

    def __init__(
        self,
        objective: Choice = "auto",
        method: Choice | Algorithm | None = None,
        module: Choice | nn.Module | Callable[[int, int], nn.Module] = "mlp",
        *,
        rounds: int = 150,
        lr: float | None = None,
        dual_lr: float | None = None,
        local_steps: int | None = None,
        batch_size: int | None = 64,
        weights: str | None = "size",
        cohort: int | None = None,
        evaluate_every: int = 10,
        stop_early: int | None = None,
        keep: str | None = None,
        bins: int | None = None,
        standardise: bool = True,
        missing: str = "refuse",
        validation_share: float = 0.2,
        calibration: str = "auto",
        threshold: float | Mapping[str, float] = 0.5,
        pos_label: Any = None,
        executor: str = "auto",
        dtype: str = "float32",
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.objective, self.method, self.module = objective, method, module
        self.rounds, self.lr, self.dual_lr, self.local_steps = rounds, lr, dual_lr, local_steps
        self.batch_size, self.weights, self.cohort = batch_size, weights, cohort
        self.evaluate_every, self.stop_early, self.keep = evaluate_every, stop_early, keep
        self.bins, self.standardise, self.missing = bins, standardise, missing
        self.validation_share, self.calibration = validation_share, calibration
        self.threshold, self.pos_label = threshold, pos_label
        self.executor, self.dtype, self.settings = executor, dtype, settings
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        known = _objective_of(self.objective)
        tags.classifier_tags.multi_class = known is None or known.several is not None
        tags.input_tags.allow_nan = self.missing == "mean"
        tags.input_tags.sparse = True
        return tags

    def _usual(self, name: str) -> Any:
        if name != "method" or self.method is not None:
            return super()._usual(name)
        objective = _objective_of(self.objective)
        if objective is None or objective.method is None:
            raise ValueError("method is None, so it has no options to set: name a method first")
        rate = {} if objective.lr is None else {"lr": objective.lr}
        return {"name": objective.method, **rate}

    # Training

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Trains on rows X (numpy, torch, pandas with numbers, texts and categories, or sparse,
        which is made dense) with labels y of any type; `sites` names the site of each row, and
        without it all rows are of one."""
        if sites is None:
            warnings.warn(
                "no sites are given, so all rows are of one and nothing is federated: name the "
                "site of each row in fit(X, y, sites=...)",
                stacklevel=2,
            )
        names = label_names(y := on_host(y))
        self.labels_ = names
        if names:
            features, numbers, classes = self._rows(X, reset=True), label_marks(y, names), LABELLED
            check_consistent_length(features, numbers)
        else:
            features, y = self._rows(X, y, reset=True, labelled=True)
            check_classification_targets(y)
            classes, numbers = np.unique(y, return_inverse=True)
        objective = self._objective(classes, y)
        self._check_words(classes)
        seed = self._seed()
        experiment, algorithm = self._experiment(objective, len(classes), seed)
        known = getattr(self, "feature_names_in_", None)
        columns = known if self.columns_ is None else self.columns_
        reading = reading_of(features, numbers, classes.tolist(), sites, columns, names)
        check_validation(reading.sites, float(self.validation_share), seed)
        least = experiment.problem.options.get("least_per_bin", 0)

        def read(experiment: Experiment) -> Read:
            found = read_tables(reading, experiment.split, least)
            found.supplied.update(self._own_module(experiment, found.supplied))
            return found

        self.search_ = None
        if algorithm is None:
            run, experiment, built, self.search_ = run_auto(experiment, reader=read)
        else:
            built = assemble(experiment, read(experiment), algorithm)
            run = run_experiment(experiment, built=built)
        if not succeeded(run.outcome):
            raise ValueError(f"training ended without a model: {run.outcome}")
        self.classes_, self.seed_ = np.array(names) if names else classes, seed
        self.sites_ = tuple(built.clients.names)
        self.inputs_ = inputs_of(built.about)
        model = experiment.model
        self.model_ = None if model is None else {"name": model.name, **model.options}
        self._keep(run)
        self._calibrate(built)
        return self

    def _rows(self, X: Any, y: Any = None, reset: bool = False, labelled: bool = False) -> Any:
        given: Any = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        X = dense(on_host(X))
        if reset:
            self.columns_: tuple[Column, ...] | None = text_columns(X)
        if self.columns_ is not None:
            validate_data(self, X, reset=reset, skip_check_array=True)
            X = numbers_of(X, self.columns_)
            if labelled:
                y = column_or_1d(y)
                check_consistent_length(X, y)
        elif labelled:
            X, y = validate_data(self, X, y, **given)
        else:
            X = validate_data(self, X, reset=reset, **given)
        lack = np.argwhere(np.isnan(X))
        if len(lack) and self.missing != "mean":
            row, column = lack[0]
            raise ValueError(
                f"Input X contains NaN ({len(lack)} values, the first in row {row}, column "
                f"{column}): fill them in, or set missing='mean' to put the mean of all sites' "
                "training rows in their place"
            )
        return (X, y) if labelled else X

    def _objective(self, classes: np.ndarray, y: np.ndarray) -> Objective:
        name = str(table_of(self.objective).get("name"))
        if name not in OBJECTIVES and ":" not in name:
            raise ValueError(f"objective is {name!r}; {suggest(name, OBJECTIVES)}")
        if len(classes) < 2:
            raise ValueError(
                f"y has 1 class only, {classes.tolist()[0]!r}: a classifier needs rows of two "
                "classes at least"
            )
        objective = _objective_of(self.objective)
        kind = CHOICES["problem"].get(name)
        if self.labels_ and kind and "labels" not in signature(kind).parameters:
            raise ValueError(
                f"y has {len(self.labels_)} labels, but objective {name!r} has one: use 'auc', "
                "'compositional_auc' or 'cross_entropy', or give y one column"
            )
        if len(classes) > 2 and objective.several is None:
            several = [repr(n) for n, known in OBJECTIVES.items() if known.several]
            raise ValueError(
                "Only binary classification is supported. The type of the target is "
                f"{type_of_target(y)} ({len(classes)} classes), but objective {name!r} ranks one "
                f"class above one other: make two of them, or use {', '.join(several)}"
            )
        return objective

    def _check_words(self, classes: np.ndarray) -> None:
        self._wanted(len(classes))
        self._positive_is_last(classes)
        known = {"missing": ("refuse", "mean"), "keep": (None, "last", "best")}
        for name, words in {**known, "calibration": CALIBRATIONS}.items():
            if getattr(self, name) not in words:
                given = getattr(self, name)
                raise ValueError(f"{name} is {given!r}; {suggest(str(given), words)}")
        share = self.validation_share
        if not _is_number(share) or not 0 <= share < 1:
            raise ValueError(
                f"validation_share is {share!r}; give a share of at least 0 and below 1"
            )
        auto = table_of(self.objective)["name"] == AUTO
        wanted = {
            "objective='auto'": auto,
            "keep='best'": self.keep == "best",
            f"calibration={self.calibration!r}": self.calibration in ("platt", "isotonic"),
            f"threshold={self.threshold!r}": isinstance(self.threshold, Mapping),
        }
        for name, needed in wanted.items():
            if needed and not share:
                raise ValueError(f"{name} needs validation rows: set validation_share above 0")
            if needed and len(classes) > 2 and name != "keep='best'":
                raise ValueError(
                    f"{name} is for two classes, but y has {len(classes)}: leave it out"
                )

    def _seed(self) -> int:
        state = self.random_state
        if isinstance(state, int | np.integer):
            return int(state)
        return int(check_random_state(state).randint(2**31))

    def _experiment(
        self, objective: Objective, classes: int, seed: int
    ) -> tuple[Experiment, Algorithm | None]:
        """The settings as a file would have them, and the method; None: it is to be found."""
        method, algorithm = self._algorithm(objective)
        problem = objective.problem if classes == 2 else str(objective.several)
        if problem == "worst_site" and isinstance(algorithm, ClientWeights):
            # DRFA and AFL weigh sites by themselves; what they need is each site's loss.
            average = OBJECTIVES["cross_entropy"]
            problem = average.problem if classes == 2 else str(average.several)
        options = {**table_of(self.objective), "name": problem}
        if algorithm is None and self.local_steps is not None:
            options["local_steps"] = plain_of(self.local_steps)
        own = isinstance(self.module, nn.Module) or callable(self.module)
        model = None if own else part_of("model", table_of(self.module), "module")
        share = float(self.validation_share)
        bins = self.bins
        if bins is None:
            bins = BINS if self.standardise and not isinstance(self.module, nn.Module) else 0
        rows = {"standardise": self.standardise, "bins": plain_of(bins)}
        split = Split(1 - share, share, 0.0, **rows, seed=seed)
        run = {
            "rounds": self.rounds,
            "seed": seed,
            "batch_size": self.batch_size or 0,
            "weights": self.weights,
            "cohort": self.cohort,
            "evaluate_every": self.evaluate_every,
            "stop_early": self.stop_early,
            "executor": self.executor,
            "dtype": self.dtype,
        }
        if twice := [key for key in self.settings or () if key in run]:
            raise ValueError(
                f"settings has {twice[0]!r}, which is an argument of its own: give it there "
                "(the seed is random_state)"
            )
        run = {key: plain_of(value) for key, value in {**run, **(self.settings or {})}.items()}
        settings = Settings(**options_for(Settings, run, type(self).__name__))
        part = part_of("problem", options, "objective")
        return Experiment(Part("arrays", {}), part, method, model, split, settings), algorithm

    def _algorithm(self, objective: Objective) -> tuple[Part, Algorithm | None]:
        if objective.method == AUTO:
            own = {"method": self.method, "lr": self.lr, "dual_lr": self.dual_lr}
            if given := [name for name, value in own.items() if value is not None]:
                raise ValueError(
                    f"{given[0]} is given, but objective 'auto' finds it: leave it out, or name "
                    "an objective such as 'auc'"
                )
            return Part(AUTO, {}), None
        lr = objective.lr if self.method is None and self.lr is None else self.lr
        given = {"lr": lr, "dual_lr": self.dual_lr, "local_steps": self.local_steps}
        rates = {name: plain_of(value) for name, value in given.items() if value is not None}
        if isinstance(self.method, Algorithm):
            if rates:
                raise ValueError(
                    f"{next(iter(rates))} is given beside a method that is an object: set it there"
                )
            return Part(type(self.method).__name__, {}), self.method
        table = table_of(objective.method if self.method is None else self.method)
        kind = METHODS.get(str(table.get("name")))
        if kind is not None:
            known = [field.name for field in dataclasses.fields(kind)]
            if "lr" in rates and "lr" not in known:
                rates["primal_lr"] = rates.pop("lr")
            if unknown := [name for name in rates if name not in known]:
                raise ValueError(
                    f"{unknown[0]} is given, but the method {table['name']!r} has none; its "
                    f"options are {', '.join(known)}"
                )
        part = part_of("method", {**table, **rates}, "method")
        return part, METHODS[part.name](**part.options)

    def _own_module(self, experiment: Experiment, facts: dict[str, Any]) -> dict[str, Any]:
        """The user's module, if there is one, tried on two rows."""
        if experiment.model is not None:
            return {}
        features, kind = facts["features"], CHOICES["problem"][experiment.problem.name]
        outputs, made = outputs_for(kind, facts), self.module
        what = f"{len(self.labels_)} labels" if self.labels_ else f"{facts['classes']} classes"
        if not isinstance(made, nn.Module):
            with first_weights(experiment.run.seed):
                # Unchecked: a function here, by the test above.
                made = made(features, outputs)  # type: ignore[operator]
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"module is or makes a {type(made).__name__}; give a torch.nn.Module, a function "
                "(features, outputs) -> module, or one of " + ", ".join(CHOICES["model"])
            )
        first = next(made.parameters(), torch.zeros(0))
        try:
            tried = _outputs(made, np.zeros((2, features)), first.dtype)
        except RuntimeError as error:
            raise ValueError(
                f"the module does not take rows of {features} features: {error}"
            ) from error
        if tried.shape[1] != outputs:
            raise ValueError(
                f"the module returns {tried.shape[1]} numbers per row; for {what} "
                f"and this objective it must return {outputs}: end it with Linear(..., {outputs})"
            )
        return {"module": made}

    def _keep(self, run: Run) -> None:
        best = self.keep == "best" or (self.keep is None and run.best is not None)
        if best and run.best is None:
            raise ValueError(
                "keep is 'best', but no evaluation could be judged by validation rows: use 'last'"
            )
        point = run.best.point if best and run.best is not None else run.point
        self.module_, self.dual_ = run.module(best), point.y.numpy().copy()
        self.history_, self.outcome_, self.rounds_ = run.history, run.outcome, run.rounds

    # From scores to decisions

    def _calibrate(self, built: Built) -> None:
        self.calibration_: Any = None  # a map, or of several labels a list of them
        self.validation_counts_: Any = None
        several = self._ranked()
        if "validation" in built.clients.splits and (several or len(self.classes_) == 2):
            shards, problem = built.clients.splits["validation"], built.problem
            rows = [shards.batch(k) for k in range(len(built.clients))]
            scores = [self._scores(batch.features.numpy()) for batch in rows]
            least = getattr(problem, "least_per_bin", 0)
            if not several:
                labels = [batch.labels.numpy() for batch in rows]
                held = [(own[:, 0], told) for own, told in zip(scores, labels, strict=True)]
                self.calibration_, self.validation_counts_ = self._calibrated(held, least)
            else:
                marks = [cast(BinaryProblem, problem).marks(batch).numpy() for batch in rows]
                held = [
                    [
                        (own[told[:, k] >= 0, k], told[told[:, k] >= 0, k])
                        for own, told in zip(scores, marks, strict=True)
                        if (told[:, k] >= 0).any()
                    ]
                    for k in range(len(self.classes_))
                ]
                found = [self._calibrated(each, least) for each in held]
                self.calibration_, self.validation_counts_ = map(list, zip(*found, strict=True))
        self._set_threshold()

    def _ranked(self) -> bool:
        """Is there a score for each of several labels or classes that ranks it by itself?"""
        measure = _objective_of(self.objective).measure
        return bool(self.labels_) or (len(self.classes_) > 2 and measure == "auc")

    def _calibrated(
        self, held: list[tuple[np.ndarray, np.ndarray]], least: int
    ) -> tuple[Platt | Isotonic | None, Histogram | None]:
        """A map, and the counts of each class, by each site's scores and labels."""
        if not held:
            return None, None

        def ask(question: str, *arrays: np.ndarray) -> np.ndarray:
            return np.sum([maps.answer(question, *s, *arrays, least=least) for s in held], 0)

        counts, kind = maps.federated_counts(ask, least), self.calibration
        if kind == "auto":
            measure = _objective_of(self.objective).measure
            kind = "platt" if measure == "auc" else "none"
        if self._ranked() and not counts.counts.sum(axis=1).all():
            return None, counts  # rows of one class say nothing of the map
        if kind == "platt":
            return maps.federated_platt(ask), counts
        return (maps.isotonic_from(counts) if kind == "isotonic" else None), counts

    def operate_at(self, threshold: float | Mapping[str, float]) -> Self:
        """Chooses another operating point, without training again: a probability, or
        {"sensitivity": 0.9} or {"specificity": 0.9} on the validation rows."""
        check_is_fitted(self)
        before, self.threshold = self.threshold, threshold
        try:
            self._set_threshold()
        except ValueError:
            self.threshold = before
            raise
        return self

    def _set_threshold(self) -> None:
        if self.labels_:
            known = self.calibration_ or [None] * len(self.labels_)
            counts = self.validation_counts_ or [None] * len(self.labels_)
            found = [self._point(*own) for own in zip(known, counts, strict=True)]
            self.threshold_ = [place for place, _ in found]
            self.operating_point_ = [point for _, point in found]
            return
        self._positive_is_last(self.classes_)
        if len(self.classes_) > 2:
            self._wanted(len(self.classes_))
            self.threshold_, self.operating_point_ = 0.0, None
            return
        self.threshold_, self.operating_point_ = self._point(
            self.calibration_, self.validation_counts_
        )

    def _point(
        self, known: Platt | Isotonic | None, counts: Histogram | None
    ) -> tuple[float, dict[str, float] | None]:
        """The score that is the operating point, and its rates on the validation rows."""
        last = bool(self.labels_) or self._positive_is_last(self.classes_)
        wanted, value = self._wanted(2)
        # All below is about the last class: what is sensitivity for the first is its specificity.
        other = {"sensitivity": "specificity", "specificity": "sensitivity"}
        if wanted == "probability":
            inverse = known or Platt(1.0, 0.0)
            place = inverse.score_at(value if last else 1 - value)
            point = None if counts is None else maps.at_score(counts, place)
        elif counts is None:
            raise ValueError(f"threshold={self.threshold!r} needs validation rows: fit with some")
        else:
            point = maps.operating_point(counts, wanted if last else other[wanted], value)
            place = point.score
        if point is None:
            return place, None
        rates = {name: getattr(point, name if last else other[name]) for name in other}
        upper = float(_probabilities(known, np.array([place]))[0])
        probability = upper if last else 1 - upper
        rows = cast(Histogram, counts).counts.sum(axis=1).astype(int).tolist()
        sizes = dict(zip(("negatives", "positives"), rows if last else rows[::-1], strict=True))
        return place, {**rates, "probability": probability, **sizes}

    def _wanted(self, classes: int) -> tuple[str, float]:
        given = self.threshold
        if classes > 2 and given != 0.5:
            raise ValueError(
                f"threshold is {given!r}, but y has {classes} classes, of which the most probable "
                "is predicted: leave threshold out"
            )
        table = given if isinstance(given, Mapping) else {"probability": given}
        if len(table) == 1:
            ((name, value),) = table.items()
            known = ("probability", "sensitivity", "specificity")
            if name not in known:
                raise ValueError(f"threshold is by {name!r}; {suggest(str(name), known)}")
            if _is_number(value) and 0 < value < 1:
                return name, float(value)
        raise ValueError(
            f"threshold is {given!r}; give a probability between 0 and 1, {{'sensitivity': 0.9}} "
            "or {'specificity': 0.9}"
        )

    def _positive_is_last(self, classes: np.ndarray) -> bool:
        if self.pos_label is None:
            return True
        if self.labels_ or len(classes) > 2:
            raise ValueError(
                f"pos_label is for two classes, but y has {len(classes)}: leave it out"
            )
        if self.pos_label not in classes.tolist():
            raise ValueError(
                f"pos_label is {self.pos_label!r}; give one of the classes, {classes.tolist()}"
            )
        return bool(classes[-1] == self.pos_label)

    # Use

    def decision_function(self, X: Any) -> np.ndarray:
        """Two classes: by how much the network's score is above the operating point, so that what
        is above 0 counts as `classes_[1]`. Several classes: a logit for each, that of its
        calibrated probability where each is ranked by itself. Several labels: for each by how much
        its score is above its operating point."""
        scores, place = self._scores_of(X), self.threshold_
        if self.labels_:
            return np.stack(
                [_decision(own, at) for own, at in zip(scores.T, place, strict=True)], axis=1
            )
        if scores.ndim > 1:
            return special.logit(self._each_probability(scores)) if self._ranked() else scores
        return _decision(scores, place)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, calibrated on validation rows as `calibration` says."""
        return self._probabilities(self._scores_of(X))

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row: by the operating point, or the most probable of several; of
        several labels, 1 or 0 for each by its operating point."""
        check_is_fitted(self)
        if self.labels_:
            return (self.decision_function(X) > 0).astype(np.int64)
        decision = self.decision_function(X)
        numbers = decision.argmax(1) if decision.ndim > 1 else (decision > 0).astype(np.intp)
        self._warn_of_none(numbers)
        return self.classes_[numbers]

    def _warn_of_none(self, numbers: np.ndarray) -> None:
        """Says so where the rows are many enough to hold positives, and none counts as one."""
        counts, positive = self.validation_counts_, int(self._positive_is_last(self.classes_))
        if counts is None or self._ranked() or (numbers == positive).any():
            return
        share = float(counts.counts[positive].sum() / max(counts.counts.sum(), 1))
        if share * len(numbers) >= EXPECTED:
            name = plain_of(self.classes_[positive])
            warnings.warn(
                f"none of the {len(numbers)} rows counts as {name!r}, of which {share:.1%} of the "
                "validation rows are: choose another operating point, as by "
                "operate_at({'sensitivity': 0.9})",
                stacklevel=3,
            )

    def score(self, X: Any, y: Any, sample_weight: Any = None, sites: Any = None) -> float:
        """The measure of the objective on these rows; larger is better. See the class."""
        check_is_fitted(self)
        y, weight = on_host(y), sample_weight
        measure = _objective_of(self.objective).measure
        if self.labels_:
            return self._score_labels(X, y, measure, weight)
        y = np.asarray(y)
        if self._ranked():
            marks = (y[:, None] == self.classes_[None, :]).astype(np.int64)
            return _mean_auc(self._scores_of(X), marks, weight)
        if measure == "auc":
            if len(np.unique(y)) < 2:
                raise ValueError(
                    "the rows to score are of one class only, so they have no AUC: give rows of "
                    "both, or use scoring='accuracy'"
                )
            positive = y == self.classes_[1]
            return float(roc_auc_score(positive, self._scores_of(X), sample_weight=weight))
        found = self.predict(X)
        if measure == "worst_class":
            groups = y
        elif measure == "worst_site" and sites is not None:
            groups = site_names(sites, len(y))
        else:
            return float(accuracy_score(y, found, sample_weight=weight))
        weight = np.ones(len(y)) if weight is None else np.asarray(on_host(weight), np.float64)
        parts = [groups == group for group in np.unique(groups)]
        return min(float(np.average(found[p] == y[p], weights=weight[p])) for p in parts)

    def _score_labels(self, X: Any, y: Any, measure: str, weight: Any) -> float:
        marks = label_marks(y, self.labels_)
        if measure == "auc":
            return _mean_auc(self._scores_of(X), marks, weight)
        known = marks >= 0
        each = np.ones(len(marks)) if weight is None else np.asarray(on_host(weight), np.float64)
        right = (self.predict(X) == marks)[known]
        return float(np.average(right, weights=np.broadcast_to(each[:, None], known.shape)[known]))

    def _scores_of(self, X: Any) -> np.ndarray:
        """The network's scores: a number per row, or one per row and class for several."""
        check_is_fitted(self)
        scores = self._scores(self.inputs_.transform(self._rows(X)))
        return scores if self.labels_ or len(self.classes_) > 2 else scores[:, 0]

    def _scores(self, rows: np.ndarray) -> np.ndarray:
        """The network's outputs, (rows, outputs), for encoded rows.

        In double precision, so that a row's score does not depend on the rows beside it.
        """
        return _outputs(self.module_, rows, torch.float64)

    def _each_probability(self, scores: np.ndarray) -> np.ndarray:
        """That of each label, or of each class against all others."""
        known = self.calibration_ or [None] * len(self.classes_)
        each = [_probabilities(*pair) for pair in zip(known, scores.T, strict=True)]
        return np.stack(each, axis=1).clip(1e-15, 1 - 1e-15)

    def _probabilities(self, scores: np.ndarray) -> np.ndarray:
        if self._ranked():
            found = self._each_probability(scores)
            return found if self.labels_ else found / found.sum(axis=1, keepdims=True)
        if scores.ndim > 1:
            return torch.softmax(torch.from_numpy(scores), 1).numpy()
        last = _probabilities(self.calibration_, scores)
        return np.stack([1 - last, last], axis=1)

    # Files

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the fitted model to a folder: model.safetensors and estimator.json.

        A module, a method or a random state that is an object of yours is not written: `load` asks
        for the module; the method is only needed to fit again.
        """
        check_is_fitted(self)
        files.save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | os.PathLike, module: nn.Module | None = None) -> Self:
        """The model that `save` wrote. If it was trained with a module of your own, give one of
        the same architecture; its weights are replaced in a copy."""
        return files.load(cls, Path(folder), module)


def _objective_of(choice: Choice) -> Any:
    """What an objective stands for; None of a name that is not known."""
    name = str(table_of(choice).get("name"))
    return Objective(name, "local_sgda", name, "accuracy") if ":" in name else OBJECTIVES.get(name)


def _probabilities(known: Platt | Isotonic | None, scores: np.ndarray) -> np.ndarray:
    return (known or Platt(1.0, 0.0)).probabilities(scores)


def _decision(scores: np.ndarray, place: float) -> np.ndarray:
    if abs(place) == LARGEST:  # all rows are on one side; their order stays
        return scores / (1 + np.abs(scores)) - np.copysign(2, place)
    return scores - place


def _mean_auc(scores: np.ndarray, marks: np.ndarray, weight: Any) -> float:
    """The plain mean over labels of the AUC of the rows that know each."""
    each = None if weight is None else np.asarray(on_host(weight), np.float64)
    found = []
    for own, told in zip(scores.T, marks.T, strict=True):
        known = told >= 0
        if len(np.unique(told[known])) < 2:
            raise ValueError(
                "the rows to score are of one class only for some label, so it has no AUC: give "
                "rows of both, or use scoring='accuracy'"
            )
        weights = None if each is None else each[known]
        found.append(roc_auc_score(told[known], own[known], sample_weight=weights))
    return float(np.mean(found))


def _outputs(module: nn.Module, rows: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    module = copy.deepcopy(module).to(dtype).eval()
    with torch.no_grad():
        parts = torch.from_numpy(rows).to(dtype).split(_CHUNK)
        found = torch.cat([module(part).reshape(len(part), -1) for part in parts])
    return found.double().numpy()


def _is_number(value: Any) -> bool:
    return isinstance(plain_of(value), int | float) and not isinstance(plain_of(value), bool)
