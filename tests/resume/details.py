"""What the ranks of the smaller tests do."""

import contextlib
import copy
import io
import json
import os
import pickle
import random
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning.fabric
import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_snapshot import ResumeState, SnapshotCallback, SnapshotCheckpointIO, attach
from lightning_snapshot.errors import TargetMismatchError
from lightning_snapshot.integration.ranks import RESUME_KEY as KEY
from lightning_snapshot.integration.resume.passes import follow, settle
from tests.lightning.models import difference
from tests.lightning.ranks.worlds import heard_warnings, make_trainer, pl_of
from tests.resume import cases
from tests.resume.cases import Case, Numbers, Run, StoppedError, fit, join

# --- what other tests rely on ----------------------------------------------------------------------------------------


def asked_for_stacks(rank: int, folder: Path) -> bool:
    """Train twice, and be asked for stacks in the second training."""
    join()
    for _ in range(2):
        run = fit(Case(trainer=(("max_epochs", 1),)), folder, seed=1)
    make_trainer("lightning", folder)
    os.kill(os.getpid(), signal.SIGUSR1)
    return run.trainer.global_step > 0


# --- saving changes nothing ------------------------------------------------------------------------------------------


def saving_often(rank: int, folder: Path) -> str | None:
    """Compare a run that saves after each batch with one that never does, with hooks that draw numbers."""
    join()
    pl = pl_of("lightning")

    class Drawing(pl.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002 - the global generators

    class Often(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(folder / "often.ckpt")

    found = []
    for callbacks in ([], [Drawing(), Often()]):
        case = Case("stateful", "random")
        pl.seed_everything(1, verbose=False)
        run = Run(cases.module_of(case), None)
        trainer = run.trainer = make_trainer("lightning", folder, callbacks=callbacks, max_epochs=2, strategy="auto")
        trainer.fit(run.module)
        if callbacks:
            # Stock Lightning begins a pass over the loader to get its state.
            trainer.save_checkpoint(folder / "after.ckpt")
        found.append((run.module.seen, cases._end(run)))
    return difference(*found)


def ends_of_batches(rank: int, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Train twice, with two callbacks that save after the second batch of four, and one that fails after the fourth.

    Returns what was called in each batch, and which hooks are left in the way.
    """
    join()
    pl = pl_of("lightning")
    called: list[list[str]] = []

    class Saving(pl.callbacks.Checkpoint):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            called[-1].append("callback")
            if batch_idx == 3 and called[-1].count("callback") == 2:
                raise StoppedError
            if batch_idx in (1, 3):
                trainer.save_checkpoint(folder / "callback.ckpt")

    class Module(cases._Noticing, pl.LightningModule):
        def on_train_batch_start(self, batch, batch_idx):
            called.append([])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            called[-1].append("module")
            if batch_idx in (1, 2):
                self.trainer.save_checkpoint(folder / "module.ckpt")

    module, callbacks = Module(Case()), [Saving(), Saving()]
    for batches in (4, 3):
        trainer = make_trainer(
            "lightning", folder, callbacks=callbacks, max_epochs=1, strategy="auto", limit_train_batches=batches
        )
        with contextlib.suppress(StoppedError):
            trainer.fit(module)
    left = [name for each in (module, *callbacks) for name in vars(each) if name == "on_train_batch_end"]
    return called, left


def after_a_validation(rank: int, folder: Path, has_hook: bool) -> list[str]:
    """Save at the end of a validation, with or without a hook of the module that comes after that."""
    join()
    case = Case(moment="validation end")
    base = type(cases.module_of(case))
    cls = type("Late", (base,), {"on_validation_end": lambda self: None} if has_hook else {})
    with heard_warnings() as texts:
        fit(case, folder, seed=1, saves_to=folder / "a.ckpt", make_module=cls)
    return [text for text in texts if "on_validation_end" in text]


def asked_by_nobody(rank: int, folder: Path, moment: str, epochs: int) -> str | None:
    """Resume with a module that does not ask for metrics, but has schedulers that monitor those of an epoch."""
    join()
    case = Case(moment=moment, trainer=(("max_epochs", epochs),))

    class Late(type(cases.module_of(case))):
        def on_train_epoch_end(self):
            pass

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            how = {"monitor": "loss_epoch", "interval": "epoch"}
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
            return [optimizer], [{"scheduler": scheduler(optimizer), "frequency": each, **how} for each in (1, 2)]

    whole = fit(replace(case, moment=""), folder, seed=1, make_module=Late)
    fit(case, folder, seed=1, saves_to=folder / "a.ckpt", make_module=Late)
    resumed = fit(case, folder, seed=2, ckpt_path=folder / "a.ckpt", make_module=Late)
    return difference(resumed.end, whole.end)


def missing_metric(rank: int, folder: Path) -> tuple[list[str], int]:
    """Save at the end of an epoch, before the metric is logged that a scheduler needs."""
    join()
    pl = pl_of("lightning")

    class Saving(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(folder / "a.ckpt")

    class Logging(cases._Noticing, pl.LightningModule):
        def on_train_epoch_end(self):
            self.log("late", 1.0)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "late"}}

    for path in (None, folder / "a.ckpt"):
        trainer = make_trainer("lightning", folder, callbacks=[Saving()], max_epochs=3, strategy="auto")
        with heard_warnings() as texts:
            trainer.fit(Logging(Case()), ckpt_path=path)
    return [text for text in texts if "leaves out a step" in text], trainer.lr_scheduler_configs[0].scheduler.last_epoch


def stopped_by_sigterm(rank: int, folder: Path, case: Case) -> str | None:
    """Compare a run that was told to end, saved by Lightning's callback for that, with one that was left alone."""
    join()
    os.chdir(folder)
    pl = pl_of("lightning")
    modules = []

    class Stopped(type(cases.module_of(case))):
        def configure_callbacks(self):
            return [pl.callbacks.OnExceptionCheckpoint(folder, "a")]

        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.current_epoch == 1 and batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    def make_stopped(case):
        modules.append(Stopped(case))
        return modules[-1]

    whole = fit(case, folder, seed=1)
    with contextlib.suppress(SystemExit):  # from which Lightning derives what it raises
        fit(case, folder, seed=1, make_module=make_stopped)
    (stopped,) = modules
    resumed = fit(case, folder, seed=2, ckpt_path=folder / "a.ckpt")
    found = (stopped.seen + resumed.module.seen, stopped.values + resumed.module.values, resumed.end)
    return difference(found, (whole.module.seen, whole.module.values, whole.end))


# --- gradients -------------------------------------------------------------------------------------------------------


def stopped_twice(rank: int, folder: Path) -> str | None:
    """A run that is resumed, saved at the end of the same epoch, and resumed again."""
    os.chdir(folder)
    join()
    case = Case(ranks=3, strategy="many buckets")
    first, second = folder / "a.ckpt", folder / "b.ckpt"
    alone = fit(replace(case, moment=""), folder, seed=1)
    fit(case, folder, seed=1, saves_to=first)
    fit(replace(case, moment="epoch end"), folder, seed=2, ckpt_path=first, saves_to=second)
    return difference(fit(case, folder, seed=3, ckpt_path=second).end, alone.end, "end")


def open_window(rank: int, folder: Path, save_gradients: bool, strategy: str = "plain") -> tuple[str | None, list[str]]:
    """Save after two of four batches of a step."""
    join()
    case = _after_two_of_four(strategy, save_gradients)
    with heard_warnings() as texts:
        found = cases.compare(rank, case, folder)
    return found, [text for text in texts if "gradients" in text]


def other_layout(rank: int, folder: Path) -> list[str]:
    """Save in a window with parameters in parts, and resume with whole ones."""
    join()
    case = _after_two_of_four("fsdp2", True)
    fit(case, folder, seed=1, saves_to=folder / "a.ckpt")
    with heard_warnings() as texts:
        fit(replace(case, strategy="plain"), folder, seed=1, ckpt_path=folder / "a.ckpt")
    return texts


def _after_two_of_four(strategy: str, save_gradients: bool) -> Case:
    how = {"trainer": (("accumulate_grad_batches", 4),), "callback": (("save_gradients", save_gradients),)}
    return Case(moment="second batch", ranks=torch.distributed.get_world_size(), strategy=strategy, **how)


# --- loaders ---------------------------------------------------------------------------------------------------------


def copied_loader(rank: int, folder: Path) -> list[bool]:
    """What is a copy of a loader after a training."""
    join()
    loader = fit(Case(sampler="sequential"), folder, seed=1).trainer.train_dataloader
    copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    return [type(each) is DataLoader and len(list(each)) == len(loader) for each in copies]


def other_kind(rank: int, folder: Path) -> str:
    """Save with a plain loader, and resume with one that has a state."""
    join()
    path = folder / "a.ckpt"
    fit(Case(), folder, seed=1, saves_to=path)
    try:
        fit(Case("stateful"), folder, seed=1, ckpt_path=path)
    except TargetMismatchError as error:
        return str(error)
    return ""


def old_states(rank: int, folder: Path, sampler: str) -> list[str]:
    """Save at the end of an epoch with data sets in workers that live on."""
    join()
    case = Case("stateful", sampler, workers=2, moment="epoch end", trainer=(("limit_train_batches", 5),))
    with heard_warnings() as texts:
        fit(case, folder, seed=1, saves_to=folder / "a.ckpt")
    return [text for text in texts if "persistent workers" in text]


class Uneven(IterableDataset):
    """Two workers that give four and nine samples."""

    def __iter__(self):
        return iter(range((4, 9)[torch.utils.data.get_worker_info().id]))


def settled(rank: int) -> list[str]:
    """Settle after each number of batches, and compare what is read with what another loader gives."""
    join()
    found = []
    for cls, data, batches in product((DataLoader, StatefulDataLoader), (range(19), Uneven()), range(8)):
        loaders = [cls(data, batch_size=2, num_workers=2, persistent_workers=True) for _ in range(2)]
        follow(loaders[0])
        passes = iter(loaders[0])
        read = [next(passes) for _ in range(batches)]
        settle(loaders[0])
        texts = [str([*read, *passes]), str(list(loaders[0]))]
        found += [f"{cls.__name__}, {data}, {batches}: {text}" for text in texts if text != str(list(loaders[1]))]
    return found


def bytes_in_a_state(rank: int) -> list[dict[str, Any]]:
    """What a loader of one's own gets back of what it gave."""

    class Marked(cases.Counting):
        state: Any = None

        def state_dict(self):
            return {"position": 0, "mark": b"abc", "array": [b"d"]}

        def load_state_dict(self, state):
            self.state = state

    loader = Marked()
    resume = ResumeState(loader)
    resume.load_state_dict(resume.state_dict())
    return [loader.state, loader.state_dict()]


# --- another number of ranks -----------------------------------------------------------------------------------------


class _Counting:
    """Says which samples it has seen."""

    def __init__(self, loader) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.loader = loader
        self.seen: list[int] = []
        self.validations = 0

    def training_step(self, batch, batch_idx):
        self.seen += batch["id"].flatten().tolist()
        if self.trainer.current_epoch == 1 and batch_idx == self.stops_after:
            raise StoppedError
        return self.net(batch["x"]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.current_epoch == 1 and batch_idx == self.stops_after - 1:
            self.trainer.save_checkpoint(self.path)
            self.seen_at_save = len(self.seen)

    def validation_step(self, batch, batch_idx):
        self.validations += batch_idx == 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return DataLoader(Numbers(), batch_size=24)


def samples(rank: int, folder: Path, kind: str, path: str, ckpt_path: str | None, stops_after: int) -> dict[str, Any]:
    """Train until after some batches of the second epoch, or from there to its end."""
    _, world_size = join()
    data = Numbers(False)
    loader = {
        "distributed": lambda: DataLoader(data, batch_size=2, sampler=DistributedSampler(data, world_size, rank)),
        "random": lambda: DataLoader(data, batch_size=2, shuffle=True),
        "stateful": lambda: StatefulDataLoader(data, batch_size=2),
    }[kind]()
    pl = pl_of("lightning")
    pl.seed_everything(3, verbose=False)
    module = type("Counting", (_Counting, pl.LightningModule), {})(loader)
    module.path, module.stops_after, module.seen_at_save = folder / path, stops_after, None
    trainer = make_trainer("lightning", folder, max_epochs=2, strategy="ddp" if world_size > 1 else "auto")
    with heard_warnings() as texts, contextlib.suppress(StoppedError):
        trainer.fit(module, ckpt_path=ckpt_path and folder / ckpt_path)
    kept = module.seen if module.seen_at_save is None else module.seen[: module.seen_at_save]
    return {"seen": kept, "warnings": texts, "validations": module.validations, "epoch": trainer.current_epoch}


# --- messages, and ways out ------------------------------------------------------------------------------------------


class _Plain(IterableDataset):
    def __iter__(self):
        return ({"id": number, "x": torch.ones(3)} for number in range(24))


class _Ones:
    def __iter__(self):
        return ({"id": torch.tensor([number]), "x": torch.ones(1, 3)} for number in range(24))

    def __len__(self):
        return 24


class _Forgetful(Sampler):
    """Takes its order from something that no checkpoint knows."""

    calls = 0

    def __iter__(self):
        type(self).calls += 1
        return iter([(number * 5 + type(self).calls) % 24 for number in range(24)])

    def __len__(self):
        return 24


def fit_twice(rank: int, folder: Path, kind: str, shows_bars: bool = False) -> dict[str, Any]:
    """Stop a run in the middle of an epoch and resume it, with loaders that are special."""
    _, world_size = join()
    loader = {
        "iterable": lambda: DataLoader(_Plain(), batch_size=2),
        "forgetful": lambda: DataLoader(Numbers(), batch_size=2, sampler=_Forgetful()),
        "other": _Ones,
        "opt-out": lambda: DataLoader(Numbers(), batch_size=2),
    }[kind]
    callback = SnapshotCallback(loader_state=kind != "opt-out")
    pl = pl_of("lightning")
    found: dict[str, Any] = {}
    for name, ckpt_path in (("first", None), ("second", folder / "a.ckpt")):
        module = type("Counting", (_Counting, pl.LightningModule), {})(loader())
        module.path, module.stops_after = folder / "a.ckpt", 4 if ckpt_path is None else 1000
        how = {"strategy": "ddp" if world_size > 1 else "auto", "enable_progress_bar": shows_bars}
        trainer = make_trainer("lightning", folder, max_epochs=2, callbacks=[callback], **how)
        shown = contextlib.redirect_stdout(io.StringIO())
        with heard_warnings() as texts, contextlib.suppress(StoppedError), shown as output:
            trainer.fit(module, ckpt_path=ckpt_path)
        found[name] = {"seen": module.seen, "warnings": texts, "shown": output.getvalue()}
    return found


def without_state(rank: int, folder: Path) -> dict[str, Any]:
    """Resume from a checkpoint of a program that did not know of exact resume; and what a tuner stores."""
    join()
    run = fit(Case(), folder, seed=1, saves_to=folder / "a.ckpt")
    plugin = SnapshotCheckpointIO()
    checkpoint = plugin.load_checkpoint(folder / "a.ckpt", weights_only=True)
    plain = json.dumps(checkpoint.pop(KEY), default=lambda value: f"{type(value).__module__}.{type(value).__name__}")
    plugin.save_checkpoint(checkpoint, folder / "old.ckpt")
    with heard_warnings() as texts:
        resumed = fit(Case(), folder, seed=1, ckpt_path=folder / "old.ckpt")
    trainer = run.trainer
    trial = {}
    for name in (".lr_find_1.ckpt", ".scale_batch_size_1.ckpt", "other.ckpt"):
        trainer.save_checkpoint(folder / name)
        trial[name] = KEY in plugin.load_checkpoint(folder / name)
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    trial["weights"] = KEY in plugin.load_checkpoint(folder / "weights.ckpt")
    return {"plain": plain, "warnings": texts, "epoch": resumed.trainer.current_epoch, "trial": trial}


# --- a loop of one's own ---------------------------------------------------------------------------------------------


def fabric_loop(rank: int, folder: Path, kind: str, stops_at: tuple[int, int]) -> str | None:
    """Compare loops of Fabric: one that goes through, and one that is stopped and begun again by new objects."""
    _, world_size = join()
    whole = _loop(folder, kind, world_size, seed=1)
    stopped = _loop(folder, kind, world_size, seed=1, saves_at=stops_at)
    resumed = _loop(folder, kind, world_size, seed=2, loads=True)
    return difference(stopped[0] + resumed[0], whole[0]) or difference(resumed[1], whole[1])


def _loop(folder: Path, kind: str, world_size: int, *, seed: int, saves_at=None, loads: bool = False) -> Any:
    lightning.fabric.seed_everything(seed, verbose=False)
    fabric = lightning.fabric.Fabric(
        accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto"
    )
    attach(fabric)
    fabric.launch()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    data = Numbers()
    plain = {
        "plain": lambda: DataLoader(data, batch_size=2, shuffle=True),
        "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False)),
        "persistent": lambda: DataLoader(data, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True),
        "stateful": lambda: StatefulDataLoader(data, batch_size=2, shuffle=world_size == 1),
        "litdata": lambda: cases.loaders_of(Case("litdata")),
        "stream": lambda: StatefulDataLoader(cases.Stream(10), batch_size=2, num_workers=1, persistent_workers=True),
    }[kind]()
    loader = fabric.setup_dataloaders(plain)
    resume = ResumeState(loader)
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "resume": resume}
    if loads:
        fabric.load(folder / "a.ckpt", state)
    seen = []
    for epoch in range(state["epoch"], 3):
        state["epoch"] = epoch
        for batch in loader:
            seen.append(batch["id"].tolist())
            loss = model(batch["x"] + torch.rand(3)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if saves_at == (epoch, len(seen)):
                fabric.save(folder / "a.ckpt", state)
                return seen, None
        if saves_at == (epoch, -1):
            fabric.save(folder / "a.ckpt", {**state, "epoch": epoch + 1})
            return seen, None
    return seen, {name: value.clone() for name, value in model.state_dict().items()} | {"rng": torch.rand(2)}
