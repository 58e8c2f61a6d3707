"""A stub of vLLM as a program: PORT, seconds of its cold start, and seconds of a step for each request of the batch.

GET /health and /metrics as vLLM's; POST /load?requests=N takes N requests at once, of 100 tokens in and 50 out. It listens only
once its cold start is over.
"""

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from tests.support.llm_model import Ask, LlmServer, Speed

PROMPT, ANSWER = 100, 50


def main(port: int, cold_start: float, step_each: float) -> None:
    time.sleep(cold_start)
    server, lock = LlmServer(Speed(step_each=step_each), time.monotonic()), Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                server.advance(time.monotonic())
                page = server.page()
            self._answer(200, page if urlsplit(self.path).path == "/metrics" else "")

        def do_POST(self) -> None:
            asked = int(parse_qs(urlsplit(self.path).query)["requests"][0])
            with lock:
                for _ in range(asked):
                    server.take(Ask(time.monotonic(), PROMPT, ANSWER))
            self._answer(200, "")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
