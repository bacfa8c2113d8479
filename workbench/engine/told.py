"""An exception on a rank as plain data, short enough to be read in a notebook."""

from __future__ import annotations

import traceback
from pathlib import Path

from workbench.engine import source
from workbench.errors import WorkbenchError, WorldLostError

# What a user is shown of an exception: lines of cells it crossed, characters of its text.
MOST_LINES, MOST_CHARS = 8, 400
# How torch tells that a peer went away or did not come; gloo, then NCCL.
PEER_GONE = ("Connection closed by peer", "Connection reset", "Timed out waiting", "pair closure")


def told(error: BaseException) -> dict:
    """An exception as plain data: class, sentence, and the user's lines that led to it."""
    if is_peer_gone(error):
        text = (
            "the ranks lost each other: one left, or they did different things in one step. Look "
            "for a branch that depends on data or on the rank"
        )
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


def raised_by_user(error: BaseException) -> bool:
    """Whether the exception was raised in so many words, not found by torch."""
    frames = traceback.extract_tb(error.__traceback__)
    last = (frames[-1].line or "") if frames else ""
    return last.lstrip().startswith(("raise", "assert"))


def raised_by_us(error: BaseException) -> bool:
    """Whether a name or an attribute is missing in this package's own code."""
    if not isinstance(error, (AttributeError, NameError, ImportError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(str(Path(__file__).parent))


def is_peer_gone(error: BaseException) -> bool:
    """Whether a collective failed because another rank left or did not come."""
    return isinstance(error, WorldLostError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE)
    )
