"""A short run of the fuzzer, and that it would notice."""

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_snapshot.errors import DataError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux states it"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROOT = Path(__file__).parents[2]
CASES = 1000


def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.fuzz", "--cases", str(CASES), "--seed", "0", "--seconds", "100"]
    done = subprocess.run(
        [*command, "--findings", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{CASES} cases in \d+ s, 0 findings", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture(scope="module")
def known():
    from tests.fuzz.seeds import seeds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its sparse, nested and quantized tensors
        return seeds()


@pytest.fixture
def sound(known):
    """A snapshot that nobody has changed."""
    from tests.fuzz.fuzz import Case

    return Case("x:0", known[0], known[0].files, must_not_lie=True)


def test_cases_follow_from_their_names(known) -> None:
    from tests.fuzz.fuzz import make_case

    cases = [make_case(f"s:{number}", known) for number in range(60)]
    assert cases == [make_case(f"s:{number}", known) for number in range(60)]
    assert len({tuple(sorted(case.files.items())) for case in cases}) > 50
    assert {case.must_not_lie for case in cases} == {False, True}


def test_right_values_and_our_errors_are_no_findings(known, sound) -> None:
    from tests.fuzz.fuzz import expected_states, judge

    def refuse(*_):
        raise DataError("damaged")

    assert judge(sound, expected_states(known)) is None
    assert judge(sound, {}, refuse) is None


def fail(*_):
    raise KeyError(5)


def take_memory(*_):
    return {"taken": len(bytearray(b"x") * 400_000_000)}


@pytest.mark.parametrize(
    ("loader", "kind"),
    [(fail, "KeyError"), (take_memory, "memory"), (lambda *_: {"m": 5}, "other values than were saved")],
)
def test_what_must_not_happen_is_a_finding(known, sound, loader, kind) -> None:
    from tests.fuzz.fuzz import expected_states, judge

    finding = judge(sound, expected_states(known), loader)
    assert finding
    assert finding.case == "x:0"
    assert finding.kind.startswith(kind)


def test_a_process_that_dies_is_a_finding_and_the_rest_is_still_run() -> None:
    from tests.fuzz.fuzz import Finding, run_share

    def run(number: int) -> Finding | None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Finding(f"s:{number}", "odd", "") if number == 4 else None

    count, findings = run_share(run, range(6), float("inf"), "s")
    assert count == 6
    assert [(finding.case, finding.kind) for finding in findings] == [
        ("s:2", "the process died of SIGKILL"),
        ("s:4", "odd"),
    ]


def test_a_finding_is_saved_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    from tests.fuzz.fuzz import Finding, save_finding

    save_finding(tmp_path, Finding("7:5", "odd", "all of it"), {".snapshot_metadata": b"{}", ".data/a/0_0": b"1"})
    assert "--case 7:5" in (tmp_path / "7-5" / "why.txt").read_text()
    assert (tmp_path / "7-5" / "snapshot" / ".snapshot_metadata").read_bytes() == b"{}"
    assert (tmp_path / "7-5" / "snapshot" / ".data" / "a" / "0_0").read_bytes() == b"1"
