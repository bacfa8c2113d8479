"""Where a cell's code can be read again: tracebacks, inspect.getsource, torch.compile.

A cell compiles under a file name of its own, `<cell 7>`, whose lines are put in linecache.
inspect finds functions by that name. A class it looks for in the file of its module, and
`__main__` has none, so `getfile` is taught to name the cell that defined the class.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import traceback
from collections.abc import Iterator
from types import CodeType

MESSAGE_CHARS = 2_000


def file_name(number: int) -> str:
    """The name a cell compiles under."""
    return f"<cell {number}>"


def remember(name: str, source: str) -> None:
    """Make the lines of a cell readable for as long as the process lives."""
    lines = (source.rstrip() + "\n").splitlines(keepends=True)
    # An entry without a modification time is not a file on disk: checkcache leaves it alone.
    linecache.cache[name] = (len(source), None, lines, name)


def is_cell(name: str) -> bool:
    """Whether a file name is that of a cell."""
    return name.startswith("<cell ")


def teach_inspect() -> None:
    """Let inspect find the source of classes that cells define."""
    if hasattr(inspect.getfile, "__wrapped__"):
        return
    plain = inspect.getfile

    @functools.wraps(plain)
    def getfile(object):
        if inspect.isclass(object) and object.__module__ == "__main__":
            name = cell_of(object)
            if name:
                return name
        return plain(object)

    inspect.getfile = getfile


def cell_of(kind: type) -> str | None:
    """The cell that defined a class: by its methods' code, else the last that has its name."""
    for code in _codes(kind):
        if is_cell(code.co_filename):
            return code.co_filename
    cells = [name for name in linecache.cache if is_cell(name)]
    for name in reversed(cells):
        source = "".join(linecache.getlines(name))
        if kind.__qualname__ in _class_names(ast.parse(source)):
            return name
    return None


def _codes(kind: type) -> Iterator[CodeType]:
    for value in vars(kind).values():
        inner = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        code = getattr(inner, "__code__", None)
        # A method put in from elsewhere says nothing about where the class is from.
        if isinstance(code, CodeType) and code.co_qualname.startswith(kind.__qualname__ + "."):
            yield code


def _class_names(node: ast.AST, prefix: str = "") -> set[str]:
    names = set()
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef):
            names.add(prefix + child.name)
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{child.name}.<locals>."
        names |= _class_names(child, inner)
    return names


def report(error: BaseException, name: str | None = None) -> dict:
    """What a user needs of an exception: its class and text, and the lines of cells it crossed.

    -> {"name", "text", "traceback": ["cell 7, line 3, in forward: return x @ w", ...], "line"};
    line is the last one in cell `name`, or None. Equal errors on several ranks give equal reports.
    """
    if isinstance(error, SyntaxError) and is_cell(file := error.filename or ""):
        line = (error.text or "").strip()
        where = [f"cell {file[6:-1]}, line {error.lineno}: {line}"] if line else []
        return _report(error, error.msg, where, error.lineno)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_cell(f.filename)]
    where = [_frame(frame) for frame in frames]
    lines = [frame.lineno for frame in frames if frame.filename == name]
    cause = error.__cause__
    if cause is not None:
        where.append(f"caused by {type(cause).__name__}: {_text(cause)}")
    where += getattr(error, "__notes__", [])
    return _report(error, _text(error), where, lines[-1] if lines else None)


def _report(error: BaseException, text: str, where: list[str], line: int | None) -> dict:
    return {"name": type(error).__name__, "text": text, "traceback": where, "line": line}


def _frame(frame: traceback.FrameSummary) -> str:
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"cell {frame.filename[6:-1]}, line {frame.lineno}{inside}: {frame.line}"


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - the user's __str__ may raise anything
        text = f"(its text cannot be shown: {type(second).__name__})"
    over = len(text) - MESSAGE_CHARS
    return f"{text[:MESSAGE_CHARS]} ... ({over:,} more characters)" if over > 0 else text
