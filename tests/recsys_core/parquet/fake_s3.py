"""A fake S3 server that answers the requests of pyarrow: HEAD, GET with a byte range, and listings."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY_ID = "test-key"
"""The access key that the server accepts."""
_XML_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'


@dataclass
class FakeStore:
    """The objects of the server and the byte ranges that were read."""

    port: int
    objects: dict[str, bytes] = field(default_factory=dict)
    num_reads_to_drop: int = 0
    """The server closes the connection instead of answering the next `num_reads_to_drop` reads with a byte range."""
    read_ranges: list[tuple[str, int, int]] = field(default_factory=list)
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
    """HEAD and GET requests for the objects and the listings of the bucket `bucket`."""

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
        if f"Credential={ACCESS_KEY_ID}/" not in self.headers.get("Authorization", ""):
            self._send(403, _error_body("AccessDenied"), with_body=with_body)
        elif bucket != "bucket":
            self._send(404, _error_body("NoSuchBucket"), with_body=with_body)
        elif not key:
            self._send(200, _listing_body(store.objects, parse_qs(url.query)) if with_body else b"", with_body=with_body)
        elif key not in store.objects:
            self._send(404, _error_body("NoSuchKey"), with_body=with_body)
        else:
            self._send_object(store, key, with_body=with_body)

    def _send_object(self, store: FakeStore, key: str, *, with_body: bool) -> None:
        content = store.objects[key]
        byte_range = self.headers.get("Range")
        if byte_range is None:
            self._send(200, content, with_body=with_body)
            return
        first_byte, last_byte = byte_range.removeprefix("bytes=").split("-")
        requested_bytes = content[int(first_byte) : int(last_byte) + 1]
        store.read_ranges.append((key, int(first_byte), len(requested_bytes)))
        if store.num_reads_to_drop:
            store.num_reads_to_drop -= 1
            self.close_connection = True
            return
        self._send(
            206,
            requested_bytes,
            with_body=with_body,
            headers={"Content-Range": f"bytes {first_byte}-{last_byte}/{len(content)}"},
        )

    def _send(self, status: int, body: bytes, *, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        default_headers = {"Content-Length": str(len(body)), "Last-Modified": "Thu, 19 Nov 2026 02:00:00 GMT", "ETag": '"1"'}
        for header_name, header_value in (default_headers | (headers or {})).items():
            self.send_header(header_name, header_value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not print the request."""


def _error_body(code: str) -> bytes:
    return f"{_XML_DECLARATION}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing_body(objects: dict[str, bytes], query: dict[str, list[str]]) -> bytes:
    """Return the XML list of the keys with the prefix of `query`. The delimiter of `query` groups keys into folders."""
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    folder_prefixes, object_elements = set(), []
    for key in sorted(key for key in objects if key.startswith(prefix)):
        folder_name, separator, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
        if separator:
            folder_prefixes.add(prefix + folder_name + separator)
        else:
            object_fields = (
                f"<Size>{len(objects[key])}</Size><LastModified>2026-11-19T02:00:00.000Z</LastModified><ETag>1</ETag>"
            )
            object_elements.append(f"<Contents><Key>{escape(key)}</Key>{object_fields}</Contents>")
    prefix_elements = "".join(
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folder_prefixes)
    )
    count_elements = f"<KeyCount>{len(object_elements)}</KeyCount><IsTruncated>false</IsTruncated>"
    result_elements = count_elements + "".join(object_elements) + prefix_elements
    return f"{_XML_DECLARATION}<ListBucketResult>{result_elements}</ListBucketResult>".encode()
