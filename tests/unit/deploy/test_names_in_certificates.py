"""Certificates that docs/deploy.md makes bear every name by which what it sets up is called."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.docs.pages import ROOT, programs, read

COMMANDS = [line for line in read("deploy.md").splitlines() if line.startswith("$ gpuscalectl certs init")]


def table(file: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "deploy" / file).read_text())


def hosts(values: Iterator[str]) -> set[str]:
    """The hosts of addresses, of several with commas between, too."""
    return {one.rpartition(":")[0] for text in values for one in text.split(",")}


def called(settings: dict[str, Any]) -> set[str]:
    """The hosts that programs with these tables call, those of their defaults too."""
    kinds = [one for one in programs() if one.section in settings]
    names = [(one, name) for one in kinds for name in one.model_fields if name.endswith("_address")]
    found = (settings[one.section].get(name, one.model_fields[name].default) for one, name in names)
    return hosts(text for text in found if text and not text.startswith("unix:"))


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (COMMANDS[0], ["systemd/services.toml", "systemd/gpu-host.toml"]),
        (COMMANDS[1], ["kubernetes/base/gpuscale.toml"]),
    ],
    ids=["systemd", "kubernetes"],
)
def test_every_name_that_settings_call_is_in_the_certificate(command: str, files: list[str]) -> None:
    named = set(re.findall(r"--host (\S+)", command))
    assert named >= set[str]().union(*(called(table(file)) for file in files))


def test_every_name_that_people_call_is_in_all_of_them() -> None:
    """By `--address` in the lines after each; a cluster is reached through a forwarded port."""
    parts = re.split(r"^\$ gpuscalectl certs init", read("deploy.md"), flags=re.MULTILINE)[1:]
    assert len(parts) == len(COMMANDS) == 3
    for part, command in zip(parts, COMMANDS, strict=True):
        named = set(re.findall(r"--host (\S+)", command))
        assert named >= hosts(iter(re.findall(r"--address (\S+)", part)))
    assert "--host localhost" in COMMANDS[2]
