"""A GPU source in a process of its own, which can be killed where a thread that is stuck in a driver cannot.

The parent never loads the driver's library. Each of its threads that calls the source has a connection of its own to the
child (a lane), which a thread there serves: what is stuck holds up nobody but who asked. When the child is killed, all
who wait for it are told at once. It dies with its parent, whatever way that goes.
"""

from gpuscale.monitor.agent.isolated.source import IsolatedSource

__all__ = ["IsolatedSource"]
