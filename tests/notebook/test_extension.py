"""The extension: light to load, gone when unloaded, and what becomes of engines at the end."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
from kernel import Kernel

THEIRS = """
def dist_status(line):
    return "theirs"
dist_status.__module__ = "elsewhere.magics"
get_ipython().register_magic_function(dist_status)
"""
SCRIPT = """
import workbench
engines = workbench.start(1)
print(*[row["pid"] for row in engines.status()])
"""
TERMINAL = """%load_ext workbench
%dist_start -n 1
%dist_train digits --steps 2 --wait
run = %dist_panel
rows = %dist_status
print("pid", rows[0]["pid"])
exit
"""


def test_loading_says_how_to_begin_and_loads_nothing_heavy(tmp_path):
    kernel = Kernel(tmp_path)
    try:
        reply = kernel(
            "%load_ext workbench\nimport sys\n"
            "print([m for m in ('torch', 'plotly', 'ipywidgets') if m in sys.modules])"
        )
        assert reply.out.splitlines() == [
            "workbench: %dist_start -n 4 starts four ranks, %dist lists all magics.",
            "[]",
        ]
        assert not reply.err
    finally:
        kernel.close()


def test_reloading_keeps_one_of_each(kernel: Kernel):
    kernel("%reload_ext workbench")
    count = "[m.__self__.__class__.__name__ for m in get_ipython().Completer.custom_matchers]"
    assert kernel(count).text == "['Completion']"
    hooks = "[h.__qualname__ for h in get_ipython().events.callbacks['post_run_cell']]"
    assert kernel(hooks).text.count("Shown._forget") == 1
    assert kernel("%dist_status").error.startswith("EnginesError: No engines")


def test_unloading_takes_all_away_and_engines_stay(kernel: Kernel):
    kernel("%dist_start -n 1;\n%unload_ext workbench")
    assert "not found" in kernel("%dist").err
    assert kernel("get_ipython().Completer.custom_matchers").text == "[]"
    kernel("%load_ext workbench")
    assert kernel("%%dist\nrank").out == "[rank 0] 0\n"
    kernel("%dist_stop ;")


def test_a_name_that_another_has_taken_is_told(kernel: Kernel):
    kernel("%unload_ext workbench")
    kernel(THEIRS)
    reply = kernel("%load_ext workbench")
    assert reply.err == "%dist_status of elsewhere is workbench's now.\n"
    assert kernel("%dist_status").error.startswith("EnginesError")


def test_a_script_takes_its_engines_along():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
    assert not psutil.pid_exists(int(done.stdout))


def test_a_terminal_shows_text_and_takes_its_engines_along():
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor"],
        input=TERMINAL,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
        # Of another environment than this one, IPython warns.
        env={key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"},
    )
    assert "digits-1: finished, step 2 of 2, loss" in done.stdout
    assert done.stderr == ""
    assert not psutil.pid_exists(int(done.stdout.split("pid ")[1].split()[0]))


def test_a_kernel_that_ends_leaves_its_engines_to_the_lease(tmp_path):
    kernel = Kernel(tmp_path)
    pid = int(kernel("import workbench; e = workbench.start(1); print(e.status()[0]['pid'])").out)
    server = psutil.Process(pid).parent()
    kernel.close(now=False)
    try:
        assert psutil.pid_exists(pid)
    finally:
        server.terminate()
        psutil.wait_procs([server], timeout=20)
    assert not psutil.pid_exists(pid)
