"""Pieces that two algorithms share."""
