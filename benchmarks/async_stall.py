"""Saves that go on behind training: how long training waits, when the snapshot is durable, what a training loop loses.

*Stall* is the time until the parameters may change again. *Complete* is the time from the call until everything is
durable; peers that do not sync are synced by us, as soon as they have ended. All save again and again, so what they
keep from one save to the next is warm; the first save of each does not count.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed.checkpoint as dcp
from common import OURS, State, middle, seconds, span
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from peers import torchsnapshot
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from lightning_snapshot import Snapshot, SnapshotCheckpointIO

_STEPS = 50
_EVERY = 5
_TOKENS = 32
_SYNC, _ASYNC, _OVERLAP = (f"{OURS}, {mode}" for mode in ("sync", "async", "overlap"))


class Peer(ABC):
    """Saves a state behind training.

    Attributes:
        name: In tables.
        syncs: Whether what it has written is durable at the end.
    """

    name: str
    syncs = False

    @abstractmethod
    def begin(self, state: State, path: Path) -> Callable[[], object]:
        """Save; when this returns, the tensors may change. What it gives back waits for the end."""

    def close(self) -> None:  # noqa: B027  # most keep nothing
        """Release what is kept between saves."""


class Ours(Peer):
    syncs = True

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name = name
        self.plugin = SnapshotCheckpointIO(**arguments)
        self._optimizers: list[torch.optim.Optimizer] = []
        self.plugin.behind.optimizers = lambda: self._optimizers

    def begin(self, state: State, path: Path) -> Callable[[], object]:
        if not self._optimizers:
            self._optimizers.append(torch.optim.SGD(state.values()))
        self.plugin.save_checkpoint({"state_dict": state}, path)
        return self.plugin.wait

    def close(self) -> None:
        self.plugin.teardown()


class Lightning(Peer):
    name = "Lightning's AsyncCheckpointIO"

    def __init__(self) -> None:
        self._plugin = AsyncCheckpointIO(TorchCheckpointIO())
        self._plugin._ensure_setup()

    def begin(self, state: State, path: Path) -> Callable[[], object]:
        self._plugin.save_checkpoint({"state_dict": state}, str(path))
        # One thread, so what comes last ends last.
        return self._plugin._executor.submit(lambda: None).result

    def close(self) -> None:
        self._plugin.teardown()


class Torchsnapshot(Peer):
    name = "torchsnapshot, async_take"

    def begin(self, state: State, path: Path) -> Callable[[], object]:
        return torchsnapshot.Snapshot.async_take(str(path), {"app": torchsnapshot.StateDict(**state)}).wait


class Distributed(Peer):
    name = "DCP, async_save"

    def __init__(self, *, keeps_stager: bool) -> None:
        self._stager = None
        if keeps_stager:
            self.name = "DCP, async_save, stager kept"
            options = StagingOptions(use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False)
            self._stager = DefaultStager(options)

    def begin(self, state: State, path: Path) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(path, thread_count=4)
        answer: Any = dcp.async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        return (answer if isinstance(answer, Future) else answer.upload_completion).result

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class TorchCheckpointing(Peer):
    name = "torch_checkpointing, async, 4 items"

    def __init__(self) -> None:
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=4)),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = CheckpointManager(config)

    def begin(self, state: State, path: Path) -> Callable[[], object]:
        names = list(state)
        step = -(-len(names) // 4)
        parts = {f"model{n}": {name: state[name] for name in names[n * step : (n + 1) * step]} for n in range(4)}
        future = self._manager.save(str(path), parts)
        with self._manager.lock():  # staging goes on until then
            pass
        if future is None:
            raise SystemExit(f"{self.name}: expected a future")
        return future.result

    def close(self) -> None:
        self._manager.close()


def all_peers() -> list[Peer]:
    """Everybody, us first."""
    return [
        Ours(_SYNC),
        Ours(_ASYNC, async_save=True),
        Ours(_OVERLAP, overlap=True),
        Lightning(),
        Torchsnapshot(),
        Distributed(keeps_stager=False),
        Distributed(keeps_stager=True),
        TorchCheckpointing(),
    ]


# --- plain calls -----------------------------------------------------------------------------------------------------


def _measure(peer: Peer, state: State, path: Path, samples: Mapping[tuple[str, str], list[float]]) -> None:
    common.remove(path)
    common.drop_page_cache(path.parent)
    begin = time.perf_counter()
    wait = peer.begin(state, path)
    stall = time.perf_counter() - begin
    wait()
    if isinstance(peer, Ours):
        # Behind a step that takes longer than the write, there is nothing left to copy; what the fence costs counts.
        stall += seconds(peer.plugin.behind.fence)
    if not peer.syncs:
        common.sync_tree(path)
    samples[peer.name, "stall"].append(stall)
    samples[peer.name, "complete"].append(time.perf_counter() - begin)


def _warm_copy(state: State, samples: list[float]) -> Callable[[], None]:
    targets = common.targets_of(state)

    def run() -> None:
        samples.append(seconds(lambda: torch._foreach_copy_(list(targets.values()), list(state.values()))))

    return run


# --- a training loop -------------------------------------------------------------------------------------------------


class _Blocks(LightningModule):
    """Transformer blocks, trained with plain SGD on one thread, so that the other core is free for saves."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = max(64, round(1024 * scale**0.5 / 64) * 64)
        self.width = width
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(12))
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(_STEPS, _TOKENS, self.width), batch_size=1)


def _train(plugin: Any, scale: float, folder: Path) -> float:
    gc.collect()
    callbacks = [ModelCheckpoint(folder / "kept", every_n_train_steps=_EVERY, save_top_k=1)] if plugin else []
    trainer = Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        devices=1,
        enable_checkpointing=bool(plugin),
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_steps=_STEPS,
        plugins=[plugin] if plugin else [],
    )
    module = _Blocks(scale)
    common.drop_page_cache(folder)
    taken = seconds(lambda: trainer.fit(module))
    common.remove(folder / "kept")
    return taken


def _loops(scale: float, folder: Path, samples: Mapping[str, list[float]]) -> Sequence[tuple[str, Callable[[], None]]]:
    plugins: dict[str, Callable[[], Any]] = {
        "no saves": lambda: None,
        "Lightning's default": TorchCheckpointIO,
        _SYNC: SnapshotCheckpointIO,
        _ASYNC: partial(SnapshotCheckpointIO, async_save=True),
        _OVERLAP: partial(SnapshotCheckpointIO, overlap=True),
    }
    return [
        (f"{_STEPS} steps, {name}", lambda name=name, make=make: samples[name].append(_train(make(), scale, folder)))
        for name, make in plugins.items()
    ]


def main() -> None:
    """Run it."""
    arguments = common.parse_arguments(__doc__ or "")
    torch.set_num_threads(max(1, torch.get_num_threads()))
    state = common.state_a(arguments.scale)
    size = common.size_of(state)
    everybody = all_peers()
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    copies: list[float] = []
    loops: dict[str, list[float]] = defaultdict(list)
    with common.scratch(arguments.dir) as folder:
        path = folder / "checkpoint"
        warm_copy = _warm_copy(state, copies)
        for peer in everybody:
            _measure(peer, state, path, defaultdict(list))
        warm_copy()
        copies.clear()
        runs = [(peer.name, partial(_measure, peer, state, path, samples)) for peer in everybody]
        common.alternate(arguments.rounds, [("a warm copy", warm_copy), *runs])
        _check(everybody, state, path)
        for peer in everybody:
            peer.close()
        common.remove(path)
        torch.set_num_threads(1)
        common.alternate(arguments.rounds, _loops(arguments.scale, folder, loops))
    _report(arguments, size, [peer.name for peer in everybody], samples, copies, loops)


def _check(everybody: Sequence[Peer], state: State, path: Path) -> None:
    for peer in everybody:
        if isinstance(peer, Ours):
            common.remove(path)
            peer.begin(state, path)()
            common.check_equal(peer.name, Snapshot(path).get_state_dict_for_key("state_dict"), state)


def _report(
    arguments: Any,
    size: int,
    names: Sequence[str],
    samples: Mapping[tuple[str, str], list[float]],
    copies: list[float],
    loops: Mapping[str, list[float]],
) -> None:
    copy = middle(copies)
    stall = {name: middle(samples[name, "stall"]) for name in names}
    complete = {name: middle(samples[name, "complete"]) for name in names}
    others = [name for name in names if not name.startswith(OURS)]
    plain = middle(loops["no saves"])
    slowdown = {name: 100 * (middle(each) / plain - 1) for name, each in loops.items()}
    ratios = {
        "stall_vs_copy": stall[_ASYNC] / copy,
        "stall_vs_best_peer": stall[_ASYNC] / min(stall[name] for name in others),
        "overlap_stall_vs_sync": stall[_OVERLAP] / stall[_SYNC],
        "async_speed_vs_sync": complete[_SYNC] / complete[_ASYNC],
        "slowdown_percent": slowdown[_OVERLAP],
    }
    calls = common.table(
        ["", "stall s", "complete s", "complete GB/s"],
        [["a warm copy in memory", span(copies, 3), "", ""]]
        + [
            [
                name,
                span(samples[name, "stall"], 3),
                span(samples[name, "complete"], 2),
                f"{size / complete[name] / 1e9:.2f}",
            ]
            for name in names
        ],
    )
    steps = common.table(
        [f"{_STEPS} steps, a save every {_EVERY}", "seconds", "slower by"],
        [[name, span(each, 1), f"{slowdown[name]:.1f} %"] for name, each in loops.items()],
    )
    rows = [
        *(
            {"name": each, "stall_seconds": samples[each, "stall"], "complete_seconds": samples[each, "complete"]}
            for each in names
        ),
        {"name": "warm copy", "seconds": copies},
        *({"name": name, "loop_seconds": each} for name, each in loops.items()),
    ]
    common.report("async_stall", arguments, f"{calls}\n\n{steps}", rows, ratios)


if __name__ == "__main__":
    main()
