"""Which server is meant, and with which token: arguments before environment before contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuscale.client import ClientTls, FailedPreconditionError, InvalidArgumentError, connect
from gpuscale.client.connection import Context, Contexts, _target, find_context, read_contexts

FILE = """\
current_context = "lab"

[contexts.lab]
address = "127.0.0.1:1"
token_file = "{folder}/lab.token"

[contexts.far]
address = "gateway.example:7070"
ca_file = "~/far-ca.pem"
cert_file = "{folder}/me.crt"
key_file = "{folder}/me.key"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two contexts and the token of the first."""
    for name in ("ADDRESS", "TOKEN_FILE", "CA_FILE", "CERT_FILE", "KEY_FILE", "CONTEXT", "CONTEXTS"):
        monkeypatch.delenv(f"GPUSCALE_{name}", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config" / "gpuscale").mkdir(parents=True)
    (tmp_path / ".config" / "gpuscale" / "contexts.toml").write_text(FILE.format(folder=tmp_path))
    (tmp_path / "lab.token").write_text("lab-token\n")
    return tmp_path


def way(
    address: str | None = None, context: str | None = None, token: str | None = None
) -> tuple[str, str | None, ClientTls | None]:
    found = _target(address, context, token, None)
    return found.address, found.token.get_secret_value() if found.token else None, found.tls


def test_the_current_context_counts_where_nothing_is_said() -> None:
    assert way() == ("127.0.0.1:1", "lab-token", None)


def test_a_context_is_chosen_by_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ClientTls(home / "far-ca.pem", home / "me.crt", home / "me.key")
    assert way(context="far") == ("gateway.example:7070", None, tls)
    monkeypatch.setenv("GPUSCALE_CONTEXT", "far")
    assert way() == ("gateway.example:7070", None, tls)


def test_the_token_of_a_context_is_not_for_any_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert way("127.0.0.1:9") == ("127.0.0.1:9", None, None)
    monkeypatch.setenv("GPUSCALE_ADDRESS", "127.0.0.1:8")
    assert way() == ("127.0.0.1:8", None, None)
    assert way(context="lab") == ("127.0.0.1:8", "lab-token", None)


def test_the_environment_and_arguments_come_before_contexts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "other.token").write_text("other-token")
    monkeypatch.setenv("GPUSCALE_TOKEN_FILE", str(home / "other.token"))
    monkeypatch.setenv("GPUSCALE_CA_FILE", str(home / "ca.pem"))
    assert way() == ("127.0.0.1:1", "other-token", ClientTls(home / "ca.pem"))
    assert way(token="given")[1] == "given"
    assert way(token="")[1] is None, "a server that is not trusted yet gets none"


def test_without_a_file_there_are_no_contexts(home: Path) -> None:
    (home / ".config" / "gpuscale" / "contexts.toml").unlink()
    assert way() == ("127.0.0.1:7070", None, None)
    assert read_contexts(home / "nothing") == Contexts("", {})
    assert find_context() == Context()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[", "contexts.toml"),
        ("other = 1", "unknown key other"),
        ("[contexts.a]\nadress = 'x'", "unknown key contexts.a.adress"),
        ("[contexts.a]\naddress = 1", "must be a string"),
        ("contexts = 1", "contexts must be tables"),
        ("[contexts]\na = 1", "must be a table"),
        ("current_context = 'b'\n[contexts.a]", "no context b; choose from a"),
    ],
)
def test_what_is_wrong_is_said(home: Path, text: str, said: str) -> None:
    (home / ".config" / "gpuscale" / "contexts.toml").write_text(text)
    with pytest.raises(FailedPreconditionError, match=said) as caught:
        connect()
    assert caught.value.reason == "CONTEXTS"


def test_a_home_that_there_is_not_is_said(home: Path) -> None:
    file = home / ".config" / "gpuscale" / "contexts.toml"
    file.write_text('[contexts.lab]\ntoken_file = "~nobody-of-that-name/token"\n')
    with pytest.raises(FailedPreconditionError, match=r"contexts\.lab: this home directory does not exist"):
        read_contexts(file)


@pytest.mark.parametrize("token", ["two lines\nof it", "t\u00f6ken", "tab\there", "nul\0"])
def test_what_is_no_token_is_said_and_not_shown(token: str) -> None:
    """gRPC would fail each call, in words that do not say why; and the dashboard takes whatever a visitor types."""
    with pytest.raises(InvalidArgumentError, match="a token holds no blanks") as caught:
        connect("127.0.0.1:1", token=token)
    assert token not in str(caught.value)
    assert token not in str(caught.value.violations)


def test_an_empty_token_file_is_said(home: Path) -> None:
    (home / "lab.token").write_text("\n")
    with pytest.raises(FailedPreconditionError, match=r"lab\.token is empty"):
        connect()
