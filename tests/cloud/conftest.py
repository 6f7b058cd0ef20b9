"""Emulators that run as long as the tests of a process, and places in them that nobody else uses."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from tests.cloud import servers
from tests.cloud.proxy import Proxy
from tests.conftest import Namespace
from tests.lightning.conftest import cls, make_trainer, plugin_arguments  # noqa: F401  # fixtures for these tests, too

_numbers = itertools.count()


@dataclass(frozen=True)
class Cloud:
    """An emulator and a folder in it.

    Attributes:
        server: The emulator.
        folder: URL of an empty folder.
    """

    server: servers.Server
    folder: str

    @property
    def options(self) -> dict[str, Any]:
        """With which it is reached."""
        return self.server.options()


@pytest.fixture(scope="session")
def running(tmp_path_factory) -> Iterator[Callable[[str], servers.Server]]:
    """Gives an emulator by its name; started when it is first asked for."""
    started: dict[str, servers.Server] = {}

    def get(name: str) -> servers.Server:
        if name not in started:
            assert (servers.ROOT / ".stamp").exists(), "the emulators are not installed: run `make servers`"
            started[name] = servers.ALL[name](tmp_path_factory.mktemp(name))
        return started[name]

    yield get
    for server in started.values():
        server.stop()


def _cloud(server: servers.Server) -> Cloud:
    return Cloud(server, f"{server.scheme}://{servers.BUCKET}/run-{next(_numbers)}")


@pytest.fixture(params=sorted(servers.ALL))
def cloud(request, running) -> Cloud:
    """Each of the three."""
    return _cloud(running(request.param))


@pytest.fixture
def s3(running) -> Cloud:
    """S3 alone."""
    return _cloud(running("s3"))


@pytest.fixture
def proxy(cloud) -> Iterator[Proxy]:
    """A proxy in front of the emulator of ``cloud``."""
    proxy = Proxy(cloud.server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def namespace(cloud) -> Namespace:
    """One distribution of Lightning for each store, which is enough: stores do not know it."""
    if cloud.server.scheme == "gs":
        return Namespace("pytorch_lightning", import_module("pytorch_lightning"), import_module("lightning_fabric"))
    return Namespace("lightning", import_module("lightning.pytorch"), import_module("lightning.fabric"))


@pytest.fixture
def in_environment(monkeypatch) -> Callable[[Cloud], None]:
    """Puts into the environment how an emulator is reached, as users of the real store have it."""

    def put(cloud: Cloud) -> None:
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
            monkeypatch.delenv(name)
        for name, value in cloud.server.environment().items():
            monkeypatch.setenv(name, value)

    return put
