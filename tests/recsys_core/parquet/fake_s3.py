"""A fake S3 server that answers the requests of pyarrow: HEAD, GET with a byte range, and listings."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "test-key"
"""The access key that the server accepts."""
_XML_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass
class FakeStore:
    """The objects of the server and the byte ranges that were read."""

    port: int
    objects: dict[str, bytes] = field(default_factory=dict)
    num_drops: int = 0
    """Number of further reads that the server answers by closing the connection."""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Key, first byte and number of bytes of each read with a byte range."""

    def uri(self, key: str) -> str:
        return f"s3://bucket/{key}?scheme=http&endpoint_override=127.0.0.1:{self.port}"


@contextmanager
def run_store() -> Iterator[FakeStore]:
    """Run the server on a free port. It has an empty bucket named `bucket`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    store = FakeStore(server.server_address[1])
    server.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers HEAD and GET requests for objects and listings of the bucket `bucket`."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # with two packets per answer, the second would wait 40 ms for the acknowledgement of the first

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        store: FakeStore = self.server.store  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._send(403, _error("AccessDenied"), with_body=with_body)
        elif bucket != "bucket":
            self._send(404, _error("NoSuchBucket"), with_body=with_body)
        elif not key:
            self._send(200, _listing(store.objects, parse_qs(url.query)) if with_body else b"", with_body=with_body)
        elif key not in store.objects:
            self._send(404, _error("NoSuchKey"), with_body=with_body)
        else:
            self._object(store, key, with_body=with_body)

    def _object(self, store: FakeStore, key: str, *, with_body: bool) -> None:
        content = store.objects[key]
        byte_range = self.headers.get("Range")
        if byte_range is None:
            self._send(200, content, with_body=with_body)
            return
        first_byte, last_byte = byte_range.removeprefix("bytes=").split("-")
        requested_bytes = content[int(first_byte) : int(last_byte) + 1]
        store.ranges.append((key, int(first_byte), len(requested_bytes)))
        if store.num_drops:
            store.num_drops -= 1
            self.close_connection = True
            return
        self._send(
            206,
            requested_bytes,
            with_body=with_body,
            headers={"Content-Range": f"bytes {first_byte}-{last_byte}/{len(content)}"},
        )

    def _send(self, status: int, content: bytes, *, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        defaults = {"Content-Length": str(len(content)), "Last-Modified": "Thu, 19 Nov 2026 02:00:00 GMT", "ETag": '"1"'}
        for name, value in (defaults | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Do not print the request."""


def _error(code: str) -> bytes:
    return f"{_XML_DECLARATION}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing(objects: dict[str, bytes], query: dict[str, list[str]]) -> bytes:
    """Return the XML answer to a request for the keys with a prefix. Keys are grouped into folders by the delimiter."""
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    folders, entries = set(), []
    for key in sorted(key for key in objects if key.startswith(prefix)):
        folder, separator, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
        if separator:
            folders.add(prefix + folder + separator)
        else:
            object_fields = (
                f"<Size>{len(objects[key])}</Size><LastModified>2026-11-19T02:00:00.000Z</LastModified><ETag>1</ETag>"
            )
            entries.append(f"<Contents><Key>{escape(key)}</Key>{object_fields}</Contents>")
    prefix_elements = "".join(
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)
    )
    count_elements = f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>false</IsTruncated>"
    return (
        f"{_XML_DECLARATION}<ListBucketResult>{count_elements}{''.join(entries)}{prefix_elements}</ListBucketResult>".encode()
    )
