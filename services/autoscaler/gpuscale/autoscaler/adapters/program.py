"""The adapter of an engine put together: journal, crew, and the connection to the autoscaler."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.connection import AutoscalerConnection
from gpuscale.autoscaler.adapters.crew import EngineCrew
from gpuscale.autoscaler.adapters.engine import Engine
from gpuscale.autoscaler.adapters.journal import Journal
from gpuscale.autoscaler.adapters.settings import EngineAdapterSettings
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.tasks import TaskScope


async def asked_to_finish(settings: EngineAdapterSettings) -> set[str]:
    """Names of the replicas that an earlier run of the adapter asked to finish.

    Raises:
        FailedPreconditionError: what was written down cannot be read.
    """
    records = await asyncio.to_thread(_journal(settings).load)
    return {one.replica for one in records if one.asked_to_stop_at is not None}


def _journal(settings: EngineAdapterSettings) -> Journal:
    return Journal(settings.data_dir / "replicas")


@asynccontextmanager
async def open_engine_adapter(
    settings: EngineAdapterSettings,
    engine: Engine,
    *,
    kind: str,
    templates: Iterable[str],
    capabilities: api.AdapterCapabilities,
    autoscaler: grpc.aio.Channel,
    clock: Clock,
    node: str = "",
) -> AsyncGenerator[None]:
    """Drive an engine for the autoscaler until the block ends; the replicas go on.

    The caller holds the lock on `settings.data_dir` and owns the engine and the channel. `node` is the node whose GPUs
    replicas reserve; empty for an engine that gives out GPUs itself.

    Raises:
        FailedPreconditionError: what was started before cannot be read.
    """
    changed = asyncio.Event()
    crew = EngineCrew(
        engine,
        _journal(settings),
        clock,
        changed,
        max_replicas=settings.max_replicas,
    )
    await crew.recover()
    register = api.Register(
        adapter=settings.adapter,
        kind=kind,
        node=node,
        templates=sorted(templates),
        max_replicas=settings.max_replicas,
        version=version("gpuscale"),
        capabilities=capabilities,
        workers={name: one.to_wire() for name, one in settings.workers.items()},
    )
    why = partial(settings.why_unavailable, settings.autoscaler_address)
    connection = AutoscalerConnection(autoscaler, register, crew, changed, why)
    async with TaskScope() as tasks:
        tasks.spawn("replicas on the engine", crew.run())
        tasks.spawn("connection to the autoscaler", connection.run())
        yield
