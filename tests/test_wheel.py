"""The wheel: what is in it, what an index would say of it, and that it works in an empty
environment, away from the sources."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

EXPERIMENT = """
[data]
name = "heart"
[model]
name = "linear"
[problem]
name = "auc"
[method]
name = "codasca"
[run]
rounds = 2
"""


def call(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: what an earlier build has left beside the sources must not get in.
    shutil.copytree(ROOT / "src", folder / "tree/src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    call(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder),
        folder / "tree",
    )
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"fedminimax", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    here = {
        file.relative_to(ROOT / "src").as_posix()
        for file in (ROOT / "src").rglob("fedminimax/**/*.py")
    }
    assert {name for name in names if name.endswith(".py")} == here
    assert "fedminimax/py.typed" in names
    assert "fedminimax/data/heart_disease/processed.va.data" in names


def test_an_index_would_take_it_and_knows_what_it_is(wheel):
    assert "PASSED" in call(sys.executable, "-m", "twine", "check", "--strict", wheel)
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    about = email.message_from_bytes(archive.read(name))
    assert about["License-Expression"] == "Apache-2.0"
    assert "fedminimax developers" in (about["Author"] or "")
    assert about.get_all("Classifier")
    assert about["Keywords"]


def test_it_runs_in_an_empty_environment_away_from_the_sources(wheel, tmp_path):
    call(sys.executable, "-m", "venv", tmp_path / "env")
    python, command = (tmp_path / "env" / "bin" / n for n in ("python", "fedminimax"))
    call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    (tmp_path / "heart.toml").write_text(EXPERIMENT)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = {"cwd": tmp_path, "env": clean}
    at = call(python, "-c", "import fedminimax; print(fedminimax.__file__)", **where)
    assert Path(at.strip()).is_relative_to(tmp_path / "env")
    assert "fedminimax 0.1.0" in call(command, "--version", **where)
    call(command, "run", "heart.toml", **where)
    assert (tmp_path / "runs" / "heart-1" / "final.safetensors").exists()
