"""Runs a cell on ranks, shows what it prints while it runs, and what came of it."""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from workbench.driver import stacks, stall
from workbench.driver.echo import Screen, Watch, named
from workbench.driver.pulses import Pulses
from workbench.driver.revive import revive
from workbench.errors import InputError, RankError, WorkbenchError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

# Output that a reply counts and that does not come is given up after this long.
OUTPUT_S = 1.0
INTERRUPTED_S = 3.0
# After one rank raised, how long the others may go on before their collectives are broken off,
# and before the user is told that they still run.
FREE_S = 0.5
STUCK_S = 2.0
# How often it is looked whether ranks stand still, and for how long a rank has waited in a
# collective that is no longer expected to end by itself.
LOOK_S, WAITED_S = 1.0, 0.2
# The same where a rank is simply done, and the others perhaps wait for it in a collective.
ALONE_S = 10.0
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
GLOO_PLACE = re.compile(r"\[\S+\.cc:\d+\] ")
PEER_GONE = re.compile(r"Connection (closed|reset) by peer|pair closure|Timed out waiting")

Display = Callable[[list[int], dict], None]


@dataclass(frozen=True)
class CellResult:
    """What a cell gave on its ranks: the text of a last expression's value, by rank."""

    number: int
    ranks: list[int]
    values: dict[int, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"cell {self.number} on {named(self.ranks)}: done"


def run_cell(
    engines: Engines,
    source: str,
    *,
    ranks: Iterable[int] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
    display: Display | None = None,
) -> CellResult:
    """Run a cell on ranks (default: all), its output on `out` and `err` as it comes.

    display is called with (ranks, {"data", "metadata"}) for what the cell shows richly, such as
    figures. An interrupt (KeyboardInterrupt) ends the cell on the ranks; their variables stay.

    Raises RankError with one report of what the ranks raised, equal reports grouped, and
    InputError for ranks that do not exist.
    """
    chosen = _chosen(ranks, engines.num_ranks)
    screen = Screen(out or sys.stdout, err or sys.stderr)
    for told in revive(engines).values():
        screen.note(told)
    held = contextlib.nullcontext() if engines.run is None else engines.run.hold()
    with held, engines.echo.watch(chosen) as watch:
        futures = engines.submit("run_cell", source, watch.number, ranks=chosen)
        following = Following(engines, watch, screen)
        following.follow(dict(zip(chosen, futures, strict=True)))
        interrupted = False
        try:
            following.until_done()
        except KeyboardInterrupt:
            interrupted = True
            _interrupt(following)
        replies = following.replies
        met_again = _meet_again(engines, following)
    for same, text in _grouped({r: reply.get("value_text") for r, reply in replies.items()}):
        screen.block(same, text)
    _show_rich(replies, display)
    _say_dropped(replies, screen, engines)
    if error := failure(replies, interrupted=interrupted):
        if met_again:
            error.add_note("The ranks met again in a new process group; their variables stay.")
        raise error
    if len(chosen) == engines.num_ranks:
        engines.cells.append((watch.number, source))
    values = {rank: reply["value_text"] for rank, reply in replies.items() if reply["value_text"]}
    return CellResult(watch.number, chosen, values)


def _chosen(ranks: Iterable[int] | None, num_ranks: int) -> list[int]:
    chosen = sorted(set(range(num_ranks) if ranks is None else ranks))
    wrong = [rank for rank in chosen if not 0 <= rank < num_ranks]
    if wrong or not chosen:
        what = f"no {named(wrong)}" if wrong else "no ranks given"
        raise InputError(f"{what}: use ranks from 0 to {num_ranks - 1}.")
    return chosen


class Following:
    """Waits for the replies of a cell and all that they say was printed."""

    def __init__(self, engines: Engines, watch: Watch, screen: Screen) -> None:
        self.engines = engines
        self.watch = watch
        self.screen = screen
        self.waiting: set[int] = set()
        self.futures: dict[int, Future] = {}
        self.replies: dict[int, dict[str, Any]] = {}
        self.has_failed = False
        self.is_told = False
        self.is_freed = False
        # What to do at which time while ranks that raised nothing still run.
        self.alarms: list[tuple[float, Callable[[], None]]] = []
        self.pulses = Pulses(engines, LOOK_S)
        self.alarms.append((time.monotonic() + LOOK_S, self._look))

    def follow(self, futures: dict[int, Future]) -> None:
        """Have the replies of these ranks come as events."""
        self.futures |= futures
        self.waiting |= set(futures)
        for rank, future in futures.items():
            future.add_done_callback(lambda done, rank=rank: self.watch.events.put((rank, done)))

    def give_up(self) -> None:
        """Have nothing queued behind the ranks that are still in the cell."""
        waiting = {rank: self.futures[rank] for rank in self.waiting}
        self.engines.mark_stuck(waiting, f"it is still in cell {self.watch.number}")

    def until_done(self, limit_s: float | None = None) -> bool:
        """Show output until every rank has answered; False if `limit_s` was over before."""
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while self.waiting:
            self._next(self._timeout_s(end_s))
            self.screen.refresh(self.waiting)
            if end_s is not None and time.monotonic() >= end_s and self.waiting:
                break
        self._late_output()
        self.screen.refresh(self.waiting, final=True)
        return not self.waiting

    def _timeout_s(self, end_s: float | None) -> float | None:
        now_s = time.monotonic()
        limits = [alarm_s - now_s for alarm_s, _ in self.alarms]
        if end_s is not None:
            limits.append(end_s - now_s)
        if (wait_s := self.screen.wait_s()) is not None:
            limits.append(wait_s)
        return max(0.0, min(limits)) if limits else None

    def _next(self, timeout_s: float | None) -> bool:
        """Take one event and those that came with it; False if none came in time."""
        events = self.watch.events
        try:
            self._take(events.get(timeout=timeout_s))
            while not events.empty():
                self._take(events.get())
        except queue.Empty:
            now_s = time.monotonic()
            due = [act for alarm_s, act in self.alarms if alarm_s <= now_s]
            self.alarms = [alarm for alarm in self.alarms if alarm[0] > now_s]
            for act in due:
                act()
            return False
        return True

    def _take(self, event: Any) -> None:
        if isinstance(event, dict):
            self.watch.num_seen[event["rank"]] += 1
            self.screen.receive(event)
            return
        rank, future = event
        self.waiting.discard(rank)
        self.replies[rank] = reply = _reply(future)
        now_s = time.monotonic()
        if len(self.replies) == 1:
            self.alarms.append((now_s + ALONE_S, self._say_stuck))
        if not reply["ok"] and not self.has_failed:
            self.has_failed = True
            self.alarms += [(now_s + FREE_S, self.free), (now_s + STUCK_S, self._say_stuck)]

    def free(self) -> None:
        """Break off the collectives in which ranks may wait for one that will not come."""
        if self.waiting:
            self.is_freed = True
            self.engines.free(sorted(self.waiting))

    def free_waiting(self) -> None:
        """Break off the collectives that ranks have waited in for a while."""
        seen = self.pulses.look()
        waiting = [rank for rank, one in seen.items() if one.waits and one.still_s > WAITED_S]
        if chosen := sorted(self.waiting.intersection(waiting)):
            self.is_freed = True
            self.engines.free(chosen)

    def _look(self) -> None:
        """Say so when the ranks wait for each other, or for one that does not come."""
        if self.is_told or not self.waiting:
            return
        seen = self.pulses.look()
        found = stall.judge(seen, stall.LEAST_S)
        if found is None:
            self.alarms.append((time.monotonic() + LOOK_S, self._look))
            return
        self.is_told = True
        taken = stacks.take(self.engines, [*found.ranks, *found.waiting])
        told = stall.in_cell(found, taken, seen)
        self.screen.note(f"{told} Interrupt the kernel to end the cell.")

    def _say_stuck(self) -> None:
        if self.waiting and not self.is_told:
            self.is_told = True
            ended = named(self.replies)
            be = "is" if len(self.replies) == 1 else "are"
            run = "runs" if len(self.waiting) == 1 else "run"
            self.screen.note(
                f"{ended} {be} done; {named(self.waiting)} still {run}. "
                "Interrupt the kernel to end the cell."
            )

    def _late_output(self) -> None:
        end_s = time.monotonic() + OUTPUT_S
        while any(self.watch.num_seen[r] < reply["messages"] for r, reply in self.replies.items()):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._next(left_s):
                break


def _reply(future: Future) -> dict[str, Any]:
    """A rank's reply; a rank that could not give one has failed with what its future says."""
    error = future.exception()
    if error is None:
        return future.result()
    told = {"name": type(error).__name__, "text": str(error), "traceback": [], "line": None}
    lost = error if isinstance(error, WorkbenchError) else None
    return {"ok": False, "error": told, "lost": lost, "messages": 0, "dropped": 0}


def _interrupt(following: Following) -> None:
    """End the cell on the ranks that still run it, and wait a little for what they say."""
    try:
        if following.waiting:
            following.engines.interrupt(sorted(following.waiting))
            # A rank that waits in a collective hears of it only once that is broken off.
            following.free_waiting()
            following.alarms.append((time.monotonic() + FREE_S, following.free))
            following.is_told = True
        done = following.until_done(INTERRUPTED_S)
    except KeyboardInterrupt:
        done = not following.waiting
    if not done:
        stuck = sorted(following.waiting)
        following.give_up()
        raise RankError(
            f"The interrupt has not yet ended the cell on {named(stuck)}: it ends when the call "
            f"it is in returns. Variables stay; %dist_replace {stuck[0]} ends it, %dist_stop "
            "all ranks."
        ) from None


def _meet_again(engines: Engines, following: Following) -> bool:
    """A new process group where this cell broke the old one."""
    broken = following.is_freed or any(
        not reply["ok"] and _is_peer_gone(reply["error"]) for reply in following.replies.values()
    )
    if not broken or not engines.alive:
        return False
    engines.rejoin()
    return True


def failure(
    replies: dict[int, dict[str, Any]], *, interrupted: bool = False
) -> WorkbenchError | None:
    """One error for all that the ranks raised: a sentence, then the lines of the cell as notes.

    interrupted: the user ended the cell, so a collective that broke off is no error of its own.
    """
    told: dict[str, tuple[dict, list[int]]] = {}
    for rank, reply in sorted(replies.items()):
        if not reply["ok"]:
            told.setdefault(repr(reply["error"]), (reply["error"], []))[1].append(rank)
    if not told:
        return None
    causes = [(error, ranks) for error, ranks in told.values() if not _is_aftermath(error)]
    after = [(error, ranks) for error, ranks in told.values() if _is_aftermath(error)]
    if not causes and not interrupted and not any(map(_is_interrupt, (e for e, _ in after))):
        causes, after = after, []
    lines = []
    for error, ranks in causes:
        colon = ": " if error["text"] else ""
        text = f"{error['name']}{colon}{GLOO_PLACE.sub('', error['text'])}"
        lines.append(f"{named(ranks)}: {text}{_where(error)}")
        lines += [f"  {line}" for line in error["traceback"]]
    ends: dict[str, list[int]] = {}
    for error, ranks in after:
        what = "interrupted" if interrupted or _is_interrupt(error) else "waited in a collective"
        ends.setdefault(what + _where(error), []).extend(ranks)
    stay = "" if causes else "; variables stay"
    lines += [f"{named(ranks)}: {end}{stay}" for end, ranks in ends.items()]
    lost = [reply["lost"] for reply in replies.values() if reply.get("lost")]
    first = lost[0] if lost and len(lost) == sum(len(r) for _, r in causes) else None
    return _noted(first or RankError(lines[0]), lines[1:])


def _noted(error: WorkbenchError, notes: list[str]) -> WorkbenchError:
    for note in notes:
        error.add_note(note)
    return error


def _is_interrupt(error: dict) -> bool:
    return error["name"] == "KeyboardInterrupt"


def _is_peer_gone(error: dict) -> bool:
    return error["name"] == "WorldLostError" or PEER_GONE.search(error["text"]) is not None


def _is_aftermath(error: dict) -> bool:
    """Whether a rank raised because another did, or the user: never the first cause."""
    return _is_interrupt(error) or _is_peer_gone(error)


def _where(error: dict) -> str:
    return f" (line {error['line']} of the cell)" if error["line"] else ""


def _grouped(texts: dict[int, str | None]) -> list[tuple[list[int], str]]:
    """Equal texts with their ranks; where memory addresses alone differ, without these."""
    by_text: dict[str, dict[int, str]] = {}
    for rank, text in sorted(texts.items()):
        if text is not None:
            by_text.setdefault(ADDRESS.sub("", text), {})[rank] = text
    return [
        (list(same), next(iter(same.values())) if len(set(same.values())) == 1 else text)
        for text, same in by_text.items()
    ]


def _show_rich(replies: dict[int, dict[str, Any]], display: Display | None) -> None:
    """Show each rank's displays in their order, equal ones of several ranks once."""
    if display is None:
        return
    shown: list[tuple[dict, list[int]]] = []
    for rank, reply in sorted(replies.items()):
        for bundle in reply.get("displays", ()):
            same = [ranks for other, ranks in shown if other == bundle and rank not in ranks]
            if same:
                same[0].append(rank)
            else:
                shown.append((bundle, [rank]))
    for bundle, ranks in shown:
        display(ranks, bundle)


def _say_dropped(replies: dict[int, dict[str, Any]], screen: Screen, engines: Engines) -> None:
    for rank, reply in sorted(replies.items()):
        if reply["dropped"]:
            log = engines.ranks[rank]["log"]
            screen.note(f"[rank {rank}] {reply['dropped']:,} lines not shown, whole in {log}")
