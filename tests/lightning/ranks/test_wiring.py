"""What is added to which strategy, told from objects that no training has used."""

import pickle
from functools import partial
from importlib import import_module

import pytest
import torch

from lightning_snapshot import SnapshotCheckpointIO, attach
from lightning_snapshot.errors import UnsupportedFeatureError
from lightning_snapshot.integration.fabric import FabricReplicatedMixin
from lightning_snapshot.integration.strategies import (
    ReplicatedStrategyMixin,
    ShardedStrategyMixin,
    let_all_ranks_save,
)
from lightning_snapshot.integration.wiring import plugin_of
from lightning_snapshot.stateful import copies_tensors_as_they_are
from tests.lightning.ranks.worlds import heard_warnings


class FakeWorld:
    """What a strategy asks of its environment to know how many ranks there are."""

    def world_size(self):
        return 2


def strategy_of(namespace, name, **attributes):
    """A strategy with our plugin that believes that there are two ranks."""
    cls = getattr(namespace.pl.strategies, name)
    strategy = object.__new__(cls)
    vars(strategy).update(
        {"_checkpoint_io": SnapshotCheckpointIO(), "cluster_environment": FakeWorld(), "_optimizers": [], **attributes}
    )
    return strategy


@pytest.mark.parametrize(
    ("name", "mixin"),
    [
        ("DDPStrategy", ReplicatedStrategyMixin),
        ("FSDPStrategy", ShardedStrategyMixin),
        ("ModelParallelStrategy", ShardedStrategyMixin),
    ],
)
def test_each_family_gets_its_own_methods_once(namespace, name, mixin):
    strategy = strategy_of(namespace, name)
    stock = type(strategy)
    for _ in range(2):
        let_all_ranks_save(strategy, strategy.checkpoint_io)
        assert type(strategy).__bases__ == (mixin, stock)


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "SingleDeviceStrategy"])
def test_others_are_left_alone(namespace, name):
    strategy = strategy_of(namespace, name)
    let_all_ranks_save(strategy, strategy.checkpoint_io)
    assert not isinstance(strategy, (ReplicatedStrategyMixin, ShardedStrategyMixin))
    assert (type(strategy) is getattr(namespace.pl.strategies, name)) == (name == "DeepSpeedStrategy")


def test_one_rank_needs_nothing(namespace):
    strategy = strategy_of(namespace, "DDPStrategy", cluster_environment=None)
    let_all_ranks_save(strategy, strategy.checkpoint_io)
    assert not isinstance(strategy, ReplicatedStrategyMixin)


def test_a_class_with_its_own_way_to_save_is_refused(namespace):
    class Mine(namespace.pl.strategies.DDPStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            """Does something that must not be lost."""

    strategy = strategy_of(namespace, "DDPStrategy")
    strategy.__class__ = Mine
    with pytest.raises(
        UnsupportedFeatureError, match=r"Mine\.save_checkpoint would be replaced.*ReplicatedStrategyMixin"
    ):
        let_all_ranks_save(strategy, strategy.checkpoint_io)

    class Both(ReplicatedStrategyMixin, namespace.pl.strategies.DDPStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    strategy.__class__ = Both
    let_all_ranks_save(strategy, strategy.checkpoint_io)
    assert type(strategy) is Both


def test_the_plugin_is_found_inside_another_one_and_that_is_said(namespace):
    ours = SnapshotCheckpointIO()
    strategy = strategy_of(namespace, "DDPStrategy", _checkpoint_io=namespace.pl.plugins.io.AsyncCheckpointIO(ours))
    assert plugin_of(strategy) is ours
    with heard_warnings() as texts:
        let_all_ranks_save(strategy, ours)
    assert texts == ["AsyncCheckpointIO is not used: all ranks save together, and training waits for them"]
    assert strategy.snapshots is ours


def test_a_strategy_without_our_plugin_says_so(namespace):
    strategy = strategy_of(namespace, "DDPStrategy")
    let_all_ranks_save(strategy, strategy.checkpoint_io)
    strategy.checkpoint_io = namespace.fabric.plugins.TorchCheckpointIO()
    with pytest.raises(UnsupportedFeatureError, match=r"expected SnapshotCheckpointIO .* found TorchCheckpointIO"):
        strategy.snapshots  # noqa: B018 - looking it up is the test


def test_a_strategy_can_be_sent_to_another_process(namespace):
    strategy = strategy_of(namespace, "DDPStrategy", cluster_environment=FakeWorld())
    let_all_ranks_save(strategy, strategy.checkpoint_io)
    copy = pickle.loads(pickle.dumps(strategy))
    assert type(copy) is type(strategy)
    assert isinstance(copy.checkpoint_io, SnapshotCheckpointIO)


def test_attach_takes_the_plugin_of_the_fabric_or_brings_one(namespace):
    make = namespace.fabric.Fabric
    ours, other = SnapshotCheckpointIO(), SnapshotCheckpointIO()
    fabric = make(accelerator="cpu", devices=2, strategy="ddp", plugins=[ours])
    assert attach(fabric) is ours
    assert isinstance(fabric.strategy, FabricReplicatedMixin)
    assert attach(fabric, other) is fabric.strategy.checkpoint_io is other

    fabric = make(accelerator="cpu", devices=1)
    assert attach(fabric) is fabric.strategy.checkpoint_io


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAStrategy"])
def test_attach_refuses_strategies_that_save_in_their_own_way(namespace, name):
    class Stub:
        strategy = object.__new__(getattr(import_module(f"{namespace.fabric.__name__}.strategies"), name))

    with pytest.raises(UnsupportedFeatureError, match=name):
        attach(Stub)


def test_hooks_of_torch_are_trusted_with_the_parameters_themselves_and_others_are_not():
    def swap(module, state_dict, *_):
        """Would swap tensors that change under its hands."""

    for hook, expected in ((swap, False), (partial(swap), False), (partial(torch.nn.Module.float), True)):
        module = torch.nn.Linear(1, 1)
        module._register_load_state_dict_pre_hook(hook)
        assert copies_tensors_as_they_are(module) is expected


def test_keys_can_be_left_out(tmp_path):
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint({"a": torch.ones(2), "b": [torch.zeros(3)]}, tmp_path / "a.ckpt")
    for skip in (["b"], lambda manifest: {"b"} & {path.split("/")[1] for path in manifest.entries}):
        assert list(plugin.load_into(tmp_path / "a.ckpt", {}, skip=skip)) == ["a"]
