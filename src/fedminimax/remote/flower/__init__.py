"""Runs on Flower (extra `flower`)."""
