"""Who is compared, each with the settings that are best for it. Who is missing fails the run, at import."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import OURS, ROOT, State, one_tensor, remove, targets_of
from lightning.fabric.plugins.io import TorchCheckpointIO
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from lightning_snapshot import Snapshot, SnapshotCheckpointIO

_TORCHSNAPSHOT = ROOT / ".interop" / "torchsnapshot-0.1.0"
if not (_TORCHSNAPSHOT / "torchsnapshot" / "__init__.py").is_file():
    raise SystemExit("torchsnapshot 0.1.0 is missing; run `make interop`")
# Last, so that what the environment has of its dependencies comes first.
sys.path.append(str(_TORCHSNAPSHOT))
import torchsnapshot  # noqa: E402  # see above

# Of torchsnapshot about torch's storages, of DCP about the one process: nothing that a reader of the table can change.
warnings.simplefilter("ignore")


class Peer(ABC):
    """Saves a state to a path that does not exist, and loads it into tensors that do.

    Attributes:
        name: In tables.
        settings: What is not the default, or what there is to know about it.
    """

    name: str
    settings: str

    @abstractmethod
    def save(self, state: State, path: Path) -> None:
        """Save; the caller makes it durable."""

    @abstractmethod
    def load(self, path: Path, targets: State) -> None:
        """Load into ``targets``, in place or by a copy."""

    def close(self) -> None:  # noqa: B027  # most keep nothing
        """Release what is kept between saves."""


def _copy(loaded: Mapping[str, torch.Tensor], targets: State) -> None:
    # One call for all, because 20,000 from Python would count against the peer.
    torch._foreach_copy_(list(targets.values()), [loaded[name] for name in targets])


class Ours(Peer):
    name = OURS
    settings = "what a Trainer calls: save_checkpoint, and load_checkpoint into the model, checksums verified"

    def __init__(self) -> None:
        self._plugin = SnapshotCheckpointIO()

    def save(self, state: State, path: Path) -> None:
        self._plugin.save_checkpoint({"state_dict": state}, path)

    def load(self, path: Path, targets: State) -> None:
        by_path = {f"state_dict/{name}": value for name, value in targets.items()}
        self._plugin.read_next_checkpoint_into(lambda _: by_path)
        checkpoint = self._plugin.load_checkpoint(path)
        if any(checkpoint["state_dict"][name] is not target for name, target in targets.items()):
            raise SystemExit(f"{self.name}: expected a load in place, found a tensor elsewhere")

    def close(self) -> None:
        self._plugin.teardown()


class TorchSave(Peer):
    name = "torch.save"
    settings = "defaults, then a copy"

    def save(self, state: State, path: Path) -> None:
        torch.save(state, path)

    def load(self, path: Path, targets: State) -> None:
        _copy(torch.load(path, weights_only=True), targets)


class TorchSaveTuned(Peer):
    name = "torch.save, tuned"
    settings = "no CRC-32 on save; torch.load(mmap=True), then a copy"

    def save(self, state: State, path: Path) -> None:
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(state, path)
        finally:
            torch.serialization.set_crc32_options(True)

    def load(self, path: Path, targets: State) -> None:
        _copy(torch.load(path, mmap=True, weights_only=True), targets)


class LightningDefault(Peer):
    name = "Lightning's default"
    settings = "TorchCheckpointIO, then a copy, as load_state_dict makes"

    def __init__(self) -> None:
        self._plugin = TorchCheckpointIO()

    def save(self, state: State, path: Path) -> None:
        self._plugin.save_checkpoint({"state_dict": state}, str(path))

    def load(self, path: Path, targets: State) -> None:
        _copy(self._plugin.load_checkpoint(str(path), weights_only=True)["state_dict"], targets)


class Safetensors(Peer):
    name = "safetensors"
    settings = "load_file, then a copy"

    def save(self, state: State, path: Path) -> None:
        save_file(state, path)

    def load(self, path: Path, targets: State) -> None:
        _copy(load_file(path), targets)


class SafetensorsByTensor(Safetensors):
    name = "safetensors, one by one"
    settings = "safe_open; each tensor is copied as soon as it is read"

    def load(self, path: Path, targets: State) -> None:
        with safe_open(path, framework="pt") as file:
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))


class DistributedCheckpoint(Peer):
    def __init__(self, threads: int) -> None:
        self.name = f"DCP, {threads} thread{'s' if threads > 1 else ''}"
        self.settings = f"FileSystemWriter(thread_count={threads}), no_dist; loads in place"
        self._threads = threads

    def save(self, state: State, path: Path) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=self._threads)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, path: Path, targets: State) -> None:
        dcp.load(targets, storage_reader=dcp.FileSystemReader(path), no_dist=True)


class TorchSnapshot(Peer):
    name = "torchsnapshot"
    settings = "Snapshot.take and restore, defaults; loads in place"

    def save(self, state: State, path: Path) -> None:
        torchsnapshot.Snapshot.take(str(path), {"app": torchsnapshot.StateDict(**state)})

    def load(self, path: Path, targets: State) -> None:
        torchsnapshot.Snapshot(str(path)).restore({"app": torchsnapshot.StateDict(**targets)})


class TorchCheckpointing(Peer):
    name = "torch_checkpointing"
    settings = "synchronous, use_direct_io=False (the default fails on ext4); loads through a copy of its own"

    def __init__(self, parts: int = 1) -> None:
        if parts > 1:
            self.name = f"torch_checkpointing, {parts} items"
            self.settings = f"as above, the state in {parts} items of equal size, file_write_max_threads={parts}"
        self._parts = parts
        writer = CheckpointWriterConfig(file_write_max_threads=parts)
        config = CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(writer_config=writer),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = CheckpointManager(config)

    def save(self, state: State, path: Path) -> None:
        self._manager.save(str(path), self._items(state))

    def load(self, path: Path, targets: State) -> None:
        self._manager.load(str(path), into=self._items(targets))

    def close(self) -> None:
        self._manager.close()

    def _items(self, state: State) -> dict[str, State]:
        names = list(state)
        step = -(-len(names) // self._parts)
        return {
            f"model{part}": {name: state[name] for name in names[part * step : (part + 1) * step]}
            for part in range(self._parts)
        }


def all_peers() -> list[Peer]:
    """Everybody, us first."""
    return [
        Ours(),
        TorchSave(),
        TorchSaveTuned(),
        LightningDefault(),
        Safetensors(),
        SafetensorsByTensor(),
        DistributedCheckpoint(1),
        DistributedCheckpoint(4),
        TorchSnapshot(),
        TorchCheckpointing(),
        TorchCheckpointing(parts=4),
    ]


def warm_up(peers: Sequence[Peer], folder: Path) -> None:
    """Let everybody import what it imports at the first save and load, and start its threads."""
    state = one_tensor(4096)
    for peer in peers:
        peer.save(state, folder / "warm-up")
        peer.load(folder / "warm-up", targets_of(state))
        remove(folder / "warm-up")


def open_with_us(path: Path) -> int:
    """Number of entries of a snapshot, as we count them."""
    return len(Snapshot(path).get_manifest())


def open_with_torchsnapshot(path: Path) -> int:
    """Number of entries of a snapshot, as torchsnapshot counts them."""
    return len(torchsnapshot.Snapshot(str(path)).get_manifest())
