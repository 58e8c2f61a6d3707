"""DriverService on the wire."""

from datetime import timedelta

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import seconds, to_timestamp
from gpuscale.monitor.agent.gpus import Gpus


class DriverServicer(monitor_api.DriverServiceServicer):
    """Lets go of the driver and takes it again."""

    def __init__(self, gpus: Gpus, clock: Clock) -> None:
        self._gpus = gpus
        self._clock = clock

    async def ReleaseDriver(
        self,
        request: monitor_api.ReleaseDriverRequest,
        context: Context,
    ) -> monitor_api.ReleaseDriverResponse:
        """Let go of it for a time."""
        duration = seconds(request.max_duration)
        resume = self._clock.wall() + timedelta(seconds=duration)
        problem = f"the driver is released until {resume:%H:%M:%S} UTC: {request.reason}"
        await self._gpus.release(duration, problem)
        return monitor_api.ReleaseDriverResponse(resume_time=to_timestamp(resume))

    async def ResumeDriver(
        self,
        request: monitor_api.ResumeDriverRequest,
        context: Context,
    ) -> monitor_api.ResumeDriverResponse:
        """Take it again."""
        return monitor_api.ResumeDriverResponse(was_released=self._gpus.resume())
