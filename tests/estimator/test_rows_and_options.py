"""What the estimator takes: texts, categories, sparse rows, and options within an argument."""

from typing import Any

import numpy as np
import pandas
import pytest
import sklearn.base
import sklearn.model_selection
from scipy.sparse import csr_matrix

import fedminimax as fm
from fedminimax import FederatedClassifier

QUICK: dict[str, Any] = {
    "objective": "auc",
    "rounds": 6,
    "module": "linear",
    "executor": "vectorised",
}
GridSearchCV: Any = sklearn.model_selection.GridSearchCV
clone: Any = sklearn.base.clone


def patients(rows=150):
    """Rows of which only the text `ward` tells the label."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, rows)
    ward = np.where(y == 1, "north", random.choice(["south", "west"], rows))
    frame = pandas.DataFrame(
        {
            "age": random.normal(50, 10, rows),
            "ward": ward,
            "sex": pandas.Categorical(random.choice(["f", "m"], rows)),
        }
    )
    return frame, y, np.resize(["leeds", "york", "hull"], rows)


def test_texts_and_categories_of_a_data_frame_are_features(tmp_path):
    X, y, sites = patients()
    model = FederatedClassifier(**QUICK, lr=0.5).fit(X, y, sites=sites)
    assert model.feature_names_in_.tolist() == ["age", "ward", "sex"]
    assert model.score(X, y) > 0.99
    by_hand = pandas.get_dummies(X, dtype=float)
    alike = FederatedClassifier(**QUICK, lr=0.5, bins=0).fit(by_hand, y, sites=sites)
    usual = FederatedClassifier(**QUICK, lr=0.5, bins=0).fit(X, y, sites=sites)
    np.testing.assert_allclose(
        usual.decision_function(X), alike.decision_function(by_hand), atol=1e-5
    )
    model.save(tmp_path / "model")
    again = FederatedClassifier.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    unseen = X.assign(ward="east")
    assert np.isfinite(again.predict_proba(unseen)).all()


def test_texts_that_lack_or_are_gone_are_refused_with_a_sentence():
    X, y, sites = patients()
    model = FederatedClassifier(**QUICK)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        model.fit(X.assign(ward=X.ward.mask(X.index == 3)), y, sites=sites)
    lenient = FederatedClassifier(**QUICK, missing="mean")
    lenient.fit(X.assign(ward=X.ward.mask(X.index == 3)), y, sites=sites)
    model.fit(X, y, sites=sites)
    with pytest.raises(ValueError, match="The feature names should match"):
        model.predict(X.drop(columns="sex"))
    with (
        pytest.warns(UserWarning, match="does not have valid feature names"),
        pytest.raises(ValueError, match="text columns 'ward', 'sex': give one with the same"),
    ):
        model.predict(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="holds 'old', but a number is needed"):
        model.predict(X.assign(age="old"))


def test_sparse_rows_are_those_that_they_stand_for():
    _, y, sites = patients()
    rows = (np.random.default_rng(1).random((len(y), 3)) < 0.3) * (1.0 + y[:, None])
    dense = FederatedClassifier(**QUICK).fit(rows, y, sites=sites)
    sparse = FederatedClassifier(**QUICK).fit(csr_matrix(rows), y, sites=sites)
    np.testing.assert_array_equal(sparse.predict_proba(csr_matrix(rows)), dense.predict_proba(rows))


def test_options_within_an_argument():
    model = FederatedClassifier(**QUICK)
    model.set_params(method__proximal=0.01, objective__form="margin", module__activation="relu")
    assert model.method == {"name": "codasca", "lr": 0.3, "proximal": 0.01}
    assert model.objective == {"name": "auc", "form": "margin"}
    assert model.get_params()["method__proximal"] == 0.01
    assert clone(model).method == model.method
    own = FederatedClassifier("auc", method=fm.Codasca(lr=0.1))
    assert own.get_params()["method__lr"] == 0.1
    assert own.set_params(method__lr=0.2).method == fm.Codasca(lr=0.2)
    with pytest.raises(ValueError, match="method has no option 'lrr'; its options are lr, "):
        own.set_params(method__lrr=1)
    with pytest.raises(ValueError, match="Invalid parameter 'rate'"):
        own.set_params(rate=1)


def test_a_grid_of_options_within_an_argument():
    X, y, sites = patients()
    with sklearn.config_context(enable_metadata_routing=True):
        model = (
            FederatedClassifier(**QUICK).set_fit_request(sites=True).set_score_request(sites=False)
        )
        search = GridSearchCV(model, {"method__proximal": [0.0, 0.1]}, cv=2)
        search.fit(X, y, sites=sites)
    assert set(search.best_params_) == {"method__proximal"}


def test_no_sites_and_no_positives_are_said():
    X, y, sites = patients()
    with pytest.warns(UserWarning, match="no sites are given, so all rows are of one"):
        FederatedClassifier(**QUICK).fit(X, y)
    model = FederatedClassifier(**QUICK, threshold=0.999).fit(X, y, sites=sites)
    with pytest.warns(UserWarning, match=r"none of the 150 rows counts as 1.*operate_at"):
        assert not model.predict(X).any()
    model.predict(X[y == 0][:3])  # too few to expect any among
