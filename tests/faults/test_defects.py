"""The matrix itself is tried: it has to find mistakes."""

from functools import partial

import pytest

from tests.faults.defects import (
    CommitBeforeData,
    CopyInsteadOfRename,
    NoRename,
    RemoveBeforeCommit,
    RemoveInsteadOfExchange,
    WithoutOneSync,
)
from tests.faults.matrix import try_power_cuts
from tests.faults.power import RecordingPosix
from tests.faults.scenes import OPERATIONS, SCENES, LossError, open_local
from tests.faults.test_faults import CASES, calls_of

DEFECTS = {
    "copy of the metadata instead of rename": ("snapshot", CopyInsteadOfRename, open_local),
    "copy of a folder instead of rename": ("stock file, no exchange", CopyInsteadOfRename, open_local),
    "no rename of the metadata": ("snapshot", NoRename, open_local),
    "no rename of a folder": ("nothing", NoRename, open_local),
    "no exchange": ("stock file", NoRename, open_local),
    "removal instead of exchange": ("link", RemoveInsteadOfExchange, open_local),
    "removal before commit": ("snapshot", RecordingPosix, RemoveBeforeCommit),
    "commit before data": ("snapshot", RecordingPosix, CommitBeforeData),
    "commit before data at a new path": ("nothing", RecordingPosix, CommitBeforeData),
}

# Between them, these make every sync that an operation makes; the rest is for ``--complete-faults``.
TYPICAL = [
    ("save", "no parents"),
    ("save", "torchsnapshot"),
    ("save", "stock file, no exchange"),
    ("load", "half an exchange"),
    ("remove", "torchsnapshot"),
]

# Numbers of syncs without which nothing is lost in these scenes, because they are for other ones:
# - before the commit, of the folder that the snapshot is in: for a name that a killed save has given (tried below).
#   Where the commit is a rename in that folder, the sync after it does the same, and so this one is not needed at all;
# - before the commit, of the snapshot: if its folder of data is new, as in "torchsnapshot";
# - before leftovers go, of the snapshot: for a commit that was killed (tried below);
# - after an exchange that others have finished, and when a removal forgets the names of files: for "torchsnapshot" and
#   for removals.
SPARE = {
    ("save", "no parents"): {6},
    ("save", "nothing"): {5},
    ("save", "snapshot"): {5, 6},
    ("save", "killed save"): {5},
    ("save", "killed claim"): {5},
    ("save", "killed removal"): {1, 7},
    ("save", "snapshot and killed saves"): {1, 6, 7},
    ("save", "stock file"): {5},
    ("save", "stock file, no exchange"): {5},
    ("save", "link"): {5},
    ("save", "link, no exchange"): {5},
    ("save", "half an exchange"): {2, 7, 8},
    ("save", "torchsnapshot"): {5},
    ("claim and save", "no parents"): {6},
    ("claim and save", "nothing"): {5},
    ("claim and save", "killed save"): {5},
    ("claim and save", "killed claim"): {5},
    ("claim and save", "killed removal"): {1, 7},
    ("load", "half an exchange"): {2},
    ("remove", "snapshot"): {2},
    ("remove", "killed removal"): {1},
    ("remove", "snapshot and killed saves"): {2},
    ("remove", "half an exchange"): {1, 4},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scene" in metafunc.fixturenames:
        is_complete = metafunc.config.getoption("--complete-faults", default=False)
        metafunc.parametrize(("operation", "scene"), CASES if is_complete else TYPICAL)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(tmp_path, sample, defect):
    scene, posix_type, opener = DEFECTS[defect]
    root = tmp_path / "disk" / "run" / "x.ckpt"
    with pytest.raises(LossError):
        try_power_cuts(OPERATIONS["save"], SCENES[scene], root, sample.chance, posix_type=posix_type, opener=opener)
    sample.count("defects")


def count_syncs(calls: list[str]) -> int:
    return sum(name in ("sync", "sync_folder") for name in calls)


def test_a_sync_that_is_left_out_is_found(tmp_path, sample, operation, scene):
    known, spare = SPARE.get((operation, scene), set()), set()
    for number in range(1, count_syncs(calls_of(operation, scene)) + 1):
        if number in known and not sample.complete:
            continue
        posix_type = partial(WithoutOneSync, drop=number)
        root = tmp_path / str(number) / "disk" / "run" / "x.ckpt"
        try:
            try_power_cuts(
                OPERATIONS[operation], SCENES[scene], root, sample.chance, posix_type=posix_type, complete=True
            )
        except LossError:
            sample.count("defects")
        else:
            spare.add(number)
    assert spare == (known if sample.complete else set())


@pytest.mark.parametrize("place", ["snapshot", "nothing", "stock file, no exchange"])
def test_a_sync_for_the_sake_of_what_comes_after_a_fault_is_found(tmp_path, sample, place):
    calls = calls_of("save", place)
    commit = len(calls) - calls[::-1].index("rename")  # its number, from 1 on
    if place == "stock file, no exchange":
        # Before a save that failed takes its stage apart, it makes sure that the stage cannot be published any more.
        drop = count_syncs(calls[:commit]) + 1
        first, in_first = {"fail_at": commit}, True
    else:
        # After one that was killed right behind its commit, a save makes sure of that commit before it removes what was
        # replaced, and of the name of the snapshot before it publishes: behind the syncs of four files.
        drop = 1 if place == "snapshot" else 5
        first, in_first = {"crash_at": commit + 1}, False

    def posix_type(disk, **faults):
        is_first = faults.keys() > {"without"}
        return WithoutOneSync(disk, drop=drop if is_first == in_first else 0, **faults)

    arguments = OPERATIONS["save"], SCENES[place]
    healthy, wrong = (tmp_path / name / "disk" / "run" / "x.ckpt" for name in ("healthy", "wrong"))
    count = try_power_cuts(*arguments, healthy, sample.chance, complete=sample.complete, stride=4, first=first)
    sample.count("power cuts", count)
    with pytest.raises(LossError):
        try_power_cuts(*arguments, wrong, sample.chance, complete=True, first=first, posix_type=posix_type)
    sample.count("defects")
