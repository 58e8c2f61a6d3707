"""Write the reference pages of docs/: what the code and the contract say of themselves.

python tools/generate_docs.py          writes docs/reference/*.md
python tools/generate_docs.py --check  fails when a committed page differs from what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import reference_alerts
import reference_api
import reference_cli
import reference_errors
import reference_health
import reference_metrics
import reference_settings

PAGES = Path(__file__).resolve().parent.parent / "docs/reference"


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    return {
        "alerts.md": reference_alerts.page(),
        "cli.md": reference_cli.page(),
        "errors.md": reference_errors.page(),
        "health.md": reference_health.page(),
        "metrics.md": reference_metrics.page(),
        "settings.md": reference_settings.page(),
        **reference_api.pages(),
    }


def main() -> None:
    """Write them, or say which are stale."""
    parser = argparse.ArgumentParser(description="Write docs/reference from the code and the contract.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    check: bool = parser.parse_args().check
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if check and stale:
        sys.exit(f"stale in docs/reference: {', '.join(stale)}; run: make docs")
    if not check:
        PAGES.mkdir(exist_ok=True)
        for name in stale:
            if name in wanted:
                (PAGES / name).write_text(wanted[name], encoding="utf-8")
            else:
                (PAGES / name).unlink()
        print(f"{len(stale)} of {len(wanted)} pages written" if stale else "all pages are up to date")


if __name__ == "__main__":
    main()
