"""Clusters that are on this machine, whichever kernel started them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.driver import card, current, diary, session
from workbench.driver.card import Card
from workbench.driver.echo import named
from workbench.errors import EnginesError, InputError
from workbench.forkserver.processes import start_time

NONE = "No cluster is there to attach to. %dist_start -n 4 starts four ranks."
OWN = "This notebook controls every cluster there is: %dist_status tells of its ranks."


@dataclass(frozen=True)
class Cluster:
    """One cluster as its files tell of it; its directory is in that of its session."""

    directory: Path
    card: Card

    @property
    def name(self) -> str:
        """That of its run, or of its directory where nothing was trained."""
        return Path(self.card.run).name if self.card.run else self.directory.name

    @property
    def is_own(self) -> bool:
        """Whether this kernel controls it."""
        return self.card.kernel == card.this_kernel()

    def row(self, number: int) -> dict[str, Any]:
        """What is shown of it in a list."""
        told = diary.read(self.card.run) if self.card.run else None
        pid = self.card.kernel[0]
        return {
            "number": number,
            "name": self.name,
            "ranks": len(self.card.places),
            "state": told["state"] if told else "nothing trained",
            "goal": told["goal"] if told else None,
            "kernel": f"process {pid}" if self.card.is_controlled else "gone",
            "age_s": time.time() - self.card.started_s,
            "directory": str(self.directory),
        }


def others() -> list[Cluster]:
    """Those of other kernels, of this user, whose processes live; the oldest first."""
    return [cluster for cluster in everything() if not cluster.is_own]


def everything() -> list[Cluster]:
    """All that live, the oldest first."""
    found = []
    for path in session.parent_directory().glob(f"{session.PREFIX}*/*/{card.NAME}"):
        told = card.read(path.parent)
        try:
            (pid, started), _kernel = session.owners(path.parents[1])
        except (OSError, ValueError, TypeError):
            continue
        if told is not None and started and start_time(pid) == started:
            found.append(Cluster(path.parent, told))
    return sorted(found, key=lambda cluster: cluster.card.started_s)


def chosen(which: str | None) -> Cluster:
    """The cluster that `which` names, by its number in `others` or its name; None: the only one.

    Raises EnginesError without any, InputError where it is not clear which one is meant.
    """
    there = others()
    if not there:
        raise EnginesError(OWN if current.all_engines() else NONE)
    if which is None and len(there) == 1:
        return there[0]
    names = [f"{number} ({cluster.name})" for number, cluster in enumerate(there, 1)]
    if which is None:
        raise InputError(f"There are {len(there)} clusters: {', '.join(names)}. %dist_attach 1")
    text = str(which).strip()
    if text.isdecimal() and 1 <= int(text) <= len(there):
        return there[int(text) - 1]
    fitting = [cluster for cluster in there if cluster.name == text]
    if len(fitting) != 1:
        many = f"{len(fitting)} are called {text!r}" if fitting else f"None is called {text!r}"
        raise InputError(f"{many}. Name one by its number: {', '.join(names)}.")
    return fitting[0]


def does_not_answer(keys: set[int], ranks: dict[int, int]) -> EnginesError:
    """The error about processes that are busy; ranks: by key, as far as they are known."""
    who = named(ranks.get(key, key) for key in keys).capitalize()
    return EnginesError(
        f"{who} did not answer: a cell or a step that was begun before still runs there. "
        "%dist_attach tries again; %dist_stop --all ends all ranks."
    )
