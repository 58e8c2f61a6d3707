"""One file configures every part, and `up` decides where state lies and which GPUs are simulated."""

from pathlib import Path

import pytest

from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.common.config.settings import DatabaseSettings, ServerSettings, UpstreamSettings
from gpuscale.common.config.sources import Settings
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.gateway.settings import GatewaySettings
from gpuscale.monitor.app.settings import AgentSettings, FleetSettings
from gpuscale.up.settings import load_all
from tests.unit.docs.pages import ROOT

FILE = """\
[up]
listen = "127.0.0.1:1"
[agent]
node = "here"
period_seconds = 2.0
[allocator]
default_ttl_seconds = 99
[brokers.default]
amqp_url_file = "some.url"
[templates.worker]
command = ["{python}", "-c", "pass"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gpuscale.toml"
    path.write_text(FILE)
    return path


def test_each_part_reads_its_table(file: Path, tmp_path: Path) -> None:
    settings = load_all(["--config", str(file), "--data-dir", str(tmp_path / "data")])
    assert settings.up.listen == "127.0.0.1:1"
    assert (settings.agent.node, settings.agent.period_seconds) == ("here", 2.0)
    assert settings.allocator.default_ttl_seconds == 99
    assert set(settings.autoscaler.brokers) == {"default"}
    assert set(settings.adapter.templates) == {"worker"}
    assert settings.adapter.node == "here", "the adapter's replicas use the agent's GPUs"
    assert {settings.allocator.data_dir, settings.autoscaler.data_dir, settings.adapter.data_dir} == {
        tmp_path / "data"
    }


def test_metrics_are_off_and_where_they_are_on_they_are_as_secure_as_up(tmp_path: Path) -> None:
    off = load_all(["--data-dir", str(tmp_path)])
    assert (off.agent.metrics_listen, off.fleet.metrics_listen) == ("", "")
    tokens = tmp_path / "tokens.toml"
    path = tmp_path / "c.toml"
    path.write_text(f'[up]\ntokens_file = "{tokens}"\n[agent]\nmetrics_listen = "127.0.0.1:9400"\n')
    on = load_all(["--config", str(path), "--data-dir", str(tmp_path)])
    assert on.agent.metrics_listen == "127.0.0.1:9400"
    assert (on.agent.tokens_file, on.fleet.tokens_file) == (tokens, tokens)


def test_the_file_may_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCALE_CONFIG", str(file))
    assert load_all([]).agent.node == "here"


@pytest.mark.parametrize(
    ("arguments", "source", "count"),
    [((), "auto", 4), (("--simulate", "2"), "simulated", 2), (("--simulate=0",), "simulated", 0)],
)
def test_simulated_gpus(arguments: tuple[str, ...], source: str, count: int) -> None:
    agent = load_all(arguments).agent
    assert (agent.source, agent.simulated_gpu_count) == (source, count)


def test_data_is_kept_where_users_keep_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert load_all([]).up.data_dir == Path("/somewhere/gpuscale")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert load_all([]).up.data_dir == Path("/home/me/.local/share/gpuscale")


def _unused() -> list[tuple[type[Settings], str]]:
    pairs: list[tuple[type[Settings], str]] = [
        (GatewaySettings, name) for name in GatewaySettings.model_fields
    ]
    for part in (AgentSettings, FleetSettings, AllocatorSettings, AutoscalerSettings, ProcessSettings):
        own = {"data_dir", "state_dir", *(name for name in part.model_fields if name.endswith("_address"))}
        shared = {
            *ServerSettings.model_fields,
            *UpstreamSettings.model_fields,
            *DatabaseSettings.model_fields,
        }
        pairs += [(part, name) for name in sorted((own | shared) & set(part.model_fields))]
    return [*pairs, (ProcessSettings, "node")]


@pytest.mark.parametrize(("part", "name"), _unused(), ids=lambda one: getattr(one, "section", one))
def test_what_up_would_not_use_is_refused_with_its_place(
    part: type[Settings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text(f'[{part.section}]\n{name} = "1"\n')
    with pytest.raises(InvalidArgumentError, match=rf"{name} in \[{part.section}\] is not used here: \w+"):
        load_all(["--config", str(tmp_path / "c.toml")])
    variable = f"GPUSCALE_{part.section}_{name}".upper()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(InvalidArgumentError, match=f"{variable} is not used here: "):
        load_all([])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[allocator]\nbogus = 1\n", "bogus"),
        ('[gateway]\nmetrics_listen = "127.0.0.1:9402"\n', r"set metrics_listen in \[agent\] or \[fleet\]"),
    ],
)
def test_a_wrong_key_is_named_and_what_to_do_instead(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(InvalidArgumentError, match=said):
        load_all(["--config", str(tmp_path / "c.toml")])


def test_reflection_is_served_by_up_alone_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert load_all(["--data-dir", str(tmp_path)]).up.reflection
    assert not ServerSettings.model_fields["reflection"].default
    page = (ROOT / "docs" / "security.md").read_text()
    assert "| gRPC reflection | off; on in `up` (`--no-reflection`) |" in page
