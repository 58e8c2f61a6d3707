"""Examples of KEDA and of queue watchers fit the contract."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.adapters.templates import Placeholder, parse_arguments
from gpuscale.autoscaler.domain.validate import violations as contradictions
from gpuscale.autoscaler.servicers.keda_servicer import METRIC
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.brokers import resolve
from gpuscale.autoscaler.wire.specs import spec_from_wire
from gpuscale.cli.manifests import parse
from gpuscale.common.config.sources import load_table, read_config
from gpuscale.common.rpc.validation import violations

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "keda"


@pytest.fixture
def endpoint() -> api.Endpoint:
    watcher, found = parse((DEPLOY / "endpoint.yaml").read_text(), "endpoint.yaml")
    assert violations(watcher) == []
    assert found.spec.signals[0].queue.watcher == watcher.name
    return found


@pytest.fixture
def scaled_object() -> Any:
    return YAML(typ="safe").load((DEPLOY / "scaledobject.yaml").read_text())


def test_the_endpoint_is_one_that_can_be_created_and_asks_for_no_gpu(endpoint: api.Endpoint) -> None:
    assert violations(endpoint) == []
    assert contradictions(spec_from_wire(endpoint.spec)) == []
    assert endpoint.spec.template.gpu_count == 0


def test_the_scaled_object_follows_that_endpoint_within_its_bounds(
    endpoint: api.Endpoint, scaled_object: Any
) -> None:
    spec = scaled_object["spec"]
    [trigger] = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
    assert f"endpoints/{trigger['metadata']['endpoint']}" == endpoint.name
    assert trigger["metadata"]["metric"] == METRIC
    assert spec["minReplicaCount"] <= endpoint.spec.min_replicas
    assert spec["maxReplicaCount"] >= endpoint.spec.max_replicas


def test_no_window_or_tolerance_of_the_cluster_comes_on_top(scaled_object: Any) -> None:
    behavior = scaled_object["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    for way in ("scaleUp", "scaleDown"):
        assert behavior[way]["tolerance"] == 0
        assert behavior[way]["stabilizationWindowSeconds"] == 0


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ENVIRONMENT = {
    "GPUSCALE_BROKER_DEFAULT_AMQP_URL": "amqp://user:word@host/",
    "GPUSCALE_BROKER_DEFAULT_MANAGEMENT_URL": "http://user:word@host:15672",
}


def test_the_manifests_and_the_configuration_fit_each_other(tmp_path: Path) -> None:
    watcher, endpoint = parse((EXAMPLES / "endpoint.yaml").read_text(), "endpoint.yaml")
    assert violations(watcher) == []
    assert violations(endpoint) == []
    assert endpoint.spec.signals[0].queue.watcher == watcher.name

    config = read_config(EXAMPLES / "gpuscale.toml")
    data_dir = {"data_dir": tmp_path}
    brokers = resolve(load_table(AutoscalerSettings, config, data_dir, environ={}).brokers, ENVIRONMENT)
    assert brokers[watcher.spec.broker].management is not None

    adapter = load_table(ProcessSettings, config, data_dir, environ={})
    template = adapter.templates[endpoint.spec.template.template]
    parsed = [part for argument in parse_arguments(template.command) for part in argument]
    used = {part.name for part in parsed if isinstance(part, Placeholder)}
    assert used - {"python"} == set(endpoint.spec.template.parameters)
    assert (EXAMPLES.parent / template.command[1]).is_file()
