"""Opens hostile snapshots, each in a process of its own that has little memory and time.

Importing torch takes seconds, so one server process does it once and forks for every snapshot. It reads requests and
writes answers, one JSON text per line.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_MEMORY_BYTES = 1024**3
"""What a process may take beyond what it has after its imports."""
MAX_CPU_SECONDS = 20


def memory_bytes(name: str) -> int:
    """One of the figures in which Linux states the memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def serve() -> None:
    sys.path[:0] = sys.argv[1:]
    import numpy  # noqa: F401  # what is imported before the fork does not count as memory of the load
    import torch  # noqa: F401  # as above

    from lightning_snapshot import Snapshot, SnapshotCheckpointIO

    def ways_of(path: str, value: str) -> dict[str, Callable[[], Any]]:
        """The doors into the package, in the order in which they are tried; the last one removes the snapshot."""
        plugin, snapshot = SnapshotCheckpointIO(), Snapshot(path)
        return {
            "manifest": snapshot.get_manifest,
            "load": lambda: plugin.load_checkpoint(path),
            "key": lambda: snapshot.get_state_dict_for_key("m"),
            "value": lambda: snapshot.read_object(value),
            "remove": lambda: plugin.remove_checkpoint(path),
        }

    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            answer = run(ways_of(request["path"], request["value"]))
            with os.fdopen(writer, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps({"path": request["path"], "status": status, "answer": json.loads(text or "null")}), flush=True)


def run(ways: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Try all ways, one after the other.

    Returns:
        Way → class and message of the error, or ``None``; and how far the memory in use went up.
    """
    limit = memory_bytes("VmSize") + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    before = memory_bytes("VmRSS")
    outcomes = {name: outcome_of(way) for name, way in ways.items()}
    return {"outcomes": outcomes, "memory_bytes": memory_bytes("VmHWM") - before}


def outcome_of(way: Callable[[], Any]) -> tuple[str, str] | None:
    from lightning_snapshot.errors import SnapshotError

    try:
        way()
    except SnapshotError as error:
        return type(error).__name__, str(error)
    except BaseException as error:  # noqa: BLE001  # any other error is what the tests look for
        return f"not ours: {type(error).__name__}", str(error)[:1000]
    return None


if __name__ == "__main__":
    serve()
