"""Starts moto's S3 server as a process on this machine, and a proxy before it that injects faults."""

from __future__ import annotations

import http.client
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import quote

import pytest

MOTO = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"
# What the AWS library reads: nothing here may ask the network for credentials.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "the-secret-of-tests", "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip

# moto looks at who asks, and not at the signature.
SIGNED = "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class Fault(Enum):
    """Says what becomes of a request in place of being answered."""

    ERROR = 500  # an answer with this status
    SLOW_DOWN = 503
    DENIED = 403
    CUT = "the connection ends in the middle of the request's body, or else of the answer's"
    DEAD = "the connection ends at once"


@dataclass
class ObjectServer:
    """Names an S3 server by `address`, HOST:PORT. Requests that match a key of `faults` fail, as often as it says.

    address: of the proxy, where the server is for a user, even while it is dead and after it was started again.
    faults: by a regular expression of "METHOD /bucket/name?query", what happens and how many times.
    calls: what is called once, before a request that matches is answered.
    requests: everything that was asked, failed or not.
    """

    address: str
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    calls: dict[str, Callable[[], None]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    upstream: str = ""  # the address of the server itself
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a server that holds nothing, unless one runs."""
        if self._process and self._process.poll() is None:
            return
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", MOTO], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr
        lines = (re.search(rb"http://(127\.0\.0\.1:\d+)", line) for line in process.stderr)
        self.upstream = next(match[1].decode() for match in lines if match)
        threading.Thread(target=self._drop, args=[process.stderr], daemon=True).start()

    def kill(self) -> None:
        """Kill the server with all that it holds."""
        if self._process:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _drop(log: IO[bytes]) -> None:
        """Read the log of a server to its end: it would fill the pipe."""
        with log:
            log.read()

    def next_fault(self, request: str) -> Fault | None:
        self.requests.append(request)
        for pattern in [pattern for pattern in self.calls if re.search(pattern, request)]:
            self.calls.pop(pattern)()
        for pattern, faults in self.faults.items():
            if faults and re.search(pattern, request):
                return faults.pop(0)
        return None


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it takes 40 ms an answer
    timeout = 20  # seconds, of a connection that a failed test holds
    server: _ProxyServer

    def forward(self) -> None:
        fault = self.server.shown.next_fault(f"{self.command} {self.path}")
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        length = int(self.headers.get("Content-Length", 0))
        if fault is Fault.DEAD or (fault is Fault.CUT and (length or chunked)):
            self.rfile.read(length // 2 if fault is Fault.CUT else 0)
            self.close_connection = True
            return None
        body = b"".join(self._chunks()) if chunked else self.rfile.read(length)
        if fault in (Fault.ERROR, Fault.SLOW_DOWN, Fault.DENIED):
            return self._answer(fault.value, {}, b"<Error><Code>Injected</Code></Error>")
        with closing(http.client.HTTPConnection(self.server.shown.upstream)) as connection:
            sent = [body] if chunked else body
            connection.request(self.command, self.path, sent, dict(self.headers), encode_chunked=chunked)
            response = connection.getresponse()
            left_out = ("Connection", "Server", "Date")
            headers = {name: value for name, value in response.getheaders() if name not in left_out}
            self._answer(response.status, headers, response.read(), cut=fault is Fault.CUT)
        return None

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # what follows the last one
            pass

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815 - names of http.server

    def log_message(self, *args: Any) -> None:
        pass


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = False  # tests wait for the threads of connections that their clients have closed
    shown: ObjectServer

    def handle_error(self, *args: Any) -> None:  # a client that has gone
        pass


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Run a server without buckets for the block."""
    with _ProxyServer(("127.0.0.1", 0), _Proxy) as proxy:
        proxy.shown = server = ObjectServer(f"127.0.0.1:{proxy.server_port}")
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            server.start()
            yield server
        finally:
            server.kill()
            proxy.shutdown()
            thread.join()


@dataclass(frozen=True)
class Bucket:
    """Holds a bucket, read and written past the proxy.

    url: of the bucket, as a user gives it.
    """

    server: ObjectServer
    url: str

    def put(self, **contents: bytes) -> None:
        for name, content in contents.items():
            self._request("PUT", name, content)

    def get(self, name: str) -> bytes:
        return self._request("GET", name)

    def delete(self, name: str) -> None:
        self._request("DELETE", name)

    def names(self) -> list[str]:
        """Return the names of the objects, without the empty ones that Arrow makes for folders."""
        listing = self._request("GET", "?list-type=2&max-keys=1000").decode()
        return [name for name in re.findall("<Key>(.*?)</Key>", listing) if not name.endswith("/")]

    def restart_server(self, contents: Mapping[str, bytes]) -> None:
        """Start a server in place of one that died, with the bucket and these contents by name."""
        self.server.start()
        self.put(**{"": b""}, **contents)

    def _request(self, method: str, name: str, body: bytes | None = None) -> bytes:
        with closing(http.client.HTTPConnection(self.server.upstream)) as connection:
            path = f"/{self.url.removeprefix('s3://')}/{quote(name, safe='/?=&')}"
            connection.request(method, path, body, {"Content-Length": str(len(body or b"")), "Authorization": SIGNED})
            answer = connection.getresponse()
            assert answer.status < 300, (answer.status, answer.read())
            return answer.read()


def new_bucket(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Make a bucket, and set the environment as a user does who has such a server."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{server.address}"}.items():
        monkeypatch.setenv(name, value)
    server.start()  # a test may have failed while it was dead
    server.faults.clear()
    server.calls.clear()
    server.requests.clear()
    bucket = Bucket(server, f"s3://bucket-{secrets.token_hex(4)}")
    bucket.put(**{"": b""})
    return bucket
