"""A proxy in front of an emulator that counts, waits, and breaks things on purpose."""

import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """One that comes by.

    Attributes:
        number: Of all, from 1 on.
        method: Its verb.
        path: With what stands behind the question mark.
    """

    number: int
    method: str
    path: str


@dataclass(frozen=True)
class Answer:
    """What the proxy says itself, instead of the emulator."""

    status: int
    body: bytes = b""


RESET = "reset"
"""Pass the request on, and cut the answer off in the middle."""
REFUSE = "refuse"
"""Cut the connection before the request is passed on."""
LOSE = "lose"
"""Pass the request on, and cut the connection instead of an answer."""

Answered = tuple[int, list[tuple[str, str]], bytes | memoryview]
"""Status, headers and content."""

Fault = Callable[[Request], Answer | str | None]


@dataclass
class Proxy:
    """Passes requests on to a port of this machine.

    Attributes:
        target: That port.
        latency_seconds: Before each request is passed on.
        fault: What is wrong with a request.
        faults: How many requests something was wrong with.
        requests: How many there were, by method.
        most_at_once: How many were under way at the same time, at most.
        handler: Handles a connection.
    """

    target: int
    latency_seconds: float = 0.0
    fault: Fault | None = None
    faults: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    handler: "type[Handler] | None" = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._wake = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (self.handler or Handler,), {"proxy": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """End it."""
        self._wake.set()
        self._server.shutdown()
        self._server.server_close()

    def begin(self, method: str, path: str) -> Answer | str | None:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self.requests[method] += 1
            fault = self.fault and self.fault(Request(self.requests.total(), method, path))
            self.faults += fault is not None
        if self.latency_seconds:
            self._wake.wait(self.latency_seconds)
        return fault

    def end(self) -> None:
        with self._lock:
            self._now -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Connections that break are what this is for."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    # Small answers must not wait for more to send.
    disable_nagle_algorithm = True
    _upstream: http.client.HTTPConnection | None = None

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.begin(self.command, self.path)
        try:
            if fault == REFUSE:
                self._cut()
            elif isinstance(fault, Answer):
                self._answer(fault.status, [], fault.body)
            else:
                status, headers, content = self.ask(self.command, self.path, dict(self.headers.items()), body)
                if fault == LOSE:
                    self._cut()
                else:
                    self._answer(status, headers, content, sent_bytes=len(content) // (2 if fault == RESET else 1))
                    if fault == RESET:
                        self._cut()
        finally:
            self.proxy.end()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815  # names of http.server

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answered:
        """Pass a request on."""
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=60)
            self._upstream.connect()
            self._upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self._upstream.putheader(name, value)
        self._upstream.endheaders(body or None)
        response = self._upstream.getresponse()
        content = response.read()
        headers = [(name, value) for name, value in response.getheaders() if name.lower() != "transfer-encoding"]
        if response.will_close:
            self._upstream.close()
            self._upstream = None
        return response.status, headers, content

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, sent_bytes: int | None = None
    ) -> None:
        self.send_response_only(status)
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers = [*headers, ("Content-Length", str(len(content)))]
        for name, value in headers:
            if name.lower() != "connection":
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[:sent_bytes])
        self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        # A reset instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def finish(self):
        if self._upstream is not None:
            self._upstream.close()
        if not self.close_connection or not self.wfile.closed:
            with suppress(OSError):
                super().finish()

    def log_message(self, *_):
        pass
