"""Tab after a magic: its options, and the names that an option or argument takes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from workbench.driver import current, runs
from workbench.driver.checkpoints import LAST
from workbench.driver.training import DIRECTORY
from workbench.spec.options import PRECISIONS
from workbench.spec.registry import names_in
from workbench.spec.schedules import SCHEDULES
from workbench.spec.strategy import BY, STRATEGIES

LINE = re.compile(r"\s*(?:[\w.,\s]+=\s*)?(%%?)(dist\w*)\s(.*)")


def _checkpoints() -> list[str]:
    """Those of the run there is by their names, and then all of its folder."""
    found = current.all_engines()
    run = found[-1].run if found else None
    own = [entry["name"] for entry in run.checkpoints()] if run else []
    return [*own, *_all_checkpoints(run.directory.parent if run else DIRECTORY)]


def _all_checkpoints(root: str | Path = DIRECTORY) -> list[str]:
    return [LAST, *(f"{entry['run']}/{entry['name']}" for entry in runs.list_in(root))]


# What an option or argument takes, by the name it is kept under.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "recipe": lambda: names_in("recipes"),
    "strategy": lambda: STRATEGIES,
    "by": lambda: BY,
    "schedule": lambda: SCHEDULES,
    "precision": lambda: PRECISIONS,
    "checkpoint": _checkpoints,
    "restore": _all_checkpoints,
    "lang": lambda: names_in("notebook/panel/texts"),
}


class Completion:
    """A matcher for the lines of the magics that `shell` has."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    @context_matcher(identifier="workbench", priority=200)
    def match(self, context: CompletionContext) -> SimpleMatcherResult:
        """What may stand at the cursor."""
        line = LINE.fullmatch(context.text_until_cursor)
        if not line:
            return {"completions": []}
        kind = "cell" if line[1] == "%%" else "line"
        function = self._shell.magics_manager.magics[kind].get(line[2])
        parser = getattr(function, "parser", None)
        if not isinstance(parser, argparse.ArgumentParser):
            return {"completions": []}
        words = line[3].split()
        fragment = words.pop() if line[3] and not line[3][-1].isspace() else ""
        fragment, found = _fitting(parser, words, fragment)
        return {
            "completions": [SimpleCompletion(text=text, type="param") for text in found],
            "matched_fragment": fragment,
            "suppress": True,
        }


def _fitting(
    parser: argparse.ArgumentParser, words: list[str], fragment: str
) -> tuple[str, list[str]]:
    """The part of the line to replace, and what it may become."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    if "=" in fragment:
        given, _, fragment = fragment.partition("=")
        words = [*words, given]
    last = options.get(words[-1]) if words else None
    if last is not None and last.nargs != 0:
        return fragment, _values(last, fragment)
    unused = [name for name, action in options.items() if not used(action, words)]
    found = [name for name in sorted(unused) if name.startswith(fragment or "--")]
    if fragment.startswith("-"):
        return fragment, found
    places = [action for action in parser._actions if not action.option_strings]
    taken = sum(
        not word.startswith("-") and not _takes_next(options, before)
        for before, word in zip(["", *words], words, strict=False)
    )
    values = _values(places[taken], fragment) if taken < len(places) else []
    return fragment, values if fragment else [*values, *found]


def used(action: argparse.Action, words: list[str]) -> bool:
    """Whether an option stands in the line already."""
    return any(name in words for name in action.option_strings)


def _takes_next(options: dict[str, argparse.Action], word: str) -> bool:
    return word in options and options[word].nargs != 0


def _values(action: argparse.Action, fragment: str) -> list[str]:
    known = VALUES.get(action.dest, tuple)()
    return [text for text in known if text.startswith(fragment)]
