"""Set-up: versions that fit together, commands that exist, an import that costs nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
]
TARGETS = ("lab", "demo", "test", "lint", "bench")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture(scope="module")
def tested() -> dict[str, str]:
    """Name to version, of constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_the_tested_version_is_within_the_bounds(requirement: Requirement, tested: dict[str, str]):
    assert tested[canonicalize_name(requirement.name)] in requirement.specifier
    assert "<" in str(requirement.specifier), "bounded above"
    assert "==" not in str(requirement.specifier), "not pinned"


def test_constraints_name_no_build_of_torch(tested: dict[str, str]):
    # 2.13.0+cpu would keep a machine with a GPU from its CUDA build.
    assert "+" not in tested["torch"]


@needs_make
@pytest.mark.parametrize("target", TARGETS)
def test_make_knows(target: str):
    shown = make("help").stdout
    assert f"make {target}" in shown
    assert make("--dry-run", target, "B=none").returncode == 0


@needs_make
def test_make_without_a_python_says_what_to_install(tmp_path: Path):
    ended = make("install", "PYTHON=", f"READY={tmp_path / 'ready'}")
    assert ended.returncode != 0
    assert "apt install python3 python3-venv" in ended.stderr


@needs_make
@pytest.mark.parametrize(("torch", "size"), [("cpu", "2 of 3: torch (0.2 GB)"), ("cuda", "3 GB")])
def test_an_installation_says_how_long_it_takes_and_where_it_is(
    tmp_path: Path, torch: str, size: str
):
    how = ("install", "PYTHON=python3", f"READY={tmp_path / 'ready'}", f"TORCH={torch}")
    said = make("--dry-run", *how).stdout
    assert "takes some minutes" in said
    stages = [said.index(text) for text in ("1 of 3:", "2 of 3:", "3 of 3:", "Installed.")]
    assert stages == sorted(stages)
    assert size in said


@needs_make
def test_bench_without_a_name_lists_them(tmp_path: Path):
    ready = tmp_path / "ready"
    ready.touch()
    ended = make("bench", f"READY={ready}", "B=none")
    assert ended.returncode != 0
    assert "one of:" in ended.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_check_script_parses():
    subprocess.run(["bash", "-n", REPOSITORY / ".ci" / "run"], check=True)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after the statement."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(ended.stdout.split())


def test_importing_the_package_loads_nothing_else():
    heavy = {"torch", "numpy", "ipyparallel", "IPython", "ipywidgets", "plotly", "zmq"}
    assert heavy & loaded_by("import workbench") == set()


def test_the_kernel_side_loads_no_torch():
    assert "torch" not in loaded_by("import workbench; workbench.start")


def test_versions_agree():
    found = re.search(
        r'^__version__ = "(.+)"$', (REPOSITORY / "workbench" / "__init__.py").read_text(), re.M
    )
    assert found is not None
    assert found[1] == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (REPOSITORY / "CHANGELOG.md").read_text()
