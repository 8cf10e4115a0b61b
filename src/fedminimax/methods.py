"""The methods, by the names of their classes: `fm.methods.Codasca(lr=0.1)`."""

from fedminimax.algorithms import *  # noqa: F403
