"""Refuse a public package whose types a reader's checker must guess: `pyright --verifytypes`, 100 % of each.

    python tools/check_public_types.py

The packages are laid out as an install has them, since here they come from several folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ("gpuscale.api", "gpuscale.client", "gpuscale.testing")


def lay_out(folder: Path) -> None:
    """An environment in `folder` with gpuscale and what is installed here."""
    venv.create(folder, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    (site / "installed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    (site / "gpuscale").mkdir()
    for package in (*ROOT.glob("services/*/gpuscale/*/"), *ROOT.glob("protos/gpuscale/*/")):
        (site / "gpuscale" / package.name).symlink_to(package)


def main() -> None:
    """Check this repository."""
    failed = ""
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        path = os.pathsep.join([str(Path(folder, "bin")), os.environ.get("PATH", os.defpath)])
        for name in PUBLIC:
            command = [sys.executable, "-m", "pyright", "--verifytypes", name, "--ignoreexternal"]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                env={**os.environ, "PATH": path},
            )
            failed += done.stdout + done.stderr if "Type completeness score: 100%" not in done.stdout else ""
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
