"""`gpuscalectl doctor` and `support-bundle`: problems of this host and the fleet, and the facts that support needs.

A bundle has the settings as the programs read them, with secrets hidden by their type, and without templates and anything named
`env`. Known secrets of this host are removed from every file, including logs.
"""

import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from pydantic import SecretStr

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.cli.commands import doctor_host as host
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import FILE, NO_ANSWER, Session, command
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import DURATION, local_text, option, repeated
from gpuscale.cli.views.monitor import FAR, off
from gpuscale.common import wire
from gpuscale.common.config.sources import CONFIG_VARIABLE, Settings
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.rpc.status import LEADER_KEY, PROBLEM_KEY
from gpuscale.common.secrets import write_private
from gpuscale.common.sizes import counted

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.client import Client

USUAL = Path("/etc/gpuscale/gpuscale.toml")
SKEW = 2.0
"""Clock difference in seconds above which logs of two hosts are hard to compare."""
_OF_AUTOSCALER = ("endpoints", "adapters", "queue_watchers")
CONFIG = option(
    "--config",
    type=FILE,
    envvar=CONFIG_VARIABLE,
    default=lambda: USUAL if os.path.lexists(USUAL) else None,
    show_default=False,
    help=f"The settings file of this host; {USUAL} if it exists.",
)


@command("doctor --only host")
@CONFIG
@option("--only", type=click.Choice(["host", "fleet"]), help="Check only this host, or only the server.")
def doctor(session: Session, config: Path | None, only: str | None) -> None:
    """Check this host's programs by their settings file, and all hosts through the server.

    Checks versions, clocks, certificates, tokens, ports, disks, limits, driver, database, brokers, adapters and signals. Exit code 1
    if any is FAIL.
    """
    found = findings(session, config, only)
    session.output.write_findings("findings", [one.record() for one in found], ("check", "subject"))
    if failed := sum(one.state == "FAIL" for one in found):
        raise GpuscaleError(f"{failed} of {len(found)} checks say FAIL", reason="UNWELL")


def findings(session: Session, config: Path | None, only: str | None = None) -> "list[host.Diagnosis]":
    """The findings on this host, if it has a settings file, and on the server, worst first."""
    found: list[host.Diagnosis] = []
    if only != "fleet":
        if config is not None:
            found += host.examine(config)
        elif only == "host":
            why = f"no {USUAL}, as where nothing or `up` runs"
            found.append(host.Diagnosis("settings", "this host", "WARN", why, "name the file: --config FILE"))
    if only != "host":
        session = of_host(session, config)
        about = lookup.About(silent=session.silent)
        server, advice = "fleet" if session.apart else "gateway", "docs/operations.md#nothing-answers"
        try:
            with session.connect() as client:
                for part, looks in _LOOKS.items():
                    try:
                        found += (one for look in looks for one in look(client, about))
                    except GpuscaleError as error:
                        if error.reason == NO_ANSWER:
                            raise
                        found.append(host.Diagnosis("service", part, "FAIL", error.message, advice))
                found.append(host.Diagnosis("service", server, "OK", f"{client.address} answers"))
        except GpuscaleError as error:
            found.append(host.Diagnosis("service", server, "FAIL", error.message.partition("\n")[0], advice))
    return sorted(found, key=lambda one: ("FAIL", "WARN", "OK").index(one.state))


def of_host(session: Session, config: Path | None) -> Session:
    """The session; on a GPU host, where nothing names a server, one as its agent with the server that it joined."""
    from gpuscale.client.connection import find_context

    if config is None or session.address or os.environ.get("GPUSCALE_ADDRESS"):
        return session
    known: list[Settings] = []
    with suppress(GpuscaleError):  # which the checks of this host tell
        known += [one for one in host.read_settings(config) if not isinstance(one, host.Diagnosis)]
    agent = next((one for one in known if one.section == "agent"), None)
    if agent is None or "gateway" in {one.section for one in known} or find_context(session.context).address:
        return session
    fleet, allocator = (str(getattr(agent, f"{name}_address", None) or "") for name in ("fleet", "allocator"))
    autoscaler = next(filter(None, (getattr(one, "autoscaler_address", "") for one in known)), "")
    apart: dict[str, str] = {}
    if allocator not in {"", fleet}:  # no gateway
        apart = {"allocator": allocator, **dict.fromkeys(_OF_AUTOSCALER, autoscaler)}
    if not fleet or "" in apart.values():
        return session
    own = {name: getattr(agent, name) for name in ("ca_file", "cert_file", "key_file", "token_file")}
    return replace(session, address=fleet, apart=apart, without_token=own["token_file"] is None, **own)


def _nodes(client: "Client", about: lookup.About) -> "Iterator[host.Diagnosis]":
    from gpuscale.client.states import clock_ahead, node_state, problem

    own = version("gpuscale")
    found = lookup.nodes(client, (), about)
    if not found:
        advice = "start gpuscale-agent on each GPU host"
        yield host.Diagnosis("node", "all", "WARN", "no agent reports", advice)
    for node in found:
        state = node_state(node)
        if not state.startswith(("ONLINE", "DEGRADED")):
            yield host.Diagnosis("node", node.name, "FAIL", state, "docs/operations.md#a-host-is-missing")
            continue
        wrong = problem(node)
        advice = "gpuscalectl get health; docs/monitoring.md#troubleshooting" if wrong else ""
        yield host.Diagnosis("driver", node.name, "FAIL" if wrong else "OK", wrong or state, advice)
        if node.agent_version not in {own, ""}:
            same = node.agent_version.split(".")[:2] == own.split(".")[:2]
            text = f"the agent is {node.agent_version}, this program {own}"
            yield host.Diagnosis(
                "version", node.name, "WARN" if same else "FAIL", text, "docs/operations.md#upgrade"
            )
        gap = clock_ahead(node, time.time())
        if gap is None:
            continue
        if abs(gap) < SKEW:
            yield host.Diagnosis("clock", node.name, "OK", f"within {SKEW:.0f} s of this host's")
        else:
            advice = "chronyc tracking, on both hosts"
            yield host.Diagnosis("clock", node.name, "FAIL" if abs(gap) > FAR else "WARN", off(gap), advice)


def _adapters(client: "Client", about: lookup.About) -> "Iterator[host.Diagnosis]":
    for one in lookup.adapters(client, (), about):
        if one.state == autoscaler_api.Adapter.STATE_CONNECTED:
            yield host.Diagnosis("adapter", one.name, "OK", one.kind)
        else:
            since = local_text(wire.to_datetime(one.last_seen_time))
            advice = f"the adapter's unit and log; if it is gone for good: gpuscalectl forget adapter {one.name.rpartition('/')[2]}"
            yield host.Diagnosis("adapter", one.name, "FAIL", f"not heard of since {since}", advice)


def _watchers(client: "Client", about: lookup.About) -> "Iterator[host.Diagnosis]":
    states = autoscaler_api.QueueWatcherStatus.State
    for one in lookup.watchers(client, (), about):
        if one.status.state in {states.STATE_OK, states.STATE_PENDING}:
            yield host.Diagnosis("broker", one.name, "OK", "its queue is read")
        else:
            found = f"{states.Name(one.status.state).removeprefix('STATE_')}: queue {one.spec.queue}"
            yield host.Diagnosis("broker", one.name, "FAIL", found, "gpuscalectl get watchers -o wide")


def _signals(client: "Client", about: lookup.About) -> "Iterator[host.Diagnosis]":
    """Signals that did not count at an endpoint's latest decision, as of a Prometheus server that does not answer."""
    status = autoscaler_api.Observation.Status
    named = [name for one in lookup.endpoints(client, (), about) if (name := one.status.latest_decision)]
    for decision in lookup.decisions(client, named) if named else ():
        endpoint = decision.name.partition("/decisions/")[0]
        for one in decision.observations:
            if one.status != status.STATUS_OK:
                found = ": ".join(filter(None, (status.Name(one.status).removeprefix("STATUS_"), one.detail)))
                advice = f"gpuscalectl explain endpoint {endpoint.partition('/')[2]}"
                yield host.Diagnosis("signal", f"{endpoint} {one.signal}", "WARN", found, advice)


def _state(service: str, client: "Client", about: lookup.About) -> "Iterator[host.Diagnosis]":
    """Check that a service can read its state, and write it."""
    told = lookup.told(client, service, about.silent)
    leader = f"; {told[LEADER_KEY]} leads" if LEADER_KEY in told else ""
    wrong = told.get(PROBLEM_KEY, "")
    text, advice = f"{wrong or 'answers'}{leader}", "docs/operations.md#nothing-answers" if wrong else ""
    yield host.Diagnosis("service", service, "FAIL" if wrong else "OK", text, advice)


_LOOKS: "dict[str, Sequence[Callable[[Client, lookup.About], Iterator[host.Diagnosis]]]]" = {
    "fleet": (partial(_state, "fleet"), _nodes),
    "allocator": (partial(_state, "allocator"),),
    "autoscaler": (partial(_state, "autoscaler"), _adapters),
    "brokers": (_watchers,),
    "signals": (_signals,),
}


STRUCK = "[struck out]"
MOST_LOG_BYTES = 16 << 20
"""Most bytes of each log, from its end."""
SHORTEST = 6
"""Least length of a secret to remove: shorter ones occur in words, and protect nothing."""
NEWEST = 500
"""Most decisions in a bundle."""


@command("support-bundle --since 6h --write bundle.tar.gz")
@CONFIG
@option("--write", "target", type=FILE, required=True, metavar="FILE", help="The file to write, a .tar.gz.")
@option("--since", type=DURATION, default="24h", help="How far back logs and events go.")
@repeated("--log", "logs", type=FILE, help="A log file, if programs do not log to the journal.")
def support_bundle(
    session: Session, config: Path | None, target: Path, since: float, logs: tuple[Path, ...]
) -> None:
    """Collect logs, versions, settings without secrets, the server's state, and the findings of doctor.

    Read it before you send it: it has names, hosts and addresses.
    """
    secrets = sorted(known_secrets(session, config), key=len, reverse=True)
    packed = io.BytesIO()
    names: list[str] = []
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files(session, config, since, logs):
            for secret in secrets:
                text = text.replace(secret, STRUCK)  # noqa: PLW2901
            content = text.encode()
            entry = tarfile.TarInfo(f"gpuscale-support/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
            names.append(name)
    try:
        write_private(target, packed.getvalue())
    except OSError as error:
        raise FailedPreconditionError(f"cannot write {target}: {error.strerror}") from error
    session.output.write_said(
        f"wrote {target}, {counted(len(names), 'file')}", {"file": str(target), "holds": names}, str(target)
    )
    note("read it before you send it: it has names of hosts, endpoints and callers")


def files(
    session: Session, config: Path | None, since: float, logs: tuple[Path, ...]
) -> Iterator[tuple[str, str]]:
    """The name and text of each file of a bundle."""
    packages = {one.metadata["Name"]: one.version for one in distributions()}
    versions = {"python": platform.python_version(), "system": platform.platform()}
    yield "versions.json", _data({**versions, "packages": dict(sorted(packages.items()))})
    yield "doctor.json", _data([one.record() for one in findings(session, config)])
    if config is not None:
        yield "settings.json", _data(open_settings(config))
    yield from server_files(session)
    yield from journal(since)
    for log in logs:
        try:
            with log.open("rb") as opened:
                opened.seek(max(0, log.stat().st_size - MOST_LOG_BYTES))
                yield f"logs/{log.name}", opened.read(MOST_LOG_BYTES).decode(errors="replace")
        except OSError as error:
            yield f"logs/{log.name}.error", f"cannot read {log}: {error.strerror}\n"


def _data(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def open_settings(config: Path) -> Mapping[str, object]:
    """The settings of each program, or their error."""
    shown: dict[str, object] = {}
    try:
        for one in host.read_settings(config):
            if isinstance(one, host.Diagnosis):
                shown[one.subject] = {"error": one.found}
            else:
                shown[one.section] = _open(one.model_dump(mode="json"))
    except GpuscaleError as error:
        shown["error"] = error.message
    return shown


def _open(value: object) -> object:
    """Settings without fields that may hold secrets of workers."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return {
            key: sorted(cast("Mapping[str, object]", one))
            if key.endswith("templates") and isinstance(one, Mapping)
            else _open(one)
            for key, one in table.items()
            if key not in {"env", "environment"}
        }
    if isinstance(value, list):
        return [_open(one) for one in cast("list[object]", value)]
    return value


def server_files(session: Session) -> Iterator[tuple[str, str]]:
    """The server's state; a service that does not answer is replaced by its error."""
    about = lookup.About(silent=session.silent)
    ended = {"ended": True}
    more: dict[str, Any] = {"health": ended, "replicas": ended, "decisions": {"limit": NEWEST}}
    for name in ("nodes", "cordons", "reservations", "endpoints", "adapters", "watchers", *more):
        read: Callable[..., list[Message]] = getattr(lookup, name)
        try:
            with session.connect() as client:
                found = read(client, (), about, **more.get(name, {}))
            yield f"server/{name}.json", _data([to_dict(one) for one in found])
        except GpuscaleError as error:
            yield f"server/{name}.error", f"{error.message}\n"


def journal(since: float) -> Iterator[tuple[str, str]]:
    """The journal of gpuscale's units."""
    if shutil.which("journalctl") is None:
        return
    line = ["journalctl", "--no-pager", "--quiet", "--output=short-iso-precise", "--unit=gpuscale-*"]
    try:
        line.append(f"--since=-{int(since)}s")
        done = subprocess.run(line, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        yield "logs/journal.error", "journalctl did not answer\n"
        return
    yield "logs/journal.txt", done.stdout[-MOST_LOG_BYTES:].decode(errors="replace")


def known_secrets(session: Session, config: Path | None) -> set[str]:
    """All secrets in this user's settings, files and context."""
    found: set[str] = set()
    files = [session.token_file, session.key_file]
    if config is not None:
        try:
            for one in host.read_settings(config):
                if not isinstance(one, host.Diagnosis):
                    for _, secret in host.secrets_in(one, ""):
                        if isinstance(secret, SecretStr):
                            found.add(secret.get_secret_value())
                        else:
                            found.update(secret.texts())
                    files += [
                        getattr(one, field)
                        for field in type(one).model_fields
                        if field.endswith(_SECRET_FILES)
                    ]
        except GpuscaleError:
            pass  # doctor reports it
    for file in files:
        try:
            found.add(file.read_text().strip() if isinstance(file, Path) else "")
        except (OSError, UnicodeDecodeError):
            continue
    return {secret for one in found for secret in (one, *one.splitlines()) if len(secret) >= SHORTEST}


_SECRET_FILES = ("token_file", "key_file", "database_file")
