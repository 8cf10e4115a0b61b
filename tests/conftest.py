"""fedminimax before torch: threads of one operation then do not keep each other off where several
tests share the cores (engine/waiting.py)."""

import os
from pathlib import Path

import fedminimax  # noqa: F401

# Processes that tests start find what the tests allow their sites to import.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
