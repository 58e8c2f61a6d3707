"""The GPUs of a fake server, and which of them are free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import FailedPreconditionError, ResourceExhaustedError
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.wire import to_duration

WHOLE = 1000
"""Thousandths of a GPU."""
DEFAULT_MIN_MEMORY = 8000 << 20
"""Least free memory of a GPU where nobody asks for another, as of the real allocator."""


@dataclass
class FakeGpu:
    """A GPU that no hardware stands behind."""

    node: str
    uuid: str
    index: int
    model: str
    memory: int
    held_milli: int = 0

    @property
    def name(self) -> str:
        """`nodes/{node}/gpus/{gpu}`."""
        return gpu_name(self.node, self.uuid)


@dataclass
class Inventory:
    """Every GPU, by node."""

    nodes: dict[str, list[FakeGpu]] = field(default_factory=dict[str, list[FakeGpu]])

    def add(self, node: str, count: int, memory: int, model: str) -> None:
        """A node with so many GPUs."""
        number = len(self.nodes)
        self.nodes[node] = [
            FakeGpu(node, f"GPU-{number:08x}-0000-4000-8000-{index:012x}", index, model, memory)
            for index in range(count)
        ]

    def pick(self, ask: allocator_api.Ask) -> list[tuple[int, FakeGpu]]:
        """GPUs for each member, the first that fit, as (member, GPU).

        Raises:
            ResourceExhaustedError: there is no room now (reason NO_CAPACITY).
            FailedPreconditionError: there would be none if all were free (reason UNSATISFIABLE).
        """
        found = self._try(ask, free=True)
        if found is not None:
            return found
        if self._try(ask, free=False) is None:
            raise FailedPreconditionError("no node has that many GPUs that fit", reason="UNSATISFIABLE")
        raise ResourceExhaustedError("no room now: the GPUs are held", reason="NO_CAPACITY", retry_after=1.0)

    def _try(self, ask: allocator_api.Ask, *, free: bool) -> list[tuple[int, FakeGpu]] | None:
        milli = ask.gpu_milli if ask.HasField("gpu_milli") else WHOLE
        left = {gpu.uuid: WHOLE - (gpu.held_milli if free else 0) for gpu in self.gpus() if _fits(gpu, ask)}
        picked: list[tuple[int, FakeGpu]] = []
        for member in range(ask.member_count if ask.HasField("member_count") else 1):
            mine = self._member(ask.gpu_count, milli, left)
            if mine is None:
                return None
            picked += [(member, gpu) for gpu in mine]
        return picked

    def _member(self, count: int, milli: int, left: dict[str, int]) -> list[FakeGpu] | None:
        for gpus in self.nodes.values():
            fitting = [gpu for gpu in gpus if left.get(gpu.uuid, 0) >= milli][:count]
            if len(fitting) == count:
                for gpu in fitting:
                    left[gpu.uuid] -= milli
                return fitting
        return None

    def gpus(self) -> Iterator[FakeGpu]:
        """All of them."""
        for gpus in self.nodes.values():
            yield from gpus

    def give_back(self, uuids: Iterable[str], milli: int) -> None:
        """A reservation has ended."""
        held = set(uuids)
        for gpu in self.gpus():
            if gpu.uuid in held:
                gpu.held_milli -= milli

    def remove(self, uuid: str) -> None:
        """The GPU vanishes."""
        for gpus in self.nodes.values():
            gpus[:] = [gpu for gpu in gpus if gpu.uuid != uuid]


def _fits(gpu: FakeGpu, ask: allocator_api.Ask) -> bool:
    least = ask.min_memory_bytes if ask.HasField("min_memory_bytes") else DEFAULT_MIN_MEMORY
    if ask.HasField("gpu_milli") and not ask.HasField("min_memory_bytes"):
        least = 0
    node = node_name(gpu.node)
    return (
        gpu.memory >= least
        and (not ask.nodes or node in ask.nodes)
        and node not in ask.excluded_nodes
        and (not ask.gpus or gpu.name in ask.gpus)
        and gpu.name not in ask.excluded_gpus
        and (not ask.models or any(model.lower() in gpu.model.lower() for model in ask.models))
    )


def node_message(node: str, gpus: Iterable[FakeGpu]) -> monitor_api.Node:
    """A node as the fleet would tell it: everything idle and fresh."""
    fresh = to_duration(0.1)
    readings = [
        types_api.Gpu(
            name=gpu.name,
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.model,
            simulated=True,
            state=types_api.GpuState.GPU_STATE_OK,
            reading=types_api.GpuReading(
                memory_total_bytes=gpu.memory,
                memory_used_bytes=0,
                memory_free_bytes=gpu.memory,
                utilization_percent=0.0,
                age=fresh,
            ),
        )
        for gpu in gpus
    ]
    snapshot = types_api.Snapshot(node=node, seq=1, age=fresh, simulated=True, gpus=readings)
    return monitor_api.Node(
        name=node_name(node), state=monitor_api.NodeState.NODE_STATE_ONLINE, snapshot=snapshot
    )
