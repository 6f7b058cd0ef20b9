"""State → what one rank has to store: entries, specs of its leaves, the sources of their bytes, and notes.

Every value that cannot be stored fails here, before anything is written.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from lightning_snapshot import objects, tensors
from lightning_snapshot.errors import UnsupportedFeatureError
from lightning_snapshot.manifest import Entry, PrimitiveEntry, RankNotes, TensorNote
from lightning_snapshot.tree import Leaf, flatten
from lightning_snapshot.write_plan import BlobSpec, TensorSpec

__all__ = ["Described", "NothingShared", "Sharing", "describe"]


class Sharing(Protocol):
    """Says what of a state all ranks have in common. Asked with logical paths."""

    def is_shared(self, path: str) -> bool:
        """Whether a value is stored once, under rank 0."""
        ...

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether all ranks hold a shared tensor alike, so that any of them may write it; else rank 0 does."""
        ...


class NothingShared:
    """See `Sharing`: every rank stores what it has."""

    def is_shared(self, path: str) -> bool:  # noqa: ARG002  # the protocol's
        """No."""
        return False

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002  # the protocol's
        """No."""
        return False


@dataclass(frozen=True, slots=True)
class Described:
    """A state whose leaves have become specs; keys are logical paths.

    Attributes:
        specs: Entries and specs, in order.
        sources: Where the bytes of the specs come from.
        notes: What the entries cannot say.
    """

    specs: dict[str, Entry | TensorSpec | BlobSpec]
    sources: dict[str, tensors.TensorSource | bytes]
    notes: RankNotes


def describe(
    state: Mapping[str, Any], *, sharing: Sharing | None = None, world_size: int = 1, alias_prefix: str = ""
) -> Described:
    """Describe the state of this rank.

    Args:
        state: App key → value, nested at will. Tensors are not copied.
        sharing: What all ranks have in common.
        world_size: Ranks that take part in the save.
        alias_prefix: Begins the names of aliases.

    Raises:
        UnsupportedValueError: A value cannot be stored.
        UnsupportedFeatureError: A tensor is spread over ranks that do not take part.
    """
    flat = flatten(state, is_tensor=tensors.is_tensor, alias_prefix=alias_prefix)
    leaves = _Leaves(sharing, world_size)
    for path, item in flat.items.items():
        if isinstance(item, Leaf):
            leaves.add(path, item)
        elif sharing is not None and isinstance(item, PrimitiveEntry) and sharing.is_shared(path):
            leaves.specs[path] = replace(item, replicated=True)
        else:
            leaves.specs[path] = item
    notes = RankNotes(tuple(flat.roots), flat.containers, leaves.notes, leaves.tied, flat.same, flat.moved)
    return Described(leaves.specs, leaves.sources, notes)


@dataclass(slots=True)
class _Leaves:
    sharing: Sharing | None
    world_size: int
    specs: dict[str, Entry | TensorSpec | BlobSpec] = field(default_factory=dict)
    sources: dict[str, tensors.TensorSource | bytes] = field(default_factory=dict)
    notes: dict[str, TensorNote] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    first_path: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, path: str, item: Leaf) -> None:
        kind = tensors.storage_kind(item.value, item.place) if item.is_tensor else "object"
        if kind == "dense":
            self._add_dense(path, item.value, self._shared(path, item.value, tensors.tensor_spec(item.value)))
        elif kind == "spread":
            self._add_spread(path, item)
        else:
            self._add_blob(path, item, kind)
        if item.is_tensor and (note := tensors.tensor_note(item.value)):
            self.notes[path] = note

    def _shared(self, path: str, tensor: torch.Tensor, spec: TensorSpec) -> TensorSpec:
        if self.sharing is None or not self.sharing.is_shared(path):
            return spec
        return replace(spec, replicated=True, by_rank_0=not self.sharing.is_split(path, tensor))

    def _add_dense(self, path: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
        # The same memory may be a tensor of its own here, and there a part of one that is spread over ranks.
        first = self.first_path.setdefault((*tensors.memory_key(tensor), spec.shape, spec.box), path)
        if first != path:
            self.specs[first] = replace(self.specs[first], is_tied=True)
            spec = replace(spec, tied_to=first, is_tied=True)
            self.tied[path] = first
        self.specs[path] = spec
        self.sources[path] = tensors.TensorSource(tensor)

    def _add_spread(self, path: str, item: Leaf) -> None:
        part = tensors.local_part(item.value, item.place)
        spec = tensors.tensor_spec(part.tensor)
        is_whole = part.box.sizes == part.shape
        if is_whole and (self.world_size == 1 or part.is_everywhere(self.world_size)):
            spec = replace(spec, replicated=True)
        elif self.world_size == 1:
            msg = (
                f"{item.place}: this tensor is spread over several ranks, and only one of them saves; all ranks save "
                "together with SnapshotCallback (Trainer), attach(fabric) (Fabric) or Snapshot.take"
            )
            raise UnsupportedFeatureError(msg)
        else:
            spec = replace(spec, shape=part.shape, box=part.box)
        if part.tensor.numel():
            self._add_dense(path, part.tensor, spec)
        else:
            self.specs[path] = spec

    def _add_blob(self, path: str, item: Leaf, kind: str) -> None:
        shared = self.sharing is not None and self.sharing.is_shared(path)
        if kind == "zip":
            value = tensors.portable(item.value)
            data = objects.dumps(value, item.place)
            spec = BlobSpec(len(data), _digest(data), dtype=str(value.dtype), shape=tuple(value.shape))
        else:
            value = tensors.compact(item.value) if item.is_tensor else item.value
            data = objects.dumps(value, item.place)
            spec = BlobSpec(len(data), _digest(data), obj_type=objects.type_name(item.value))
        self.specs[path] = replace(spec, replicated=True) if shared else spec
        self.sources[path] = data


def _digest(data: bytes) -> str:
    # Two blobs with one digest share a file, so the digest must be beyond doubt.
    return hashlib.sha256(data).hexdigest()
