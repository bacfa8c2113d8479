"""Mail: requests to engines over ipyparallel's multiplexer, each a function and its arguments.

A view makes an AsyncResult a request, pickles for every engine anew, and listens to status
messages that nobody reads: three times the time. Private names of ipyparallel's client are
touched in this file alone.

Requests to an engine are numbered, and kept until they are answered: when the controller was
killed and a new one took over its ports, all that are unanswered are sent again, and an engine
executes none of them twice (engine/inbox.py). Nobody tells when its sockets are connected again,
so they are sent again and again until the first is answered, and once more then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import zmq
from ipyparallel.serialize import PrePickled
from traitlets.log import get_logger

from workbench import door
from workbench.errors import EnginesError

# Between two times that unanswered requests are sent again; the last of them is kept to.
AGAIN_S = (0.05, 0.05, 0.1, 0.1, 0.2, 0.2, 0.5, 0.5, 1.0, 2.0, 5.0)
ASK_S = 0.05


@contextlib.contextmanager
def _without_signing_told() -> Iterator[None]:
    """Messages that are encrypted have no signature, of which the session warns the user."""

    def matters(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Message signing is disabled")

    logger: Any = get_logger()
    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


@dataclass
class Outbox:
    """What was sent to one engine: `unanswered` by number, in order.

    crash: of how many crashes of the controller it is known that the engine came through.
    """

    engine: int
    last: int = 0
    unanswered: dict[int, tuple[list[PrePickled], Future]] = field(default_factory=dict)
    crash: int = 0

    @property
    def received(self) -> int:
        """Up to which number all are answered."""
        return min(self.unanswered, default=self.last + 1) - 1


class Mail:
    """The connection of one kernel to a cluster's controller."""

    def __init__(self, connection_file: Path, timeout_s: float) -> None:
        with _without_signing_told():
            self._client = ipp.Client(str(connection_file), timeout=int(timeout_s))
        # What was not sent to a controller that is gone would after `close` be tried for ever, at
        # a port that may be another one's by then.
        for name in self._client.trait_names():
            if name.endswith("_socket"):
                getattr(self._client, name).linger = 0
        # What ranks print comes by a way of its own (driver/echo.py).
        iopub = self._client._iopub_socket
        assert iopub is not None
        iopub.setsockopt(zmq.UNSUBSCRIBE, b"")
        self._enter = PrePickled(door.enter)
        self._sender = uuid.uuid4().hex
        # Also held by the thread that reads replies: never while waiting for one.
        self._lock = threading.RLock()
        self._outboxes: dict[int, Outbox] = {}
        self._crash = 0
        self._is_sending = False
        self._closed = threading.Event()

    def engines(self) -> list[int]:
        """Ids of the engines that are registered."""
        return sorted(self._client.ids)

    def post(self, engines: Sequence[int], name: str, args: tuple) -> list[Future]:
        """Send one request to each engine, in this order -> a future of `door.enter`'s reply.

        A future holds an exception object as its result when the engine could not even enter.
        """
        packed = [PrePickled(part) for part in (name, args, {})]
        with self._lock:
            return [self._post(engine, packed) for engine in engines]

    def _post(self, engine: int, packed: list[PrePickled]) -> Future:
        box = self._outboxes.setdefault(engine, Outbox(engine))
        box.last += 1
        future: Future = Future()
        box.unanswered[box.last] = packed, future
        self._send(box, box.last)
        if box.crash < self._crash:
            self._keep_sending()
        return future

    def _send(self, box: Outbox, number: int) -> None:
        client = self._client
        slip = {"sender": self._sender, "number": number, "received": box.received}
        sent = client.send_apply_request(
            client._mux_stream,  # not the socket: its stream would miss what comes meanwhile
            self._enter,
            [*box.unanswered[number][0], PrePickled(slip)],
            ident=client._engines[box.engine].encode(),
            metadata={door.QUIET: True},
        )
        assert sent is not None
        client.history.clear()  # it would grow for ever
        # Reply, metadata and futures are kept until the engine says that it is idle, which it
        # is asked not to say.
        output = client._output_futures[sent.msg_id]
        sent.add_done_callback(lambda _: None if output.done() else output.set_result(None))
        crash = self._crash
        sent.add_done_callback(lambda done: self._answered(box, number, crash, done))

    def _answered(self, box: Outbox, number: int, crash: int, sent: Future) -> None:
        """A reply has come, to what was sent when there had been so many crashes."""
        reply = sent.exception() or sent.result()
        is_gap = isinstance(reply, dict) and "again" in reply
        with self._lock:
            kept = None if is_gap else box.unanswered.pop(number, None)
            is_there = crash == self._crash > box.crash
            if is_there:
                # What is sent from now on comes there, and its reply here.
                box.crash = crash
            if is_there or is_gap:
                self._send_all(box)
        if kept is not None:
            kept[1].set_result(reply)

    def _send_all(self, box: Outbox) -> None:
        if self._closed.is_set() or box.engine not in self._client._engines:
            return
        for number in list(box.unanswered):
            self._send(box, number)

    def controller_came_back(self, limit_s: float) -> float | None:
        """The controller was killed and another one is coming: send again what was lost with it.

        Returns once the new one answers, with the seconds that took; None when it was killed as
        well, or the mail closed. Raises EnginesError when nothing is heard for `limit_s`.
        """
        began_s = time.monotonic()
        with self._lock:
            self._crash += 1
            crash = self._crash
            self._keep_sending()
        client, heard = self._client, threading.Event()
        while crash == self._crash and time.monotonic() - began_s < limit_s:
            # Each time anew: what was sent to the old one is lost.
            with self._lock:
                if self._closed.is_set():
                    return None
                asked = client._send(client._query_stream, "connection_request")
            assert asked is not None
            asked.add_done_callback(lambda _: heard.set())
            if heard.wait(ASK_S):
                return time.monotonic() - began_s if crash == self._crash else None
        if crash == self._crash:
            raise EnginesError(f"not heard of within {limit_s:g} s")
        return None

    def _keep_sending(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            threading.Thread(target=self._send_again, name="mail-again", daemon=True).start()

    def _send_again(self) -> None:
        """Send what is unanswered where nobody knows whether the engine is connected again."""
        pauses_s, crash = iter(AGAIN_S), 0
        while True:
            with self._lock:
                if crash != self._crash:
                    pauses_s, crash = iter(AGAIN_S), self._crash
                boxes = self._outboxes.values()
                doubtful = [box for box in boxes if box.crash < crash and box.unanswered]
                if not doubtful or self._closed.is_set():
                    self._is_sending = False
                    return
                for box in doubtful:
                    self._send_all(box)
            self._closed.wait(next(pauses_s, AGAIN_S[-1]))

    def close(self) -> None:
        """Close all sockets and the thread that reads them."""
        with self._lock:
            self._closed.set()
        self._client.close()


def then(future: Future, callback: Callable[[Any], None]) -> None:
    """Call back with the reply, or with the exception that took its place."""

    def done(answered: Future) -> None:
        callback(answered.exception() or answered.result())

    future.add_done_callback(done)
