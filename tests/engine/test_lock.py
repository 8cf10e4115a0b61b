"""One process at a time in a folder."""

import subprocess
import sys

import pytest

from fedminimax.engine.state.lock import BusyError, locked


def test_a_second_one_is_refused_until_the_first_has_left(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(BusyError, match=f"another process is at work in {tmp_path}: stop it first"),
        locked(tmp_path, seconds=0.0),
    ):
        pass
    with locked(tmp_path, seconds=0.0):
        pass


def test_a_process_that_has_inherited_the_lock_keeps_it(tmp_path):
    waits = [sys.executable, "-c", "input()"]
    with locked(tmp_path) as lock:
        heir = subprocess.Popen(waits, stdin=subprocess.PIPE, pass_fds=(lock,))
    with pytest.raises(BusyError), locked(tmp_path, seconds=0.0):
        pass
    heir.communicate(b"\n")
    with locked(tmp_path, seconds=0.0):
        pass
