"""What is expected of every way of opening a hostile snapshot."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["*"]  # memory is measured as Linux states it

ROOT = Path(__file__).parents[2]
# What torch and the interpreter take to do anything at all, and some room; besides a multiple of the snapshot's size.
MAX_GROWTH_BYTES = 300 * 1024**2

Outcomes: TypeAlias = dict[str, tuple[str, str] | None]


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Callable[[Path, str], dict[str, Any]]]:
    """Opens a snapshot in all ways, in a process with little memory and time."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "sandbox.py"), str(ROOT / "src")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout

    def open_all_ways(path: Path, value: str) -> dict[str, Any]:
        server.stdin.write(json.dumps({"path": str(path), "value": value}) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        assert answer["path"] == str(path), "the answer to an earlier test, which did not wait for it"
        return answer

    yield open_all_ways
    server.stdin.close()
    assert server.wait(timeout=30) == 0
    server.stdout.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a test puts its snapshot, with other people's files beside it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret" * 1000)
    (tmp_path / "outside" / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    return tmp_path / "a.ckpt"


@pytest.fixture
def open_hostile(sandbox, root: Path) -> Callable[..., Outcomes]:
    """Opens the snapshot in all ways: each gives a value or an error of ours, in bounds, and leaves the rest alone."""

    def check(value: str = "0/m/v", *, removable: bool = True) -> Outcomes:
        before = surroundings(root)
        files = [path for pattern in ("*", "*/*", "*/*/*") for path in root.glob(pattern)]
        size_bytes = sum(path.lstat().st_blocks * 512 for path in files)
        result = sandbox(root, value)
        assert result["status"] == 0, f"the process was ended by signal {result['status'] & 127}"
        outcomes = result["answer"]["outcomes"]
        assert surroundings(root) == before
        assert not [outcome for outcome in outcomes.values() if outcome and outcome[0].startswith("not ours")], outcomes
        assert result["answer"]["memory_bytes"] < MAX_GROWTH_BYTES + 10 * size_bytes, outcomes
        assert outcomes["remove"] is None or not removable
        return outcomes

    return check


@pytest.fixture
def assert_refused(open_hostile, root: Path) -> Callable[..., None]:
    """Expects a load to fail with this error, which names the snapshot and the place in it."""

    def check(error: str, message: str, **arguments: Any) -> None:
        found = open_hostile(**arguments)["load"]
        assert found is not None, "it was loaded"
        assert found[0] in error.split("|"), found
        assert str(root) in found[1]
        assert re.search(message, found[1]), found[1]

    return check


def surroundings(root: Path) -> dict[str, Any]:
    """All that is beside a snapshot."""
    found: dict[str, Any] = {}
    for folder, folders, names in os.walk(root.parent):
        folders[:] = [name for name in folders if Path(folder, name) != root]
        for path in (Path(folder, name) for name in names):
            if path != root:
                found[str(path)] = path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None
    return found
