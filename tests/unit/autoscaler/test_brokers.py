"""Where brokers are is told by the file and the environment, checked at the start, and never shown."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from gpuscale.autoscaler.domain.signals import QueueFailure, QueueState
from gpuscale.autoscaler.signals.brokers import BrokerSettings, RetryGate, VirtualHostError, resolve
from gpuscale.common.errors import InvalidArgumentError

URL = "amqp://user:p%40ss%2Fcanary@host:5672/"


def test_a_broker_of_the_file() -> None:
    settings = BrokerSettings.model_validate(
        {"amqp_url": URL, "management_url": "http://user:word@host:15672/base"}
    )
    broker = resolve({"default": settings}, {})["default"]
    assert (broker.name, broker.amqp.host, broker.amqp.port) == ("default", "host", 5672)
    assert broker.amqp.password.get_secret_value() == "p@ss/canary"
    assert broker.management.path == "/base"
    assert broker.tls is None
    assert "canary" not in repr(broker) + repr(settings) + settings.model_dump_json()


def test_the_environment_defines_and_overrides_brokers() -> None:
    environment = {
        "GPUSCALE_BROKER_DEFAULT_AMQP_URL": URL,
        "GPUSCALE_BROKER_SECOND_ONE_AMQP_URL": "amqps://user:word@second",
        "GPUSCALE_BROKER_SECOND_ONE_MANAGEMENT_URL": "https://user:word@second",
        "GPUSCALE_AUTOSCALER_LISTEN": "127.0.0.1:0",
    }
    brokers = resolve(
        {"default": BrokerSettings.model_validate({"amqp_url": "amqp://old:word@host"})}, environment
    )
    assert sorted(brokers) == ["default", "second_one"]
    assert brokers["default"].amqp.reveal() == URL
    assert brokers["second_one"].management is not None


def test_urls_come_from_files_that_the_file_or_the_environment_names(tmp_path: Path) -> None:
    """As Docker and Kubernetes mount secrets: neither `docker inspect` nor the environment shows them."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"{URL}\n")
    two.write_text("http://user:word@host")
    settings = BrokerSettings(amqp_url_file=one, management_url_file=two)
    broker = resolve({"default": settings}, {})["default"]
    assert (broker.amqp.reveal(), str(broker.management)) == (URL, "http://host")
    environment = {
        "GPUSCALE_BROKER_DEFAULT_AMQP_URL_FILE": str(one),
        "GPUSCALE_BROKER_DEFAULT_MANAGEMENT_URL_FILE": str(two),
    }
    for told in ({}, {"default": BrokerSettings(amqp_url_file=two, management_url_file=one)}):
        assert resolve(told, environment)["default"] == broker


@pytest.mark.parametrize(
    ("table", "environment", "says"),
    [
        ({}, {}, "broker default has neither amqp_url nor amqp_url_file"),
        ({}, {"GPUSCALE_BROKER_DEFAULT_AMQP_URL": "amqp://user:p@canary/x@host"}, "the URL in GPUSCALE_"),
        ({"amqp_url_file": "/no/such"}, {}, "cannot read its URL from /no/such: No such file or directory"),
        ({"amqp_url_file": "/dev/null"}, {}, "the URL in /dev/null must look like"),
        ({}, {"GPUSCALE_BROKER_DEFAULT_AMQP_URL_FILE": ""}, "cannot read its URL from .: Is a directory"),
        (
            {},
            {"GPUSCALE_BROKER_DEFAULT_AMQP_URL_FILE": "x", "GPUSCALE_BROKER_DEFAULT_AMQP_URL": "canary"},
            "GPUSCALE_BROKER_DEFAULT_AMQP_URL and GPUSCALE_BROKER_DEFAULT_AMQP_URL_FILE exclude each other",
        ),
        ({"amqp_url": "http://user:canary@host"}, {}, "must begin with amqp:// or amqps://"),
        ({"amqp_url": "amqp://user:canary@host/team"}, {}, "must not name a virtual host"),
        ({"amqp_url": "amqp://user:canary@host/?heartbeat=1"}, {}, "must end with its host, port and path"),
        ({"amqp_url": "amqp://host"}, {}, "must hold a user and a password"),
        (
            {"amqp_url": URL, "management_url": "amqp://user:canary@host"},
            {},
            "must begin with http:// or https://",
        ),
        (
            {"amqp_url": URL},
            {"GPUSCALE_BROKER_DEFAULT_URL": "canary"},
            "BROKER_DEFAULT_URL is not one that gpuscale knows: write GPUSCALE_BROKER_<NAME>_AMQP_URL",
        ),
        ({"amqp_url": URL}, {"GPUSCALE_BROKER_-_AMQP_URL": "canary"}, "BROKER_-_AMQP_URL is not one"),
        (
            {"amqp_url": "amqps://user:canary@host", "ca_file": "/no/such/file"},
            {},
            "cannot use the certificates in /no/such/file",
        ),
    ],
)
def test_what_is_wrong_is_named_and_no_url_is_shown(
    table: dict[str, str], environment: dict[str, str], says: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resolve({"default": BrokerSettings.model_validate(table)}, environment)
    assert says in caught.value.message
    assert caught.value.reason == "BROKER_CONFIGURATION"
    assert "canary" not in caught.value.message


@pytest.mark.parametrize(
    "table",
    [
        {"amqp_url": URL, "amqp_url_file": "x"},
        {"amqp_url": URL, "management_url": "http://a:b@h", "management_url_file": "x"},
        {"amqp_url": URL, "password": "canary"},
        {"amqp_url": "canary"},
    ],
)
def test_a_table_that_contradicts_itself_is_refused(table: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        BrokerSettings.model_validate(table)
    assert "canary" not in str(caught.value)


def test_a_way_that_failed_stays_closed_for_a_while_and_opens_again() -> None:
    gate, failure = RetryGate(), QueueFailure(QueueState.UNREACHABLE, "down")
    gate.check(0.0)
    for attempt in range(20):
        now = attempt * 100.0
        gate.failed(failure, now)
        gate.check(now + 5.0)

    def fail_often() -> None:
        for _ in range(50):  # a wait with full jitter may now and then be shorter than this
            gate.failed(failure, 0.0)
            gate.check(0.01)

    with pytest.raises(VirtualHostError) as caught:
        fail_often()
    assert caught.value.failure is failure
    gate.succeeded()
    gate.check(0.01)
