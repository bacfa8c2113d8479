"""What all tests share: a private home and folder, and engines that live on from test to test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Clusters

from workbench.driver import session

REPOSITORY = Path(__file__).resolve().parents[1]

# Before anything of the tests starts a process: two cores carry four ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
)


@pytest.fixture(scope="session", autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's IPython and Jupyter folders, nothing written there."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            folder = home / name.lower()
            folder.mkdir()
            patch.setenv(name, str(folder))
        # Sessions of these tests are apart from those of notebooks that run beside them, and what
        # the kernels of browser tests leave to their lease is ended. Short: a socket lies in it.
        with tempfile.TemporaryDirectory(prefix="wb", dir="/tmp") as runtime:
            patch.setenv("XDG_RUNTIME_DIR", runtime)
            yield
            session.end_abandoned()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs/` of a test lies in the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """`clusters(3)` gives engines with 3 live ranks; see clusters.py."""
    held = Clusters()
    yield held
    held.close()
