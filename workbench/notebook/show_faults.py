"""How stacks of ranks look in a notebook: equal ones once, where in the user's code first."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from workbench.driver import pulses
from workbench.driver.echo import named
from workbench.driver.stacks import Stack, folded, is_users, shown, take

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

PERIOD_S = 0.1


class Stacks(dict[int, Stack]):
    """Stacks by rank; doing: what each rank does, in words."""

    def __init__(self, stacks: Mapping[int, Stack], doing: Mapping[int, str]) -> None:
        super().__init__(stacks)
        self.doing = dict(doing)

    def _parts(self) -> list[tuple[str, str, list[tuple[str, bool]]]]:
        """By group a title, where in the user's code it is, and its calls, the outermost first.

        Of a call: its line, and whether it is the user's.
        """
        found = []
        for ranks, stack in folded(self):
            doing = {self.doing.get(rank, "") for rank in ranks}
            what = f" ({', '.join(sorted(doing))})" if any(doing) else ""
            state = "" if stack.state == "running" else f": {stack.state}"
            idle = ": idle, waits for what is asked of it" if stack.is_idle else state
            calls = [(shown(frame), is_users(frame)) for frame in reversed(stack.own)]
            title = f"{named(ranks).capitalize()}{idle}{what if not idle else ''}"
            found.append((title, next((line for line, mine in calls[::-1] if mine), ""), calls))
        return found

    def __repr__(self) -> str:
        return "\n".join(
            "\n".join(
                [
                    f"{title}: {where}" if where else title,
                    *(f"{'> ' if mine else '  '}{line}" for line, mine in calls),
                ]
            )
            for title, where, calls in self._parts()
        )

    def _repr_html_(self) -> str:
        return "".join(
            f"<div>{escape(title)}{_bold(where)}</div>{_list(calls)}"
            for title, where, calls in self._parts()
        )


def _bold(where: str) -> str:
    return f": <b>{escape(where)}</b>" if where else ""


def _list(calls: list[tuple[str, bool]]) -> str:
    lines = (f"<b>{escape(line)}</b>" if mine else escape(line) for line, mine in calls)
    return f"<pre>{chr(10).join(lines)}</pre>" if calls else ""


def stacks(engines: Engines, ranks: list[int]) -> Stacks:
    """Take the stacks of ranks, and what they do."""
    seen = pulses.Pulses(engines, PERIOD_S).look()
    doing = {rank: one.doing for rank, one in seen.items() if rank in ranks}
    return Stacks(take(engines, ranks), doing)
