"""Inbox: each request once and in order, whatever was lost and sent again."""

from __future__ import annotations

import itertools
import random
from functools import partial

from workbench.engine.inbox import MOST_KEPT, Inbox


def test_a_request_that_comes_again_is_answered_and_not_executed():
    inbox, calls = Inbox(), itertools.count(1)
    take = lambda number, received=0: inbox.take(  # noqa: E731
        "name", lambda: {"value": next(calls)}, sender="one", number=number, received=received
    )
    assert take(1) == take(1) == {"value": 1}
    assert take(2) == {"value": 2}
    assert take(1) == {"value": 1}
    assert take(4) == {"again": 3}
    assert take(3, received=2) == {"value": 3}
    assert sorted(inbox.replies) == [3]
    assert "error" in take(2, received=2)  # nobody waits for it
    assert next(calls) == 4


def test_what_the_sender_does_not_wait_for_leaves_no_gap():
    inbox = Inbox()
    # Number 1 could not be unpacked, so it never came here.
    assert inbox.take("name", lambda: {"value": 2}, sender="one", number=2, received=1) == {
        "value": 2
    }


def test_the_sender_that_began_last_is_listened_to_alone():
    inbox = Inbox()
    reply = {"value": None}
    assert inbox.take("name", lambda: reply, sender="one", number=1, received=0) == reply
    assert inbox.take("name", lambda: reply, sender="two", number=1, received=0) == reply
    refused = inbox.take("name", lambda: reply, sender="one", number=2, received=1)
    assert refused["error"]["name"] == "EnginesError"
    assert "Another notebook" in refused["error"]["text"]
    assert inbox.take("name", lambda: reply, sender="two", number=2, received=1) == reply


def test_once_it_is_shut_only_who_begins_anew_is_listened_to():
    inbox = Inbox()
    inbox.take("name", lambda: {"value": None}, sender="one", number=1, received=0)
    inbox.shut()
    assert "error" in inbox.take("name", dict, sender="one", number=2, received=1)
    assert inbox.take("name", lambda: {"value": 2}, sender="two", number=1, received=0) == {
        "value": 2
    }
    assert (inbox.taken, inbox.serving) == (3, "")


def test_replies_that_nobody_reads_are_bounded():
    inbox = Inbox()
    for number in range(1, 3 * MOST_KEPT):
        inbox.take("name", lambda: {"value": 0}, sender="one", number=number, received=0)
    assert len(inbox.replies) == MOST_KEPT


def done(executed: list[int], number: int) -> dict[str, int]:
    executed.append(number)
    return {"value": number}


def test_over_a_line_that_loses_and_repeats_all_is_executed_once_in_order():
    for seed in range(200):
        chance = random.Random(seed)
        inbox, executed = Inbox(), list[int]()
        unanswered: dict[int, bool] = {}
        last, most = 0, 12
        while unanswered or last < most:
            if last < most and chance.random() < 0.5:
                last += 1
                unanswered[last] = True
                sent = [last]
            else:
                sent = sorted(unanswered)
            for number in sent:
                if chance.random() < 0.4:
                    continue  # lost on its way there
                reply = inbox.take(
                    "name",
                    partial(done, executed, number),
                    sender="one",
                    number=number,
                    received=min(unanswered, default=last + 1) - 1,
                )
                if "value" in reply and chance.random() < 0.6:  # else lost on its way back
                    assert reply["value"] == number
                    unanswered.pop(number, None)
        assert executed == list(range(1, most + 1)), f"seed {seed}"
