"""A cell in a rank's namespace, each in a process of its own: it owns `__main__` and SIGINT."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture
def cells():
    """Runs cells one after another in one fresh process; -> their replies."""

    def run(*sources: str) -> list[dict]:
        script = (
            "import json, sys\n"
            "from workbench.engine import cell\n"
            "names = {}\n"
            "replies = [cell.run(s, n, names) for n, s in enumerate(json.load(sys.stdin), 1)]\n"
            "print('REPLIES', json.dumps(replies))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            input=json.dumps(sources),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.rpartition("REPLIES ")[2])

    return run


def test_names_persist_and_the_last_value_is_shown_and_kept(cells):
    first, second, third, last = cells("a = 2", "a + 1", "_ * 2;", "_")
    assert first["value_text"] is None
    assert second["value_text"] == "3"
    assert third["value_text"] is None
    assert last["value_text"] == "6"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("f", "def f(x):\n    return x + 1\n"),
        ("Net", "class Net:\n    def forward(self, x):\n        return x\n"),
        ("Plain", "class Plain:\n    size = 3\n"),
        ("Outer.Inner", "    class Inner:\n        depth = 2\n"),
        ("Data", "@dataclasses.dataclass\nclass Data:\n    size: int = 3\n"),
        ("g", "g = lambda x: x * 2\n"),
        ("Net.forward", "    def forward(self, x):\n        return x\n"),
    ],
)
def test_getsource_finds_what_a_cell_defined(cells, what, expected):
    reply = cells(
        "import dataclasses, inspect, linecache",
        "def f(x):\n    return x + 1\n\n"
        "class Net:\n    def forward(self, x):\n        return x\n\n"
        "class Plain:\n    size = 3\n\n"
        "class Outer:\n    class Inner:\n        depth = 2\n\n"
        "@dataclasses.dataclass\nclass Data:\n    size: int = 3\n\n"
        "g = lambda x: x * 2\n",
        f"linecache.checkcache()\ninspect.getsource({what})",
    )[-1]
    assert reply == {**reply, "ok": True, "value_text": repr(expected)}


def test_getsource_after_a_class_was_defined_anew(cells):
    reply = cells(
        "import inspect",
        "class A:\n    size = 1",
        "class A:\n    size = 2",
        "inspect.getsource(A)",
    )[-1]
    assert "size = 2" in reply["value_text"]


def test_instances_of_cell_classes_pickle_within_the_rank(cells):
    reply = cells(
        "class Point:\n    def __init__(self, x):\n        self.x = x",
        "import pickle\npickle.loads(pickle.dumps(Point(7))).x",
    )[-1]
    assert reply["value_text"] == "7"


def test_a_loader_with_processes_reads_a_dataset_of_the_cell(cells):
    reply = cells(
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, i):\n        return i * i\n"
        "loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)\n"
        "[batch.tolist() for batch in loader]"
    )[0]
    assert reply["value_text"] == "[[0, 1, 4, 9], [16, 25, 36, 49]]"


def test_an_error_names_the_lines_of_the_cells_it_crossed(cells):
    _, reply, after = cells(
        "def f(x):\n    return 1 / x",
        "a = 1\nb = 2\nf(0)",
        "a + b",
    )
    assert reply["error"] == {
        "name": "ZeroDivisionError",
        "text": "division by zero",
        "traceback": ["cell 2, line 3: f(0)", "cell 1, line 2, in f: return 1 / x"],
        "line": 3,
    }
    assert after["value_text"] == "3"


def test_an_error_from_a_library_shows_the_users_lines_only(cells):
    (reply,) = cells("import json\n\njson.loads('{')")
    assert reply["error"]["name"] == "JSONDecodeError"
    assert reply["error"]["traceback"] == ["cell 1, line 3: json.loads('{')"]


def test_a_cause_is_named(cells):
    (reply,) = cells("try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('no') from e")
    assert reply["error"]["traceback"][-1] == "caused by KeyError: 'k'"


def test_a_syntax_error_says_where(cells):
    (reply,) = cells("a = 1\nb = = 2")
    assert reply["error"]["name"] == "SyntaxError"
    assert reply["error"]["line"] == 2
    assert reply["error"]["traceback"] == ["cell 1, line 2: b = = 2"]


@pytest.mark.parametrize("source", ["exit()", "quit(3)", "import sys; sys.exit('bye')"])
def test_exit_ends_the_cell_and_not_the_rank(cells, source):
    reply, after = cells("kept = 1\n" + source, "kept")
    assert reply["error"]["name"] == "SystemExit"
    assert "the rank and its variables stay" in reply["error"]["text"]
    assert after["value_text"] == "1"


def test_an_interrupt_ends_the_cell_only(cells):
    reply, after = cells(
        "import os, signal, time\nkept = 1\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)",
        "kept",
    )
    assert reply["error"]["name"] == "KeyboardInterrupt"
    assert after["value_text"] == "1"


@pytest.mark.parametrize(
    "source",
    [
        "class Bad:\n    def __repr__(self):\n        raise ValueError('repr')\nBad()",
        "class Bad(Exception):\n    def __str__(self):\n        raise ValueError\nraise Bad",
    ],
)
def test_what_cannot_be_shown_is_an_error_of_the_cell(cells, source):
    reply, after = cells(source, "1")
    assert not reply["ok"]
    assert after["ok"]


def test_a_long_value_is_cut(cells):
    (reply,) = cells("'x' * 20_000")
    assert reply["value_text"].endswith("(10,002 more characters)")


@pytest.mark.parametrize("source", ["", "# nothing", "None", "pass"])
def test_a_cell_without_a_value(cells, source):
    assert cells(source)[0] == {
        "ok": True,
        "value_text": None,
        "displays": [],
        "messages": 0,
        "dropped": 0,
    }


def test_a_failed_cell_holds_none_of_its_variables(cells):
    reply = cells(
        "import gc, weakref\nclass Big:\n    pass",
        "def f():\n    big = Big()\n    globals()['seen'] = weakref.ref(big)\n    1 / 0\nf()",
        "seen() is None",
    )[-1]
    assert reply["value_text"] == "True"
