"""Base class of problems that rank rows: a score per row and label."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.metrics.federated_auc import answer as histogram_answer
from fedminimax.metrics.federated_auc import federated_auc
from fedminimax.metrics.ranking import auc, auc_interval, auprc, worst_site
from fedminimax.problems.classifier import one_hot
from fedminimax.problems.labels import label_measures
from fedminimax.problems.network import Parameters
from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.problems.questions import counts, shares
from fedminimax.types import AnswerCheck, Batch, Measures, Point, Query, Vectors


class BinaryProblem(NetworkProblem):
    """A problem whose network gives one score per row; a label above 0 is positive.

    With several labels the network has an output for each, and the objective is the sum of what it
    is for one. Rows then have a column per label, with 1, 0, or -1 where the label is not known, or
    a single column with the number of the row's class: each label is then a class against all
    others. A row whose label is not known adds nothing to that label's part, which is divided by
    the share of rows that know it (`prepare` asks for the shares), so that it is a mean over these.

    Arguments:
        module: the network, with one output per row and label.
        least_per_bin: the smallest count above 0 that a client reports in its score histogram.
        labels: the names of several labels, or classes; none: there is one label.
    """

    monitor = "auc"
    larger_is_better = True
    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        "histogram": counts,
        "label_shares": shares,
        "ranking": lambda reply, rows: _first(_wrong_ranking(own, rows) for own in reply),
        "supported": lambda reply, rows: _first(map(_wrong_marks, reply)),
    }

    def __init__(self, module: nn.Module, least_per_bin: int = 0, labels: Sequence[str] = ()):
        if least_per_bin < 0:
            raise ValueError(f"least_per_bin is {least_per_bin}; give 0 or more rows")
        super().__init__(module)
        if len(labels) == 1 or len(set(labels)) < len(labels):
            raise ValueError(f"labels is {labels!r}; give different names of at least two, or none")
        self.least_per_bin, self.labels = least_per_bin, tuple(labels)
        self.known_shares: tuple[float, ...] = ()  # of each of several labels
        self.positive_shares: tuple[float, ...] = ()  # among the rows that know it
        self._scored: tuple[Tensor, Tensor | None, dict] | None = None

    @classmethod
    def outputs_for(cls, classes: int) -> int:
        if classes != 2:
            raise ValueError(
                f"the labels are of {classes} classes, but {cls.__name__} tells two apart: say in "
                "[data] which are positive"
            )
        return 1

    def raw_scores(self, x: Tensor | Parameters, batch: Batch) -> Tensor:
        """One number per row and label, before any sigmoid, with batch normalisation by this
        batch."""
        return self._per_label(self.network(x, batch.features, batch))

    def _per_label(self, outputs: Tensor) -> Tensor:
        if not self.labels:
            return _one_per_row(outputs)
        if outputs.dim() != 2 or outputs.shape[1] != len(self.labels):
            raise ValueError(
                f"the module returns {tuple(outputs.shape[1:])} numbers per row, but there are "
                f"{len(self.labels)} labels: end it with Linear(..., {len(self.labels)})"
            )
        return outputs

    def marks(self, batch: Batch) -> Tensor:
        """For each row and each of several labels 1, 0, or -1 where it is not known."""
        if batch.labels.dim() == 1:
            return one_hot(batch.labels, len(self.labels), batch.weight.dtype)
        return batch.labels

    def sides(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What each positive, and each negative, counts; with several labels there is a column for
        each, and a row that knows it counts the inverse of the share of such rows."""
        if not self.labels:
            positive = (batch.labels > 0).to(dtype)
            return positive, 1 - positive
        if not self.known_shares:
            raise ValueError("the shares of the labels are not known yet: call prepare first")
        marks = self.marks(batch)
        each = 1 / torch.tensor(self.known_shares, dtype=dtype, device=marks.device)
        return (marks > 0).to(dtype) * each, (marks == 0).to(dtype) * each

    def cross_entropy(self, x: Tensor, batch: Batch) -> Tensor:
        """The mean cross-entropy of the network's outputs as logits; of several labels the sum."""
        logits = self.raw_scores(x, batch)
        if not self.labels:
            target = (batch.labels > 0).to(logits.dtype)
            return batch.mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none"))
        positive, negative = self.sides(batch, logits.dtype)
        losses = positive * F.softplus(-logits) + negative * F.softplus(logits)
        return batch.mean(losses).sum()

    def prepare(self, ask: Query) -> Self:
        """With several labels, the problem with the shares of rows that know each, and of
        positives among them."""
        if not self.labels:
            return self
        if ask.sampled_positive_share is not None:
            raise ValueError(
                f'sampling "balanced" knows one label, but there are {len(self.labels)}: use '
                'sampling "epoch"'
            )
        known, positive = ask.mean("label_shares")
        for name, there, share in zip(
            self.labels, known.tolist(), (positive / known).tolist(), strict=True
        ):
            if not there > 0:
                raise ValueError(
                    f"no client has training rows that know the label {name!r}: leave it out"
                )
            if not 0 < share < 1:
                one = "negative" if share <= 0 else "positive"
                raise ValueError(
                    f"all training rows that know the label {name!r} are {one}: ranking needs both "
                    "classes; leave the label out"
                )
        prepared = copy.copy(self)
        prepared.known_shares = tuple(known.tolist())
        prepared.positive_shares = tuple((positive / known).tolist())
        return prepared

    def check_labels(self, batch: Batch) -> None:
        """Refuses labels other than 0 and 1, or -1 and 1; of several, others than 1, 0 and -1, or
        than the numbers of classes."""
        found = torch.unique(batch.labels).tolist()
        if self.labels:
            self._check_several(found, batch.labels)
            return
        if batch.labels.dim() > 1:
            raise ValueError(
                f"rows have {tuple(batch.labels.shape[1:])} labels; name them, with labels = ..., "
                "or give one column"
            )
        if not (set(found) <= {0, 1} or set(found) <= {-1, 1}):
            raise ValueError(
                f"the labels hold {found[:5]}; a binary problem has 0 and 1 (or -1 and 1): recode "
                "them"
            )

    def _check_several(self, found: list[float], given: Tensor) -> None:
        count = len(self.labels)
        if given.dim() == 1:
            if not set(found) <= set(range(count)):
                raise ValueError(
                    f"the classes hold {found[: count + 5]}; {count} were promised, numbered 0 .. "
                    f"{count - 1}: number them so, or name as many as there are"
                )
        elif given.shape[1:] != (count,):
            raise ValueError(
                f"rows have {tuple(given.shape[1:])} labels, but {count} were named: give a "
                "column for each"
            )
        elif not set(found) <= {-1, 0, 1}:
            raise ValueError(
                f"the labels hold {found[:5]}; several labels are 1, 0, or -1 where one is not "
                "known: recode them"
            )

    def ranking_scores(self, x: Tensor, moments: Tensor | None, features: Tensor) -> Tensor:
        """The scores of rows in evaluation mode, with the given batch-norm moments."""
        return self._per_label(self.network.outputs(self.network_weights(x), features, moments))

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "label_shares":
            self.check_labels(batch)
            marks, dtype = self.marks(batch), batch.weight.dtype
            return batch.mean((marks >= 0).to(dtype)), batch.mean((marks > 0).to(dtype))
        if question not in ("scores", "ranking", "supported", "histogram"):
            return super().answer(question, vectors, batch)
        x, *rest = vectors
        moments = rest.pop(0) if self.network.has_norms else None
        scores = self._scores_once(x, moments, batch.features)
        if question == "scores":
            return scores, self.marks(batch) if self.labels else batch.labels
        self.check_labels(batch)
        rank, arrays = scores.cpu().double().numpy(), [v.cpu().numpy() for v in rest]
        if not self.labels:
            return (self._told(question, rank, (batch.labels > 0).cpu().numpy(), arrays),)
        marks, each = self.marks(batch).cpu().numpy(), len(arrays) // len(self.labels)
        return tuple(
            self._told(
                question,
                rank[marks[:, label] >= 0, label],
                marks[marks[:, label] >= 0, label] > 0,
                arrays[label * each : (label + 1) * each],
            )
            for label in range(len(self.labels))
        )

    def _told(
        self, question: str, rank: np.ndarray, labels: np.ndarray, arrays: list[np.ndarray]
    ) -> Tensor:
        """The answer about one label."""
        if question == "ranking":
            own = auc(rank, labels) if len(rank) else None
            found = [-1.0 if own is None else own, (~labels).sum(), labels.sum()]
            return torch.tensor(found, dtype=torch.float64)
        counts = histogram_answer(question, rank, labels, *arrays, least=self.least_per_bin)
        return torch.from_numpy(counts)

    def _scores_once(self, x: Tensor, moments: Tensor | None, features: Tensor) -> Tensor:
        # An evaluation asks several questions about the same scores.
        if self._scored is None or self._scored[0] is not x or self._scored[1] is not moments:
            self._scored = (x, moments, {})
        found, rows = self._scored[2], (features.data_ptr(), features.shape)
        if rows not in found:
            # The rows stay alive with their scores, so no others can take their address.
            found[rows] = (features, self.ranking_scores(x, moments, features))
        return found[rows][1]

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        """The loss, the federated AUC and AUPRC with their error bounds, and, where sites tell
        theirs, the AUC of each site, and the worst.

        Where rows can be seen, AUC and AUPRC are exact, and the AUC has a confidence interval. For
        several labels see `label_measures`.
        """
        at = (point.x,) if moments is None else (point.x, moments)
        if self.labels:
            own = label_measures(self.labels, at, ask, self.least_per_bin)
            return super().evaluate(point, ask, moments) | own

        def summed(question: str, *arrays: np.ndarray) -> np.ndarray:
            return ask.sum(question, *at, *map(torch.from_numpy, arrays))[0].cpu().numpy()

        federated = federated_auc(summed, least=self.least_per_bin)
        found = super().evaluate(point, ask, moments) | {
            "auc": federated.auc,
            "auc_federated": federated.auc,
            "auc_bound": federated.bound,
            "auprc": federated.auprc,
            "auprc_federated": federated.auprc,
            "auprc_bound": federated.auprc_bound,
        }
        if ask.sees_rows:
            found |= _pooled_measures(ask.each("scores", *at), ask.weights)
        if not ask.tells_each:
            return found
        own = {n: r[0].tolist() for n, r in zip(ask.names, ask.each("ranking", *at), strict=True)}
        sites = {name: (r[0] if r[0] >= 0 else None) for name, r in own.items()}
        counts = {n: (int(r[1]), int(r[2])) for n, r in own.items()}
        worst = worst_site(sites, counts)
        return found | {
            "negatives": sum(count[0] for count in counts.values()),
            "positives": sum(count[1] for count in counts.values()),
            "sites": sites,
            "worst_site": worst.site,
            "worst_site_auc": worst.auc,
            "sites_too_small": list(worst.left_out),
            "one_class_sites": [name for name, value in sites.items() if value is None],
        }


def _first(found: Iterable[str | None]) -> str | None:
    return next(filter(None, found), None)


def _wrong_ranking(reply: Tensor, rows: int) -> str | None:
    own = float(reply[0])
    if own != -1 and not 0 <= own <= 1:
        return f"its AUC is {own:g}"
    return counts((reply[1:],), rows)


def _wrong_marks(reply: Tensor) -> str | None:
    """Checks a reply to "supported": a mark per edge, a 1 for the client itself, and two marks for
    the classes that it withholds."""
    if bool(((reply != 0) & (reply != 1)).any()) or reply[-3] != 1:
        return f"its marks are from {float(reply.min()):g} to {float(reply.max()):g}"
    return None


def _one_per_row(outputs: Tensor) -> Tensor:
    if outputs.dim() > 1 and outputs.shape[1:].numel() != 1:
        raise ValueError(
            f"the module returns {tuple(outputs.shape[1:])} numbers per row; a binary score is "
            "one: end it with Linear(..., 1)"
        )
    return outputs.reshape(-1)


def _pooled_measures(replies: list[Vectors], weights: Tensor) -> Measures:
    """Exact measures over all rows; in `auc_weighted` clients have the weights of the run."""
    scores = torch.cat([r[0] for r in replies]).cpu().double().numpy()
    labels = (torch.cat([r[1] for r in replies]) > 0).cpu().numpy()
    if (exact := auc(scores, labels)) is None:
        return {}
    per_row = np.concatenate(
        [np.full(len(r[0]), w / len(r[0])) for w, r in zip(weights.tolist(), replies, strict=True)]
    )
    return {
        "auc": exact,
        "auc_weighted": auc(scores, labels, per_row),
        "auprc": auprc(scores, labels),
        "auc_interval": list(auc_interval(scores, labels) or ()) or None,
    }
