"""One sentence for a name that is not known: the known ones and the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """`No recipe named 'digit'. Did you mean 'digits'? Known: digits, pytext.`"""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"No {kind} named {given!r}.{hint} Known: {', '.join(names) or 'none'}."
