"""docker-compose.yml brought up by podman-compose, in a network namespace of its own, without a registry.

The image `gpuscale:local` is the one that the Dockerfile builds where GPUSCALE_IMAGE names its archive (`make image`).
Otherwise it is made here: gpuscale as its wheel installs it, over the Python and the libraries of this machine, which an
override file mounts. The image of PostgreSQL is made so too, with another command; RabbitMQ has a stand-in that does
nothing, and no service has a GPU or the network of its own that an engine would give it.
"""

import json
import os
import resource
import signal
import site
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import Any, Self

from ruamel.yaml import YAML

from tests.support.podman import Podman, missing_programs
from tests.support.postgresql import program

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
SIMULATED = ROOT / "deploy" / "compose" / "simulated.yml"
SECRETS = ROOT / "deploy" / "compose" / "secrets.sh"
TIMEOUT_S = 200.0
"""Seconds for one command; less than a test may take, so that what it said is shown."""
DESCRIPTORS = 65_536
"""As many as docker-compose.yml asks for."""
WITHOUT_LIMITS = """\
#!/bin/sh
# Podman for a sandbox that may raise no limit: all arguments but --ulimit and its value.
for word do
    shift
    if [ "$word" = --ulimit ]; then skip=yes; continue; fi
    if [ "$skip" = yes ]; then skip=; continue; fi
    set -- "$@" "$word"
done
exec podman "$@"
"""
OWN_USER, WORKER_USER = 10_001, 10_002
MADE = "localhost/of-this-machine:local"
ARCHIVE = os.environ.get("GPUSCALE_IMAGE")
PYTHON = "/opt/python/bin/python3"
_FOLDERS = (
    *("usr", "proc", "sys", "dev", "tmp", "run", "etc", "srv"),
    *("opt/python", "opt/deps", "opt/gpuscale/bin"),
)
_OWN_FOLDERS = {
    "var/lib/gpuscale": OWN_USER,
    "var/lib/postgresql/data": OWN_USER,
    "var/lib/gpuscale-worker": WORKER_USER,
}
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_POSTGRES = """\
set -e
cd /var/lib/postgresql/data
[ -e PG_VERSION ] || {bin}/initdb -U "$POSTGRES_USER" -E UTF8 --locale=C --no-sync -A trust . >/dev/null
{bin}/postgres --single -D . -j postgres <<< "CREATE DATABASE \\"$POSTGRES_DB\\";" >/dev/null 2>&1 || true
exec {bin}/postgres -D . -c listen_addresses=127.0.0.1 -c unix_socket_directories=/tmp -c fsync=off
"""


def why_unavailable() -> str | None:
    """Why the file cannot be brought up here, or None if it can."""
    if (missing := missing_programs()) is not None:
        return missing
    if os.geteuid() != 0:
        return "only root may give containers a network namespace of their own"
    if find_spec("podman_compose") is None:
        return "podman-compose is not installed (requirements-dev.txt)"
    if program("postgres") is None:
        return "PostgreSQL is not installed (Debian package postgresql)"
    if which("catatonit") is None:
        return "no init for containers is installed (Debian package catatonit)"
    tried = subprocess.run(
        ["unshare", "--net", "true"], check=False, capture_output=True, text=True, timeout=60
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


class Compose:
    """The services of the file; use it as a context manager. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._podman = Podman("overlay") if ARCHIVE else Podman()
        self._holder: subprocess.Popen[str] | None = None
        self._override = folder / "override.yml"
        self._secrets = folder / "secrets"

    def up(self, *services: str) -> None:
        """Bring services up, with what they depend on. Raises AssertionError: that failed; the text is what was said."""
        self._compose("up", "--detach", "--no-build", *services)

    def kill(self, service: str) -> None:
        """kill -9."""
        self._inside("podman", "kill", "--signal", "KILL", f"gpuscale_{service}_1")

    def stop(self, service: str) -> int:
        """Ask it to end, and kill it 15 s later; its exit status: 137 when it was killed."""
        name = f"gpuscale_{service}_1"
        self._inside("podman", "stop", "--time", "15", name)
        return int(self._inside("podman", "inspect", "--format", "{{.State.ExitCode}}", name))

    def logs(self, service: str) -> str:
        """What a service wrote."""
        return self._inside("sh", "-c", f"podman logs gpuscale_{service}_1 2>&1")

    def page(self, address: str) -> str:
        """What is served there over HTTP."""
        script = (
            f"import urllib.request as r; print(r.urlopen('http://{address}', timeout=30).read().decode())"
        )
        return self._inside(sys.executable, "-c", script)

    def ctl(self, *arguments: str) -> Any:
        """What gpuscalectl says, in JSON, from inside of the gateway's container."""
        command = ("podman", "exec", "gpuscale_gateway_1", "gpuscalectl", *arguments, "-o", "json")
        return json.loads(self._inside(*command))

    def __enter__(self) -> Self:
        self._podman.__enter__()
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._holder.stdout is not None
            assert self._holder.stdout.readline() == "ready\n"
            self._import()
            built = self._load(ARCHIVE) if ARCHIVE else None
            subprocess.run(["sh", str(SECRETS), str(self._secrets)], check=True, timeout=60)
            found = YAML(typ="safe").load(COMPOSE_FILE)
            changed = {name: _changed(name, built) for name in found["services"]}
            secrets = {name: {"file": str(self._secrets / name)} for name in found["secrets"]}
            self._override.write_text(json.dumps({"services": changed, "secrets": secrets}))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._holder is not None:
                # Those that others depend on are refused until these are gone.
                while self._inside("podman", "ps", "--all", "--quiet", check=False):
                    self._inside("podman", "rm", "--all", "--force", "--time", "0", check=False)
            self._podman.__exit__(kind, error, trace)
        finally:
            if self._holder is not None:
                self._holder.communicate()

    def _command(self, *files: Path) -> list[str]:
        named = [word for file in (COMPOSE_FILE, SIMULATED, *files) for word in ("--file", str(file))]
        # Podman's own parent has the share of the CPU that one process has, for all containers together.
        parent = "--podman-run-args=--cgroup-parent=/"
        command = [sys.executable, "-m", "podman_compose", "--project-name", "gpuscale", parent]
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < DESCRIPTORS:
            program = self._folder / "podman"
            program.write_text(WITHOUT_LIMITS)
            program.chmod(0o700)
            command += ["--podman-path", str(program)]
        return [*command, *named]

    def _compose(self, *arguments: str) -> str:
        return self._inside(*self._command(self._override), *arguments)

    def _inside(self, *command: str, check: bool = True) -> str:
        """Run a program in the network namespace; what it printed."""
        assert self._holder is not None
        # Into files: what a container's monitor inherits of a pipe would never be closed.
        said = (self._folder / "stdout", self._folder / "stderr")
        with said[0].open("wb") as stdout, said[1].open("wb") as stderr:
            running = subprocess.Popen(
                ["nsenter", "--target", str(self._holder.pid), "--net", *command],
                env=self._podman.environment,
                cwd=self._folder,
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = running.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                code = running.wait()
        assert code == 0 or not check, f"{command}: {said[1].read_text()[-3000:]}"
        return said[0].read_text()

    def _import(self) -> None:
        """Make the image."""
        file = self._folder / "root.tar"
        with tarfile.open(file, "w") as archive:
            _skeleton(archive)
            _programs(archive, self._wheel())
        changes = [
            "USER 10001",
            "ENV PATH=/opt/gpuscale/bin:/usr/bin:/bin",
            "ENV PYTHONPATH=/opt/gpuscale/lib:/opt/deps",
            # Its own library, not one of another version that the machine may have.
            "ENV LD_LIBRARY_PATH=/opt/python/lib",
            "ENV PYTHONDONTWRITEBYTECODE=1",
        ]
        self._podman.run("import", *(word for one in changes for word in ("--change", one)), str(file), MADE)

    def _load(self, archive: str) -> str:
        """The name of the image in an archive, which is loaded."""
        return self._podman.run("load", "--quiet", "--input", archive).removeprefix("Loaded image: ")

    def _wheel(self) -> Path:
        build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(self._folder))
        built = subprocess.run(
            [sys.executable, "-m", "pip", *build, str(ROOT)],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert built.returncode == 0, built.stderr
        return next(self._folder.glob("gpuscale-*.whl"))


def _skeleton(archive: tarfile.TarFile) -> None:
    for name in (*_FOLDERS, *_OWN_FOLDERS):
        made = tarfile.TarInfo(name)
        made.type, made.mode = tarfile.DIRTYPE, 0o755
        if name in _OWN_FOLDERS:
            made.uid = made.gid = _OWN_FOLDERS[name]
            made.mode = 0o700
        if name == "tmp":
            made.mode = 0o1777
        archive.addfile(made)
    for name, target in _LINKS.items():
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        archive.addfile(link)
    ids = {"root": 0, "gpuscale": OWN_USER, "gpuscale-worker": WORKER_USER}
    users = "".join(f"{name}:x:{one}:{one}::/tmp:/bin/sh\n" for name, one in ids.items())
    _add(archive, "etc/passwd", users.encode())
    _add(archive, "etc/group", "".join(f"{name}:x:{one}:\n" for name, one in ids.items()).encode())


def _programs(archive: tarfile.TarFile, wheel: Path) -> None:
    """The wheel's files, and a script for each of its programs."""
    points = ConfigParser()
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            _add(archive, f"opt/gpuscale/lib/{name}", packed.read(name))
            if name.endswith(".dist-info/entry_points.txt"):
                points.read_file(StringIO(packed.read(name).decode()))
    for name, target in points["console_scripts"].items():
        module, _, function = target.partition(":")
        script = f"#!{PYTHON}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        _add(archive, f"opt/gpuscale/bin/{name}", script.encode(), 0o755)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    archive.addfile(info, BytesIO(content))


def _changed(name: str, built: str | None) -> dict[str, Any]:
    """What is other for a service than the file says."""
    own: dict[str, Any] = {
        "image": built,
        "network_mode": "host",
        "extra_hosts": ["postgres:127.0.0.1", "rabbitmq:127.0.0.1"],
    }
    if built is None or name in ("postgres", "rabbitmq"):
        own["image"], own["volumes"] = MADE, _of_this_machine()
    if name == "postgres":
        postgres = program("postgres")
        assert postgres is not None
        own["command"] = [
            "/bin/bash",
            "-c",
            _POSTGRES.replace("{bin}", str(postgres.parent)).replace("$", "$$"),
        ]
    if name == "rabbitmq":
        own["command"] = ["/bin/sleep", "10000"]
    return own


def _of_this_machine() -> list[str]:
    """What the image that is made here needs of this machine."""
    mounts = {"/usr": "/usr", sys.base_prefix: "/opt/python", site.getsitepackages()[0]: "/opt/deps"}
    if Path(libraries := "/etc/ld.so.cache").exists():
        mounts[libraries] = libraries
    return [f"{here}:{there}:ro" for here, there in mounts.items()]
