"""Durable saves and cold loads of 2.25 GiB: lightning_snapshot, its peers, and the raw device."""

from collections import defaultdict
from pathlib import Path

import chart
import common
import raw
from common import OURS, State, drop_page_cache, middle, seconds
from peers import Peer, all_peers, warm_up

_FIO = "fio, libaio, depth 4"


class Benchmark:
    """Collects the throughput of each save and load, in bytes per second."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state
        self.targets = common.targets_of(state)
        self.size_bytes = common.size_of(state)
        self.saves: dict[str, list[float]] = defaultdict(list)
        self.loads: dict[str, list[float]] = defaultdict(list)

    def peer(self, peer: Peer) -> None:
        path = self.folder / "checkpoint"
        drop_page_cache(self.folder)
        taken = seconds(lambda: (peer.save(self.state, path), common.sync_tree(path)))
        self.saves[peer.name].append(self.size_bytes / taken)
        for target in self.targets.values():
            target.fill_(-1)
        drop_page_cache(self.folder)
        taken = seconds(lambda: peer.load(path, self.targets))
        self.loads[peer.name].append(self.size_bytes / taken)
        common.check_equal(peer.name, self.targets, self.state)
        common.remove(path)

    def device(self, device: raw.RawDevice) -> None:
        path = self.folder / "raw"
        drop_page_cache(self.folder)
        self.saves[device.name].append(device.size_bytes / seconds(lambda: device.write(path)))
        drop_page_cache(self.folder)
        self.loads[device.name].append(device.size_bytes / seconds(lambda: device.read(path)))
        common.remove(path)

    def fio(self) -> None:
        path = self.folder / "fio"
        drop_page_cache(self.folder)
        self.saves[_FIO].append(raw.fio(path, self.size_bytes, "write"))
        drop_page_cache(self.folder)
        self.loads[_FIO].append(raw.fio(path, self.size_bytes, "read"))
        common.remove(path)


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "")
    peers = all_peers()
    with common.scratch(arguments.dir) as folder:
        benchmark = Benchmark(folder, common.state_a(arguments.scale))
        devices = [raw.RawDevice(benchmark.size_bytes, threads) for threads in raw.THREADS]
        runs = [(peer.name, lambda peer=peer: benchmark.peer(peer)) for peer in peers]
        runs += [(device.name, lambda device=device: benchmark.device(device)) for device in devices]
        if raw.fio_is_there():
            runs.append((_FIO, benchmark.fio))
        warm_up(peers, folder)
        common.alternate(arguments.rounds, runs)
    for peer in peers:
        peer.close()

    settings = {peer.name: peer.settings for peer in peers}
    settings |= {device.name: "O_DIRECT, 8 MiB pieces, posix_fallocate, fsync" for device in devices}
    settings[_FIO] = "checks the raw device"
    saves = {name: middle(samples) for name, samples in benchmark.saves.items()}
    loads = {name: middle(samples) for name, samples in benchmark.loads.items()}
    names = [name for name, _ in runs]
    rows = [
        {
            "name": name,
            "settings": settings[name],
            "save_bytes_per_second": saves[name],
            "load_bytes_per_second": loads[name],
            "save_samples": benchmark.saves[name],
            "load_samples": benchmark.loads[name],
        }
        for name in names
    ]
    others = [peer.name for peer in peers if peer.name != OURS]
    raw_save = max(saves[device.name] for device in devices)
    raw_load = max(loads[device.name] for device in devices)
    ratios = {
        "save_vs_raw": saves[OURS] / raw_save,
        "save_vs_best_peer": saves[OURS] / max(saves[name] for name in others),
        "save_vs_torchsnapshot": saves[OURS] / saves["torchsnapshot"],
        "load_vs_raw": loads[OURS] / raw_load,
        "load_vs_best_peer": loads[OURS] / max(loads[name] for name in others),
    }
    results = [
        f"{len(benchmark.state)} tensors, {benchmark.size_bytes / 2**30:.2f} GiB; median (lowest to highest).",
        common.table(
            ["", "durable save GB/s", "cold load GB/s"],
            [[name, _gigabytes(benchmark.saves[name]), _gigabytes(benchmark.loads[name])] for name in names],
        ),
        _comparison_with_fio(saves, loads, raw_save, raw_load),
    ]
    picture = "![Throughput of durable saves and cold loads](images/save_load.png)"
    common.report("save_load", arguments, "\n\n".join(results), rows, ratios, picture=picture)
    if arguments.update_docs:
        chart.draw(common.DOCUMENT.parent / "images" / "save_load.png", rows, raw_save, raw_load)


def _gigabytes(samples: list[float]) -> str:
    return common.span([sample / 1e9 for sample in samples], digits=2)


def _comparison_with_fio(saves: dict[str, float], loads: dict[str, float], raw_save: float, raw_load: float) -> str:
    if _FIO not in saves:
        return "fio is not installed (`apt-get install fio`): the raw device is not checked against it."
    return f"Raw device (best) against fio: write {raw_save / saves[_FIO]:.2f}, read {raw_load / loads[_FIO]:.2f}."


if __name__ == "__main__":
    main()
