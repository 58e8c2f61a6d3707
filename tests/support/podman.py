"""A private Podman whose service speaks Docker's API on a unix socket, with storage, containers and settings of its own.

Containers share the network of the host and come from one image, made here of the static busybox: nothing is fetched.
Nothing of the host's own Podman is read or changed.
"""

import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import psutil

from tests.support.guarded import GuardedFolder, GuardedProcess, PrivateServer
from tests.support.waiting import eventually_sync

COMMAND_TIMEOUT_S = 120.0
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
PROGRAMS = ("podman", "runc", "conmon", "busybox")
IMAGE = "localhost/worker:1"
APPLETS = ("echo", "sh", "sleep", "true")
_CONTAINERS_CONF = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{folder}/tmp"
volume_path = "{folder}/volumes"

[containers]
netns = "host"
# The limits that Podman would raise by itself need a privilege that a container of a CI has not.
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
_STORAGE_CONF = """\
[storage]
driver = "{driver}"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""


def missing_programs() -> str | None:
    """Which programs are not installed, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"not installed: {' '.join(missing)} (Debian: podman runc conmon busybox-static)" if missing else None
    )


class Podman(PrivateServer):
    """A Podman of one's own; use it as a context manager. All methods block.

    Containers live on when the service is stopped or killed, as they do with Docker's live restore.
    """

    def __init__(self, driver: str = "vfs") -> None:
        """`driver` keeps the images: vfs works anywhere, and copies all of an image for each container."""
        self._folder = GuardedFolder("gpuscale-podman-")
        self.path = self._folder.path
        # A path of a unix socket may have 107 characters.
        self.socket = self.path / "podman.sock"
        self.address = f"unix://{self.socket}"
        self._service: GuardedProcess | None = None
        (self.path / "home").mkdir()
        (self.path / "containers.conf").write_text(_CONTAINERS_CONF.format(folder=self.path))
        (self.path / "storage.conf").write_text(_STORAGE_CONF.format(folder=self.path, driver=driver))

    @property
    def environment(self) -> Mapping[str, str]:
        """What points podman to this instance."""
        return {
            "PATH": f"{os.environ['PATH']}{os.pathsep}/usr/sbin",
            "HOME": str(self.path / "home"),
            "LANG": "C.UTF-8",
            "CONTAINERS_CONF": str(self.path / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.path / "storage.conf"),
        }

    def run(self, *arguments: str) -> str:
        """Run podman by its command line: a client that is not ours. Returns what it printed."""
        done = subprocess.run(
            ["podman", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    def start(self) -> None:
        """Start the service, and wait until it answers."""
        command = ["podman", "system", "service", "--time", "0", self.address]
        self._service = self._folder.spawn("service", command, self.environment)
        try:
            eventually_sync(self._answers, timeout=START_TIMEOUT_S, interval=0.05)
        except AssertionError as error:
            raise RuntimeError(f"podman did not start: {error}\n{self._folder.tail()}") from error

    def stop(self) -> None:
        """End the service at once; the containers live on."""
        if self._service is not None:
            self._service.end(signal.SIGKILL, STOP_TIMEOUT_S)
            self._service = None

    def close(self) -> None:
        """End every container and the service, and remove every file."""
        try:
            self.run("rm", "--all", "--force", "--time", "0")
        finally:
            self._end_monitors()
            self._folder.close()

    def __enter__(self) -> Self:
        try:
            self._import()
            self.run("run", "--rm", IMAGE, "/bin/true")
            self.start()
        except (RuntimeError, subprocess.SubprocessError):
            self.close()
            raise
        return self

    def _import(self) -> None:
        busybox = shutil.which("busybox")
        assert busybox is not None
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(busybox, "bin/busybox")
                for applet in APPLETS:
                    link = tarfile.TarInfo(f"bin/{applet}")
                    link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                    archive.addfile(link)
                for folder in ("proc", "sys", "dev", "tmp", "etc", "run"):
                    made = tarfile.TarInfo(folder)
                    made.type, made.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(made)
            file.flush()
            self.run("import", file.name, IMAGE)

    def _end_monitors(self) -> None:
        """End what watches a container that podman lost sight of, such as one it was killed over while making it."""
        for monitor in psutil.process_iter(["name", "cmdline"]):
            if monitor.info["name"] == "conmon" and str(self.path) in " ".join(monitor.info["cmdline"] or ()):
                for process in (*monitor.children(recursive=True), monitor):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    def _answers(self) -> bool:
        if self._service is None or not self._service.running:
            raise RuntimeError(f"podman ended while it started\n{self._folder.tail()}")
        return self.socket.exists()
