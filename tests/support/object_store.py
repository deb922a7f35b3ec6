"""A real S3 server (moto) in a process of its own, behind a proxy that counts, slows, refuses and throttles.

ranks -> Proxy, threads of the test -> moto_server, a process that can be stopped and killed
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from meshwright.system import store

BUCKET = "bucket"
KEY, SECRET = "AKIAIOSFODNN7CANARYK", "wJalrXUtnFEMIK7MDENGbPxRfiCYCANARYSECRET"
ERRORS = {
    "throttle": (503, "SlowDown", "Please reduce your request rate."),
    "skew": (403, "RequestTimeTooSkewed", "The difference between the request time is too large."),
    "deny": (403, "AccessDenied", f"Access Denied for {KEY}"),
    "gone": (404, "NoSuchUpload", "The specified upload does not exist."),
    "digest": (400, "BadDigest", "The Content-MD5 you specified did not match what we received."),
    "timeout": (400, "RequestTimeout", "Your socket connection was not read from in time."),
    "broken": (500, "InternalError", "We encountered an internal error."),
}


class Request(NamedTuple):
    """One request that reached the proxy."""

    method: str
    key: str
    """Path without the bucket."""
    query: dict[str, str]
    length: int
    range: str | None

    @property
    def what(self) -> str:
        """Kind of request: PUT, GET, HEAD, LIST, DELETE, part, create, complete, abort, uploads."""
        if "uploadId" in self.query:
            return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[self.method]
        if "uploads" in self.query:
            return "create" if self.method == "POST" else "uploads"
        if "list-type" in self.query:
            return "LIST"
        return "DELETE" if "delete" in self.query else self.method


class Proxy:
    """HTTP proxy before the server. ``fault`` returns the name of an error of a request, "drop" to
    close its connection, "lose" to do so after the server has fulfilled it, "stall" to never
    answer, or None.
    """

    def __init__(self, target_port: int) -> None:
        self.requests: list[Request] = []
        self.fault: Callable[[Request], str | None] = lambda request: None
        self.bytes_per_s = float("inf")
        self.target_port = target_port
        self.stalled = threading.Event()
        """Set while it is used no more: lets the stalled requests end."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()

            def do_GET(self) -> None:
                proxy.answer(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> Counter[str]:
        """Return the number of requests of each kind."""
        return Counter(each.what for each in self.requests)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        parsed = urlsplit(handler.path)
        query = {name: each[0] for name, each in parse_qs(parsed.query, True).items()}
        key = parsed.path.lstrip("/").partition("/")[2]
        headers = handler.headers
        length = int(headers.get("Content-Length") or 0)
        request = Request(handler.command, key, query, length, headers.get("Range"))
        self.requests.append(request)
        fault = self.fault(request)
        if fault == "drop":
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "stall":  # reads nothing, and never answers
            self.stalled.wait(600)
            handler.close_connection = True
            return
        body = _body(handler, length)
        if fault in ERRORS:
            status, code, text = ERRORS[fault]
            page = (
                f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"
            )
            _reply(handler, status, {"Content-Type": "application/xml"}, page.encode())
            return
        if self.bytes_per_s < float("inf"):
            time.sleep(len(body) / self.bytes_per_s)
        server = http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=600)
        sent = {
            name: value
            for name, value in headers.items()
            if name.lower() not in ("transfer-encoding", "content-length", "expect", "connection")
        }
        server.request(handler.command, handler.path, body, sent)
        found = server.getresponse()
        content = found.read()
        if fault == "lose":
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            server.close()
            return
        kept = {n: v for n, v in found.getheaders() if n.lower() not in ("connection", "date")}
        if self.bytes_per_s < float("inf"):
            time.sleep(len(content) / self.bytes_per_s)
        _reply(handler, found.status, kept, content)
        server.close()

    def close(self) -> None:
        self.stalled.set()
        self.server.shutdown()
        self.server.server_close()


def _body(handler: BaseHTTPRequestHandler, length: int) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(length)
    parts = []
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        parts.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(parts)


def _reply(
    handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes
) -> None:
    handler.send_response_only(status)
    for name, value in headers.items():
        if name.lower() not in ("content-length", "transfer-encoding"):
            handler.send_header(name, value)
    is_head = handler.command == "HEAD"
    length = headers.get("Content-Length") or headers.get("content-length") if is_head else None
    handler.send_header("Content-Length", length or str(len(content)))
    handler.end_headers()
    if not is_head:
        handler.wfile.write(content)


class ObjectStore:
    """A moto server with one bucket, and its proxy."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = self._start()
        self.proxy = Proxy(self.port)
        self._direct("PUT", f"/{BUCKET}")

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return process
            time.sleep(0.05)
        raise TimeoutError("the S3 server does not start")

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which the ranks reach the proxy."""
        return {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def freeze(self) -> None:
        """Stop the server: connections stay, and nothing is read or answered."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.proxy.close()
        self.process.kill()
        self.process.wait()

    def reset(self) -> None:
        """Remove all objects, faults and counts."""
        self.proxy.fault = lambda request: None
        self.proxy.bytes_per_s = float("inf")
        self.proxy.requests.clear()
        self._direct("POST", "/moto-api/reset")
        self._direct("PUT", f"/{BUCKET}")

    def all_keys(self) -> list[str]:
        """Return the names of all objects, past the proxy."""
        page = self._direct("GET", f"/{BUCKET}?list-type=2")
        return re.findall(r"<Key>([^<]*)</Key>", page.decode())

    def uploads(self) -> list[str]:
        """Return the keys of the unfinished multipart uploads."""
        page = self._direct("GET", f"/{BUCKET}?uploads")
        return re.findall(r"<Key>([^<]*)</Key>", page.decode())

    def get(self, key: str) -> bytes:
        return self._direct("GET", f"/{BUCKET}/{key}")

    def put(self, key: str, content: bytes) -> None:
        self._direct("PUT", f"/{BUCKET}/{key}", content)

    def delete(self, key: str) -> None:
        self._direct("DELETE", f"/{BUCKET}/{key}")

    def _direct(self, method: str, path: str, body: bytes | None = None) -> bytes:
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/x"}
        server.request(method, path, body, headers)
        found = server.getresponse()
        content = found.read()
        server.close()
        assert found.status < 400, (method, path, found.status, content[:500])
        return content


def forget_file_systems() -> None:
    """Make the next request of this process read its environment again."""
    store._file_system.cache_clear()


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server for the block."""
    running = ObjectStore()
    try:
        yield running
    finally:
        running.thaw()
        running.close()
