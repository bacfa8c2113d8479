"""A folder is a registry: the name of a file is what the user types."""

from __future__ import annotations

import pkgutil
from pathlib import Path


def names_in(folder: str) -> list[str]:
    """Names of the modules of a folder of the package, such as `recipes`; nothing is imported."""
    path = Path(__file__).resolve().parents[1] / folder
    return sorted(module.name for module in pkgutil.iter_modules([str(path)]))
