"""A double of systemctl, for hosts where no systemd runs: it records its calls, and starts and stops what units name.

Nothing of a unit but its program and environment holds here: what the rest does, `systemd-analyze` is asked.
"""

import os
import re
import shlex
import sys
from pathlib import Path

_PROGRAM = """#!{python} -IS
import os, signal, subprocess, sys, pathlib
place = pathlib.Path({place!r})
with (place / "calls").open("a") as calls:
    calls.write(" ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
words = [one for one in sys.argv[1:] if not one.startswith("--")]
if words[:1] == ["is-system-running"]:
    print("running")
for name in words[1:]:
    name = name.removesuffix(".service")
    pid = place / (name + ".pid")
    if words[0] in ("disable", "stop", "restart") and pid.exists():
        os.kill(int(pid.read_text()), signal.SIGTERM)
        pid.unlink()
    if words[0] in ("enable", "restart") and not name.endswith(".timer"):
        lines = pathlib.Path({units!r}, name + ".service").read_text().splitlines()
        [start] = [one.partition("=")[2] for one in lines if one.startswith("ExecStart=")]
        more = dict(one.removeprefix("Environment=").split("=", 1) for one in lines if one.startswith("Environment="))
        start = [one.replace("%t", str(place)) for one in start.split() if not one.startswith("--worker-user")]
        (place / "gpuscale").mkdir(exist_ok=True)
        with (place / (name + ".log")).open("ab") as log:
            process = subprocess.Popen(start, env={{**os.environ, **more}}, stdin=-3, stdout=log, stderr=log, start_new_session=True)
        pid.write_text(str(process.pid))
"""


class SystemctlDouble:
    """The double below a folder; `words` come before a command that is to find it in place of systemctl and useradd."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "units"
        self.units.mkdir(parents=True)
        (folder / "bin").mkdir()
        for name in ("systemctl", "useradd"):
            script = folder / "bin" / name
            script.write_text(
                _PROGRAM.format(python=sys.executable, place=str(folder), units=str(self.units))
            )
            script.chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        mount = f'mount --bind {shlex.quote(str(self.units))} /etc/systemd/system && PATH={shlex.quote(path)} exec "$@"'
        self.words = ("unshare", "--mount", "sh", "-c", mount, "sh")

    def calls(self) -> list[str]:
        """What was asked, without questions whether it runs."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if not re.search("is-system-running| show ", line)]

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())
