"""Runs a cell on ranks, shows what it prints while it runs, and what came of it."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from workbench.driver.echo import Screen, Watch, named
from workbench.errors import InputError, RankError, WorkbenchError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

# Output that a reply counts and that does not come is given up after this long.
OUTPUT_S = 1.0
INTERRUPTED_S = 3.0
STUCK_S = 2.0
ADDRESS = re.compile(r" at 0x[0-9a-f]+")

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
    with engines.echo.watch(chosen) as watch:
        futures = engines.submit("run_cell", source, watch.number, ranks=chosen)
        following = Following(watch, screen, dict(zip(chosen, futures, strict=True)))
        try:
            following.until_done()
        except KeyboardInterrupt:
            _interrupt(engines, following)
    replies = following.replies
    for same, text in _grouped({r: reply.get("value_text") for r, reply in replies.items()}):
        screen.block(same, text)
    _show_rich(replies, display)
    _say_dropped(replies, screen, engines)
    if error := failure(replies):
        raise error
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

    def __init__(self, watch: Watch, screen: Screen, futures: dict[int, Future]) -> None:
        self.watch = watch
        self.screen = screen
        self.waiting = set(futures)
        self.replies: dict[int, dict[str, Any]] = {}
        self.failed_s: float | None = None
        self.is_told = False
        for rank, future in futures.items():
            future.add_done_callback(lambda done, rank=rank: watch.events.put((rank, done)))

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
        limits = [self.screen.wait_s(), None if end_s is None else max(0.0, end_s - now_s)]
        if self.failed_s is not None and not self.is_told:
            limits.append(max(0.0, self.failed_s + STUCK_S - now_s))
        return min((limit for limit in limits if limit is not None), default=None)

    def _next(self, timeout_s: float | None) -> bool:
        """Take one event and those that came with it; False if none came in time."""
        events = self.watch.events
        try:
            self._take(events.get(timeout=timeout_s))
            while not events.empty():
                self._take(events.get())
        except queue.Empty:
            self._say_stuck()
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
        if not reply["ok"] and self.failed_s is None:
            self.failed_s = time.monotonic()

    def _say_stuck(self) -> None:
        if self.is_told or self.failed_s is None or time.monotonic() < self.failed_s + STUCK_S:
            return
        self.is_told = True
        failed = [rank for rank, reply in self.replies.items() if not reply["ok"]]
        self.screen.note(
            f"{named(failed)} raised; {named(self.waiting)} still "
            f"{'runs' if len(self.waiting) == 1 else 'run'}, perhaps waiting for it in a "
            "collective. Interrupt the kernel to end the cell."
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


def _interrupt(engines: Engines, following: Following) -> None:
    """End the cell on the ranks that still run it, and wait a little for what they say."""
    asked = sorted(following.waiting)
    try:
        if asked:
            engines.interrupt(asked)
        done = following.until_done(INTERRUPTED_S)
    except KeyboardInterrupt:
        done = not following.waiting
    if not done:
        stuck = sorted(following.waiting)
        raise RankError(
            f"The interrupt has not yet ended the cell on {named(stuck)}: it ends when the call "
            "it is in returns. Variables stay; %dist_stop ends the ranks."
        ) from None


def failure(replies: dict[int, dict[str, Any]]) -> WorkbenchError | None:
    """One error for all that the ranks raised: a sentence, then the lines of the cell as notes."""
    told: dict[tuple, list[int]] = {}
    for rank, reply in sorted(replies.items()):
        if not reply["ok"]:
            error = reply["error"]
            key = (error["name"], error["text"], error["line"], tuple(error["traceback"]))
            told.setdefault(key, []).append(rank)
    if not told:
        return None
    lost = [reply["lost"] for reply in replies.values() if reply.get("lost")]
    if len(lost) == sum(map(len, told.values())):
        return lost[0]
    # That a peer went away is never the first cause, so it is said last.
    ordered = sorted(told.items(), key=lambda item: (_is_echo(item[0]), item[1]))
    (key, ranks), *others = ordered
    error = RankError(_sentence(key, ranks))
    for line in key[3]:
        error.add_note(f"  {line}")
    for key, ranks in others:
        error.add_note(_sentence(key, ranks))
        if not _is_echo(key):
            for line in key[3]:
                error.add_note(f"  {line}")
    return error


def _is_echo(key: tuple) -> bool:
    name, text = key[0], key[1]
    return name == "WorldLostError" or "Connection closed by peer" in text


def _sentence(key: tuple, ranks: list[int]) -> str:
    name, text, line, _ = key
    where = f" (line {line} of the cell)" if line else ""
    return f"{named(ranks)}: {name}{': ' if text else ''}{text}{where}"


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
