# The public names, and where each is defined. `__init__.py` imports them from here when they are
# first used; type checkers read this file alone.

from fedminimax import extend as extend
from fedminimax import messages as messages
from fedminimax import methods as methods
from fedminimax import models as models
from fedminimax import problems as problems
from fedminimax import schedules as schedules
from fedminimax import sets as sets
from fedminimax.algorithms import Codasca as Codasca
from fedminimax.blocks.projections import simplex as simplex
from fedminimax.data.clients import Clients as Clients
from fedminimax.engine.session import Run as Run
from fedminimax.engine.simulate import simulate as simulate
from fedminimax.estimator import FederatedClassifier as FederatedClassifier
from fedminimax.experiment import load as load
from fedminimax.experiment import resume as resume
from fedminimax.problems import AUC as AUC
from fedminimax.problems import Composition as Composition
from fedminimax.problems import Minimax as Minimax
from fedminimax.types import Algorithm as Algorithm
from fedminimax.types import Batch as Batch
from fedminimax.types import Point as Point
from fedminimax.types import Problem as Problem

__version__: str
__all__: list[str]
