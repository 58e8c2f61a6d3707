"""GPUs through NVML, the driver's own library (nvidia-ml-py). Only this folder imports pynvml.

At most eight calls per GPU and tick, which on a real driver are what an agent costs; everything dearer or slower to
change is read less often, and what a GPU does not support is asked once. Figures leave here in bytes, watts, joules and
percent. Only getters are called: this agent changes nothing on a GPU.
"""

from gpuscale.monitor.agent.nvml.source import NvmlSource

__all__ = ["NvmlSource"]
