"""Where a rank's Python stands, as it writes it itself on SIGUSR2, even while it holds its lock.

Format: that of the standard library's faulthandler, one section a thread, the innermost call first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".stacks"
SECTION = re.compile(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+)\b.*:$")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# Beneath all that a rank does lies what it was forked in; of very deep stacks the end is cut.
BOTTOM, CUT = "forkserver/server.py", "  ..."


@dataclass(frozen=True)
class Frame:
    """One call: `name` of `file` is at `line`."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        if self.file.startswith("<cell "):
            inside = "" if self.name == "<module>" else f", in {self.name}"
            return f"cell {self.file[6:-1]}, line {self.line}{inside}"
        inside = "" if self.name == "<module>" else f" in {self.name}"
        return f"{Path(self.file).name}:{self.line}{inside}"


def path_of(log: str | Path) -> Path:
    """Where the rank with this log writes its stacks."""
    return Path(log).with_suffix(SUFFIX)


def parse(text: str, thread: int) -> tuple[list[Frame], bool]:
    """Calls of one thread, the innermost first, and whether they are there to the last."""
    frames: list[Frame] = []
    is_inside = is_whole = False
    for line in text.splitlines():
        if section := SECTION.match(line):
            is_inside = int(section[1], 16) == thread
            if is_inside:  # of several dumps the last
                frames, is_whole = [], False
        elif is_inside and (found := FRAME.match(line)):
            frames.append(Frame(found[1], int(found[2]), found[3]))
            is_whole = is_whole or found[1].endswith(BOTTOM)
        elif is_inside and line == CUT:
            is_whole = True
    return frames, is_whole
