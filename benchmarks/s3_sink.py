"""Answers the part of S3 that a mirror needs, and forgets what is uploaded: for benchmarks, not a store.

    python -m benchmarks.s3_sink [--cores 14,15] [--tls CERTIFICATE KEY]

Prints its port on 127.0.0.1. Objects of at most 1 MiB are kept in memory, of larger ones only the size. So a mirror's
settings and manifests are there as they were written, and gigabytes of blobs cost this machine nothing but their way
through the socket. Nobody is asked for credentials, and every bucket is there.
"""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEPT_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
WHEN = "2026-01-01T00:00:00.000Z"
HEADER_WHEN = "Thu, 01 Jan 2026 00:00:00 GMT"
MARKED = re.compile(r"<Key>(.*?)</Key>", re.DOTALL)


class Body(NamedTuple):
    """Holds what was sent. content: None if it was more than is kept."""

    num_bytes: int
    content: bytes | None


class Objects:
    """Holds the size of each object, the bytes of small ones, and the sizes of the parts of unfinished uploads."""

    def __init__(self) -> None:
        self.lock, self.num_uploads = Lock(), 0
        self.sizes: dict[str, int] = {}
        self.contents: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, Body]] = {}

    def put(self, path: str, body: Body) -> None:
        with self.lock:
            self.sizes[path] = body.num_bytes
            self.contents.pop(path, None)
            if body.content is not None:
                self.contents[path] = body.content

    def begin(self) -> str:
        with self.lock:
            self.num_uploads += 1
            self.uploads[str(self.num_uploads)] = {}
            return str(self.num_uploads)

    def complete(self, path: str, upload: str) -> None:
        parts = [part for _, part in sorted(self.uploads.pop(upload).items())]
        num_bytes, contents = sum(part.num_bytes for part in parts), [part.content for part in parts]
        is_small = num_bytes <= KEPT_BYTES
        self.put(path, Body(num_bytes, b"".join(filter(None, contents)) if is_small else None))

    def delete(self, path: str) -> None:
        with self.lock:
            self.sizes.pop(path, None)
            self.contents.pop(path, None)

    def below(self, prefix: str) -> list[tuple[str, int]]:
        with self.lock:
            return sorted((path, size) for path, size in self.sizes.items() if path.startswith(prefix))


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects = Objects()

    def do_PUT(self) -> None:
        """Take an object, or a part of one."""
        path, query = self._asked()
        body = self._body()
        if "partNumber" in query:
            self.objects.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.objects.put(path, body)
        self._answer(200, {"ETag": '"0"'})

    def do_POST(self) -> None:
        """Begin or complete an upload in parts, or delete a list of objects."""
        path, query = self._asked()
        content = self._body().content
        if "uploads" in query:
            self._xml(f"<InitiateMultipartUploadResult><UploadId>{self.objects.begin()}</UploadId>"
                      "</InitiateMultipartUploadResult>")  # fmt: skip
        elif "uploadId" in query:
            self.objects.complete(path, query["uploadId"])
            self._xml('<CompleteMultipartUploadResult><ETag>"0-1"</ETag></CompleteMultipartUploadResult>')
        else:
            for name in MARKED.findall((content or b"").decode()):
                self.objects.delete(f"{path.rstrip('/')}/{name}")
            self._xml("<DeleteResult/>")

    def do_GET(self) -> None:
        """List a bucket, or answer a small object."""
        path, query = self._asked()
        if "list-type" in query:
            return self._list(path.rstrip("/"), query.get("prefix", ""), query.get("delimiter", ""))
        if path not in self.objects.contents:
            return self._answer(404, {})
        return self._answer(200, {"Last-Modified": HEADER_WHEN, "ETag": '"0"'}, self.objects.contents[path])

    def do_HEAD(self) -> None:
        """Answer the size of an object; a bucket is always there."""
        path, _ = self._asked()
        if "/" not in path.rstrip("/"):
            return self._answer(200, {})
        if path not in self.objects.sizes:
            return self._answer(404, {})
        size = str(self.objects.sizes[path])
        return self._answer(200, {"Content-Length": size, "Last-Modified": HEADER_WHEN, "ETag": '"0"'})

    def do_DELETE(self) -> None:
        """Delete an object, or forget an unfinished upload."""
        path, query = self._asked()
        if "uploadId" not in query:
            self.objects.delete(path)
        self._answer(204, {})

    def _asked(self) -> tuple[str, dict[str, str]]:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query, keep_blank_values=True)
        return unquote(asked.path).lstrip("/"), {name: values[0] for name, values in query.items()}

    def _body(self) -> Body:
        length = int(self.headers.get("Content-Length", 0))
        pieces = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self._plain(length)
        kept, total = bytearray(), 0
        for piece in pieces:
            total += len(piece)
            if len(kept) <= KEPT_BYTES:
                kept += piece
        decoded_length = self.headers.get("x-amz-decoded-content-length")
        if decoded_length is None:
            return Body(total, bytes(kept) if total <= KEPT_BYTES else None)
        return Body(int(decoded_length), _decoded(kept) if total <= KEPT_BYTES else None)

    def _plain(self, length: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(max(length, 1), BUFFER_BYTES)))
        while length:
            count = self.rfile.readinto(buffer[: min(length, BUFFER_BYTES)])
            if not count:
                raise ConnectionError("the client has gone in the middle of an object")
            length -= count
            yield buffer[:count]

    def _chunks(self) -> Iterator[memoryview]:
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield from self._plain(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # checksums that follow the last chunk
            pass

    def _list(self, bucket: str, prefix: str, delimiter: str) -> None:
        contents, folders = [], set()
        for path, size in self.objects.below(f"{bucket}/{prefix}"):
            name = path.removeprefix(f"{bucket}/")
            rest, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                folders.add(prefix + rest + delimiter)
                continue
            contents.append(f"<Contents><Key>{escape(name)}</Key><LastModified>{WHEN}</LastModified>"
                            f"<ETag>\"0\"</ETag><Size>{size}</Size></Contents>")  # fmt: skip
        shared = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        count = len(contents) + len(folders)
        self._xml(f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{count}</KeyCount>"
                  f"<IsTruncated>false</IsTruncated>{''.join(contents)}{shared}</ListBucketResult>")  # fmt: skip

    def _xml(self, text: str) -> None:
        self._answer(200, {"Content-Type": "application/xml"}, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def _decoded(data: bytearray) -> bytes:
    """Return an object from the chunks of its upload, of SIZE;SIGNATURE and bytes, which checksums follow."""
    content, rest = b"", bytes(data)
    while True:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        if not size:
            return content
        content, rest = content + rest[:size], rest[size + 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=lambda text: {int(core) for core in text.split(",")})
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"))
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if options.tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*options.tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
