"""Needed: which earlier cells a cell rests on, for a process that has run none of them."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType

from workbench.spec.bound import bound, code_of

MOST_CELLS = 500


def needed(cell: tuple[int, str], before: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """The cells that bind a name the cell uses, and what these use in turn, then the cell itself.

    Each with its number. before: the cells that were run, the oldest first. Those that use
    IPython's own syntax count as binding nothing.
    """
    wanted = _used(cell[1])
    chosen = []
    for one in reversed(list(before)):
        if wanted & bound(one[1]):
            chosen.append(one)
            wanted |= _used(one[1])
    return [*reversed(chosen), cell]


def _used(text: str) -> set[str]:
    """Names a cell takes from outside: read before it binds them, or in what it defines."""
    code = code_of(text)
    if code is None:
        return set()
    used, here = set(), set()
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            here.add(step.argval)
        elif step.opname == "LOAD_NAME" and step.argval not in here:
            used.add(step.argval)
    inner = {
        step.argval
        for part in _parts(code)
        for step in dis.get_instructions(part)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return used | (inner - bound(text))


def _parts(code: CodeType) -> Iterator[CodeType]:
    """All that is defined in a code object."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _parts(constant)
