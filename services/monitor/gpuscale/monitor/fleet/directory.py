"""Finds what callers name: GPUs and nodes, by resource name or by UUID."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.names import GPU, NODE, gpu_name, match, node_name
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import NodeRecord
from gpuscale.monitor.model.recordings import Target

MOST_GPUS = 1_024


@dataclass(frozen=True, slots=True)
class Subject:
    """A node or GPU with history; `uuid` is empty for a node, `key` is the key of its series."""

    name: str
    uuid: str
    key: str


class Directory:
    """Looks up in the index of nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def gpus(self, names: Sequence[str], uuids: Sequence[str]) -> list[Target]:
        """The GPUs of these names (a node stands for all that it has now) and UUIDs, each once; NotFoundError for one."""
        found = {target.uuid.lower(): target for target in self._targets(names, uuids)}
        if not names and not uuids:
            raise _nothing()
        if len(found) > MOST_GPUS:
            raise InvalidArgumentError(f"these are more than {MOST_GPUS} GPUs", field="names")
        return list(found.values())

    def subjects(self, names: Sequence[str], uuids: Sequence[str]) -> list[Subject]:
        """The nodes and GPUs of these names and UUIDs, each once; NotFoundError for one that is not known."""
        nodes = [name for name in names if match(NODE, name) is not None]
        gpus = [name for name in names if name not in nodes]
        found = {name: Subject(name, "", node_name(self._record(name).node)) for name in nodes}
        for target in self._targets(gpus, uuids):
            found[target.name] = Subject(target.name, target.uuid, target.uuid.lower())
        if not found:
            raise _nothing()
        return list(found.values())

    def _targets(self, names: Sequence[str], uuids: Sequence[str]) -> Iterator[Target]:
        for name in names:
            if match(NODE, name) is not None:
                record = self._record(name)
                yield from (_target(record, gpu) for gpu in _gpus(record))
            elif (ids := match(GPU, name)) is not None:
                yield _named(self._record(node_name(ids["node"])), name)
            else:
                raise InvalidArgumentError(f"names must look like {NODE} or {GPU}", field="names")
        for uuid in uuids:
            owner = self._nodes.owner(uuid)
            if owner is None:
                raise _unknown(f"GPU {uuid}")
            yield _named(owner, gpu_name(owner.node, uuid))

    def _record(self, name: str) -> NodeRecord:
        return self._nodes.get(name.partition("/")[2])


def _named(record: NodeRecord, name: str) -> Target:
    for gpu in _gpus(record):
        if gpu.name == name:
            return _target(record, gpu)
    raise _unknown(name)


def _gpus(record: NodeRecord) -> Sequence[types_api.Gpu]:
    snapshot = record.snapshot
    return snapshot.gpus if snapshot is not None else ()


def _target(record: NodeRecord, gpu: types_api.Gpu) -> Target:
    period = record.picture.period if record.picture is not None else 0.0
    return Target(gpu.name, gpu.uuid, gpu.index, gpu.model, period)


def _unknown(what: str) -> NotFoundError:
    return NotFoundError(f"there is no {what}", metadata={"name": what})


def _nothing() -> InvalidArgumentError:
    return InvalidArgumentError("names or uuids must name something", field="names")
