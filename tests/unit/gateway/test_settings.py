"""Settings of the gateway."""

from pathlib import Path

import pytest

from gpuscale.common.config.sources import load_table
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.gateway.settings import GatewaySettings


def test_defaults_are_the_ports_of_one_machine() -> None:
    settings = load_table(GatewaySettings, {}, environ={})
    assert (settings.listen, settings.allocator_address) == ("127.0.0.1:7070", "127.0.0.1:7073")


def test_the_gateway_has_no_token_of_its_own() -> None:
    with pytest.raises(InvalidArgumentError, match="it passes on its callers'"):
        load_table(GatewaySettings, {}, {"token_file": Path("t")}, environ={})
