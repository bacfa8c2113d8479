"""Inbox: each request of the mail is executed once and in order, however often it comes.

After a crash of the controller the driver cannot know which of its requests came here and which
replies were lost on their way back, so it sends all again that are unanswered. What was executed
is answered from what is kept of it; what would leave a gap is not executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Requests that a sender may leave unread at a time; feeding keeps two under way.
MOST_KEPT = 256


class Inbox:
    """Numbers and replies of the one sender that is listened to: the last that began.

    taken: how many requests came, from whomever. serving: the name of the one under way, or "".
    """

    def __init__(self) -> None:
        self.taken = 0
        self.serving = ""
        self.sender = ""
        self.former: set[str] = set()
        self.done = 0
        self.replies: dict[int, dict[str, Any]] = {}

    def take(
        self,
        name: str,
        call: Callable[[], dict[str, Any]],
        *,
        sender: str,
        number: int,
        received: int,
    ) -> dict[str, Any]:
        """Execute request `number` unless it was executed -> its reply, or {"again": n}.

        name: what it asks for. received: up to which number the sender has all replies; these are
        forgotten.
        """
        self.taken += 1
        if sender != self.sender:
            if sender in self.former:
                return _refusal("Another notebook controls these ranks now. %dist_attach watches.")
            self.former.add(self.sender)
            self.sender, self.done, self.replies = sender, 0, {}
        # What the sender was answered without being executed here could not even be unpacked.
        self.done = max(self.done, received)
        self.replies = {at: reply for at, reply in self.replies.items() if at > received}
        if number <= self.done:
            return self.replies.get(number) or _refusal(f"The reply of request {number} is gone.")
        if number > self.done + 1:
            return {"again": self.done + 1}
        # Before the call: whatever becomes of it, it is not executed a second time.
        self.done = number
        self.serving = name
        try:
            self.replies[number] = reply = call()
        finally:
            self.serving = ""
        while len(self.replies) > MOST_KEPT:
            del self.replies[min(self.replies)]
        return reply

    def shut(self) -> None:
        """Listen to nobody who has sent anything until now."""
        self.former.add(self.sender)
        self.sender, self.done, self.replies = "", 0, {}


def _refusal(text: str) -> dict[str, Any]:
    return {"error": {"name": "EnginesError", "text": text, "lines": []}}


INBOX = Inbox()
