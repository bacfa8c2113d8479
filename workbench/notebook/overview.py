"""All magics at a glance, from their own help."""

from __future__ import annotations

import inspect
import re
from typing import Any

from workbench.notebook.show import Table

# A help text is made of sentences, each with the first line of an example.
EXAMPLE = re.compile(r"(?:^|\n\n)(\S[^\n]*(?:\n\S[^\n]*)*)\n\nExample::\n\n +([^\n]+)")


def table(shell: Any) -> Table:
    """Each magic's examples, and what they do."""
    from workbench.notebook.magics import Commands

    rows = []
    for function in shell.magics_manager.magics["line"].values():
        if isinstance(getattr(function, "__self__", None), Commands):
            for what, example in EXAMPLE.findall(inspect.cleandoc(function.parser.description)):
                rows.append({"type": example, "to": " ".join(what.split())})
    return Table(rows, ("type", "to"), "Each with ? at its end shows its options.")
