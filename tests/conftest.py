"""fedminimax before torch: threads of one operation then do not keep each other off where several
tests share the cores (engine/waiting.py)."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedminimax  # noqa: F401
from fedminimax.remote.site_file import ALLOWED

# Processes that tests start find what the tests allow their sites to import.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_configure() -> None:
    """What a test writes need not outlast a loss of power, and waiting for the disk takes long."""
    os.fsync = lambda file: None


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage again and again takes long."""
    gc.freeze()


@pytest.fixture(autouse=True)
def only_built_in_names() -> Iterator[None]:
    """What a test's site file allows is not known to the tests after it."""
    before = {section: dict(names) for section, names in ALLOWED.items()}
    yield
    for section, names in ALLOWED.items():
        names.clear()
        names.update(before[section])
