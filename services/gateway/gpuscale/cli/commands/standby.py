"""`gpuscalectl join --role standby` and `--role gateway`: standby services, or a gateway only."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpuscale.api.monitor import v1 as api
from gpuscale.cli.commands.database import Database
from gpuscale.cli.commands.hosts import (
    GATEWAY_PORT,
    NOT_YET,
    PROGRAMS_OF_SERVICES,
    counts,
    has_expired,
    is_written,
    run_programs,
    say,
    settings_of_services,
    settings_text,
    trusted,
    trusting,
    was_cut_off,
)
from gpuscale.cli.commands.units import as_units_user, hand_over, make_users, start_units, systemctl
from gpuscale.cli.commands.units import plan as plan_of_units
from gpuscale.cli.console.command import Session
from gpuscale.cli.console.errors import writing
from gpuscale.cli.console.terminal import note
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc import renewal
from gpuscale.common.rpc.channel import split_addresses
from gpuscale.common.secrets import write_private
from gpuscale.common.security import authority as pki


@dataclass(frozen=True)
class ServicesHost:
    """A host that joins as standby or gateway.

    `database` is the first host's PostgreSQL, for a standby. Others reach it by the names `hosts`; `folder` has its settings.
    """

    role: str
    node: str
    hosts: tuple[str, ...]
    database: Database
    folder: Path
    state: Path

    def join(
        self,
        session: Session,
        address: str,
        ca_hash: str,
        secret: Callable[[], str],
        *,
        plan: bool,
        run: bool,
    ) -> None:
        """Get certificates and the fleet's tokens file, write settings, and start the programs.

        Raises GpuscaleError: the server is the wrong one, refuses, or does not answer, or a file cannot be written.
        """
        programs = PROGRAMS_OF_SERVICES[-1:] if self.role == "gateway" else PROGRAMS_OF_SERVICES
        names = [name.removeprefix("gpuscale-") for name in programs]
        text, file = self._settings(address, names), self.folder / "gpuscale.toml"
        under_systemd = not run and bool(systemctl())
        written = not plan and is_written(file, text)
        with as_units_user():  # after a time away that was longer than its certificates last
            expired = has_expired(self._place / renewal.SERVICES_FILES[0], self.node, f"--kind {self.role} ")
        with tempfile.TemporaryDirectory() as passing:
            if expired or not written:
                authority = trusted(session, address, ca_hash, Path(passing))
                if plan:
                    units = plan_of_units(programs, file, self.state) if under_systemd else ""
                    sys.stdout.write(f"# {file}\n{text}{units}")
                    return
                if under_systemd:
                    make_users(programs)
                with writing("HOST_FILES"):
                    if not self._was_cut_off(ca_hash):
                        self._join(trusting(session, address, authority), secret())
                    if not written:
                        self.database.write(self.folder)
                        write_private(file, text.encode())
                        hand_over(file)
        local = f"127.0.0.1:{GATEWAY_PORT}"
        own = replace(trusting(session, local, self._place / "pki" / "ca.crt"), dial_timeout=2.0)

        def ready() -> str | None:
            try:
                with own.connect(quickly=2.0) as client:
                    client.joining.GetAuthority(api.GetAuthorityRequest())
            except NOT_YET:
                return None
            return f"{self.node} serves as {self.role}"

        if under_systemd:
            say(session, start_units(programs, file, self.state, ready))
        elif run:
            run_programs(session, programs, file, ready)
        else:
            session.output.write_records("files", [{"file": str(file)}])
            note(f"{self.node} has joined; to start it, type the same with --run, without the token")

    def _settings(self, address: str, names: list[str]) -> str:
        """The settings of its programs: those of the first host with its own addresses."""
        if (self.role == "standby") != (self.database.url is not None):
            raise InvalidArgumentError(
                "--postgresql names the PostgreSQL of the first host, for --role standby alone"
            )
        known = [one.rpartition(":")[0] for one in split_addresses(address)]
        own = next((nth for nth, one in enumerate(known) if one in self.hosts), len(known))
        if self.role == "standby" and own == len(known):
            raise InvalidArgumentError(
                f"{address} names no host {self.hosts[0]}: init --standby on the first host, and --host here, name it",
                field="host",
            )
        found = settings_of_services(
            self.folder,
            self.state,
            self.database.place(self.folder),
            known,
            min(own, len(known) - 1),
            self._place,
        )
        return settings_text({name: found[name] for name in names})

    @property
    def _place(self) -> Path:
        """The directory of files from the fleet, which the programs update."""
        return self.state / "host"

    def _was_cut_off(self, ca_hash: str) -> bool:
        """Whether an earlier `join` with the same authority stopped after getting its certificates."""
        with as_units_user():
            if not all((self._place / name).exists() for name in renewal.SERVICES_FILES):
                return False
            files = {
                "ca": self._place / renewal.SERVICES_FILES[2],
                "pair": self._place / renewal.SERVICES_FILES[0],
            }
            return counts(files["pair"]) and was_cut_off(files, self.hosts[0], ca_hash, self.hosts)

    def _join(self, session: Session, token: str) -> None:
        key, csr = pki.make_request()
        with session.connect() as client:
            request = api.JoinRequest(token=token, node=self.node, csr=csr, hosts=self.hosts)
            answer = client.joining.Join(request)
        if not answer.tokens:
            raise FailedPreconditionError(
                "the join token is for a GPU host: join-token create --kind", reason="JOIN_TOKEN_KIND"
            )
        for made in (self.folder, self.state):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            hand_over(made, own=made == self.state)
        with as_units_user():
            for made in (self._place, self._place / "pki"):
                made.mkdir(mode=0o700, exist_ok=True)
            renewal.write_services_files(self._place, answer, key)
