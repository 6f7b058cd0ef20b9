"""A server that speaks as much of S3 as the clients of a benchmark need: ``python s3_server.py LATENCY_SECONDS``.

Emulators like moto take ten times as much processor time for a byte as any client does, on the same cores, so all
clients would look alike. This one takes and gives, and answers late; it checks no signature and computes no hash.

Prints its address. Then it prints, for each line that it reads, how many requests there were since the last one, and
how many of them at once at most; ``empty`` removes everything.
"""

import itertools
import json
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import numpy as np

_MODIFIED = time.time()
_ETAG = '"etag"'


@dataclass
class Store:
    """What the server holds; a large object stays in the parts in which it came.

    Attributes:
        latency_seconds: Before each answer.
        objects: Bucket and key → parts.
        uploads: Id → number → part.
        requests: How many there were.
        most_at_once: How many were under way, at most.
    """

    latency_seconds: float
    objects: dict[str, list[memoryview]] = field(default_factory=dict)
    uploads: dict[str, dict[int, memoryview]] = field(default_factory=dict)
    requests: int = 0
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def begin(self) -> None:
        """A request comes."""
        with self._lock:
            self.requests += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)

    def end(self) -> None:
        """It is answered."""
        with self._lock:
            self._now -= 1

    def begin_upload(self) -> str:
        """The id of a new one."""
        upload = str(next(self._ids))
        self.uploads[upload] = {}
        return upload

    def listing(self, bucket: str, prefix: str, delimiter: str) -> str:
        """The objects of a bucket, and what looks like folders, as XML."""
        folders = set()
        lines = []
        for key in sorted(self.objects):
            name = key.removeprefix(f"{bucket}/")
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            time_text = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(_MODIFIED))
            size_bytes = sum(map(len, self.objects[key]))
            details = f"<LastModified>{time_text}</LastModified><ETag>{_ETAG}</ETag><Size>{size_bytes}</Size>"
            lines.append(f"<Contents><Key>{escape(name)}</Key>{details}</Contents>")
        lines += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{head}<KeyCount>{len(lines)}</KeyCount>{''.join(lines)}</ListBucketResult>"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store

    def _handle(self) -> None:
        self.store.begin()
        try:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            path = unquote(url.path).strip("/")
            body = self._body()
            time.sleep(self.store.latency_seconds)
            if "/" in path:
                getattr(self, f"_{self.command.lower()}")(path, query, body)
            else:
                self._bucket(path, query, body)
        finally:
            self.store.end()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815  # names of http.server

    def _body(self) -> memoryview:
        body = memoryview(np.empty(int(self.headers.get("Content-Length") or 0), np.uint8))
        rest = body[self.rfile.readinto1(body) :] if body else body
        while rest:
            # One call for all of it: threads that wake up for each packet would take the time of those who send.
            count = self.connection.recv_into(rest, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError
            rest = rest[count:]
        return body

    def _bucket(self, bucket: str, query: dict[str, str], body: memoryview) -> None:
        text = ""
        if "delete" in query:
            keys = re.findall("<Key>(.*?)</Key>", bytes(body).decode())
            for key in keys:
                self.store.objects.pop(f"{bucket}/{unescape(key)}", None)
            text = f"<DeleteResult>{''.join(f'<Deleted><Key>{key}</Key></Deleted>' for key in keys)}</DeleteResult>"
        elif self.command == "GET":
            text = self.store.listing(bucket, query.get("prefix", ""), query.get("delimiter", ""))
        self._answer(200, [memoryview(text.encode())])

    def _put(self, path: str, query: dict[str, str], body: memoryview) -> None:
        source = self.headers.get("x-amz-copy-source")
        if source:
            self.store.objects[path] = self.store.objects[unquote(source).strip("/")]
            self._answer(200, [memoryview(f"<CopyObjectResult><ETag>{_ETAG}</ETag></CopyObjectResult>".encode())])
            return
        if "uploadId" in query:
            self.store.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.store.objects[path] = [body]
        self._answer(200)

    def _post(self, path: str, query: dict[str, str], body: memoryview) -> None:
        if "uploads" in query:
            text = f"<UploadId>{self.store.begin_upload()}</UploadId>"
            name = "InitiateMultipartUploadResult"
        else:
            parts = self.store.uploads.pop(query["uploadId"])
            self.store.objects[path] = [parts[number] for number in sorted(parts)]
            text, name = f"<ETag>{_ETAG}</ETag>", "CompleteMultipartUploadResult"
        bucket, _, key = path.partition("/")
        text = f"<{name}><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>{text}</{name}>"
        self._answer(200, [memoryview(text.encode())])

    def _delete(self, path: str, query: dict[str, str], body: memoryview) -> None:
        if "uploadId" in query:
            self.store.uploads.pop(query["uploadId"], None)
        else:
            self.store.objects.pop(path, None)
        self._answer(204)

    def _get(self, path: str, query: dict[str, str], body: memoryview) -> None:
        parts = self.store.objects.get(path)
        if parts is None:
            self._answer(404, [memoryview(b"<Error><Code>NoSuchKey</Code></Error>")])
            return
        size_bytes = sum(map(len, parts))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            self._answer(200, parts)
            return
        begin, end = int(asked[1]), min(int(asked[2] or size_bytes) + 1, size_bytes)
        self._answer(206, _cut(parts, begin, end), {"Content-Range": f"bytes {begin}-{end - 1}/{size_bytes}"})

    _head = _get

    def _answer(
        self, status: int, parts: list[memoryview] | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response_only(status)
        content = parts or []
        standard = {
            "Content-Length": str(sum(map(len, content))),
            "ETag": _ETAG,
            "Last-Modified": formatdate(_MODIFIED, usegmt=True),
        }
        for name, value in {**standard, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for part in content:
                self.wfile.write(part)


def _cut(parts: list[memoryview], begin: int, end: int) -> list[memoryview]:
    """The bytes of a range, not copied."""
    found = []
    for part in parts:
        if begin < len(part) and end > 0:
            found.append(part[max(begin, 0) : end])
        begin, end = begin - len(part), end - len(part)
    return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(latency_seconds: str) -> None:
    """Run until standard input ends."""
    store = Store(float(latency_seconds))
    server = _Server(("127.0.0.1", 0), type("Handler", (Handler,), {"store": store}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    for line in sys.stdin:
        if line.strip() == "empty":
            store.objects.clear()
        print(json.dumps([store.requests, store.most_at_once]), flush=True)
        store.requests = store.most_at_once = 0


if __name__ == "__main__":
    main(*sys.argv[1:])
