"""gpuscale-power as a process of its own, on the driver's double."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.waiting import eventually_sync


class PowerHelper:
    """The helper, which hears this process's user."""

    def __init__(self, double: NvmlDouble) -> None:
        self.double = double
        self.socket = double.folder / "power.sock"
        self.found = double.folder / "found.json"
        self.partitions = double.folder / "partitions.json"
        self.log = double.folder / "power.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        place = ("--socket", str(self.socket), "--found-file", str(self.found))
        command = [sys.executable, "-m", "gpuscale.monitor.power", *place, *words]
        command += ["--agent-user", str(os.getuid())]
        self.kill()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=env_with_double(self.double))
        eventually_sync(lambda: self._answers())

    def _answers(self) -> bool:
        try:
            return self.say("[]") == {"problem": "invalid order"}
        except OSError:
            return False

    def put(self, **caps: float) -> dict[str, str]:
        """Order caps by the index of a GPU, as `gpu0`; why not."""
        uuids = {name: self.double.gpus[int(name[3:])].uuid for name in caps}
        found = self.say(json.dumps({"caps": {uuids[name]: watts for name, watts in caps.items()}}))
        problems: dict[str, str] = found["problems"]
        return {name: problems[uuid] for name, uuid in uuids.items() if uuid in problems}

    def start_to_partition(self) -> None:
        self.start("--partitions-file", str(self.partitions))

    def partition(self, gpu: int, *profiles: str, order: str = "o1") -> dict[str, Any]:
        """Order MIG instances, and wait until that has ended; how."""
        orders = {order: {"uuid": self.double.gpus[gpu].uuid, "profiles": profiles}}
        line = json.dumps({"caps": {}, "partitions": orders})
        ended: dict[str, Any] = eventually_sync(lambda: self.ended(line).get(order, {}))
        return ended

    def ended(self, line: str = '{"caps": null}') -> dict[str, Any]:
        """How the orders ended that the helper knows of."""
        found: dict[str, Any] = self.say(line)["partitions"]
        return found

    def say(self, line: str) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.socket))
            link.sendall(line.encode() + b"\n")
            answer: dict[str, Any] = json.loads(link.makefile().readline())
            return answer

    def limits(self) -> list[float | None]:
        return [self.double.power_limit(gpu) for gpu in range(len(self.double.gpus))]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)

    def stop(self) -> None:
        """End it as an operator does."""
        self.process.terminate()
        assert self.process.wait(60) == 0
