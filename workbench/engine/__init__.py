"""The part that runs in the engines, one process a rank; the only ring that imports torch."""

from importlib.metadata import version

from workbench.engine.versions import check_torch

check_torch(version("torch"))
