"""A save between its plan and its end: what it reads can be captured, and the rest can go on behind."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from lightning_snapshot.manifest import FileRecord
from lightning_snapshot.memory import BufferPool
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.writing import Keep, Writing

__all__ = ["PendingSave", "Saving"]


@dataclass(frozen=True, slots=True)
class Saving:
    """A save that is planned and has begun. It ends with `finish` or `abandon`, each called once, by any thread.

    Attributes:
        writing: What has to be written.
        meter: Notes what is done.
        publish: Does the rest when everything is written.
        stack: What has to end with the save; if that fails, nothing of it is left.
    """

    writing: Writing
    meter: Meter
    publish: Callable[[dict[str, FileRecord]], Stats]
    stack: ExitStack

    def capture(self, pool: BufferPool, keep: Keep | None = None, *, check: bool = False) -> None:
        """Copy what has not been read yet. When this returns, the state may change, except for what is kept.

        If the pool may be too small for all of it, `finish` must be going on in another thread.

        Args:
            pool: Gives memory for the copies.
            keep: See `Writing.capture`.
            check: Compare the content of what is kept with what is read later.
        """
        with self.meter.stage("capture"), self.meter.stalling():
            self.writing.capture(pool, keep)
            if check:
                self.writing.note_content()

    def finish(self) -> Stats:
        """Write everything, and publish it.

        Raises:
            StorageError: The storage failed; what was there before is still there.
            SnapshotError: Another rank failed; the message names it.
        """
        with self.stack:
            with self.meter.stage("write"):
                receipts = self.writing.run()
            return self.publish(receipts)

    def abandon(self, error: BaseException) -> None:
        """End the save without publishing it.

        Args:
            error: Why. The other ranks of the save raise it.
        """
        self.stack.__exit__(type(error), error, error.__traceback__)


class PendingSave:
    """A save that goes on in a thread of its own. Any thread may ask how it does.

    The thread is no daemon: a program that ends waits for it.

    Args:
        saving: What has begun.
        then: Called in that thread when the save has ended, with its record or what made it fail, before anybody who
            waits goes on.
    """

    def __init__(self, saving: Saving, then: Callable[[Stats | BaseException], object] | None = None) -> None:
        self._saving: Saving | None = saving  # and with it the caller's tensors
        self._then = then
        self._future: Future[Stats] = Future()
        self._thread = threading.Thread(target=self._work, name="lightning-snapshot-save")

    def start(self) -> None:
        """Begin to write."""
        self._future.set_running_or_notify_cancel()
        try:
            self._thread.start()
        except BaseException as error:
            saving, self._saving = self._saving, None
            if saving is not None:
                saving.abandon(error)
            self._future.set_exception(error)
            raise

    def capture(self, pool: BufferPool) -> None:
        """Copy what has not been read yet; see `Saving.capture`."""
        saving = self._saving
        if saving is not None:
            saving.capture(pool)

    def cancel(self, error: BaseException) -> None:
        """Let the save end with an error, unless it is published before that."""
        saving = self._saving
        if saving is not None:
            saving.writing.cancel(error)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> Stats:
        """Wait for the end.

        Raises:
            TimeoutError: It has not come in time.
            BaseException: What made the save fail.
        """
        return self._future.result(timeout_seconds)

    def exception(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Wait for the end, and tell what made the save fail; ``None`` if it is published.

        Raises:
            TimeoutError: The end has not come in time.
        """
        return self._future.exception(timeout_seconds)

    def add_done_callback(self, callback: Callable[["PendingSave"], object]) -> None:
        """Call a function at the end, in the thread of the save; at once if it has ended."""
        self._future.add_done_callback(lambda _: callback(self))

    def _work(self) -> None:
        result: Stats | BaseException
        try:
            if self._saving is None:  # not before it is set below
                return
            result = self._saving.finish()
        except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
            result = error
        then, self._saving, self._then = self._then, None, None
        try:
            if then is not None:
                then(result)
        except BaseException as error:  # noqa: BLE001  # as above; whoever waits must not wait for ever
            result = error
        if isinstance(result, Stats):
            self._future.set_result(result)
        else:
            self._future.set_exception(result)
