"""Tokens and certificates that the CLI makes are those that servers take."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import ExtendedKeyUsage, ObjectIdentifier
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuscale.common import errors
from gpuscale.common.rpc.channel import ClientTls, open_channel
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator, Limits, Role, TokenFile, current_principal
from gpuscale.common.security.certificate_authority import CertificateSubject, issue, read_pair, subject_of
from gpuscale.common.security.tls import ServerTls
from tests.support.cli import Ran, run_cli
from tests.support.throwaway import Allocator, Served, serve

DIGEST = "0" * 64
VIEWER = f"[tokens.a]\nrole='viewer'\nsha256='{DIGEST}'\n"
ANNA = f"# Anna's\n[tokens.anna]\nrole = 'admin'\nsha256 = '{DIGEST}'\n"
URI = "spiffe://gpuscale.local/gpuscale/agent/ann"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def token(file: Path, *arguments: str) -> Ran:
    return run_cli("token", *arguments, "--tokens-file", str(file))


def listed_tokens(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(token(file, "list", "-o", "json").out)["tokens"])


def test_a_token_is_shown_once_and_kept_as_its_digest(file: Path) -> None:
    made = token(file, "create", "ci", "--role", "operator")
    secret = made.out.strip()
    assert made.code == 0
    assert len(secret) >= 43
    assert secret not in file.read_text() + made.err
    principal = TokenFile(file).principal(secret)
    assert (principal.name, principal.role) == ("ci", Role.OPERATOR)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_in_a_file_of_its_own_is_not_shown(file: Path, tmp_path: Path) -> None:
    where = ("--write", str(tmp_path / "token"), "-o", "json")
    made = token(file, "create", "gpu-01.example", "--role", "agent", *where)
    secret = (tmp_path / "token").read_text().strip()
    assert secret not in made.out + made.err
    assert json.loads(made.out) == {"tokens": [{"name": "gpu-01.example", "role": "agent"}]}
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert TokenFile(file).principal(secret).name == "gpu-01.example"


def test_tokens_are_listed_without_what_they_are(file: Path) -> None:
    token(file, "create", "a", "--expires-in", "90d")
    token(file, "create", "b", "--role", "admin")
    listed = listed_tokens(file)
    told = [(one["name"], one["role"], one["state"]) for one in listed]
    assert told == [("a", "viewer", "ACTIVE"), ("b", "admin", "ACTIVE")]
    assert listed[1]["expires"] == "never"
    assert "sha256" not in token(file, "list").out


def test_a_revoked_token_is_gone_and_the_rest_stays_as_it_was_written(file: Path) -> None:
    secret = token(file, "create", "old").out.strip()
    file.write_text(f"# ours\n{file.read_text()}\n{ANNA}")
    ran = token(file, "revoke", "old")
    assert (ran.code, "get reservations -l owner=old" in ran.err) == (0, True), "lease tokens outlive it"
    with pytest.raises(errors.UnauthenticatedError):
        TokenFile(file).principal(secret)
    text = file.read_text()
    assert text.startswith("# ours\n")
    assert "# Anna's\n[tokens.anna]\nrole = 'admin'\n" in text


def test_a_token_written_in_one_line_is_changed_and_revoked_too(file: Path) -> None:
    file.write_text(f"tokens = {{a = {{role='viewer', sha256='{DIGEST}', tenants=[\n'c']}}}}\n")
    assert token(file, "limit", "a", "--tenant", "b").code == 0
    assert listed_tokens(file)[0]["tenants"] == ["b"]
    assert "[" not in token(file, "list").out, "lists of a table are for people"
    assert token(file, "revoke", "a").code == 0
    TokenFile(file)


def test_the_last_token_that_is_revoked_lets_nobody_in_any_more(file: Path) -> None:
    """A file without the table is refused by a running server, which would keep the old tokens."""
    token(file, "create", "only")
    assert token(file, "revoke", "only").code == 0
    assert TokenFile(file).secrets() == []


def test_a_rotated_token_is_the_same_caller_by_its_old_secret_and_its_new(file: Path) -> None:
    options = ("--role", "operator", "--tenant", "ml", "--expires-in", "1h", "--label", "old")
    old = token(file, "create", "ci", *options).out.strip()
    file.write_text(f"# ours\n{file.read_text()}\n{ANNA}")
    new = token(file, "rotate", "ci", "--overlap", "2d", "--expires-in", "90d").out.strip()
    tokens = TokenFile(file)
    assert tokens.principal(old) == tokens.principal(new)
    (newest, used), (previous, _), _ = tokens.secrets()
    assert used is not None
    assert newest.expires is not None
    assert previous.expires is not None
    assert previous.expires - datetime.now(UTC) < timedelta(hours=1)  # an overlap makes nothing last longer
    assert newest.expires - datetime.now(UTC) > timedelta(days=89)
    assert previous.label == "old"
    third = token(file, "rotate", "ci", "--overlap", "0s", "--label", "third").out.strip()
    tokens = TokenFile(file)
    for ended in (old, new):
        with pytest.raises(errors.UnauthenticatedError) as refused:
            tokens.principal(ended)
        assert refused.value.reason == "TOKEN_EXPIRED"
    assert tokens.principal(third).limits == Limits(("ml",))
    states = [(one["name"], one["state"]) for one in listed_tokens(file)]
    assert states == [("anna", "ACTIVE"), ("ci", "ACTIVE"), ("ci", "EXPIRED"), ("ci", "EXPIRED")]
    text = file.read_text()
    assert text.startswith("# ours\n")
    assert text.endswith(f"\n\n{ANNA}")


def test_one_secret_of_a_name_is_revoked_by_its_label(file: Path) -> None:
    typed = "\udcc3\udcb6"  # an ö, as Python reads it in a locale without UTF-8
    old = token(file, "create", "ci", "--label", typed).out.strip()
    new = token(file, "rotate", "ci", "--label", "new").out.strip()
    assert token(file, "rotate", "ci", "--label", "ö").code == 2
    ran = token(file, "revoke", "ci", "--label", typed)
    assert (ran.code, ran.err) == (0, "")
    tokens = TokenFile(file)
    assert tokens.principal(new).name == "ci"
    with pytest.raises(errors.UnauthenticatedError):
        tokens.principal(old)
    assert token(file, "revoke", "ci", "--label", "new").code == 0
    assert TokenFile(file).secrets() == []


def test_limits_are_set_with_a_token_and_later_and_for_certificates(file: Path) -> None:
    limits = ("--tenant", "ml", "--tenant", 'a "b"', "--max-priority", "10")
    secret = token(file, "create", "ci", "--role", "operator", *limits).out.strip()
    file.write_text(
        f"# ours\n{file.read_text()}\n[tokens.x]  # Ann's\nrole = 'viewer'\nsha256 = '{DIGEST}'\n"
    )
    assert TokenFile(file).principal(secret).limits == Limits(("ml", 'a "b"'), 10)
    assert token(file, "limit", "ci", "--tenant", "vision").code == 0
    assert TokenFile(file).principal(secret).limits == Limits(("vision",), 0)
    for tenants in (("batch",), ("batch", "ml"), ()):
        options = [word for one in tenants for word in ("--tenant", one)]
        assert token(file, "limit", "gpu-07", "--certificate", *options).code == 0
        assert TokenFile(file).limits_of_certificate("gpu-07") == Limits(tenants)
    assert token(file, "limit", "x", "--max-priority", "-5").code == 0
    assert token(file, "limit", "ci").code == 0
    assert TokenFile(file).principal(secret).limits == Limits()
    assert "# Ann's" in file.read_text()
    listed = {one["name"]: one for one in listed_tokens(file)}
    assert (listed["x"]["tenants"], listed["x"]["maxPriority"]) == (["x"], -5)


@pytest.mark.parametrize(
    ("arguments", "before", "code", "said"),
    [
        (("create", "a"), VIEWER, 4, "token a already exists"),
        (("create", "Not A Name"), "", 2, "is not a valid name"),
        (("create", "a", "--role", "root"), "", 2, "root"),
        (("revoke", "a"), "", 3, "token a not found"),
        (("revoke", "a", "--label", "x"), VIEWER, 3, "no secret"),
        (("rotate", "a"), "", 3, "token a not found"),
        (("rotate", "a"), f"[tokens.a]\nsha256='{DIGEST}'\nprevious = 1\n", 2, "`previous`"),
        (("create", "a", "--label", ""), "", 2, "--label"),
        (("list",), "tokens = 1", 2, "[tokens.NAME]"),
        (("list",), "[[", 2, "not TOML"),
        (("limit", "a"), "", 3, "token a not found"),
        (("limit", "a", "--tenant", " "), VIEWER, 2, "--tenant"),
    ],
)
def test_what_cannot_be_is_said_and_the_file_stays(
    file: Path, arguments: tuple[str, ...], before: str, code: int, said: str
) -> None:
    file.write_text(before)
    ran = token(file, *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert file.read_text() == before


def test_a_name_without_a_token_may_be_a_login_or_a_typing_mistake(file: Path) -> None:
    file.write_text(f"[logins]\n[tokens.a]\nrole='viewer'\nsha256='{DIGEST}'\n")
    revoked = token(file, "revoke", "alcie")
    assert (revoked.code, "has no token alcie" in revoked.err) == (0, True), revoked.err
    assert "get reservations -l owner=alcie" in revoked.err, "a lease token outlives a login"
    assert "no token" not in token(file, "revoke", "a").err


def certs(*arguments: str) -> Ran:
    return run_cli("certs", *arguments)


async def call(served: Served, tls: ClientTls) -> None:
    async with open_channel(served.address, tls=tls) as channel:
        with rpc_errors():
            await Served(served.server, served.address, channel).release()


async def test_certificates_serve_and_name_callers(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    at = ("--dir", str(folder), "--host", "127.0.0.1")
    assert certs("init", *at, "--host", "gateway.example").code == 0
    issued = certs("issue", "alice", *at[:2], "--role", "operator", "-o", "json")
    assert json.loads(issued.out)["certificates"][0]["name"] == "alice"
    keys = [path for path in folder.iterdir() if path.suffix == ".key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    seen = []

    async def work(request: object, context: object) -> object:
        seen.append(current_principal())
        return Allocator.answer()

    server = ServerTls(folder / "server.crt", folder / "server.key", folder / "ca.crt")
    options, authenticator = ServerOptions(tls=server), Authenticator(accept_certificates=True)
    client = ClientTls(folder / "ca.crt", folder / "alice.crt", folder / "alice.key")
    async with serve(Allocator(work), options=options, authenticator=authenticator) as served:
        await call(served, client)
        before = read_pair(folder, "server").certificate.serial_number
        assert certs("init", *at).code == 0
        assert read_pair(folder, "server").certificate.serial_number != before
        await call(served, client)
    assert [(one.name, one.role) for one in seen] == [("alice", Role.OPERATOR)] * 2


async def test_a_certificate_for_a_host_serves_there(tmp_path: Path) -> None:
    certs("init", "--dir", str(tmp_path), "--host", "gateway.example")
    certs("issue", "metrics-07", "--dir", str(tmp_path), "--host", "127.0.0.1")
    options = ServerOptions(tls=ServerTls(tmp_path / "metrics-07.crt", tmp_path / "metrics-07.key"))
    async with serve(Allocator(), options=options) as served:
        await call(served, ClientTls(tmp_path / "ca.crt"))


def test_what_serves_on_a_host_calls_only_where_that_is_asked_for(tmp_path: Path) -> None:
    """Who takes a GPU host's disk is else a viewer of the whole fleet, also once the host is forgotten and revoked."""
    at = ("--dir", str(tmp_path))
    certs("init", *at, "--host", "gateway.example")
    made: dict[str, tuple[str, set[ObjectIdentifier]]] = {}
    for name, role in (("metrics-07", ()), ("both", ("--role", "agent"))):
        assert certs("issue", name, *at, *role, "--host", "gpu-host-07", "--host", "fd00::7").code == 0
        certificate = read_pair(tmp_path, name).certificate
        purposes = set(certificate.extensions.get_extension_for_class(ExtendedKeyUsage).value)
        made[name] = subject_of(certificate).uri, purposes
        assert subject_of(certificate).hosts == ("gpu-host-07", "fd00::7")
    serves, calls = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    agent = "spiffe://gpuscale.local/gpuscale/agent/both"
    assert made == {"metrics-07": ("", {serves}), "both": (agent, {serves, calls})}
    assert certs("renew", *at).code == 0
    assert subject_of(read_pair(tmp_path, "metrics-07").certificate).uri == ""


@pytest.mark.parametrize("host", ["", "*", "*.example", "https://h", "h:9400", "Gateway.example", "0:0::1"])
def test_no_certificate_is_issued_for_the_gateways_name_or_for_what_is_no_host(
    tmp_path: Path, host: str
) -> None:
    certs("init", "--dir", str(tmp_path), "--host", "gateway.example", "--host", "::1")
    ran = certs("issue", "metrics-07", "--dir", str(tmp_path), "--host", host)
    assert (ran.code, "--host" in ran.err, (tmp_path / "metrics-07.crt").exists()) == (2, True, False), (
        ran.err
    )


def test_a_certificate_that_is_renewed_keeps_the_names_that_it_is_for(tmp_path: Path) -> None:
    """Another one would lock out whoever calls the server by a name that was forgotten."""
    first = certs("init", "--dir", str(tmp_path))
    assert "reach the server at: localhost, 127.0.0.1" in first.err
    assert certs("init", "--dir", str(tmp_path), "--host", "gateway.example", "--host", "10.0.0.7").code == 0
    renewed = certs("init", "--dir", str(tmp_path))
    assert "reach the server at: gateway.example, 10.0.0.7" in renewed.err
    assert subject_of(read_pair(tmp_path, "server").certificate).hosts == ("gateway.example", "10.0.0.7")


def test_an_authority_is_needed_to_issue(tmp_path: Path) -> None:
    assert certs("list", "--dir", str(tmp_path)).err == f"no certificates in {tmp_path}\n"
    ran = certs("issue", "alice", "--dir", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert "ca.crt" in ran.err
    assert certs("issue", "ca", "--dir", str(tmp_path)).code == 2


def listed(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    ran = certs("list", "--dir", str(folder), "-o", "json", *arguments)
    return {one["name"]: one for one in json.loads(ran.out)["certificates"]}


def test_certificates_are_listed_renewed_and_revoked(tmp_path: Path) -> None:
    folder, revoked = tmp_path / "pki", tmp_path / "revoked.toml"
    at = ("--dir", str(folder))
    assert certs("init", *at, "--host", "gateway.example").code == 0
    for name in ("ann", "bob"):
        assert certs("issue", name, *at, "--role", "agent", "--days", "90").code == 0
    issue(read_pair(folder, "ca"), CertificateSubject("ann", uri=URI), 0.001).write(folder, "ann")
    issue(read_pair(folder, "ca"), CertificateSubject("left", uri=URI), 7).write(folder, "left")
    (folder / "left.crt").rename(folder / "host.pem")  # as `join` writes it, to renew itself
    before = listed(folder)
    states = {name: one["state"] for name, one in before.items()}
    assert states == dict.fromkeys(("bob", "ca", "host", "server"), "VALID") | {"ann": "ENDS SOON"}
    del before["host"]
    (folder / "host.pem").unlink()
    assert before["ann"]["identity"] == URI
    assert before["server"]["hosts"] == ["gateway.example"]
    keys = {name: (folder / f"{name}.key").read_bytes() for name in before}
    assert certs("renew", "ann", *at).code == 0
    assert certs("renew", "server", *at).code == 0
    after = listed(folder)
    changed = [name for name in before if after[name]["serial"] != before[name]["serial"]]
    assert changed == ["ann", "server"]
    assert [name for name in keys if (folder / f"{name}.key").read_bytes() != keys[name]] == changed
    same = ("identity", "hosts")
    assert all(before[name][key] == after[name][key] for name in before for key in same)
    assert after["ann"]["state"] == "VALID"
    file = ("--revoked-file", str(revoked))
    assert "check the name" in certs("revoke", "ann", *file).err
    revoked.write_text(f"# ours\n{revoked.read_text()}")
    assert certs("revoke", "bob", "--serial", before["bob"]["serial"].upper(), *file).code == 0
    assert revoked.read_text().startswith("# ours\n")
    assert stat.S_IMODE(revoked.stat().st_mode) == 0o644, "services read it, whoever revoked"
    states = {name: one["state"] for name, one in listed(folder, *file).items()}
    assert states == {"ann": "REVOKED", "bob": "REVOKED", "ca": "VALID", "server": "VALID"}
    assert certs("renew", *at, *file).code == 0
    assert listed(folder, *file)["ann"]["state"] == "VALID", "one that is issued later counts"
    revoked.write_text(f"[names]\nann = {datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)}\n")
    assert certs("renew", "ann", *at, *file).code == 0  # as at once after it was revoked, in the same second
    assert certs("revoke", "ann", *file).code == 0
    assert listed(folder, *file)["ann"]["state"] == "REVOKED"


def test_an_authority_is_not_given_up_while_it_is_needed(tmp_path: Path) -> None:
    at = ("--dir", str(tmp_path))
    certs("init", *at)
    assert "nothing is being rotated" in certs("rotate-ca", "--finish", *at).err
    assert "nobody.crt" in certs("renew", "nobody", *at).err
    assert "xyz" in certs("revoke", "ann", "--serial", "xyz", "--revoked-file", str(tmp_path / "r")).err
    assert "certs rotate-ca" in (refused := certs("renew", "ca", *at)).err
    assert (refused.code, refused.out) == (2, "")
    begun = certs("rotate-ca", *at)
    assert begun.code == 0
    assert f"certs renew {' '.join(at)}" in begun.err
    assert f"certs rotate-ca --finish {' '.join(at)}" in begun.err
    again, early = certs("rotate-ca", *at), certs("rotate-ca", "--finish", *at)
    assert "has two authorities already" in again.err
    assert "server.crt was issued by the old authority" in early.err
    (tmp_path / "host.pem").write_bytes((tmp_path / "server.crt").read_bytes())
    states = {one["state"] for name, one in listed(tmp_path).items() if name in {"host", "server"}}
    assert (states, (tmp_path / "ca.crt").read_text().count("BEGIN")) == ({"OLD AUTHORITY"}, 2)
    assert certs("renew", *at).code == 0
    assert listed(tmp_path)["server"]["state"] == "VALID"
    ended = certs("rotate-ca", "--finish", *at)
    assert (ended.code, "give ca.crt to servers and callers once more" in ended.err) == (0, True)
    assert (tmp_path / "ca.crt").read_text().count("BEGIN") == 1
