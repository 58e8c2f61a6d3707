"""The process adapter put together: journal, replicas, logs, and the connection to the autoscaler."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.connection import AutoscalerConnection
from gpuscale.autoscaler.adapters.engines.process.logs import ReplicaLogs
from gpuscale.autoscaler.adapters.engines.process.processes import WorkerUser
from gpuscale.autoscaler.adapters.engines.process.replica import Workshop
from gpuscale.autoscaler.adapters.engines.process.settings import AdapterSettings
from gpuscale.autoscaler.adapters.engines.process.supervisor import Supervisor
from gpuscale.autoscaler.adapters.journal import Journal
from gpuscale.common.rpc.server import Registration
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.tasks import TaskScope

KIND = "process"
STOP_GRACE = 5.0


@asynccontextmanager
async def open_process_adapter(
    settings: AdapterSettings,
    *,
    autoscaler: grpc.aio.Channel,
    clock: Clock,
    agent: grpc.aio.Channel | None = None,
) -> AsyncGenerator[tuple[Registration, ...]]:
    """Run replicas for the autoscaler until the block ends; it serves nothing itself.

    At the end every replica is asked to finish, and after `STOP_GRACE` seconds killed. The caller holds the lock on
    `settings.data_dir` and owns the channels; `agent` leads to the node's agent, which admits work on its GPUs.

    Raises:
        FailedPreconditionError: what was started before cannot be read, or nothing can be started as the user of workers.
    """
    changed = asyncio.Event()
    workshop = Workshop(
        journal=Journal(settings.data_dir / "replicas"),
        logs=ReplicaLogs(
            settings.data_dir / "logs", settings.replica_log_max_bytes, settings.replica_log_keep_seconds
        ),
        clock=clock,
        admission=Admission(agent, required=settings.require_admission),
        changed=changed.set,
        user=await asyncio.to_thread(WorkerUser.of, settings.worker_user),
    )
    templates = {name: table.template(name) for name, table in settings.templates.items()}
    register = api.Register(
        adapter=settings.adapter_id,
        kind=KIND,
        node=settings.node,
        templates=sorted(templates),
        max_replicas=settings.max_replicas,
        version=version("gpuscale"),
        capabilities=api.AdapterCapabilities(
            picks_victims=True,
            drains=True,
            probes=any(template.probe for template in templates.values()),
            logs=True,
        ),
        workers={name: one.to_wire() for name, one in settings.workers.items()},
    )
    async with TaskScope() as tasks:
        supervisor = Supervisor(templates, workshop, tasks, max_replicas=settings.max_replicas)
        await supervisor.recover()
        why = partial(settings.why_unavailable, settings.autoscaler_address)
        connection = AutoscalerConnection(autoscaler, register, supervisor, changed, why, workshop.logs.read)
        tasks.spawn("connection to the autoscaler", connection.run())
        tasks.spawn("bounds of the replicas' logs", supervisor.bound_logs())
        try:
            yield ()
        finally:
            await supervisor.stop_all(STOP_GRACE)
