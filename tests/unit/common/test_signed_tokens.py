"""Callers whom signed tokens name: what is refused, whom groups make of a caller, and keys that come and go."""

import asyncio
import base64
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from joserfc.jwk import ECKey, RSAKey

from gpuscale.common import errors
from gpuscale.common.security import signed_tokens
from gpuscale.common.security.auth import KeysNeededError, Limits, Principal, Role, TokenFile
from gpuscale.common.security.certificate_authority import Signer, make_authority
from tests.support.oidc import CLIENT, OidcProvider, oidc_provider


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with oidc_provider() as found:
        yield found


GROUPS = '[oidc.groups.ml]\nrole = "operator"\ntenants = ["ml"]\nmax_priority = 3\n[oidc.groups.ops]\nrole = "admin"\n'


def tokens_file(folder: Path, provider: OidcProvider, more: str = "", after: str = "") -> Path:
    file = folder / "tokens.toml"
    text = f'[tokens]\n[oidc]\nissuer = "{provider.issuer}"\nclient_id = "{CLIENT}"\n{more}\n{GROUPS}{after}'
    file.write_text(text)
    return file


async def who(tokens: TokenFile, token: str) -> Principal | str:
    """The caller, as a guarded call finds it, or the reason for which it is refused."""
    try:
        try:
            return tokens.principal(token)
        except KeysNeededError as needed:
            await needed.fetch()
            return tokens.principal(token)
    except errors.GpuscaleError as error:
        return error.reason


async def test_groups_say_what_a_caller_may_do(tmp_path: Path, provider: OidcProvider) -> None:
    tokens = TokenFile(tokens_file(tmp_path, provider))
    assert await who(tokens, provider.token()) == Principal(
        "oidc:u1", Role.OPERATOR, "token", Limits(("ml",), 3)
    )
    both = await who(tokens, provider.token(groups=["ops", "ml", "others"]))
    assert both == Principal("oidc:u1", Role.ADMIN, "token", Limits(("ml",), 3))
    for groups in (["others"], None, "ml", [7]):
        assert await who(tokens, provider.token(groups=groups)) == "NO_GROUP", groups
    provider.rotate(ECKey)
    tokens = TokenFile(tokens_file(tmp_path, provider, 'name_claim = "email"\nprefix = "people/"'))
    named = {"algorithm": "ES256", "email": "eve@example.org"}
    found = await who(tokens, provider.token(**named, email_verified=True))
    assert found.name == "people/eve@example.org"
    for verified in (False, "true", None):
        assert await who(tokens, provider.token(**named, email_verified=verified)) == "TOKEN_INVALID"


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def forged(provider: OidcProvider, algorithm: str, secret: bytes = b"") -> str:
    """A token without a signature, or with a MAC."""
    header = encoded(json.dumps({"alg": algorithm, "kid": provider.keys[0].kid}).encode())
    signed = f"{header}.{provider.token().split('.')[1]}"
    return f"{signed}.{encoded(hmac.digest(secret, signed.encode(), 'sha256')) if secret else ''}"


def wrong_tokens(provider: OidcProvider) -> dict[str, str]:
    now, own = int(time.time()), provider.keys[0]
    head, body, signature = provider.token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    admin = encoded(json.dumps({**claims, "groups": ["ops"]}).encode())
    # The public key is known to all: who makes a MAC with it must not get in.
    pem = RSAKey.import_key(own.as_dict(private=False)).public_key.public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    return {
        "no signature": forged(provider, "none"),
        "no signature, by another spelling": forged(provider, "None"),
        "a MAC by the public key": forged(provider, "HS256", pem),
        "an algorithm that is not taken": provider.token(algorithm="RS512"),
        "an EC algorithm with the id of an RSA key": provider.token(
            algorithm="ES256", key=ECKey.generate_key("P-256")
        ),
        "the key of somebody else": provider.token(key=RSAKey.generate_key(2048)),
        "other claims": f"{head}.{admin}.{signature}",
        "another issuer": provider.token(iss="https://id.example"),
        "no issuer": provider.token(iss=None),
        "another audience": provider.token(aud="other"),
        "no audience": provider.token(aud=None),
        "no end": provider.token(exp=None),
        "an end that is no number": provider.token(exp="never"),
        "an end that is true": provider.token(exp=True),
        "not valid yet": provider.token(nbf=now + 3600),
        "made in the future": provider.token(iat=now + 3600),
        "nobody": provider.token(sub=None),
        "a name that cannot be shown": provider.token(sub="a\nb"),
        "not a token": "eyJ",
        "not a header": "eyJ.e30.e30",
    }


async def test_what_is_wrong_is_refused(tmp_path: Path, provider: OidcProvider) -> None:
    tokens = TokenFile(tokens_file(tmp_path, provider))
    assert isinstance(await who(tokens, provider.token(aud=["other", CLIENT])), Principal)
    for what, token in wrong_tokens(provider).items():
        assert await who(tokens, token) == "TOKEN_INVALID", what
    assert await who(tokens, provider.token(exp=int(time.time()) - 1)) == "TOKEN_EXPIRED"
    assert provider.asked.count("/keys") == 1


async def test_keys_come_and_go(
    tmp_path: Path, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenFile(tokens_file(tmp_path, provider))
    old = provider.token()
    found = await asyncio.gather(*(who(tokens, old) for _ in range(20)))
    assert {isinstance(one, Principal) for one in found} == {True}
    assert provider.asked.count("/keys") == 1
    provider.rotate()
    assert await who(tokens, provider.token()) == "TOKEN_INVALID"  # whoever makes keys up makes nobody ask
    assert provider.asked.count("/keys") == 1
    monkeypatch.setattr(signed_tokens, "FETCH_PAUSE", 0.0)
    assert isinstance(await who(tokens, provider.token()), Principal)
    assert await who(tokens, old) == "TOKEN_INVALID"
    provider.rotate()
    provider.answers = False
    monkeypatch.setattr(signed_tokens, "FETCH_PAUSE", 60.0)
    assert await who(TokenFile(tokens_file(tmp_path, provider)), provider.token()) == "OIDC_PROVIDER"


async def test_old_keys_count_while_new_ones_are_fetched(
    tmp_path: Path, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, token = TokenFile(tokens_file(tmp_path, provider)), provider.token()
    await who(tokens, token)
    monkeypatch.setattr(signed_tokens, "KEYS_AGE", 0.0)
    monkeypatch.setattr(signed_tokens, "FETCH_PAUSE", 0.0)
    provider.answers = False
    assert isinstance(tokens.principal(token), Principal)
    provider.answers = True
    provider.rotate()
    async with asyncio.timeout(30):
        while isinstance(await who(tokens, token), Principal):
            await asyncio.sleep(0.02)


async def test_revoked_and_forgotten(
    tmp_path: Path, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_tokens, "MOST_KEPT", 3)
    token = provider.token()
    moment = time.gmtime(time.time() + 5)  # the clock of gmtime() alone lags: at times by a second
    revoked = f'[revoked]\n"oidc:u1" = {time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)}\n'
    tokens = TokenFile(tokens_file(tmp_path, provider, after=revoked))
    assert await who(tokens, token) == "TOKEN_REVOKED"
    assert isinstance(await who(tokens, provider.token(iat=int(time.time()) + 30)), Principal)
    for nth in range(9):
        assert isinstance(await who(tokens, provider.token(sub=f"u{nth + 2}")), Principal)
    kept: Any = tokens._signed
    assert len(kept._kept) == 3


def test_a_login_ends_with_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
        make_authority(folder).write(tmp_path / folder, "ca")
    (file := tmp_path / "tokens.toml").write_text('[tokens]\n[logins]\nca_file = "own/ca.crt"\n')
    tokens = TokenFile(file)
    sign = {name: Signer(tmp_path / name, 1, "test").sign_token for name in ("own", "other")}
    limits = Limits(("ml",), 5)
    token, _ = sign["own"]("alice", Role.OPERATOR, limits, 60)
    assert tokens.principal(token) == Principal("alice", Role.OPERATOR, "token", limits)
    for signer, life in (("other", 60), ("own", 0)):
        with pytest.raises(errors.UnauthenticatedError):
            tokens.principal(sign[signer]("alice", Role.ADMIN, limits, life)[0])
    (tmp_path / "own/ca.crt").write_bytes((tmp_path / "other/ca.crt").read_bytes())
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    with pytest.raises(errors.UnauthenticatedError, match="another authority signed it"):
        tokens.principal(token)


@pytest.mark.parametrize("wrong", ["http://id.example", "https:", "file:///etc/passwd"])
def test_a_provider_without_tls_is_refused(tmp_path: Path, provider: OidcProvider, wrong: str) -> None:
    file = tokens_file(tmp_path, provider)
    file.write_text(file.read_text().replace(provider.issuer, wrong))
    with pytest.raises(errors.FailedPreconditionError, match=r"oidc\.issuer"):
        TokenFile(file)
