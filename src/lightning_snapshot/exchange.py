"""What the ranks of a save tell each other: specs to rank 0, plans back, receipts to rank 0.

What a rank has said, or was told, in the save before is replaced by its digest, so that from the second save of an
unchanged structure on, only values travel. Everything is encoded by msgspec: nothing that arrives can run code.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from lightning_snapshot.group import Meeting
from lightning_snapshot.manifest import DictEntry, FileRecord, ListEntry, OrderedDictEntry, PrimitiveEntry, RankNotes
from lightning_snapshot.session import Heard
from lightning_snapshot.storage import DATA_FOLDER
from lightning_snapshot.write_plan import BlobSpec, FilePlan, RankSpecs, TensorSpec

__all__ = ["Contribution", "Opening", "Part", "collect", "distribute", "hand_in", "open_save"]

_T = TypeVar("_T")


class Opening(msgspec.Struct, frozen=True):
    """The first word of rank 0.

    Attributes:
        save_id: The save.
        path: Where it goes; rank 0's path counts.
        token: Of the save before, as rank 0 remembers it.
        keys: Top-level key → digest of what rank 0 has there; empty where each rank stores what it has.
    """

    save_id: str
    path: str
    token: str
    keys: dict[str, str] = {}


_Kind: TypeAlias = TensorSpec | ListEntry | DictEntry | OrderedDictEntry | None


class _Structure(msgspec.Struct, frozen=True):
    """What seldom changes.

    Models have few kinds of tensors, so each kind is said once: ``numbers`` tells which one each path has. ``None`` is
    the kind of what is among the values.
    """

    holds: tuple[str, ...]
    paths: tuple[str, ...]
    kinds: tuple[_Kind, ...]
    numbers: tuple[int, ...]
    notes: RankNotes


class _Values(msgspec.Struct, frozen=True):
    """What changes from save to save."""

    primitives: dict[str, PrimitiveEntry]
    blobs: dict[str, BlobSpec]
    replicas: dict[str, str]


class _Message(msgspec.Struct, frozen=True):
    """``content`` is left out if the receiver knows it by its digest, from the save before.

    ``remembers`` says whether the sender knows what it was told then.
    """

    digest: bytes
    content: bytes
    values: bytes
    remembers: bool = False


class Contribution(msgspec.Struct, frozen=True):
    """What one rank brings into a save.

    Attributes:
        specs: What it has.
        notes: What the entries cannot say.
        holds: Top-level keys whose shared tensors it has just like rank 0.
        replicas: Path → digest of the content of a tensor that all ranks should hold alike, if that is checked.
    """

    specs: RankSpecs
    notes: RankNotes
    holds: tuple[str, ...] = ()
    replicas: dict[str, str] = {}


class Part(msgspec.Struct, frozen=True):
    """What one rank has to do: the files to write, and how to join the save."""

    invitation: str
    files: tuple[FilePlan, ...]


def open_save(meeting: Meeting, opening: Opening | None) -> Opening:
    """Tell all ranks what rank 0 is about to save; the others pass ``None``."""
    return _decode(meeting.broadcast("opening", b"" if opening is None else _encode(opening)), Opening)


def collect(meeting: Meeting, heard: Heard, opening: Opening, mine: Contribution) -> list[Contribution] | None:
    """Give rank 0 what each rank brings.

    Returns:
        On rank 0 all contributions, by rank; on the others nothing.
    """
    primitives = {path: spec for path, spec in mine.specs.items() if isinstance(spec, PrimitiveEntry)}
    blobs = {path: spec for path, spec in mine.specs.items() if isinstance(spec, BlobSpec)}
    content = _encode(_structure(mine))
    digest = _digest(content)
    remembers = heard.token == opening.token != ""
    repeated = remembers and heard.said == digest
    values = _encode(_Values(primitives, blobs, mine.replicas))
    heard.said = digest
    gathered = meeting.gather("specs", _encode(_Message(digest, b"" if repeated else content, values, remembers)))
    if gathered is None:
        return None
    messages = [_decode(each, _Message) for each in gathered]
    known: dict[bytes, Contribution] = {}
    met: dict[Any, Any] = {}
    contributions = [_contribution(message, heard, known, met) for message in messages]
    heard.contributions = known
    heard.remembering = [message.remembers for message in messages]
    return contributions


def _structure(mine: Contribution) -> _Structure:
    kinds: list[Any] = []
    numbers: list[int] = []
    known: dict[object, int] = {}
    for spec in mine.specs.values():
        kind = None if isinstance(spec, (PrimitiveEntry, BlobSpec)) else spec
        # Containers have lists in them, which cannot be looked up.
        number = known.setdefault(kind if kind is None or isinstance(kind, TensorSpec) else id(kind), len(kinds))
        if number == len(kinds):
            kinds.append(kind)
        numbers.append(number)
    return _Structure(mine.holds, tuple(mine.specs), tuple(kinds), tuple(numbers), mine.notes)


def _contribution(
    message: _Message, heard: Heard, known: dict[bytes, Contribution], met: dict[Any, Any]
) -> Contribution:
    """What a rank brings; ``known`` gets it without the values."""
    bare = known.get(message.digest) or heard.contributions.get(message.digest)
    if bare is None:
        structure = _decode(message.content, _Structure)
        # Equal paths are one text, and equal specs one object, which makes comparing them cheap.
        paths = map(met.setdefault, structure.paths, structure.paths)
        kinds = [met.setdefault(kind, kind) if isinstance(kind, TensorSpec) else kind for kind in structure.kinds]
        specs: Any = dict(zip(paths, map(kinds.__getitem__, structure.numbers), strict=True))
        bare = Contribution(specs, structure.notes, structure.holds)
    known[message.digest] = bare
    values = _decode(message.values, _Values)
    if not (values.primitives or values.blobs or values.replicas):
        return bare
    return Contribution({**bare.specs, **values.primitives, **values.blobs}, bare.notes, bare.holds, values.replicas)


def distribute(meeting: Meeting, heard: Heard, opening: Opening, parts: Sequence[Part] | None) -> Part:
    """Give every rank its part of the plan; only rank 0 has ``parts``."""
    messages: list[bytes] = []
    if parts is not None:
        digests = []
        for rank, part in enumerate(parts):
            content = _encode(_relocated(part.files, f"{DATA_FOLDER}/{opening.save_id}/", ""))
            digests.append(_digest(content))
            repeated = heard.remembering[rank] and heard.parts[rank] == digests[-1]
            messages.append(_encode(_Message(digests[-1], b"" if repeated else content, part.invitation.encode())))
        heard.parts = digests
    message = _decode(meeting.scatter("plan", messages), _Message)
    content = heard.told = message.content or heard.told
    files = _decode(content, tuple[FilePlan, ...])
    return Part(message.values.decode(), _relocated(files, "", f"{DATA_FOLDER}/{opening.save_id}/"))


def _relocated(files: Sequence[FilePlan], before: str, now: str) -> tuple[FilePlan, ...]:
    return tuple(FilePlan(now + file.location[len(before) :], file.size_bytes, file.pieces) for file in files)


def hand_in(meeting: Meeting, receipts: dict[str, FileRecord]) -> dict[str, FileRecord] | None:
    """Give rank 0 the receipts of all ranks; the others get nothing."""
    gathered = meeting.gather("receipts", _encode(receipts))
    if gathered is None:
        return None
    everybody: dict[str, FileRecord] = {}
    for each in gathered:
        everybody |= _decode(each, dict[str, FileRecord])
    return everybody


def _encode(value: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value), 1)


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(zlib.decompress(data), type=kind)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
