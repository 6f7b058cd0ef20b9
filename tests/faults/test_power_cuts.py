"""The power goes off at every change of the disk. What the model assumes is in `tests.faults.power`."""

import pytest

from tests.faults.matrix import try_power_cuts
from tests.faults.scenes import OPERATIONS, SCENES
from tests.faults.test_faults import CASES, calls_of


@pytest.mark.parametrize(("operation", "scene"), CASES)
def test_a_power_cut_leaves_the_old_or_the_new(tmp_path, sample, operation, scene):
    root = tmp_path / "disk" / "run" / "x.ckpt"
    stride = 1 if sample.complete else 12
    count = try_power_cuts(
        OPERATIONS[operation], SCENES[scene], root, sample.chance, complete=sample.complete, stride=stride
    )
    sample.count("power cuts", count)


@pytest.mark.parametrize("fault", ["crash_at", "fail_at"])
@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene != "no parents"])
def test_a_power_cut_during_the_save_after_one_that_failed(tmp_path, sample, scene, fault):
    """What the first one has left, or published but not made durable, is not what the second one may build on.

    Except for folders above the one that the snapshot is in: who has made them, Lightning as a rule, is not known.
    """
    for number in sample.numbers(calls_of("save", scene), 40):
        root = tmp_path / str(number) / "disk" / "run" / "x.ckpt"
        stride = 25 if sample.complete else 30
        count = try_power_cuts(
            OPERATIONS["save"], SCENES[scene], root, sample.chance, stride=stride, first={fault: number}
        )
        sample.count("power cuts", count)
