"""Rates that change during a run: `fm.methods.FedAvg(lr=fm.schedules.StepDecay(0.1, at=(50,)))`."""

from fedminimax.blocks.schedules import Constant as Constant
from fedminimax.blocks.schedules import InverseRoot as InverseRoot
from fedminimax.blocks.schedules import Stagewise as Stagewise
from fedminimax.blocks.schedules import StepDecay as StepDecay
