"""A save of a state that all ranks have, of which rank 0's values count, with what each rank has of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from msgspec.structs import replace

from lightning_snapshot import tensors
from lightning_snapshot.describe import Described, describe
from lightning_snapshot.errors import UnsupportedValueError
from lightning_snapshot.exchange import Contribution, Opening, collect
from lightning_snapshot.memory import memory_at
from lightning_snapshot.saving import Saving
from lightning_snapshot.stats import Stats
from lightning_snapshot.together import LEAVES, Prepared, Run, Save, begin
from lightning_snapshot.tree import decode_key, encode_key
from lightning_snapshot.write_plan import Holders, RankSpecs, TensorSpec

__all__ = ["MainRankSharing", "begin_as_one", "save_as_one"]

_MAX_NAMED = 5


class MainRankSharing(Protocol):
    """Says what all ranks have in common in a state of which rank 0's is the one that counts."""

    def is_shared(self, key: str) -> bool:
        """Whether rank 0's value of a top-level key counts, whatever other ranks have there."""
        ...

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether all ranks hold a tensor below such a key alike, so that any of them may write it."""
        ...


def save_as_one(
    state: Mapping[str, Any], save: Save, sharing: MainRankSharing, *, check_replicas: bool = False
) -> Stats:
    """Save a state that all ranks have, with what each rank has of its own.

    Of a top-level key that is shared, rank 0's value is stored, and tensors that all ranks hold alike are written by
    all of them, each a part. Tensors that are spread over ranks are stored once, whoever holds them. Of any other key,
    each rank whose value differs from rank 0's stores its own.

    Called on all ranks of the group; returns on each when the snapshot is published.

    Args:
        state: Top-level key → value, nested at will. Tensors are read in place until this returns.
        save: Where and how.
        sharing: What is shared.
        check_replicas: Compare the content of all tensors that all ranks should hold alike.

    Returns:
        What this rank did.

    Raises:
        UnsupportedValueError: A value cannot be stored, or replicas differ; nothing was written.
        StorageError: The storage failed on some rank; what was there before is still there.
        SnapshotError: Another rank failed; the message names it.
    """
    return begin_as_one(state, save, sharing, check_replicas=check_replicas).finish()


def begin_as_one(
    state: Mapping[str, Any], save: Save, sharing: MainRankSharing, *, check_replicas: bool = False
) -> Saving:
    """Begin a save like `save_as_one`, up to the point where tensors are read; everything else is captured by then.

    Args and errors are those of `save_as_one`. Until the save has ended, no other one of the group can begin.
    """

    def prepare(run: Run) -> Prepared:
        summary = _Summary(state, sharing, save.group.world_size)
        opening = run.open(summary.digests)
        described = summary.of_rank_0() if save.group.rank == 0 else summary.of_other(opening, save.group.rank)
        holds = tuple(key for key in summary.shared if summary.digests[key] == opening.keys.get(key))
        replicas = summary.replicas(holds) if check_replicas else {}
        mine = Contribution(described.specs, described.notes, holds, replicas)
        everyone = collect(run.meeting, save.session.heard, opening, mine)
        if everyone is None:
            return opening, described, None, None
        _check_replicas([each.replicas for each in everyone])
        everyone[0] = replace(everyone[0], specs=_with_common(everyone))
        return opening, described, everyone, _holders(everyone)

    return begin(save, prepare)


class _Summary:
    """What a rank has under each top-level key, in a form that can be compared."""

    def __init__(self, state: Mapping[str, Any], sharing: MainRankSharing, world_size: int) -> None:
        self._state = state
        self._sharing = sharing
        self._world_size = world_size
        by_key = _ByKey(sharing)
        self._described = {
            key: describe({key: value}, sharing=by_key, world_size=world_size) for key, value in state.items()
        }
        self.shared = [
            key
            for key, described in self._described.items()
            if sharing.is_shared(key) or any(map(_is_spread, described.specs.values()))
        ]
        self.digests = {
            key: _structure_digest(described) if key in self.shared else _content_digest(described)
            for key, described in self._described.items()
        }

    def of_rank_0(self) -> Described:
        return describe(self._state, sharing=_ByKey(self._sharing), world_size=self._world_size)

    def of_other(self, opening: Opening, rank: int) -> Described:
        """What differs from rank 0, and this rank's parts of tensors that are spread over ranks."""
        own = {
            key: value
            for key, value in self._state.items()
            if key not in self.shared and self.digests[key] != opening.keys.get(key)
        }
        described = describe(own, world_size=self._world_size, alias_prefix=f"{rank}-")
        specs, sources, notes = dict(described.specs), dict(described.sources), described.notes
        for key in self.shared:
            shared = self._described[key]
            specs |= {path: spec for path, spec in shared.specs.items() if _is_spread(spec)}
            sources |= {path: source for path, source in shared.sources.items() if path not in sources}
        return Described(specs, sources, replace(notes, over_rank_0=True))

    def replicas(self, keys: Iterable[str]) -> dict[str, str]:
        """Path → digest of the content of each tensor that all ranks should hold alike."""
        found: dict[str, str] = {}
        for key in keys:
            described = self._described[key]
            for path, spec in described.specs.items():
                source = described.sources.get(path)
                is_split = isinstance(spec, TensorSpec) and spec.replicated and not spec.by_rank_0
                if is_split and isinstance(source, tensors.TensorSource):
                    found[path] = _hash(source)
        return found


@dataclass(frozen=True, slots=True)
class _ByKey:
    sharing: MainRankSharing

    def is_shared(self, path: str) -> bool:
        return self.sharing.is_shared(decode_key(path.partition("/")[0]))

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        return self.sharing.is_split(path, tensor)


def _is_spread(spec: object) -> bool:
    return isinstance(spec, TensorSpec) and spec.box is not None


def _structure_digest(described: Described) -> str:
    """Equal on ranks that could write each other's tensors, as far as these are not spread over ranks."""
    tensor_specs = [
        (path, spec)
        for path, spec in described.specs.items()
        if isinstance(spec, TensorSpec) and spec.replicated and not spec.by_rank_0
    ]
    return xxhash.xxh3_128_hexdigest(repr(tensor_specs).encode())


def _content_digest(described: Described) -> str:
    """Equal for equal values."""
    digest = xxhash.xxh3_128(repr((list(described.specs.items()), described.notes)).encode())
    for source in described.sources.values():
        if isinstance(source, tensors.TensorSource):  # of others, the spec has a digest
            digest.update(_hash(source).encode())
    return digest.hexdigest()


def _hash(source: tensors.TensorSource) -> str:
    if not source.address:
        source = tensors.TensorSource(source.tensor.detach().cpu().contiguous().resolve_conj().resolve_neg())
    return xxhash.xxh3_128_hexdigest(memory_at(source.address, source.tensor.nbytes))


def _check_replicas(replicas: Sequence[Mapping[str, str]]) -> None:
    for path, digest in replicas[0].items():
        wrong = [rank for rank, found in enumerate(replicas) if found.get(path, digest) != digest]
        if wrong:
            ranks = ", ".join(map(str, wrong[:_MAX_NAMED])) + (" and more" if len(wrong) > _MAX_NAMED else "")
            msg = (
                f"{path}: expected equal values on all ranks, found others than rank 0's on rank {ranks}; nothing was "
                "saved. Something in the training changes the ranks' parameters differently"
            )
            raise UnsupportedValueError(msg)


def _with_common(everyone: Sequence[Contribution]) -> RankSpecs:
    """Rank 0's specs, in which everything that no rank has for itself is marked as shared."""
    own = {root for each in everyone[1:] for root in each.notes.roots}

    def marked(path: str, spec: Any) -> Any:
        if not isinstance(spec, LEAVES) or spec.replicated or _is_spread(spec):
            return spec
        if decode_key(path.partition("/")[0]) in own:
            return spec
        if isinstance(spec, TensorSpec):
            return replace(spec, replicated=True, by_rank_0=True)
        return replace(spec, replicated=True)

    return {path: marked(path, spec) for path, spec in everyone[0].specs.items()}


def _holders(everyone: Sequence[Contribution]) -> Holders:
    keys = everyone[0].holds
    return {encode_key(key): [rank for rank, each in enumerate(everyone) if key in each.holds] for key in keys}
