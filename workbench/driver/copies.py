"""Copies: what the driver does about those that ranks keep in each other's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import CheckpointError
from workbench.spec.formats import size

if TYPE_CHECKING:
    from workbench.driver.run import Run

# Where a recovery had the state from.
SOURCE = "copies in memory"


def or_newer(run: Run, replies: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """A training that has gone back to copies, or to a newer checkpoint -> replies, from where."""
    step = replies[0]["step"]
    saved = of_this_branch(run)
    newer = takewhile(lambda one: step < one["step"] <= run.step_now, saved)
    return first_whole(run, newer, replies) or (replies, SOURCE)


def of_this_branch(run: Run) -> list[dict[str, Any]]:
    """The checkpoints that the training has come by, the newest first; the one it began from last.

    What was saved before it went back is of a curve that was left.
    """
    saved, origin = run.checkpoints(), run.origin
    if origin is None:
        return saved[::-1]
    since = [one for one in saved if one["time_s"] >= origin["since_s"]]
    before = []
    if Path(origin["path"]).parent == run.directory / "checkpoints":
        before = [one for one in saved if one["time_s"] < origin["time_s"]]
    return [*since[::-1], origin, *before[::-1]]


def first_whole(
    run: Run, saved: Iterable[dict[str, Any]], replies: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str] | None:
    """The training from the first of these checkpoints that is whole -> replies, from where."""
    for one in saved:
        try:
            told = run.engines.call("restore", str(Path(one["path"]).resolve()))
        except CheckpointError as error:
            run.tell("error", str(error))
            continue
        return [{**reply, "step": told[0]["step"]} for reply in replies], one["name"]
    return None


class Copying:
    """Tells what protects a training, when that changes."""

    def __init__(self) -> None:
        self._told: tuple | None = None

    def look(self, run: Run, replies: Sequence[dict[str, Any]]) -> None:
        """replies: of a slice."""
        every, copied = (
            run.options.replicate_state,
            [one["copied"] for one in replies if one.get("copied")],
        )
        now = str(run.layout), len(run.outages.all)
        if not every or now == self._told:
            return
        if run.layout.world_size == 1:
            run.happened("uncopied", layout=run.layout)
        elif len(copied) == len(replies) and all(one["layout"] == now[0] for one in copied):
            sent_bytes = sum(one["sent_bytes"] for one in copied)
            if not sent_bytes:
                run.happened("uncopied", layout=run.layout)
            else:
                run.happened(
                    "copied", step=copied[0]["step"], every=every, size=size(sent_bytes),
                    took_ms=round(max(one["took_ms"] for one in copied), 1),
                )  # fmt: skip
        else:
            return
        self._told = now
