"""Copies between the CPU and other devices, on a stream beside that of the training.

All calls to a device's module are here: `torch.cuda`, and whatever else `torch.get_device_module` knows, `torch.cpu`
included, whose streams do nothing.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_snapshot.memory import Buffer

__all__ = ["SideStreams"]


class SideStreams:
    """The streams of one save or load, one per device. Any thread may use them.

    Args:
        module_of: Gives the module with ``Stream``, ``Event``, ``stream`` and ``current_stream`` of a device.
    """

    def __init__(self, module_of: Callable[[torch.device], Any] = torch.get_device_module) -> None:
        self._module_of = module_of
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Let the copies to come wait for the work that the calling thread has queued so far."""
        for device in devices:
            stream = self._stream(device)
            if stream is not None:
                stream.wait_stream(self._module_of(device).current_stream(device))

    @contextmanager
    def beside_training(self, device: torch.device, buffer: Buffer) -> Iterator[None]:
        """Queue the copies of the ``with`` block, to or from a buffer, on the side stream, and wait for them.

        Other threads read, write and hash meanwhile; so copies and storage overlap.
        """
        stream = self._stream(device)
        if stream is None:
            yield
            return
        if device.type == "cuda":
            _pin(buffer)
        module = self._module_of(device)
        with module.stream(stream):
            try:
                yield
            finally:
                # Also after an error: the buffer goes to somebody else next.
                done = module.Event()
                done.record(stream)
                done.synchronize()

    def _stream(self, device: torch.device) -> Any:
        """The side stream of a device; ``None`` for one without streams, on which every copy is complete at once."""
        if device.type == "meta":  # has no module at all
            return None
        module = self._module_of(device)
        if not hasattr(module, "Stream"):
            return None
        with self._lock:
            if device not in self._streams:
                self._streams[device] = module.Stream(device)
            return self._streams[device]


def _pin(buffer: Buffer) -> None:
    """Make a buffer reachable for the copy engine of the GPU, which needs memory that stays where it is."""
    if buffer.unpin is not None:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
    # Without it, copies are slower, but right: so a refusal (a limit on locked memory) is no error.
    if int(runtime.cudaHostRegister(buffer.address, len(buffer.view), 0)) == 0:
        address = buffer.address
        buffer.unpin = lambda: runtime.cudaHostUnregister(address)
    else:
        buffer.unpin = _nothing


def _nothing() -> None: ...
