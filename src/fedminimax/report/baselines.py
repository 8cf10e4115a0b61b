"""What scikit-learn makes of the same rows, at each site or pooled: yardsticks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedminimax.metrics.ranking import auc, auprc, worst_site

Rows = tuple[np.ndarray, np.ndarray]  # features and labels


def logistic_regression() -> Any:
    """With classes balanced, numbers standardised, and medians for what is missing."""
    inputs = SimpleImputer(strategy="median", keep_empty_features=True)
    model = LogisticRegression(class_weight="balanced", max_iter=2000)
    return make_pipeline(inputs, StandardScaler(), model)


def gradient_boosting() -> Any:
    """scikit-learn's histogram gradient boosting as it comes."""
    return HistGradientBoostingClassifier(random_state=0)


def pooled(make: Callable[[], Any], train: Sequence[Rows], test: dict[str, Rows]) -> dict[str, Any]:
    """The test measures of one model of all sites' rows put together."""
    return _measured(_fitted(make, train), test)


def alone(make: Callable[[], Any], train: Sequence[Rows], test: dict[str, Rows]) -> dict[str, Any]:
    """The mean over sites of the test measures, on all sites' rows, of a model of each site's own.

    A site whose rows are of one class ranks nothing: its AUC is 1/2.
    """
    found = [_measured(_fitted(make, [rows]), test) for rows in train]
    means: dict[str, Any] = {}
    for name in ("auc", "auprc", "worst_site_auc"):
        known = [each[name] for each in found if each[name] is not None]
        means[name] = float(np.mean(known)) if known else None
    return means


def _fitted(make: Callable[[], Any], parts: Sequence[Rows]) -> Any:
    features, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    if len(np.unique(labels)) < 2:
        return None
    # A column without any value tells nothing, and gradient boosting does not take it.
    features = np.where(np.isnan(features).all(axis=0), 0.0, features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return make().fit(features, labels)


def _measured(model: Any, test: dict[str, Rows]) -> dict[str, Any]:
    scores, labels = {}, {name: own for name, (_, own) in test.items()}
    for name, (features, own) in test.items():
        known = model is not None
        scores[name] = model.predict_proba(features)[:, 1] if known else np.zeros(len(own))
    every, truth = np.concatenate([*scores.values()]), np.concatenate([*labels.values()])
    own = {name: auc(scores[name], labels[name]) for name in test}
    counts = {n: (int((y == 0).sum()), int((y > 0).sum())) for n, y in labels.items()}
    return {
        "auc": auc(every, truth),
        "auprc": auprc(every, truth),
        "worst_site_auc": worst_site(own, counts).auc,
        "sites": own,
    }
