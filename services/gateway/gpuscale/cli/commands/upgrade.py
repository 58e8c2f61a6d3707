"""`gpuscalectl upgrade`: checks that versions work together, and restarts this host's units one by one.

Versions work together if their minor versions differ by at most one, so hosts can be upgraded one after another.
"""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from gpuscale.cli.commands.doctor import CONFIG, of_host
from gpuscale.cli.commands.overview import programs
from gpuscale.cli.commands.units import folder, restart, systemctl
from gpuscale.cli.console.command import Session, command
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import option
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, UnavailableError

ORDER = ("fleet", "allocator", "autoscaler", "gateway", "dashboard", "agent", "adapter")
"""Order in which a host's programs are restarted: called ones before their callers."""
STATEFUL = {"fleet": "monitor", "allocator": "allocator", "autoscaler": "autoscaler"}
"""Services with a database, an SQLite file unless it is in PostgreSQL, and their packages."""
ANSWER_SECONDS, LOOK_SECONDS = 60.0, 0.5
_VERSION = re.compile(r"(\d+)\.(\d+)")


def fits(one: str, other: str) -> bool:
    """Whether two versions work together: same major version, minor versions at most one apart."""
    found = [_VERSION.match(text) for text in (one, other)]
    numbers = [(int(match[1]), int(match[2])) for match in found if match is not None]
    return len(numbers) == 2 and numbers[0][0] == numbers[1][0] and abs(numbers[0][1] - numbers[1][1]) <= 1


def judged(program: str, theirs: str, own: str) -> tuple[str, str]:
    """Whether a program's version works with the one that is installed here, and what to do if not."""
    if not fits(theirs, own):
        return "FAIL", f"upgrade it in steps of one minor version up to {own}"
    if program in {"agent", "adapter"} and theirs.startswith("0.1.") and not own.startswith("0.1."):
        return (
            "WARN",
            "it speaks to no later services: upgrade its host in the same go (docs/operations.md#upgrade)",
        )
    return "OK", ""


@command("upgrade --plan")
@CONFIG
@option("--plan", is_flag=True, help="Show versions and what would be restarted, without restarting.")
def upgrade(session: Session, config: Path | None, plan: bool) -> None:
    """Restart the units of this host one by one after an update of gpuscale; jobs, workers and leases continue.

    Upgrade hosts in this order: standbys, the first host of services, GPU hosts. Fails if the installed version does not work
    with a node, or with the state of a service.
    """
    units = [f"gpuscale-{name}" for name in ORDER if (folder() / f"gpuscale-{name}.service").exists()]
    session = of_host(session, config)
    found, own = list(_states(config)), version("gpuscale")
    silent: GpuscaleError | None = None
    try:
        for what, program, theirs in programs(session):
            if not theirs:
                found.append(_row("WARN", what, f"its {program} reports no version, so it is an old one"))
                continue
            state, advice = judged(program, theirs, own)
            found.append(_row(state, what, f"its {program} is {theirs}", advice))
    except GpuscaleError as error:
        silent = error
        found.append(_row("FAIL", "services", error.message))
    restarts = "stop gpuscalectl init --run or join --run, and start it again"
    if units:
        restarts = f"restart {', '.join(units)}"
    steps = [
        _row("STEP 1", "back up", "migrations cannot be undone", "docs/operations.md#back-up"),
        _row("STEP 2", "this host", f"gpuscale {own} is installed", restarts),
        _row("STEP 3", "other hosts", "standbys, first host, GPU hosts", "the same on each"),
    ]
    if plan:
        session.output.write_findings("steps", [*found, *steps], ("what",))
    if silent is not None:
        raise silent
    if wrong := [row for row in found if row["state"] == "FAIL"]:
        raise FailedPreconditionError(f"{wrong[0]['what']}: {wrong[0]['found']}", reason="VERSIONS_APART")
    if plan:
        return
    if not units or not systemctl():
        raise FailedPreconditionError(f"no unit can be restarted here: {restarts}", reason="NO_UNITS")
    for unit in units:
        restart(unit)
        _await_answer(session, unit)
        note(f"{unit} is restarted")
    if not session.output.human:
        session.output.write_records("restarted", [{"what": unit} for unit in units])


def _row(state: str, what: str, found: str, advice: str = "") -> dict[str, object]:
    return {"state": state, "what": what, "found": found, "advice": advice}


def _states(config: Path | None) -> Iterator[dict[str, object]]:
    """Compare the schema of each state on this host with that of the installed programs."""
    from gpuscale.cli.commands.doctor_host import Diagnosis, read_settings

    for one in () if config is None else read_settings(config):
        place = getattr(one, "data_dir", None)
        if isinstance(one, Diagnosis) or not isinstance(place, Path) or one.section not in STATEFUL:
            continue
        name, file = one.section, place / f"{one.section}.db"
        if not file.exists():
            continue
        state = files(f"gpuscale.{STATEFUL[name]}.state")
        code = state.joinpath("schema.py" if name == "allocator" else "store.py").read_text(encoding="utf-8")
        newest = int(re.findall(r"^VERSION.* = (\d+)$", code, re.MULTILINE)[0])
        try:
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=LOOK_SECONDS)) as store:
                stored: int = store.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            yield _row("WARN", name, f"{file} cannot be read: {error}", "run it as root")
            continue
        if stored > newest:
            apart = f"its state has schema {stored}, the installed program writes {newest}"
            yield _row("FAIL", name, apart, "install the newer one")
        else:
            does = "stays" if stored == newest else f"is migrated to {newest} at the start, for good"
            yield _row("OK", name, f"its state has schema {stored}, which {does}")


def _await_answer(session: Session, unit: str) -> None:
    """Wait until the server answers as before, since the next unit may serve the same callers."""
    from gpuscale.api.allocator import v1 as allocator_api
    from gpuscale.api.autoscaler import v1 as autoscaler_api

    until = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < until:
        with suppress(GpuscaleError), session.connect(quickly=2.0) as client:
            client.allocator.ListReservations(allocator_api.ListReservationsRequest(page_size=1))
            client.endpoints.ListEndpoints(autoscaler_api.ListEndpointsRequest(page_size=1))
            return
        time.sleep(LOOK_SECONDS)
    raise UnavailableError(
        f"{unit} was restarted, but the services do not answer: journalctl -u {unit}; no other unit was restarted",
        reason="NOT_READY",
    )
