"""Refusal: why a model cannot be cut by itself, in one sentence that names the user's line."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

from workbench.engine.source import is_cell
from workbench.engine.units import example
from workbench.errors import LayoutError

LOOKS_AT_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")


class UnrecordableError(Exception):
    """What a model does that no tape can hold; the subject of the sentence is the model.

    parts_help: whether it is of no matter once the recipe names the parts.
    """

    def __init__(self, what: str, *, parts_help: bool = True) -> None:
        super().__init__(what)
        self.parts_help = parts_help


def refused(error: Exception, model: nn.Module) -> LayoutError:
    """The error to raise for one that the forward of the model raised while it was recorded."""
    says = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UnrecordableError):
        what = says
    elif type(error).__name__ in LOOKS_AT_VALUES:
        what = "looks at values"
    else:
        what = f"does not run without values ({type(error).__name__}: {says})"
    text = f"{type(model).__name__}{_place(error)} {what}, so that it cannot be cut by itself."
    if getattr(error, "parts_help", True):
        return LayoutError(
            f"{text} Give its parts in the order they are called: def stages(model): "
            f"return {example(model)}"
        )
    return LayoutError(text)


def _place(error: Exception) -> str:
    """` in `if x.sum() > 0:` (cell 3, line 7)`: the last line that is the user's; "" without."""
    here, theirs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_cell(frame.filename) or not frame.filename.startswith((here, theirs, "<"))
    ]
    if not frames:
        return ""
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    frame = (own or frames)[-1]
    file = frame.filename[1:-1] if is_cell(frame.filename) else Path(frame.filename).name
    return f" in `{frame.line}` ({file}, line {frame.lineno})"
