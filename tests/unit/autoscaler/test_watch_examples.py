"""The files in examples/ are what the programs take: each is read by the code that reads it in production."""

from pathlib import Path

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.adapters.templates import Placeholder, parse_arguments
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.brokers import resolve
from gpuscale.cli.manifests.documents import parse
from gpuscale.common.config.sources import load_table, read_config
from gpuscale.common.rpc.validation import violations

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ENVIRONMENT = {
    "GPUSCALE_BROKER_DEFAULT_AMQP_URL": "amqp://user:word@host/",
    "GPUSCALE_BROKER_DEFAULT_MANAGEMENT_URL": "http://user:word@host:15672",
}


def test_the_manifests_and_the_configuration_fit_each_other(tmp_path: Path) -> None:
    watcher, endpoint = parse((EXAMPLES / "endpoint.yaml").read_text(), "endpoint.yaml")
    assert isinstance(watcher, api.QueueWatcher)
    assert isinstance(endpoint, api.Endpoint)
    assert violations(watcher) == []
    assert violations(endpoint) == []
    assert endpoint.spec.signals[0].queue.watcher == watcher.name

    config = read_config(EXAMPLES / "gpuscale.toml")
    data_dir = {"data_dir": tmp_path}
    brokers = resolve(load_table(AutoscalerSettings, config, data_dir, environ={}).brokers, ENVIRONMENT)
    assert brokers[watcher.spec.broker].management is not None

    adapter = load_table(ProcessSettings, config, data_dir, environ={})
    template = adapter.templates[endpoint.spec.template.template]
    used = {
        part.name
        for argument in parse_arguments(template.command)
        for part in argument
        if isinstance(part, Placeholder)
    }
    assert used - {"python"} == set(endpoint.spec.template.parameters)
    assert (EXAMPLES.parent / template.command[1]).is_file()
