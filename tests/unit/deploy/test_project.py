"""What pyproject.toml and the suite promise: no library with a known hole, and no test that may fail and pass."""

import tomllib

from packaging.requirements import Requirement

from tests.unit.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_h11_without_its_request_smuggling_alone_is_taken() -> None:
    """CVE-2025-43859."""
    every = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    [h11] = [found for found in map(Requirement, every) if found.name == "h11"]
    assert not h11.specifier.contains("0.15.0")
    assert h11.specifier.contains("0.16.0")


def test_no_test_is_run_again_until_it_passes() -> None:
    for name in ("pyproject.toml", "requirements-dev.txt", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "rerun" not in text, name
        assert "flaky" not in text, name
