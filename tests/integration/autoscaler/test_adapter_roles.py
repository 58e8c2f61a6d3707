"""An agent may only be the adapter of its own node: it could end other nodes' replicas otherwise."""

from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.security.auth import Authenticator
from tests.support import autoscaler_app
from tests.support.autoscaler_app import Autoscaler, running
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.tokens import bearer, write_tokens


@pytest.fixture
async def autoscaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Autoscaler]:
    tokens = write_tokens(tmp_path / "tokens.toml", n1="agent", ada="operator", eve="viewer")
    async with serving(FakeAllocator({})) as address:
        monkeypatch.setattr(autoscaler_app, "Authenticator", lambda: Authenticator(tokens_file=tokens))
        async with running(tmp_path, address) as one:
            yield one


async def register(autoscaler: Autoscaler, who: str, adapter: str, node: str) -> str:
    """What a registration ends with: OK for one that was accepted."""
    hello = api.Register(adapter=adapter, kind="process", node=node)
    call = autoscaler.adapters.Connect(
        once(api.ConnectRequest(register=hello)), metadata=grpc.aio.Metadata(*bearer(who)), timeout=10
    )
    return (await call.code()).name


async def once(message: api.ConnectRequest) -> AsyncGenerator[api.ConnectRequest]:
    """A stream that ends after one message, which ends an accepted connection with OK."""
    yield message


@pytest.mark.parametrize(
    ("who", "adapter", "node", "answer"),
    [
        ("n1", "n1", "n1", "OK"),
        ("n1", "n2", "n2", "PERMISSION_DENIED"),
        ("n1", "n2", "n1", "PERMISSION_DENIED"),
        ("n1", "n1", "", "PERMISSION_DENIED"),
        ("ada", "n2", "n2", "OK"),
        ("eve", "eve", "eve", "PERMISSION_DENIED"),
    ],
)
async def test_who_may_be_which_adapter(
    autoscaler: Autoscaler, who: str, adapter: str, node: str, answer: str
) -> None:
    assert await register(autoscaler, who, adapter, node) == answer
