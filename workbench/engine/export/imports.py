"""Imports of a script: those of the recipe and those of what is put around it, sorted as usual."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

WIDTH = 100


@dataclass(frozen=True, order=True)
class Import:
    """`from module import name as alias`, or `import name as alias` without a module."""

    module: str
    name: str
    alias: str = ""

    @property
    def bound(self) -> str:
        """The name it binds."""
        return self.alias or (self.name if self.module else self.name.partition(".")[0])

    @property
    def package(self) -> str:
        """The package or module at the top."""
        return (self.module or self.name).partition(".")[0]

    @property
    def what(self) -> str:
        """What comes after `import`."""
        return f"{self.name} as {self.alias}" if self.alias else self.name

    def __str__(self) -> str:
        return f"from {self.module} import {self.what}" if self.module else f"import {self.what}"


def imports_of(node: ast.stmt) -> set[Import]:
    """What an import statement binds; nothing for other statements."""
    if isinstance(node, ast.Import):
        return {Import("", one.name, one.asname or "") for one in node.names}
    if isinstance(node, ast.ImportFrom):
        return {Import(node.module or "", one.name, one.asname or "") for one in node.names}
    return set()


def parsed(text: str) -> set[Import]:
    """The imports in a text of nothing else."""
    return {one for node in ast.parse(text).body for one in imports_of(node)}


def rendered(imports: Iterable[Import]) -> str:
    """Import lines: __future__, the standard library, the rest; plain ones first in each."""
    blocks = []
    for _, block in groupby(sorted(imports, key=_key), _section):
        lines = []
        for (_, module), group in groupby(block, lambda one: (not one.module, one.module)):
            found = list(group)
            if not module:
                lines += [str(one) for one in found]
                continue
            lines += _from(module, [one.what for one in found])
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _from(module: str, names: list[str]) -> list[str]:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]


def _section(one: Import) -> int:
    if one.package == "__future__":
        return 0
    return 1 if one.package in sys.stdlib_module_names else 2


def _key(one: Import) -> tuple:
    if not one.module:
        return _section(one), 0, one.name, one.alias
    # Constants, then classes, then functions, as isort has them.
    kind = 0 if one.name.isupper() else 1 if one.name[0].isupper() else 2
    return _section(one), 1, one.module, kind, one.name, one.alias
