"""Which pods have which GPUs, as the kubelet of this node says: its socket of v1.PodResourcesLister, where a setting names it.

The kubelet's answer has no UIDs, and a cgroup no names. So a process is known to be of a named pod only where its cgroup is of
some pod and that is the only one that was given its GPU.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import grpc

from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.internal.monitor.v1 import PodResourcesList
from gpuscale.monitor.model.readings import GpuProcess

LOOK_SECONDS, PATIENCE_SECONDS = 15.0, 2.0
KEPT_SECONDS = 60.0
"""How long the last answer serves while there is none: a kubelet restarts."""
METHOD = "/v1.PodResourcesLister/List"
_MOST_PODS = 64
_log = get_logger(__name__)


class Pods:
    """Follows the kubelet at a socket. `by_gpu` has the pods of each GPU or MIG instance, namespace/name, by UUID."""

    def __init__(self, place: Path | None, clock: Clock) -> None:
        self._place = place
        self._clock = clock
        self.by_gpu: Mapping[str, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Ask again and again until cancelled, if there is a socket to ask at."""
        until, failing = 0.0, False
        while self._place is not None:
            try:
                self.by_gpu = await self._ask()
            except grpc.aio.AioRpcError as error:
                if not failing:
                    _log.warning("the kubelet does not tell which pods have GPUs", problem=error.details())
                failing = True
                if self._clock.now() >= until:
                    self.by_gpu = {}
            else:
                until, failing = self._clock.now() + KEPT_SECONDS, False
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self) -> Mapping[str, tuple[str, ...]]:
        # A connection for each question: one that is kept costs the pings of two programs.
        async with open_channel(f"unix:{self._place}") as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, PodResourcesList] = channel.unary_unary(
                METHOD, response_deserializer=PodResourcesList.FromString
            )
            answer = await ask(b"", timeout=PATIENCE_SECONDS)
        found: defaultdict[str, set[str]] = defaultdict(set)
        for pod in answer.pod_resources:
            for container in pod.containers:
                for devices in container.devices:
                    for device in devices.device_ids:  # of a GPU in shares: "GPU-…::2"
                        found[device.partition("::")[0]].add(f"{pod.namespace}/{pod.name}")
        return {uuid: tuple(sorted(names)[:_MOST_PODS]) for uuid, names in found.items()}


def name_pod(processes: Iterable[GpuProcess], pod: str) -> tuple[GpuProcess, ...]:
    """The processes of a GPU that one pod alone was given: those of any pod are its."""
    return tuple([replace(one, pod=pod) if one.pod else one for one in processes])
