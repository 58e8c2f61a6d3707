"""The systemd units that `init` and `join` write and start: system units for root, user units otherwise."""

import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path

from gpuscale.cli.console.command import config_home
from gpuscale.cli.console.errors import writing
from gpuscale.cli.console.terminal import note
from gpuscale.common.errors import FailedPreconditionError, UnavailableError

USER, WORKER_USER = "gpuscale", "gpuscale-worker"
"""The users of the programs and of workers."""
STATE = Path("/var/lib/gpuscale")
"""`%S/gpuscale` in system units."""
SYSTEM = Path("/etc/systemd/system")
"""The directory of system units."""
RENEWAL, AUTHORITY = "gpuscale-certificates", "gpuscale-fleet"
"""The units that renew certificates each month, and the program of the host with the authority."""
READY_SECONDS, LOOK_SECONDS = 120.0, 0.5
MOST_ENDS, FAILED = 3, 1_000_000
"""Ends of a unit after which it is not waited for; more than any number of ends, for one that is not started again."""
SYSTEMCTL_SECONDS = 90.0
_PLACES = (
    "--data-dir=",
    "--state-dir=",
    "--audit-file=",
    "--work-socket=",
    "--killer-socket=",
    "--power-socket=",
)
"""Flags with the units' directories; other installations set them in the settings file."""
_OF_USERS = re.compile(
    r"\[|$|(Description|Type|ExecStart|Environment|Restart|RestartSec|TimeoutStopSec|NoNewPrivileges|UMask"
    r"|LimitCORE|LimitNOFILE|KillMode|WantedBy|OnCalendar|RandomizedDelaySec|Persistent)="
)
"""Directives of a unit that work without root."""


def systemctl() -> Sequence[str]:
    """The `systemctl` command of the caller's manager; empty if none runs."""
    words = ["systemctl"] if os.geteuid() == 0 else ["systemctl", "--user"]
    if shutil.which(words[0]) is None:
        return ()
    state = _run([*words, "is-system-running"]).stdout.strip()
    return words if state in {"running", "degraded", "starting", "initializing", "maintenance"} else ()


def _run(words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{' '.join(words)}: {type(error).__name__}"
        raise FailedPreconditionError(message, reason="SYSTEMD") from error


def folder() -> Path:
    """The directory of units."""
    if os.geteuid() == 0:
        return SYSTEM
    return config_home() / "systemd" / "user"


def flags(program: str, settings: Path) -> Mapping[str, object]:
    """The fields that flags of the system unit of a program set, with its drop-ins, if it reads these settings."""
    unit = SYSTEM / f"{program}.service"
    with suppress(OSError, UnicodeDecodeError):
        parts = [unit, *sorted(unit.with_name(f"{unit.name}.d").glob("*.conf"))]
        text = "\n".join(part.read_text(encoding="utf-8") for part in parts)
        read = re.findall(r"(?m)^Environment=GPUSCALE_CONFIG=(.+)$", text)
        if read and Path(read[-1]) == settings.absolute():
            for specifier, place in {"%S": "/var/lib", "%t": "/run", "%L": "/var/log"}.items():
                text = text.replace(specifier, place)
            started = re.findall(r"(?m)^ExecStart=(.+)$", text)
            words = re.findall(r" --([\w-]+)=(\S+)", started[-1] if started else "")
            return {name.replace("-", "_"): value for name, value in words}
    return {}


def unit_files(programs: Sequence[str], settings: Path, state: Path) -> Mapping[Path, str]:
    """The packaged units of programs, adapted to this installation and settings file."""
    names = [f"{name}.service" for name in programs]
    names += [f"{RENEWAL}.service", f"{RENEWAL}.timer"] if AUTHORITY in programs else []
    root = os.geteuid() == 0
    dropped = () if root and state == STATE else _PLACES if root else (*_PLACES, "--worker-user=")
    found: dict[Path, str] = {}
    for name in names:
        text = files("gpuscale.cli").joinpath("units", name).read_text(encoding="utf-8")
        text = re.sub(r"/etc/gpuscale/(pki|revoked)", rf"{settings.parent}/\1", text)
        text = text.replace("/opt/gpuscale/bin/", f"{Path(sys.executable).parent}/")
        text = re.sub(
            r"(?m)^Environment=GPUSCALE_CONFIG=.*$", f"Environment=GPUSCALE_CONFIG={settings}", text
        )
        started = re.search(r"(?m)^ExecStart=.*$", text)
        if started is not None and dropped:
            kept = [word for word in started[0].split() if not word.startswith(dropped)]
            text = text.replace(started[0], " ".join(kept))
        if not root:
            lines = [line for line in text.splitlines() if _OF_USERS.match(line)]
            text = "\n".join(lines).replace("multi-user.target", "default.target") + "\n"
        elif state != STATE and not name.startswith(RENEWAL):
            text = text.replace("\n[Install]", f"ReadWritePaths={state}\n\n[Install]")
        found[folder() / name] = text
    return found


def commands(programs: Sequence[str]) -> list[list[str]]:
    """The commands that create the users of system units, and start the units."""
    found: list[list[str]] = []
    if os.geteuid() == 0:
        needed = {USER: ["--home-dir", str(STATE)]}
        if "gpuscale-adapter" in programs:
            needed[WORKER_USER] = ["--no-create-home"]
        for user, more in needed.items():
            with suppress(KeyError):
                pwd.getpwnam(user)
                continue
            found.append(["useradd", "--system", "--shell", "/usr/sbin/nologin", *more, user])
    manager = list(systemctl())
    timers = [f"{RENEWAL}.timer"] if AUTHORITY in programs else []
    return [*found, [*manager, "daemon-reload"], [*manager, "enable", "--now", *programs, *timers]]


def plan(programs: Sequence[str], settings: Path, state: Path) -> str:
    """The files and commands of `start_units`, as text."""
    written = "".join(f"\n# {file}\n{text}" for file, text in unit_files(programs, settings, state).items())
    return written + "".join(f"\n# {' '.join(words)}" for words in commands(programs)) + "\n"


def make_users(programs: Sequence[str]) -> None:
    """Create missing users, before files are handed over to them. Raises FailedPreconditionError: the command failed (reason SYSTEMD)."""
    for words in commands(programs)[:-2]:
        _must(words)


def start_units(programs: Sequence[str], settings: Path, state: Path, ready: Callable[[], str | None]) -> str:
    """Write and start units, and wait for `ready`; returns its text.

    Raises:
        FailedPreconditionError: a unit cannot be written or started (reason SYSTEMD).
        UnavailableError: one ends again and again, or they are not ready within two minutes.
    """
    with writing(reason="SYSTEMD"):
        folder().mkdir(mode=0o755, parents=True, exist_ok=True)
        for file, text in unit_files(programs, settings, state).items():
            file.write_text(text, encoding="utf-8")
    for words in commands(programs)[-2:]:
        _must(words)
    before = {unit: ends for unit, ends in _ends(programs).items() if ends < FAILED}
    told, until = set[str](), time.monotonic() + READY_SECONDS
    logs = f"journalctl {'' if os.geteuid() == 0 else '--user '}-u"
    while (line := ready()) is None:
        for unit, ends in _ends(programs).items():
            if ends - before.get(unit, 0) >= MOST_ENDS:
                problem = "failed" if ends == FAILED else "ends again and again"
                raise UnavailableError(f"{unit} {problem}: {logs} {unit}", reason="NOT_READY")
            if ends > before.get(unit, 0) and unit not in told:
                told.add(unit)
                note(f"{unit} ended and is started again; to see why: {logs} {unit}")
        if time.monotonic() > until:
            raise UnavailableError(
                f"{', '.join(programs)} run, but do not answer correctly: {logs} 'gpuscale-*'",
                reason="NOT_READY",
            )
        time.sleep(LOOK_SECONDS)
    return line


def _ends(programs: Sequence[str]) -> dict[str, int]:
    """How often each unit ended and was started again by systemd; `FAILED` for one that is not."""
    shown = _run([*systemctl(), "show", "--property=Id,ActiveState,NRestarts", *programs]).stdout
    found: dict[str, int] = {}
    for block in shown.split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in facts:
            ends = FAILED if facts.get("ActiveState") == "failed" else int(facts.get("NRestarts", 0))
            found[facts["Id"].removesuffix(".service")] = ends
    return found


def restart(unit: str) -> None:
    """Restart a unit, with the program installed now. Raises FailedPreconditionError: the command failed (reason SYSTEMD)."""
    _must([*systemctl(), "restart", unit])


def stop_units(programs: Sequence[str]) -> list[Path]:
    """Stop and remove units written earlier; returns their names.

    Raises FailedPreconditionError: they cannot be stopped or removed (reason SYSTEMD).
    """
    written = [file for name in programs if (file := folder() / f"{name}.service").exists()]
    manager = list(systemctl())
    if written and manager:
        _must([*manager, "disable", "--now", *(file.stem for file in written)])
        for file in written:
            file.unlink()
        _must([*manager, "daemon-reload"])
        return written
    return []


def units_user() -> pwd.struct_passwd | None:
    """The user of the units, if the caller is root and it exists; otherwise programs run as the caller."""
    if os.geteuid() == 0:
        with suppress(KeyError):
            return pwd.getpwnam(USER)
    return None


def hand_over(*paths: Path, own: bool = False) -> None:
    """Let the units' user read or own root's files and directories. Links are refused, since they could point anywhere."""
    if (user := units_user()) is None:
        return
    for path in paths:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fchown(opened, user.pw_uid if own else 0, user.pw_gid)
            os.fchmod(opened, 0o700 if own else 0o750 if path.is_dir() else 0o640)
        finally:
            os.close(opened)


def make_runtime_directory(place: Path) -> None:
    """Create a directory below /run, like RuntimeDirectory= of the agent's unit; an existing one keeps its mode."""
    if not place.exists():
        place.mkdir()
        place.chmod(0o755)
    if (user := units_user()) is not None:
        os.chown(place, user.pw_uid, user.pw_gid, follow_symlinks=False)


@contextmanager
def as_units_user() -> Generator[None]:
    """Read and write as the units' user: as root, we would follow links that this user can create."""
    user, group, groups = units_user(), os.getegid(), os.getgroups()
    if user is None:
        yield
        return
    try:
        os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
        os.setegid(user.pw_gid)
        os.seteuid(user.pw_uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def demoted(program: str) -> tuple[Sequence[str], Sequence[str]]:
    """The prefix to run a program like its unit: not as root, with workers as another user."""
    if (user := units_user()) is None:
        return (), ()
    capabilities, told = "-all", list[str]()
    with suppress(KeyError):
        if program == "gpuscale-adapter" and pwd.getpwnam(WORKER_USER):
            capabilities, told = "-all,+setuid,+setgid,+kill,+sys_ptrace", [f"--worker-user={WORKER_USER}"]
    become = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups", "--no-new-privs")
    kept = (f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", f"--bounding-set={capabilities}")
    return ("setpriv", *become, *kept, "--", "env", f"HOME={user.pw_dir}"), told


def _must(words: Sequence[str]) -> None:
    done = _run(words)
    if done.returncode:
        why = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise FailedPreconditionError(f"{' '.join(words)}: {why}", reason="SYSTEMD")
