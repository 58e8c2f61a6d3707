"""GPUs through NVML, the driver's library (nvidia-ml-py). Within the agent, only this folder imports pynvml.

A tick makes at most eight calls per GPU, which are most of what an agent costs. Expensive and slow readings are read less often,
unsupported ones are asked for once. Only getters are called: the agent never changes a GPU.
"""

from gpuscale.monitor.agent.nvml.source import NvmlSource

__all__ = ["NvmlSource"]
