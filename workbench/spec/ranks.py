"""Ranks as a user types them: `0,2`, `0-3`, `all`."""

from __future__ import annotations

import re

from workbench.errors import InputError

PART = re.compile(r"(\d+)(?:-(\d+))?")
# A span is not yet held against the ranks there are, and must not fill the memory.
MOST = 100_000


def parse_ranks(text: str) -> list[int] | None:
    """The ranks that `text` names, each once and in order; None for `all`.

    Raises InputError for text that names none.
    """
    if text.strip() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MOST:
            raise InputError(f"ranks {text!r}: use numbers and spans such as 0,2 or 0-3, or all.")
        found.update(range(first, last + 1))
    return sorted(found)
