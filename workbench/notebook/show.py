"""How what the magics return looks in a notebook: a table, and the same as plain text."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from workbench.driver.echo import named
from workbench.spec.strategy import strategy_of

if TYPE_CHECKING:
    from pathlib import Path

    from workbench.driver.cells import CellResult
    from workbench.driver.clusters import Cluster
    from workbench.driver.engines import Engines
    from workbench.driver.run import Run

STATUS = ("rank", "state", "device", "threads", "pid")
STATUS_ALL = (*STATUS, "host", "log")
# Begins each sentence of a script on why its losses need not be those of the run.
DIFFERS = "What differs:"
CLUSTERS = ("number", "name", "ranks", "state", "goal", "kernel", "started")
CHECKPOINTS = ("name", "step", "layout", "size", "age", "recipe")


class Table(list[dict[str, Any]]):
    """A list of dicts that is shown as a table: `columns` of it under a `title`.

    look: what is shown in place of a row, where its values are not what a reader wants.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        columns: Sequence[str],
        title: str,
        look: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(rows)
        self.columns = columns
        self.title = title
        self._cells = [
            [_text(row.get(name)) for name in columns] for row in (self if look is None else look)
        ]

    def __repr__(self) -> str:
        if not self:
            return self.title
        rows = [list(self.columns), *self._cells]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        title = f"<div>{escape(self.title)}</div>"
        if not self:
            return title
        head = "".join(_cell("th", column) for column in self.columns)
        body = "".join(
            f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in self._cells
        )
        return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class SavedName(str):
    """The name of a checkpoint just written; shown with its step, size and place."""

    shown: str

    def __new__(cls, name: str, shown: str) -> SavedName:
        """The name, and what stands for it on the screen."""
        made = super().__new__(cls, name)
        made.shown = shown
        return made

    def __repr__(self) -> str:
        return self.shown


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _cell(tag: str, text: str) -> str:
    return f'<{tag} style="text-align:left">{escape(text)}</{tag}>'


def ready(engines: Engines, num_cores: int) -> str:
    """One line on engines that are up: `4 ranks on cpu (2 cores), threads each: 1`."""
    ranks = engines.status()
    kind = ranks[0]["device"].split()[0]
    many = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    if kind != "cpu":
        return f"{many} on {', '.join(row['device'] for row in ranks)}: ready"
    cores = f"{num_cores} core{'' if num_cores == 1 else 's'}"
    note = "" if len(ranks) <= num_cores else "; they share the cores, so more ranks are not faster"
    return f"{many} on cpu ({cores}, threads each: {ranks[0]['threads']}): ready{note}"


def line(run: Run) -> str:
    """One line on a run: `digits-3: paused, step 137 of 500, loss 0.31`."""
    return repr(run).removeprefix("<Run ").removesuffix(">")


def switched(run: Run, before: Sequence[Mapping[str, Any]]) -> str:
    """A line on a switch, and one for each note that came with it; before: the events until then.

    `digits-3: pipeline (pp4, 1f1b x8) from step 12 on, in 210 ms, ...`
    """
    known = {id(event) for event in before}
    told = [event for event in run.events if id(event) not in known]
    done = [event["text"] for event in told if event["kind"] == "switch"] or [
        f"already {strategy_of(run.layout)} ({run.layout})"
    ]
    notes = [event["text"] for event in told if event["kind"] == "warning"]
    return "\n".join([f"{run.name}: {done[0]}", *(f"Note: {note}" for note in notes)])


def traced(run: Run, before: Sequence[Mapping[str, Any]], file: str, path: Path) -> SavedName:
    """A trace just written, and which step it has where that is another; before: as above."""
    known = {id(event) for event in before}
    told = [e for e in run.events if e.get("name") == "nearest" and id(e) not in known]
    what = told[-1]["text"] if told else file
    return SavedName(str(path), f"{what}: open it in ui.perfetto.dev")


def status(engines: Engines, *, verbose: bool = False) -> Table:
    """`engines.status()` as a table, with a line on the run."""
    rows = engines.status()
    gone = [row["rank"] for row in rows if row["state"] != "alive"]
    title = f"{len(rows)} ranks, {named(gone)} gone" if gone else f"{len(rows)} ranks"
    title += f"; {line(engines.run)}" if engines.run else "; nothing trained yet"
    if verbose:
        title += f"; limit {engines.timeouts.total_s:g} s; files in {engines.directory}"
    return Table(rows, STATUS_ALL if verbose else STATUS, title)


def exported(run: Run, file: str, script: Path) -> SavedName:
    """A script just written: how to run it, and what its first lines say of its losses."""
    from workbench.driver import exports

    about = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    _, *differences = about.split(DIFFERS)
    lines = [f"{DIFFERS} {' '.join(text.split())}" for text in differences]
    shown = f"{run.layout} as a script: {exports.command(run, file)}"
    return SavedName(str(script), "\n".join([shown, *lines]))


def saved(entry: Mapping[str, Any], exported: Path | None = None) -> SavedName:
    """A checkpoint just written, and where it was exported to."""
    from workbench.spec.formats import size

    large = size(entry["bytes"])
    shown = f"saved {entry['name']}: step {entry['step']:,}, {large}, {entry['path']}"
    if exported is not None:
        shown += f"\nfrom_pretrained reads {exported}"
    return SavedName(entry["name"], shown)


def checkpoints(entries: Sequence[dict[str, Any]], root: str, run: str | None) -> Table:
    """Checkpoints with the names that may be typed: those of `run` by their name alone."""
    from workbench.notebook.panel.texts.en import TEXTS
    from workbench.spec.formats import age, size

    now_s = time.time()
    look = [
        {
            **entry,
            "name": entry["name"] if entry["run"] == run else f"{entry['run']}/{entry['name']}",
            "size": size(entry["bytes"]),
            "age": age(now_s - entry["time_s"], TEXTS),
        }
        for entry in entries
    ]
    many = f"{len(look)} checkpoint{'' if len(look) == 1 else 's'}"
    title = f"{many} in {root}" if look else f"No checkpoint in {root} yet. %dist_save writes one."
    return Table(entries, CHECKPOINTS, title, look)


def clusters(there: Sequence[Cluster]) -> Table:
    """Clusters of other kernels, to choose one from."""
    from workbench.notebook.panel.texts.en import TEXTS
    from workbench.spec.formats import age

    rows = [cluster.row(number) for number, cluster in enumerate(there, 1)]
    look = [{**row, "started": age(row["age_s"], TEXTS)} for row in rows]
    title = f"{len(rows)} clusters: %dist_attach 1 takes the first."
    return Table(rows, CLUSTERS, title, look)


def engines_bundle(engines: Engines) -> dict[str, str]:
    """What a cell shows whose value is `engines`."""
    if engines.stopped:
        return {"text/plain": repr(engines)}
    table = status(engines)
    return {"text/plain": repr(table), "text/html": table._repr_html_()}


def cell_bundle(result: CellResult) -> dict[str, str]:
    """What a cell shows whose value is the result of another one on ranks."""
    rows = [{"rank": rank, "value": result.values.get(rank)} for rank in result.ranks]
    table = Table(rows, ("rank", "value"), repr(result))
    if not result.values:
        return {"text/plain": repr(result)}
    return {"text/plain": repr(table), "text/html": table._repr_html_()}


def stopped(engines: Engines) -> str:
    """One line on engines that were just stopped, and on what is left of their run."""
    text = f"{engines.num_ranks} rank{'' if engines.num_ranks == 1 else 's'} stopped."
    run = engines.run
    if run is None:
        return text
    kept = run.checkpoints()
    last = f"its last checkpoint is {kept[-1]['name']}" if kept else "it has no checkpoint"
    return f"{text} {run.name} ended at step {run.step_now:,}; {last}."
