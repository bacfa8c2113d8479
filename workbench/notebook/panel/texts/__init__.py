"""What the panel says: one file a language, named as the user types it, with the keys of en.

TEXTS are the panel's own. EVENTS, MARKS and PHRASES say in this language what the driver says in
English; an error, a warning and a note are free text and stay as they are.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import InputError
from workbench.spec.near import unknown

# Values of events that the driver says in words.
PHRASED = ("ranks", "who", "filled", "source")


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
        self._phrases: Mapping[str, str] = module.PHRASES

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
        said = {**snapshot, "events": events, "marks": marks}
        return {**said, "faults": self._faults(said["faults"])} if "faults" in said else said

    def _faults(self, faults: Mapping[str, Any]) -> dict[str, Any]:
        outages = [
            {**one, "filled": self._phrased(one["filled"]), "source": self._phrased(one["source"])}
            for one in faults["outages"]
        ]
        return {**faults, "outages": outages}

    def _phrased(self, text: str) -> str:
        for pattern, said in self._phrases.items():
            text = re.sub(pattern, said, text)
        return text

    def _event(self, name: str, values: Mapping[str, str]) -> str:
        strategy = self.texts.get(f"strategy_{values.get('strategy')}", "")
        told = {key: self._phrased(values[key]) for key in PHRASED if key in values}
        return self._events[name].format(**{**values, **told, "strategy": strategy})
