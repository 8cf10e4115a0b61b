"""Projections onto the sets that x and y may be limited to, such as `project_y=fm.sets.simplex`."""

from fedminimax.blocks.projections import ball as ball
from fedminimax.blocks.projections import nonnegative as nonnegative
from fedminimax.blocks.projections import simplex as simplex
