"""A Prometheus server in this process that answers what a test tells it to."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs


def vector(*values: str) -> str:
    """The answer to an instant query that finds one series for each value."""
    result = [{"metric": {"pod": f"p{at}"}, "value": [1e9, value]} for at, value in enumerate(values)]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})


class FakePrometheus:
    """Attributes.

    answer: body of every answer.
    status: status line of every answer, after the version.
    header: further header lines.
    age: of each sample in an answer that is a vector.
    silent: while true nothing is answered.
    requests: head and form of each request, newest last.
    """

    def __init__(self) -> None:
        self.answer: str | bytes = vector("1")
        self.status = "200 OK"
        self.header = ""
        self.age = 0.0
        self.silent = False
        self.port = 0
        self.requests: list[tuple[str, dict[str, list[str]]]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length_of = (line for line in head.splitlines() if line.lower().startswith("content-length:"))
            length = next((int(line[15:]) for line in length_of), 0)
            form = parse_qs((await reader.readexactly(length)).decode())
            self.requests.append((head, form))
            if self.silent:
                await reader.read()  # until the client gives up
            else:
                body = self.answer.encode() if isinstance(self.answer, str) else self.answer
                if form.get("query", [""])[0].startswith("min(timestamp("):
                    body = vector(str(1e9 - self.age)).encode()
                lines = f"HTTP/1.1 {self.status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
                writer.write(f"{lines}{self.header}\r\n".encode() + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client went away
        finally:
            writer.close()


@asynccontextmanager
async def serving(prometheus: FakePrometheus) -> AsyncGenerator[str]:
    """Serve it on a free port; yields its URL."""
    server = await asyncio.start_server(prometheus.serve, "127.0.0.1", 0)
    prometheus.port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{prometheus.port}"
