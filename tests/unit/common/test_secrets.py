"""Nothing that shows a secret URL shows its secrets."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from gpuscale.common.secrets import SecretStr, SecretUrl

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


def test_secret_urls_compare_by_content() -> None:
    assert SecretUrl(URL) == SecretUrl(URL)
    assert len({SecretUrl(URL), SecretUrl(URL), SecretUrl("amqp://mq.example:5672/jobs")}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "canary",
        "//canary@host",
        "amqp://",
        "amqp://canary:secret@",
        "amqp://user:canary@host:0/",
        "amqp://user:canary@host:99999/",
        "amqp://user:canary@host:port/",
        "amqp://user:p@ss/canary@host/",
        "amqp://user:can#ary@host/",
        "amqp://user:can?ary@host/",
        "amqp://user:canary@[host/",
        "amqp://user:canary@ho st/",
        "amqp://user:canary@host/\n",
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
