"""Which pods have which GPUs, from the kubelet's v1.PodResourcesLister.

The kubelet reports names of pods, and cgroups their UIDs. So the pod of a process has a name only if it alone has the GPU.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import grpc

from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.internal.monitor.v1 import PodResourcesList

LOOK_SECONDS, PATIENCE_SECONDS = 15.0, 2.0
KEPT_SECONDS = 60.0
"""How long the last answer serves while the kubelet restarts."""
METHOD = "/v1.PodResourcesLister/List"
_MOST_PODS = 64
_log = get_logger(__name__)


class Pods:
    """Polls the kubelet. `by_gpu` has the pods of each GPU or MIG instance, namespace/name by UUID."""

    def __init__(self, place: Path | None, clock: Clock) -> None:
        self._place = place
        self._clock = clock
        self.by_gpu: Mapping[str, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Poll until cancelled; return at once without a socket."""
        until, failing = 0.0, False
        while self._place is not None:
            try:
                self.by_gpu = await self._ask()
            except grpc.aio.AioRpcError as error:
                if not failing:
                    _log.warning("cannot ask the kubelet which pods have GPUs", problem=error.details())
                failing = True
                if self._clock.now() >= until:
                    self.by_gpu = {}
            else:
                until, failing = self._clock.now() + KEPT_SECONDS, False
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self) -> Mapping[str, tuple[str, ...]]:
        # One connection per poll: an open one costs keepalive pings on both ends.
        async with open_channel(f"unix:{self._place}") as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, PodResourcesList] = channel.unary_unary(
                METHOD, response_deserializer=PodResourcesList.FromString
            )
            answer = await ask(b"", timeout=PATIENCE_SECONDS)
        found: defaultdict[str, set[str]] = defaultdict(set)
        for pod in answer.pod_resources:
            for container in pod.containers:
                for devices in container.devices:
                    for device in devices.device_ids:  # "GPU-…::2" is a share of a GPU
                        found[device.partition("::")[0]].add(f"{pod.namespace}/{pod.name}")
        return {uuid: tuple(sorted(names)[:_MOST_PODS]) for uuid, names in found.items()}
