"""Frame: what the ranks told of each step, once each, as columns and as files."""

from __future__ import annotations

import csv
import importlib
import json
import os
import sys

import numpy as np
import pytest

from workbench.driver import frame
from workbench.driver.history import History
from workbench.errors import InputError, RunError
from workbench.spec.records import COLUMNS

WALL_S = 0.010


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "journal").mkdir()
    return tmp_path


def tell(directory, rank, steps, time_s, *, loss=0.5, comm_s: float | None = 0.003):
    """One line of a rank's journal, as engine/remote.py writes it."""
    n = len(steps)
    columns = {
        "loss": [loss + step / 1000 for step in steps],
        "wall_s": [WALL_S + rank / 1000] * n,
        "forward_s": [0.004] * n,
        "comm_s": [comm_s] * n,
        "sent_bytes": [1000 + rank] * n,
    }
    line = {"time_s": time_s, "rank": rank, "first": steps[0], "step": steps[-1]}
    with (directory / "journal" / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({**line, "columns": columns}) + "\n")


def history(steps):
    return History(64, list(steps), [1 + s / 1000 for s in steps], [100.0 + s for s in steps])


def test_a_row_is_a_step_with_the_mean_of_times_and_the_sum_of_bytes(directory):
    for rank in (0, 1):
        tell(directory, rank, [1, 2], 100.0)
        tell(directory, rank, [3], 100.1)
    found = frame.table(history([1, 2, 3]), directory)
    assert list(found) == [
        "step", "loss", "rate", "wall_ms", "forward_ms", "comm_ms", "other_ms", "sent_bytes",
    ]  # fmt: skip
    assert found["step"].tolist() == [1, 2, 3]
    assert found["loss"].tolist() == [1.001, 1.002, 1.003]
    assert found["rate"].tolist() == [101, 102, 103]
    assert found["wall_ms"] == pytest.approx([10.5] * 3)
    assert found["other_ms"] == pytest.approx([3.5] * 3)
    assert found["sent_bytes"].tolist() == [2001] * 3


def test_by_rank_a_row_is_what_one_rank_told_of_one_step(directory):
    for rank in (1, 0):
        tell(directory, rank, [1, 2], 100.0)
    found = frame.table(history([1, 2]), directory, by_rank=True)
    assert list(zip(found["step"], found["rank"], strict=True)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert found["loss"] == pytest.approx([0.501, 0.501, 0.502, 0.502])
    parts = found["forward_ms"] + found["comm_ms"] + found["other_ms"]
    assert parts == pytest.approx(found["wall_ms"])


def test_after_a_restore_each_step_is_there_once_as_it_was_taken_last(directory):
    for rank in (0, 1):
        tell(directory, rank, [1, 2, 3], 100.0, loss=1)
        tell(directory, rank, [4, 5, 6], 101.0, loss=1)
        tell(directory, rank, [3, 4], 102.0, loss=2)
    found = frame.table(history([1, 2, 3, 4]), directory, by_rank=True)
    assert found["step"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert found["loss"] == pytest.approx(np.repeat([1.001, 1.002, 2.003, 2.004], 2))


def test_steps_after_the_restored_one_are_gone_until_they_are_taken_again(directory):
    tell(directory, 0, [1, 2, 3], 100.0)
    assert frame.table(history([1]), directory)["step"].tolist() == [1]
    assert frame.table(history([1]), directory, by_rank=True)["step"].tolist() == [1]


def test_what_a_rank_told_that_has_no_work_in_the_layout_after_a_restore_is_gone(directory):
    for rank, at_s in ((0, 100.0), (1, 100.002), (2, 99.998)):
        tell(directory, rank, [1, 2], at_s, loss=1)
        tell(directory, rank, [3, 4], at_s + 1, loss=1)
    # Back to step 2, on ranks 0 and 2 only; whoever writes first.
    for rank, at_s in ((0, 110.0), (2, 109.995)):
        tell(directory, rank, [3, 4], at_s, loss=2)
    found = frame.table(history([1, 2, 3, 4]), directory, by_rank=True)
    told = zip(found["step"], found["rank"], found["loss"].round(3), strict=True)
    assert list(told) == [
        *((1, rank, 1.001) for rank in range(3)), *((2, rank, 1.002) for rank in range(3)),
        (3, 0, 2.003), (3, 2, 2.003), (4, 0, 2.004), (4, 2, 2.004),
    ]  # fmt: skip


def test_what_is_not_known_is_nan_and_stays_apart_from_zero(directory):
    tell(directory, 0, [1], 100.0, comm_s=None)
    tell(directory, 1, [1], 100.0)
    tell(directory, 0, [2], 100.1)
    found = frame.table(history([1, 2, 3]), directory)
    assert np.isnan(found["comm_ms"]).tolist() == [True, False, True]
    assert np.isnan(found["other_ms"]).tolist() == [True, False, True]
    # Of step 3 the disk has nothing, and the driver its loss.
    assert np.isnan(found["sent_bytes"]).tolist() == [False, False, True]
    assert found["loss"][2] == 1.003


def test_a_line_cut_short_is_left_out(directory):
    tell(directory, 0, [1], 100.0)
    path = directory / "journal" / "rank0.jsonl"
    path.write_text(path.read_text() + path.read_text()[:50] + "\n")
    tell(directory, 0, [2], 100.1)
    found = frame.table(history([1, 2]), directory, by_rank=True)
    assert found["step"].tolist() == [1, 2]


def test_a_rank_that_told_nothing_whole_has_no_rows(directory):
    tell(directory, 0, [1], 100.0)
    (directory / "journal" / "rank1.jsonl").write_text('{"time_s": 1')
    found = frame.table(history([1]), directory, by_rank=True)
    assert found["rank"].tolist() == [0]


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_run_without_steps_is_an_empty_table_with_the_same_columns(directory, tmp_path, by_rank):
    found = frame.table(History(), directory, by_rank=by_rank)
    assert found["step"].tolist() == []
    assert frame.write(found, tmp_path / "x.csv").read_text() == ",".join(found) + "\n"
    line = {"time_s": 100.0, "rank": 0, "first": 1, "step": 1, "columns": {}}
    line["columns"] = {name: [0.5] for name in COLUMNS}
    (directory / "journal" / "rank0.jsonl").write_text(json.dumps(line) + "\n")
    after = frame.table(history([1]), directory, by_rank=by_rank)
    assert list(found) == list(after)
    assert [column.dtype for column in found.values()] == [c.dtype for c in after.values()]


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("left", ["nothing", "a folder", "a file cut short", "a file of others"])
def test_steps_without_a_journal_are_no_empty_table(tmp_path, by_rank, left):
    folder = tmp_path / "journal"
    if left != "nothing":
        folder.mkdir()
    if left == "a file cut short":
        (folder / "rank0.jsonl").write_text('{"time_s": 1')
    if left == "a file of others":
        (folder / "rank0 (copy).jsonl").write_text("{}")
    with pytest.raises(RunError, match=r"No rank's journal can be read in .*journal"):
        frame.table(history([1, 2]), tmp_path, by_rank=by_rank)


def test_a_journal_that_cannot_be_opened_is_named(directory):
    tell(directory, 0, [1], 100.0)
    (directory / "journal" / "rank1.jsonl").mkdir()
    with pytest.raises(RunError, match=r"rank1\.jsonl cannot be read: Is a directory"):
        frame.table(history([1]), directory)


def test_a_csv_gives_every_number_back_exactly(directory, tmp_path):
    tell(directory, 0, [1, 2], 100.0, loss=1 / 3)
    tell(directory, 0, [3], 100.0, comm_s=None)
    found = frame.table(history([1, 2, 3]), directory)
    path = frame.write(found, "steps.csv")
    assert path == tmp_path / "steps.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["comm_ms"] for row in rows] == ["3.0", "3.0", ""]
    for name, column in found.items():
        known = [float(row[name]) for row in rows if row[name]]
        assert known == column[~np.isnan(column)].tolist()


def test_pandas_has_the_same_columns(directory):
    pandas = importlib.import_module("pandas")
    tell(directory, 0, [1, 2], 100.0)
    found = frame.to_frame(history([1, 2]), directory)
    assert isinstance(found, pandas.DataFrame)
    assert found.set_index("step").wall_ms.to_dict() == pytest.approx({1: 10.0, 2: 10.0})
    assert frame.to_frame(history([1]), directory, by_rank=True)["rank"].tolist() == [0]


def test_parquet_has_nulls_where_nothing_is_known(directory):
    parquet = importlib.import_module("pyarrow.parquet")
    tell(directory, 0, [1], 100.0, comm_s=None)
    path = frame.write(frame.table(history([1]), directory), "steps.parquet")
    row = parquet.read_table(path).to_pylist()[0]
    assert row["step"] == 1
    assert row["comm_ms"] is None
    assert row["wall_ms"] == pytest.approx(10.0)


def test_what_is_missing_is_named_with_what_to_type(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pandas is not installed here: %pip install pandas"):
        frame.to_frame(History(), directory)
    with pytest.raises(InputError, match="pyarrow is not installed here: %pip install pyarrow"):
        frame.write({}, "steps.parquet")


NO_NAMES = {
    "none": (None, "None names no file. Name one that ends in .csv or .parquet."),
    "a number": (5, "5 names no file. Name one that ends in .csv or .parquet."),
    "bytes": (b"a.csv", "b'a.csv' names no file. Name one that ends in .csv or .parquet."),
    "empty": ("", "'' names no file. Name one that ends in .csv or .parquet."),
    "an ending": (".csv", ".csv: name a file that ends in .csv or .parquet."),
    "a null character": ("a\0.csv", "'a\\x00.csv' names no file: it has a null character."),
    "two lines": ("a\n.txt", "'a\\n.txt': name a file that ends in .csv or .parquet."),
}


@pytest.mark.parametrize("what", NO_NAMES)
def test_what_names_no_file_is_told_in_one_sentence(what):
    path, says = NO_NAMES[what]
    with pytest.raises(InputError) as caught:
        frame.write({}, path)
    assert str(caught.value) == says


@pytest.mark.parametrize("end", ["", ".csv", "/a.csv"])
def test_a_long_name_is_cut(end):
    with pytest.raises(InputError) as caught:
        frame.write({"step": np.arange(1)}, "x" * 300 + end)
    assert "xxx...xxx" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_folder_that_is_not_there_is_named_as_it_was_typed(tmp_path):
    with pytest.raises(InputError) as caught:
        frame.write({}, "nowhere/a.csv")
    where = f"nowhere ({tmp_path / 'nowhere'})"
    assert str(caught.value) == f"There is no folder {where}. Make it, or name another file."
    with pytest.raises(InputError, match=f"There is no folder {tmp_path / 'no'}. Make"):
        frame.write({}, tmp_path / "no" / "a.csv")


def test_a_file_is_never_overwritten_unasked_nor_left_half(directory, tmp_path):
    tell(directory, 0, [1], 100.0)
    found = frame.table(history([1]), directory)
    frame.write(found, "a.csv")
    with pytest.raises(InputError, match=r"a\.csv is there already\. force=True overwrites it"):
        frame.write(found, "a.csv")
    frame.write(found, "a.csv", force=True)
    with pytest.raises(InputError, match=r"ends in \.csv or \.parquet"):
        frame.write(found, "a.txt")
    with pytest.raises(InputError, match="There is no folder"):
        frame.write(found, "nowhere/a.csv")
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        frame.write(found, "b.csv", force=True)
    with pytest.raises(InputError, match="cannot be written: File name too long"):
        frame.write(found, "x" * 252 + ".csv")
    with pytest.raises(InputError, match="names no file: Could not determine home directory"):
        frame.write(found, "~nobody-of-that-name/a.csv")
    os.mkfifo("pipe.csv")
    with pytest.raises(InputError, match="is no file"):
        frame.write(found, "pipe.csv", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.csv", "b.csv", "journal", "pipe.csv",
    ]  # fmt: skip
