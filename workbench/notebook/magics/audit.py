"""%dist_audit: what listens, who may speak there, and what was refused."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import magic_arguments

from workbench.driver import current
from workbench.notebook.line import from_line
from workbench.notebook.magics import Commands
from workbench.notebook.show import Table

COLUMNS = ("owner", "socket", "use", "allowed", "encrypted")


@magics_class
class AuditMagics(Commands):
    """Look at the doors."""

    @magic_arguments()
    @line_magic
    @from_line
    def dist_audit(self, options: Any) -> Any:
        """Every socket that listens for the ranks: whose, where, who may speak, is it encrypted.

        Also how many messages and connections were refused because nobody of this cluster sent
        them, and files that other users of this machine may read.

        Example::

            %dist_audit

        Returns a list of dicts, shown as a table.
        In Python: ``workbench.driver.audit.sockets(engines)``
        """
        from workbench.driver import audit

        engines = current.engines()
        rows = audit.sockets(engines)
        folders = [engines.directory] + ([engines.run.directory] if engines.run else [])
        title = "; ".join(
            [
                _reach(rows),
                _refused(audit.refused(engines)),
                *_exposed([str(path) for path in audit.exposed(*folders)]),
            ]
        )
        return self.shown.display(Table(rows, COLUMNS, title), silent=options.silent)


def _reach(rows: list[dict[str, Any]]) -> str:
    """How far they are reached: `22 sockets listen, all on this machine alone`."""
    far = [row for row in rows if not row["local"]]
    many = f"{len(rows)} sockets listen"
    if not far:
        return f"{many}, all on this machine alone"
    named = ", ".join(f"{row['owner']} {row['socket']}" for row in far)
    return f"{many}; reached from other machines: {named}"


def _refused(counts: dict[str, int]) -> str:
    if not counts:
        return "nobody was refused"
    by = ", ".join(f"{owner} {number:,}" for owner, number in sorted(counts.items()))
    return f"messages and connections refused: {sum(counts.values()):,} ({by})"


def _exposed(paths: list[str]) -> list[str]:
    if not paths:
        return []
    return [f"other users may open {len(paths)} of its files, such as {paths[0]}"]
