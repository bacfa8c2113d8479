"""A rank's output: whole in two files, and a measured copy of it on the notebook's screen.

For the life of the engine, file descriptors 1 and 2 point at two files, so that prints, warnings,
progress bars, C-level writes and subprocesses all land there. A file, unlike a pipe, is never
full: a rank that writes while it holds the interpreter lock cannot block, and what it wrote just
before it died is still there. A thread reads what is new and pushes it to the notebook through a
socket that never waits; what is over the rate is counted and folded into one line.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path

import zmq

POLL_S = 0.05
LIVE_S = 0.2
FOLD_S = 1.0
CHUNK_BYTES = 1 << 18
# Further behind than this, lines are counted without being looked at.
BACKLOG_BYTES = 1 << 22
LINE_BYTES = 4_000
UNFINISHED_BYTES = 1 << 16
LAST_LINES = 5
SEND_LIMIT = 1_000


class Budget:
    """What a rank may show: a burst at once, then so many lines and bytes per second."""

    LINES, BYTES = 1_000, 128_000
    LINES_PER_S, BYTES_PER_S = 200, 64_000

    def __init__(self, now_s: float) -> None:
        self.lines, self.bytes = float(self.LINES), float(self.BYTES)
        self.now_s = now_s

    def refill(self, now_s: float) -> None:
        """Add what the time since the last refill allows."""
        passed_s, self.now_s = now_s - self.now_s, now_s
        self.lines = min(self.LINES, self.lines + passed_s * self.LINES_PER_S)
        self.bytes = min(self.BYTES, self.bytes + passed_s * self.BYTES_PER_S)

    def take(self, num_bytes: int) -> bool:
        """Pay for one line, if it can be paid for."""
        if self.lines < 1 or self.bytes < num_bytes:
            return False
        self.lines -= 1
        self.bytes -= num_bytes
        return True


class Tail:
    """The lines a growing file gained since it was last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.offset = os.fstat(self.fd).st_size
        self.rest = b""

    def read(self) -> tuple[int, list[str]]:
        """How many lines were skipped, and the whole lines after them."""
        end = os.fstat(self.fd).st_size
        skipped = self._skip(end - BACKLOG_BYTES)
        lines: list[bytes] = []
        while self.offset < end:
            chunk = os.pread(self.fd, min(CHUNK_BYTES, end - self.offset), self.offset)
            self.offset += len(chunk)
            *whole, self.rest = (self.rest + chunk).split(b"\n")
            lines += whole
        if len(self.rest) > UNFINISHED_BYTES and b"\r" in self.rest:
            # A long-lived progress bar never ends its line; only its last state can matter.
            self.rest = b"\r" + shown(self.rest)
        elif len(self.rest) > UNFINISHED_BYTES:
            lines.append(self.take_rest())
        return skipped, [decoded(line) for line in lines]

    def take_rest(self) -> bytes:
        """The unfinished line, which then counts as read."""
        rest, self.rest = self.rest, b""
        return rest

    def _skip(self, until: int) -> int:
        """Count the lines up to the end of the first one that ends after `until`."""
        skipped = 0
        while self.offset < until:
            chunk = os.pread(self.fd, CHUNK_BYTES, self.offset)
            cut = chunk.rfind(b"\n") + 1 or len(chunk)
            self.rest = b"" if chunk[cut - 1 : cut] == b"\n" else self.rest[:LINE_BYTES]
            skipped += chunk.count(b"\n")
            self.offset += cut
        return skipped


def shown(line: bytes) -> bytes:
    """What a terminal shows of a line that went back to its start with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def decoded(line: bytes) -> str:
    """A line as it is shown; a very long one is cut."""
    line = shown(line)
    text = line[:LINE_BYTES].decode("utf-8", "replace").rstrip()
    over = len(line) - LINE_BYTES
    return f"{text} ... ({over:,} more bytes)" if over > 0 else text


class Stream:
    """One file on its way to the screen: lines within the budget, the rest folded."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.tail = Tail(path)
        self.live = ""
        self.live_since_s = 0.0
        self.held = 0
        self.held_since_s = 0.0
        self.last: deque[str] = deque(maxlen=LAST_LINES)

    def collect(self, budget: Budget, now_s: float, *, final: bool) -> tuple[list[str], str]:
        """The lines to show now, and the state of an unfinished line (a progress bar) or ""."""
        skipped, lines = self.tail.read()
        if final and self.tail.rest:
            lines.append(decoded(self.tail.take_rest()))
        if skipped:
            self._hold(skipped, now_s)
        out = []
        for line in lines:
            if not self.held and budget.take(len(line)):
                out.append(line)
            else:
                self._hold(1, now_s)
                self.last.append(line)
        quiet = not lines and not skipped
        if self.held and (final or quiet or now_s - self.held_since_s > FOLD_S):
            out += self._fold()
        if lines or not self.tail.rest:
            self.live, self.live_since_s = "", now_s
        elif now_s - self.live_since_s >= LIVE_S:
            self.live, self.live_since_s = decoded(self.tail.rest), now_s
        return out, self.live

    def _hold(self, count: int, now_s: float) -> None:
        if not self.held:
            self.held_since_s = now_s
        self.held += count

    def _fold(self) -> list[str]:
        more = self.held - len(self.last)
        lines = [f"... {more:,} more lines, whole in {self.tail.path}"] if more else []
        lines += self.last
        self.last.clear()
        self.held = 0
        return lines


class Output:
    """The output of this process, from the time it is made until the process ends."""

    def __init__(self, rank: int, address: str, err_path: Path) -> None:
        self.rank = rank
        self.cell = 0
        self.sent = 0
        self.dropped = 0
        self.lock = threading.Lock()
        self.budget = Budget(time.monotonic())
        self.shown_live: dict[str, str] = {}
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self.socket.connect(address)
        # Kept: an OutStream of ipykernel that is collected waits for its own thread for ever.
        self.replaced = (sys.stdout, sys.stderr)
        paths = {1: err_path.with_suffix(".out"), 2: err_path}
        for fd, path in paths.items():
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(file, fd)
            os.close(file)
        sys.stdout, sys.stderr = (_text(fd) for fd in paths)
        self.libc = ctypes.CDLL(None)
        if sys.platform == "linux":
            # C's stdout is block-buffered on a file; by line, it is in order with the rest.
            self.libc.setvbuf(ctypes.c_void_p.in_dll(self.libc, "stdout"), None, 1, 0)
        self.streams = (Stream("stdout", paths[1]), Stream("stderr", paths[2]))
        threading.Thread(target=self._follow, name="output", daemon=True).start()

    def begin(self, cell: int) -> None:
        """From here on, output belongs to this cell."""
        with self.lock:
            self._collect(final=True)
            self.cell, self.sent, self.dropped = cell, 0, 0
            self.budget = Budget(time.monotonic())

    def end(self) -> dict:
        """Send what is left of the cell's output; how many messages it took, and lines lost.

        -> {"messages", "dropped"}: the notebook has the whole output once it has seen as many
        messages of this rank and cell.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self.libc.fflush(None)
        with self.lock:
            self._collect(final=True)
            counts = {"messages": self.sent, "dropped": self.dropped}
            self.cell = 0
            return counts

    def _follow(self) -> None:
        while True:
            # On the clock's beat: what ranks of a machine print together is read together.
            time.sleep(POLL_S - time.time() % POLL_S)
            with self.lock:
                self._collect(final=False)

    def _collect(self, *, final: bool) -> None:
        now_s = time.monotonic()
        self.budget.refill(now_s)
        for stream in self.streams:
            lines, live = stream.collect(self.budget, now_s, final=final)
            if lines or live != self.shown_live.get(stream.name, ""):
                self.shown_live[stream.name] = live
                self._push(stream.name, lines, live)

    def _push(self, stream: str, lines: list[str], live: str) -> None:
        message = {
            "rank": self.rank,
            "cell": self.cell,
            "stream": stream,
            "lines": lines,
            "live": live,
        }
        try:
            self.socket.send(json.dumps(message).encode(), zmq.NOBLOCK)
            self.sent += 1
        except zmq.Again:
            self.dropped += len(lines)


def _text(fd: int):
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


# A process has one descriptor 1 and one descriptor 2, so it has one of these.
_current: list[Output] = []


def start(rank: int, address: str, log_path: str | Path) -> None:
    """Capture this process's output from now on.

    address: where the notebook pulls messages. log_path: standard error, whole; standard output
    goes to the same name with the suffix ".out".
    """
    _current[:] = [Output(rank, address, Path(log_path))]


def relabel(rank: int) -> None:
    """What is printed from now on is that of another rank."""
    if _current:
        _current[0].rank = rank


def current() -> Output | None:
    """The capture of this process, if it was started."""
    return _current[0] if _current else None
