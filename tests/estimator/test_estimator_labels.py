"""The estimator with several labels, and with several classes that are ranked."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from fedminimax import FederatedClassifier

NAMES = ["cough", "fever", "rash"]
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((240, 4))
MARKS = (X[:, :3] + 0.7 * RANDOM.standard_normal((240, 3)) > 0).astype(float)
CLASSES = np.array(["low", "middle", "high"])[X[:, :3].argmax(axis=1)]
SITES = np.repeat(["leeds", "york", "hull"], 80)


def known(y: np.ndarray = MARKS) -> np.ndarray:
    """One site does not know the second label."""
    y = y.copy()
    y[:80, 1] = np.nan
    return y


def classifier(objective: str = "auc", **options) -> FederatedClassifier:
    return FederatedClassifier(objective, module="linear", rounds=15, **options)


def test_several_labels_are_trained_judged_and_saved(tmp_path):
    model = classifier().fit(X, pd.DataFrame(known(), columns=NAMES), sites=SITES)
    assert model.classes_.tolist() == NAMES
    chances = model.predict_proba(X)
    assert chances.shape == (240, 3)
    there = ~np.isnan(known())
    each = [roc_auc_score(MARKS[t, k], chances[t, k]) for k, t in enumerate(there.T)]
    assert model.score(X, known()) == pytest.approx(np.mean(each))
    assert min(each) > 0.75
    # The threshold is that of a calibrated probability of a half.
    np.testing.assert_array_equal(model.predict(X), chances > 0.5)
    model.save(tmp_path)
    again = FederatedClassifier.load(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(X), chances)
    again.operate_at({"sensitivity": 0.9})
    assert all(point["sensitivity"] >= 0.9 for point in again.operating_point_)
    assert again.predict(X).sum() > model.predict(X).sum()


def test_cross_entropy_of_several_labels_counts_what_is_right_among_the_known():
    model = classifier("cross_entropy").fit(X, known(), sites=SITES)
    there = ~np.isnan(known())
    right = (model.predict(X) == MARKS)[there].mean()
    assert model.score(X, known()) == pytest.approx(right)
    assert right > 0.7


def test_auc_ranks_each_class_against_the_others():
    model = classifier().fit(X, CLASSES, sites=SITES)
    chances = model.predict_proba(X)
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    assert (model.predict(X) == CLASSES).mean() > 0.8
    scores = model.decision_function(X)
    wanted = [
        roc_auc_score(name == CLASSES, s) for name, s in zip(model.classes_, scores.T, strict=True)
    ]
    assert model.score(X, CLASSES) == pytest.approx(np.mean(wanted))


@pytest.mark.parametrize(
    ("y", "options", "sentence"),
    [
        (2 * MARKS, {}, "label '0' of y holds 2.0"),
        (MARKS * [1, 0, 1], {}, "label '1' of y has rows of 1 classes"),
        (np.where(MARKS > 0, "yes", "no"), {}, "not all numbers"),
        (MARKS, {"objective": "fair"}, "y has 3 labels, but objective 'fair' has one"),
        (MARKS, {"pos_label": 1}, "pos_label is for two"),
        (MARKS[:10], {}, "inconsistent numbers of samples"),
    ],
)
def test_labels_that_cannot_be_are_refused(y, options, sentence):
    model = classifier(**options)
    with pytest.raises(ValueError, match=sentence):
        model.fit(X, y, sites=SITES)
