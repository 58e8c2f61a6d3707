"""People who log in: by a code, and by a provider, on the real fleet, gateway and CLI."""

import asyncio
import json
import re
import sys
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.client import FailedPreconditionError, UnavailableError, connect, connect_async, kept_login
from gpuscale.common.rpc.channel import ClientTls
from gpuscale.common.security import auth
from gpuscale.common.security.certificate_authority import digest_of, read_pair
from gpuscale.monitor.fleet import join_servicer
from tests.support.cli import Ran
from tests.support.first_host import Site, first_host
from tests.support.oidc import CLIENT, OidcProvider, oidc_provider
from tests.support.ports import silent_port
from tests.support.waiting import eventually


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Site]:
    monkeypatch.setattr(auth, "CHECK_PERIOD", 0.0)
    async with first_host(tmp_path / "host") as made:
        yield made


class Person:
    """Somebody at a terminal of their own."""

    def __init__(self, site: Site, home: Path) -> None:
        self._site = site
        self.files = home / ".config" / "gpuscale"
        self.address = site.gateway
        self.hash = ("--ca-hash", digest_of(read_pair(site.pki, "ca").certificate))

    async def types(self, *words: str, stdin: str = "") -> Ran:
        return await self._site.ctl(
            *words, stdin=stdin, variables={"GPUSCALE_CONTEXTS": str(self.files / "contexts.toml")}
        )

    def mode(self, name: str) -> str:
        return oct((self.files / name).stat().st_mode & 0o777)


@pytest.fixture
def person(site: Site, tmp_path: Path) -> Person:
    return Person(site, tmp_path)


async def test_a_code_lets_one_person_in_once(
    site: Site, person: Person, caplog: pytest.LogCaptureFixture
) -> None:
    made = await site.as_admin(
        "login-code", "create", "alice", "--role", "operator", "--tenant", "ml", "-o", "json"
    )
    [told] = json.loads(made.out)["codes"]
    code = told["code"]
    typed = told["type"].split()[1:]
    assert typed == ["login", person.address, *person.hash]
    with silent_port() as port:  # one that is away does not keep a person from the others
        stranger = ["login", f"127.0.0.1:{port},{person.address}", "--ca-hash", f"sha256:{'0' * 64}"]
        assert "does not match --ca-hash" in (await person.types(*stranger, stdin=code)).err
    assert not person.files.exists()
    came = await person.types(*typed, stdin=f"{code}\n")
    assert (came.code, "logged in as alice (operator)" in came.out) == (0, True), came.err
    assert (person.mode("127.0.0.1.token"), person.mode("contexts.toml")) == ("0o600", "0o600")
    assert (await person.types("get", "nodes")).code == 0
    assert "role admin" in (await person.types("join-token", "list")).err
    assert "used or expired" in (await person.types(*typed, "--as", "other", stdin=code)).err
    token = (person.files / "127.0.0.1.token").read_text().strip()
    noted = (site.pki.parent / "audit.jsonl").read_text()
    for secret in (code.partition(".")[2], token):
        assert secret not in came.out + came.err + caplog.text + noted
    for taken in ("services", "admin", "local"):
        assert "is the name of" in (await site.as_admin("login-code", "create", taken)).err
    revoked = await site.ctl(
        "token", "revoke", "alice", "--tokens-file", str(site.pki.parent / "tokens.toml")
    )
    assert revoked.code == 0, revoked.err
    await eventually(lambda: person.types("get", "nodes"), lambda found: "was revoked" in found.err)
    assert (await person.types("logout")).code == 0
    assert [one.name for one in person.files.iterdir()] == ["contexts.toml"]


async def test_a_code_ends_and_a_repeated_call_makes_no_other(
    site: Site, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = api.CreateLoginCodeRequest(name="alice", request_id=str(uuid.uuid4()))
    tls, token = ClientTls(site.pki / "ca.crt"), site.admin.read_text().strip()
    async with connect_async(site.gateway, tls=tls, token=token) as client:
        first, again = [await client.logins.CreateLoginCode(request) for _ in range(2)]
    assert first == again
    soon = {"ttl": 0.001}
    monkeypatch.setattr(join_servicer, "optional_seconds", lambda _, field: soon.get(field))
    [told] = json.loads((await site.as_admin("login-code", "create", "alice", "-o", "json")).out)["codes"]
    late = await person.types(*told["type"].split()[1:], stdin=told["code"])
    assert (late.code, "used or expired" in late.err) == (8, True), late.err


async def test_a_provider_lets_people_in_and_the_login_is_kept_fresh(
    site: Site, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.pki.parent / "tokens.toml"
    typed = ("login", person.address, *person.hash, "--oidc")
    with oidc_provider() as provider:
        assert "no OIDC provider" in (await person.types(*typed)).err
        table = f'[oidc]\nissuer = "{provider.issuer}"\nclient_id = "{CLIENT}"\n[oidc.groups.ml]\nrole = "operator"\n'
        file.write_text(f"{file.read_text()}\n{table}")
        await _agree(person, provider, typed)
        assert {person.mode(f"127.0.0.1.{kind}") for kind in ("token", "login")} == {"0o600"}
        token = person.files / "127.0.0.1.token"
        first = token.read_text()
        assert (await person.types("get", "nodes")).code == 0
        assert token.read_text() == first
        monkeypatch.setattr(kept_login, "FRESH", provider.lives + 1)
        assert (await person.types("get", "nodes")).code == 0
        assert token.read_text() != first
        assert provider.forms[-1].get("client_id", CLIENT) == CLIENT
        await _programs_keep_it_too(site, token, provider, monkeypatch)
        provider.refresh = "withdrawn"
        assert "the login is over" in (await person.types("get", "nodes")).err
        assert (await person.types("logout")).code == 0
        assert provider.asked[-1] == "/revoke"
        assert [one.name for one in person.files.iterdir()] == ["contexts.toml"]


async def _programs_keep_it_too(
    site: Site, token: Path, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once: the refresh token is good once. The loop goes on meanwhile, or the provider would answer nobody."""
    request, tls = api.ListNodesRequest(), ClientTls(site.pki / "ca.crt")

    def without_a_loop() -> None:
        with connect(site.gateway, tls=tls, token=token) as client:
            client.fleet.ListNodes(request)

    before, provider.lives = provider.asked.count("/token"), 2 * provider.lives
    provider.gate.clear()
    async with (
        connect_async(site.gateway, tls=tls, token=token) as first,
        connect_async(site.gateway, tls=tls, token=token) as second,
    ):
        calls = [asyncio.ensure_future(one.fleet.ListNodes(request)) for one in (first, second) * 3]
        calls += [asyncio.ensure_future(asyncio.to_thread(without_a_loop)) for _ in range(2)]
        await eventually(lambda: provider.asked.count("/token") > before)
        provider.gate.set()
        await asyncio.gather(*calls)
        assert provider.asked.count("/token") == before + 1
        monkeypatch.setattr(kept_login, "FRESH", provider.lives + 1)
        await first.fleet.ListNodes(request)
        assert provider.asked.count("/token") == before + 2
        provider.answers = False
        await second.fleet.ListNodes(request)  # by the token that has not ended
    token.write_text(provider.token(exp=1))
    with pytest.raises(UnavailableError, match="503"):
        await asyncio.to_thread(without_a_loop)
    async with connect_async(site.gateway, tls=tls, token=token) as client:
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "gpuscale.common.security.signed_tokens", None)
            with pytest.raises(FailedPreconditionError) as missing:
                await client.fleet.ListNodes(request)
        provider.answers = True
        assert (missing.value.reason, "pip install 'gpuscale[oidc]'" in missing.value.message) == (
            "OIDC_NOT_INSTALLED",
            True,
        )
        with pytest.raises(FailedPreconditionError):  # it is not tried with every call
            await client.fleet.ListNodes(request)


async def _agree(person: Person, provider: OidcProvider, typed: tuple[str, ...]) -> None:
    login = asyncio.create_task(person.types(*typed))
    await eventually(lambda: login.done() or provider.asked.count("/token") > 1)
    provider.agreed = True
    found = await login
    assert re.search(r"open http\S+/activate in a browser, and enter WDJB-MJHT", found.err), found
    assert ", refreshed automatically" in found.out, found


async def test_a_login_that_is_refused_or_of_another_leaves_nothing(site: Site, person: Person) -> None:
    file = site.pki.parent / "tokens.toml"
    with oidc_provider() as provider:
        table = f'[oidc]\nissuer = "{provider.issuer}"\nclient_id = "{CLIENT}"\n[oidc.groups.ml]\nrole = "operator"\n'
        file.write_text(f"{file.read_text()}\n{table}")
        typed = ("login", person.address, *person.hash, "--oidc")
        provider.agreed = False
        assert "access_denied" in (await person.types(*typed)).err
        provider.agreed, provider.echoes = True, False
        provider.claims["nonce"] = "of another login"
        assert "belongs to another login" in (await person.types(*typed)).err
        assert not person.files.exists()
