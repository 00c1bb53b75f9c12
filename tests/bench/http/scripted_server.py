"""A server whose every answer is written down beforehand, to see what a client makes of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATIENCE = 300.0  # seconds until a test that waits in vain fails


def event(body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(text="a", **choice):
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None, **choice}]})


def usage(prompt, output, cached=None):
    body = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": body})


DONE = b"data: [DONE]\n\n"


class Script:
    """``answers`` by the prompt that asks for them: a status and parts, each of which is sent by
    itself; ``None`` drops the connection. Until ``hold`` requests have come, none is answered."""

    def __init__(self, answers: dict[str, tuple[int, Sequence[bytes | None]]], hold: int = 0):
        self.answers = answers
        self.received: list[dict] = []
        self.keys: list[str | None] = []
        self.url = ""
        self._barrier = threading.Barrier(hold) if hold else None

    def take(self, body: dict, key: str | None) -> tuple[int, Sequence[bytes | None]]:
        self.received.append(body)
        self.keys.append(key)
        if isinstance(body["prompt"], list):  # what warms up
            return 200, [token(), usage(len(body["prompt"]), body["max_tokens"]), DONE]
        if self._barrier is not None:
            self._barrier.wait(PATIENCE)
        return self.answers[body["prompt"]]


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # by default 5, and on a busy machine the sixth is turned away


@contextmanager
def serve(script: Script) -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or parts wait for each other

        def do_GET(self):
            self._send(200, [json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()])

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*script.take(body, self.headers.get("authorization")))

        def _send(self, status, parts):
            self.send_response(status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in parts:
                if part is None:
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)
