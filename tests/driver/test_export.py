"""Export of a live training: the file, its refusals, and what it says of the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workbench.driver import exports
from workbench.errors import InputError, RecipeError

CELL = """
import torch
from torch import nn

batch = 8

def model():
    return nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)

loss = nn.functional.mse_loss
"""


def test_the_script_is_of_the_layout_there_is(clusters, tmp_path: Path):
    engines = clusters(2)
    run = engines.train("digits", steps=30, directory=tmp_path, start=False)
    run.step(3)
    path = run.export("script.py")
    assert path == Path.cwd() / "script.py"
    text = path.read_text()
    assert "at step 3 of digits-1." in text
    assert "STEPS = 30\n" in text
    assert "DistributedDataParallel(net)" in text
    assert f"    {exports.command(run, 'script.py')}\n" in text
    run.switch("pipeline", microbatches=4)
    assert "Schedule1F1B(" in run.export("script.py", force=True).read_text()
    run.switch("none")
    assert exports.command(run, "a script.py") == "python 'a script.py'"
    assert "destroy_process_group" not in run.export("script.py", force=True).read_text()
    assert run.events[-1]["text"] == "exported dp1 as script.py"
    run.resume()
    assert run.wait(60)["state"] == "finished"


def test_a_cell_is_written_as_it_was_trained_whatever_ran_later(clusters, tmp_path: Path):
    engines = clusters(2)
    engines.run_cell("HIDDEN = 6")
    run = engines.train(cell=CELL, steps=2, directory=tmp_path)
    run.wait(60)
    engines.run_cell("def model(): raise ValueError")
    text = run.export(tmp_path / "script.py").read_text()
    assert "return nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))" in text
    assert "HIDDEN = 6  # from another cell" in text
    engines.run_cell("HIDDEN = [6]")
    with pytest.raises(RecipeError, match="uses HIDDEN, which other cells define"):
        run.export(tmp_path / "other.py")
    assert not (tmp_path / "other.py").exists()


def test_files_that_cannot_be_written_are_one_sentence_each(clusters, tmp_path: Path):
    run = clusters(2).train("digits", steps=2, directory=tmp_path, start=False)
    taken = tmp_path / "taken.py"
    taken.write_text("mine")
    refused = {
        tmp_path / "nowhere" / "script.py": "There is no folder .*nowhere. Make it, or name anoth",
        tmp_path: "is a folder. Name a file in it",
        taken: "taken.py is there already. force=True overwrites it, in a magic --force",
    }
    for path, says in refused.items():
        with pytest.raises(InputError, match=says) as raised:
            run.export(path)
        assert "\n" not in str(raised.value)
    assert taken.read_text() == "mine"
    assert run.export(taken, force=True) == taken
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="cannot be written: Permission denied"):
            run.export(tmp_path / "more.py")
        tmp_path.chmod(0o700)
