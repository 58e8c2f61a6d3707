"""Settings of `gpuscale-autoscaler`; `gpuscale.common.config.settings` says where they come from."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gpuscale.autoscaler.signals.brokers import BrokerSettings
from gpuscale.autoscaler.signals.prometheus import PrometheusSettings
from gpuscale.common.config.settings import StatefulSettings


class AutoscalerSettings(StatefulSettings):
    """Settings of the autoscaler."""

    section: ClassVar[str] = "autoscaler"

    listen: str = Field("127.0.0.1:7074", description="address to serve on, HOST:PORT")
    data_dir: Path = Field(description="directory of endpoints, replicas and decisions, for one autoscaler")
    fleet_address: str = Field("127.0.0.1:7072", description="address of the fleet, HOST:PORT")
    allocator_address: str = Field(
        "127.0.0.1:7073", description="address of the allocator, HOST:PORT; or several"
    )
    brokers: dict[str, BrokerSettings] = Field(
        default_factory=dict[str, BrokerSettings],
        description="message brokers, by the name that watchers use",
    )
    prometheus: dict[str, PrometheusSettings] = Field(
        default_factory=dict[str, PrometheusSettings],
        description="Prometheus servers, by the name that signals use",
    )
