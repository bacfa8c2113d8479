"""What a magic has shown itself is not shown again as the value of its cell.

`run = %dist_train digits` shows the panel, and so does the line without `run =`, whose value the
cell would then show once more. Python does not tell a magic which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from workbench.driver.session import in_kernel
from workbench.notebook import show

Way = Callable[[Any], None]


def _as_usual(_value: object) -> None:
    # How a printer says that the other formats are to be used.
    raise NotImplementedError


def _panel(run: Any) -> None:
    from workbench.notebook.panel import Panel
    from workbench.notebook.panel.still import as_text

    if in_kernel():
        display(Panel(run))
    else:
        print(as_text(run.snapshot()))  # noqa: T201 - a terminal has no other view


def _itself(panel: Any) -> None:
    panel._ipython_display_()


# By name: loading the extension must not import them.
WAYS: dict[tuple[str, str], Way] = {
    ("workbench.driver.engines", "Engines"): _as_usual,
    ("workbench.driver.cells", "CellResult"): _as_usual,
    ("workbench.driver.run", "Run"): _panel,
    ("workbench.driver.watching", "Watching"): _panel,
    ("workbench.notebook.panel.panel", "Panel"): _itself,
    ("workbench.notebook.show", "Table"): _as_usual,
    ("workbench.notebook.show", "SavedName"): _as_usual,
    ("workbench.notebook.show_faults", "Stacks"): _as_usual,
}
BUNDLES = {
    ("workbench.driver.engines", "Engines"): show.engines_bundle,
    ("workbench.driver.cells", "CellResult"): show.cell_bundle,
}


class Shown:
    """Remembers for the length of a cell what was shown in it."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._values: list[Any] = []

    def display(self, value: Any, *, silent: bool = False) -> Any:
        """Show a value now, and not once more -> the value."""
        if not silent:
            display(value)
        return self.skip(value)

    def say(self, value: Any, text: str, *, silent: bool = False) -> Any:
        """Show a line of text in place of a value -> the value."""
        if not silent:
            print(text)  # noqa: T201 - a magic's output
        return self.skip(value)

    def skip(self, value: Any, *, silent: bool = True) -> Any:
        """Do not show this as the cell's value -> the value. silent: False does nothing."""
        if silent:
            self._values.append(value)
        return value

    def install(self) -> None:
        """Have the shell ask here first."""
        for (module, name), way in WAYS.items():
            self._displays.for_type_by_name(module, name, self._once(way))
        for (module, name), bundle in BUNDLES.items():
            self._bundles.for_type_by_name(module, name, bundle)
        self._shell.events.register("post_run_cell", self._forget)

    def remove(self) -> None:
        """Undo `install`."""
        for kinds, formatter in ((WAYS, self._displays), (BUNDLES, self._bundles)):
            for module, name in kinds:
                formatter.pop(f"{module}.{name}", None)
        self._shell.events.unregister("post_run_cell", self._forget)

    @property
    def _displays(self) -> Any:
        return self._shell.display_formatter.ipython_display_formatter  # type: ignore[union-attr]

    @property
    def _bundles(self) -> Any:
        return self._shell.display_formatter.mimebundle_formatter  # type: ignore[union-attr]

    def _once(self, way: Way) -> Way:
        def printer(value: Any) -> None:
            for place, seen in enumerate(self._values):
                if seen is value:
                    del self._values[place]
                    return
            way(value)

        return printer

    def _forget(self, *_: object) -> None:
        self._values.clear()
