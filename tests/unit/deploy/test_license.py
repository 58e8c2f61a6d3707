"""The project says its license, and the image the licenses of all that is in it."""

import hashlib
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from tests.unit.docs.pages import ROOT

NOTICES = ROOT / "tools" / "third_party_notices.py"
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of LICENSE-2.0.txt as the Apache Software Foundation publishes it."""


def notices(path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        [sys.executable, NOTICES], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_license_is_the_apache_license_to_the_letter_and_named_wherever_one_looks() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "[Apache License 2.0](LICENSE)" in (ROOT / "README.md").read_text()


def test_the_image_has_the_notices_of_what_was_installed_into_it() -> None:
    build, _, shipped = (ROOT / "Dockerfile").read_text().partition("\nFROM ${PYTHON}\n")
    command = build.partition(" pip --python ")[2]
    assert "/opt/gpuscale/bin/python tools/third_party_notices.py > /opt/gpuscale/share/licenses/" in command
    assert "cp LICENSE /opt/gpuscale/share/licenses/" in command
    assert "image.licenses=Apache-2.0" in shipped


def test_every_installed_package_is_listed_with_its_license_and_the_texts_it_brings() -> None:
    done = notices()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    installed = {
        f"{one.name} {one.version}" for one in distributions() if not one.name.startswith("gpuscale")
    }
    assert len(installed) > 50
    assert installed <= set(lines)
    assert lines.count("=" * 80) == len(installed)
    assert "License: LGPL-3.0-only" in lines
    assert "GNU LESSER GENERAL PUBLIC LICENSE" in done.stdout


def test_a_package_that_states_no_license_is_not_shipped(tmp_path: Path) -> None:
    metadata = tmp_path / "nameless-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: nameless\nVersion: 1.0\n")
    done = notices(tmp_path)
    assert (done.returncode, done.stderr.strip()) == (1, "nameless 1.0 states no license")
