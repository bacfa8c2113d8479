"""A notebook run without anybody looking: what papermill, jupyter execute and nbconvert keep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

CELLS = (
    "%load_ext workbench\n%dist_start -n 2",
    "%dist_train digits --steps 20 --wait",
    "%dist_stop",
)
RUNNERS = {
    "papermill": ["papermill", "in.ipynb", "out.ipynb"],
    "execute": ["jupyter", "execute", "in.ipynb", "--output", "out.ipynb"],
    "nbconvert": ["nbconvert", "--execute", "--to", "notebook", "in.ipynb", "--output", "out"],
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_figures_that_need_no_kernel_are_left(runner: str, tmp_path: Path):
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "in.ipynb")
    command = [sys.executable, "-m", *RUNNERS[runner]]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    outputs = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[1].outputs
    kinds = [set(out.data) for out in outputs if "data" in out]
    assert {"application/vnd.jupyter.widget-view+json", "text/plain"} in kinds
    stills = [out.data["text/html"] for out in outputs if "text/html" in out.get("data", {})]
    assert len(stills) == 1
    for words in ("20 / 20", "<polyline", "Timeline: step 20, dp2", "Ended"):
        assert words in stills[0]
    assert "<script" not in stills[0]
