"""`gpuscalectl init`: what it writes on a first host is what the services take, and a second run takes nothing away."""

import os
import pwd
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.cli.commands import hosts, joining, units
from gpuscale.cli.commands.hosts import Database
from gpuscale.cli.commands.units import demoted
from gpuscale.cli.console.command import Session
from gpuscale.common.errors import DeadlineExceededError, UnauthenticatedError, UnavailableError
from gpuscale.common.security.auth import Role, TokenFile
from gpuscale.common.security.certificate_authority import issue, read_pair, subject_of
from gpuscale.testing import FakeServer
from tests.support.cli import run_cli
from tests.support.ports import silent_port
from tests.support.waiting import eventually_sync


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_first_host_is_set_up_once(tmp_path: Path) -> None:
    folder, url = tmp_path / "gpuscale", "postgresql://u:secret@db/gpuscale\n"
    typed = ("init", "--dir", str(folder), "--host", "gpus.example", "--postgresql", "-")
    planned = run_cli(*typed, "--plan")
    assert (planned.code, folder.exists()) == (0, False)
    made = run_cli(*typed, stdin=url)
    assert made.code == 0, made.err
    written = (folder / "gpuscale.toml").read_text()
    assert planned.out == f"# {folder / 'gpuscale.toml'}\n{written}"
    secret = (folder / "admin.token").read_text().strip()
    assert secret not in made.out + made.err + written
    tokens = TokenFile(folder / "tokens.toml")
    assert tokens.principal(secret).role is Role.ADMIN
    assert tokens.limits_of_certificate("services").tenants == ("*",)
    settings = tomllib.loads(written)
    assert AllocatorSettings.model_validate(settings["allocator"]).database is not None
    assert all("audit_file" in settings[name] for name in ("fleet", "allocator", "autoscaler", "gateway"))
    server = x509.load_pem_x509_certificate((folder / "pki" / "server.crt").read_bytes())
    assert subject_of(server).hosts == ("gpus.example", "localhost", "127.0.0.1")
    private = [folder / "admin.token", folder / "tokens.toml", *(folder / "pki").glob("*.key")]
    assert {oct(path.stat().st_mode & 0o777) for path in private} == {"0o600"}
    with (folder / "gpuscale.toml").open("a") as settings:
        settings.write("[brokers.default]\namqp_url = 'amqp://h'\n")
    before = content(folder)
    assert run_cli(*typed).code == 0
    other = run_cli(*typed, "--standby", "other")
    assert (other.code, "with other settings" in other.err) == (4, True)
    assert content(folder) == before


def test_a_first_host_is_set_up_after_an_init_that_was_killed(tmp_path: Path) -> None:
    """And has another name later: its servers have both."""
    (pki := tmp_path / "pki").mkdir()
    (pki / "ca.key").write_text("half an authority")
    for name in ("gpus.example", "other.example"):
        made = run_cli("init", "--dir", str(tmp_path), "--host", name)
        assert made.code == 0, made.err
    shown = read_pair(pki, "server").certificate
    shown.verify_directly_issued_by(read_pair(pki, "ca").certificate)
    assert {"gpus.example", "other.example"} < {*subject_of(shown).hosts}


def test_where_no_units_are_certificates_are_renewed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are no part of it: each is `sleep`."""
    typed, pki = ("init", "--dir", str(tmp_path), "--host", "gpus.example"), tmp_path / "pki"
    assert run_cli(*typed).code == 0
    before, old = content(pki), read_pair(pki, "gate").certificate
    issue(read_pair(pki, "ca"), subject_of(old), 1e-3).write(pki, "gate")
    started = list[subprocess.Popen[bytes]]()

    def start(*_: object, **__: object) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    monkeypatch.setattr(hosts, "start", start)

    def until_renewed() -> None:
        try:
            eventually_sync(
                lambda: read_pair(pki, "gate").certificate.not_valid_after_utc >= old.not_valid_after_utc
            )
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        renewed = pool.submit(until_renewed)
        ran = run_cli(*typed, "--run")
        renewed.result()
    assert (ran.code, "renewed the certificates gate" in ran.err) == (0, True), ran.err
    changed = [name for name, found in content(pki).items() if found != before[name]]
    assert sorted(Path(name).name for name in changed) == ["gate.crt", "gate.key"]
    assert subject_of(read_pair(pki, "gate").certificate) == subject_of(old)
    assert len([one.wait() for one in started]) == 4


def test_a_host_that_is_slow_to_start_is_waited_for() -> None:
    """A late answer ended all programs that `init --run` and `join --run` had just started."""
    with FakeServer() as server:
        session = Session(address=server.address)
        assert joining._online(session, "node-0") == "node-0 is ONLINE"
        server.fail("GetNode", DeadlineExceededError("busy"))
        assert joining._online(session, "node-0") is None
        revoked = "CERTIFICATE_REVOKED"
        server.fail("GetNode", UnauthenticatedError("the client certificate was revoked", reason=revoked))
        with pytest.raises(UnauthenticatedError):  # its token was not asked for, and nobody would say why
            joining._online(session, "node-0")


@pytest.mark.parametrize(
    ("after", "ends"),
    [("activating\nNRestarts=3", "ends again and again"), ("failed\nNRestarts=0", "failed")],
)
def test_a_unit_that_died_ends_the_wait_for_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: str, ends: str
) -> None:
    """It waited two minutes without a word. What systemd did before this start does not count."""
    states = iter(
        ["active\nNRestarts=7", "active\nNRestarts=7", f"{after.replace('3', '8')}", after.replace("3", "10")]
    )

    def systemd(words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        state = next(states) if "show" in words else "running"
        text = f"Id=gpuscale-fleet.service\nActiveState={state}\n" if "show" in words else state
        return subprocess.CompletedProcess(words, 0, text, "")

    for name, value in {"_run": systemd, "folder": lambda: tmp_path, "LOOK_SECONDS": 0.0}.items():
        monkeypatch.setattr(units, name, value)
    monkeypatch.setattr("shutil.which", lambda _: "systemctl")
    with pytest.raises(UnavailableError, match=rf"gpuscale-fleet {ends}: journalctl .*-u gpuscale-fleet$"):
        units.start_units(["gpuscale-fleet"], tmp_path / "x.toml", tmp_path, lambda: None)
    told = "gpuscale-fleet ended and is started again; to see why: journalctl"
    assert (told in capsys.readouterr().err) is ("again" in ends)


def test_what_hinders_a_join_is_said_in_words(tmp_path: Path) -> None:
    with silent_port() as port:
        typed = ("join", f"127.0.0.1:{port}", "--ca-hash", f"sha256:{'0' * 64}", "--dir", str(tmp_path))
        away = run_cli(*typed, "--token", "x", "--plan")
    assert (away.code, away.err.endswith(": Connection refused\n")) == (7, True), away.err


def test_a_database_is_typed_or_read_from_standard_input(tmp_path: Path) -> None:
    folder, typed = tmp_path / "gpuscale", "postgresql://u:secret@db/gpuscale"
    words = ("init", "--dir", str(folder), "--postgresql")
    made = run_cli(*words, typed)
    assert (made.code, "secret" in made.out + made.err) == (0, False), made.err
    kept = folder / "database.url"
    assert (kept.read_text(), oct(kept.stat().st_mode & 0o777)) == (typed, "0o600")
    settings = tomllib.loads((folder / "gpuscale.toml").read_text())["allocator"]
    assert settings["database_file"] == str(kept)
    assert AllocatorSettings.model_validate(settings).database is not None
    for wrong in ("mysql://db/x", "db.internal"):
        assert "--postgresql must be a URL" in run_cli(*words, wrong).err
    assert Database(typed).option == "--postgresql URL"
    assert Database("postgresql://u@db/x").option == "--postgresql postgresql://u@db/x"


def test_a_wrong_database_is_refused_first_and_a_right_one_taken_later(tmp_path: Path) -> None:
    """It stayed what it was, with exit code 0, or was refused once the authority was made."""
    folder, before = tmp_path / "gpuscale", "postgresql://u@elsewhere/gpuscale"
    typed = ("init", "--dir", str(folder), "--host", "gpus.example", "--postgresql", "-")
    for wrong, why in {"x": "must be a URL", "postgresql://u:p/a@db/x": "has a", "": "must"}.items():
        refused = run_cli(*typed, stdin=f"{wrong}\n")
        assert (refused.code, f"--postgresql {why}" in refused.err, folder.exists()) == (2, True, False)
    for url in (before, before.replace("elsewhere", "db")):
        assert run_cli(*typed, stdin=f"{url}\n").code == 0
        assert (folder / "database.url").read_text() == url


def test_a_database_file_of_an_earlier_release_is_kept(tmp_path: Path) -> None:
    """Its host could not be set up again, such as for a standby."""
    typed = ("init", "--dir", str(tmp_path), "--host", "gpus.example", "--postgresql", "-")
    url, settings = "postgresql://u@db/gpuscale", tmp_path / "gpuscale.toml"
    assert run_cli(*typed, stdin=url).code == 0
    own = (tmp_path / "database.url").rename(tmp_path / "own.url")
    settings.write_text(settings.read_text().replace("database.url", own.name))
    before = content(tmp_path)
    assert run_cli(*typed, stdin=url).code == 0
    other = run_cli(*typed, stdin=f"{url}-2")
    assert (other.code, f"names {own}, which has another URL: change it there" in other.err) == (4, True)
    assert content(tmp_path) == before


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pwd.struct_passwd:
    """The user of the units and of workers on this host."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    found = pwd.getpwnam("nobody")
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: found)
    return found


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that every user can reach, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_services_read_what_root_wrote_and_change_none_of_it(
    tmp_path: Path, nobody: pwd.struct_passwd
) -> None:
    folder = tmp_path / "gpuscale"
    assert run_cli("init", "--dir", str(folder), "--host", "gpus.example").code == 0

    def kept(name: str) -> tuple[int, int, str]:
        found = (folder / name).stat()
        return found.st_uid, found.st_gid, oct(found.st_mode & 0o777)

    theirs = (0, nobody.pw_gid)
    assert {kept(name) for name in ("", "pki")} == {(*theirs, "0o750")}
    files = ("gpuscale.toml", "tokens.toml", "revoked.toml", "pki/ca.key", "pki/server.key", "pki/gate.key")
    assert {kept(name) for name in files} == {(*theirs, "0o640")}
    assert kept("admin.token") == (0, 0, "0o600")
    assert kept("state") == (nobody.pw_uid, nobody.pw_gid, "0o700")


def test_root_follows_no_link_of_a_service(reachable: Path, nobody: pwd.struct_passwd) -> None:
    (elsewhere := reachable / "elsewhere").mkdir()
    for name in ("ca.crt", "host.pem"):
        (elsewhere / name).touch()
    (folder := reachable / "gpuscale").mkdir()
    (folder / "pki").symlink_to(elsewhere)
    assert "Too many levels" in run_cli("init", "--dir", str(folder)).err
    (folder / "gpuscale.toml").touch()
    (state := folder / "state").mkdir(exist_ok=True)
    os.chown(state, nobody.pw_uid, nobody.pw_gid)
    (state / "host").symlink_to(elsewhere)
    assert "Permission denied" in run_cli("leave", "--dir", str(folder)).err
    assert {path.stat().st_uid for path in (elsewhere, *elsewhere.iterdir())} == {0}
    assert len(list(elsewhere.iterdir())) == 2


def test_programs_that_root_runs_are_not_root(nobody: pwd.struct_passwd) -> None:
    def status(program: str) -> str:
        words = [*demoted(program)[0], "grep", "-E", "^(Uid|Groups|CapEff|NoNewPrivs)", "/proc/self/status"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    own = "\t".join([str(nobody.pw_uid)] * 4)
    assert f"Uid:\t{own}\n" in status("gpuscale-agent")
    assert "CapEff:\t0000000000000000\n" in status("gpuscale-agent")
    needed = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 19  # CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE
    assert f"CapEff:\t{needed:016x}\n" in status("gpuscale-adapter")
    assert demoted("gpuscale-adapter")[1] == ["--worker-user=gpuscale-worker"]
