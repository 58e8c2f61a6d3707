"""A fake server for the tests of programs that use gpuscale: the real services, with simulated GPUs and replicas.

    with FakeServer(gpus=4) as server, server.connect() as client:
        with client.reserve(gpus=2) as lease:
            server.lose(lease.name)

`server` is the API for tests and imports nothing heavy; `site` composes the rooms when a server starts, like `up`; `doubles` simulates
hosts and workers. Needs the extra `server`, and no GPU.
"""

from gpuscale.testing.server import FakeServer

__all__ = ["FakeServer"]
