"""What pages show is what there is: commands and options, manifests and settings, messages, errors and alerts."""

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.main import root
from gpuscale.cli.manifests import parse
from gpuscale.common import errors
from gpuscale.common.config.sources import Settings, load_table
from gpuscale.common.rpc.status import status_code
from gpuscale.up.settings import UpSettings, load_all
from tests.unit.docs.pages import HAND_WRITTEN, ROOT, SERVICES, programs, read, reasons, rows

PAGES = [ROOT / "README.md", *HAND_WRITTEN, *sorted((ROOT / "examples").glob("*.md"))]


def typed(page: Path) -> Iterator[list[str]]:
    """The words of each command, of consoles and of lines within the text; without what a shell makes of it."""
    text = page.read_text(encoding="utf-8")
    consoles = re.findall(r"^\$ (gpuscalectl .*)$", text, re.MULTILINE)
    within = re.findall(r"`(gpuscalectl [a-z][^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in consoles + within:
        before = re.split(r" (?:\|\|?|&&|>|#) ?|\s#|\)", line.replace("\\|", "|"))[0]
        words = shlex.split(before, comments=True)[1:]
        yield words[: words.index("--")] if "--" in words else words


def unknown(words: list[str]) -> str:
    """What of a command is not there; empty where all is."""
    command: click.Command = root()
    context = click.Context(command)
    left = list(words)
    while isinstance(command, click.Group):
        parsed = command.make_context(None, left, resilient_parsing=True, ignore_unknown_options=True)
        left = [*parsed._protected_args, *parsed.args]
        if not left or not left[0][:1].islower():
            return "" if command is not root() else f"{' '.join(words)}: no command"
        parsed.resilient_parsing = False
        try:
            _, found, left = command.resolve_command(parsed, left)
        except click.UsageError:
            found = None
        if found is None:
            return f"{' '.join(words)}: no command {left[0]}"
        command, context = found, parsed
    options = {text for one in command.get_params(context) for text in (*one.opts, *one.secondary_opts)}
    if command.context_settings.get("ignore_unknown_options"):
        return ""
    for word in left:
        name = word.partition("=")[0]
        if word.startswith("-") and len(word) > 1 and name not in options and name[:2] not in options:
            return f"{' '.join(words)}: no option {name}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_there(page: Path) -> None:
    assert [problem for words in typed(page) if (problem := unknown(words))] == []


def test_the_search_finds_commands_and_what_is_wrong_with_them() -> None:
    assert sum(1 for page in PAGES for _ in typed(page)) > 80
    assert unknown(["get", "nodes", "-o", "json"]) == ""
    assert "no option --deadline" in unknown(["drain", "n", "--deadline", "3m"])
    assert "no command" in unknown(["explain-placement"])
    assert "no command" in unknown(["get", "frogs"])


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


REASON = r"[A-Z]+(?:_[A-Z]+)+"


def test_every_reason_has_a_status_and_most_have_their_message() -> None:
    found = reasons()
    assert len(found) > 100
    assert found["NO_CAPACITY"][1:3] == ["RESOURCE_EXHAUSTED", "5"]
    assert "{name}" in found["ETAG_MISMATCH"][4]
    assert "parts of logs" in found["LOGS_BUSY"][4]
    assert "cannot remove {filename}: {strerror}" in found["HOST_FILES"][4]
    assert found["LOGIN_FILES"][4] == "cannot write {folder}: {strerror}"
    assert "use a new UUID" in found["REQUEST_ID_REUSED"][4]
    without = [reason for reason, (_, status, *_) in found.items() if not status]
    assert set(without) <= {"NOT_INSTALLED", "UNKNOWN", "UNWELL"}
    assert sum(1 for cells in found.values() if cells[4]) > 80


def test_no_reason_is_explained_that_cannot_happen() -> None:
    explained = set(re.findall(f"`({REASON})`", read("errors.md").partition("## Reasons")[2]))
    others = {"NOT_SERVING", "GPUSCALE_FAILPOINTS"}
    assert len(explained) > 40
    assert sorted(explained - reasons().keys() - others) == []


def test_every_status_is_explained_with_its_error() -> None:
    table = [cells for cells in rows(read("reference/errors.md")) if cells[1].endswith("Error`")]
    shown = {cells[0].strip("`"): cells[1].strip("`") for cells in table}
    assert all(cells[2] for cells in table)
    for cls in errors.GpuscaleError.__subclasses__():
        if cls.__module__ == errors.__name__:
            assert shown[status_code(cls("")).name] == cls.__name__


OF_OTHERS = {"Connection refused", "Domain name not found", "database is locked"}
"""Words of gRPC, of its TLS, and of SQLite."""
SEEN = sorted(
    {text for cells in rows(read("operations.md")) for text in re.findall(r"`([^`]+)`", cells[0])} - OF_OTHERS
)


@pytest.fixture(scope="module")
def source() -> str:
    """The text of all programs, with strings that go over several lines in one piece."""
    text = "\n".join(path.read_text() for path in SERVICES.rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("text", SEEN)
def test_every_message_of_the_page_is_one_of_a_program(text: str, source: str) -> None:
    fixed = re.split(r"HOST:PORT|\.\.\.|\b[A-Z]\b|\ballocator\b|, |: ", text)
    pieces = [piece.strip() for piece in fixed if piece.strip() and piece not in OF_OTHERS]
    assert pieces
    assert [piece for piece in pieces if piece not in source] == []


def test_every_alert_leads_to_its_first_look() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert (
        rules.count('\n          runbook: docs/operations.md#alerts\n          first_look: "')
        == len(alerts)
        > 40
    )
    assert "\n## Alerts\n" in read("operations.md")
    looks = {cells[0].strip("`"): cells[-1] for cells in rows(read("reference/alerts.md"))}
    assert set(alerts) < looks.keys()
    assert all(looks.values())


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
