"""What watching 8 GPUs once a second costs: our agent, gpustat, nvitop and a minimal loop, side by side.

    python -m bench telemetry [--seconds 60]

All of them run at the same time over the tests' double of the driver's library, whose calls cost next to nothing: what
is measured is the monitor itself, and how often it asks. CPU is the time that the kernel gave to its threads (user and
system, from /proc/PID/task/*/schedstat). The agent serves gRPC, reads the host, streams to a fleet in another process,
and, in its second row, is scraped every 5 s as well. Goals (DESIGN, section 8): at most 0.3 % of a core, 100 calls a tick
and 60 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.nvml_double import DoubleProcess, NvmlDouble, env_with_double, why_unavailable, wired_gpus
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "bench-peers"
GPUS = 8
START_SECONDS = 30.0
WARM_UP = 8.0
SCRAPE_EVERY = 5.0
BASELINE = "minimal pynvml"


@dataclass(frozen=True)
class Usage:
    """What a process had used at a moment."""

    cpu: float
    calls: int
    switches: int
    at: float


@dataclass
class Program:
    """One monitor that runs."""

    name: str
    process: subprocess.Popen[bytes]
    double: NvmlDouble
    before: Usage | None = None

    def usage(self) -> Usage:
        """What it has used so far: seconds of CPU, calls of the library, times that a thread of it was woken."""
        cpu = switches = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                ran, _, times = (task / "schedstat").read_text().split()
                cpu, switches = cpu + int(ran), switches + int(times)
        return Usage(cpu / 1e9, self.double.calls(pid=self.process.pid), switches, time.monotonic())

    def resident(self) -> int:
        """Bytes in RAM."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench telemetry")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the measurement")
    arguments = parser.parse_args()
    problem = why_unavailable()
    if problem:
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder, ExitStack() as stack:
        double = NvmlDouble(Path(folder))
        double.gpus = wired_gpus(GPUS)
        for gpu in double.gpus:
            gpu.processes = [DoubleProcess(os.getpid()), DoubleProcess(os.getppid())]
        double.write()
        pages: list[str] = []
        programs = [stack.enter_context(program) for program in _programs(double, pages)]
        _measure(programs, pages, arguments.seconds)


def _programs(double: NvmlDouble, pages: list[str]) -> Iterator[Iterator[Program]]:
    """Everything that is compared; pages that are to be scraped are added to the list."""
    peers = _peers_python()
    script = str(Path(__file__).with_name("_telemetry_peers.py"))
    yield _running("asleep", [sys.executable, script, "empty"], double)
    yield _running(BASELINE, [sys.executable, script, "minimal"], double)
    if peers is not None:
        yield _running("gpustat", [str(peers), script, "gpustat"], double)
        yield _running("nvitop", [str(peers), script, "nvitop"], double)
    fleet = f"127.0.0.1:{free_port()}"
    yield _running("(fleet)", [*_ours("fleet"), "--listen", fleet], double)
    agent = [*_ours("agent"), "--source", "nvml", "--listen", "127.0.0.1:0", "--fleet-address", fleet]
    yield _running("gpuscale-agent", [*agent, "--node", "bench"], double)
    metrics = f"127.0.0.1:{free_port()}"
    scraped = [*_ours("agent"), "--source", "nvml", "--listen", "127.0.0.1:0", "--node", "scraped"]
    pages.append(f"http://{metrics}/metrics")
    yield _running("  scraped, no fleet", [*scraped, "--metrics-listen", metrics], double)


def _ours(room: str) -> list[str]:
    """The command of a program of ours, as after `pip install gpuscale[agent]`: that brings no rich."""
    code = f"import sys; sys.modules['rich'] = None; from gpuscale.monitor.{room}.main import main; main()"
    return [sys.executable, "-c", code]


@contextmanager
def _running(name: str, command: list[str], double: NvmlDouble) -> Iterator[Program]:
    process = subprocess.Popen(
        command, env=env_with_double(double), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield Program(name, process, double)
    finally:
        process.terminate()
        process.wait()


def _measure(programs: list[Program], pages: list[str], seconds: float) -> None:
    _wait_until_up(pages)
    _wait(WARM_UP, pages)
    for program in programs:
        program.before = program.usage()
    _wait(seconds, pages)
    rows = [_row(program) for program in programs if not program.name.startswith("(")]
    base = next(cpu for name, cpu, *_ in rows if name == BASELINE)
    print(f"{'':<22}{'% of a core':>12}{'of minimal':>12}{'calls a tick':>14}{'wake-ups/s':>12}{'RSS MB':>8}")
    for name, cpu, calls, woken, resident in rows:
        print(f"{name:<22}{cpu:>12.3f}{cpu / base:>12.1f}{calls:>14.1f}{woken:>12.1f}{resident:>8.1f}")


def _row(program: Program) -> tuple[str, float, float, float, float]:
    """Name, % of a core, calls a second, wake-ups a second, MB."""
    if program.process.poll() is not None or program.before is None:
        sys.exit(f"{program.name.strip()} ended by itself")
    before, after = program.before, program.usage()
    span = after.at - before.at
    return (
        program.name,
        100 * (after.cpu - before.cpu) / span,
        (after.calls - before.calls) / span,
        (after.switches - before.switches) / span,
        program.resident() / 1e6,
    )


def _wait(seconds: float, pages: list[str]) -> None:
    """Let time pass, scraping the pages meanwhile."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, SCRAPE_EVERY))
        for page in pages:
            _scrape(page)


def _scrape(page: str) -> None:
    with urllib.request.urlopen(page, timeout=10) as answer:
        answer.read()


def _wait_until_up(pages: list[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for page in pages:
        while True:
            try:
                _scrape(page)
                break
            except OSError:
                if time.monotonic() > deadline:
                    sys.exit(f"nothing answers at {page}")
                time.sleep(0.2)


def _peers_python() -> Path | None:
    """The interpreter of the environment that has the peers, made at the first run; None where that fails."""
    python = PEERS / "bin" / "python"
    wanted = json.dumps([(ROOT / name).read_text() for name in ("bench/requirements.txt", "constraints.txt")])
    stamp = PEERS / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing gpustat and nvitop into {PEERS.relative_to(ROOT)} ...", flush=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        subprocess.run(
            [*install, "-c", str(ROOT / "constraints.txt"), "-r", str(ROOT / "bench/requirements.txt")],
            check=True,
        )
    except subprocess.CalledProcessError:
        print("they cannot be installed here (bench/requirements.txt): measuring without them", flush=True)
        return None
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    main()
