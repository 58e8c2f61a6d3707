"""docker-compose.yml has no password in what an engine shows of its containers: they are in files, which the programs read."""

import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.brokers import resolve
from gpuscale.common.config.settings import DatabaseSettings
from gpuscale.common.config.sources import load_table, read_config
from tests.unit.docs.pages import ROOT

COMPOSE: dict[str, Any] = YAML(typ="safe").load(ROOT / "docker-compose.yml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MOUNTED = "/run/secrets/"


def make(folder: Path, **environment: str) -> dict[str, str]:
    """What the script writes, by name of the file."""
    script = ROOT / "deploy" / "compose" / "secrets.sh"
    subprocess.run(
        ["sh", script, folder], env={"PATH": "/usr/bin:/bin", **environment}, check=True, timeout=60
    )
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compose") / "secrets"
    make(folder)
    return folder


def environment(service: str, made: Path) -> dict[str, str]:
    """What its program sees, but for where the files are."""
    told = SERVICES[service]["environment"]
    assert {text.removeprefix(MOUNTED) for text in told.values() if text.startswith(MOUNTED)} <= set(
        SERVICES[service].get("secrets", [])
    )
    return {name: text.replace(MOUNTED, f"{made}/") for name, text in told.items()}


def test_no_container_has_a_password_in_its_environment() -> None:
    for name, one in SERVICES.items():
        for variable, value in one.get("environment", {}).items():
            assert "@" not in value, (name, variable)
            assert "PASS" not in variable.removesuffix("PASSWORD_FILE"), (name, variable)
            assert not re.search(r"\$\{?\w*(PASS|SECRET|TOKEN)", value), (name, variable)


def test_every_file_is_made_and_somebody_reads_it(made: Path) -> None:
    """All may read it in its container; on the host its folder keeps everybody else out."""
    assert {one["file"] for one in COMPOSE["secrets"].values()} == {
        f"./secrets/{path.name}" for path in made.iterdir()
    }
    assert all(name == Path(one["file"]).name for name, one in COMPOSE["secrets"].items())
    read = [one for service in SERVICES.values() for one in service.get("secrets", [])]
    assert {one["source"] if isinstance(one, dict) else one for one in read} == set(COMPOSE["secrets"])
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o644}
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("service", ["allocator", "allocator-standby", "autoscaler", "autoscaler-standby"])
def test_services_find_the_database_that_lets_them_in(service: str, made: Path) -> None:
    kind: type[DatabaseSettings] = (
        AllocatorSettings if service.startswith("allocator") else AutoscalerSettings
    )
    database = load_table(kind, {}, environ=environment(service, made)).database
    server = SERVICES["postgres"]["environment"]
    password = environment("postgres", made)["POSTGRES_PASSWORD_FILE"]
    assert database.password.get_secret_value() == Path(password).read_text() != ""
    assert database.username.get_secret_value() == server["POSTGRES_USER"]
    assert (database.host, database.path) == ("postgres", f"/{server['POSTGRES_DB']}")


def test_the_autoscaler_and_the_worker_find_the_broker_that_lets_them_in(made: Path) -> None:
    broker = resolve({}, environment("autoscaler", made))["default"]
    [user] = SERVICES["rabbitmq"]["secrets"]
    assert user["target"].startswith("/etc/rabbitmq/conf.d/")
    said = dict(line.split(" = ") for line in (made / user["source"]).read_text().splitlines())
    assert broker.management is not None
    for url in (broker.amqp, broker.management):
        assert url.username.get_secret_value() == said["default_user"]
        assert url.password.get_secret_value() == said["default_pass"]
        assert url.host == "rabbitmq"
    config = read_config(ROOT / "deploy" / "compose" / "adapter.toml")
    [template] = load_table(ProcessSettings, config, {"data_dir": made}, environ={}).templates.values()
    [(variable, file)] = template.env.items()
    assert f'"{variable.removesuffix("_FILE")}"' in (ROOT / "examples" / "worker.py").read_text()
    assert file.removeprefix(MOUNTED) in SERVICES["adapter"]["secrets"]
    assert (made / Path(file).name).read_text() == broker.amqp.reveal()


def test_what_is_there_stays(tmp_path: Path) -> None:
    """The database and the broker know it. Passwords of before can be kept."""
    first = make(tmp_path / "new")
    assert make(tmp_path / "new") == first != make(tmp_path / "other")
    kept = make(tmp_path / "kept", POSTGRES_PASSWORD="one", RABBITMQ_PASSWORD="two")
    assert kept["postgres_password"] == "one"
    assert "gpuscale:one@" in kept["database_url"]
    assert "gpuscale:two@" in kept["amqp_url"]


def test_every_service_has_a_health_check_and_ours_may_have_many_connections() -> None:
    assert [name for name, one in SERVICES.items() if "healthcheck" not in one] == []
    ours = [one for one in SERVICES.values() if one.get("image") == "gpuscale:local"]
    assert len(ours) > 8
    assert all(one["ulimits"] == {"nofile": 65536} for one in ours)


def test_workers_are_asked_to_finish_before_their_container_ends() -> None:
    environment = SERVICES["adapter"]["environment"]
    assert "end_replicas" in ProcessSettings.model_fields
    assert environment["GPUSCALE_ADAPTER_END_REPLICAS"] == "true"


def test_no_log_of_a_container_grows_for_ever() -> None:
    kept = [one.get("logging", {}).get("options", {}) for one in COMPOSE["services"].values()]
    assert kept
    assert [one for one in kept if not {"max-size", "max-file"} <= one.keys()] == []
