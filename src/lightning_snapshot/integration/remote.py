"""What Lightning does in a folder of checkpoints without asking the plugin, where the folder is in a bucket.

Lightning looks for the ``"last"`` checkpoint by the times of folders, and links ``last`` to another checkpoint. A
bucket has neither times of folders nor links.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_snapshot.errors import error_from_report, report_of_error
from lightning_snapshot.integration.namespaces import modules
from lightning_snapshot.integration.plugin import SnapshotCheckpointIO
from lightning_snapshot.integration.wiring import plugin_of
from lightning_snapshot.storage import copy_snapshot, list_published, local_path, open_storage

__all__ = ["copy_instead_of_link", "find_last_in_buckets"]


def copy_instead_of_link(trainer: Any) -> None:
    """Let ``save_last="link"`` make a copy inside the bucket where there can be no link, and Lightning refuses it."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_last", None) == "link" and _bucket_folder(callback, trainer):
            callback.save_last = True
            callback._link_checkpoint = _copy_checkpoint  # noqa: SLF001  # Lightning has no other way
            callback._save_last_checkpoint = partial(_save_last, callback)  # noqa: SLF001  # see above


def _save_last(callback: Any, trainer: Any, monitor_candidates: Any) -> None:
    if callback.save_top_k != 0 and not _is_saved(trainer, callback._last_checkpoint_saved):  # noqa: SLF001  # see above
        return  # the last copy stays; Lightning would remove it for the new one
    callback.save_last = "link"
    try:
        type(callback)._save_last_checkpoint(callback, trainer, monitor_candidates)  # noqa: SLF001  # see above
    finally:
        callback.save_last = True


def _is_saved(trainer: Any, path: str) -> bool:
    """Whether what is to be copied is there: a save behind training may have failed. Nothing to copy is no failure."""
    plugin = plugin_of(trainer.strategy)
    if plugin is None or not path:
        return True

    def ask() -> bool:
        plugin.wait()
        return open_storage(path, plugin.storage_options).is_snapshot()

    return bool(_on_rank_0(trainer, ask))


def _bucket_folder(callback: Any, trainer: Any) -> str:
    """Where a ModelCheckpoint saves; empty if that is no bucket."""
    resolve = getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)
    folder = "" if resolve is None else os.fspath(resolve(trainer))
    return "" if local_path(folder) else folder


def _copy_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
    plugin = plugin_of(trainer.strategy)
    if plugin is not None and filepath != linkpath:
        _on_rank_0(trainer, partial(copy_snapshot, filepath, linkpath, plugin.storage_options))


def _on_rank_0(trainer: Any, action: Callable[[], Any]) -> Any:
    """What something gives on rank 0, or its error, on all ranks: none must wait for one that has failed."""
    result = None
    if trainer.is_global_zero:
        try:
            result = action()
        except Exception as error:
            trainer.strategy.broadcast((None, report_of_error(0, error)))
            raise
    result, report = trainer.strategy.broadcast((result, None))
    if report is not None:
        raise error_from_report(report)
    return result


def find_last_in_buckets() -> None:
    """Let ``ckpt_path="last"`` find snapshots in buckets, in all installed distributions.

    Lightning asks nobody before it looks for them, so one of its functions is replaced. It behaves as before for
    Trainers without our plugin, and for folders on a disk.
    """
    for connector in modules("pytorch", "trainer.connectors.checkpoint_connector"):
        cls = connector._CheckpointConnector  # noqa: SLF001  # see above
        original = cls._parse_ckpt_path  # see above
        if not hasattr(original, "finds_last_in_buckets"):
            cls._parse_ckpt_path = _aware_of_buckets(original)  # see above


def _aware_of_buckets(original: Callable[..., Any]) -> Callable[..., Any]:
    def _parse_ckpt_path(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = plugin_of(self.trainer.strategy)
        if ckpt_path == "last" and plugin is not None:
            path = _find_last(self.trainer, plugin)
            if path is not None:
                return path
        return original(self, state_fn, ckpt_path, *args, **kwargs)

    _parse_ckpt_path.finds_last_in_buckets = True  # type: ignore[attr-defined]  # marks what is replaced
    return _parse_ckpt_path


def _find_last(trainer: Any, plugin: SnapshotCheckpointIO) -> str | None:
    """The newest checkpoint that Lightning would call the last, in the buckets of a Trainer."""
    found = []
    for callback in trainer.checkpoint_callbacks:
        folder = _bucket_folder(callback, trainer)
        if folder:
            pattern = re.compile(rf"{callback.CHECKPOINT_NAME_LAST}(-(\d+))?.*{re.escape(callback.FILE_EXTENSION)}")
            snapshots = list_published(folder, plugin.storage_options)
            found += [(each, f"{folder.rstrip('/')}/{each.name}") for each in snapshots if pattern.fullmatch(each.name)]
    return max(found)[1] if found else None
