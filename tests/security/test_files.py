"""Files of somebody else: a checkpoint or a journal runs no code, whatever is in it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import pickle
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.driver import runs
from workbench.engine.versions import LEAST, check_torch
from workbench.errors import StartError, WorkbenchError
from workbench.spec import manifest as manifests

PACKAGE = Path(__file__).resolve().parents[2] / "workbench"
# Ways to run what a file says, as they are called.
UNSAFE = {
    *(f"{module}.{name}" for module in ("pickle", "marshal", "dill", "cloudpickle", "joblib")
      for name in ("load", "loads", "Unpickler")),
    "torch.load", "numpy.load", "np.load", "shelve.open", "yaml.load", "torch.jit.load",
    "torch.distributed.checkpoint.load", "dcp.load",
}  # fmt: skip


# What one rank tells another by the notebook, in messages that are encrypted or signed; no file.
MESSAGES = ("engine/regroup.py: pickle.loads",)


class Payload:
    """What touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return Path.touch, (self.canary,)


def everywhere(folder: Path, hostile: bytes) -> None:
    names = [".metadata", "__0_0.distcp", "model.pt", "model.pth", "pytorch_model.bin",
             "optimizer.pkl", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin",
             "data.pkl", "rank-1.pt", "state.npy", "config.yaml", "manifest.pkl"]  # fmt: skip
    for name in names:
        (folder / name).write_bytes(hostile)


def as_weights(folder: Path, hostile: bytes) -> None:
    (folder / "rank-0.safetensors").write_bytes(hostile)


def as_manifest(folder: Path, hostile: bytes) -> None:
    (folder / "manifest.json").write_bytes(hostile)


def as_weights_with_a_fitting_manifest(folder: Path, hostile: bytes) -> None:
    as_weights(folder, hostile)
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {"bytes": len(hostile), "sha256": hashlib.sha256(hostile).hexdigest()}
    old = manifest["files"]["rank-0.safetensors"]
    assert set(old) == set(found)
    manifest["files"]["rank-0.safetensors"] = found
    (folder / "manifest.json").write_text(manifests.to_text(manifest))


@pytest.mark.parametrize(
    "place", [everywhere, as_weights, as_manifest, as_weights_with_a_fitting_manifest]
)
def test_a_hostile_checkpoint_runs_nothing(clusters, tmp_path, place: Callable):
    run = clusters(2).train("digits", steps=2, directory=tmp_path)
    run.wait(60)
    run.save("good")
    canary = tmp_path / "canary"
    hostile = pickle.dumps(Payload(canary))
    bad = run.directory / "checkpoints" / "bad"
    shutil.copytree(bad.with_name("good"), bad)
    place(bad, hostile)
    for read in (
        lambda: run.restore("bad"),
        lambda: run.restore(str(bad)),
        run.checkpoints,
        lambda: runs.list_in(tmp_path),
        lambda: run.engines.train("digits", steps=3, directory=tmp_path, restore=str(bad)).wait(60),
    ):
        with contextlib.suppress(WorkbenchError):
            read()
        assert not canary.exists()
    assert run.engines.train("digits", directory=tmp_path, start=False).restore(
        str(bad.with_name("good"))
    )
    pickle.loads(hostile)
    assert canary.exists()  # it would have been seen


def test_nothing_of_ours_unpickles_a_file():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE:
                found.append(f"{path.relative_to(PACKAGE)}: {ast.unparse(node.func)}")
            if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "shelve"):
                found.append(f"{path.relative_to(PACKAGE)}: from {node.module}")
    assert sorted(found) == sorted(MESSAGES)


@pytest.mark.parametrize("version", ["2.5.1", "2.9.0+cu128", "1.13.1", "2.10.0"])
def test_a_torch_that_may_run_code_is_refused(version):
    with pytest.raises(StartError, match=version.replace("+", r"\+")):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0"])
def test_a_newer_torch_is_taken(version):
    check_torch(version)


def test_the_least_torch_is_that_of_the_package():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    (needed,) = [text for text in project["dependencies"] if text.startswith("torch")]
    assert f">={LEAST[0]}.{LEAST[1]}" in needed
