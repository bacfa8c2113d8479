"""Versions: torch that reads files safely, or none.

Before 2.6 torch.load(weights_only=True) ran code (CVE-2025-32434), before 2.10 it could be made to
write over memory (CVE-2026-24747). The workbench unpickles no file; user code on the ranks does.
"""

from __future__ import annotations

from workbench.errors import StartError

LEAST = (2, 11)  # as pyproject.toml has it; what is safe begins with 2.10


def check_torch(version: str) -> None:
    """Raises StartError for a torch older than the workbench is made for."""
    found = tuple(int(part) for part in version.partition("+")[0].split(".")[:2])
    if found < LEAST:
        least = ".".join(map(str, LEAST))
        raise StartError(
            f"torch {version} is older than {least}, and reading a checkpoint of somebody else "
            f"could run code in it: pip install 'torch>={least}'."
        )
