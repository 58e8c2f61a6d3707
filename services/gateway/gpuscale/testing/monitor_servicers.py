"""The fleet of a fake server, and the last check of its agents."""

from collections.abc import Iterator
from contextlib import suppress

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import NotFoundError
from gpuscale.common.names import node_name
from gpuscale.common.runtime.clock import network_namespace, read_boot_id
from gpuscale.common.wire import page
from gpuscale.testing.inventory import Inventory, node_message
from gpuscale.testing.ledger import Ledger


class FakeFleet:
    """Tells of every node; all of them are idle and fresh."""

    service = "gpuscale.api.monitor.v1.FleetService"

    def __init__(self, inventory: Inventory, ledger: Ledger) -> None:
        self._inventory = inventory
        self._ledger = ledger

    def ListNodes(
        self, request: api.ListNodesRequest, context: grpc.ServicerContext
    ) -> api.ListNodesResponse:
        """A page of nodes."""
        shown, token = page(
            [one for one in self._nodes() if request.boot_id in {"", one.snapshot.host.boot_id}],
            key=lambda node: node.name,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return api.ListNodesResponse(nodes=shown, next_page_token=token)

    def GetNode(self, request: api.GetNodeRequest, context: grpc.ServicerContext) -> api.GetNodeResponse:
        """One node."""
        for node in self._nodes():
            if node.name == request.name:
                return api.GetNodeResponse(node=node)
        raise NotFoundError(f"there is no {request.name}", metadata={"name": request.name})

    def WatchNodes(
        self, request: api.WatchNodesRequest, context: grpc.ServicerContext
    ) -> Iterator[api.WatchNodesResponse]:
        """All nodes, and again after each change."""
        full = True
        for _ in self._ledger.changes(context.is_active):
            yield api.WatchNodesResponse(nodes=self._nodes(), full=full)
            full = False

    def _nodes(self) -> list[api.Node]:
        with self._ledger.changed:
            found = [node_message(node, gpus) for node, gpus in self._inventory.nodes.items()]
        if found:  # the first is the host that the test runs on
            with suppress(OSError):
                found[0].snapshot.host.boot_id = read_boot_id()
            found[0].snapshot.host.network_namespace = network_namespace()
        return sorted(found, key=lambda node: node.name)


class FakeWork:
    """Admits work on GPUs that its reservation holds, as an agent does."""

    service = "gpuscale.api.monitor.v1.WorkService"

    def __init__(self, inventory: Inventory, ledger: Ledger) -> None:
        self._inventory = inventory
        self._ledger = ledger

    def AdmitWork(
        self, request: api.AdmitWorkRequest, context: grpc.ServicerContext
    ) -> api.AdmitWorkResponse:
        """On all of the GPUs, or on none."""
        with self._ledger.changed:
            known = {gpu.uuid for gpu in self._inventory.gpus()}
            for uuid in request.gpu_uuids:
                if uuid not in known:
                    raise NotFoundError(f"there is no GPU {uuid} on {self._nodes()}", reason="GPU_NOT_FOUND")
            self._ledger.check(
                allocator_api.CheckLeaseRequest(
                    name=request.reservation,
                    fence=request.fence,
                    gpu_uuids=request.gpu_uuids,
                    lease_token=request.lease_token,
                )
            )
        return api.AdmitWorkResponse()

    def _nodes(self) -> str:
        return ", ".join(node_name(node) for node in self._inventory.nodes)
