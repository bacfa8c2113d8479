"""Mail: requests to engines over ipyparallel's multiplexer, each a function and its arguments.

A view makes an AsyncResult a request, pickles for every engine anew, and listens to status
messages that nobody reads: three times the time. Private names of ipyparallel's client are
touched in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import zmq
from ipyparallel.serialize import PrePickled

from workbench import door


class Mail:
    """The connection of one kernel to a cluster's controller."""

    def __init__(self, connection_file: Path, timeout_s: float) -> None:
        self._client = ipp.Client(str(connection_file), timeout=int(timeout_s))
        # What ranks print comes by a way of its own (driver/echo.py).
        iopub = self._client._iopub_socket
        assert iopub is not None
        iopub.setsockopt(zmq.UNSUBSCRIBE, b"")
        self._enter = PrePickled(door.enter)

    def engines(self) -> list[int]:
        """Ids of the engines that are registered."""
        return sorted(self._client.ids)

    def post(self, engines: Sequence[int], name: str, args: tuple) -> list[Future]:
        """Send one request to each engine, in this order -> a future of `door.enter`'s reply.

        A future holds an exception object as its result when the engine could not even enter.
        """
        packed = [PrePickled(part) for part in (name, args, {})]
        return [self._post(engine, packed) for engine in engines]

    def _post(self, engine: int, packed: list[PrePickled]) -> Future:
        client = self._client
        future = client.send_apply_request(
            client._mux_stream,  # not the socket: its stream would miss what comes meanwhile
            self._enter,
            packed,
            ident=client._engines[engine].encode(),
            metadata={door.QUIET: True},
        )
        assert future is not None
        client.history.clear()  # it would grow for ever
        # Reply, metadata and futures are kept until the engine says that it is idle, which it
        # is asked not to say.
        output = client._output_futures[future.msg_id]
        future.add_done_callback(lambda _: None if output.done() else output.set_result(None))
        return future

    def close(self) -> None:
        """Close all sockets and the thread that reads them."""
        self._client.close()


def then(future: Future, callback: Callable[[Any], None]) -> None:
    """Call back with the reply, or with the exception that took its place."""

    def done(answered: Future) -> None:
        callback(answered.exception() or answered.result())

    future.add_done_callback(done)
