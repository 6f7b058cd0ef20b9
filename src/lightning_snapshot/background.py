"""What goes on behind the training of one process: one save at a time, and whatever has to come after it."""

import atexit
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_snapshot.errors import SaveCancelledError
from lightning_snapshot.memory import BufferPool
from lightning_snapshot.saving import PendingSave, Saving
from lightning_snapshot.stats import Stats
from lightning_snapshot.writing import Keep

__all__ = ["Background", "Failure", "note_failure", "take_back"]

_logger = logging.getLogger("lightning_snapshot")

# Where nobody asks, as in Fabric, only the last ones are kept.
_MAX_PUBLISHED = 100
_Action: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """Something behind the training that failed.

    Attributes:
        path: What it was about.
        error: Why.
        is_save: Whether it was a save, which fails on all ranks that take part. Anything else fails on this one alone.
        process: Whose; one that is forked from it has nothing to do with it.
    """

    path: str
    error: BaseException
    is_save: bool = True
    process: int = field(default_factory=os.getpid)


@dataclass(slots=True)
class _Job:
    path: str
    pending: PendingSave | None = None
    is_over: bool = False
    is_published: bool = False
    after: list[tuple[str, _Action]] = field(default_factory=list)


class Background:
    """The one save that goes on, and removals that wait for it.

    Called by the training thread, and by signal handlers in it. What fails is kept until `take_failures` gives it out.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come at any moment
        self._start_anew()

    def _start_anew(self) -> None:
        self._process = os.getpid()
        self._last: _Job | None = None
        self._failures: list[Failure] = []
        self._published: deque[tuple[str, Stats]] = deque(maxlen=_MAX_PUBLISHED)
        self._unsaved: list[str] = []  # paths of saves that were given up, skipped or failed
        self._skipped: str | None = None  # path of the last save, if it was skipped
        # Path of a save that is not there → what was to be done after it, and is done when that path is to go.
        self._kept: dict[str, list[tuple[str, _Action]]] = {}

    def __reduce__(self) -> tuple[type["Background"], tuple[()]]:
        """A copy, in this process or another one, starts with nothing."""
        return Background, ()

    @property
    def pending(self) -> str | None:
        """The path of the save that goes on."""
        job = self._job
        return None if job is None or job.is_over else job.path

    @property
    def _job(self) -> _Job | None:
        if self._process != os.getpid():  # the threads of the process that was forked are not here
            self._lock = threading.RLock()
            self._start_anew()
        return self._last

    def start(
        self, path: str, saving: Saving, pool: BufferPool, keep: Keep | None = None, *, check: bool = False
    ) -> None:
        """Copy the state, and let the rest of a save go on behind. No other save goes on.

        Args:
            path: Where it goes.
            saving: What has begun.
            pool: Memory for the copy. If it is too small, this waits until enough is written.
            keep: Tensors that need no copy until `fence` is called.
            check: Compare their content with what is read later.

        Raises:
            SnapshotError: The state could not be copied, or another rank failed meanwhile.
        """
        job = _Job(path)
        job.pending = PendingSave(saving, lambda result: self._end(job, result))
        fits = saving.writing.unread_bytes <= pool.limit_bytes
        if fits:
            # Copying goes faster while nothing is written.
            try:
                saving.capture(pool, keep, check=check)
            except BaseException as error:
                saving.abandon(error)
                raise
        with self._lock:
            self._last, self._skipped = job, None
        job.pending.start()
        if not fits:
            try:
                saving.capture(pool, keep, check=check)
            except BaseException as error:
                job.pending.exception()
                self._forget(error)
                raise

    def skip(self, path: str) -> None:
        """Note a save that is not done at all, because another one goes on. What it would have replaced stays."""
        with self._lock:
            self._skipped = path
            self._unsaved.append(path)

    def fence(self, pool: BufferPool) -> None:
        """Copy whatever of the save that goes on is not read yet: from now on, the state may change.

        What fails here lets that save fail, and is raised with it.
        """
        job = self._job
        if job is not None and not job.is_over and job.pending is not None:
            try:
                job.pending.capture(pool)
            except Exception as error:  # noqa: BLE001  # training goes on; the save has failed, and tells
                _logger.debug("the state for %s could not be copied: %s", job.path, error)

    def after_save(self, path: str, action: _Action) -> None:
        """Do something about a path: now, or when the save that goes on is published.

        If the last save is not published in the end, it is not done, because what is at the path may be the last good
        snapshot. It is done later then, when somebody asks for the same of the path of that save.
        """
        job = self._job
        with self._lock:
            if self._skipped is not None:
                self._keep(self._skipped, [(path, action)])
                return
            if job is not None and not job.is_over:
                job.after.append((path, action))
                return
            if job is not None and not job.is_published and path != job.path:
                self._keep(job.path, [(path, action)])
                return
            actions = self._with_kept(path, action)
        for each in actions:
            each()

    def wait_for(self, path: str) -> None:
        """Wait for the save that goes on, if something is to be done about a path after it."""
        job = self._job
        if job is not None and any(path == each for each, _ in job.after):
            self.settle()

    def _keep(self, missing: str, actions: Iterable[tuple[str, _Action]]) -> None:
        for path, action in actions:
            if path != missing:
                _logger.warning("%s stays, because %s, which was to take its place, is not saved", path, missing)
                self._kept.setdefault(missing, []).append((path, action))

    def _with_kept(self, path: str, action: _Action) -> list[_Action]:
        kept = self._kept.pop(path, [])
        return [*(each for pair in kept for each in self._with_kept(*pair)), action]

    def cancel(self) -> None:
        """Give up the save that goes on, unless it is published before that."""
        job = self._job
        if job is not None and not job.is_over and job.pending is not None:
            _logger.info("giving up %s for a newer save", job.path)
            job.pending.cancel(SaveCancelledError(f"{job.path} was given up for a newer save"))

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing goes on any more; says whether that is so. What has failed is kept."""
        job = self._job
        if job is None or job.pending is None:
            return True
        try:
            job.pending.exception(timeout_seconds)
        except TimeoutError:
            return False
        return True

    def unsaved(self) -> list[tuple[str, list[str]]]:
        """Paths of saves that have failed or were given up, and what may stay in their place."""
        with self._lock:
            return [(path, self._kept_for(path)) for path in self._unsaved]

    def forget_unsaved(self, path: str) -> None:
        """Somebody has dealt with a path of `unsaved`."""
        with self._lock:
            self._unsaved.remove(path)

    def fails_alone(self) -> bool:
        """Whether what has failed since `take_failures` is known to this rank only."""
        with self._lock:
            return bool(self._failures) and not any(failure.is_save for failure in self._failures)

    def _kept_for(self, path: str) -> list[str]:
        return [each for kept, _ in self._kept.get(path, []) for each in (kept, *self._kept_for(kept))]

    def forget_kept(self, path: str) -> None:
        """Somebody has taken over what stays in place of a path."""
        with self._lock:
            for kept, _ in self._kept.pop(path, []):
                self.forget_kept(kept)

    def _forget(self, error: BaseException) -> None:
        with self._lock:
            for failure in [each for each in self._failures if each.error is error]:
                self._failures.remove(failure)
                take_back(failure)

    def take_failures(self) -> list[Failure]:
        """What has failed since the last call; then it is forgotten."""
        with self._lock:
            failures, self._failures = self._failures, []
        for failure in failures:
            take_back(failure)
        return failures

    def take_published(self) -> list[tuple[str, Stats]]:
        """The saves that were published since the last call, in order."""
        with self._lock:
            published = list(self._published)
            self._published.clear()
            return published

    def note_published(self, path: str, stats: Stats) -> None:
        """Note a save that did not go on behind training."""
        with self._lock:
            self._last = self._skipped = None
            self._published.append((path, stats))

    def _end(self, job: _Job, result: Stats | BaseException) -> None:
        """Do what had to wait; in the thread of the save."""
        with self._lock:
            if isinstance(result, Stats):
                job.is_published = True
                self._published.append((job.path, result))
            else:
                self._unsaved.append(job.path)
                self._keep(job.path, job.after)
                job.after.clear()
                if isinstance(result, SaveCancelledError):
                    _logger.info("%s", result)
                else:
                    self._note(Failure(job.path, result))
        while True:
            with self._lock:
                if not job.after:
                    job.is_over = True
                    return
                path, action = job.after[0]  # it stays there while it is done, so that `wait_for` waits for it
                actions = self._with_kept(path, action)
            self._do(path, actions)
            with self._lock:
                job.after.pop(0)

    def _do(self, path: str, actions: Iterable[_Action]) -> None:
        try:
            for each in actions:
                each()
        except BaseException as error:  # noqa: BLE001  # raised where the training can take it
            with self._lock:
                self._note(Failure(path, error, is_save=False))

    def _note(self, failure: Failure) -> None:
        self._failures.append(failure)
        note_failure(failure)


# --- the end of the program ------------------------------------------------------------------------------------------

_untold: list[Failure] = []


def note_failure(failure: Failure) -> None:
    """Let the program end with an error message and exit status 1, unless the failure is taken back until then."""
    _untold.append(failure)


def take_back(failure: Failure) -> None:
    """Somebody has been told of a failure."""
    if failure in _untold:
        _untold.remove(failure)


@atexit.register
def _report() -> None:
    """Python has waited for the saves that went on. If one failed and nobody was told, the program must show it."""
    untold = [failure for failure in _untold if failure.process == os.getpid()]
    for failure in untold:
        text = f"lightning-snapshot: {failure.path}: {type(failure.error).__name__}: {failure.error}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # loggers may be gone
    if untold:
        sys.stdout.flush()
        os._exit(1)  # the only way left to say so
