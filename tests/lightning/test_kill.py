"""Kill a run with SIGKILL anywhere and start it again: in the end it equals a run that was never interrupted."""

import os
import random
import signal

import pytest
import torch

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.models import STEPS_PER_EPOCH, difference
from tests.lightning.programs.train import main

EPOCHS = 5
KILLS = 2


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_twice_ends_like_one_that_was_not(namespace, start_program, run_program, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main(namespace.name, whole, EPOCHS)
    chance = random.Random(str(tmp_path))
    first_steps = []

    for _ in range(KILLS):
        process = start_program("train.py", killed, EPOCHS)
        # Kill after a number of steps that this process itself makes, and not before the first snapshot.
        remaining = chance.randint(STEPS_PER_EPOCH + 1, 2 * STEPS_PER_EPOCH)
        steps = (int(line.split()[1]) for line in process.stdout if line.startswith("step"))
        first_steps.append(next(steps))
        for _, step in zip(range(remaining - 1), steps, strict=False):
            assert step < EPOCHS * STEPS_PER_EPOCH
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert SnapshotCheckpointIO().load_checkpoint(killed / "last.ckpt")["global_step"] >= first_steps[-1]
    output = run_program("train.py", killed, EPOCHS)
    first_steps.append(int(output.split("step ")[1].split()[0]))

    assert first_steps[0] == 0
    assert first_steps == sorted(set(first_steps)), "each run must start where the last snapshot was"
    assert all(step % STEPS_PER_EPOCH == 0 for step in first_steps)
    expected, found = (torch.load(folder / "final.pt", weights_only=True) for folder in (whole, killed))
    assert difference(found, expected) is None
    assert not [name for name in os.listdir(killed) if name.startswith(".")], "leftovers of killed saves must be gone"
    for path in killed.glob("*.ckpt"):
        assert SnapshotCheckpointIO().load_checkpoint(path)["global_step"] % STEPS_PER_EPOCH == 0
