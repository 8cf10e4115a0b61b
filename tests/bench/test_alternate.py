"""`python -m bench.alternate` compares the figures of two checkouts the right way round."""

import json
from pathlib import Path

import pytest

from bench import alternate

ROWS = ("networks.cnn.local_sgda", "overhead.vectorised")  # at least, and at most


@pytest.fixture
def checkouts(tmp_path, monkeypatch):
    """Makes two packages whose bench prints figures, the next one of a list at each call."""

    def make(old: dict[str, list[float]], new: dict[str, list[float]]) -> Path:
        for name, figures in (("old", old), ("new", new)):
            package = tmp_path / name / "src" / "fedminimax"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            (package / "figures.json").write_text(json.dumps(figures))
            (package / "__main__.py").write_text(PRINTS)
        monkeypatch.setattr(alternate, "NEW", tmp_path / "new")
        return tmp_path / "old"

    return make


PRINTS = """
import json, pathlib, sys
row = sys.argv[sys.argv.index("--only") + 1]
file = pathlib.Path(__file__).with_name("figures.json")
left = json.loads(file.read_text())
if row not in left:
    sys.exit(f"there is no row {row}")
median = left[row].pop(0)
file.write_text(json.dumps(left))
print(json.dumps({"rows": [{"figure": {"median": median, "low": 0, "high": 0}}]}))
"""


def test_a_row_is_slower_if_every_turn_says_so(checkouts, capsys):
    old = checkouts(
        {ROWS[0]: [2.0, 2.0, 2.0], ROWS[1]: [1.0, 1.0, 1.0]},
        {ROWS[0]: [1.0, 1.8, 1.2], ROWS[1]: [2.0, 1.25, 1.0]},
    )
    assert alternate.main([str(old), *ROWS, "--turns", "3"]) == 1
    *_, second, first = capsys.readouterr().out.splitlines()
    assert first == "| networks.cnn.local_sgda | 0.600 | 0.500 | 0.900 | slower |"
    assert second == "| overhead.vectorised | 0.800 | 0.500 | 1.000 | pass |"


def test_a_row_that_the_other_checkout_lacks_is_not_compared(checkouts, capsys):
    old = checkouts({}, {ROWS[0]: [1.0]})
    assert alternate.main([str(old), ROWS[0], "--turns", "1"]) == 0
    assert "not compared" in capsys.readouterr().out
