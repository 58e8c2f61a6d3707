"""Refuse a change of the contract that breaks programs built on it, unless its commit says so.

    python tools/check_breaking.py

Compares, by `buf breaking`, the contract of this folder with the last commit's, and that of each commit since this file is here
with the one before it. A commit that is to break has a line of its own at the end of its message, which is how a break is
declared before 1.0:

    Breaks-Contract: what and why

From 1.0 on that line excuses nothing but breaks below gpuscale/internal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = "protos/gpuscale/api/contract.binpb"
START = "tools/check_breaking.py"
TRAILER = "Breaks-Contract"
INTERNAL = "gpuscale/internal/"
NEWEST = 50
"""How many changes of the contract are looked at, from the newest."""


def git(root: Path, *arguments: str) -> bytes:
    """What git answers about the repository at `root`."""
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True).stdout


def changes(root: Path) -> list[str]:
    """The commits that changed the contract since the guard is on, the oldest first, after the one they began from."""
    start = git(root, "log", "--diff-filter=A", "--format=%H", "--", START).decode().split()
    since = [f"{start[-1]}..HEAD"] if start else ["-1", "HEAD"]
    found = git(root, "log", f"-{NEWEST}", "--format=%H", *since, "--", CONTRACT).decode().split()
    return [*(start[-1:] if len(found) < NEWEST else []), *reversed(found)]


def breaks(root: Path, before: bytes, after: bytes) -> list[str]:
    """What of a contract no longer holds in another one, a line each."""
    if before == after:
        return []
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "old.binpb"), Path(folder, "new.binpb")
        old.write_bytes(before)
        new.write_bytes(after)
        buf = Path(sys.executable).parent / "buf"
        config = root / "protos" / "buf.yaml"
        command = [str(buf), "breaking", str(new), "--against", str(old), "--config", str(config)]
        # It ends before collecting garbage pays, which takes half of its time.
        environment = {**os.environ, "GOGC": "off"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, env=environment
        )
    if done.returncode and not done.stdout:
        sys.exit(f"buf breaking failed: {done.stderr}")
    return done.stdout.splitlines()


def excused(root: Path, commit: str, broken: list[str]) -> bool:
    """Whether the commit declares its breaks, and may."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    declared = git(root, "log", "-1", f"--format=%(trailers:key={TRAILER})", commit).strip()
    early = version.startswith("0.")
    return bool(declared) and (early or all(INTERNAL in line for line in broken))


def check(root: Path) -> list[str]:
    """What is broken and not declared, a line each."""
    if not (root / ".git").exists():
        return []
    commits = changes(root)
    contracts = {commit: git(root, "show", f"{commit}:{CONTRACT}") for commit in commits}
    said: list[str] = []
    for before, after in pairwise(commits):
        broken = breaks(root, contracts[before], contracts[after])
        if broken and not excused(root, after, broken):
            said += [f"{after[:10]}: {line}" for line in broken]
    here = breaks(root, git(root, "show", f"HEAD:{CONTRACT}"), (root / CONTRACT).read_bytes())
    return said + [f"not committed: {line}" for line in here]


def main() -> None:
    """Check this repository."""
    said = check(ROOT)
    if said:
        sys.exit(
            "\n".join(said)
            + f"\nThe contract breaks. Before 1.0 a commit may, and says so at the end of its message: "
            f"git commit --amend --trailer '{TRAILER}: what and why' (docs/api.md)"
        )


if __name__ == "__main__":
    main()
