"""A few kills of the many that ``make chaos`` does."""

import subprocess
import sys
from pathlib import Path

import lightning
import pytest


@pytest.mark.distributed
@pytest.mark.skipif(lightning.__version__.startswith("2.4."), reason="exact from Lightning 2.5 on")
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_left_alone(tmp_path):
    command = [sys.executable, "-m", "tests.chaos.chaos", "--kills", "3", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "equal, bit for bit" in done.stdout
    assert done.stdout.count("kill ") >= 2, "on a fast machine, the run may end before the last one"
