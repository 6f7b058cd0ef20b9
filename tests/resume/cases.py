"""Runs that are saved, stopped and resumed, compared with runs that were left alone; what the ranks of the tests do."""

import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_snapshot import SnapshotCallback, SnapshotCheckpointIO
from tests.lightning.models import difference
from tests.lightning.ranks.layouts import fsdp1
from tests.lightning.ranks.worlds import join_world, make_trainer, pl_of

LITDATA = Path(__file__).parents[2] / ".interop" / "litdata"
SAMPLES = 24
BATCH_SIZE = 2
EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. Its ``kind`` is one of `_CALLBACKS`, or "ends early"."""

    loader: str = "plain"
    sampler: str = "random"
    workers: int = 0
    ranks: int = 1
    moment: str = "mid-epoch"
    is_async: bool = False
    namespace: str = "lightning"
    strategy: str = "plain"
    trainer: tuple[tuple[str, Any], ...] = ()
    callback: tuple[tuple[str, Any], ...] = ()
    kind: str = ""

    def __str__(self) -> str:
        parts = [self.loader, self.sampler, f"{self.workers}w", f"{self.ranks}r", self.moment]
        parts += ["async"] * self.is_async + [self.namespace] * (self.namespace != "lightning")
        parts += [self.strategy] * (self.strategy != "plain") + [self.kind] * (self.kind != "")
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.trainer)]).replace(" ", "-")


def join() -> tuple[int, int]:
    """Join the ranks, with forks for the workers of data loaders: as this process began, each would import all anew."""
    multiprocessing.set_start_method("fork", force=True)
    return join_world()


# --- data ------------------------------------------------------------------------------------------------------------


class Numbers(Dataset):
    """Gives the number of a sample, and something random for it."""

    def __init__(self, is_random: bool = True) -> None:
        self._is_random = is_random

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(3) + np.random.rand() + random.random() if self._is_random else torch.zeros(3)  # noqa: NPY002 - the global generator is what is tested
        return {"id": index, "x": (noise + index / SAMPLES).float()}


class Stream(IterableDataset):
    """Gives as many samples on each rank and in each worker, with a position to come back to."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._rank = _rank()
        self._position = 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first = 100 * self._rank + (0 if worker is None else 1000 * (worker.id + 1))
        while self._position < self._samples:
            self._position += 1
            yield {"id": first + self._position, "x": torch.rand(3) + self._position}
        self._position = 0

    def state_dict(self):
        return {"position": self._position}

    def load_state_dict(self, state):
        self._position = state["position"]


class Counting:
    """A loader of nobody's kind, with a state, that begins anew at each ``iter`` but the first after a load."""

    def __init__(self) -> None:
        self._position = self._coming = 0

    def __iter__(self):
        self._position, self._coming = self._coming, 0
        return self

    def __next__(self):
        if self._position == SAMPLES // BATCH_SIZE:
            self._position = 0
            raise StopIteration
        self._position += 1
        return {"id": torch.tensor([self._position]), "x": torch.rand(1, 3)}

    def state_dict(self):
        return {"position": self._position}

    def load_state_dict(self, state):
        self._coming = state["position"]


class CountingWithLength(Counting):
    """Lightning reads this one no further than its length, so it never comes to its end."""

    def __len__(self):
        return SAMPLES // BATCH_SIZE


class BatchesOfNumpy(Sampler):
    """Takes its order from numpy, when it begins."""

    def __iter__(self):
        return iter(np.random.permutation(SAMPLES // _ranks()).reshape(-1, BATCH_SIZE).tolist())  # noqa: NPY002 - as above

    def __len__(self):
        return SAMPLES // BATCH_SIZE // _ranks()


def _rank() -> int:
    return distributed.get_rank()


def _ranks() -> int:
    return distributed.get_world_size()


def loaders_of(case: Case) -> Any:
    """The training loaders."""
    if case.loader == "several":
        mode = case.sampler
        from importlib import import_module

        combined = import_module(f"{pl_of(case.namespace).__name__}.utilities.combined_loader").CombinedLoader
        short = DataLoader(Numbers(), batch_size=BATCH_SIZE, shuffle=True, sampler=None, num_workers=case.workers)
        subset = torch.utils.data.Subset(Numbers(), range(10))
        return combined([DataLoader(subset, batch_size=BATCH_SIZE, shuffle=True), short], mode)
    if case.loader == "nodes":
        sampler = DistributedSampler(Numbers()) if case.sampler == "distributed" else RandomSampler(Numbers())
        node = nodes.SamplerWrapper(sampler)
        node = nodes.ParallelMapper(node, Numbers(False).__getitem__, num_workers=case.workers, method="thread")
        return nodes.Loader(nodes.ParallelMapper(nodes.Batcher(node, BATCH_SIZE), _collate, num_workers=0))
    if case.loader == "litdata":
        return _litdata(case)
    if case.loader == "own":
        return CountingWithLength() if case.sampler == "with length" else Counting()
    cls = {"plain": DataLoader, "stateful": StatefulDataLoader}[case.loader]
    how: dict[str, Any] = {"num_workers": case.workers}
    data: Any = Numbers()
    if case.sampler == "batches":
        return cls(data, batch_sampler=BatchesOfNumpy(), **how)
    if "persistent" in case.sampler:
        how |= {"persistent_workers": True, "prefetch_factor": 3}
    if "rare states" in case.sampler:
        how["snapshot_every_n_steps"] = 3
    if "stream" in case.sampler:
        data = Stream(40 if "long" in case.sampler else 12)
    elif case.sampler in ("random", "persistent", "rare states"):
        how["shuffle"] = True
    elif case.sampler == "generator":
        how |= {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
    elif case.sampler == "weighted":
        how["sampler"] = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)
    elif case.sampler == "distributed":
        how["sampler"] = DistributedSampler(data, num_replicas=case.ranks, rank=_rank(), seed=5)
    elif case.sampler == "unbatched":
        return cls(data, batch_size=None, sampler=RandomSampler(data), **how)
    else:
        how["sampler"] = SequentialSampler(data)
    return cls(data, batch_size=BATCH_SIZE, drop_last=case.sampler == "random", **how)


def _litdata(case: Case) -> Any:
    assert LITDATA.is_dir(), "run `make interop`"
    if str(LITDATA) not in sys.path:
        sys.path.append(str(LITDATA))
    import litdata

    data = litdata.StreamingDataset(_litdata_folder(), shuffle=case.sampler == "random")
    return litdata.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=case.workers)


@lru_cache(maxsize=1)
def _litdata_folder() -> str:
    from litdata.streaming.cache import Cache

    cache = Cache("litdata", chunk_size=4)
    share = SAMPLES // _ranks()
    for index in range(share):
        cache[index] = {"id": share * _rank() + index, "x": torch.full((3,), index / SAMPLES)}
    cache.done()
    cache.merge()
    return "litdata"


def _collate(samples):
    return torch.utils.data.default_collate(samples)


# --- a module that notices everything --------------------------------------------------------------------------------


class _Noticing:
    """Has dropout, random transforms of batches, metrics of all kinds, and a list of what it has seen."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.mean = torchmetrics.MeanMetric()
        self.kept = torchmetrics.SumMetric()
        self.kept.persistent(True)
        self.of_validation = torchmetrics.MeanMetric()
        self.register_buffer("average", torch.zeros(()))
        self.seen: list[Any] = []
        self.values: list[Any] = []
        self.validated: list[Any] = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batches = [part for part in (batch if isinstance(batch, (list, tuple)) else [batch]) if part is not None]
        ids = [torch.as_tensor(part["id"]).flatten().tolist() for part in batches]
        x = torch.cat([part["x"].reshape(-1, 3) for part in batches])
        return {"ids": ids, "x": x + 0.1 * torch.rand_like(x)}

    def configure_model(self):
        if self.case.strategy.startswith("fsdp2"):
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=self._device_mesh["data_parallel"])
        if self.case.strategy == "tp":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self._device_mesh["tensor_parallel"], plan)

    def training_step(self, batch, batch_idx):
        if self.case.strategy == "fsdp2 late":
            self.net.set_requires_gradient_sync((batch_idx + 1) % self.trainer.accumulate_grad_batches == 0)
        self.seen.append(batch["ids"])
        loss = self.net(batch["x"]).square().mean()
        count = len(batch["x"])
        many = self.case.ranks > 1
        self.mean.update(loss.detach())
        self.kept.update(loss.detach() * (1 + self.global_rank))
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.log("loss", loss, on_epoch=True, on_step=True, batch_size=count, sync_dist=many)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx=max, batch_size=count)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.case.kind == "ends early" and batch_idx == 7 else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch.rand(1)
        self.average.lerp_(torch.full_like(self.average, self.global_step + batch_idx), 0.1)

    def on_train_epoch_end(self):
        self.values.append(("train", float(self.kept.compute()), float(self.trainer.callback_metrics["loss_epoch"])))
        self.kept.reset()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["ids"])
        value = self.net(batch["x"]).mean() + torch.rand(())
        self.of_validation.update(value)
        self.log("of_validation", self.of_validation)
        self.log("val", value, batch_size=len(batch["x"]), sync_dist=self.case.ranks > 1)

    def on_validation_epoch_start(self):
        self.validated = []

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.values.append(("val", float(self.of_validation.compute()), self.validated))

    def on_train_start(self):
        torch.rand(1)

    def on_train_epoch_start(self):
        torch.rand(1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches if "early" in self.case.moment else 1000
        cycle = OneCycleLR(optimizer, 0.1, total_steps=int(min(total, 1000)))
        # These take their steps after callbacks have saved.
        late = [
            {"scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.9), "monitor": f"loss_{of}", "interval": of}
            for of in ("step", "epoch")
        ]
        return [optimizer], [cycle, *late]

    def train_dataloader(self):
        return loaders_of(self.case)

    def val_dataloader(self):
        return DataLoader(Numbers(), batch_size=4, shuffle=True)


# A bucket holds some 100 bytes of gradients in the first of these, and all in the other.
_DDP: dict[str, dict[str, Any]] = {
    "many buckets": {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}


def _strategy_of(case: Case) -> Any:
    if case.strategy == "plain":
        return "ddp" if case.ranks > 1 else "auto"
    if case.strategy == "fsdp1":
        return fsdp1(case.namespace)
    strategies = pl_of(case.namespace).strategies
    if case.strategy in _DDP:
        return strategies.DDPStrategy(**_DDP[case.strategy])
    sizes = (1, case.ranks) if case.strategy == "tp" else (case.ranks, 1)
    return strategies.ModelParallelStrategy(*sizes)


def module_of(case: Case) -> Any:
    base = pl_of(case.namespace).LightningModule
    return type("Noticing", (_Noticing, base), {})(case)


# --- runs ------------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """Ends a run."""


@dataclass
class Run:
    """What a run has seen, had at the save, and has in the end."""

    module: Any
    trainer: Any
    seen_at_save: int = -1
    values_at_save: int = -1
    end: dict[str, Any] = field(default_factory=dict)


def _saver(pl: Any, run: Run, path: Path, case: Case) -> Any:
    """A callback that saves at the moment of the case, and stops the run a little later."""
    moment = case.moment.removeprefix("early ")

    class Saver(pl.callbacks.Checkpoint):
        def _save(self, trainer):
            if run.seen_at_save < 0:
                run.seen_at_save, run.values_at_save = len(run.module.seen), len(run.module.values)
                trainer.save_checkpoint(path)

        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == {"epoch start": 1, "first epoch": 0}.get(moment):
                self._save(trainer)

        def on_train_batch_start(self, trainer, *_):
            if 0 <= run.seen_at_save < len(run.module.seen):
                raise StoppedError

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if moment == "mid-epoch" and trainer.current_epoch == 1 and batch_idx == 2:
                self._save(trainer)
            if trainer.current_epoch == 1 and {"next epoch": 0, "second batch": 1}.get(moment) == batch_idx:
                self._save(trainer)
            if moment == "first batch" and batch_idx == 0:
                self._save(trainer)
            if (
                moment == "last batch"
                and trainer.current_epoch == 1
                and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            ):
                self._save(trainer)

        def on_train_epoch_end(self, trainer, module):
            if moment == "epoch end" and trainer.current_epoch == 1:
                self._save(trainer)

        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, *_):
            if moment == "mid-validation" and trainer.current_epoch == 1 and batch_idx == 1:
                self._save(trainer)

        def on_validation_end(self, trainer, module):
            if moment == "validation end" and trainer.current_epoch == 1:
                self._save(trainer)

    return Saver()


def _finetuning(pl: Any) -> list[Any]:
    """Callbacks that do something when the second epoch begins."""

    class Finetuning(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.make_trainable(module.net[0])

    return [Finetuning(), pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]


def _averaging(pl: Any) -> list[Any]:
    return [pl.callbacks.EMAWeightAveraging(decay=0.9)]


_CALLBACKS = {"finetuning": _finetuning, "averaging": _averaging}


def fit(
    case: Case,
    folder: Path,
    *,
    seed: int,
    ckpt_path: Path | None = None,
    saves_to: Path | None = None,
    make_module: Callable[[Case], Any] = module_of,
) -> Run:
    """Fit; in vain if the run is to be stopped."""
    pl = pl_of(case.namespace)
    pl.seed_everything(seed, verbose=False)
    module = make_module(case)
    run = Run(module, None)
    callbacks = [SnapshotCallback(**dict(case.callback)), *_CALLBACKS.get(case.kind, lambda _: [])(pl)]
    if saves_to is not None:
        callbacks.append(_saver(pl, run, saves_to, case))
    run.trainer = make_trainer(
        case.namespace,
        folder,
        callbacks=callbacks,
        plugins=[SnapshotCheckpointIO(async_save=case.is_async)],
        **{
            "max_epochs": EPOCHS,
            "strategy": _strategy_of(case),
            "use_distributed_sampler": case.sampler != "batches",
        }
        | dict(case.trainer),
    )
    try:
        run.trainer.fit(module, ckpt_path=ckpt_path)
    except StoppedError:
        return run
    run.end = _end(run)
    return run


# What runs that were left alone have seen, their values and their ends: they do not depend on when others are saved.
_whole: dict[Case, tuple[Any, ...]] = {}


def compare(rank: int, case: Case, folder: Path) -> str | None:
    """Compare a run that was left alone with one that was stopped and resumed; None if they are equal."""
    join()
    path = folder / "a.ckpt"
    alone = replace(case, moment="early" if "early" in case.moment else "", is_async=False)
    if alone not in _whole:
        run = fit(alone, folder, seed=1)
        _whole[alone] = run.module.seen, run.module.values, run.end
    stopped = fit(case, folder, seed=1, saves_to=path)
    if stopped.seen_at_save < 0:
        return "not saved"
    # Another seed: nothing may come from it.
    resumed = fit(case, folder, seed=2, ckpt_path=path)
    seen = stopped.module.seen[: stopped.seen_at_save] + resumed.module.seen
    values = stopped.module.values[: stopped.values_at_save] + resumed.module.values
    found = (seen, values, resumed.end)
    return next(filter(None, map(difference, found, _whole[alone], ("seen", "values", "end"))), None)


def compare_all(rank: int, cases: list[Case], folder: Path) -> list[str | None]:
    """Several cases in the same processes."""
    os.chdir(folder)
    found = []
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir(exist_ok=True)
        found.append(compare(rank, case, folder / str(number)))
    return found


def _end(run: Run) -> dict[str, Any]:
    trainer = run.trainer
    return {
        "weights": _own(run.module.state_dict()),
        "optimizers": [_own(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedulers": [_own(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "logged steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "metrics": _own(dict(trainer.callback_metrics)),
        "torch": torch.rand(3),
        "python": random.random(),
        "numpy": float(np.random.rand()),  # noqa: NPY002 - as above
    }


def _own(value: Any) -> Any:
    """A copy with this rank's parts of what is spread over ranks."""
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return getattr(value, "_local_tensor", value).detach().clone()
    return value
