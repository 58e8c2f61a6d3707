"""What reading costs the driver: calls per tick of eight GPUs, none of which changes anything."""

import re

from gpuscale.monitor.agent.nvml import NvmlSource
from tests.support.nvml_double import GIB, DoubleProcess, NvmlDouble, wired_gpus


def test_eight_gpus_cost_at_most_a_hundred_calls_per_tick(nvml_double: NvmlDouble) -> None:
    """With two processes each; only the first tick, in which everything is due, may cost more."""
    nvml_double.gpus = wired_gpus(8)
    for gpu in nvml_double.gpus:
        gpu.processes = [DoubleProcess(2, GIB), DoubleProcess(3, GIB)]
    nvml_double.write()
    now = 0.0
    source = NvmlSource(lambda: now)
    source.open()
    costs: list[int] = []
    for second in range(60):
        now = float(second)
        before = nvml_double.calls()
        samples = [source.read(gpu.uuid) for gpu in nvml_double.gpus]
        costs.append(nvml_double.calls() - before)
        # What the agent says of itself. Where NVLinks lead is asked in the first tick and is no reading; a list that
        # holds processes pynvml asks for twice, first for its length.
        counted = sum(sample.calls for sample in samples)
        assert second == 0 or counted in {costs[-1], costs[-1] - len(samples)}
    assert sum(costs) / len(costs) <= 80
    assert max(costs[1:]) <= 100
    names = {count.function for count in nvml_double.call_counts()}
    assert not [name for name in names if re.match(r"nvml(?!EventSet)\w*(Set|Reset|Clear)[A-Z]", name)]
    source.close()
