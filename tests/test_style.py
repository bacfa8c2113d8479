"""What no linter says: ASCII, short files, docstrings in registries, links that lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "workbench"
CODE = (".py", ".js", ".css", ".toml", ".yml", ".md", "")
MAX_LINES = 400
REGISTRIES = ("recipes", "driver/launchers", "engine/axes")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)[^)]*\)")


def tracked() -> list[Path]:
    """Files of the repository, or of the folder when it is no clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [
            path
            for folder in ("workbench", "tests", "docs")
            for path in (REPOSITORY / folder).rglob("*")
        ]
    return [path for path in paths if path.is_file()]


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


FILES = tracked()
SOURCES = [path for path in FILES if path.suffix in CODE]
PAGES = [path for path in FILES if path.suffix == ".md"]


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 20
    assert REPOSITORY / "README.md" in PAGES


# What the panel says in other languages is text, and lies in files of its own.
@pytest.mark.parametrize("path", [path for path in SOURCES if "texts" not in path.parts], ids=short)
def test_source_is_ascii(path: Path):
    text = path.read_text(encoding="utf-8")
    odd = {
        f"line {number}": [char for char in line if ord(char) > 127]
        for number, line in enumerate(text.splitlines(), 1)
        if not line.isascii()
    }
    assert not odd


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.is_relative_to(PACKAGE)], ids=short
)
def test_a_file_of_the_package_has_at_most_400_lines(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_somewhere(page: Path):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target and "mailto:" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_readme_has_every_magic():
    folder = PACKAGE / "notebook" / "magics"
    names = [
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"^    def (dist\w*)\(self", path.read_text(), re.M)
    ]
    readme = (REPOSITORY / "README.md").read_text()
    assert len(names) > 10
    assert [name for name in names if f"| `%{name}" not in readme.replace("%%", "%")] == []


@pytest.mark.parametrize("registry", REGISTRIES)
def test_every_file_of_a_registry_says_what_it_is(registry: str):
    files = [path for path in (PACKAGE / registry).glob("*.py")]
    assert files
    silent = [path.name for path in files if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_the_package_is_found_from_here():
    spec = importlib.util.find_spec("workbench")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(REPOSITORY)
