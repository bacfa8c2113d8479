"""The line of a magic: read by its options, help on -h, one sentence for what does not fit."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, parse_argstring

from workbench.errors import WorkbenchError
from workbench.spec.near import unknown
from workbench.spec.schedules import SCHEDULES
from workbench.spec.strategy import BY


def from_line(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a magic take its options, read, instead of the line; the innermost decorator.

    They have `silent`, too: the line ended with a semicolon, so nothing is to be shown.
    """

    @functools.wraps(method)
    def magic(self: Any, line: str, cell: str | None = None) -> Any:
        text = line.rstrip()
        silent = text.endswith(";")
        text = text.rstrip("; \t")
        if {"-h", "--help"} & set(text.split()):
            print(magic.__doc__)  # noqa: T201 - what was asked for
            return None
        options = _read(magic, text)
        options.silent = silent
        try:
            return method(self, options) if cell is None else method(self, options, cell)
        except KeyboardInterrupt:
            raise WorkbenchError(
                f"%{method.__name__} was interrupted. %dist_status shows what there is."
            ) from None

    return argument("-h", "--help", action="store_true", help="print this")(magic)


def layout_arguments(magic: Any) -> Any:
    """The options that say how a training is spread; they are those of spec/strategy.py."""
    options = (
        ("--ranks", {"type": whole, "metavar": "N", "help": "so many train, the others wait"}),
        (
            "--shard",
            {
                "action": "store_true",
                "default": None,
                "help": "data parallelism: each rank keeps a shard of the state (FSDP2)",
            },
        ),
        ("--by", {"type": word, "help": f"model: cut by {' or '.join(BY)} ({BY[0]})"}),
        ("--microbatches", {"type": whole, "metavar": "N", "help": "pipeline: parts of a batch"}),
        ("--schedule", {"type": word, "help": f"pipeline: {', '.join(SCHEDULES)} (1f1b)"}),
        ("--dp", {"type": whole, "metavar": "N", "help": "hybrid: data-parallel shares"}),
        ("--pp", {"type": whole, "metavar": "N", "help": "hybrid: pipeline stages"}),
        ("--tp", {"type": whole, "metavar": "N", "help": "hybrid: ranks that share each matrix"}),
    )
    for name, how in reversed(options):
        magic = argument(name, **how)(magic)
    return magic


def _plainly(magic: Any, told: str) -> str:
    """What argparse says, with what to type."""
    if found := re.match(r"argument (?:\S+/)?(\S+): expected one argument", told):
        actions = (a for a in magic.parser._actions if found[1] in a.option_strings)
        value = next(((a.metavar or a.dest).upper() for a in actions), "VALUE")
        return f"{found[1]} needs a value: {found[1]} {value}."
    if found := re.match(r"argument (?:\S+/)?(\S+): ignored explicit argument (.*)", told):
        return f"{found[1]} takes no value such as {found[2]}: write it alone, or leave it out."
    if found := re.match(r"the following arguments are required: (.*)", told):
        return f"{found[1]} is missing: %{magic.__name__} {found[1]}."
    return told


def _read(magic: Any, text: str) -> argparse.Namespace:
    magic.parser.allow_abbrev = False  # a new option must not give another meaning to old lines
    try:
        options, rest = parse_argstring(magic, _without_comment(text), partial=True)
    except UsageError as error:
        raise UsageError(f"%{magic.__name__}: {_plainly(magic, str(error))}") from None
    if not rest:
        return options
    first = rest[0].partition("=")[0]
    if first.startswith("-"):
        known = [name for action in magic.parser._actions for name in action.option_strings]
        raise UsageError(f"%{magic.__name__}: {unknown('option', first, known)}")
    raise UsageError(
        f"%{magic.__name__} takes no {rest[0]!r}. %{magic.__name__}? says what it takes."
    )


def _without_comment(text: str) -> str:
    """A cell's line may end as a line of Python may: `%dist_start -n 4  # four`."""
    return text if text.startswith("#") else f" {text}".partition(" #")[0].strip()


def whole(text: str) -> int:
    """A whole number; the driver says which are allowed."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 5") from None


def whole_or_time(text: str) -> int | str:
    """A whole number, or text that the driver reads as a time."""
    return int(text) if text.isdecimal() else word(text)


def number(text: str) -> float:
    """A number; the driver says which are allowed."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, such as 0.5") from None


def word(text: str) -> str:
    """Text, without the quotes that hold blanks together."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
