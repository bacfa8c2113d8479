"""Exports: the training there is, written as a script that needs nothing of this package."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.driver import files

if TYPE_CHECKING:
    from workbench.driver.run import Run


def write(run: Run, path: str | Path, *, force: bool = False) -> Path:
    """Write the script of the recipe and the layout of a run -> its path, absolute.

    Raises InputError where the file cannot be written, RecipeError or LayoutError for what cannot
    be said in a script that stands alone.
    """
    target = files.check(path, force=force)
    about = {"run": run.name, "step": run.step_now, "steps": run.goal, "file": target.name}
    text = run.engines.call("export", about, run.about["cell"], ranks=[0])[0]
    files.written(target, lambda partial: partial.write_text(text, encoding="utf-8"), force=force)
    run.happened("exported", layout=run.layout, file=target.name)
    return target


def command(run: Run, path: str | Path) -> str:
    """What to type in a terminal to run the script."""
    file, size = shlex.quote(str(path)), run.layout.world_size
    if size == 1:
        return f"python {file}"
    return f"torchrun --standalone --nproc-per-node {size} {file}"
