"""WorkService on the wire."""

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.monitor.agent.work import Work


class WorkServicer(monitor_api.WorkServiceServicer):
    """Admits work."""

    def __init__(self, work: Work) -> None:
        self._work = work

    async def AdmitWork(
        self,
        request: monitor_api.AdmitWorkRequest,
        context: grpc.aio.ServicerContext[monitor_api.AdmitWorkRequest, monitor_api.AdmitWorkResponse],
    ) -> monitor_api.AdmitWorkResponse:
        """On all of the GPUs, or on none."""
        pid = request.pid if request.HasField("pid") else None
        await self._work.admit(list(request.gpu_uuids), request.fence, pid)
        return monitor_api.AdmitWorkResponse()
