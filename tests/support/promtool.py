"""Prometheus' own checker, and what a page of metrics says by Prometheus' own parser."""

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.fixtures import need


def why_unavailable(program: str) -> str | None:
    """Why there is no `prometheus` or `promtool` here, or None."""
    if shutil.which(program) is not None:
        return None
    return f"{program} is not installed (Debian: prometheus; tools/install_test_servers.sh)"


def promtool(*arguments: str | Path, stdin: str = "") -> tuple[int, str]:
    """Run promtool: its exit status, and all that it said. Skips the test where there is none, but fails in CI."""
    need(why_unavailable("promtool"))
    words = ["promtool", *map(str, arguments)]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@lru_cache(maxsize=4)
def samples(text: str) -> tuple[Sample, ...]:
    """Every sample of a page, which is parsed once however many are asked for."""
    return tuple(sample for family in text_string_to_metric_families(text) for sample in family.samples)


def named(text: str, name: str, /, **labels: str) -> list[Sample]:
    """The samples of that name that have these labels; the parser ends the names of all counters in _total."""
    names = (name, f"{name}_total")
    return [one for one in samples(text) if one.name in names and labels.items() <= one.labels.items()]


def value(text: str, name: str, /, **labels: str) -> float:
    """The value of the one sample of that name that has these labels."""
    [found] = named(text, name, **labels)
    return found.value
