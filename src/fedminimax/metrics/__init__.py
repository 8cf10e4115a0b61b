"""Measures of a run: ranking (exact and federated AUC), calibration, optimality."""
