"""What the author of a method, a problem, a schedule or a message stage imports.

Everything that is needed beside torch is here: the classes to inherit from, the types of their
arguments, derivatives of a problem, rates that may be schedules, and operations on messages.
"""

from fedminimax.blocks.schedules import Rate as Rate
from fedminimax.blocks.schedules import Schedule as Schedule
from fedminimax.blocks.schedules import at as at
from fedminimax.blocks.storm import storm as storm
from fedminimax.blocks.trees import tree_map as tree_map
from fedminimax.messages.stage import Messages as Messages
from fedminimax.messages.stage import Reducer as Reducer
from fedminimax.messages.stage import Stage as Stage
from fedminimax.problems.binary import BinaryProblem as BinaryProblem
from fedminimax.problems.classifier import Classifier as Classifier
from fedminimax.problems.gradients import dual_statistics as dual_statistics
from fedminimax.problems.gradients import gradients as gradients
from fedminimax.problems.gradients import inner_jacobian as inner_jacobian
from fedminimax.problems.gradients import inner_value as inner_value
from fedminimax.problems.gradients import outer_value as outer_value
from fedminimax.problems.gradients import pullback as pullback
from fedminimax.problems.gradients import slope as slope
from fedminimax.problems.gradients import value_and_pull as value_and_pull
from fedminimax.problems.network_problem import NetworkProblem as NetworkProblem
from fedminimax.problems.questions import counts as counts
from fedminimax.problems.questions import shares as shares
from fedminimax.types import Algorithm as Algorithm
from fedminimax.types import Batch as Batch
from fedminimax.types import Clock as Clock
from fedminimax.types import Draw as Draw
from fedminimax.types import Phase as Phase
from fedminimax.types import Point as Point
from fedminimax.types import Problem as Problem
from fedminimax.types import Query as Query
