"""Stacks as faulthandler writes them."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

from workbench.spec.stacks import Frame, parse, path_of

TEXT = """Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f0000000001 (most recent call first):
  File "<cell 3>", line 12 in forward
  File "/x/workbench/forkserver/server.py", line 210 in _fork
"""


def test_the_calls_of_one_thread_are_found():
    frames, is_whole = parse(TEXT, 0x7F0000000001)
    assert [str(frame) for frame in frames] == [
        "cell 3, line 12, in forward",
        "server.py:210 in _fork",
    ]
    assert is_whole
    assert parse(TEXT, 0x7F0000000002)[0] == [
        Frame("/usr/lib/python3.11/threading.py", 327, "wait")
    ]
    assert parse(TEXT, 3) == ([], False)


def test_what_is_not_written_to_its_end_is_not_whole():
    for cut in range(len(TEXT) - 30):
        assert not parse(TEXT[:cut], 0x7F0000000001)[1]


def test_of_deep_stacks_the_end_is_missing():
    frame = '  File "/home/me/net.py", line 1 in f\n'
    text = "Current thread 0x1 (most recent call first):\n" + 100 * frame + "  ...\n"
    frames, is_whole = parse(text, 1)
    assert len(frames) == 100
    assert is_whole


def test_it_is_what_this_python_writes():
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    frames, _ = parse(text, threading.main_thread().ident or 0)
    assert frames[0].name == "test_it_is_what_this_python_writes"


def test_it_lies_beside_the_log():
    assert str(path_of("/x/rank0.log")) == "/x/rank0.stacks"
