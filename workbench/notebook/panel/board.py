"""The widget behind a panel: a few traits, one small script.

Not plotly's FigureWidget: it sends 5 MB for each figure, has no back-pressure, and stays empty for
ever when its module takes more than 2 s to load, as happens beside a busy training. Here the page
gets whole frames and draws the newest; plotly.js goes over once a page, when the page asks.
"""

from __future__ import annotations

import functools
import gzip
from importlib import resources
from pathlib import Path
from typing import Any

import anywidget
import plotly
import traitlets

ON_REQUEST = (
    "parts.js",
    "lists.js",
    "tables.js",
    "options.js",
    "faults.js",
    "watching.js",
    "layout.js",
    "timeline.js",
    "charts.js",
    "figures.js",
)
_HERE = resources.files("workbench.notebook.panel")


def script(name: str) -> str:
    """A script of this folder, without indentation and comments: it goes with every panel."""
    lines = (line.strip() for line in (_HERE / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def on_request() -> str:
    """The scripts a page asks for once it shows a panel, as one module."""
    return "\n".join(map(script, ON_REQUEST))


class Board(anywidget.AnyWidget):
    """The traits a page sees; only the kernel writes them.

    frame, lists, sample: JSON bytes of a snapshot, see frame.py. beat: the kernel's clock (s since
    the epoch), a sign of life. note: a command under way or refused, {kind: busy|error, verb, text,
    args} or {}. page: {texts, big}.
    """

    # Text, not a path: anywidget watches files and keeps such widgets alive after close().
    _esm = script("board.js")
    _css = (_HERE / "board.css").read_text(encoding="utf-8")

    frame = traitlets.Bytes().tag(sync=True)
    lists = traitlets.Bytes().tag(sync=True)
    sample = traitlets.Bytes().tag(sync=True)
    beat = traitlets.Float().tag(sync=True)
    note = traitlets.Dict().tag(sync=True)
    page = traitlets.Dict().tag(sync=True)

    def hear_at_once(self) -> None:
        """Take commands while a cell runs.

        ipykernel 7.4 sends what the page says to the loop that last wrote here, which is the main
        one: a click would wait for the cell to end. The page's own choice is a subshell.
        """
        comm: Any = self.comm
        if hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = _as_the_page_chose

    def close(self) -> None:
        """Close the widget and the layout ipywidgets made for it."""
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()


def _as_the_page_chose(_data: object, default: str | None) -> str | None:
    return default


@functools.cache
def plotly_js() -> bytes:
    """plotly.js of the installed plotly, gzip: 1.6 MB instead of 4.8."""
    path = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return gzip.compress(path.read_bytes(), compresslevel=3)
