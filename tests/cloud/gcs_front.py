"""In front of fake-gcs-server: the part of Google's XML interface that it lacks and obstore uses, by way of the other.

Uploads (whole and in parts) and copies are translated to the JSON interface; everything else is passed on.
"""

import hashlib
import re
import threading
from itertools import count
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.cloud.proxy import Answered, Handler

__all__ = ["GcsFront"]


class GcsFront(Handler):
    """Handles one connection."""

    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}
    _numbers: ClassVar[count] = count(1)
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def ask(self, method, path, headers, body) -> Answered:
        url = urlsplit(path)
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if not name or method not in ("PUT", "POST", "DELETE"):
            answered = super().ask(method, path, headers, body)
            # How Google says it.
            return (404, [], b"<Error><Code>NoSuchBucket</Code></Error>") if answered[0] == 500 else answered
        upload_id = query.get("uploadId", [""])[0]
        if method == "POST" and "uploads" in query:
            with self._lock:
                upload_id = str(next(self._numbers))
                self.uploads[upload_id] = {}
            return _xml("InitiateMultipartUploadResult", f"<Key>{name}</Key><UploadId>{upload_id}</UploadId>")
        if upload_id and upload_id not in self.uploads:
            return 404, [], b"<Error><Code>NoSuchUpload</Code></Error>"
        if method == "PUT" and upload_id:
            self.uploads[upload_id][int(query["partNumber"][0])] = body
            return 200, [("ETag", _tag(body))], b""
        if method == "DELETE" and upload_id:
            del self.uploads[upload_id]
            return 204, [], b""
        if method == "POST" and upload_id:
            parts = self.uploads.pop(upload_id)
            numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
            content = b"".join(parts[number] for number in numbers)
            status, _, text = self._store(bucket, name, content)
            tag = f"<ETag>{_tag(content)}</ETag>"
            return _xml("CompleteMultipartUploadResult", tag) if status == 200 else (status, [], text)
        if method == "PUT" and "x-goog-copy-source" in headers:
            source_bucket, _, source = unquote(headers["x-goog-copy-source"]).lstrip("/").partition("/")
            source_path = f"/storage/v1/b/{source_bucket}/o/{quote(source, safe='')}"
            target = f"/copyTo/b/{bucket}/o/{quote(name, safe='')}"
            return super().ask("POST", source_path + target, {"Host": "127.0.0.1", "Content-Length": "0"}, b"")
        if method == "PUT":
            status, _, text = self._store(bucket, name, body)
            return status, [("ETag", _tag(body)), ("x-goog-generation", "1")], b"" if status == 200 else text
        return super().ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", headers, b"")

    def _store(self, bucket, name, content) -> Answered:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        headers = {
            "Host": "127.0.0.1",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(content)),
        }
        return super().ask("POST", path, headers, content)


def _tag(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _xml(name: str, inner: str) -> Answered:
    content = f"<?xml version='1.0' encoding='UTF-8'?><{name}>{inner}</{name}>".encode()
    return 200, [("Content-Type", "application/xml")], content
