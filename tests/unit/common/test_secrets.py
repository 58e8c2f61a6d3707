"""Nothing that shows a secret URL shows its secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from gpuscale.common.secrets import SecretStr, SecretUrl
from tests.support.cli import python

CANARY = "p%40ss%2Fwo%3Ard"
URL = f"amqp://canary-user:{CANARY}@mq.example:5672/jobs?key=canary-key"


class Broker(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True)
    url: SecretUrl


@pytest.mark.parametrize(
    "shown",
    [
        str(SecretUrl(URL)),
        repr(SecretUrl(URL)),
        f"{SecretUrl(URL)}",
        f"{[SecretUrl(URL)]}",
        str(Broker(url=SecretUrl(URL))),
        str(Broker(url=SecretUrl(URL)).model_dump()),
        Broker(url=SecretUrl(URL)).model_dump_json(),
    ],
)
def test_user_password_and_query_are_never_shown(shown: str) -> None:
    assert "amqp://mq.example:5672/jobs" in shown
    for secret in ("canary", CANARY, "p@ss", "ss/wo"):
        assert secret not in shown


def test_the_parts_are_there_for_the_one_who_connects() -> None:
    url = SecretUrl(URL)
    assert url.reveal() == URL
    assert (url.scheme, url.host, url.port, url.path) == ("amqp", "mq.example", 5672, "/jobs")
    assert url.username.get_secret_value() == "canary-user"
    assert url.password.get_secret_value() == "p@ss/wo:rd"
    assert isinstance(url.password, SecretStr)


def test_a_url_without_user_or_port() -> None:
    url = SecretUrl("http://[::1]/api")
    assert (str(url), url.port, url.password.get_secret_value()) == ("http://[::1]/api", None, "")


@pytest.mark.parametrize("text", ["postgresql://canary:canary@/db?host=/canary", "postgres:///db"])
def test_postgresql_may_be_at_a_socket(text: str) -> None:
    """As its own documentation writes it."""
    url = SecretUrl(text)
    assert (url.reveal(), str(url)) == (text, f"{url.scheme}:///db")


def test_secret_urls_compare_by_content() -> None:
    assert SecretUrl(URL) == SecretUrl(URL)
    assert len({SecretUrl(URL), SecretUrl(URL), SecretUrl("amqp://mq.example:5672/jobs")}) == 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "canary", "//canary@host", "amqp://", "amqp:///canary?host=/canary", "amqp://canary:secret@"),
        *("postgresql:canary", "postgresql://:canary/secret@/db?host=/run", "amqp://user:canary@host:0/"),
        *("amqp://user:canary@host:99999/", "amqp://user:canary@host:port/", "amqp://user:p@ss/canary@host/"),
        *("amqp://user:can#ary@host/", "amqp://user:can?ary@host/", "amqp://user:canary@[host/"),
        *("amqp://user:canary@ho st/", "amqp://user:canary@host/\n"),
    ],
)
def test_what_is_not_a_url_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        SecretUrl(text)
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ValidationError) as refused:
        Broker.model_validate({"url": text})
    assert "canary" not in str(refused.value)


def test_only_text_is_taken_from_a_file() -> None:
    with pytest.raises(ValidationError):
        Broker.model_validate({"url": 5})
    assert Broker.model_validate({"url": URL}).url.reveal() == URL


NOBODY = 65534
TAKEN = """
import subprocess, sys
from gpuscale.common.secrets import environment, take_variables
take_variables(["SECRET_URL", "ANOTHER", "NOT_SET"])
assert environment()["SECRET_URL"] == "amqp://canary@mq/" and environment()["PLAIN"] == "plain"
child = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
print(child, flush=True)
sys.stdin.read()
"""
HIDDEN = """
import sys
from gpuscale.common.secrets import hide_memory
if sys.argv[1] == "hidden":
    hide_memory()
print("up", flush=True)
sys.stdin.read()
"""


def test_what_is_taken_out_of_the_environment_is_in_no_process_that_others_may_look_at() -> None:
    variables = {"SECRET_URL": "amqp://canary@mq/", "ANOTHER": "canary-2", "PLAIN": "plain"}
    with subprocess.Popen(
        [sys.executable, "-c", TAKEN], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        inherited = process.stdout.readline() + process.stdout.readline()
        shown = Path(f"/proc/{process.pid}/environ").read_bytes()
        process.communicate()
    assert process.returncode == 0
    assert b"PLAIN=plain" in shown
    assert b"PLAIN=plain" in inherited
    assert b"canary" not in shown + inherited


@pytest.mark.parametrize("how", ["open", "hidden"])
def test_memory_that_is_hidden_cannot_be_read_by_the_same_user(how: str) -> None:
    """As root the test becomes nobody, for root may read all; `open` shows that it would be read."""
    become = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "--"] if os.geteuid() == 0 else []
    with subprocess.Popen(
        [*become, sys.executable, "-c", HIDDEN, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        read = [*become, "cat", f"/proc/{process.pid}/environ"]
        done = subprocess.run(read, capture_output=True, text=True, check=False)
        process.communicate()
    assert (done.returncode == 0) is (how == "open")
    assert how == "open" or "Permission denied" in done.stderr


SERVING = """
import ctypes, importlib, os, sys
from gpuscale.common.runtime import lifecycle
def serve(*_, **__):
    left = sorted(name for name, value in os.environ.items() if "canary" in value)
    print(left, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
lifecycle.run = serve
importlib.import_module(sys.argv[1]).main(sys.argv[2:])
"""


@pytest.mark.parametrize("program", ["gpuscale.autoscaler.adapters.main", "gpuscale.up.main"])
def test_what_starts_programs_of_others_has_no_secret_in_its_environment_and_its_memory_hidden(
    program: str, tmp_path: Path
) -> None:
    """The environment is cleared by what begins every service; `up` alone begins by itself."""
    config = tmp_path / "gpuscale.toml"
    config.write_text('[templates.t]\ncommand = ["/bin/true"]\npass_env = ["OF_WORKERS"]\n')
    config.chmod(0o600)
    variables = {"GPUSCALE_BROKER_C_AMQP_URL": "amqp://u:canary@mq/", "OF_WORKERS": "canary"}
    flags = (f"--config={config}", f"--data-dir={tmp_path / 'data'}")
    done = python(SERVING, program, *flags, environment={**os.environ, **variables})
    assert (done.out, done.err) == ("[] 0\n", "")
