"""Durable saves and cold loads of 20,000 and 200,000 small tensors, and opening a snapshot of 20,000."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import common
from common import OURS, State, drop_page_cache, middle, seconds, span
from peers import Peer, all_peers, open_with_torchsnapshot, open_with_us, warm_up

_SAFETENSORS = ("safetensors", "safetensors, one by one")
# Whoever is fast enough for ten times as many.
_MANY = (OURS, "torch.save", *_SAFETENSORS)
_OPENERS: Mapping[str, Mapping[str, Callable[[Path], int]]] = {
    OURS: {OURS: open_with_us},
    "torchsnapshot": {
        "torchsnapshot": open_with_torchsnapshot,
        f"{OURS}, a snapshot of torchsnapshot": open_with_us,
    },
}

_Key = tuple[str, int]
"""Name and number of tensors."""


class Benchmark:
    """Collects seconds."""

    def __init__(self, folder: Path, states: Mapping[int, State]) -> None:
        self.folder = folder
        self.states = states
        self.targets = {count: common.targets_of(state) for count, state in states.items()}
        self.saves: dict[_Key, list[float]] = defaultdict(list)
        self.loads: dict[_Key, list[float]] = defaultdict(list)
        self.opens: dict[str, list[float]] = defaultdict(list)

    def peer(self, peer: Peer, count: int, *, with_open: bool) -> None:
        path = self.folder / "checkpoint"
        state, targets = self.states[count], self.targets[count]
        drop_page_cache(self.folder)
        taken = seconds(lambda: (peer.save(state, path), common.sync_tree(path)))
        self.saves[peer.name, count].append(taken)
        for target in targets.values():
            target.fill_(-1)
        drop_page_cache(self.folder)
        self.loads[peer.name, count].append(seconds(lambda: peer.load(path, targets)))
        common.check_equal(peer.name, targets, state)
        for name, opener in _OPENERS.get(peer.name, {}).items() if with_open else ():
            drop_page_cache(self.folder)
            self.opens[name].append(seconds(lambda opener=opener: opener(path)))
        common.remove(path)


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "")
    few, many = (max(100, round(count * arguments.scale)) for count in (20_000, 200_000))
    peers = all_peers()
    with common.scratch(arguments.dir) as folder:
        benchmark = Benchmark(folder, {count: common.state_b(count) for count in (few, many)})
        runs = [(peer.name, lambda peer=peer: benchmark.peer(peer, few, with_open=True)) for peer in peers]
        runs += [
            (f"{peer.name}, {many:,}", lambda peer=peer: benchmark.peer(peer, many, with_open=False))
            for peer in peers
            if peer.name in _MANY
        ]
        warm_up(peers, folder)
        common.alternate(arguments.rounds, runs)
    for peer in peers:
        peer.close()

    saves = {key: middle(samples) for key, samples in benchmark.saves.items()}
    loads = {key: middle(samples) for key, samples in benchmark.loads.items()}
    opens = {name: middle(samples) for name, samples in benchmark.opens.items()}
    keys = [(peer.name, few) for peer in peers] + [(peer.name, many) for peer in peers if peer.name in _MANY]
    rows = [
        {
            "name": name,
            "tensors": count,
            "save_seconds": saves[name, count],
            "load_seconds": loads[name, count],
            "save_samples": benchmark.saves[name, count],
            "load_samples": benchmark.loads[name, count],
        }
        for name, count in keys
    ]
    rows += [
        {"name": name, "tensors": few, "open_seconds": opens[name], "open_samples": benchmark.opens[name]}
        for name in opens
    ]
    ratios = {
        "small_save_vs_safetensors": saves[OURS, few] / min(saves[name, few] for name in _SAFETENSORS),
        "small_load_vs_safetensors": loads[OURS, few] / min(loads[name, few] for name in _SAFETENSORS),
        "open_vs_torchsnapshot": opens[OURS] / opens["torchsnapshot"],
    }
    results = [
        "Tensors of 16 by 16 float32; median (lowest to highest).",
        common.table(
            ["", "tensors", "durable save s", "cold load s"],
            [[key[0], f"{key[1]:,}", span(benchmark.saves[key], 3), span(benchmark.loads[key], 3)] for key in keys],
        ),
        common.table(
            [f"opening a snapshot of {few:,} tensors, cold", "s"],
            [[name, span(samples, 3)] for name, samples in benchmark.opens.items()],
        ),
    ]
    common.report("small_tensors", arguments, "\n\n".join(results), rows, ratios)


if __name__ == "__main__":
    main()
