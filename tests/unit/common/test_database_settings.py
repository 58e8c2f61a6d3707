"""Where the state is kept: a URL that nobody gets to see, and that is PostgreSQL's or none."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.common.config import settings as settings_module
from gpuscale.common.config.settings import DatabaseSettings, load, load_table
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError

URL = "postgresql://gpuscale:secret-1234@db/gpuscale"


def allocator(database: object, environ: Mapping[str, str] | None = None) -> AllocatorSettings:
    return load_table(
        AllocatorSettings, {"allocator": {"data_dir": "d", "database": database}}, environ=environ or {}
    )


@pytest.mark.parametrize("kind", [AllocatorSettings, AutoscalerSettings])
def test_it_comes_from_the_environment_and_its_password_is_never_shown(kind: type[DatabaseSettings]) -> None:
    variable = f"GPUSCALE_{kind.section.upper()}_DATABASE"
    found = load_table(kind, {kind.section: {"data_dir": "d"}}, environ={variable: URL})
    assert found.database is not None
    assert found.database.reveal() == URL
    assert "secret" not in f"{found!r} {found} {found.database} {found.model_dump_json()}"


@pytest.mark.parametrize("kind", [AllocatorSettings, AutoscalerSettings])
def test_it_comes_from_a_file(kind: type[DatabaseSettings], tmp_path: Path) -> None:
    """As Docker and Kubernetes mount secrets: neither `docker inspect` nor the environment shows it."""
    file = tmp_path / "url"
    file.write_text(f"{URL}\n")
    found = load_table(kind, {kind.section: {"data_dir": "d", "database_file": str(file)}}, environ={})
    assert found.database is not None
    assert found.database.reveal() == URL
    assert "secret" not in f"{found!r} {found} {found.model_dump_json()}"
    variable = f"GPUSCALE_{kind.section.upper()}_DATABASE_FILE"
    assert load_table(kind, {kind.section: {"data_dir": "d"}}, environ={variable: str(file)}) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read database_file"),
        ("", "must look like"),
        ("mysql://u:secret-1234@h/d", "must begin with postgresql://"),
        ("secret-1234", "must look like"),
    ],
)
def test_a_file_without_one_is_refused_and_not_shown(text: str | None, says: str, tmp_path: Path) -> None:
    """It does not come to mean that the state is kept in a file of its own."""
    if text is not None:
        (tmp_path / "url").write_text(text)
    variable = {"GPUSCALE_ALLOCATOR_DATABASE_FILE": str(tmp_path / "url")}
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        allocator("", variable)
    assert "secret-1234" not in caught.value.message


def test_there_is_one_of_the_two(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"database in \[allocator\]: goes without database_file"):
        allocator(URL, {"GPUSCALE_ALLOCATOR_DATABASE_FILE": str(tmp_path)})


def test_an_empty_one_is_none() -> None:
    assert allocator("").database is None


@pytest.mark.parametrize(
    "wrong",
    ["sqlite:///x.db", "mysql://u:secret-1234@h/d", "secret-1234", "postgresql://u:a/secret-1234@h/d"],
)
def test_another_url_is_refused_and_not_shown(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        allocator(wrong)
    assert "database in [allocator]" in caught.value.message
    assert "secret-1234" not in caught.value.message


def test_it_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Every user of the host can read flags."""
    with pytest.raises(SystemExit):
        load(AllocatorSettings, ["--data-dir", "d", "--database", URL], program="p", description="")
    assert "unknown flag --database" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(settings_module, "import_module", missing)
    with pytest.raises(FailedPreconditionError, match=r"gpuscale\[postgresql\]") as caught:
        allocator(URL).require_driver()
    assert caught.value.reason == "POSTGRESQL_NOT_INSTALLED"
