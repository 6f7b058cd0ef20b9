"""What a disk may hold after a power cut.

The model assumes less than any local file system gives, so that what passes here is safe on ext4 in any ``data=`` mode,
XFS, btrfs and whatever else keeps POSIX:

- *Content* of a file is durable as of the last fsync of it. What was written or reserved since, past the page cache or
  not, may be there, missing, zero, cut off, there in some sectors of 512 bytes only, or what the disk held before.
- *Names* (an entry made, removed, renamed or exchanged in a folder) are durable once one of the folders concerned is
  synced. Of later changes any subset may have happened. To sync a file does not make its name durable, to sync a folder
  neither its own name nor anything in the folders below it.
- A rename or an exchange of names is *atomic*: it has happened wholly or not at all, and what it names exists. POSIX
  says so only of what running programs see; every journaling file system keeps it across a power cut, too.
- A sector is never damaged once it is durable, and a sync that returns has reached the medium. Disks with a cache that
  lies are beyond what a program can do anything about.

Subsets are more than what file systems with one ordered journal (ext4, XFS) can show: these leave prefixes.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tests.edges.faulty_posix import FaultyPosix

_SECTOR_BYTES = 512


@dataclass(eq=False, slots=True)
class File:
    """A file; ``content`` is what the disk held at first."""

    content: bytes = b""


@dataclass(eq=False, slots=True)
class Folder:
    """A folder: its names at first and now."""

    first: dict[str, "Node"] = field(default_factory=dict)
    now: dict[str, "Node"] = field(default_factory=dict)


Node: TypeAlias = File | Folder | Path
"""A `Path` is what a link contains."""

Tree: TypeAlias = dict[str, bytes | Path | None]
"""Path → content of a file, target of a link, or None for a folder, which comes before what is in it."""


@dataclass(eq=False, slots=True)
class Named:
    """Names changed, in one step: in which folder, which name, and what it stands for from now on."""

    changes: tuple[tuple[Folder, str, Node | None], ...]


@dataclass(frozen=True, slots=True)
class Written:
    file: File
    offset_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Synced:
    node: File | Folder


class Disk:
    """Remembers everything that happens below a folder, to say what a power cut at any time may have left of it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.log: list[Named | Written | Synced] = []
        self._root = _scan(base)

    def find(self, path: Path) -> Any:
        node = self._root
        for part in path.relative_to(self.base).parts:
            node = node.now[part]
        return node

    def rename(self, *moves: tuple[Path, Node | None]) -> None:
        """Let paths stand for something else, in one step."""
        changes = tuple((self.find(path.parent), path.name, node) for path, node in moves)
        for folder, name, node in changes:
            folder.now.pop(name, None)
            if node is not None:
                folder.now[name] = node
        self.log.append(Named(changes))

    def survivors(self, length: int, chance: random.Random, *, complete: bool) -> Iterator[Tree]:
        """Trees that a power cut after the first ``length`` entries of the log may leave, each once."""
        names, synced, written = self._replay(length)
        pending = [named for named, is_durable in names if not is_durable]
        choices: list[tuple[Collection[Named], str]] = [
            ((), "lost"),
            (pending, "torn"),
            ([named for named in pending if chance.random() < 0.5], "any"),
        ]
        if complete:
            choices += [(pending, how) for how in _CONTENTS]
            choices += [(pending[:end], "any") for end in range(len(pending))]
            choices += [((named,), "any") for named in pending]
            choices += [([other for other in pending if other is not named], "any") for named in pending]
        seen: set[frozenset[Any]] = set()
        for chosen, how in choices:
            happened = [named for named, is_durable in names if is_durable or named in chosen]
            tree = self._tree(happened, lambda file, how=how: _content(file, synced, written, how, chance))
            if (key := frozenset(tree.items())) not in seen:
                seen.add(key)
                yield tree

    def _replay(self, length: int) -> tuple[list[tuple[Named, bool]], dict[File, bytes], dict[File, bytes]]:
        names: list[tuple[Named, bool]] = []
        written: dict[File, bytes] = {}
        synced: dict[File, bytes] = {}
        for event in self.log[:length]:
            if isinstance(event, Named):
                names.append((event, False))
            elif isinstance(event, Written):
                old = written.get(event.file, event.file.content).ljust(event.offset_bytes, b"\0")
                end = event.offset_bytes + len(event.data)
                written[event.file] = old[: event.offset_bytes] + event.data + old[end:]
            elif isinstance(event.node, File):
                synced[event.node] = written.get(event.node, event.node.content)
            else:
                names = [
                    (named, is_durable or any(folder is event.node for folder, _, _ in named.changes))
                    for named, is_durable in names
                ]
        return names, synced, written

    def _tree(self, names: Iterable[Named], content: Callable[[File], bytes]) -> Tree:
        entries: dict[Folder, dict[str, Node]] = {}
        for named in names:
            for folder, name, node in named.changes:
                inside = entries.setdefault(folder, dict(folder.first))
                inside.pop(name, None)
                if node is not None:
                    inside[name] = node
        tree: Tree = {}

        def walk(folder: Folder, prefix: str) -> None:
            for name, node in entries.get(folder, folder.first).items():
                if isinstance(node, Folder):
                    tree[prefix + name] = None
                    walk(node, f"{prefix}{name}/")
                else:
                    tree[prefix + name] = content(node) if isinstance(node, File) else node

        walk(self._root, "")
        return tree


def _scan(path: Path) -> Any:
    if path.is_symlink():
        return path.readlink()
    if path.is_file():
        return File(path.read_bytes())
    nodes = {entry.name: _scan(entry) for entry in path.iterdir()}
    return Folder(nodes, dict(nodes))


def _content(
    file: File, synced: dict[File, bytes], written: dict[File, bytes], how: str, chance: random.Random
) -> bytes:
    durable = synced.get(file, file.content)
    latest = written.get(file, durable)
    if latest == durable:
        return durable
    return _CONTENTS[chance.choice(list(_CONTENTS)) if how == "any" else how](durable, latest, chance)


def _torn(durable: bytes, latest: bytes, chance: random.Random) -> bytes:
    durable = durable.ljust(len(latest), b"\0")
    sectors = range(0, len(latest), _SECTOR_BYTES)
    return b"".join(chance.choice((durable, latest))[at : at + _SECTOR_BYTES] for at in sectors)


_CONTENTS: dict[str, Callable[[bytes, bytes, random.Random], bytes]] = {
    "lost": lambda durable, latest, chance: durable,
    "whole": lambda durable, latest, chance: latest,
    "zero": lambda durable, latest, chance: bytes(len(latest)),
    "stale": lambda durable, latest, chance: chance.randbytes(len(latest)),
    "cut off": lambda durable, latest, chance: latest[: chance.randrange(len(latest))],
    "torn": _torn,
}


def build(tree: Tree, folder: Path) -> None:
    """Make the files of a tree."""
    folder.mkdir(parents=True)
    for name, node in tree.items():
        path = folder / name
        if node is None:
            path.mkdir()
        elif isinstance(node, Path):
            path.symlink_to(node)
        else:
            path.write_bytes(node)


class RecordingPosix(FaultyPosix):
    """Real or faulty system calls, of which a `Disk` is told."""

    def __init__(self, disk: Disk, **faults: Any) -> None:
        super().__init__(**faults)
        self.disk = disk
        self._files: dict[int, File] = {}

    def _perform(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._perform(name, real, args, kwargs)
        record = getattr(self, f"_record_{name}", None)
        if record is not None:
            record(result, *args)
        return result

    def _record_make_folder(self, _: None, path: Path) -> None:
        self.disk.rename((path, Folder()))

    def _record_create_file(self, descriptor: int, path: Path) -> None:
        self._files[descriptor] = file = File()
        self.disk.rename((path, file))

    def _record_open_direct(self, descriptor: int | None, path: Path) -> None:
        if descriptor is not None:
            self._files[descriptor] = self.disk.find(path)

    def _record_close(self, _: None, descriptor: int) -> None:
        self._files.pop(descriptor, None)

    def _record_allocate(self, _: None, descriptor: int, size_bytes: int) -> None:
        self.disk.log.append(Written(self._files[descriptor], 0, bytes(size_bytes)))

    def _record_write(self, count: int, descriptor: int, buffer: memoryview, offset_bytes: int) -> None:
        self.disk.log.append(Written(self._files[descriptor], offset_bytes, bytes(buffer[:count])))

    def _record_sync(self, _: None, descriptor: int) -> None:
        self.disk.log.append(Synced(self._files[descriptor]))

    def _record_sync_folder(self, _: None, path: Path) -> None:
        self.disk.log.append(Synced(self.disk.find(path)))

    def _record_rename(self, _: None, source: Path, target: Path) -> None:
        self.disk.rename((source, None), (target, self.disk.find(source)))

    def _record_exchange(self, _: None, first: Path, second: Path) -> None:
        self.disk.rename((first, self.disk.find(second)), (second, self.disk.find(first)))

    def _record_unlink(self, _: None, path: Path) -> None:
        self.disk.rename((path, None))

    _record_remove_folder = _record_unlink
