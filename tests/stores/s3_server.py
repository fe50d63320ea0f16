"""A store on this machine: moto's S3 behind a proxy that counts what is asked and does to answers what a test wants."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

BUCKET = "bucket"


class Asked(NamedTuple):
    """One request. range: the header's text. query: of the URL, by name."""

    method: str
    path: str
    query: dict[str, list[str]]
    range: str

    @property
    def lists(self) -> bool:
        return "list-type" in self.query


class Answer(NamedTuple):
    """What the proxy does instead of, or with, the store's answer. body: XML; cut: bytes after which the connection
    breaks; wait: seconds before; etag: in place of the object's; gone: the connection breaks at once; lost: when the
    store has done what was wanted."""

    status: int = 0
    body: bytes = b""
    cut: int | None = None
    wait: float = 0.0
    etag: str = ""
    gone: bool = False
    lost: bool = False


def refusal(status: int, code: str, more: str = "") -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>".encode())


class Proxy(ThreadingHTTPServer):
    """asked: all requests so far. done: those that came to the store. fault: what becomes of one, None: nothing."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.asked: list[Asked] = []
        self.done: list[tuple[Asked, int]] = []  # with what status the store answered
        self.bytes_sent = 0
        self.fault: Callable[[Asked], Answer | None] = lambda asked: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of the tests' business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        asked = Asked(self.command, url.path, parse_qs(url.query, True), self.headers.get("Range") or "")
        self.server.asked.append(asked)
        answer = self.server.fault(asked) or Answer()
        time.sleep(answer.wait)
        if answer.gone:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif answer.status:
            self._send(answer.status, [("x-fault", "yes")], answer.body)
        else:
            self._forward(asked, answer, body)

    def _forward(self, asked: Asked, answer: Answer, body: bytes) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        upstream.request(self.command, self.path, body, headers)
        got = upstream.getresponse()
        data = got.read()
        upstream.close()
        self.server.done.append((asked, got.status))
        if answer.lost:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        kept = [(name, value) for name, value in got.getheaders() if name.lower() not in _HOP_BY_HOP]
        if answer.etag:
            kept = [(name, f'"{answer.etag}"' if name.lower() == "etag" else value) for name, value in kept]
        self._send(got.status, kept, data, got.getheader("Content-Length"), answer.cut)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _send(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        length: str | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
            self.server.bytes_sent += len(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Nothing on the screen."""


_HOP_BY_HOP = (
    "connection",
    "content-length",
    "transfer-encoding",
    "server",
)


class S3(NamedTuple):
    """The store: its proxy, and a client of moto's own for the tests' side."""

    proxy: Proxy
    client: Any

    def upload(self, source: Path, prefix: str = "run") -> str:
        """A folder or a file as objects; its URL."""
        files = [source] if source.is_file() else [path for path in sorted(source.rglob("*")) if path.is_file()]
        for path in files:
            name = path.name if source.is_file() else path.relative_to(source)
            self.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=path.read_bytes())
        return f"s3://{BUCKET}/{prefix}" + (f"/{source.name}" if source.is_file() else "")

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def content(self, prefix: str) -> dict[str, bytes]:
        """The objects below a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {
            key.removeprefix(f"{prefix}/"): self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
        }
