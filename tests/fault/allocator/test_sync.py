"""The disk before the answer, as the kernel saw it: kill -9 cannot prove that, since what was written outlives a process."""

import asyncio
import re
import shutil
import signal
from pathlib import Path

from tests.support.allocator_process import AllocatorProcess, site
from tests.support.fixtures import need
from tests.support.waiting import eventually

CALLS = "fsync,fdatasync,sendmsg,sendto,write,writev"
SYNC = re.compile(
    r"(?:fsync|fdatasync)\(\d+<[^>]*allocator\.db-wal>\)\s*= 0|(?:fsync|fdatasync) resumed>\)\s*= 0"
)


async def traced(life: AllocatorProcess, output: Path) -> asyncio.subprocess.Process:
    """Attach strace."""
    if shutil.which("strace") is None:
        need("strace is not installed (Debian: strace; tools/install_test_servers.sh)")
    tracer = await asyncio.create_subprocess_exec(
        *("strace", "-f", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-p", str(life.pid), "-o", str(output)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert tracer.stderr is not None
    said = await asyncio.wait_for(tracer.stderr.readline(), 60)
    if b"attached" not in said:
        need(f"strace cannot attach: {said.decode().strip()}")
    return tracer


async def test_a_grant_is_synced_before_its_answer_is_sent(tmp_path: Path) -> None:
    output = tmp_path / "trace"
    async with site(tmp_path / "data") as place:
        life = await place.start()
        tracer = await traced(life, output)
        granted = [await place.client.reserve() for _ in range(3)]
        await eventually(lambda: granted[-1].name in output.read_text())
        tracer.send_signal(signal.SIGINT)
        await tracer.wait()
    lines = output.read_text().splitlines()
    synced = [index for index, line in enumerate(lines) if SYNC.search(line)]
    sent = [
        next(index for index, line in enumerate(lines) if one.name in line and "sendmsg(" in line)
        for one in granted
    ]
    for before, answer in zip([-1, *sent], sent, strict=False):
        assert any(before < index < answer for index in synced), f"line {answer} was sent before any sync"
