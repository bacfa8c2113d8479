"""What cells on real ranks print."""

from __future__ import annotations

import re
from pathlib import Path


def ranks_by_line(lines: list[str]) -> dict[str, set[int]]:
    """Which ranks printed each line: on a busy machine one may come too late to share a label."""
    ranks: dict[str, set[int]] = {}
    for line in lines:
        label, _, text = line.removeprefix("[").partition("] ")
        for part in label.split()[1].split(","):
            first, _, last = part.partition("-")
            ranks.setdefault(text, set()).update(range(int(first), int(last or first) + 1))
    return ranks


def test_equal_lines_are_shown_once_and_the_value_last(run):
    run("print('hello')\n3 + 4")
    assert ranks_by_line(run.out) == {"hello": {0, 1, 2}, "7": {0, 1, 2}}
    assert run.out[-1] == "[ranks 0-2] 7"


def test_a_label_is_the_rank_that_printed(run):
    run("print('I am', rank)\nrank")
    lines = [f"[rank {rank}] I am {rank}" for rank in range(3)]
    assert sorted(run.out[:3]) == lines
    assert run.out[3:] == [f"[rank {rank}] {rank}" for rank in range(3)]


def test_a_cell_runs_on_the_ranks_that_were_named(run):
    result = run("rank", ranks=[2, 0])
    assert result.values == {0: "0", 2: "2"}
    assert repr(result) == f"cell {result.number} on ranks 0,2: done"


def test_lines_of_ranks_that_print_at_once_stay_whole(run):
    run("for k in range(1_000):\n    print(f'rank={rank} line={k:04} ' + 'x' * 50)")
    whole = re.compile(r"\[rank (\d)\] rank=(\d) line=\d{4} x{50}")
    found = [whole.fullmatch(line) for line in run.out]
    assert all(found)
    assert all(match[1] == match[2] for match in found)
    assert len(found) == 3_000


def test_what_is_written_to_a_descriptor_is_shown(run):
    run("import os\nos.write(2, b'y' * 100_000 + b'\\n')\nos.write(1, b'done\\n');", ranks=[1])
    assert run.out == ["[rank 1] done"]
    assert run.err[0].startswith("[rank 1] yyy")


def test_warnings_and_children_are_shown(run):
    run("import subprocess, warnings\nwarnings.warn('careful')\nsubprocess.run(['echo', 'child']);")
    assert ranks_by_line(run.out) == {"child": {0, 1, 2}}
    assert "UserWarning: careful" in run.err[0]


def test_shell_commands_and_magics_work(run):
    run("!echo from the shell\n%time x = 6\nx")
    assert ranks_by_line(run.out)["from the shell"] == {0, 1, 2}
    assert any("Wall time" in line for line in run.out)
    assert run.out[-1] == "[ranks 0-2] 6"


def test_output_comes_while_the_cell_runs(run):
    # The second line is printed only once the first was seen and a file was made for it.
    run("import os, tempfile, time\npath = tempfile.mkdtemp() + '/seen'\npath;", ranks=[0])
    path = run("path", ranks=[0]).values[0].strip("'")
    source = (
        "print('first')\n"
        "end = time.time() + 20\n"
        "while not os.path.exists(path) and time.time() < end:\n"
        "    time.sleep(0.01)\n"
        "print(os.path.exists(path))"
    )

    class Touch:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text
            if "first" in text:
                Path(path).touch()

        def flush(self) -> None: ...

    touch = Touch()
    run.engines.run_cell(source, ranks=[0], out=touch, err=touch)
    assert touch.text == "[rank 0] first\n[rank 0] True\n"


def test_a_flood_is_folded_and_whole_in_a_file(run):
    run("for k in range(50_000):\n    print('line', k)", ranks=[0])
    folds = [line for line in run.out if "more lines, whole in" in line]
    hidden = sum(int(line.split()[3].replace(",", "")) for line in folds)
    assert hidden + len(run.out) - len(folds) == 50_000
    assert run.out[-1] == "[rank 0] line 49999"
    assert hidden > 25_000
    log = folds[0].rpartition(" ")[2]
    with open(log) as file:
        assert sum(line.startswith("line ") for line in file) >= 50_000


def test_a_progress_bar_changes_in_place(run):
    run(
        "import sys, time\n"
        "for k in range(1, 6):\n"
        "    print(f'\\r{k}/5', end='', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.25)\n"
        "print(file=sys.stderr)"
    )
    written = run.errors.getvalue()
    *lines, rest = written.split("\n")
    assert {line.rpartition("] ")[2] for line in lines} == {"5/5"}
    assert len(lines) <= 3
    assert not rest
    assert "\r[rank" in written


def test_displays_of_several_ranks_are_shown_once(run):
    run("from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))")
    assert [(ranks, data["text/html"]) for ranks, data in run.displays] == [([0, 1, 2], "<b>x</b>")]


def test_a_value_that_differs_in_its_address_alone_is_one(run):
    run("def f():\n    pass\nf")
    assert run.out == ["[ranks 0-2] <function f>"]
