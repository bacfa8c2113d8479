"""Which names the text of a cell binds at its top level."""

from __future__ import annotations

import dis
from types import CodeType


def code_of(text: str) -> CodeType | None:
    """The cell compiled, not run; None where it is no plain Python (IPython has its own syntax)."""
    try:
        return compile(text, "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def bound(text: str) -> set[str]:
    """Names that the cell binds at its top level; none where it is no plain Python."""
    code = code_of(text)
    if code is None:
        return set()
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
