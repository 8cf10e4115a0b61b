"""Base class of binary classification problems: one score per row, judged by how it ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedminimax.metrics.federated_auc import answer as histogram_answer
from fedminimax.metrics.federated_auc import federated_auc
from fedminimax.metrics.ranking import auc, auc_interval, auprc, worst_site
from fedminimax.problems.network import Parameters
from fedminimax.problems.network_problem import NetworkProblem
from fedminimax.problems.questions import counts
from fedminimax.types import AnswerCheck, Batch, Measures, Point, Query, Vectors


class BinaryProblem(NetworkProblem):
    """A problem whose network gives one score per row; a label above 0 is positive.

    Arguments:
        module: the network, with one output per row.
        least_per_bin: the smallest count above 0 that a client reports in its score histogram.
    """

    monitor = "auc"
    larger_is_better = True
    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        "histogram": counts,
        "ranking": lambda reply, rows: _wrong_ranking(reply[0], rows),
        "supported": lambda reply, rows: _wrong_marks(reply[0]),
    }

    def __init__(self, module: nn.Module, least_per_bin: int = 0):
        if least_per_bin < 0:
            raise ValueError(f"least_per_bin is {least_per_bin}; give 0 or more rows")
        super().__init__(module)
        self.least_per_bin = least_per_bin
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
        """One number per row, before any sigmoid, with batch normalisation by this batch."""
        return _one_per_row(self.network(x, batch.features, batch))

    def check_labels(self, batch: Batch) -> None:
        """Refuses labels other than 0 and 1, or -1 and 1."""
        found = torch.unique(batch.labels).tolist()
        if not (set(found) <= {0, 1} or set(found) <= {-1, 1}):
            raise ValueError(
                f"the labels hold {found[:5]}; a binary problem has 0 and 1 (or -1 and 1): recode "
                "them"
            )

    def ranking_scores(self, x: Tensor, moments: Tensor | None, features: Tensor) -> Tensor:
        """The scores of rows in evaluation mode, with the given batch-norm moments."""
        return _one_per_row(self.network.outputs(self.network_weights(x), features, moments))

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question not in ("scores", "ranking", "supported", "histogram"):
            return super().answer(question, vectors, batch)
        x, *rest = vectors
        moments = rest.pop(0) if self.network.has_norms else None
        scores = self._scores_once(x, moments, batch.features)
        if question == "scores":
            return scores, batch.labels
        self.check_labels(batch)
        rank, labels = scores.cpu().double().numpy(), (batch.labels > 0).cpu().numpy()
        if question == "ranking":
            own = auc(rank, labels)
            found = [-1.0 if own is None else own, (~labels).sum(), labels.sum()]
            return (torch.tensor(found, dtype=torch.float64),)
        arrays = (v.cpu().numpy() for v in rest)
        counts = histogram_answer(question, rank, labels, *arrays, least=self.least_per_bin)
        return (torch.from_numpy(counts),)

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

        Where rows can be seen, AUC and AUPRC are exact, and the AUC has a confidence interval.
        """
        at = (point.x,) if moments is None else (point.x, moments)

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
