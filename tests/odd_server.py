"""A real HTTP server on loopback that behaves as configured: the servers that scorers and external models meet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Asked = dict[str, Any]


class OddServer:
    """`behave(number, handler, asked)` answers the request `number` (from 1); what was asked is kept in `asked`."""

    def __init__(self, behave: Callable[[int, BaseHTTPRequestHandler, Asked], None]) -> None:
        self.asked: list[Asked] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[int] = set()
        self.ending = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(asked)
                server.headers.append(dict(self.headers.items()))
                server.connections.add(self.client_address[1])
                behave(len(server.asked), self, asked)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on the tests' screen."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that hangs up is what these tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()


def reply(handler: BaseHTTPRequestHandler, body: Any, status: int = 200, **headers: str) -> None:
    """Send a whole reply; `body` is bytes, or something to be written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Never answer, as long as the test lasts."""
    time.sleep(20)


def trickle(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, so that no wait for the next byte is ever long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def flood(handler: BaseHTTPRequestHandler) -> None:
    """A body without an end."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    chunk = b"x" * 65536
    for _ in range(10_000):
        handler.wfile.write(b"10000\r\n" + chunk + b"\r\n")


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Break the connection in the middle of a reply."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"value": ')
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.close()


def chat(text: str | None, finish_reason: str = "stop", usage: tuple[int, int] | None = None) -> dict[str, Any]:
    """A chat completion that says `text`. usage: tokens of prompt and reply."""
    counts = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], **counts}
