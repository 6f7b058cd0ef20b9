"""Memory that a save and a load need beyond what the caller holds: peak RSS minus RSS before, each in a new process."""

import ctypes
import gc
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
from common import OURS, State, middle
from peers import all_peers, warm_up

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_MIB = 2**20


def _states(scale: float) -> dict[str, Callable[[], State]]:
    """Label → state. Everybody saves and loads the first; we all of them."""
    full = round(2.25 * 2**30 * scale)
    return {
        "96 tensors": partial(common.state_a, scale),
        "96 tensors, a quarter": partial(common.state_a, scale / 4),
        "one tensor": partial(common.one_tensor, full),
        "small tensors": partial(common.state_b, max(100, round(20_000 * scale))),
    }


def _extra_bytes(action: Callable[[], object]) -> int:
    gc.collect()
    # What earlier work has freed must not serve this one.
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _measure(name: str, action: str, label: str, scale: str, path: Path) -> None:
    """In a process of its own: prepare, measure one save or load, print the bytes."""
    warm = next(peer for peer in all_peers() if peer.name == name)
    warm_up([warm], path.parent)
    warm.close()  # and with it what it keeps for the next save
    peer = next(peer for peer in all_peers() if peer.name == name)
    state = _states(float(scale))[label]()
    common.drop_page_cache(path.parent)
    if action == "save":
        extra = _extra_bytes(lambda: peer.save(state, path))
    else:
        targets = common.targets_of(state)
        extra = _extra_bytes(lambda: peer.load(path, targets))
        common.check_equal(name, targets, state)
    peer.close()
    print(json.dumps(extra))


def _in_fresh_process(*arguments: object) -> int:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "")
    peers = all_peers()
    names = [peer.name for peer in peers]
    for peer in peers:
        peer.close()
    labels = list(_states(arguments.scale))
    keys = [(name, labels[0]) for name in names] + [(OURS, label) for label in labels[1:]]
    samples: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    with common.scratch(arguments.dir) as folder:

        def measure(name: str, label: str) -> None:
            path = folder / "checkpoint"
            for action in ("save", "load"):
                extra = _in_fresh_process(name, action, label, arguments.scale, path)
                samples[name, label, action].append(extra)
            common.remove(path)

        runs = [(f"{name}, {label}", partial(measure, name, label)) for name, label in keys]
        common.alternate(arguments.rounds, runs)

    rows = [
        {
            "name": name,
            "state": label,
            **{f"extra_{action}_bytes": middle(samples[name, label, action]) for action in ("save", "load")},
            **{f"{action}_samples": samples[name, label, action] for action in ("save", "load")},
        }
        for name, label in keys
    ]
    # The worst that was seen, not the median: a budget is a promise.
    ratios = {
        f"extra_{action}_bytes": max(max(samples[OURS, label, action]) for label in labels)
        for action in ("save", "load")
    }
    results = common.table(
        ["", "state", "save MiB", "load MiB"],
        [
            [name, label, *(f"{middle(samples[name, label, action]) / _MIB:,.0f}" for action in ("save", "load"))]
            for name, label in keys
        ],
    )
    common.report("memory", arguments, results, rows, ratios)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _measure(*sys.argv[2:6], Path(sys.argv[6]))
    else:
        main()
