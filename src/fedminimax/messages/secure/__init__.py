"""Sums that nobody can take apart: fixed point, masks that cancel, and the keys of the masks."""
