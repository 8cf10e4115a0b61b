"""How a run begins: the sites agree on columns and scales, the problem learns what only they can
tell, and every site gets the whole of it. A site that is started again reads it from its disk."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax import __version__
from fedminimax.config import ConfigError, Experiment, Table, write_toml
from fedminimax.data import encoding
from fedminimax.data.clients import Clients
from fedminimax.data.encoding import Encoder
from fedminimax.data.prepare import inputs_table, scaled
from fedminimax.data.sites import Schema
from fedminimax.data.statistics import Standardiser, fit_sums, from_ranges
from fedminimax.experiment import SPLITS, batches, make_problem
from fedminimax.messages.secure.fixed_point import added_answers, answer_of, words_like
from fedminimax.remote.backend import SiteQuery, zero_rows
from fedminimax.remote.calls import Check, Sites
from fedminimax.remote.masking import wrong_offer
from fedminimax.remote.rows import agree, rows_in, wrong_counts, wrong_moments, wrong_outline
from fedminimax.remote.wire import Message, as_json, quoted
from fedminimax.types import Cost, Problem

TYPES = ("float64", "float32", "int64", "int32", "int16", "int8", "uint8", "bool")  # of columns


class Setup(NamedTuple):
    """All that server and sites share about a run: JSON, and the vectors that sites have told."""

    about: Table
    answers: dict[str, Tensor]

    @property
    def message(self) -> Message:
        return Message({"kind": "begin", "setup": self.about}, self.answers)


def received_experiment(table: Table, data: Table) -> Experiment:
    """The experiment that a message describes, on the reader's own data. Names that are not known
    here are refused, so nothing is imported or run because a message says so."""
    if "data" in table:
        raise ConfigError(
            "the experiment of a run between sites names no data: each site has its own"
        )
    return Experiment.from_table({**table, "data": data})


def sent_experiment(experiment: Experiment) -> Table:
    """What a site is told of an experiment: all but the data."""
    table = {name: part for name, part in experiment.to_table().items() if name != "data"}
    return tomllib.loads(write_toml(table))


def digest_of_experiment(sent: Table) -> str:
    """Of what a site is told of an experiment, by which partners agree on it."""
    return Message(sent, {}).digest()


def problem_of(experiment: Experiment, setup: Table, least: int = 0) -> Problem:
    """The problem as it is before it has learnt anything of the rows; `least` is the reader's own
    limit of rows per bin."""
    problem = make_problem(experiment, setup["supplied"])
    if hasattr(problem, "least_per_bin"):
        # Unchecked: its class has that field.
        problem.least_per_bin = max(least, setup["least_per_bin"])  # type: ignore[attr-defined]
    return problem


class RecordingQuery:
    """Questions before round 0, with a record of the answers."""

    def __init__(self, ask: SiteQuery):
        self.sees_rows, self.names, self.weights = ask.sees_rows, ask.names, ask.weights
        self.sampled_positive_share, self.tells_each = ask.sampled_positive_share, ask.tells_each
        self._ask = ask
        self.record: list[Table] = []
        self.answers: dict[str, Tensor] = {}

    def _noted(self, how: str, question: str, replies: list[tuple[Tensor, ...]]) -> None:
        place = len(self.record)
        self.record.append({"how": how, "question": question, "sizes": [len(r) for r in replies]})
        for i, reply in enumerate(replies):
            self.answers |= {f"{place}.{i}.{j}": vector for j, vector in enumerate(reply)}

    def each(self, question: str, *vectors: Tensor) -> list[tuple[Tensor, ...]]:
        found = self._ask.each(question, *vectors)
        self._noted("each", question, found)
        return found

    def mean(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        found = self._ask.mean(question, *vectors)
        self._noted("mean", question, [found])
        return found

    def sum(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        found = self._ask.sum(question, *vectors)
        self._noted("sum", question, [found])
        return found


class ReplayedQuery:
    """The same questions, answered from the record."""

    sees_rows, tells_each = False, True

    def __init__(self, setup: Setup, weights: Tensor, positive_share: float | None):
        self.names: Sequence[str] = tuple(setup.about["names"])
        self.weights = weights
        self.sampled_positive_share = positive_share
        self._setup, self._next = setup, 0

    def _answer(self, how: str, question: str) -> list[tuple[Tensor, ...]]:
        place, record = self._next, self._setup.about["record"]
        if place >= len(record) or (how, question) != (
            record[place]["how"],
            record[place]["question"],
        ):
            raise ConfigError(f"the set-up of the run has no answer to the question {question!r}")
        self._next += 1
        return [
            tuple(self._setup.answers[f"{place}.{i}.{j}"] for j in range(count))
            for i, count in enumerate(record[place]["sizes"])
        ]

    def each(self, question: str, *vectors: Tensor) -> list[tuple[Tensor, ...]]:
        return self._answer("each", question)

    def mean(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        return self._answer("mean", question)[0]

    def sum(self, question: str, *vectors: Tensor) -> tuple[Tensor, ...]:
        return self._answer("sum", question)[0]


def absent_clients(experiment: Experiment, setup: Table) -> Clients:
    """The clients of a run, as one knows them who has none of their rows."""
    # Two rows of different labels, so that any way of drawing batches takes them.
    some = (torch.zeros(2, 1), torch.tensor([0.0, 1.0]))
    made = Clients([some], **batches(experiment)).elsewhere(setup["names"], setup["sizes"])
    return made.to(getattr(torch, str(experiment.run.dtype)))


def prepared(experiment: Experiment, setup: Setup, least: int = 0) -> Problem:
    """The problem with what the sites told before round 0: the same at the server and each site."""
    clients = absent_clients(experiment, setup.about)
    problem = problem_of(experiment, setup.about, least)
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    return problem.prepare(ReplayedQuery(setup, weights, clients.sampled_positive_share))


def set_up(experiment: Experiment, sites: Sites) -> tuple[Setup, Cost]:
    """Asks the sites for all that a run needs to know before round 0, and what that cost."""

    def told(kind: str, check: Check) -> dict[str, Message]:
        message = Message({"kind": kind, "setup": about}, {})
        return sites.exchange(sites.names, message, {}, check, needed=True)

    masked = experiment.messages.masked
    about: Table = {
        # By which a site tells this run from another of the same name.
        "id": secrets.token_hex(16),
        "version": __version__,
        "experiment": sent_experiment(experiment),
        "names": list(sites.names),
    }
    outlines = told("look", _of_this_version)
    agreed = agree({name: outlines[name].about["outline"] for name in sites.names})
    least = [outlines[name].about["least_per_bin"] for name in sites.names]
    about["supplied"] = {**agreed.supplied, "sites": len(sites.names)}
    if masked:
        offers = told("keys", lambda name, reply: wrong_offer(reply.about.get("offer")))
        about["keys"] = {name: offers[name].about["offer"] for name in sites.names}
    asked = experiment.problem.options.get("least_per_bin", 0)
    about["least_per_bin"] = max([asked, *least])
    problem = problem_of(experiment, about)  # what is wrong with it is told here, not by a site
    counted = dict.fromkeys(sites.names, 0)  # values of a column, at the most
    if agreed.schema is not None:
        about["schema"] = as_json(agreed.schema.to_json())
        learn = _encoder if experiment.split.bins else _standardiser
        inputs = learn(experiment, agreed.schema, sites, about, counted)
        about |= inputs_table(inputs)
        about["supplied"]["features"] = len(inputs.outputs)
        problem = problem_of(experiment, about)
    replies = told("sizes", lambda name, reply: _wrong_sizes(reply.about, counted[name]))
    sizes = {name: reply.about for name, reply in replies.items()}
    about["columns"] = _of_all("columns", {n: sizes[n]["columns"] for n in sites.names})
    splits = _of_all("splits", {n: list(sizes[n]["sizes"]) for n in sites.names})
    about["sizes"] = {s: [sizes[n]["sizes"][s] for n in sites.names] for s in splits}
    clients = absent_clients(experiment, about)
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    check_shares(clients, weights, sites.faults.largest_share)
    batch = zero_rows(about["columns"], None).train.batch(0)
    told_with = {"setup": about}
    ask = SiteQuery(
        sites, problem, batch, clients, "train", weights, told_with, needed=True, masked=masked
    )
    recorded = RecordingQuery(ask)
    problem.prepare(recorded)
    about["record"] = as_json(recorded.record)
    return Setup(about, recorded.answers), ask.cost


def _standardiser(
    experiment: Experiment, schema: Schema, sites: Sites, about: Table, counted: dict[str, int]
) -> Standardiser:
    """From public ranges, or from two sums of moments; `counted` is told the rows that each site's
    are of."""
    if experiment.split.ranges:
        return from_ranges(schema, experiment.split.ranges)
    columns = schema.features
    form = {"moments": torch.zeros(3, len(columns), dtype=torch.float64)}

    def summed(centre: np.ndarray | None) -> np.ndarray:
        vectors = {} if centre is None else {"centre": torch.from_numpy(centre)}
        message = Message({"kind": "moments", "setup": about}, vectors)

        def wrong(moments: np.ndarray) -> str | None:
            return wrong_moments(moments, centre is not None)

        if experiment.messages.masked:
            return _masked_sum(sites, message, form, wrong)
        replies = sites.exchange(sites.names, message, form, _checked(form, wrong), needed=True)
        found = {name: reply.vectors["moments"].numpy() for name, reply in replies.items()}
        if centre is None:
            check_alike(columns, found, 10 * sites.faults.norm_bound)
        counted.update({name: int(own[0].max()) for name, own in found.items()})
        return np.sum([found[name] for name in sites.names], 0)

    return scaled(fit_sums(columns, summed), experiment.split)


def check_shares(clients: Clients, weights: Tensor, largest: float) -> None:
    """Refuses a run in which one site would have almost all the weight."""
    shares = (weights / weights.sum()).tolist()
    for name, rows, share in zip(clients.names, clients.train.sizes, shares, strict=True):
        if len(shares) > 1 and share > largest:
            raise ConfigError(
                f"site {name!r} tells of {rows} training rows and would have {share:.1%} of the "
                f"weight, more than {largest:.0%}: make sure that it has them, and raise "
                '--largest-share, or set weights = "uniform" in [run]'
            )


def check_alike(columns: Sequence[str], found: dict[str, np.ndarray], factor: float) -> None:
    """Refuses sums of a site whose values are further from 0 than `factor` times the median of the
    sites: they would decide the scale of a column for all of them."""
    counts, _, squares = np.stack(list(found.values()), axis=1)
    sizes = np.where(counts > 0, np.sqrt(squares / np.maximum(counts, 1)), np.nan)
    for column, own in zip(columns, sizes.T, strict=True):
        told = own[~np.isnan(own)]
        usual = float(np.median(told)) if len(told) > 2 else 0.0
        for name, size in zip(found, own, strict=True):
            if 0.0 < factor * usual < size:
                raise ConfigError(
                    f"site {name!r} tells of values of {size:.4g} in column {quoted(column)!r}, "
                    f"and the median of the sites is {usual:.4g}: correct its unit or its rows, or "
                    "give --norm-factor 0 to take them"
                )


def _encoder(
    experiment: Experiment, schema: Schema, sites: Sites, about: Table, counted: dict[str, int]
) -> Encoder:
    """From sums of counts; `counted` is told the rows that each site's are of."""

    def summed(edges: Sequence[np.ndarray]) -> np.ndarray:
        sizes = np.array([len(own) for own in edges])
        joined = {"edges": np.concatenate(edges), "sizes": sizes}
        vectors = {name: torch.from_numpy(vector) for name, vector in joined.items()}
        form = {"counts": torch.zeros(int(np.sum(sizes + 2)), dtype=torch.float64)}

        message = Message({"kind": "counts", "setup": about}, vectors)
        if experiment.messages.masked:
            return _masked_sum(sites, message, form, wrong_counts)
        check = _checked(form, wrong_counts)
        replies = sites.exchange(sites.names, message, form, check, needed=True)
        found = {name: reply.vectors["counts"].numpy() for name, reply in replies.items()}
        counted.update({name: rows_in(own, sizes) for name, own in found.items()})
        return np.sum([found[name] for name in sites.names], 0)

    return encoding.fit(schema, summed, experiment.split.bins, experiment.split.rare)


def _checked(form: dict[str, Tensor], wrong: Callable[[np.ndarray], str | None]) -> Check:
    (name,) = form
    return lambda site, reply: wrong(reply.vectors[name].numpy())


def _masked_sum(
    sites: Sites,
    message: Message,
    form: dict[str, Tensor],
    wrong: Callable[[np.ndarray], str | None],
) -> np.ndarray:
    """The sum of what sites tell under masks; no other number of theirs can be looked at."""
    ((name, like),) = form.items()
    replies = sites.exchange(sites.names, message, {name: words_like(like)}, needed=True)
    total = reduce(added_answers, (replies[site].vectors[name] for site in sites.names))
    found = answer_of(total, like, weighted=False).numpy()
    if reason := wrong(found):
        raise ConfigError(
            f"the sites' sums of {name} are refused: {reason.removeprefix('its ')}. A site has "
            "told wrong numbers, or masks that do not cancel"
        )
    return found


def _of_all(what: str, told: dict[str, Any]) -> Any:
    """What every site has told alike."""
    (first, one), *others = told.items()
    for name, other in others:
        if other != one:
            raise ConfigError(
                f"site {name!r} has {what} {quoted(other)}, site {first!r} has {quoted(one)}: all "
                "must have the same"
            )
    return one


def _of_this_version(name: str, reply: Message) -> str | None:
    theirs: Any = reply.about.get("version")
    if theirs != __version__:
        return f"it has fedminimax {quoted(theirs)}, the server {__version__}: install the same"
    if not _is_count(reply.about.get("least_per_bin")):
        return "it does not tell its least_per_bin"
    return wrong_outline(reply.about.get("outline"))


def _wrong_sizes(about: Table, counted: int) -> str | None:
    """`counted`: of so many training rows the site has told sums before."""
    sizes, columns = about.get("sizes"), about.get("columns")
    if not isinstance(sizes, dict) or not {"train"} <= set(sizes) <= set(SPLITS):
        return f"it does not tell its sizes, of {', '.join(SPLITS)}"
    if not all(_is_count(size) for size in sizes.values()) or not sizes["train"]:
        return f"its sizes are {quoted(sizes)}"
    if sizes["train"] < counted:
        return f"it has {sizes['train']} training rows, and told sums of {counted}"
    if not isinstance(columns, list) or not columns or not all(map(_is_column, columns)):
        return f"its columns are {quoted(columns)}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_column(value: Any) -> bool:
    """The shape of a row, and a type that rows may have."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    shape, dtype = value
    return isinstance(shape, list) and all(map(_is_count, shape)) and dtype in TYPES
