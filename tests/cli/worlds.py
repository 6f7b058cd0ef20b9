"""Snapshots that several ranks have saved together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_snapshot.options import Options
from lightning_snapshot.save_as_one import save_as_one
from lightning_snapshot.save_each import save_each
from lightning_snapshot.session import Session
from lightning_snapshot.storage import open_storage
from lightning_snapshot.together import Save
from tests.ranks.simulation import groups, run

_MIB = 1024 * 1024


class ModelShared:
    """All ranks have the same tensors under ``state_dict``; all else is each one's own."""

    def is_shared(self, path: str) -> bool:
        return path.partition("/")[0] == "state_dict"

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        return self.is_shared(path)


def save_by_ranks(path: Path, states: Sequence[dict[str, Any]], *, as_one: bool) -> Path:
    """Save as the strategies do (``as_one``), or as ``Snapshot.take`` does."""

    def save(group: Any) -> None:
        options = Options(16 * _MIB, threads=2, block_bytes=_MIB)
        arguments = Save(str(path), open_storage, "20260101T120000-0123456789ab", options, Session(), group)
        state = states[group.rank]
        if as_one:
            save_as_one(state, arguments, ModelShared())
        else:
            save_each(lambda: state, arguments, ModelShared())

    errors = [error for error in run(save, groups(len(states))) if isinstance(error, Exception)]
    assert not errors, errors
    return path
