"""Overlap: what optimizers own is read while training goes on, and yet is that of the call."""

import pytest
import torch
from torch import nn

from lightning_snapshot import Snapshot, SnapshotCallback, SnapshotCheckpointIO, attach
from lightning_snapshot.errors import StateChangedError, UnsupportedFeatureError
from tests.lightning.gates import Gate, GatedCheckpointIO
from tests.lightning.models import difference


class Saves:
    """A callback that saves after some steps and remembers what should be saved; opens the gate when step 3 is done."""

    def __init__(self, folder, steps, gate=None):
        super().__init__()
        self.folder = folder
        self.steps = steps
        self.gate = gate
        self.expected = {}
        self.steps_behind = []

    def on_train_batch_start(self, trainer, *_):
        if trainer.strategy.checkpoint_io.behind.pending:
            self.steps_behind.append(trainer.global_step)
        if trainer.global_step == 3 and self.gate is not None:
            self.gate.open()

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step in self.steps and trainer.global_step not in self.expected:
            self.expected[trainer.global_step] = [
                {name: value.clone() for name, value in module.state_dict().items()},
                [value.clone() for value in moments(trainer.optimizers[0].state_dict())],
            ]
            trainer.save_checkpoint(self.folder / str(trainer.global_step))

    def assert_saved(self):
        assert sorted(self.expected) == sorted(self.steps)
        for step, expected in self.expected.items():
            snapshot = Snapshot(self.folder / str(step))
            state = dict(snapshot.get_state_dict_for_key("state_dict"))
            saved_moments = moments(snapshot.get_state_dict_for_key("optimizer_states")[0])
            assert difference([state, saved_moments], expected) is None


def moments(state):
    return [value for each in state["state"].values() for value in each.values()]


@pytest.fixture
def fit(namespace, make_trainer, tmp_path):
    def run(model, plugin, steps, callbacks=(), **arguments):
        saves = type("Callback", (Saves, namespace.pl.Callback), {})(tmp_path, steps, getattr(plugin, "gate", None))
        defaults = {"max_steps": 5, "max_epochs": 3, "limit_val_batches": 0, "enable_checkpointing": False}
        arguments = {**defaults, **arguments}
        trainer = make_trainer(callbacks=[saves, *callbacks], plugin=plugin, **arguments)
        trainer.fit(model)
        return saves

    return run


class Manual:
    """Manual optimization."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    ("mixin", "arguments"),
    [((), {}), ((), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}), ((Manual,), {})],
    ids=["automatic", "accumulating", "manual"],
)
def test_each_snapshot_holds_the_state_of_its_call(cls, fit, mixin, arguments):
    model = type("Model", (*mixin, cls.Tiny), {})()
    fit(model, SnapshotCheckpointIO(overlap=True, overlap_check=True), [1, 2, 3, 4], **arguments).assert_saved()


@pytest.mark.parametrize("mixin", [(), (Manual,)], ids=["automatic", "manual"])
def test_training_goes_on_while_a_save_stands_still(cls, fit, mixin):
    model = type("Model", (*mixin, cls.Tiny), {})(hidden=200_000)
    saves = fit(model, GatedCheckpointIO(Gate(is_open=False), overlap=True), [1])
    assert saves.steps_behind[:3] == [1, 2, 3]
    saves.assert_saved()


class Meddles:
    """Changes a parameter where no fence stands."""

    def __init__(self, how):
        super().__init__(hidden=200_000)
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 1:
            with torch.no_grad():
                weight = self.net[0].weight
                (weight if self.how == "in place" else weight.data).add_(1)
        if self.trainer.global_step == 2:
            self.trainer.strategy.checkpoint_io.gate.open()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("how", "check"), [("in place", False), ("data", True)])
def test_a_change_that_no_fence_sees_fails_the_save(cls, fit, tmp_path, how, check):
    model = type("Model", (Meddles, cls.Tiny), {})(how)
    plugin = GatedCheckpointIO(Gate(is_open=False), overlap=True, overlap_check=check)
    with pytest.raises(StateChangedError, match=r"state_dict/net\.0\.weight"):
        fit(model, plugin, [1])
    assert not (tmp_path / "1").exists()


def test_what_no_optimizer_owns_is_copied_at_the_call(cls, fit):
    class Counts(cls.Tiny):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3_000_000))

        def training_step(self, batch, batch_idx):
            self.count.data.add_(1)
            return super().training_step(batch, batch_idx)

    fit(Counts(), GatedCheckpointIO(Gate(is_open=False), overlap=True), [1]).assert_saved()


def test_validation_may_exchange_parameters(namespace, cls, fit):
    class Exchanges(namespace.pl.Callback):
        def on_validation_start(self, trainer, module):
            module.net[0].weight.data.mul_(2)
            plugin.gate.open()
            plugin.wait()

        def on_validation_end(self, trainer, module):
            module.net[0].weight.data.div_(2)

    plugin = GatedCheckpointIO(Gate(is_open=False), overlap=True)
    callbacks = [SnapshotCallback(), Exchanges()]
    fit(cls.Tiny(hidden=200_000), plugin, [2], callbacks, limit_val_batches=1, val_check_interval=2).assert_saved()


def test_programs_that_cannot_work_are_refused(namespace, cls, fit):
    class Lbfgs(cls.Tiny):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UnsupportedFeatureError, match="LBFGS"):
        fit(Lbfgs(), SnapshotCheckpointIO(overlap=True), [])
    average = namespace.pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(UnsupportedFeatureError, match="StochasticWeightAveraging"):
        fit(cls.Tiny(), SnapshotCheckpointIO(overlap=True), [], [average])


def test_fabric_with_attach(namespace, tmp_path):
    gate = Gate(is_open=False)
    plugin = GatedCheckpointIO(gate, overlap=True)
    fabric = namespace.fabric.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    attach(fabric)
    model = nn.Linear(3000, 3000)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))

    def step():
        fabric.backward(model(torch.ones(2, 3000)).square().mean())
        optimizer.step()

    step()
    before = [value.clone() for value in (*model.state_dict().values(), *moments(optimizer.state_dict()))]
    fabric.save(tmp_path / "s", {"model": model, "optimizer": optimizer, "step": 1})
    for _ in range(3):
        step()
    gate.open()
    fabric.load(tmp_path / "s", state := {"model": model, "optimizer": optimizer, "step": 0})
    after = [*model.state_dict().values(), *moments(optimizer.state_dict())]
    assert difference(after, before) is None
    assert state["step"] == 1
    plugin.teardown()
