"""Exports: the training there is, written as a script that needs nothing of this package."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.driver.run import Run


def write(run: Run, path: str | Path, *, force: bool = False) -> Path:
    """Write the script of the recipe and the layout of a run -> its path, absolute.

    Raises InputError where the file cannot be written, RecipeError or LayoutError for what cannot
    be said in a script that stands alone.
    """
    target = _checked(path, force=force)
    about = {"run": run.name, "step": run.step_now, "steps": run.goal, "file": target.name}
    text = run.engines.call("export", about, run.about["cell"], ranks=[0])[0]
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.") from None
    run.tell("info", f"exported {run.layout} as {target.name}")
    return target


def command(run: Run, path: str | Path) -> str:
    """What to type in a terminal to run the script."""
    file, size = shlex.quote(str(path)), run.layout.world_size
    if size == 1:
        return f"python {file}"
    return f"torchrun --standalone --nproc-per-node {size} {file}"


def _checked(path: str | Path, *, force: bool) -> Path:
    """The file to write, looked at before the ranks are asked. Raises InputError."""
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise InputError(f"{path} is a folder. Name a file in it, such as {target / 'script.py'}.")
    if not target.parent.is_dir():
        raise InputError(f"There is no folder {target.parent}. Make it, or name another file.")
    if target.exists() and not force:
        raise InputError(f"{path} is there already. --force (force=True) overwrites it.")
    return target
