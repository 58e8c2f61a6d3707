"""Prints the license notices of every package that is installed beside gpuscale: `python third_party_notices.py > FILE`.

Run by the Python of the environment that is shipped, so that the notices are those of the versions in it. Needs the
standard library alone. A package that states no license ends it with an error: it may not be shipped unseen.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

OWN = "gpuscale"
"""This package, and the beginning of the names of its add-ons."""
TEXTS = re.compile(
    r".*\.dist-info/licenses/.*|(.*/)?(licen[cs]es?|copying|notices?|copyright)([-_.][\w.-]*)?(?<!\.py)(?<!\.js)",
    re.IGNORECASE,
)
"""Paths of the files that hold a license or a notice: by PEP 639, or by their name, of parts that a package bundles too."""
RULE = "=" * 80


def stated_license(package: Distribution) -> str:
    """The license that a package states, in one line; empty where it states none."""
    metadata = package.metadata
    fields = ("License-Expression", "License")
    stated = next((str(text) for field in fields for text in metadata.get_all(field) or ()), "")
    classifiers = [str(one) for one in metadata.get_all("Classifier") or ()]
    named = "; ".join(one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::"))
    # Some put the whole text where its name belongs.
    return stated if stated and "\n" not in stated else named or stated.strip().partition("\n")[0]


def texts(package: Distribution) -> Iterator[tuple[str, str]]:
    """Name and text of each license file that a package brings."""
    for file in package.files or ():
        path = Path(str(file.locate()))
        if TEXTS.fullmatch(str(file)) and path.is_file():
            yield str(file), path.read_bytes().decode("utf-8", "replace").strip()


def notices(packages: Iterable[Distribution]) -> Iterator[str]:
    """The lines of the notices, package by package.

    Raises:
        SystemExit: a package states no license and brings no text of one.
    """
    for package in sorted(packages, key=lambda one: one.name.lower()):
        if package.name.startswith(OWN):
            continue
        found = dict(texts(package))
        stated = stated_license(package)
        if not (stated or found):
            raise SystemExit(f"{package.name} {package.version} states no license")
        yield from (RULE, f"{package.name} {package.version}", f"License: {stated or 'see below'}")
        for name, text in found.items():
            yield from ("", f"--- {name}", "", text)
        yield ""


if __name__ == "__main__":
    sys.stdout.write("Packages in this environment, and the notices that come with them.\n\n")
    sys.stdout.writelines(f"{line}\n" for line in notices(distributions()))
