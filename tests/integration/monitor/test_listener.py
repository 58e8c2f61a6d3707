"""The thread that waits for events: a source that is taken away ends it, and nothing is left of that."""

import asyncio
import gc

from gpuscale.common.runtime.clock import SystemClock
from gpuscale.monitor.agent.events import GpuEvents, Listener
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import DriverEvent
from tests.support.monitor import FakeGpus
from tests.support.waiting import eventually


class TakenAway(FakeGpus):
    """A source whose process is gone."""

    def wait_event(self, timeout: float) -> DriverEvent | None:
        raise GpuSourceError("the process that reads the driver has ended")


async def listen_twice() -> BaseException | None:
    """Listen to such a source, and once more after that; why the second time ended."""
    listener = Listener(TakenAway(), SystemClock(), GpuEvents(), wait=1.0)
    for _ in range(2):
        listener.start()
        await eventually(lambda: listener.listening is None)
    listener.stop()
    return listener.error


async def test_that_a_source_ended_while_it_was_listened_to_is_no_complaint_of_the_loop() -> None:
    """The agent knows it from the GPUs. The event loop would write "exception was never retrieved" into the log."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    assert isinstance(await listen_twice(), GpuSourceError)
    gc.collect()
    assert complaints == []
