"""Random sequences of saves, removals and loads behind training end like the same ones done one after the other."""

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.gates import Gate, GatedCheckpointIO


@dataclass(frozen=True)
class Step:
    """One save as a checkpoint callback does it, into a slot, where it may replace the snapshot before it."""

    slot: int
    replaces: bool
    """Whether the path is new and the old one is removed; otherwise the slot's own path is saved over."""
    fails: bool
    is_slow: bool
    """Whether nothing of it is written before the next step begins, as far as that does not wait for it."""
    waits: bool
    loads: bool


OFTEN = st.sampled_from([True, True, False])
STEPS = st.lists(st.builds(Step, st.sampled_from([0, 0, 0, 1]), OFTEN, *[st.booleans()] * 4), min_size=3, max_size=8)


def run_one_after_the_other(steps: list[Step]) -> dict[str, int]:
    """What must be there in the end: a save that fails leaves all as it was, and is followed by no removal."""
    there: dict[str, int] = {}
    current: dict[int, str] = {}
    for number, step in enumerate(steps):
        name = f"{step.slot}-{number}" if step.replaces else f"{step.slot}"
        if step.fails:
            continue
        there[name] = number
        if step.replaces:
            there.pop(current.get(step.slot, ""), None)
            current[step.slot] = name
    return there


def run_behind_training(steps: list[Step], folder: Path) -> dict[str, int]:
    gate = Gate(failing={number + 1 for number, step in enumerate(steps) if step.fails})
    plugin = GatedCheckpointIO(gate, on_error="warn")
    current: dict[int, str] = {}
    for number, step in enumerate(steps):
        name = f"{step.slot}-{number}" if step.replaces else f"{step.slot}"
        if not step.is_slow:
            gate.open()
        plugin.save_checkpoint({"n": number}, folder / name)
        if step.is_slow:
            gate.open()
        if step.waits:
            plugin.wait()
        if step.replaces:
            if step.slot in current:
                plugin.remove_checkpoint(folder / current[step.slot])
            current[step.slot] = name
        if step.loads and not step.fails:
            assert plugin.load_checkpoint(folder / name) == {"n": number}
        if number + 1 < len(steps) and steps[number + 1].is_slow:
            plugin.wait()
            gate.close()
    gate.open()
    plugin.teardown()
    reader = SnapshotCheckpointIO()
    return {name: reader.load_checkpoint(folder / name)["n"] for name in os.listdir(folder)}


@given(STEPS)
@settings(max_examples=100)
def test_the_end_is_the_same(steps):
    with TemporaryDirectory() as folder:
        assert run_behind_training(steps, Path(folder)) == run_one_after_the_other(steps)
