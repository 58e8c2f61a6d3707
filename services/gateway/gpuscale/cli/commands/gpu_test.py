"""A short test of one GPU through the CUDA driver library: fills its memory, copies it back and forth, and compares.

    CUDA_VISIBLE_DEVICES=UUID python -m gpuscale.cli.commands.gpu_test BYTES

Runs as a separate process, since a call into a broken driver may never return. It runs no kernel, so the cores are not tested.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = "libcuda.so.1"
WORKS, SLOW, BROKEN, UNUSABLE, NOT_TESTED = "OK", "WARN", "FAIL", "UNUSABLE", "UNTESTED"
"""UNUSABLE: the caller cannot use it, which may not be the GPU's fault."""
CHUNK, COPIES = 64 << 20, 8
"""Bytes of a copy, and number of copies to measure the bandwidth."""
COMPARING, PATIENCE = 2.0, 60.0
"""Most seconds to compare its memory, and for the whole test."""
LEAST_SHARE = 0.6
"""Fraction of the PCIe link's bandwidth below which it counts as slow."""
PCI = Path("/sys/bus/pci/devices")
_WORD, _FREE = 0x5AA55AA5, 0.9
_OUT_OF_MEMORY, _STUB = 2, 34


class GpuTest(NamedTuple):
    """The result, and the finding in words."""

    state: str
    found: str


def test_gpu(uuid: str, most: int, pause: float, meanwhile: Callable[[], object]) -> GpuTest:
    """Test a GPU with at most so many bytes of its memory, 0 for nearly all that is free; calls back after each pause."""
    words = [sys.executable, "-m", "gpuscale.cli.commands.gpu_test", str(most)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=variables)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            said, _ = child.communicate(timeout=pause)
        except subprocess.TimeoutExpired:
            meanwhile()
            if time.monotonic() > until:
                child.kill()  # without waiting: it may be stuck in the driver
                return GpuTest(BROKEN, f"the driver did not answer within {PATIENCE:.0f} s")
        else:
            code = child.returncode
            return GpuTest(UNUSABLE, f"exit code {code}") if code else GpuTest(*json.loads(said))


class _Cuda:
    """Calls of the driver library; a failed one raises RuntimeError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def code(self, name: str, *arguments: Any) -> int:
        found: int = getattr(self._library, name)(*arguments)
        return found

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            said = ctypes.c_char_p()
            self.code("cuGetErrorName", code, ctypes.byref(said))
            raise RuntimeError(f"{name} gave {(said.value or b'error %d' % code).decode()}")


def look(most: int) -> GpuTest:
    """Test the first GPU that is visible to this process."""
    try:
        cuda = _Cuda()
    except OSError:
        return GpuTest(NOT_TESTED, f"{LIBRARY} not found")
    if cuda.code("cuInit", 0) == _STUB:
        return GpuTest(NOT_TESTED, f"{LIBRARY} is a stub")
    context, free, memory = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_uint64()
    try:
        cuda("cuInit", 0)
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        cuda("cuCtxSetCurrent", context)
        cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(ctypes.c_size_t()))
        size = int(min(most or free.value, free.value * _FREE))
        cuda("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    except RuntimeError as error:
        return GpuTest(UNUSABLE, str(error))
    try:
        return _copies(cuda, memory.value, size)
    except RuntimeError as error:
        return GpuTest(BROKEN, str(error))


def _copies(cuda: _Cuda, memory: int, size: int) -> GpuTest:
    part, host = min(CHUNK, size // 2) & ~3, ctypes.c_void_p()
    cuda("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(part), 0)
    cuda("cuMemsetD32_v2", ctypes.c_uint64(memory), _WORD, ctypes.c_size_t(size // 4))
    cuda("cuCtxSynchronize")
    until, compared, filled = time.monotonic() + COMPARING, 0, _WORD.to_bytes(4, "little") * (part // 4)
    while compared + part <= size and time.monotonic() < until:
        cuda("cuMemcpyDtoH_v2", host, ctypes.c_uint64(memory + compared), ctypes.c_size_t(part))
        if wrong := _difference(host, filled, compared):
            return GpuTest(BROKEN, f"memory differs from what was written, {wrong}")
        compared += part
    written, copy = os.urandom(part), ctypes.c_uint64(memory + part)
    ctypes.memmove(host, written, part)
    to = max(_rates(cuda, "cuMemcpyHtoD_v2", ctypes.c_uint64(memory), host, part))
    cuda("cuMemcpyDtoD_v2", copy, ctypes.c_uint64(memory), ctypes.c_size_t(part))
    fro = max(_rates(cuda, "cuMemcpyDtoH_v2", host, copy, part))
    if wrong := _difference(host, written, part):
        return GpuTest(BROKEN, f"memory differs from what was copied, {wrong}")
    bus = ctypes.create_string_buffer(32)
    cuda("cuDeviceGetPCIBusId", bus, 32, 0)
    could = link_rate(PCI / bus.value.decode().lower())
    found = f"{compared / 2**30:.1f} GiB compared; PCIe carries {to / 1e9:.1f} GB/s to it, {fro / 1e9:.1f} from it"
    slow = min(to, fro) < could * LEAST_SHARE
    return GpuTest(SLOW if slow else WORKS, f"{found}, and could {could / 1e9:.1f}" if could else found)


def _difference(host: ctypes.c_void_p, expected: bytes, offset: int) -> str:
    """Where the GPU's memory at an offset differs from its copy; empty if nowhere."""
    size = len(expected)
    if not ctypes.CDLL(None).memcmp(host, expected, ctypes.c_size_t(size)):
        return ""
    found = ctypes.string_at(host, size)
    at = next(at for at in range(size) if found[at] != expected[at])
    return f"at byte {offset + at}: {found[at]:#04x} in place of {expected[at]:#04x}"


def _rates(cuda: _Cuda, name: str, target: object, source: object, size: int) -> Iterator[float]:
    for _ in range(COPIES):
        began = time.perf_counter()
        cuda(name, target, source, ctypes.c_size_t(size))
        yield size / (time.perf_counter() - began)


def link_rate(device: Path) -> float:
    """The bandwidth of a device's PCIe link in bytes per second, by what both ends support; 0 if unknown."""
    rate = 1e9 / 8
    for name in ("max_link_width", "max_link_speed"):
        ends: list[float] = []
        for end in (device, device.resolve().parent):
            with suppress(OSError, ValueError, IndexError):  # such as "Unknown"
                ends.append(float((end / name).read_text().split()[0]))
        rate *= min(ends, default=0.0)
    return rate


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(int(sys.argv[1]))))
