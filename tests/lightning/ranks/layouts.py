"""One small model, trained in whole or spread over ranks in every way that Lightning knows, and its state as a whole.

All ranks see the same batches, so that each layout computes the same steps as a single device.
"""

import copy
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_snapshot import SnapshotCheckpointIO
from tests.lightning.models import difference
from tests.lightning.ranks.worlds import heard_warnings, join_world, make_trainer, pl_of

_ITEMS = 16


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    items = [(torch.randn(6, generator=generator), torch.randn(3, generator=generator)) for _ in range(_ITEMS)]
    return DataLoader(items, batch_size=4)


class _Spread:
    """Has layers of 10, 3 and 1 rows, a buffer, and an optimizer with two groups, or two optimizers."""

    def __init__(self, layout: str, seed: int, *, two_optimizers: bool) -> None:
        super().__init__()
        self.layout = layout
        self.automatic_optimization = not two_optimizers
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
            self.scale = nn.Linear(1, 1, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if self.layout in ("tp", "2d") and not hasattr(self.net[0].weight, "placements"):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, mesh["tensor_parallel"], plan)
        if self.layout in ("fsdp2", "2d", "hsdp"):
            group = mesh if self.layout == "hsdp" else mesh["data_parallel"]
            for part in (self.net[0], self.net[2], self.net, self.scale):
                fully_shard(part, mesh=group)

    def on_train_start(self):
        # Before the first step, torch would make one to have a state to give.
        self.state_at_start = whole_state(self.trainer) if self.trainer.global_step else None

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = nn.functional.mse_loss(self.net(batch[0]) * self.scale(torch.ones(1)), batch[1])
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        biases = [parameter for name, parameter in self.named_parameters() if name.endswith("bias")]
        weights = [self.net[0].weight, self.net[2].weight]
        scale = list(self.scale.parameters())
        if self.automatic_optimization:
            return torch.optim.AdamW([{"params": biases}, {"params": weights + scale, "lr": 0.02}], lr=0.01)
        groups = [{"params": biases}, {"params": weights, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(scale, lr=0.01, momentum=0.9)

    def train_dataloader(self):
        return batches()


class LightningSpread(_Spread, lightning.pytorch.LightningModule): ...


class PytorchLightningSpread(_Spread, pytorch_lightning.LightningModule): ...


def module(name: str, layout: str, seed: int = 1, *, two_optimizers: bool = False) -> Any:
    cls = {"lightning": LightningSpread, "pytorch_lightning": PytorchLightningSpread}[name]
    return cls(layout, seed, two_optimizers=two_optimizers)


def _strategy(name: str, layout: str, world_size: int, **arguments: Any) -> Any:
    strategies = pl_of(name).strategies
    if layout == "fsdp1":
        return fsdp1(name, **arguments)
    if layout == "plain":
        return "auto"  # which is DDP for several ranks
    sizes = {"fsdp2": (world_size, 1), "tp": (1, world_size), "2d": (2, world_size // 2), "hsdp": (2, world_size // 2)}
    data, tensor = sizes[layout]
    return strategies.ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, **arguments)


def fsdp1(name: str, **arguments: Any) -> Any:
    """FSDPStrategy without a GPU: Lightning refuses the class itself, and torch needs a device to be named."""
    base = pl_of(name).strategies.FSDPStrategy

    class FSDPOnCPU(base):
        def _setup_model(self, model: nn.Module) -> nn.Module:
            from torch.distributed.fsdp import FullyShardedDataParallel

            if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
                return model
            kwargs = {"sharding_strategy": self.sharding_strategy, **self.kwargs}
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **kwargs)

    return FSDPOnCPU(**{"auto_wrap_policy": {nn.Linear}, **arguments})


def trainer_for(name: str, folder: Path, layout: str, **arguments: Any) -> Any:
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    arguments = {"use_distributed_sampler": False, "strategy": _strategy(name, layout, world_size), **arguments}
    return make_trainer(name, folder, **arguments)


def fit(name: str, folder: Path, layout: str, max_epochs: int, ckpt_path: Any = None, **arguments: Any) -> Any:
    """A Trainer after a fit. A model that is loaded starts from other weights than the one that was saved."""
    trainer = trainer_for(name, folder, layout, max_epochs=max_epochs, **arguments)
    trainer.fit(module(name, layout, seed=1 if ckpt_path is None else 99), ckpt_path=ckpt_path)
    return trainer


def whole_state(trainer: Any) -> dict[str, Any]:
    """Model and optimizers as if they had never been spread: place → tensor, and the groups; a collective."""
    model = trainer.strategy.model
    whole = StateDictOptions(full_state_dict=True)
    optimizers = [get_optimizer_state_dict(model, optimizer, options=whole) for optimizer in trainer.optimizers]
    tensors = {("model", name): value.clone() for name, value in get_model_state_dict(model, options=whole).items()}
    for number, optimizer in enumerate(optimizers):
        for name, state in optimizer["state"].items():
            tensors |= {(f"optimizer {number}", name, key): value.clone() for key, value in state.items()}
    groups = [copy.deepcopy(optimizer["param_groups"]) for optimizer in optimizers]
    return {"tensors": dict(sorted(tensors.items())), "groups": groups}


# --- what ranks do ---------------------------------------------------------------------------------------------------


def save_each(rank: int, name: str, folder: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """Train an epoch in each layout, and save."""
    _, world_size = join_world()
    states = {}
    for layout in layouts:
        trainer = fit(name, folder, layout, 1)
        trainer.save_checkpoint(folder / f"{layout}-{world_size}.ckpt")
        states[f"{layout}-{world_size}"] = whole_state(trainer)
    return states


def continue_each(rank: int, name: str, folder: Path, pairs: Sequence[tuple[str, str]]) -> dict[Any, Any]:
    """Train one more epoch, for each pair of a snapshot and a layout; the state before and after that."""
    join_world()
    states = {}
    for source, layout in pairs:
        trainer = fit(name, folder, layout, 2, folder / f"{source}.ckpt")
        states[source, layout] = trainer.lightning_module.state_at_start, whole_state(trainer), trainer.global_step
    return states


def resume_two_optimizers(rank: int, name: str, folder: Path, layout: str) -> dict[str, Any]:
    """Save and resume with manual optimization, before and after the first step."""
    join_world()

    def run(max_epochs: int, ckpt_path: Any = None) -> Any:
        trainer = trainer_for(name, folder, layout, max_epochs=max_epochs)
        trainer.fit(module(name, layout, 1 if ckpt_path is None else 99, two_optimizers=True), ckpt_path=ckpt_path)
        return trainer

    class SaveAtStart(pl_of(name).Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(folder / "start.ckpt")

    trainer = trainer_for(name, folder, layout, max_epochs=1, callbacks=[SaveAtStart()])
    trainer.fit(module(name, layout, two_optimizers=True))
    trainer.save_checkpoint(folder / "a.ckpt")
    expected = whole_state(run(2))
    return {
        "from the middle": difference(whole_state(run(2, folder / "a.ckpt")), expected),
        "from the start": difference(whole_state(run(2, folder / "start.ckpt")), expected),
    }


class CountingCheckpointIO(SnapshotCheckpointIO):
    """Counts how often it is told that a training has ended."""

    teardowns = 0

    def teardown(self) -> None:
        super().teardown()
        self.teardowns += 1


def tour(rank: int, name: str, folder: Path, layout: str) -> dict[str, Any]:
    """Evaluate from a snapshot, save weights only, load what the strategy itself saves, raise on one rank."""
    join_world()
    # Other than by default, which the other tests have: it makes no difference.
    arguments = {"fsdp1": {"state_dict_type": "sharded"}, "fsdp2": {"save_distributed_checkpoint": False}}[layout]
    strategy = partial(_strategy, name, layout, 2, **arguments)
    plugin = CountingCheckpointIO()
    trainer = fit(name, folder, layout, 1, strategy=strategy(), plugins=[plugin])
    teardowns = plugin.teardowns
    trainer.save_checkpoint(folder / "a.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    expected = whole_state(trainer)

    evaluating = trainer_for(name, folder, layout)
    model = module(name, layout, 99)
    evaluating.validate(model, batches(), ckpt_path=folder / "a.ckpt", verbose=False)
    found: dict[str, Any] = {
        "evaluated": difference(whole_state(evaluating)["tensors"], _of_model(expected)),
        "teardowns": teardowns,
    }
    evaluating.validate(module(name, layout, 99), batches(), ckpt_path=folder / "weights.ckpt", verbose=False)
    found["weights only"] = difference(whole_state(evaluating)["tensors"], _of_model(expected))
    try:
        fit(name, folder, layout, 2, folder / "weights.ckpt")
    except KeyError as error:
        found["fit from weights"] = str(error)

    stock = fit(name, folder, layout, 1, strategy=strategy(), plugins=[])
    stock.save_checkpoint(folder / "stock.ckpt")
    resumed = fit(name, folder, layout, 1, folder / "stock.ckpt", strategy=strategy())
    # What Lightning saves as one file has lists in place of tuples in its groups.
    found["stock"] = difference(whole_state(resumed)["tensors"], expected["tensors"])
    found["files"] = sorted(path.name for path in folder.iterdir())

    class OneFails(type(model)):
        def training_step(self, batch, batch_idx):
            if rank == 1 and batch_idx == 2:
                raise ValueError("the user's own words")
            return super().training_step(batch, batch_idx)

    checkpoint = pl_of(name).callbacks.OnExceptionCheckpoint(folder, "failed")
    failing = trainer_for(name, folder, layout, max_epochs=1, callbacks=[checkpoint])
    with heard_warnings() as texts:
        try:
            failing.fit(OneFails(layout, 1, two_optimizers=False))
        except (RuntimeError, ValueError) as error:
            found["error"] = repr(error)
    found["texts"] = texts
    (folder / f"{rank}.txt").write_text(json.dumps(found))
    os._exit(1)


def _of_model(state: dict[str, Any]) -> dict[Any, Any]:
    return {place: value for place, value in state["tensors"].items() if place[0] == "model"}
