"""The pages of settings: every setting of every program, and files that programs take."""

import re
import tomllib
from pathlib import Path

import pytest

from gpuscale.common.config.sources import Settings, load_table
from gpuscale.up.settings import UpSettings, load_all
from tests.unit.docs.pages import ROOT, programs, read, rows


def section(title: str) -> str:
    """What the reference has below the one heading that ends with `title`."""
    parts = re.split(r"^## ", read("reference/settings.md"), flags=re.MULTILINE)
    [found] = [text for text in parts if text.partition("\n")[0].endswith(title)]
    return found


@pytest.mark.parametrize("program", programs(), ids=lambda one: one.section)
def test_every_setting_has_a_row_in_its_program_or_in_settings_that_it_takes(program: type[Settings]) -> None:
    own = section(f": [{program.section}]")
    taken = [section(title.capitalize()) for title in re.findall(r"\[(settings of [a-z ]+)\]", own)]
    named = {name.strip("`") for text in (own, *taken) for name, *_ in rows(text)}
    tables = set(re.findall(r"`\[(\w+)\.NAME\]`", own))
    for name in program.model_fields:
        assert {f"--{name.replace('_', '-')}", name} & named or name in tables, name
    for name in tables:
        assert len(list(rows(section(f"[{name}.NAME]")))) > 1


def test_the_example_files_are_taken_by_up_and_by_every_program(tmp_path: Path) -> None:
    [for_up] = re.findall(r"```toml\n(.*?)```", read("settings.md"), flags=re.DOTALL)
    (tmp_path / "up.toml").write_text(for_up)
    assert load_all(["--config", str(tmp_path / "up.toml")]).agent.node == "gpu-host-07"
    config = tomllib.loads((ROOT / "examples" / "programs.toml").read_text())
    for program in programs():
        assert (program.section in config) is (program is not UpSettings)
        if program is not UpSettings:
            load_table(program, config, environ={})
