"""Here: how a user knows this notebook among others."""

from __future__ import annotations

import os
from pathlib import Path


def this_notebook() -> str:
    """`notebook a.ipynb (process 123)`; the process alone where Jupyter does not name the file."""
    process = f"process {os.getpid()}"
    path = os.environ.get("JPY_SESSION_NAME", "")
    return f"notebook {Path(path).name} ({process})" if path.endswith(".ipynb") else process
