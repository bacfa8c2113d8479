"""Magics in a real kernel: each one call, shown once, refused in one sentence."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest
from kernel import Kernel

RECIPE = """
import torch
from torch import nn
def model():
    return nn.Linear(4, 1)
def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)
loss = nn.functional.mse_loss
"""
DOCS = Path(__file__).resolve().parents[2] / "docs"


def magics() -> dict[str, object]:
    from workbench.notebook.magics import all_commands

    return {name: getattr(kind, name) for kind in all_commands() for name in kind.magics["line"]}


@pytest.mark.parametrize(
    "line",
    [
        *(f"%dist_{verb}" for verb in ("status", "pause", "resume", "step", "save", "restore")),
        "%dist_panel",
        "%dist_train digits",
        "%%dist\n1",
        f"%%dist_train\n{RECIPE}",
    ],
)
def test_before_a_start_each_says_what_to_type(kernel: Kernel, line: str):
    kernel("%dist_stop ;")
    reply = kernel(line)
    says = "EnginesError: No engines are running. %dist_start -n 4 starts four."
    assert reply.error.startswith(says)
    assert "\n" not in reply.error


def test_ranks_of_a_kernel_that_is_gone_are_told_and_can_be_ended(kernel: Kernel, tmp_path: Path):
    other = Kernel(tmp_path)
    pid = int(other("import workbench; e = workbench.start(1); print(e.status()[0]['pid'])").out)
    other.manager.provisioner.process.kill()
    other.manager.provisioner.process.wait()
    kernel("%dist_stop ;")
    assert "%dist_stop --all ends them" in kernel("%dist_status").error
    rank = psutil.Process(pid)
    kernel("%dist_stop --all")
    assert psutil.wait_procs([rank], timeout=10)[0]
    assert "--all" not in kernel("%dist_status").error
    other.close()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "%dist_start -n two",
            "UsageError: %dist_start: argument -n/--num-ranks: 'two' is no",
        ),
        ("%dist_start --nun-ranks 2", "No option named '--nun-ranks'. Did you mean '--num-ranks'?"),
        ("%dist_start 4", "UsageError: %dist_start takes no '4'. %dist_start? says what it takes."),
        ("%dist rank", "UsageError: %dist takes no 'rank'."),
        ("%dist_train --steps", "%dist_train: --steps needs a value: --steps STEPS."),
        ("%dist_train --strategy", "--strategy needs a value: --strategy STRATEGY."),
        ("%dist_switch --shard=yes", "--shard takes no value such as 'yes': write it alone"),
        ("%dist_switch data --microbatch 4", "'--microbatch'. Did you mean '--microbatches'?"),
        ("%dist_switch --microbatches many", "'many' is no whole number, such as 5"),
        ("%dist_step five", "%dist_step: argument N: 'five' is no whole number, such as 5"),
        ("%dist_train digits --clip x", "'x' is no number, such as 0.5"),
    ],
)
def test_a_line_that_does_not_fit_is_one_line(kernel: Kernel, line: str, says: str):
    reply = kernel(line)
    assert reply.status == "error"
    assert says in reply.err
    assert len(reply.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%dist_start -n 0", "InputError: n=0: use a number of ranks from 1 to 64."),
        (
            "%dist_start -n 3",
            "2 ranks are running. %dist_stop, then %dist_start -n 3 starts with 3.",
        ),
        ("%dist_train digit", "RecipeError: No recipe named 'digit'. Did you mean 'digits'?"),
        ("%dist_train", "RecipeError: No recipe named. Known: digits"),
        ("%dist_train digits -s dta", "LayoutError: No strategy named 'dta'. Did you mean 'data'?"),
        ("%dist_train digits --batch 1", "batch"),
        ("%dist_train digits --restore nothing", "CheckpointError: No checkpoint"),
        ("%dist_train digits --dir /proc/no", "--dir"),
        (
            "%%dist --ranks 0-\n1",
            "InputError: ranks '0-': use numbers and spans such as 0,2 or 0-3",
        ),
        ("%%dist --ranks 7\n1", "InputError: no rank 7: use ranks from 0 to 1."),
        ("%dist_pause", "RunError: Nothing has been trained yet. %dist_train digits starts"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(engines: Kernel, line: str, says: str):
    reply = engines(line)
    assert reply.status == "error"
    assert says in reply.error
    assert len(reply.error.splitlines()) == 1


def test_a_start_says_one_line_and_a_second_gives_the_same_engines(kernel: Kernel):
    kernel("%dist_stop ;")
    first = kernel("first = %dist_start -n 2  # two of them")
    assert re.fullmatch(r"2 ranks on cpu \(\d+ cores?, threads each: \d+\): ready.*\n", first.out)
    second = kernel("%dist_start")
    assert second.out.startswith("Already up: 2 ranks")
    assert not second.results
    assert kernel("_ is first").text == "True"
    assert kernel("first").text.splitlines()[1].split() == [
        "rank",
        "state",
        "device",
        "threads",
        "pid",
    ]


def test_a_semicolon_silences(engines: Kernel):
    for line in ("%dist_start -n 2;", "%dist_status ;", "%dist_checkpoints ;", "%dist ;"):
        reply = engines(line)
        assert (reply.status, reply.out, reply.results, reply.displays) == ("ok", "", [], [])


def test_what_is_shown_is_shown_wherever_it_stands_and_only_once(engines: Kernel):
    lines = ("%dist_status", "%dist_stacks", "%dist", "%dist_checkpoints", "%dist_audit")
    for line in lines:
        alone, inside = engines(line), engines(f"kept = {line}\nprint(len(kept) > 0)")
        for reply in (alone, inside):
            assert (reply.status, len(reply.displays), len(reply.results)) == ("ok", 1, 0), reply
        assert inside.out in ("True\n", "False\n")
        assert alone.displays[0].keys() == inside.displays[0].keys()


def test_a_policy_before_the_first_training_is_that_of_the_next(kernel: Kernel):
    kernel("%dist_stop ;\n%dist_start -n 1 ;")
    assert kernel("%dist_policy").out.startswith("The next training: when a rank is lost, replace")
    told = kernel("%dist_policy --on-loss wait --on-stall interrupt").out
    assert re.match(
        r"The next .* lost, wait \(.*; when one stands still, interrupt \(.*\)\.\n$", told
    )
    assert "on_loss='no': use one of replace" in kernel("%dist_policy --on-loss no").error
    kernel("run = %dist_train digits --steps 1 --on-stall replace --wait;")
    policies = "[run.snapshot()['faults'][name] for name in ('policy', 'on_stall')]"
    assert kernel(policies).text == "['wait', 'replace']"
    assert "lost, shrink" in kernel("%dist_policy --on-loss shrink").out
    assert kernel(policies).text == "['shrink', 'replace']"
    kernel("%dist_stop ;")


def test_a_training_shows_one_panel_whether_assigned_or_not(engines: Kernel):
    for line in (
        "run = %dist_train digits --steps 2 --wait",
        "%dist_train digits --steps 2 --wait",
    ):
        reply = engines(line)
        assert reply.status == "ok", reply.error
        assert reply.panels == 1
        assert not reply.results
    assert engines("run").panels == 1
    assert engines("run.name").text != engines("_ and type(_).__name__").text
    silent = engines("run = %dist_train digits --steps 2 --wait;\nrun.name")
    assert silent.panels == 0
    assert silent.text.startswith("'digits-")


def test_variables_are_filled_in(engines: Kernel):
    reply = engines("name, steps = 'digits', 3\nrun = %dist_train $name --steps {steps} --wait;\n"
                    "run.snapshot()['step'], run.snapshot()['recipe']")  # fmt: skip
    assert reply.text == "(3, 'digits')"


def test_the_training_obeys(engines: Kernel):
    engines("run = %dist_train digits --steps 100000;")
    assert engines("%dist_pause").out.startswith("digits-")
    at = int(engines("run.step_now").text)
    assert engines("%dist_step 3").out == engines("print(repr(run)[5:-1])").out
    assert int(engines("run.step_now").text) == at + 3
    saved = engines("%dist_save here")
    assert saved.text.startswith(f"saved here: step {at + 3:,}, ")
    assert engines("%dist_step").status == "ok"
    assert engines("(%dist_restore here)").status == "error"  # a magic is no expression
    assert f"step {at + 3:,} of" in engines("%dist_restore here").out
    assert engines("%dist_restore her").error.startswith(
        "CheckpointError: No checkpoint named 'her'"
    )
    assert "running" in engines("%dist_resume --steps 50000").out
    again = engines("%dist_train digits")
    assert "holds" not in again.error
    assert again.error.startswith("RunError: digits-")
    assert again.error.endswith("%dist_pause it first.")
    silent = engines("%dist_pause ;")
    assert (silent.status, silent.out) == ("ok", "")
    told = engines("name = %dist_save\nname == f'step-{run.step_now}', name + ''").text
    assert re.match(r"saved step-.*\n\(True", told)


def test_a_switch_says_what_it_brings(engines: Kernel):
    engines("run = %dist_train digits --size cnn --steps 2 --wait;")
    told = engines("%dist_switch pipeline --microbatches 4").out.splitlines()
    assert re.match(r"digits-\d+: pipeline \(pp2, 1f1b x4\) from step 2 on", told[0])
    assert told[1:] == [
        "Note: Statistics of BatchNorm2d 2, BatchNorm2d 5, BatchNorm2d 9 come from each of 4 "
        "microbatches, not from the whole batch, so the loss differs from now on."
    ]
    assert engines("%dist_switch pipeline --microbatches 4").out.endswith(
        ": already pipeline (pp2, 1f1b x4)\n"
    )


def test_checkpoints_of_other_runs_are_listed_and_restored(engines: Kernel):
    engines("run = %dist_train digits --steps 2 --wait;\n%dist_save a;")
    first = engines("print(run.name)").out.strip()
    engines("run = %dist_train digits --steps 1 --wait;\n%dist_save b;")
    table = engines("%dist_checkpoints")
    assert [line.split()[0] for line in table.text.splitlines()[2:]][-2:] == [f"{first}/a", "b"]
    assert "<table>" in table.displays[0]["text/html"]
    assert "step 2 of" in engines(f"%dist_restore {first}/a").out
    begun = engines(
        f"run = %dist_train digits --steps 3 --restore {first}/a --wait;\nrun.history.steps"
    )
    assert begun.text == "[3]"
    told = engines("%dist_checkpoints --dir elsewhere").error
    assert told.startswith("InputError: --dir elsewhere: there is no such folder.")


def test_a_cell_is_a_recipe_and_its_errors_name_the_line(engines: Kernel):
    reply = engines(f"%%dist_train --steps 2 --batch 8 --wait\n{RECIPE}")
    assert reply.status == "ok", reply.error
    assert reply.panels == 1
    wrong = engines("%%dist_train\nx = 1\n1 / 0")
    assert wrong.error.startswith("RankError: ranks 0-1: ZeroDivisionError")
    assert "line 3" in wrong.error


def test_a_cell_runs_on_the_ranks_named(engines: Kernel):
    reply = engines("%%dist --ranks 1 -o kept\nprint('hello')\nrank + 10")
    assert reply.out.splitlines() == ["[rank 1] hello", "[rank 1] 11"]
    assert not reply.results
    assert engines("kept.values").text == "{1: '11'}"
    assert engines("kept").text.splitlines()[-1].split() == ["1", "11"]
    assert engines("%%dist -o 1x\n1").err.startswith("UsageError")


def test_status_tells_ranks_and_run(engines: Kernel):
    engines("%dist_train digits --steps 1 --wait;")
    table = engines("rows = %dist_status -v\nrows")
    assert "finished" in table.text.splitlines()[0]
    assert "/rank1.log" in table.text
    assert engines("[row['rank'] for row in rows]").text == "[0, 1]"


def test_the_panel_comes_again_in_a_language_that_is_there(engines: Kernel):
    engines("%dist_train digits --steps 1 --wait;")
    assert engines("%dist_panel --big").panels == 1
    assert engines("%dist_panel ;").panels == 0
    assert engines("%dist_panel --lang xx").error.startswith("InputError: No language named 'xx'.")


def test_an_interrupt_of_a_wait_pauses(engines: Kernel):
    timer = threading.Timer(3, engines.interrupt)
    timer.start()
    reply = engines("run = %dist_train digits --steps 1000000 --wait;")
    timer.join()
    assert re.match(r"RunError: Interrupted: paused after step .*%dist_resume goes on", reply.error)
    assert engines("%dist_status").status == "ok"


# A start that takes long.
LATE = """
import time
from workbench.driver.roster import Roster
connect = Roster.connect
def late(*args):
    time.sleep(10)
    return connect(*args)
Roster.connect = late
"""


def test_an_interrupt_of_a_start_leaves_nothing(kernel: Kernel):
    kernel("%dist_stop ;")
    server = psutil.Process(fork_server(kernel))
    kernel(LATE)
    timer = threading.Timer(2, kernel.interrupt)
    timer.start()
    reply = kernel("%dist_start -n 2")
    timer.join()
    kernel("Roster.connect = connect")
    assert reply.error == "StartError: The start was interrupted; nothing of it is left running."
    assert kernel("%dist_status").error.startswith("EnginesError: No engines are running.")
    assert not server.children()


def fork_server(kernel: Kernel) -> int:
    return int(
        kernel("from workbench.driver import session; print(session.current().forks.pid)").out
    )


def test_ranks_that_are_gone_are_named_and_come_back(engines: Kernel):
    pids = [
        int(pid)
        for pid in engines("rows = %dist_status\nprint(*[r['pid'] for r in rows])").out.split()
    ]
    os.kill(pids[1], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pids[1])] if psutil.pid_exists(pids[1]) else [], timeout=10)
    while "rank 1 gone" not in engines("%dist_status").text:
        pass
    reply = engines("%%dist\ndist.get_rank()")
    assert reply.out.splitlines() == ["[rank 0] 0", "[rank 1] 1"], reply
    assert "Rank 1 was gone (killed by SIGKILL): a fresh process has its place" in reply.err
    assert engines("%dist_recover").out == "No rank is gone.\n"
    assert engines("%dist_start -n 2").out.startswith("Already up: 2 ranks")
    assert engines("%dist_stop").out == "2 ranks stopped.\n"
    assert engines("%dist_stop").out == "No engines were running.\n"


def test_when_all_is_gone_a_start_begins_anew(engines: Kernel):
    server = psutil.Process(fork_server(engines))
    started = server.children(recursive=True)
    server.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    assert "is gone" in engines("%%dist\n1").error
    reply = engines("%dist_start -n 2")
    assert reply.out.startswith("2 ranks on cpu"), reply
    reply = engines("%%dist\nrank")
    assert reply.out.splitlines() == ["[rank 0] 0", "[rank 1] 1"], reply


@pytest.mark.parametrize("name", sorted(magics()))
def test_each_has_help_with_an_example_and_its_page(name: str):
    function = magics()[name]
    text = str(function.__doc__)
    assert "Example::" in text
    assert "In Python:" in text
    page = (DOCS / "magics.md").read_text()
    assert f"`%{name}" in page
    for action in function.parser._actions:  # type: ignore[attr-defined]
        assert "help" in action.dest or all(f"`{o}" in page for o in action.option_strings[-1:]), (
            action
        )
    assert name in (DOCS / "api.md").read_text()


def test_help_is_shown_by_question_mark_and_by_h(kernel: Kernel):
    assert "%dist_start -n 4" in kernel.help("%dist_start")
    assert "--num-ranks" in kernel("%dist_start -h").out
    assert "--steps" in kernel("%dist_train -n x --help").out


def test_the_overview_lists_all(kernel: Kernel):
    text = kernel("%dist").text
    assert all(f"%{name}" in text for name in magics())
    assert "%%dist_train" in text
