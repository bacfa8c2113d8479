"""Frame: the steps of a run as a table, for pandas, a CSV or a Parquet file.

A table is a dict of columns of one length, which `pandas.DataFrame` takes as it is. Times and bytes
come from the ranks' journals, which nothing thins. pandas and pyarrow are no dependencies: each is
asked for where it is needed, and a CSV needs neither.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.driver import files, journals
from workbench.errors import InputError, RunError
from workbench.spec.records import COLUMNS

if TYPE_CHECKING:
    from workbench.driver.history import History

Table = dict[str, np.ndarray]
# What a rank tells of a step besides its parts, which are times, `<part>_s`.
LOSS, WALL, SENT = "loss", "wall_s", "sent_bytes"
CSV, PARQUET = ENDINGS = ".csv", ".parquet"


def table(history: History, directory: str | Path, *, by_rank: bool = False) -> Table:
    """One row a step, or with `by_rank` one a step and rank.

    directory: the run's. Columns: step; rank, where there is one a rank; loss; rate (per second, of
    all ranks, as the curve has it); wall_ms, forward_ms and the other parts the journals have,
    other_ms (what no part accounts for), sent_bytes. Times are means over the ranks that took part,
    bytes are sums; by rank, loss is the rank's part of the loss of the step. NaN: not known.

    After a restore steps are taken again. Each is in the table once, as it was taken last; those
    after the restored one are gone, as they are from the curve. The journals keep them all.

    Raises RunError where there are steps and no journal.
    """
    ranks = read(directory)
    steps = np.array(history.steps, np.int64)
    if not ranks and len(steps):
        raise RunError(
            f"No rank's journal can be read in {Path(directory, 'journal')}, so times and bytes of "
            f"the {len(steps):,} steps are not known. run.history has their loss and rate."
        )
    ranks = ranks or [(0, _untold())]
    if by_rank:
        return _by_step_and_rank(steps, ranks)
    columns: Table = {"step": steps, LOSS: np.array(history.loss, np.float64)}
    columns["rate"] = np.array(history.rate, np.float64)
    return {**columns, **_summed(steps, ranks)}


def to_frame(history: History, directory: str | Path, *, by_rank: bool = False) -> Any:
    """`table` as a pandas DataFrame; see there for its rows and columns."""
    return _library("pandas", "a CSV file needs nothing").DataFrame(
        table(history, directory, by_rank=by_rank)
    )


def write(columns: Table, path: str | Path, *, force: bool = False) -> Path:
    """Write a table as the end of the name says, .csv or .parquet -> its path.

    In a CSV numbers have all their digits, and what is not known is empty; in Parquet it is null.
    """
    if files.ending(path, ENDINGS) == CSV:
        return files.written(path, lambda partial: _write_csv(columns, partial), force=force)
    arrow = _library("pyarrow", "a CSV file needs nothing")
    parquet = importlib.import_module("pyarrow.parquet")
    whole = arrow.table({k: arrow.array(v, from_pandas=True) for k, v in columns.items()})
    return files.written(path, lambda partial: parquet.write_table(whole, partial), force=force)


def read(directory: str | Path) -> list[tuple[int, Table]]:
    """Each rank with the columns of its journal, steps rising, each step as it was taken last.

    A line cut short, whose process was killed, is left out. Rank 0 has work in every layout, so it
    tells when steps were taken again: what other ranks wrote of them before that is gone, too.

    Raises RunError for a file that cannot be opened.
    """
    found: list[tuple[int, Table]] = []
    again: tuple[np.ndarray, np.ndarray] | None = None
    for rank, path in journals.paths(directory).items():
        parts = [_in_ms(line) for line in journals.kept(journals.lines(path))]
        if not parts:
            continue
        columns = _stacked(parts)
        written_s, since_s = columns.pop("written_s"), columns.pop("since_s")
        if rank == 0:
            again = columns["step"], since_s
        elif again is not None:
            at = np.searchsorted(again[0], columns["step"])
            ends = np.append(again[1], -np.inf)  # beyond rank 0's last step: its line is lost
            keep = written_s >= ends[at]
            columns = {name: column[keep] for name, column in columns.items()}
        found.append((rank, columns))
    return found


def _by_step_and_rank(steps: np.ndarray, ranks: list[tuple[int, Table]]) -> Table:
    parts = [
        {"step": of["step"], "rank": np.full(len(of["step"]), rank), **of} for rank, of in ranks
    ]
    columns = _stacked(parts)
    order = np.lexsort((columns["rank"], columns["step"]))
    chosen = order[np.isin(columns["step"][order], steps)]
    return {name: column[chosen] for name, column in columns.items()}


def _summed(steps: np.ndarray, ranks: list[tuple[int, Table]]) -> Table:
    """For each of the steps the mean of times over its ranks, and the sum of bytes."""
    told = _stacked([of for _, of in ranks])
    keep = np.isin(told["step"], steps)
    told = {name: column[keep] for name, column in told.items()}
    at = np.searchsorted(steps, told["step"])
    num_ranks = np.bincount(at, minlength=len(steps)).astype(np.float64)
    num_ranks[num_ranks == 0] = np.nan  # on no disk
    means = {
        name: np.bincount(at, column, minlength=len(steps)) / num_ranks
        for name, column in told.items()
        if name.endswith("_ms") or name == SENT
    }
    return {**means, SENT: means[SENT] * num_ranks}


def _in_ms(line: Mapping[str, Any]) -> Table:
    """One line as columns: parts in milliseconds, and what no part accounts for."""
    # None, which is what is not known, becomes NaN, and so does every sum it is in.
    told = {name: np.array(values, np.float64) for name, values in line["columns"].items()}
    num_steps = len(told[LOSS])
    parts = {name: column for name, column in told.items() if name.endswith("_s") and name != WALL}
    other_s = np.maximum(0.0, told[WALL] - sum(parts.values(), np.zeros(num_steps)))
    times = {WALL: told[WALL], **parts, "other_s": other_s}
    return {
        "step": np.arange(line["first"], line["first"] + num_steps),
        LOSS: told[LOSS],
        **{f"{name[:-2]}_ms": 1e3 * column for name, column in times.items()},
        SENT: told[SENT],
        "written_s": np.full(num_steps, line["time_s"]),
        "since_s": np.full(num_steps, line["since_s"]),
    }


def _untold() -> Table:
    """The columns of a journal in which no step is."""
    none = {"first": 1, "time_s": 0.0, "since_s": 0.0, "columns": {name: [] for name in COLUMNS}}
    columns = _in_ms(none)
    return {name: columns[name] for name in columns if name not in ("written_s", "since_s")}


def _stacked(parts: list[Table]) -> Table:
    """One below the other; what one lacks is not known there."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    lack = [np.full(len(part["step"]), np.nan) for part in parts]
    return {
        name: np.concatenate([part.get(name, lack[i]) for i, part in enumerate(parts)])
        for name in names
    }


def _write_csv(columns: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(columns)
        for row in zip(*(column.tolist() for column in columns.values()), strict=True):
            out.writerow("" if value != value else value for value in row)  # noqa: PLR0124 - NaN


def _library(name: str, instead: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(
            f"{name} is not installed here: %pip install {name} does it; {instead}."
        ) from None
