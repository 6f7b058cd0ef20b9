"""Ranks as real processes, with a gloo group.

A server process imports torch once, and each rank is a fork of that server: so a test with four ranks takes a tenth of
a second, and yet every rank is a fresh process.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

needs_fully_shard = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch cannot train with fully_shard without a GPU"
)
_PRELOADED = ["torch", "torch.distributed", "hypothesis", "pytest", "tests.ranks.processes"]
# What the first optimizer step or DTensor would import in each rank.
_PRELOADED += ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "lightning_snapshot.snapshot"]
_GRACE_SECONDS = 10.0  # for the other ranks, after one has failed
_LOG_CHARACTERS = 16000

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


class RanksFailedError(Exception):
    """What went wrong on each rank, with tracebacks and what the ranks have printed."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_seconds: float = 60.0,
    may_die: Collection[int] = (),
    group_timeout_seconds: float = 60.0,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in one process per rank, with ``torch.distributed`` initialised.

    No rank ends before all have returned, so none pulls down what the others still need.

    Args:
        function: Of the top level of a module; so are the classes of its arguments and results.
        world_size: Number of ranks.
        arguments: Anything that pickles.
        timeout_seconds: After this, all ranks are killed, and the stacks of their threads are in the error.
        may_die: Ranks whose process may end without a result; their result is None.
        group_timeout_seconds: Time-out of the process group.

    Returns:
        What the ranks have returned.

    Raises:
        RanksFailedError: A rank has raised, has died, or has taken too long.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        call = pickle.dumps((function.__module__, function.__qualname__, arguments))
        ranks = [
            stack.enter_context(_Rank(rank, world_size, server.port, group_timeout_seconds, call, folder))
            for rank in range(world_size)
        ]
        _collect(ranks, timeout_seconds, may_die)
        failures = [rank.failure for rank in ranks if rank.failure]
        if failures:
            raise RanksFailedError("\n\n".join(failures))
        return [rank.result for rank in ranks]


class _Rank:
    """One process, seen from the test."""

    def __init__(
        self, rank: int, world_size: int, port: int, group_timeout_seconds: float, call: bytes, folder: Path
    ) -> None:
        self.number = rank
        self.result: Any = None
        self.failure = ""
        self._log = folder / f"{rank}.log"
        self.connection, theirs = _context.Pipe()
        self._process: ForkServerProcess = _context.Process(
            target=_run_rank,
            args=(theirs, rank, world_size, port, group_timeout_seconds, call, str(self._log), dict(os.environ)),
            name=f"rank {rank}",
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> "_Rank":  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # lets the process end
        self._process.join(0 if self.failure else _GRACE_SECONDS)
        self._process.kill()
        self._process.join()
        self._process.close()

    def receive(self) -> None:
        """Take the result, or the end of the process."""
        try:
            succeeded, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join()
            self.fail(f"ended without a result, exit code {self._process.exitcode}")
            return
        if succeeded:
            self.result = content
        else:
            self.fail(content)

    def fail(self, reason: str) -> None:
        log = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:] if self._log.exists() else ""
        self.failure = f"==== rank {self.number}: {reason}\n---- its output:\n{log}"

    def fail_with_stacks(self) -> None:
        if not self._process.is_alive():  # and its children keep the connection open
            self.fail(f"ended without a result, exit code {self._process.exitcode}")
            return
        for pid in _with_children(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(2.0)  # nothing says when faulthandler is done
        self.fail("has taken too long")


def _collect(ranks: Sequence[_Rank], timeout_seconds: float, may_die: Collection[int]) -> None:
    pending = {rank.connection: rank for rank in ranks}
    deadline = time.monotonic() + timeout_seconds
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)
            rank.receive()
            if rank.failure and rank.number in may_die:
                rank.failure = ""
            elif rank.failure:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for rank in pending.values():
        rank.fail_with_stacks()


def _with_children(pid: int) -> list[int]:
    """A rank and its children, as the workers of a data loader, which have its log and its handlers."""
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ends meanwhile
            parent = path.read_text().rpartition(")")[2].split()[1]
            found += [int(path.parent.name)] * (int(parent) == pid)
    return found


def tell_stacks() -> None:
    """Let this process print the stacks of its threads when it crashes, and when `run_ranks` asks for them.

    To be called before each ``fit``: Lightning sets back what it knows of signal handlers, which is not these.
    """
    faulthandler.disable()
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _run_rank(
    connection: Connection,
    rank: int,
    world_size: int,
    port: int,
    group_timeout_seconds: float,
    call: bytes,
    log: str,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # who is killed does not flush
    tell_stacks()
    try:
        module, name, arguments = pickle.loads(call)
        function = getattr(importlib.import_module(module), name)
        store = distributed.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_seconds)
        )
        # Nobody may run, and perhaps die, before all are connected.
        if store.add("connected", 1) == world_size:
            store.set("all connected", "")
        store.wait(["all connected"])
        message = pickle.dumps((True, function(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test has to see it
        message = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(message)
    with suppress(EOFError):
        connection.recv_bytes()  # until the test has heard from all ranks
    if distributed.is_initialized():
        distributed.destroy_process_group()
