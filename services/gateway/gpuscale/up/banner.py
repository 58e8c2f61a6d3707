"""What `up` says once it is ready: the banner on standard output, hints for a person on stderr."""

from collections import Counter
from importlib.metadata import version

from gpuscale.api.types.v1 import Snapshot
from gpuscale.up.app import Running
from gpuscale.up.settings import UpSettings

DEFAULT_ADDRESS = "127.0.0.1:7070"


def banner(running: Running, settings: UpSettings) -> list[str]:
    """The lines of the banner."""
    return [
        f"gpuscale {version('gpuscale')} is up at {running.address}",
        f"  dashboard  gpuscalectl{_where(running)} dashboard",
        f"  data       {settings.data_dir}",
        f"  GPUs       {gpus(running.snapshot)}",
    ]


def gpus(snapshot: Snapshot) -> str:
    """`8 x NVIDIA H100`, `4 SIMULATED`, or why there are none."""
    if snapshot.simulated:
        return f"{len(snapshot.gpus)} SIMULATED: no hardware stands behind them"
    models = Counter(gpu.model for gpu in snapshot.gpus)
    found = ", ".join(f"{count} x {model}" for model, count in models.items())
    return found or f"none: {snapshot.gpu_problem or 'the driver reports none'}"


def hints(running: Running) -> list[str]:
    """What to type next, in a second shell."""
    where = _where(running)
    return [
        f"next:  gpuscalectl{where} get gpus",
        f"       gpuscalectl{where} reserve --gpus 1 --ttl 60s",
        "Ctrl-C ends it.",
    ]


def _where(running: Running) -> str:
    return "" if running.address == DEFAULT_ADDRESS else f" --address {running.address}"
