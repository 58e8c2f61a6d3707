"""Which node each GPU belongs to: the one that reported it first, until it reports it no more or is given up."""

from collections.abc import Iterable

from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name, node_name
from gpuscale.monitor.fleet.record import Record
from gpuscale.monitor.merging import Picture


class Owners:
    """The nodes of all GPUs, by UUID in lower case."""

    def __init__(self) -> None:
        self._owners: dict[str, Record] = {}

    def find(self, uuid: str) -> Record | None:
        """The node of a GPU; None if no node reports it."""
        return self._owners.get(uuid.lower())

    def refuse(self, record: Record, snapshot: types_api.Snapshot, now: float) -> str:
        """Why a node may not report these GPUs; empty if it may."""
        for gpu in snapshot.gpus:
            owner = self._owners.get(gpu.uuid.lower(), record)
            if owner is not record and not owner.is_gone(now):
                return f"GPU {gpu.uuid} is reported by {node_name(owner.node)}"
        return ""

    def own(self, record: Record, snapshot: types_api.Snapshot) -> list[Record]:
        """Name the GPUs of a snapshot that is about to become the node's; the nodes that lost one to it."""
        uuids = {gpu.uuid.lower() for gpu in snapshot.gpus}
        if record.snapshot is not None:
            self._release(
                record, (gpu.uuid.lower() for gpu in record.snapshot.gpus if gpu.uuid.lower() not in uuids)
            )
        losers: list[Record] = []
        for gpu in snapshot.gpus:
            gpu.name = gpu_name(record.node, gpu.uuid)
            uuid = gpu.uuid.lower()
            owner = self._owners.get(uuid)
            if owner is not None and owner is not record:
                _strike(owner, uuid)
                losers.append(owner)
            self._owners[uuid] = record
        return losers

    def forget(self, record: Record) -> None:
        """Release all GPUs of a node."""
        if record.snapshot is not None:
            self._release(record, (gpu.uuid.lower() for gpu in record.snapshot.gpus))

    def _release(self, record: Record, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            if self._owners.get(uuid) is record:
                del self._owners[uuid]


def _strike(record: Record, uuid: str) -> None:
    """Remove a GPU from what is known of a node that is gone."""
    if record.snapshot is not None:
        kept = types_api.Snapshot()
        kept.CopyFrom(record.snapshot)
        del kept.gpus[:]
        kept.gpus.extend(gpu for gpu in record.snapshot.gpus if gpu.uuid.lower() != uuid)
        record.picture = Picture(kept)
