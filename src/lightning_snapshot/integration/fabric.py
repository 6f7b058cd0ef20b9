"""How all ranks of a Fabric save and load together: `attach`, and what it adds to Fabric's strategy."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_snapshot.errors import EntryNotFoundError, UnsupportedFeatureError
from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
from lightning_snapshot.integration.ranks import StateSharing, replicated_tensors
from lightning_snapshot.integration.sharded import ShardedState, model_state, optimizer_state
from lightning_snapshot.integration.wiring import StrategyMixin, is_stock_checkpoint, join, plugin_of, strategies_named
from lightning_snapshot.manifest import Manifest
from lightning_snapshot.stateful import Stateful, copies_tensors_as_they_are
from lightning_snapshot.tensors import tensors_by_path
from lightning_snapshot.view import keys_of_spread_tensors

__all__ = ["FabricReplicatedMixin", "FabricShardedMixin", "attach"]

_Filter: TypeAlias = Mapping[str, Callable[[str, Any], bool]]


def attach(fabric: Any, plugin: SnapshotCheckpointIO | None = None) -> SnapshotCheckpointIO:
    """Let ``fabric.save``, ``load`` and ``load_raw`` use snapshots, with all ranks taking part.

    Call it right after making the Fabric, before ``launch``. With ``strategy="fsdp"`` or ``ModelParallelStrategy``, it
    is the only way: there, Fabric takes no checkpoint plugin.

    Args:
        fabric: Of any distribution.
        plugin: By default that of the Fabric if it is one of ours, else a new one.

    Returns:
        The plugin that is used from now on.

    Raises:
        UnsupportedFeatureError: The strategy has its own way to save: DeepSpeed, XLA, or a class that overrides it.
    """
    strategy = fabric.strategy
    if isinstance(strategy, strategies_named("fabric", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")):
        msg = f"{type(strategy).__name__} saves in its own way; use fabric.save without attach"
        raise UnsupportedFeatureError(msg)
    if isinstance(strategy, strategies_named("fabric", "FSDPStrategy", "ModelParallelStrategy")):
        join(strategy, FabricShardedMixin)
    plugin = plugin or plugin_of(strategy) or SnapshotCheckpointIO()
    names = ("DDPStrategy", "SingleDeviceStrategy") if plugin.behind.overlap else ("DDPStrategy",)
    if isinstance(strategy, strategies_named("fabric", *names)):
        join(strategy, FabricReplicatedMixin)
    strategy.checkpoint_io = plugin
    plugin.expect_single_writer()
    return plugin


class FabricReplicatedMixin(StrategyMixin):
    """For strategies with the whole model on each rank."""

    replaced = ("save_checkpoint", "load_checkpoint")

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: _Filter | None = None,  # noqa: A002  # Lightning's name
    ) -> None:
        """Save on all ranks."""
        content = self._convert_stateful_objects_in_state(state, filter=filter or {})
        optimizers = _with_fence(self.snapshots, state)
        self.snapshots.save_on_all_ranks(content, path, _sharing(state), storage_options, optimizers=optimizers)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load on each rank, straight into modules."""
        objects = {"": state} if isinstance(state, Module) else state or {}
        modules = {key: module for key, module in objects.items() if isinstance(module, Module)}
        own = {key: self.get_module_state_dict(module) for key, module in modules.items() if _is_plain(module)}
        targets = tensors_by_path(own.get("", own))
        plugin = self.snapshots
        plugin.read_next_checkpoint_into(lambda _: targets)
        try:
            return super().load_checkpoint(path, state, *args, **kwargs)
        finally:
            plugin.read_next_checkpoint_into(None)


def _with_fence(plugin: SnapshotCheckpointIO, state: Mapping[str, Any]) -> list[Optimizer]:
    """The optimizers in a state, each of which waits before a step until its state is read."""
    optimizers = [obj for obj in state.values() if isinstance(obj, Optimizer)]
    if plugin.behind.overlap:
        plugin.behind.fence_before_steps(optimizers)
    return optimizers


def _is_plain(module: Module) -> bool:
    return copies_tensors_as_they_are(module.module if isinstance(module, DistributedDataParallel) else module)


def _sharing(state: Mapping[str, Any]) -> StateSharing:
    """What all ranks have in common: modules inside DistributedDataParallel, and their optimizers."""
    modules = {key: obj.module for key, obj in state.items() if isinstance(obj, DistributedDataParallel)}
    parameters = {parameter for module in modules.values() for parameter in module.parameters()}
    optimizers = {
        key: obj for key, obj in state.items() if isinstance(obj, Optimizer) and not parameters.isdisjoint(_of(obj))
    }
    replicated = [tensor for module in modules.values() for tensor in replicated_tensors(module, optimizers.values())]
    return StateSharing([*modules, *optimizers], replicated)


def _of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class FabricShardedMixin(StrategyMixin):
    """For strategies with a part of the model on each rank."""

    replaced = ("save_checkpoint", "load_checkpoint")

    @property
    def checkpoint_io(self) -> Any:
        """The plugin; of themselves, these strategies have none."""
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        self._checkpoint_io = plugin

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: _Filter | None = None,  # noqa: A002  # as above
    ) -> None:
        """Save on all ranks, each its parts."""
        content = {}
        for key, obj in state.items():
            value = _state_of(obj, state)
            if filter and key in filter and isinstance(value, Mapping):
                value = {name: item for name, item in value.items() if filter[key](name, item)}
            content[key] = value
        optimizers = _with_fence(self.snapshots, state)
        sharing = StateSharing((), ())
        self.snapshots.save_on_all_ranks(content, path, sharing, storage_options, optimizers=optimizers)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: Any = True,  # noqa: FBT002  # Lightning passes it by name or position
        **how: Any,
    ) -> Any:
        """Load this rank's parts into the objects of a state.

        Args:
            path: Snapshot, or what the strategy itself has saved.
            state: Modules, optimizers and others by key; or a module, the state of which is all that was saved.
            strict: Whether keys and names may neither lack nor be unknown.
            how: ``weights_only``, from Lightning 2.6 on.

        Returns:
            The rest, except for what is spread over ranks.
        """
        if is_stock_checkpoint(path, self.snapshots.storage_options):
            return super().load_checkpoint(path, state, strict, **how)
        if isinstance(state, Optimizer):
            msg = f"{path}: an optimizer can only be loaded together with its model: fabric.load(path, {{…}})"
            raise UnsupportedFeatureError(msg)
        if isinstance(state, Module):
            parts = ShardedState(state, [])
            content = self.snapshots.load_into(path, tensors_by_path(parts.model_targets), **how)
            parts.take_model(content, strict=strict)
            return {}
        objects = _Objects({} if state is None else state)
        content = self.snapshots.load_into(path, objects.targets(), skip=objects.unwanted, **how)
        missing = [key for key in objects.state if key not in content]
        if strict and missing:
            msg = f"{path}: expected the key {missing[0]!r}, found only {list(content)}; strict=False loads the others"
            raise EntryNotFoundError(msg)
        objects.take(content, strict=strict)
        return content


def _state_of(obj: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(obj, Module):
        return model_state(obj)
    if isinstance(obj, Optimizer) and (key := _model_of(obj, state)) is not None:
        return optimizer_state(state[key], obj)
    return obj.state_dict() if isinstance(obj, Stateful) else obj


def _model_of(optimizer: Optimizer, state: Mapping[str, Any]) -> str | None:
    """Key of the module that has parameters of an optimizer."""
    parameters = set(_of(optimizer))
    modules = ((key, obj) for key, obj in state.items() if isinstance(obj, Module))
    return next((key for key, module in modules if not parameters.isdisjoint(module.parameters())), None)


class _Objects:
    """The objects into which a state is loaded."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        owners = {key: _model_of(obj, state) for key, obj in state.items() if isinstance(obj, Optimizer)}
        # Key of the model → its parts, and the keys of its optimizers.
        self._models: dict[str, tuple[ShardedState, list[str]]] = {}
        for key, obj in state.items():
            if isinstance(obj, Module):
                names = [name for name, owner in owners.items() if owner == key]
                self._models[key] = ShardedState(obj, [state[name] for name in names]), names

    def targets(self) -> dict[str, torch.Tensor]:
        """Logical path → tensor to read into."""
        found: dict[str, torch.Tensor] = {}
        for key, (parts, names) in self._models.items():
            found |= tensors_by_path({key: parts.model_targets})
            for states in (parts.optimizer_targets, parts.numbered_optimizer_targets):
                found |= tensors_by_path(dict(zip(names, states, strict=True)))
        return found

    def unwanted(self, manifest: Manifest) -> set[str]:
        """What would come in full on each rank, and nobody asked for."""
        return keys_of_spread_tensors(manifest) - self.state.keys() if self.state else set()

    def take(self, content: dict[str, Any], *, strict: bool) -> None:
        """Move what was loaded from the content into the objects."""
        for key, (parts, names) in self._models.items():
            if key in content:
                parts.take_model(content.pop(key), strict=strict)
            for number, name in enumerate(names):
                if name in content:
                    parts.take_optimizer(number, content.pop(name))
        for key in self.state.keys() & content.keys():
            if isinstance(self.state[key], Stateful):
                self.state[key].load_state_dict(content.pop(key))
            else:
                self.state[key] = content.pop(key)
