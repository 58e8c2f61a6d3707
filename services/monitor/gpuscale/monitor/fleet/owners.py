"""Which node each GPU belongs to: the one that reported it first, until it reports it no more or is given up."""

from collections.abc import Iterable

from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.monitor.fleet.record import Record
from gpuscale.monitor.wire.merging import Picture


class Owners:
    """The nodes of all GPUs, by UUID in lower case."""

    def __init__(self) -> None:
        self._owners: dict[str, Record] = {}

    def find(self, uuid: str) -> Record | None:
        """The node of a GPU; None if no node reports it."""
        return self._owners.get(uuid.lower())

    def refuse(self, record: Record, picture: Picture, now: float) -> str:
        """Why a node may not report the GPUs of a picture; empty if it may."""
        if record.uuids == picture.uuids:
            return ""
        for place, uuid in enumerate(picture.uuids):
            owner = self._owners.get(uuid, record)
            if owner is not record and not owner.is_gone(now):
                return f"GPU {picture.snapshot.gpus[place].uuid} is reported by {node_name(owner.node)}"
        return ""

    def own(self, record: Record, picture: Picture) -> list[Record]:
        """Note the GPUs of a picture that is about to become the node's; the nodes that lost one to it."""
        if record.uuids == picture.uuids:
            return []
        self._release(record, set(record.uuids).difference(picture.uuids))
        losers: list[Record] = []
        for uuid in picture.uuids:
            owner = self._owners.get(uuid)
            if owner is not None and owner is not record:
                _strike(owner, uuid)
                losers.append(owner)
            self._owners[uuid] = record
        return losers

    def forget(self, record: Record) -> None:
        """Release all GPUs of a node."""
        self._release(record, record.uuids)

    def _release(self, record: Record, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            if self._owners.get(uuid) is record:
                del self._owners[uuid]


def _strike(record: Record, uuid: str) -> None:
    """Remove a GPU from what is known of a node that is gone."""
    if record.picture is not None:
        kept = types_api.Snapshot()
        record.picture.write(kept)
        del kept.gpus[record.uuids.index(uuid)]
        record.picture = Picture(kept)
        record.picture.rest()
