"""Layout of code: lines that are too long are broken as formatters break them."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 100
OPENS, CLOSES = "([{", ")]}"


def wrapped(line: str, indent: str = "") -> str:
    """A line of code that will stand `indent` further in, on several lines if it is too long.

    Broken at the brackets that end with the line; what has none stays as it is.
    """
    if len(indent) + len(line) <= WIDTH:
        return line
    begin = _opening(line)
    if begin is None:
        return line
    own = line[: len(line) - len(line.lstrip())]
    inner = line[begin + 1 : -1]
    together = f"{own}    {inner}"
    if len(indent) + len(together) <= WIDTH:
        return "\n".join((line[: begin + 1], together, own + line[-1]))
    parts = [wrapped(f"{own}    {part},", indent) for part in _parts(inner)]
    return "\n".join((line[: begin + 1], *parts, own + line[-1]))


def _opening(line: str) -> int | None:
    """Where the bracket opens that the line, but for a comma, ends with."""
    if not line or line[-1] not in CLOSES:
        return None
    open_at: list[int] = []
    found = None
    for place, char in _outside_of_text(line):
        if char in OPENS:
            open_at.append(place)
        elif char in CLOSES:
            found = open_at.pop()
    return found


def _parts(text: str) -> Iterator[str]:
    """The arguments in what stands between two brackets."""
    depth, begin = 0, 0
    for place, char in _outside_of_text(text):
        depth += (char in OPENS) - (char in CLOSES)
        if char == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _outside_of_text(text: str) -> Iterator[tuple[int, str]]:
    quote = ""
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[place - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        else:
            yield place, char
