"""Copies on a stream beside that of the training, with a device whose streams only say what is asked of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_snapshot.devices import SideStreams
from lightning_snapshot.execute import Means, read_all
from lightning_snapshot.geometry import whole
from lightning_snapshot.memory import Buffer, BufferPool
from lightning_snapshot.read_plan import plan_read, stored_tensor
from lightning_snapshot.restore import load
from lightning_snapshot.save import save
from lightning_snapshot.stats import Meter
from lightning_snapshot.tensors import TensorSource, TensorTarget, tensor_spec
from lightning_snapshot.write_plan import Layout, plan_write
from lightning_snapshot.writing import Writing
from tests.engine.strategies import SMALL, new_storage, same

XPU = torch.device("xpu", 1)
CPU = torch.device("cpu")


class Device:
    """A module such as ``torch.xpu`` or ``torch.cuda``, as far as it is needed.

    Attributes:
        calls: What was asked of it, in order; streams are ``"training"`` and ``"side"``.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.lock = threading.Lock()

    def note(self, *call: str) -> None:
        with self.lock:
            self.calls.append(call)

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=f"training on {device}")

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802  # torch's name
        self.note("new stream", str(device))
        name = f"side on {device}"
        return SimpleNamespace(name=name, wait_stream=lambda other: self.note("wait", name, other.name))

    def Event(self) -> SimpleNamespace:  # noqa: N802  # torch's name
        return SimpleNamespace(
            record=lambda stream: self.note("record", stream.name), synchronize=lambda: self.note("synchronize")
        )

    @contextmanager
    def stream(self, stream):
        self.note("enter", stream.name)
        yield
        self.note("leave", stream.name)


def with_device() -> tuple[SideStreams, Device]:
    device = Device()
    return SideStreams(lambda _: device), device


def test_copies_wait_for_what_the_training_has_queued():
    streams, device = with_device()
    other = torch.device("xpu", 0)
    streams.follow([XPU, other])
    streams.follow([XPU])
    assert device.calls == [
        ("new stream", "xpu:1"),
        ("wait", "side on xpu:1", "training on xpu:1"),
        ("new stream", "xpu:0"),
        ("wait", "side on xpu:0", "training on xpu:0"),
        ("wait", "side on xpu:1", "training on xpu:1"),
    ]


IN_A_COPY = [("enter", "side on xpu:1"), ("body",), ("record", "side on xpu:1"), ("synchronize",)]


def test_a_copy_runs_on_the_side_stream_and_is_waited_for():
    streams, device = with_device()
    for _ in range(2):
        with streams.beside_training(XPU, Buffer(64)):
            device.note("body")
    copies = [*IN_A_COPY, ("leave", "side on xpu:1")]
    assert device.calls == [("new stream", "xpu:1"), *copies, *copies]


def test_a_copy_that_fails_is_waited_for_too():
    # What it has queued must not write into a buffer that has gone to somebody else.
    streams, device = with_device()

    def copy() -> None:
        with streams.beside_training(XPU, Buffer(64)):
            device.note("body")
            raise ValueError("the copy's error")

    with pytest.raises(ValueError, match="the copy's error"):
        copy()
    assert device.calls[1:] == IN_A_COPY


def test_all_threads_use_one_stream():
    streams, device = with_device()
    start = threading.Barrier(8, timeout=60)

    def copy(_: int) -> None:
        start.wait()
        with streams.beside_training(XPU, Buffer(64)):
            pass

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(copy, range(8)))
    assert [call for call in device.calls if call[0] == "new stream"] == [("new stream", "xpu:1")]


def test_a_device_without_streams_is_just_used():
    streams = SideStreams(lambda _: SimpleNamespace())
    streams.follow([XPU])
    with streams.beside_training(XPU, Buffer(64)):
        pass


def test_the_cpu_has_streams_that_do_nothing():
    streams = SideStreams()
    streams.follow([CPU])
    with streams.beside_training(CPU, Buffer(64)):
        pass


def test_a_state_is_loaded_to_the_device_without_memory():
    storage, state = new_storage(), {"t": torch.arange(12.0).reshape(3, 4).t(), "p": torch.nn.Parameter(torch.ones(3))}
    save(state, storage, save_id="s", options=SMALL)
    found = load(storage, rank=0, options=SMALL, device=torch.device("meta"))
    assert {key: (value.device.type, value.shape, type(value)) for key, value in found.items()} == {
        "t": ("meta", (4, 3), torch.Tensor),
        "p": ("meta", (3,), torch.nn.Parameter),
    }


# --- a save and a load ------------------------------------------------------------------------------------------------


def test_all_that_is_not_a_row_of_memory_is_copied_beside_the_training():
    device, storage = Device(), new_storage()
    streams = SideStreams(lambda _: device)
    means = Means(BufferPool(256, 64), 64, 2, Meter("save", "s"), streams)
    state = {"turned": torch.arange(60.0).reshape(4, 15).t(), "rows": torch.arange(60.0)}
    plan = plan_write([{path: tensor_spec(tensor) for path, tensor in state.items()}], Layout("s", 10**6, 10**6))
    transaction = storage.begin("s")
    sources = {path: TensorSource(tensor) for path, tensor in state.items()}
    records = Writing(plan.files[0], sources, transaction, means).run()
    # 240 bytes in blocks of 64.
    side, training = "side on cpu", "training on cpu"
    assert device.calls[:2] == [("new stream", "cpu"), ("wait", side, training)]
    names = [call[0] for call in device.calls[2:]]
    assert {name: names.count(name) for name in names} == dict.fromkeys(("enter", "record", "synchronize", "leave"), 4)

    transaction.commit(b"{}")
    device.calls.clear()
    entries = {path: plan.entries[f"0/{path}"] for path in state}
    wanted = {path: (stored_tensor(path, entry), 4, None) for path, entry in entries.items()}
    targets = {"turned": torch.zeros(4, 15).t(), "rows": torch.zeros(60)}
    places = {path: TensorTarget(tensor, whole(tuple(tensor.shape))) for path, tensor in targets.items()}
    read_all(plan_read(wanted, {}), places.__getitem__, storage, records, means, verify=True)
    assert same(targets, state)
    assert [call[0] for call in device.calls].count("synchronize") == 4
