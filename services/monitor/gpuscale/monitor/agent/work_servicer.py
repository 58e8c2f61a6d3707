"""WorkService on the wire."""

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.security.auth import Context, current_principal
from gpuscale.monitor.agent.lease_checks import HeldLease
from gpuscale.monitor.agent.work import Work


class WorkServicer(monitor_api.WorkServiceServicer):
    """Admits work."""

    def __init__(self, work: Work) -> None:
        self._work = work

    async def AdmitWork(
        self,
        request: monitor_api.AdmitWorkRequest,
        context: Context,
    ) -> monitor_api.AdmitWorkResponse:
        """On all of the GPUs, or on none."""
        pid = request.pid if request.HasField("pid") else None
        lease = HeldLease(request.reservation, request.fence, tuple(request.gpu_uuids), request.lease_token)
        namespace = request.pid_namespace if request.HasField("pid_namespace") else None
        await self._work.admit(lease, pid, current_principal(), namespace)
        return monitor_api.AdmitWorkResponse()

    async def ResetFences(
        self,
        request: monitor_api.ResetFencesRequest,
        context: Context,
    ) -> monitor_api.ResetFencesResponse:
        """Of all of the GPUs, or of none."""
        await self._work.reset(request.gpu_uuids)
        return monitor_api.ResetFencesResponse()
