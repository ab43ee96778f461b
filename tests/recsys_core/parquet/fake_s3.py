"""A fake S3 server with the requests that pyarrow sends: HEAD, ranged GET and listings."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "test-key"
"""The access key that it accepts."""
_XML = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass
class Store:
    """The objects of the store and the ranges that were read. The connection of the next `drops` reads is dropped."""

    port: int
    objects: dict[str, bytes] = field(default_factory=dict)
    drops: int = 0
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    """key, first byte, bytes"""

    def uri(self, key: str) -> str:
        return f"s3://bucket/{key}?scheme=http&endpoint_override=127.0.0.1:{self.port}"


@contextmanager
def running() -> Iterator[Store]:
    """Run a store with an empty bucket named `bucket`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    store = Store(server.server_address[1])
    server.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in two packets would wait 40 ms for the acknowledgement of the first

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        store: Store = self.server.store  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._send(403, _error("AccessDenied"), body=body)
        elif bucket != "bucket":
            self._send(404, _error("NoSuchBucket"), body=body)
        elif not key:
            self._send(200, _listing(store.objects, parse_qs(url.query)) if body else b"", body=body)
        elif key not in store.objects:
            self._send(404, _error("NoSuchKey"), body=body)
        else:
            self._object(store, key, body=body)

    def _object(self, store: Store, key: str, *, body: bool) -> None:
        content = store.objects[key]
        byte_range = self.headers.get("Range")
        if byte_range is None:
            self._send(200, content, body=body)
            return
        first, last = byte_range.removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1]
        store.reads.append((key, int(first), len(part)))
        if store.drops:
            store.drops -= 1
            self.close_connection = True
            return
        self._send(206, part, body=body, headers={"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def _send(self, status: int, content: bytes, *, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        defaults = {"Content-Length": str(len(content)), "Last-Modified": "Thu, 19 Nov 2026 02:00:00 GMT", "ETag": '"1"'}
        for name, value in (defaults | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _error(code: str) -> bytes:
    return f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing(objects: dict[str, bytes], query: dict[str, list[str]]) -> bytes:
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    folders, entries = set(), []
    for key in sorted(key for key in objects if key.startswith(prefix)):
        folder, separator, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
        if separator:
            folders.add(prefix + folder + separator)
        else:
            facts = f"<Size>{len(objects[key])}</Size><LastModified>2026-11-19T02:00:00.000Z</LastModified><ETag>1</ETag>"
            entries.append(f"<Contents><Key>{escape(key)}</Key>{facts}</Contents>")
    common = "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders))
    count = f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>false</IsTruncated>"
    return f"{_XML}<ListBucketResult>{count}{''.join(entries)}{common}</ListBucketResult>".encode()
