"""An exception on a rank as plain data, short enough to be read in a notebook."""

from __future__ import annotations

from workbench.engine import source
from workbench.engine.trainer import is_peer_gone
from workbench.errors import WorkbenchError, WorldLostError

# What a user is shown of an exception: lines of cells it crossed, characters of its text.
MOST_LINES, MOST_CHARS = 8, 400


def told(error: BaseException) -> dict:
    """An exception as plain data: class, sentence, and the user's lines that led to it."""
    if is_peer_gone(error):
        text = "another rank left the process group"
        return {"name": WorldLostError.__name__, "text": text, "lines": []}
    is_ours = isinstance(error, WorkbenchError)
    cause = error.__cause__ if is_ours else error
    lines = source.report(cause, "")["traceback"] if cause is not None else []
    if len(lines) > MOST_LINES:
        folded = f"... {len(lines) - MOST_LINES + 1} more lines ..."
        lines = [*lines[: MOST_LINES // 2], folded, *lines[1 - MOST_LINES // 2 :]]
    text = str(error) if is_ours else source.report(error, "")["text"]
    if not is_ours:
        # torch writes essays: the first line says what happened, the log has the rest.
        text = (text.strip().splitlines() or [""])[0][:MOST_CHARS]
    return {"name": type(error).__name__, "text": text, "lines": lines}
