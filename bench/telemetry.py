"""What watching 8 GPUs once a second costs: our agent, gpustat, nvitop, its exporter and a minimal loop, side by side.

    python -m bench telemetry [--seconds 120] [--call-microseconds 50] [--no-processes]

All of them run at the same time over the tests' double of the driver's library, whose calls cost next to nothing unless told
otherwise: what is measured is the monitor itself, and how often it asks. The GPUs are busy: use, temperature, power and
clock of each are others every second. CPU is the time that the kernel gave to a program and its children (user and system,
threads that have ended too). The agent serves gRPC, reads the host and streams to a fleet in another
process; one is scraped every 5 s instead, one reads the driver in a process of its own. "gRPC alone" is an agent without all
that is ours (_telemetry_floor.py). RSS counts pages that are shared with other programs in full, PSS by share. Then: how long
GetSnapshot takes an agent that nobody else asks, before and while one of its GPUs hangs. Goals (DESIGN, section 8): at most
0.3 % of a core, 100 calls a tick and 45 MB; 99 of 100 answers in 50 ms.
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

from bench._telemetry_answers import print_answers
from tests.support.nvml_double import DoubleProcess, NvmlDouble, env_with_double, why_unavailable, wired_gpus
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "bench-peers"
GPUS = 8
CPU_OF_PROCESS = 2
"""As the kernel's clock ids have it, beside a process id (CPUCLOCK_SCHED)."""
START_SECONDS = 30.0
WARM_UP = 8.0
SCRAPE_EVERY = 5.0
CALLS = 1000
BASELINE = "minimal pynvml"


@dataclass(frozen=True)
class Usage:
    """What a program had used at a moment; CPU in nanoseconds."""

    cpu: int
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
        """What it has used so far: CPU, calls of the library, times that a thread of it was woken."""
        cpu = switches = calls = 0
        for pid in _family(self.process.pid):
            calls += self.double.calls(pid=pid)
            cpu += time.clock_gettime_ns((~pid << 3) | CPU_OF_PROCESS)
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # a thread that has just ended
                    switches += int((task / "schedstat").read_text().split()[2])
        return Usage(cpu, calls, switches, time.monotonic())

    def megabytes(self, kind: str) -> float:
        """Memory in RAM: "Rss", or "Pss" for its share of what it shares with others."""
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in _family(self.process.pid)]
        lines = [line.split() for text in texts for line in text.splitlines()]
        return sum(int(words[1]) for words in lines if words[0] == f"{kind}:") * 1024 / 1e6


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in _family(child))]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench telemetry")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the measurement")
    parser.add_argument("--call-microseconds", type=int, default=0, help="CPU of each call of the driver")
    parser.add_argument(
        "--no-processes", action="store_true", help="no process uses the GPUs, in place of two"
    )
    arguments = parser.parse_args()
    problem = why_unavailable()
    if problem:
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder, ExitStack() as stack:
        double = NvmlDouble(Path(folder))
        double.gpus, double.moving = wired_gpus(GPUS), True
        double.busy_microseconds = arguments.call_microseconds
        for gpu in double.gpus if not arguments.no_processes else ():
            gpu.processes = [DoubleProcess(os.getpid()), DoubleProcess(os.getppid())]
        double.write()
        pages: list[str] = []
        programs = [stack.enter_context(program) for program in _programs(double, pages)]
        _measure(programs, pages, arguments.seconds)
    print_answers(CALLS)


def _programs(double: NvmlDouble, pages: list[str]) -> Iterator[Iterator[Program]]:
    """Everything that is compared; pages that are to be scraped are added to the list."""
    peers = _peers_python()
    script = str(Path(__file__).with_name("_telemetry_peers.py"))
    yield _running("asleep", [sys.executable, script, "empty"], double)
    yield _running(BASELINE, [sys.executable, script, "minimal"], double)
    if peers is not None:
        yield _running("gpustat", [str(peers), script, "gpustat"], double)
        yield _running("nvitop", [str(peers), script, "nvitop"], double)
        yield _running("nvitop-exporter", [str(peers), script, "nvitop_exporter"], double)
    # A fleet for each: the GPUs of the double are the same, and the second node that has them would be refused.
    fleets = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    for fleet in fleets:
        yield _running("(fleet)", [*_ours("fleet"), "--listen", fleet], double)
    floor = str(Path(__file__).with_name("_telemetry_floor.py"))
    yield _running("gRPC alone", [sys.executable, floor, fleets[0]], double)
    agent = [*_ours("agent"), "--source", "nvml", "--listen", "127.0.0.1:0"]
    yield _running("gpuscale-agent", [*agent, "--node", "bench", "--fleet-address", fleets[0]], double)
    metrics = f"127.0.0.1:{free_port()}"
    scraped = [*_ours("agent"), "--source", "nvml", "--listen", "127.0.0.1:0", "--node", "scraped"]
    pages.append(f"http://{metrics}/metrics")
    yield _running("  scraped, no fleet", [*scraped, "--metrics-listen", metrics], double)
    isolated = [*agent, "--node", "isolated", "--isolate", "--fleet-address", fleets[1]]
    yield _running("  isolated", isolated, double)


def _ours(room: str) -> list[str]:
    """The command of a program of ours, as after `pip install gpuscale[agent]`: that brings no rich."""
    code = f"import sys; sys.modules['rich'] = None; from gpuscale.monitor.app.{room} import main; sys.exit(main())"
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
    head = f"{'of minimal':>12}{'calls a tick':>14}{'wake-ups/s':>12}{'RSS MB':>8}{'PSS MB':>8}"
    print(f"{'':<22}{'% of a core':>12}{head}")
    for name, cpu, calls, woken, resident, share in rows:
        figures = f"{cpu / base:>12.1f}{calls:>14.1f}{woken:>12.1f}{resident:>8.1f}{share:>8.1f}"
        print(f"{name:<22}{cpu:>12.3f}{figures}")


def _row(program: Program) -> tuple[str, float, float, float, float, float]:
    """Name, % of a core, calls a second, wake-ups a second, MB, MB by share."""
    if program.process.poll() is not None or program.before is None:
        sys.exit(f"{program.name.strip()} ended by itself")
    before, after = program.before, program.usage()
    span = after.at - before.at
    return (
        program.name,
        100 * (after.cpu - before.cpu) / 1e9 / span,
        (after.calls - before.calls) / span,
        (after.switches - before.switches) / span,
        program.megabytes("Rss"),
        program.megabytes("Pss"),
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
    print(f"installing gpustat, nvitop and nvitop-exporter into {PEERS.relative_to(ROOT)} ...", flush=True)
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
