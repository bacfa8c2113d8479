"""What the ranks print, on the screen of whoever runs a cell: equal lines once, labelled by rank.

One thread pulls the messages of all ranks (`engine/output.py` pushes them) and hands each to the
watch of its cell. Equal lines of several ranks that come within a short window are one line,
`[ranks 0-3] text`; the order of lines within a rank is kept, and a line is never cut.
"""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import TextIO

import zmq

# Ranks that share cores print the same line some tenths of a second apart.
WINDOW_S = 0.25
LIVE_CHARS = 160
STOP_S = 5.0


def named(ranks: Iterable[int]) -> str:
    """Ranks as a reader names them: "rank 2", "ranks 0-2,5"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {spans}"


_numbers = itertools.count()


def _pair(address: str) -> tuple[zmq.Socket, zmq.Socket]:
    """Two ends of a line within this process."""
    ends = zmq.Context.instance().socket(zmq.PAIR), zmq.Context.instance().socket(zmq.PAIR)
    ends[0].bind(address)
    ends[1].connect(address)
    return ends


class Echo:
    """Pulls the output of all ranks from `address`, for as long as the engines live."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.numbers = itertools.count(1)
        self.watches: dict[int, Watch] = {}
        # What no cell printed: a training, a thread that outlived its cell.
        self.stray: deque[dict] = deque(maxlen=1_000)
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        # Not over the address, which a process that began later may have by then.
        self._bell, self._rung = _pair(f"inproc://echo-{next(_numbers)}")
        self.thread = threading.Thread(target=self._pull, name="echo", daemon=True)
        self.thread.start()

    def watch(self, ranks: Iterable[int]) -> Watch:
        """A new cell's number and what its ranks print; close it when the cell is over."""
        number = next(self.numbers)
        self.watches[number] = watch = Watch(self, number, ranks)
        return watch

    def stop(self) -> None:
        """End the thread and free the address; again does nothing."""
        if not self._bell.closed:
            self._bell.send(b"")
            self._bell.close()
        self.thread.join(STOP_S)

    def _pull(self) -> None:
        poller = zmq.Poller()
        with self.socket, self._rung:
            for one in (self.socket, self._rung):
                poller.register(one, zmq.POLLIN)
            while self._rung not in dict(poller.poll()):
                message = json.loads(self.socket.recv())
                watch = self.watches.get(message["cell"])
                if watch:
                    watch.events.put(message)
                else:
                    self.stray.append(message)


class Watch:
    """The messages of one cell, in the order they came; `events` also takes what others put."""

    def __init__(self, echo: Echo, number: int, ranks: Iterable[int]) -> None:
        self.echo = echo
        self.number = number
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.num_seen = dict.fromkeys(ranks, 0)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.echo.watches.pop(self.number, None)


class Grouping:
    """Lines of several ranks, merged: equal ones together, each rank's in their order."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[tuple[str, float]]] = {}
        self.counts: dict[int, Counter[str]] = {}

    def add(self, rank: int, lines: Iterable[str], now_s: float) -> None:
        """Lines of one rank that just came."""
        self.queues.setdefault(rank, deque()).extend((line, now_s) for line in lines)
        self.counts.setdefault(rank, Counter()).update(lines)

    def due_s(self) -> float | None:
        """When the next line has waited long enough, or None without one."""
        return min((q[0][1] for q in self.queues.values() if q), default=None)

    def take(
        self, now_s: float, *, running: set[int], final: bool = False
    ) -> list[tuple[list[int], str]]:
        """The lines to show now, each with its ranks.

        running: the ranks that may still print; a line that all of them have is not held back.
        final: nothing more will come, so nothing is held back.
        """
        found = []
        while heads := {rank: q[0] for rank, q in self.queues.items() if q}:
            texts = {text for text, _ in heads.values()}
            if len(texts) == 1 and running <= heads.keys():
                text = texts.pop()
            else:
                late = {r for r, (_, came_s) in heads.items() if final or now_s - came_s > WINDOW_S}
                if not late:
                    break
                text = self._first(heads, late)
            ranks = [rank for rank, (head, _) in heads.items() if head == text]
            for rank in ranks:
                self.queues[rank].popleft()
                self.counts[rank][text] -= 1
            found.append((sorted(ranks), text))
        return found

    def _first(self, heads: dict[int, tuple[str, float]], late: set[int]) -> str:
        """The line that costs the fewest groups: one that no other rank has further behind."""
        by_age = sorted(heads, key=lambda r: (r not in late, round(heads[r][1] / WINDOW_S), r))
        for rank in by_age:
            text = heads[rank][0]
            if not any(self.counts[r][text] for r in heads if heads[r][0] != text):
                return text
        return heads[by_age[0]][0]


class Screen:
    """Writes labelled lines, and below them one line that shows progress in place."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.files = {"stdout": out, "stderr": err}
        self.groupings = {name: Grouping() for name in self.files}
        self.live: dict[tuple[str, int], str] = {}
        self.drawn: tuple[str, str] | None = None

    def receive(self, message: dict) -> None:
        """Take one message of a rank; `refresh` shows it."""
        stream, rank = message["stream"], message["rank"]
        self.groupings[stream].add(rank, message["lines"], time.monotonic())
        self.live[stream, rank] = message["live"]

    def wait_s(self) -> float | None:
        """How long until `refresh` would show more, or None if nothing is held back."""
        due = [d for g in self.groupings.values() if (d := g.due_s()) is not None]
        return max(0.0, min(due) + WINDOW_S - time.monotonic()) + 0.001 if due else None

    def refresh(self, running: set[int], *, final: bool = False) -> None:
        """Write the lines that are due, and the state of the progress bars."""
        if final:
            self.live.clear()
        for stream, grouping in self.groupings.items():
            found = grouping.take(time.monotonic(), running=running, final=final)
            if found:
                self._clear()
                text = "".join(f"[{named(ranks)}] {line}".rstrip() + "\n" for ranks, line in found)
                self.files[stream].write(text)
        self._draw()
        for file in self.files.values():
            file.flush()

    def block(self, ranks: Iterable[int], text: str) -> None:
        """Write a value of several lines under one label."""
        label = f"[{named(ranks)}] "
        self._clear()
        self.files["stdout"].write(label + text.replace("\n", "\n" + " " * len(label)) + "\n")
        self.files["stdout"].flush()

    def note(self, text: str) -> None:
        """Write a line of our own to standard error."""
        self._clear()
        self.files["stderr"].write(text + "\n")
        self.files["stderr"].flush()

    def _draw(self) -> None:
        bars = {key: text for key, text in self.live.items() if text}
        if not bars:
            self._clear()
            return
        (stream, rank), text = min(bars.items(), key=lambda item: item[0][1])
        alike = [r for (s, r), other in bars.items() if s == stream and other == text]
        others = len({r for _, r in bars} - {*alike, rank})
        line = f"[{named(alike)}] {text}" + (f" (and {others} more)" if others else "")
        file = self.files[stream]
        width = shutil.get_terminal_size().columns - 1 if file.isatty() else LIVE_CHARS
        line = line[:width]
        if (stream, line) == self.drawn:
            return
        before = self.drawn[1] if self.drawn and self.drawn[0] == stream else ""
        if self.drawn and not before:
            self._clear()
        file.write("\r" + line.ljust(len(before)))
        self.drawn = (stream, line)

    def _clear(self) -> None:
        if self.drawn:
            stream, line = self.drawn
            self.files[stream].write("\r" + " " * len(line) + "\r")
            self.drawn = None
