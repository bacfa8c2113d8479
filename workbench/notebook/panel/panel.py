"""A panel shows one run and passes on what the user presses.

It holds nothing of its own: closing it, or opening five, changes nothing about the training.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from workbench.errors import WorkbenchError
from workbench.notebook.panel.board import Board, on_request, plotly_js
from workbench.notebook.panel.frame import frame, lists, sample
from workbench.notebook.panel.many import MOST
from workbench.notebook.panel.pump import PUMP
from workbench.notebook.panel.still import as_html, as_text
from workbench.notebook.panel.texts import Language

BEAT_S = 1.0
# Between two pictures of a step with more ranks than anybody can follow.
MANY_S = 1.0
# What the page may say, with the arguments it may give.
VERBS: dict[str, tuple[str, ...]] = {
    "resume": (),
    "pause": (),
    "step": (),
    "stop": (),
    "save": (),
    "restore": ("what",),
    "switch": ("strategy", "ranks", "shard", "by", "microbatches", "schedule", "dp", "pp", "tp"),
    "recover": ("how",),
    "policy": ("on_loss", "on_stall"),
    "inject": ("kind", "rank", "for_s"),
    "clear_faults": (),
    "take_over": (),
}
FIGURES = "figures"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Watched(Protocol):
    """What a panel needs of a run."""

    @property
    def version(self) -> int:
        """Grows with each change."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Everything there is to show."""
        ...

    def ask(self, verb: str, **kwargs: Any) -> Future:
        """Pass a command on without waiting for it."""
        ...


class Panel:
    """The live view of `run`, shown when a cell returns it.

    big: for a projector. lang: a file of `texts`, e.g. en.
    Raises InputError for a language that is not there.
    """

    def __init__(self, run: Watched, *, big: bool = False, lang: str = "en") -> None:
        self.run = run
        self._language = Language(lang)
        self._texts = self._language.texts
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._display_id = uuid.uuid4().hex
        self._drawn = -1
        self._sampled: object = self
        self._sample_due_s = 0.0
        self._shown = False
        self._worth: tuple[str, int] = ("", 0)
        self._kept = -1
        self._asked = 0
        self._board = Board(page={"texts": self._texts, "big": big}, beat=time.time())
        self._board.hear_at_once()
        self._board.on_msg(self._heard)
        self.tick()
        PUMP.add(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._board.comm is None

    def close(self) -> None:
        """Take the panel off the page; the training goes on. A second call does nothing."""
        PUMP.remove(self)
        with self._lock:
            if not self.closed:
                self._keep(self._snapshot())
                self._board.on_msg(self._heard, remove=True)
                self._board.close()

    def tick(self, *, keep: bool = False) -> None:
        """Answer the page and send what changed. Only the pump calls this once it is shown.

        keep: bring the still picture up to date as well, which otherwise follows states alone.
        """
        with self._lock:
            if self.closed:
                return
            with self._board.hold_sync():
                self._answer()
                self._redraw(keep=keep)
                if time.time() - self._board.beat >= BEAT_S:
                    self._board.beat = time.time()

    def _redraw(self, *, keep: bool) -> None:
        # The version is read first: a change between the two reads is drawn once more, never lost.
        version = self.run.version
        if version == self._drawn and not (keep and version != self._kept):
            return
        snapshot = self._snapshot()
        # Equal ones are not sent again.
        self._board.lists = lists(snapshot)
        self._resample(snapshot)
        self._board.frame = frame(snapshot)
        self._drawn = version
        if (worth := _worth_keeping(snapshot)) != self._worth or keep:
            self._worth, self._kept = worth, version
            self._keep(snapshot)

    def _resample(self, snapshot: Mapping[str, Any]) -> None:
        taken = snapshot.get("sample")
        is_many = taken is not None and len(taken["ranks"]) > MOST
        if taken is self._sampled or (is_many and time.monotonic() < self._sample_due_s):
            return
        self._board.sample = sample(snapshot)
        self._sampled = taken
        self._sample_due_s = time.monotonic() + MANY_S

    def _keep(self, snapshot: Mapping[str, Any]) -> None:
        # So that the saved notebook ends with the end, and not with an empty first picture.
        if self._shown:
            update_display(self._picture(snapshot), raw=True, display_id=self._display_id)

    def _heard(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        # Comes in any thread; what is raised here would be seen by nobody.
        self._inbox.put(dict(content))
        PUMP.hurry()

    def _answer(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if message.get("verb") == FIGURES:
                library = plotly_js() if message.get("library") else b""
                self._board.send({"kind": FIGURES}, buffers=[on_request().encode(), library])
            elif "future" in message:
                self._settle(**message)
            elif message.get("verb") in VERBS:
                self._ask(message["verb"], message.get("args") or {})

    def _ask(self, verb: str, given: Mapping[str, Any]) -> None:
        args = {name: given[name] for name in VERBS[verb] if name in given}
        self._asked += 1
        number = self._asked
        text = self._texts[f"busy_{verb}"].format_map({"what": "", "strategy": "", **args})
        self._board.note = {"kind": "busy", "verb": verb, "text": text, "args": args}
        try:
            future = self.run.ask(verb, **args)
        except Exception as error:  # noqa: BLE001 - the page is the only place to show it
            self._board.note = _refusal(verb, error)
            return
        future.add_done_callback(lambda done: self._done(verb, number, done))

    def _done(self, verb: str, number: int, future: Future) -> None:
        self._inbox.put({"verb": verb, "number": number, "future": future})
        PUMP.hurry()

    def _settle(self, verb: str, number: int, future: Future) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._board.note = _refusal(verb, error)
        elif number == self._asked:
            self._board.note = {}

    def _view(self) -> dict[str, Any]:
        if self.closed:
            return {}
        model = self._board.model_id
        return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": model}}

    def _picture(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        return {"text/html": as_html(snapshot, self._texts)}

    def _snapshot(self) -> dict[str, Any]:
        return self._language.said(self.run.snapshot())

    def _repr_mimebundle_(self, **_kwargs: Any) -> dict[str, Any]:
        snapshot = self._snapshot()
        return {"text/plain": as_text(snapshot), **self._picture(snapshot), **self._view()}

    def _ipython_display_(self) -> None:
        # Two outputs: JupyterLab shows no other form of a widget whose model is gone, and the
        # picture can be brought up to date without touching the live view. Only one is seen.
        snapshot = self._snapshot()
        display({"text/plain": as_text(snapshot), **self._view()}, raw=True)
        self._shown = True
        _settle_after_cells()
        display(self._picture(snapshot), raw=True, display_id=self._display_id)

    def __repr__(self) -> str:
        return as_text(self.run.snapshot())


def _settle_after_cells() -> None:
    """From now on a cell of this shell ends with its panels up to date."""
    shell = get_ipython()
    if shell is not None and _settle not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _settle)


def _settle(*_: object) -> None:
    PUMP.settle()


def _worth_keeping(snapshot: Mapping[str, Any]) -> tuple[str, int]:
    return snapshot["state"], len(snapshot["checkpoints"])


def _refusal(verb: str, error: BaseException) -> dict[str, str]:
    text = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
    return {"kind": "error", "verb": verb, "text": text}
