"""A class has one name: in Python, in files, on the command line and in the estimator."""

import pytest

import fedminimax as fm
from fedminimax.algorithms import METHODS
from fedminimax.blocks.schedules import SCHEDULES
from fedminimax.estimator import OBJECTIVES
from fedminimax.messages import REDUCERS, STAGES
from fedminimax.models import MODELS
from fedminimax.problems import PROBLEMS

TABLES = {
    "methods": METHODS,
    "problems": PROBLEMS,
    "models": MODELS,
    "schedules": SCHEDULES,
    "stages": STAGES,
    "reducers": REDUCERS,
}
PUBLIC = """
    AUC Algorithm Batch Clients Codasca Composition FederatedClassifier Minimax Point Problem Run
    extend load messages methods models problems resume schedules sets simplex simulate
"""


@pytest.mark.parametrize("table", TABLES)
def test_the_name_in_a_file_is_the_class_name_in_lower_case(table):
    """An underscore may stand between its words; nothing else is added or left out."""
    for name, kind in TABLES[table].items():
        assert name == name.lower()
        assert name.replace("_", "") == kind.__name__.lower()


def test_objectives_of_the_estimator_are_problems():
    for name, objective in OBJECTIVES.items():
        assert name == objective.problem
        assert {name, objective.several or name} <= PROBLEMS.keys()


def test_the_public_names_are_those_that_the_stub_lists():
    assert sorted(fm.__all__) == sorted(PUBLIC.split())


@pytest.mark.parametrize("table", ["methods", "problems", "models", "schedules"])
def test_a_namespace_has_every_class_that_a_file_can_name(table):
    for kind in TABLES[table].values():
        assert getattr(getattr(fm, table), kind.__name__) is kind
