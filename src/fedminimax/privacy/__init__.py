"""Differential privacy: what is promised, how it is counted, and the noise that keeps it."""
