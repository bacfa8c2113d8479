"""%dist_export in a real kernel."""

from __future__ import annotations

from kernel import Kernel


def test_export_says_how_to_run_the_script_and_returns_its_path(engines: Kernel):
    assert engines("%dist_train digits --steps 2 --wait ;").status == "ok"
    reply = engines("%dist_export script.py")
    assert len(reply.results) == 1
    assert reply.text == "dp2 as a script: torchrun --standalone --nproc-per-node 2 script.py"
    reply = engines("path = %dist_export script.py --force\nprint(path)")
    assert reply.out.strip().endswith("/script.py")
    reply = engines("%dist_export script.py")
    assert "script.py is there already" in reply.error
    assert len(reply.error.splitlines()) == 1


def test_without_a_file_it_says_what_is_missing(engines: Kernel):
    reply = engines("%dist_export")
    assert "the following arguments are required: FILE" in reply.err
    assert len(reply.err.strip().splitlines()) == 1
