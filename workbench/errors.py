"""What the workbench says when something cannot be done: one sentence each.

A message names what, with which values, and what to type. Errors made on a rank travel to the
notebook as class name and text, and are raised there as the same class (`rebuilt`).
"""

from __future__ import annotations


class WorkbenchError(Exception):
    """Base of every error a user may meet; shown in a notebook as one line."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this instead of printing a stack: the sentence is the message.
        notes = getattr(self, "__notes__", [])
        return [f"{type(self).__name__}: {self}", *notes]


class InputError(WorkbenchError):
    """An option or argument that cannot be taken as given."""


class StartError(WorkbenchError):
    """Engines that did not come up."""


class EnginesError(WorkbenchError):
    """A command to engines that are not there, or a rank that is gone."""


class LayoutError(WorkbenchError):
    """A strategy or degree that does not fit the ranks or the model."""


class RecipeError(WorkbenchError):
    """A recipe with something missing, or whose parts do not fit together."""


class RunError(WorkbenchError):
    """A command that does not fit the state of the run."""


class CheckpointError(WorkbenchError):
    """A checkpoint that cannot be written, found, read or trusted."""


class RankError(WorkbenchError):
    """An exception raised by the user's code on one or more ranks."""


class TrainingLostError(RunError):
    """A rank could not keep its part of the training when the ranks met again."""


class WorldLostError(WorkbenchError):
    """A rank left the process group while this one waited for it; never the first cause."""


def all_errors() -> dict[str, type[WorkbenchError]]:
    """Every error class by its name."""
    return {kind.__name__: kind for kind in (WorkbenchError, *WorkbenchError.__subclasses__())}


def rebuilt(name: str, text: str) -> WorkbenchError:
    """The error a rank raised, as its own class where it is one of ours, else a RankError."""
    kind = all_errors().get(name)
    return kind(text) if kind else RankError(f"{name}: {text}")
