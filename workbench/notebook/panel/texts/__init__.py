"""What the panel says: one file a language, named as the user types it, with the keys of en.

TEXTS are the panel's own. EVENTS and MARKS say in this language what the driver says in English; an
error, a warning and a note are free text and stay as they are.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from workbench.errors import InputError
from workbench.spec.near import unknown


class Language:
    """One language. Raises InputError for one that is not there."""

    def __init__(self, name: str) -> None:
        known = [module.name for module in pkgutil.iter_modules(__path__)]
        if name not in known:
            raise InputError(unknown("language", name, known))
        module = importlib.import_module(f"{__name__}.{name}")
        self.texts: Mapping[str, str] = module.TEXTS
        self._events: Mapping[str, str] = module.EVENTS
        self._marks: Mapping[str, str] = module.MARKS

    def said(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """The snapshot with its events and marks in this language."""
        events = [
            {**event, "text": self._event(event["name"], event["values"])}
            if event.get("name") in self._events
            else event
            for event in snapshot["events"]
        ]
        marks = [
            {**mark, "label": self._marks.get(mark["label"], mark["label"])}
            for mark in snapshot["marks"]
        ]
        return {**snapshot, "events": events, "marks": marks}

    def _event(self, name: str, values: Mapping[str, str]) -> str:
        strategy = self.texts.get(f"strategy_{values.get('strategy')}", "")
        return self._events[name].format(**{**values, "strategy": strategy})
