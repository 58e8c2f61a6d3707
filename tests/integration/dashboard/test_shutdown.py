"""What the dashboard says when it stops while browsers hold on to it."""

import asyncio
import logging
import socket

import pytest
import uvicorn

from gpuscale.dashboard.web import WebServer


async def test_a_request_that_is_cut_short_at_the_end_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.Event()

    async def hangs(_scope: object, _receive: object, _send: object) -> None:
        began.set()
        await asyncio.Event().wait()

    config = uvicorn.Config(hangs, lifespan="off", log_config=None, timeout_graceful_shutdown=0)
    server = WebServer(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        _, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        await began.wait()
        server.should_exit = True
        await serving
        writer.close()
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []
