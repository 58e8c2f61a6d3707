"""Dockerfile, .dockerignore and docker-compose.yml fit each other; `make image` builds and runs what they say."""

import re
import tomllib
from fnmatch import fnmatch
from typing import Any

from ruamel.yaml import YAML

from tests.unit.docs.pages import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COPIES = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
COPIED = [path for line in COPIES for path in line.split()[:-1]]
COMPOSE: dict[str, Any] = YAML(typ="safe").load(ROOT / "docker-compose.yml")
OWN = {name: one for name, one in COMPOSE["services"].items() if one["image"] == "gpuscale:local"}


def test_what_is_copied_is_let_through_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert sorted(rule[1:] for rule in rules if rule.startswith("!")) == sorted(COPIED)
    assert all((ROOT / path).exists() for path in COPIED)


def test_what_the_build_settles_on_is_written_down() -> None:
    """pip's constraints hold for what builds the wheel, too, by the environment alone."""
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "PIP_CONSTRAINT=/src/constraints.txt" in DOCKERFILE
    assert "constraints.txt" in COPIED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {re.split(r"[><=]", one)[0] for one in project["build-system"]["requires"]} <= pinned


def test_it_runs_as_a_user_with_a_number_that_is_not_root() -> None:
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert int(user) > 0
    assert f"useradd --uid {user} " in DOCKERFILE


def test_every_extra_that_is_asked_for_is_there() -> None:
    [(extras, addon)] = re.findall(r"install '\.\[(.*)\]' \./(\S+)", DOCKERFILE)
    assert addon in COPIED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_every_service_is_asked_to_stop_and_hears_it() -> None:
    """By an init, or by not being the first of its processes: the first is deaf to a signal that it has not asked for."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(OWN) >= 9
    for name, one in OWN.items():
        assert one["command"][0] in scripts, name
        assert one["init"] is (one.get("pid") != "host"), name
        assert one["read_only"] is True, name
        assert one["cap_drop"] == ["ALL"], name
        assert float(one["stop_grace_period"].removesuffix("s")) > 10, name


def test_a_host_without_gpus_is_asked_for_none() -> None:
    """The file beside it takes away every reservation of a device, and changes nothing else but what the agent reads."""
    other = YAML().load(ROOT / "deploy" / "compose" / "simulated.yml")["services"]
    assert set(other) == {name for name, one in COMPOSE["services"].items() if "deploy" in one}
    assert all(one["deploy"].tag.value == "!reset" for one in other.values())
    assert other["agent"]["environment"] == {"GPUSCALE_AGENT_SOURCE": "simulated"}
    assert COMPOSE["services"]["agent"]["environment"]["GPUSCALE_AGENT_SOURCE"] == "nvml"


def test_workers_are_another_user_than_every_service() -> None:
    adapter = COMPOSE["services"]["adapter"]
    [user] = re.findall(r"useradd --uid (\d+) --create-home gpuscale-worker ", DOCKERFILE)
    [service] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert adapter["user"] == f"{user}:{user}" != f"{service}:{service}"
    assert all("user" not in one for name, one in OWN.items() if name != "adapter")
    assert adapter["secrets"] == ["amqp_url"], "what workers need themselves, and nothing of a service"
    [state, *files] = adapter["volumes"]
    assert state == "workers:/var/lib/gpuscale-worker"
    assert all(file.endswith(":ro") for file in files)
    others = [one for name, one in OWN.items() if name != "adapter"]
    assert not any("workers:" in volume for one in others for volume in one.get("volumes", ()))
    assert adapter["environment"]["GPUSCALE_ADAPTER_DATA_DIR"].startswith("/var/lib/gpuscale-worker/")
    assert "-o gpuscale-worker -g gpuscale-worker -m 0700 /var/lib/gpuscale-worker" in DOCKERFILE


def test_images_are_of_one_version_and_bounded() -> None:
    """A tag with its patch level does not become another release on the next pull."""
    [base] = re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.MULTILINE)
    theirs = {name: one for name, one in COMPOSE["services"].items() if name not in OWN}
    assert set(theirs) == {"postgres", "rabbitmq"}
    for image in (base, *(one["image"] for one in theirs.values())):
        assert re.fullmatch(r"[a-z]+:(\d+\.\d+\.\d+|1[0-9]\.\d+)(-[a-z]+)?|.+@sha256:[0-9a-f]{64}", image), (
            image
        )
    for name, one in COMPOSE["services"].items():
        assert one["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in one["security_opt"], name
        bounded = name != "adapter"  # its workers need what they need
        assert (one["pids_limit"] > 0, one["mem_limit"] not in (0, None)) == (bounded, bounded), name
    assert all(not one.get("cap_add") for one in OWN.values())


def test_ports_are_published_on_loopback_alone() -> None:
    published = [port for one in COMPOSE["services"].values() for port in one.get("ports", [])]
    assert published
    assert all(fnmatch(port, "127.0.0.1:*:*") for port in published)
