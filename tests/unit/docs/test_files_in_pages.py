"""Files that pages show are taken as they stand: manifests by the contract, settings by the programs that read them."""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.manifests import parse
from gpuscale.common.config.sources import load_table
from tests.unit.docs.pages import HAND_WRITTEN, programs

KINDS = {kind.section: kind for kind in programs()}
FIELDS = {field.json_name for field in api.EndpointSpec.DESCRIPTOR.fields}
AROUND = "kind: Endpoint\nname: shown\nspec:\n  minReplicas: 1\n  maxReplicas: 4\n  template: "


def manifests(page: Path) -> list[str]:
    """Whole endpoints and watchers of a page, and an endpoint around each part of a spec and each template within a line."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"```yaml\n(  (\w+):.*?)```", text, re.DOTALL)
    parts = [AROUND.removesuffix("  template: ") + part for part, first in found if first in FIELDS]
    whole = re.findall(r"```yaml\n(kind: (?:Endpoint|QueueWatcher)\b.*?)```", text, re.DOTALL)
    return whole + parts + [AROUND + one for one in re.findall(r"`template: (\{.*?\})`", text)]


def tables(page: Path) -> list[dict[str, dict[str, object]]]:
    """The files of settings of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```toml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [table for one in blocks if KINDS.keys() & (table := tomllib.loads(textwrap.dedent(one))).keys()]


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_manifest_of_a_page_fits_the_contract(page: Path) -> None:
    for text in manifests(page):
        assert len(parse(text, page.name)) == 1


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_setting_of_a_page_is_one_of_its_program(page: Path) -> None:
    for table in tables(page):
        for section in KINDS.keys() & table.keys():
            fields = KINDS[section].model_fields
            left = {name for name, field in fields.items() if field.is_required()} - table[section].keys()
            load_table(KINDS[section], table, dict.fromkeys(left, "/var/lib/gpuscale"), {})


def test_the_search_finds_them() -> None:
    assert sum(len(manifests(page)) for page in HAND_WRITTEN) >= 7
    assert sum(len(tables(page)) for page in HAND_WRITTEN) >= 5
