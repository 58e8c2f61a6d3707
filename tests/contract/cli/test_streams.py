"""What the shell made of standard output is no reason for a traceback, or for data that cannot be read again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

CTL = (sys.executable, "-m", "gpuscale.cli.main")


def run(shell: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    words, own = ["sh", "-c", shell, "sh", *CTL], os.environ | environment
    return subprocess.run(words, env=own, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "in the middle"])
def test_a_full_disk_is_said(unbuffered: str) -> None:
    ran = run('"$@" explain exit-codes > /dev/full', PYTHONUNBUFFERED=unbuffered)
    assert (ran.returncode, ran.stderr) == (1, b"error: No space left on device\n")


def test_closed_streams_take_nothing_and_harm_nobody() -> None:
    """What took the number of standard error, such as a socket of gRPC, ended commands that wrote to it."""
    program = (
        "import os, sys, gpuscale.cli as cli\nsys.argv[1:] = ['explain', 'exit-codes']\ntry: cli.start()\n"
        "except SystemExit as e: sys.exit(e.code or any(os.write(n, b'text') != 4 or not os.get_inheritable(n) for n in (1, 2)))"
    )
    words = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(words, timeout=60, check=False).returncode == 0


def test_data_is_the_same_in_every_locale(tmp_path: Path) -> None:
    file = tmp_path / "contexts.toml"
    file.write_text('[contexts."gr\u00f6\u00dfe"]\naddress = "127.0.0.1:1"\n')
    for options in ("", " -o yaml"):
        ran = run(f'"$@" config view{options}', PYTHONIOENCODING="ascii", GPUSCALE_CONTEXTS=str(file))
        assert ran.returncode == 0, ran.stderr
        found = YAML(typ="safe").load(ran.stdout.decode())
        assert found["contexts"] == {"gr\u00f6\u00dfe": {"address": "127.0.0.1:1"}}
