"""What the metadata of a snapshot wants of its files, checked entry by entry as a load by each rank would take it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from lightning_snapshot.errors import MetadataError
from lightning_snapshot.geometry import Box, whole
from lightning_snapshot.manifest import (
    DTensorEntry,
    Extension,
    FileRecord,
    Manifest,
    ObjectEntry,
    PrimitiveEntry,
    RankNotes,
    ShardedTensorEntry,
    TensorNote,
    split_rank,
)
from lightning_snapshot.read_plan import StoredTensor, TensorLike, plan_read, stored_tensor
from lightning_snapshot.rebuild import StateTree, read_primitive
from lightning_snapshot.storage import METADATA_NAME
from lightning_snapshot.storage.locations import normalise_location
from lightning_snapshot.tensors import TensorTarget, dtype_named, finish
from lightning_snapshot.view import Located, view_of_rank

__all__ = ["TO_THE_END", "Claim", "Problem", "Survey"]

TO_THE_END = 2**63
"""End of a stretch that reaches to the end of its file, wherever that is."""

# What loads accept; see there.
_MAX_BLOCK_BYTES = 64 * 1024 * 1024
_WIDEST_ELEMENT_BYTES = 16
_MAX_NAMED = 5

Kind: TypeAlias = Literal["damaged", "inconsistent", "missing"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a load would refuse, or get wrong.

    Attributes:
        kind: ``"damaged"`` (bytes are not what was written), ``"missing"`` (a file is gone) or ``"inconsistent"`` (the
            metadata contradicts itself).
        location: File, relative to the snapshot.
        byte_range: ``[begin, end)`` in it; ``None`` if the problem is not about a part of it.
        expected: What should be there; empty if ``found`` says it all.
        found: What is there.
        tensors: ``<rank>/<path>`` of the values that cannot be loaded because of it.
    """

    kind: Kind
    location: str
    byte_range: tuple[int, int] | None
    expected: str
    found: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        place = f", bytes {self.byte_range[0]} to {self.byte_range[1]}" if self.byte_range else ""
        what = f"expected {self.expected}, found {self.found}" if self.expected else self.found
        named = ", ".join(self.tensors[:_MAX_NAMED])
        more = f" and {len(self.tensors) - _MAX_NAMED} more" if len(self.tensors) > _MAX_NAMED else ""
        return f"{self.kind}: {self.location}{place}: {what}" + (f" (affects {named}{more})" if named else "")


class Claim(NamedTuple):
    """A stretch of a file that a value needs. Claims sort by place.

    Attributes:
        location: The file.
        begin_bytes: Start (inclusive).
        end_bytes: End (exclusive); `TO_THE_END` if only the file tells.
        path: Manifest path of the value.
        owner: Values of one owner share their bytes: tied tensors, equal objects.
        is_whole: The file holds nothing else.
        is_zip: The content is in ``torch.save``'s format.
    """

    location: str
    begin_bytes: int
    end_bytes: int
    path: str
    owner: str
    is_whole: bool
    is_zip: bool


class Survey:
    """Goes through the entries of all ranks.

    Args:
        manifest: The metadata.

    Attributes:
        problems: Contradictions in it.
        claims: What the entries want, in order.
        records: What is noted of each file; empty for snapshots of torchsnapshot.
        block_bytes: Stretch of a file that has one checksum; of no meaning without records.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._extension = manifest.extension
        self._seen: set[str] = set()
        self.problems: list[Problem] = []
        self.claims: list[Claim] = []
        self.records: dict[str, FileRecord] = {}
        self.block_bytes = _WIDEST_ELEMENT_BYTES
        for rank in sorted({split_rank(path)[0] for path in manifest.entries}):
            self._check_rank(rank)
        self.claims.sort()
        self.problems += _find_overlaps(self.claims)
        if manifest.extension is not None:
            self._check_extension(manifest.extension)

    def _add(self, found: str, *paths: str, expected: str = "") -> None:
        self.problems.append(Problem("inconsistent", METADATA_NAME, None, expected, found, paths))

    def _notes(self, rank: str) -> RankNotes | None:
        return None if self._extension is None else self._extension.ranks.get(rank, RankNotes())

    def _check_extension(self, extension: Extension) -> None:
        if extension.block_bytes > _MAX_BLOCK_BYTES or extension.block_bytes % _WIDEST_ELEMENT_BYTES:
            limits = f"blocks of at most {_MAX_BLOCK_BYTES} bytes, a multiple of {_WIDEST_ELEMENT_BYTES}"
            self._add(f"blocks of {extension.block_bytes} bytes", expected=limits)
            return
        self.block_bytes = extension.block_bytes
        for location, record in extension.files.items():
            try:
                self.records[normalise_location(location, METADATA_NAME)] = record
            except MetadataError as error:  # noqa: PERF203  # one bad name must not hide the others
                self._add(str(error))

    def _check_rank(self, rank: int) -> None:
        try:
            view = view_of_rank(self._manifest, rank)
        except MetadataError as error:
            self._add(str(error))
            return
        notes = self._notes(str(rank))
        tree = StateTree({path: located.entry for path, located in view.items()}, notes)
        # Of a rank that stands on rank 0, the notes are about its own top-level keys only; it may have none.
        if notes is None or notes.roots or not notes.over_rank_0:
            for root in tree.roots.values():
                self._check_containers(tree, root)
            self._check_containers(tree)
        for logical_path, located in view.items():
            # A sharded tensor is the same one for all ranks, each of which has an entry of it.
            is_sharded = isinstance(located.entry, (ShardedTensorEntry, DTensorEntry))
            key = f"*/{logical_path}" if is_sharded else located.path
            if key not in self._seen:
                self._seen.add(key)
                self._check_entry(view, logical_path, located)

    def _check_containers(self, tree: StateTree, *root: str) -> None:
        try:
            tree.leaf_paths(root, with_root_attributes=not root)
        except MetadataError as error:
            self._add(str(error))

    def _check_entry(self, view: Mapping[str, Located], logical_path: str, located: Located) -> None:
        notes = self._notes(located.path.partition("/")[0]) or RankNotes()
        owner = view.get(notes.tied.get(logical_path, logical_path), located).path
        try:
            self.claims += self._claims(located, notes.tensors.get(logical_path), owner)
        except MetadataError as error:
            self._add(str(error), located.path)

    def _claims(self, located: Located, note: TensorNote | None, owner: str) -> Iterator[Claim]:
        """What an entry wants.

        Raises:
            MetadataError: It contradicts itself.
        """
        path, entry = located.path, located.entry
        if isinstance(entry, PrimitiveEntry):
            read_primitive(path, entry)
        tensors: dict[str, tuple[StoredTensor, int, Box | None]] = {}
        objects: dict[str, tuple[str, tuple[int, int] | None]] = {}
        if isinstance(entry, ObjectEntry):
            objects[path] = entry.location, None
        elif isinstance(entry, TensorLike):
            tensor = stored_tensor(path, entry)
            tensors[path] = tensor, _item_bytes(path, tensor, note), None
        plan = plan_read(tensors, objects)
        for fetch in plan.fetches:
            location = self._location(path, fetch.location)
            is_whole = fetch.file_size_bytes is not None
            yield Claim(location, fetch.begin_bytes, fetch.end_bytes, path, owner, is_whole, is_zip=False)
        for blob in plan.blobs:
            location = self._location(path, blob.location)
            begin, end = blob.byte_range or (0, TO_THE_END)
            # We store equal objects once.
            of_blob = owner if self._extension is None else location
            yield Claim(location, begin, end, path, of_blob, is_whole=blob.byte_range is None, is_zip=True)

    def _location(self, path: str, location: str) -> str:
        if self._extension is not None and location not in self._extension.files:
            msg = f"{path}: expected a record of its file {location}, found none"
            raise MetadataError(msg)
        return normalise_location(location, path)


def _item_bytes(path: str, tensor: StoredTensor, note: TensorNote | None) -> int:
    """Bytes of an element, after the dtypes and the note have been looked at."""
    if all(piece.is_zip for piece in tensor.pieces) and (not tensor.dtype or tensor.dtype.startswith("torch.q")):
        return 0  # from before 2022-06, or quantized: the files tell what is in them
    stored = dtype_named(tensor.dtype, path)
    if note is None:
        return stored.itemsize
    dtype = dtype_named(note.dtype, path) if note.dtype else stored
    if dtype.itemsize != stored.itemsize:
        msg = f"{path}: expected a stored dtype as wide as {dtype}, found {stored}"
        raise MetadataError(msg)
    if not any(piece.is_zip for piece in tensor.pieces):
        # What a load would do, without memory.
        target = TensorTarget.allocate(dtype, whole(tensor.shape), note.dim_order, torch.device("meta"), path)
        finish(target.tensor, note, path)
    return stored.itemsize


def _find_overlaps(claims: Sequence[Claim]) -> Iterator[Problem]:
    """Find stretches that two values claim: one has been written over the other. ``claims`` are in order."""
    last: Claim | None = None
    for claim in claims:
        if last is None or claim.location != last.location:
            last = claim
            continue
        end = min(last.end_bytes, claim.end_bytes)
        # Two pieces of one tensor never share.
        is_shared = claim[:3] == last[:3] and claim.owner == last.owner and claim.path != last.path
        if claim.begin_bytes < end and not is_shared:
            both = (last.path, claim.path)
            expected, found = "bytes of one value", f"{both[0]} and {both[1]}"
            yield Problem("inconsistent", claim.location, (claim.begin_bytes, end), expected, found, both)
        last = max(last, claim, key=lambda claim: claim.end_bytes)
