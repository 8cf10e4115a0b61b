"""A classifier with scikit-learn's interface, trained across sites."""

from fedminimax.estimator.classifier import CALIBRATIONS, OBJECTIVES, FederatedClassifier, Objective

__all__ = ["CALIBRATIONS", "OBJECTIVES", "FederatedClassifier", "Objective"]
