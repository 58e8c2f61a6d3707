"""docs/settings.md has every setting of every program, by the names that the program takes and with its default."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpuscale.cli.grammar.arguments import GLOBAL_OPTIONS
from gpuscale.common.config.settings import ServerSettings, Settings, UpstreamSettings, load_table
from gpuscale.common.secrets import SecretUrl
from gpuscale.up.settings import UpSettings, load_all
from tests.unit.docs.pages import programs, read, rows

SHARED: dict[type[Settings], str] = {
    ServerSettings: "every program that serves",
    UpstreamSettings: "every program that calls",
}
DIFFERS_BY_HOST = {"node", "adapter", "data_dir"}
"""Fields whose default is found out on the host, so that no page can state it."""


def part(title: str) -> str:
    """The part of the page below the one heading that holds `title`."""
    parts = re.split(r"^## ", read("settings.md"), flags=re.MULTILINE)
    found = [text for text in parts if title in text.partition("\n")[0]]
    assert len(found) == 1, f"settings.md needs one heading with {title}"
    return found[0]


def row(text: str, name: str) -> list[str]:
    """The one row that begins with a name in code type."""
    found = [cells for cells in rows(text) if f"`{name}`" in cells[0]]
    assert len(found) == 1, f"settings.md needs one row for {name} below: {text.partition(chr(10))[0]}"
    return found[0]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def default(field: FieldInfo) -> str:
    """A default as the page writes it."""
    if field.is_required():
        return "required"
    if field.default in (None, "", ()):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def model_of_tables(field: FieldInfo) -> type[BaseModel] | None:
    """What one table holds, where the field is a mapping of tables such as [brokers.NAME]."""
    arguments = [one for one in get_args(field.annotation) if isinstance(one, type)]
    return next((one for one in arguments if issubclass(one, BaseModel)), None)


def own_fields(program: type[Settings]) -> dict[str, FieldInfo]:
    """Fields that are not those of every server or caller, or have another default here."""
    inherited = [cls for cls in SHARED if issubclass(program, cls)]
    shared = {name: field for cls in inherited for name, field in cls.model_fields.items()}
    return {
        name: field
        for name, field in program.model_fields.items()
        if name not in shared or field.default != shared[name].default
    }


@pytest.mark.parametrize("program", programs(), ids=lambda one: one.section)
def test_every_setting_has_a_row_with_its_flag_variable_and_default(program: type[Settings]) -> None:
    text = part(f"[{program.section}]")
    for name, field in own_fields(program).items():
        if (model := model_of_tables(field)) is not None:
            for key in model.model_fields:
                row(part(f"[{name}.NAME]"), key)
            continue
        cells = row(text, name if SecretUrl in get_args(field.annotation) else flag(name))
        assert f"`GPUSCALE_{program.section.upper()}_{name.upper()}`" in cells[1]
        if name not in DIFFERS_BY_HOST:
            assert cells[2].startswith(default(field)), (name, cells[2])


@pytest.mark.parametrize("shared", SHARED)
def test_settings_of_every_server_and_every_caller_have_a_row(shared: type[Settings]) -> None:
    text = part(SHARED[shared])
    for name, field in shared.model_fields.items():
        cells = row(text, flag(name))
        assert f"`GPUSCALE_<SECTION>_{name.upper()}`" in cells[1]
        assert name == "listen" or cells[2].startswith(default(field)), (name, cells[2])


@pytest.mark.parametrize("program", programs(), ids=lambda one: one.section)
def test_a_program_says_which_shared_settings_it_takes(program: type[Settings]) -> None:
    text = part(f"[{program.section}]")
    assert ("settings of a server" in text) is issubclass(program, ServerSettings)
    assert ("settings of a caller" in text) is issubclass(program, UpstreamSettings)


def test_the_example_files_are_taken_by_up_and_by_every_program(tmp_path: Path) -> None:
    for_up, for_programs = re.findall(r"```toml\n(.*?)```", read("settings.md"), flags=re.DOTALL)
    (tmp_path / "up.toml").write_text(for_up)
    assert load_all(["--config", str(tmp_path / "up.toml")]).agent.node == "gpu-host-07"
    config = tomllib.loads(for_programs)
    for program in programs():
        assert (program.section in config) is (program is not UpSettings)
        if program is not UpSettings:
            load_table(program, config, environ={})


def test_no_row_names_a_setting_that_is_not_there() -> None:
    known = {flag(name) for program in programs() for name in program.model_fields}
    named = {word for cells in rows(read("settings.md")) for word in re.findall(r"`(--[a-z-]+)`", cells[0])}
    of_the_cli = {"--config", *GLOBAL_OPTIONS}
    assert sorted(named - known - of_the_cli) == []
