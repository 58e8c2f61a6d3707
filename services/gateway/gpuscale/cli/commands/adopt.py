"""`gpuscalectl adopt`: a reservation around processes that already run on GPUs of this host."""

import os
from collections.abc import Mapping

import click
import psutil

from gpuscale.cli.commands.reserve import TTL_HELP
from gpuscale.cli.console.command import Session, command
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.terminal import TERMINAL, note, write_lines
from gpuscale.cli.grammar.parameters import DURATION, POSITIVE, option
from gpuscale.client.orders import Orders, shown
from gpuscale.client.over_ssh import supervised
from gpuscale.common.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError


@command("adopt 41753 --name train")
@click.argument("pids", nargs=-1, required=True, type=POSITIVE, metavar="PID...")
@option("--name", "title", default="", help="What to call the job.")
@option("--ttl", type=DURATION, help=TTL_HELP)
def adopt(session: Session, pids: tuple[int, ...], title: str, ttl: float | None) -> None:
    """Reserve the GPUs that processes of yours already use on this host, until the last of them ends.

    They and their descendants become a job, which ends by `stop` or the loss of its lease. Fails for GPUs
    that others hold. Root may adopt anyone's processes.
    """
    from gpuscale import client as library
    from gpuscale.cli.console import lookup
    from gpuscale.client.asks import default_holder
    from gpuscale.client.jobs import supervise

    with session.connect() as client:
        node = client.this_node(check=True)
        if node is None:
            raise FailedPreconditionError("no agent of the fleet runs on this host", reason="NOT_A_NODE")
        processes: list[psutil.Process] = []
        for pid in pids:
            try:
                process = psutil.Process(pid)
                owner = process.uids().real
            except psutil.NoSuchProcess:
                text = f"there is no process {pid} on this host"
                raise NotFoundError(text, reason="PROCESS_GONE") from None
            if os.geteuid() not in {0, owner}:
                text = f"process {pid} is {process.username()}'s"
                raise PermissionDeniedError(text, reason="NOT_YOUR_PROCESS")
            processes.append(process)
        tree = {one.pid for process in processes for one in (process, *process.children(recursive=True))}
        [found] = lookup.nodes(client, [node])
        used: Mapping[str, set[int]] = {
            gpu.name: {one.pid for one in gpu.reading.processes} for gpu in found.snapshot.gpus
        }
        gpus = [name for name, there in used.items() if tree & there]
        if not gpus:
            raise FailedPreconditionError(
                f"none of these processes uses a GPU of {node}, as its agent reads them", reason="NO_GPU_USED"
            )
        options = library.ReserveOptions(
            only_gpus=gpus, min_memory=0, max_utilization_percent=100, allow_unknown_utilization=True, ttl=ttl
        )
        request = library.reserve_request(len(gpus), default_holder(), options)
        request.job.title, request.job.command = title, shown(processes[0].cmdline())
        granted = client.allocator.Reserve(request)
        orders = Orders(
            node=node, address=client.address, authority=client.authority(), detached=True, adopts=pids
        )
        code = supervise(
            client,
            granted.reservation,
            [supervised(one) for one in orders.of_grant(granted, node)],
            stdout=1,
            once=True,
            environment=TERMINAL.callers_environment(),
        )
    if code:
        leave(code)
    short = granted.reservation.name.partition("/")[2]
    write_lines([short])
    note(f"it lasts until they end; to end them:  gpuscalectl stop {short}")
