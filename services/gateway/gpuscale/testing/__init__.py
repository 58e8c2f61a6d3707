"""For the tests of programs that use gpuscale: a server in memory that behaves as the real ones do.

    with FakeServer(gpus=4) as server, server.connect() as client:
        with client.reserve(gpus=2) as lease:
            server.lose(lease.name)

It needs what the client library needs and nothing else, and no GPU.
"""

from gpuscale.testing.server import FakeServer

__all__ = ["FakeServer"]
