"""A rank's output, in a process of its own: its descriptors 1 and 2 are what is captured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import zmq

from workbench.engine.output import Budget, Stream, decoded

WAIT_MS = 20_000


@pytest.fixture
def rank(tmp_path):
    """Runs a script with the capture on; -> messages it pushed, its out file, its log."""

    def run(script: str, code: int = 0) -> tuple[list[dict], str, str]:
        address = f"ipc://{tmp_path}/echo"
        log = tmp_path / "rank-0.log"
        whole = (
            textwrap.dedent(f"""
            import ctypes, os, subprocess, sys, time, warnings
            from workbench.engine import output
            output.start(0, {address!r}, {str(log)!r})
            screen = output.current()
            screen.begin(1)
        """)
            + textwrap.dedent(script)
            + textwrap.dedent("""
            counts = screen.end()
            screen.begin(2)
            print(counts["messages"], counts["dropped"])
            screen.end()
            screen.socket.close(20_000)
            import zmq
            zmq.Context.instance().term()
            os._exit(0)
        """)
        )
        context = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.bind(address)
        messages = []
        try:
            with subprocess.Popen([sys.executable, "-c", whole], cwd=os.getcwd()) as child:
                while child.poll() is None or pull.poll(50):
                    if pull.poll(50):
                        messages.append(json.loads(pull.recv()))
            assert child.returncode == code
        finally:
            context.destroy(0)
        return messages, log.with_suffix(".out").read_text(), log.read_text()

    return run


def lines(messages, stream, cell=1):
    return [
        line
        for message in messages
        if message["stream"] == stream and message["cell"] == cell
        for line in message["lines"]
    ]


def test_all_ways_to_write_are_captured_once_and_in_order(rank):
    messages, out, err = rank("""
        print("print")
        os.write(1, b"descriptor\\n")
        ctypes.CDLL(None).puts(b"C")
        subprocess.run(["echo", "child"])
        print("end", end="")
        warnings.warn("careful")
        print("stderr", file=sys.stderr)
    """)
    assert lines(messages, "stdout") == ["print", "descriptor", "C", "child", "end"]
    assert [line for line in lines(messages, "stderr") if "careful" in line]
    assert lines(messages, "stderr")[-1] == "stderr"
    assert out.startswith("print\ndescriptor\nC\nchild\nend")
    assert "careful" in err


def test_the_count_in_the_reply_is_the_number_of_messages_of_the_cell(rank):
    messages, _, _ = rank("""
        for k in range(5):
            print(k)
            print(k, file=sys.stderr)
            time.sleep(0.12)
    """)
    (told,) = lines(messages, "stdout", cell=2)
    of_cell = [message for message in messages if message["cell"] == 1]
    assert told == f"{len(of_cell)} 0"
    assert lines(messages, "stdout") == list("01234")


def test_a_write_that_holds_the_interpreter_lock_cannot_block(rank):
    _, _, err = rank("""
        size = 300_000
        assert ctypes.PyDLL(None).write(2, b"x" * size, size) == size
    """)
    assert err.count("x") >= 300_000


def test_what_is_written_just_before_a_crash_is_in_the_log(rank):
    _, _, err = rank("""os.write(2, b"last words\\n"); os.abort()""", code=-6)
    assert "last words" in err


def test_a_flood_is_folded_on_the_screen_and_whole_in_the_file(rank):
    messages, out, _ = rank("""
        for k in range(200_000):
            print("line", k)
    """)
    shown = lines(messages, "stdout")
    assert out.startswith("line 0\nline 1\n")
    assert out.count("\n") >= 200_000
    assert shown[0] == "line 0"
    assert shown[-1] == "line 199999"
    folds = [line for line in shown if "more lines, whole in" in line]
    hidden = sum(int(line.split()[1].replace(",", "")) for line in folds)
    assert hidden + len(shown) - len(folds) == 200_000
    assert hidden > 100_000


def test_a_progress_bar_is_a_changing_state_and_one_line_at_its_end(rank):
    messages, _, _ = rank("""
        from tqdm import tqdm
        for _ in tqdm(range(10), mininterval=0):
            time.sleep(0.1)
    """)
    assert len(lines(messages, "stderr")) == 1
    assert "10/10" in lines(messages, "stderr")[0]
    states = [message["live"] for message in messages if message["live"]]
    assert 1 <= len(states) <= 7
    assert all("\r" not in state for state in states)


def test_without_anyone_listening_the_rank_goes_on(tmp_path):
    script = f"""
import os, time
from workbench.engine import output
output.start(0, "ipc://{tmp_path}/nobody", "{tmp_path}/rank-0.log")
screen = output.current()
for cell in range(1_200):
    screen.begin(cell)
    print("x")
    counts = screen.end()
os._exit(counts["dropped"] != 1)
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_lines_are_whole_however_the_file_grows(tmp_path):
    path = tmp_path / "out"
    path.touch()
    stream = Stream("stdout", path)
    budget = Budget(0.0)
    seen = []
    data = "".join(f"line {k}\n" for k in range(50)).encode()
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(data), 7):
            file.write(data[start : start + 7])
            seen += stream.collect(budget, 0.0, final=False)[0]
    assert seen == [f"line {k}" for k in range(50)]


def test_a_backlog_is_counted_and_its_last_lines_are_whole(tmp_path):
    path = tmp_path / "out"
    path.touch()
    stream = Stream("stdout", path)
    path.write_text("".join(f"number {k:09}\n" for k in range(700_000)))
    shown, _ = stream.collect(Budget(0.0), 0.0, final=True)
    assert shown == [
        f"... 699,995 more lines, whole in {path}",
        *[f"number {k:09}" for k in range(699_995, 700_000)],
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain", "plain"),
        (b"windows\r", "windows"),
        (b" 10%\r 20%\r 30%", " 30%"),
        (b"\r 10%\r      \r", ""),
        (b"\xff", "\ufffd"),
        (b"a" * 4_001, "a" * 4_000 + " ... (1 more bytes)"),
    ],
)
def test_a_line_as_a_terminal_shows_it(line, text):
    assert decoded(line) == text
