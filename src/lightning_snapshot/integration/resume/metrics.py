"""Metrics in the middle of their epoch: torchmetrics inside the module, and what ``self.log`` has collected."""

import builtins
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

import torch
from torch import nn

__all__ = ["capture", "drop_logged", "restore"]

_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_MORE_FIELDS = ("dataloader_idx", "metric_attribute")


def capture(trainer: Any, module: nn.Module) -> dict[str, Any]:
    """A copy of all that metrics and logged values have collected on this rank.

    Args:
        trainer: In ``fit``.
        module: Its module.
    """
    connector = trainer._logger_connector  # noqa: SLF001  # Lightning has no public way
    loop = trainer.fit_loop.epoch_loop
    for each in module.modules():
        if isinstance(each, sys.modules["torchmetrics"].MetricCollection):
            each.values(copy_state=False)  # gives all members the state of the one that counts for them
    return {
        "modules": {name: _state_of(metric) for name, metric in _metrics_of(module)},
        "train": _logged(loop._results),  # noqa: SLF001  # as above
        "val": _logged(loop.val_loop._results),  # noqa: SLF001  # as above
        "shown": {
            name: {key: _copy(value) for key, value in getattr(connector, name).items()}
            for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
        },
        "is_first_batch": connector._first_loop_iter,  # noqa: SLF001  # as above
        "hook": connector._current_fx,  # noqa: SLF001  # as above
    }


def drop_logged(state: dict[str, Any], stages: Collection[str]) -> None:
    """Reset, in a captured state, what Lightning is about to reset: it stores a checkpoint in between.

    Args:
        state: From `capture`.
        stages: ``"train"``, ``"val"``.
    """
    for stage in stages:
        for logged in state[stage].values():
            if logged["metric"] is not None:
                state["modules"][logged["metric"]] = None
        state[stage] = {}


def restore(state: dict[str, Any], trainer: Any, module: nn.Module) -> None:
    """Take a captured state.

    Args:
        state: From `capture`.
        trainer: In ``fit``.
        module: Its module.
    """
    for name, metric in _metrics_of(module):
        if name in state["modules"]:
            metric.reset() if state["modules"][name] is None else _set_state(metric, state["modules"][name])
    loop = trainer.fit_loop.epoch_loop
    _set_logged(loop._results, state["train"], trainer, module)  # noqa: SLF001  # as above
    _set_logged(loop.val_loop._results, state["val"], trainer, module)  # noqa: SLF001  # as above
    connector = trainer._logger_connector  # noqa: SLF001  # as above
    for name, values in state["shown"].items():
        getattr(connector, name).update(
            {key: _moved(value, trainer.strategy.root_device) for key, value in values.items()}
        )
    connector._first_loop_iter = state["is_first_batch"]  # noqa: SLF001  # as above
    connector._current_fx = state["hook"]  # noqa: SLF001  # as above


# --- torchmetrics ----------------------------------------------------------------------------------------------------


def _metrics_of(module: nn.Module) -> list[tuple[str, Any]]:
    torchmetrics = sys.modules["torchmetrics"]  # Lightning needs it
    return [(name, each) for name, each in module.named_modules() if isinstance(each, torchmetrics.Metric)]


def _state_of(metric: Any) -> dict[str, Any]:
    values = {name: _copy(getattr(metric, name)) for name in metric._defaults}  # noqa: SLF001  # torchmetrics has no public way
    return {"values": values, "updates": metric._update_count}  # noqa: SLF001  # as above


def _set_state(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state["values"].items():
        setattr(metric, name, _moved(value, metric.device))
    metric._update_count = state["updates"]  # noqa: SLF001  # as above
    metric._computed = None  # noqa: SLF001  # as above


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    # What was loaded may be a private mapping of a file, which a copy is independent of.
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


# --- self.log --------------------------------------------------------------------------------------------------------


def _logged(results: Any) -> dict[str, Any]:
    return {key: _logged_value(result) for key, result in results.items() if not result.has_reset}


def _logged_value(result: Any) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    fields = {name: getattr(meta, name) for name in (*_FIELDS, *_MORE_FIELDS)}
    home = "builtins" if meta.reduce_fx in (max, min, sum) else "torch"
    return {
        "fields": fields,
        "reduce": [home, meta.reduce_fx.__name__],
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_whole_group": sync.group is None,
        "metric": None if result.is_tensor else meta.metric_attribute,
        "state": _state_of(result),
        "of_step": _copy(result._forward_cache) if result.is_tensor else None,  # noqa: SLF001  # as above
    }


def _set_logged(results: Any, state: dict[str, Any], trainer: Any, module: nn.Module) -> None:
    home = import_module(type(results).__module__)
    results.clear()
    for key, logged in state.items():
        # A process group cannot be stored; such a value begins anew when it is logged again.
        if logged["is_whole_group"]:
            results[key] = _made(home, logged, trainer, module)


def _made(home: Any, logged: dict[str, Any], trainer: Any, module: nn.Module) -> Any:
    owner, name = logged["reduce"]
    reduce: Callable[..., Any] = getattr(builtins if owner == "builtins" else torch, name)
    meta = home._Metadata(**logged["fields"], reduce_fx=reduce)  # noqa: SLF001  # as above
    sync = logged["sync"]
    meta.sync = home._Sync(  # noqa: SLF001  # as above
        _should=sync["should"], fn=trainer.strategy.reduce, rank_zero_only=sync["rank_zero_only"]
    )
    result = home._ResultMetric(meta, logged["metric"] is None)  # noqa: SLF001  # as above
    if logged["metric"] is None:
        result = result.to(trainer.strategy.root_device)
        for state, value in logged["state"]["values"].items():
            setattr(result, state, _moved(value, trainer.strategy.root_device))
        result._forward_cache = _moved(logged["of_step"], trainer.strategy.root_device)  # noqa: SLF001  # as above
    else:
        result.value = module.get_submodule(logged["metric"])
        result._forward_cache = result.value._forward_cache  # noqa: SLF001  # as above
    result._update_count = logged["state"]["updates"]  # noqa: SLF001  # as above
    return result
