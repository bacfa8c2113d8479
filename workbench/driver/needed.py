"""Needed: which earlier cells a cell rests on, for a process that has run none of them."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType

MOST_CELLS = 500


def needed(cell: tuple[int, str], before: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """The cells that bind a name the cell uses, and what these use in turn, then the cell itself.

    Each with its number. before: the cells that were run, the oldest first. Those that use
    IPython's own syntax count as binding nothing.
    """
    wanted = _used(cell[1])
    chosen = []
    for one in reversed(list(before)):
        if wanted & _bound(one[1]):
            chosen.append(one)
            wanted |= _used(one[1])
    return [*reversed(chosen), cell]


def _code(text: str) -> CodeType | None:
    try:
        return compile(text, "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _bound(text: str) -> set[str]:
    """Names that a cell binds at its top level."""
    code = _code(text)
    if code is None:
        return set()
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}


def _used(text: str) -> set[str]:
    """Names a cell takes from outside: read before it binds them, or in what it defines."""
    code = _code(text)
    if code is None:
        return set()
    used, bound = set(), set()
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            bound.add(step.argval)
        elif step.opname == "LOAD_NAME" and step.argval not in bound:
            used.add(step.argval)
    inner = {
        step.argval
        for part in _parts(code)
        for step in dis.get_instructions(part)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return used | (inner - _bound(text))


def _parts(code: CodeType) -> Iterator[CodeType]:
    """All that is defined in a code object."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _parts(constant)
