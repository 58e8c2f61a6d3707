"""Which images may be run: those that a pattern of the adapter's own file lets through, and no other. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import re2

_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,511}")


def check_image(image: str) -> None:
    """Check that a text can be the name of an image.

    Raises:
        ValueError: it cannot.
    """
    if not _REFERENCE.fullmatch(image) or "//" in image:
        raise ValueError("must be the name of an image, such as registry.example/team/worker:1.2")


def is_allowed(image: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the whole name, as it is written, tag or digest with it; no pattern lets nothing through.

    A `*` stands for any characters but a slash, so that it never reaches into another registry or folder of one.
    """
    return any(_compiled(pattern).fullmatch(image) for pattern in patterns)


def _compiled(pattern: str) -> re2.Pattern:
    return re2.compile("[^/]*".join(re2.escape(part) for part in pattern.split("*")))
