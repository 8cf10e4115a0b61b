"""Four hospitals train one classifier that ranks patients by risk: each alone, and together.

The rows are the UCI Heart Disease data, which ship with the package.
"""

import numpy as np
from sklearn.model_selection import train_test_split

from fedminimax import FederatedClassifier
from fedminimax.data.heart import Heart

hospitals = Heart(columns="flamby").sites()  # the complete rows, 13 features
X = np.concatenate([hospital.features for hospital in hospitals])
y = np.concatenate([hospital.labels for hospital in hospitals]).astype(int)
sites = np.repeat([hospital.name for hospital in hospitals], [len(h) for h in hospitals])
X, X_test, y, y_test, sites, sites_test = train_test_split(
    X, y, sites, test_size=0.3, stratify=sites, random_state=0
)


def trained(rows, **options):
    """A linear score trained to maximise the AUC. Hospitals differ much: CODASCA corrects what
    would pull them apart in the 8 steps that each takes between two exchanges."""
    model = FederatedClassifier("auc", "codasca", module="linear", lr=0.5, rounds=60, **options)
    return model.fit(X[rows], y[rows], sites=sites[rows])


print("AUC on the test rows of all four hospitals")
for hospital in hospitals:
    rows = sites == hospital.name
    alone = trained(rows, calibration="none")  # some are too small to calibrate by themselves
    auc = alone.score(X_test, y_test)
    print(f"  trained at {hospital.name:<12} alone  {auc:.3f}  ({rows.sum()} patients)")
model = trained(np.full(len(y), True))
print(f"  trained together               {model.score(X_test, y_test):.3f}  ({len(y)} patients)")
sent = model.history_[-1]
print(
    f"  sent for that: {sent['bytes_up'] / 1000:.0f} kB up, {sent['bytes_down'] / 1000:.0f} kB down"
)

# Scores only rank. From sums over the rows that it kept for this, each hospital helps to calibrate
# them, and to find the threshold at which nine sick patients in ten are found.
point = model.operate_at({"sensitivity": 0.9}).operating_point_
sick, called = y_test == 1, model.predict(X_test) == 1
print(f"Of {point['positives']} sick patients kept for it, {point['sensitivity']:.0%} are found")
print(f"Of {sick.sum()} in the test rows, {called[sick].mean():.0%}; ", end="")
print(f"of {(~sick).sum()} others, {called[~sick].mean():.0%} are called, too")
chance = model.predict_proba(X_test[:1])[0, 1]
print(f"The first test patient is ill with probability {chance:.2f}")
