"""Saves to and loads from a server like S3 that answers 20 ms late: lightning_snapshot and its peers."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import obstore
import torch.distributed.checkpoint as dcp
from common import OURS, ROOT, State, middle, seconds
from lightning.fabric.plugins.io import TorchCheckpointIO
from memory import _extra_bytes
from peers import Ours, Peer, TorchSnapshot, _copy, torchsnapshot
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from lightning_snapshot import Snapshot, SnapshotCheckpointIO
from lightning_snapshot.storage import open_storage

_LATENCY_SECONDS = 0.02
_URL = "s3://models/checkpoint"
_FULL_BYTES = 2**30
_ONE = "blocks.3.mlp.up"
_READ_BYTES = 4 * 2**20
_UNSIGNED = {"unsigned_payload": True}

# The goals of this one.
common.AT_LEAST |= {"save_vs_lightning": 3.0, "save_vs_torchsnapshot": 3.0, "load_vs_lightning": 3.0}
common.AT_MOST |= {"extra_bytes": 128 * 2**20}


class Unsigned(Ours):
    name = f"{OURS}, unsigned_payload"
    settings = "the same, and what is sent is not hashed for the signature"

    def __init__(self) -> None:
        self._plugin = SnapshotCheckpointIO(storage_options=_UNSIGNED)


class LightningDefault(Peer):
    name = "Lightning's default"
    settings = "TorchCheckpointIO, which goes through s3fs; then a copy, as load_state_dict makes"

    def save(self, state: State, path: Any) -> None:
        TorchCheckpointIO().save_checkpoint({"state_dict": state}, path)

    def load(self, path: Any, targets: State) -> None:
        _copy(TorchCheckpointIO().load_checkpoint(path, weights_only=True)["state_dict"], targets)


class DistributedCheckpoint(Peer):
    name = "DCP"
    settings = "FsspecWriter and FsspecReader, which go through s3fs, no_dist; loads in place"

    def save(self, state: State, path: Any) -> None:
        dcp.save(state, storage_writer=FsspecWriter(path), no_dist=True)

    def load(self, path: Any, targets: State) -> None:
        dcp.load(targets, storage_reader=FsspecReader(path), no_dist=True)


class Raw(Peer):
    name = "obstore alone"
    settings = (
        "the most that can be reached: the same bytes, parts of 6 MiB, reads of 4 MiB, 8 requests at once; no check"
    )

    def save(self, state: State, path: Any) -> None:
        blocks = (memoryview(tensor.numpy().view("uint8").reshape(-1)) for tensor in state.values())
        obstore.put(_store(), "raw", blocks, use_multipart=True, chunk_size=6 * 2**20, max_concurrency=8)

    def load(self, path: Any, targets: State) -> None:
        store, size_bytes = _store(), common.size_of(targets)

        def read(begin: int) -> None:
            obstore.get_range(store, "raw", start=begin, end=min(begin + _READ_BYTES, size_bytes))

        with ThreadPoolExecutor(8) as executor:
            list(executor.map(read, range(0, size_bytes, _READ_BYTES)))


def _store() -> Any:
    return open_storage(_URL, _UNSIGNED).place.bucket._store


class Emulator:
    """`s3_server`, in a process of its own. Everybody finds it through the environment.

    Those who go through botocore do not hash what they send for the signature, as by default where there is TLS.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "s3_server.py"), str(_LATENCY_SECONDS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self._process.kill)
        config = folder / "config"
        config.write_text("[default]\ns3 =\n  payload_signing_enabled = false\n")
        os.environ.update(
            {
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_CONFIG_FILE": str(config),
                "AWS_ENDPOINT_URL": self._line(),
                "AWS_REGION": "us-east-1",
                "AWS_SECRET_ACCESS_KEY": "secret",
            }
        )

    def requests(self) -> tuple[int, int]:
        """How many there were since the last call, and how many at once at most."""
        return self._tell("")

    def empty(self) -> None:
        """Remove everything."""
        self._tell("empty")

    def _tell(self, what: str) -> tuple[int, int]:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        total, at_once = json.loads(self._line())
        return total, at_once

    def _line(self) -> str:
        return self._process.stdout.readline().strip()


class Benchmark:
    """Collects what each peer does."""

    def __init__(self, emulator: Emulator, state: State) -> None:
        self.emulator = emulator
        self.state = state
        self.targets = common.targets_of(state)
        self.size_bytes = common.size_of(state)
        self.samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def run(self, peer: Peer) -> None:
        note = self.samples[peer.name]
        self.emulator.requests()
        note["save"].append(self.size_bytes / seconds(lambda: peer.save(self.state, _URL)))
        note["save_at_once"].append(self.emulator.requests()[1])
        for target in self.targets.values():
            target.fill_(-1)
        note["load"].append(self.size_bytes / seconds(lambda: peer.load(_URL, self.targets)))
        note["load_at_once"].append(self.emulator.requests()[1])
        if not isinstance(peer, Raw):
            common.check_equal(peer.name, self.targets, self.state)
        self.one_tensor(peer, note)
        self.emulator.empty()

    def one_tensor(self, peer: Peer, note: dict[str, list[float]]) -> None:
        if peer.name == OURS:
            note["one"].append(seconds(lambda: Snapshot(_URL).read_object(f"0/state_dict/{_ONE}")))
        elif peer.name == TorchSnapshot.name:
            note["one"].append(seconds(lambda: torchsnapshot.Snapshot(_URL).read_object(f"0/app/{_ONE}")))

    def memory(self, peer: Peer) -> None:
        peer.close()
        save = _extra_bytes(lambda: peer.save(self.state, _URL))
        peer.close()
        load = _extra_bytes(lambda: peer.load(_URL, self.targets))
        self.samples[peer.name]["extra"].append(max(save, load))
        self.emulator.empty()


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "")
    # 2.25 GiB times this is 1 GiB.
    state = common.state_a(arguments.scale * _FULL_BYTES / (2.25 * 2**30))
    peers = [Ours(), Unsigned(), LightningDefault(), TorchSnapshot(), DistributedCheckpoint(), Raw()]
    with common.scratch(arguments.dir) as folder, ExitStack() as stack:
        emulator = Emulator(folder, stack)
        benchmark = Benchmark(emulator, state)
        for peer in peers:  # imports, connections
            peer.save(common.one_tensor(4096), _URL)
            emulator.empty()
        common.alternate(arguments.rounds, [(peer.name, lambda peer=peer: benchmark.run(peer)) for peer in peers])
        for peer in peers:
            benchmark.memory(peer)
    for peer in peers:
        peer.close()
    report(arguments, benchmark, peers)


def report(arguments: Any, benchmark: Benchmark, peers: list[Peer]) -> None:
    """Print and write the results."""
    samples = benchmark.samples
    rows = [{"name": peer.name, "settings": peer.settings, **samples[peer.name]} for peer in peers]

    def ratio(what: str, other: str) -> float:
        return middle(samples[OURS][what]) / middle(samples[other][what])

    ratios = {
        "save_vs_lightning": ratio("save", LightningDefault.name),
        "save_vs_torchsnapshot": ratio("save", TorchSnapshot.name),
        "load_vs_lightning": ratio("load", LightningDefault.name),
        "extra_bytes": samples[OURS]["extra"][0],
    }
    lines = [_line(peer.name, samples[peer.name]) for peer in peers]
    header = ["", "save MB/s", "load MB/s", "one tensor s", "requests at once, save", "load", "extra MiB"]
    results = [
        (
            f"{len(benchmark.state)} tensors, {benchmark.size_bytes / 2**30:.2f} GiB, with "
            f"{_LATENCY_SECONDS * 1000:.0f} ms before each answer; median (lowest to highest)."
        ),
        common.table(header, lines),
    ]
    common.report("object_store", arguments, "\n\n".join(results), rows, ratios)


def _line(name: str, samples: dict[str, list[float]]) -> list[str]:
    rates = [common.span([each / 1e6 for each in samples[what]], digits=0) for what in ("save", "load")]
    one = common.span(samples["one"], digits=2) if samples["one"] else "-"
    at_once = [f"{max(samples[f'{what}_at_once']):.0f}" for what in ("save", "load")]
    return [name, *rates, one, *at_once, f"{samples['extra'][0] / 2**20:.0f}"]


if __name__ == "__main__":
    main()
