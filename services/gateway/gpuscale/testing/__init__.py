"""For the tests of programs that use gpuscale: the real services over GPUs and replicas that nothing stands behind.

    with FakeServer(gpus=4) as server, server.connect() as client:
        with client.reserve(gpus=2) as lease:
            server.lose(lease.name)

`server` is what a test speaks to, and imports nothing heavy; `site` composes the rooms when a server starts, as `up` does;
`doubles` stands in for hosts and workers. It needs the extra `server`, and no GPU.
"""

from gpuscale.testing.server import FakeServer

__all__ = ["FakeServer"]
