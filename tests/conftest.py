"""Guards that every test runs under, and the two Lightning distributions as a parameter."""

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# Loaded machines must not fail a test, and a failure in CI must be repeatable at home.
settings.register_profile(
    "project",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")

_LIGHTNING_TESTS = Path(__file__).parent / "lightning"

# What Lightning, torch and scikit-learn set for themselves: put back after each test, but no test's fault.
_SET_BY_LIBRARIES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "GROUP_RANK",
    "KINETO_LOG_LEVEL",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "OMP_NUM_THREADS",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "RANK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TRITON_CACHE_DIR",
    "WORLD_SIZE",
}
_THREAD_GRACE_SECONDS = 10.0


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    leaked = changed - _SET_BY_LIBRARIES - {"PYTEST_CURRENT_TEST"}
    assert not leaked, f"the test changed environment variables and left them so: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in started:
        thread.join(_THREAD_GRACE_SECONDS)
    leaked = [thread.name for thread in started if thread.is_alive()]
    assert not leaked, f"the test left threads behind that keep the interpreter from ending: {leaked}"


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left torch.distributed's process group initialised")


@pytest.fixture(autouse=True)
def _own_working_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning writes to the working folder whatever it is not given a path for.
    if request.path.is_relative_to(_LIGHTNING_TESTS):
        monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@dataclass(frozen=True)
class Namespace:
    """One of the two distributions of Lightning."""

    name: str
    pl: ModuleType
    fabric: ModuleType


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def namespace(request: pytest.FixtureRequest) -> Namespace:
    if request.param == "lightning":
        return Namespace("lightning", import_module("lightning.pytorch"), import_module("lightning.fabric"))
    return Namespace("pytorch_lightning", import_module("pytorch_lightning"), import_module("lightning_fabric"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that start many processes more time, and what several of them share: the machine may be busy."""
    for item in items:
        if item.get_closest_marker("distributed") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))
