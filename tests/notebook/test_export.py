"""%dist_export in a real kernel."""

from __future__ import annotations

from kernel import Kernel


def test_export_says_how_to_run_the_script_and_returns_its_path(engines: Kernel):
    assert engines("%dist_train digits --steps 2 --wait ;").status == "ok"
    reply = engines("%dist_export script.py")
    assert (len(reply.displays), len(reply.results)) == (1, 0)
    assert reply.text == "dp2 as a script: torchrun --standalone --nproc-per-node 2 script.py"
    reply = engines("path = %dist_export script.py --force\nprint(path)")
    assert reply.out.strip().endswith("/script.py")
    reply = engines("%dist_export script.py")
    assert "script.py is there already" in reply.error
    assert len(reply.error.splitlines()) == 1


def test_export_says_what_differs(engines: Kernel):
    assert engines("%dist_train digits --size cnn --steps 1 --wait ;").status == "ok"
    lines = engines("%dist_export cnn.py").text.splitlines()
    assert lines[0].startswith("dp2 as a script: torchrun")
    assert len(lines) == 2
    assert lines[1].startswith("What differs: statistics of BatchNorm2d 2, ")
    assert lines[1].endswith("only up to its first step with microbatches.")


def test_without_a_file_it_says_what_is_missing(engines: Kernel):
    reply = engines("%dist_export")
    assert "%dist_export: FILE is missing: %dist_export FILE." in reply.err
    assert len(reply.err.strip().splitlines()) == 1
