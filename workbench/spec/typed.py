"""Typed: a strategy with its options, as a magic and as Python take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def typed(strategy: str, options: Mapping[str, Any]) -> str:
    """`hybrid --pp 2 ("hybrid", pp=2)`; the options are given ones, none of them None or False."""
    magic = [f"--{key}" if value is True else f"--{key} {value}" for key, value in options.items()]
    python = [f"{key}={_quoted(value)}" for key, value in options.items()]
    return f"{' '.join((strategy, *magic))} ({', '.join((_quoted(strategy), *python))})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
