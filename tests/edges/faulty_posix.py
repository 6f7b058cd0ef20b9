"""System calls that fail, stop or are watched when a test says so."""

import errno
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_snapshot.storage.posix import Posix


class SimulatedCrash(BaseException):
    """The process is gone: nothing that it would still do has an effect."""


@dataclass(frozen=True)
class Call:
    name: str
    paths: tuple[Path, ...]
    """Paths that were given, or the path behind the descriptor that was given."""


class FaultyPosix(Posix):
    """The real system calls, except that nothing waits for the disk.

    Args:
        fail_at: Number of the call, from 1 on, that fails.
        error: ``errno`` of that failure.
        crash_at: Number of the call that is not made any more, and none after it.
        pause_at: Number of the call that is made only when ``pause`` has returned.
        pause: What happens meanwhile.
        short_at: Number of the only call to which ``most_bytes`` applies; 0 stands for all.
        without: Calls that the file system does not know: ``"exchange"``, ``"lock"``, ``"open_direct"``.
        most_bytes: How much one read or write transfers at most.
        before: Call name → what to do just before each such call.
        after: Call name → what to do just after each such call.
    """

    def __init__(
        self,
        *,
        fail_at: int = 0,
        error: int = errno.ENOSPC,
        crash_at: int = 0,
        pause_at: int = 0,
        pause: Callable[[], None] | None = None,
        short_at: int = 0,
        without: Collection[str] = (),
        most_bytes: int | None = None,
        before: dict[str, Callable[..., None]] | None = None,
        after: dict[str, Callable[..., None]] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.fail_at = fail_at
        self.error = error
        self.crash_at = crash_at
        self.pause_at = pause_at
        self.pause = pause or (lambda: None)
        self.short_at = short_at
        self.without = without
        self.most_bytes = most_bytes
        self.before = before or {}
        self.after = after or {}
        self.crashed = False
        self._lock = threading.Lock()
        self._open: dict[int, Path] = {}

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self.crashed or len(self.calls) + 1 == self.crash_at:
                self.crash()
            paths = tuple(arg for arg in args if isinstance(arg, Path))
            if args and isinstance(args[0], int):
                paths = (self._open[args[0]],)
            self.calls.append(Call(name, paths))
            number = len(self.calls)
        if number == self.pause_at:
            self.pause()
        failed = number == self.fail_at
        if failed and name != "close":
            raise OSError(self.error, os.strerror(self.error))
        if name in self.before:
            self.before[name](*paths)
        if name in ("read", "write") and self.most_bytes is not None and self.short_at in (0, number):
            args = (args[0], args[1][: self.most_bytes], args[2])
        result = self._perform(name, real, args, kwargs)
        if name in self.after:
            self.after[name](*paths)
        if failed:
            # Also when it reports an error, the descriptor is gone.
            raise OSError(self.error, os.strerror(self.error))
        return result

    def _perform(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("sync", "sync_folder"):
            return None
        if name == "lock" and name in self.without:
            return False
        if name == "open_direct" and name in self.without:
            return None
        if name in self.without:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if name == "close":
            del self._open[args[0]]  # now, because another thread can get the same number as soon as it is closed
        result = real(self, *args, **kwargs)
        if name in ("open_folder", "create_file", "open_file", "open_direct") and result is not None:
            self._open[result] = args[0]
        return result

    def crash(self) -> None:
        self.crashed = True
        for descriptor in list(self._open):
            os.close(descriptor)
            del self._open[descriptor]
        raise SimulatedCrash

    @property
    def descriptors(self) -> list[int]:
        """What is open now."""
        return list(self._open)

    @property
    def open_paths(self) -> list[Path]:
        """What is still open: leaked, once everything is over."""
        return list(self._open.values())


def _watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: FaultyPosix, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, real, *args, **kwargs)

    return method


for _name, _real in list(vars(Posix).items()):
    if not _name.startswith("_"):
        setattr(FaultyPosix, _name, _watched(_name, _real))
