"""Runs a user's cell in the rank's namespace, and says what came of it.

The namespace persists from cell to cell and is `__main__`, so that classes defined in a cell
pickle within the rank. What a cell prints goes through `output`; what it returns is plain data.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import importlib
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType

from workbench.engine import output, source

VALUE_CHARS = 10_000


def run(text: str, number: int, namespace: dict) -> dict:
    """Execute a cell; an exception ends the cell and is part of the reply.

    text: the cell as typed, IPython magics allowed where the rank has an IPython shell.
    -> {"ok": True, "value_text": repr of a last expression or None} or {"ok": False, "error": as
    `source.report`}; both with "displays" (mime bundles), "messages" and "dropped" (see
    `Output.end`).
    """
    _prepare(namespace)
    screen = output.current()
    if screen:
        screen.begin(number)
    displays: list[dict] = []
    name = source.file_name(number)
    with _interrupts() as uninterrupted, _displayed(namespace, displays):
        try:
            reply = _run(text, name, namespace, uninterrupted)
        except KeyboardInterrupt as error:
            # A second interrupt, which came while the first was being written down.
            reply = {"ok": False, "error": _told(error, name)}
        displays += reply.pop("figures", [])
    counts = screen.end() if screen else {"messages": 0, "dropped": 0}
    return {**reply, "displays": displays, **counts}


def _run(text: str, name: str, namespace: dict, uninterrupted: Callable[[], object]) -> dict:
    try:
        body, last = _compiled(text, name, namespace)
        exec(body, namespace)
        value = eval(last, namespace) if last else None
        shown = None
        if value is not None:
            namespace["_"] = value
            shown = _shown(value) if not _is_silenced(text) else None
        figures = _figures()
        uninterrupted()
        return {"ok": True, "value_text": shown, "figures": figures}
    except BaseException as error:  # noqa: BLE001 - whatever a cell raises, the rank lives on
        uninterrupted()
        failure = _told(error, name)
        # Frames keep their variables, and these a process group that is to be given up.
        if error.__traceback__:
            traceback.clear_frames(error.__traceback__)
        return {"ok": False, "error": failure}


def _prepare(namespace: dict) -> None:
    source.teach_inspect()
    namespace.setdefault("__name__", "__main__")
    sys.modules.setdefault("tqdm.autonotebook", _Bars("tqdm.autonotebook"))
    main = sys.modules.get("__main__")
    if getattr(main, "__dict__", None) is not namespace:
        sys.modules["__main__"] = _Main(namespace)  # type: ignore[assignment]
    if type(namespace.get("exit")).__name__ in ("NoneType", "ExitAutocall", "ZMQExitAutocall"):
        # The shell's own exit would end the kernel, and with it the rank.
        namespace["exit"] = namespace["quit"] = _leave


class _Main:
    """A stand-in for the module `__main__` over a given namespace (a module owns its own)."""

    def __init__(self, namespace: dict) -> None:
        self.__dict__ = namespace


class _Bars(ModuleType):
    """A stand-in for tqdm.autonotebook, which would choose a widget that no front end can show."""

    def __getattr__(self, name: str) -> object:
        if name in ("tqdm", "trange"):
            return getattr(importlib.import_module("tqdm.std"), name)
        raise AttributeError(name)


def _leave(code: object = None) -> None:
    """End the cell."""
    raise SystemExit(code)


def _compiled(text: str, name: str, namespace: dict) -> tuple[CodeType, CodeType | None]:
    source.remember(name, text)
    shell = _shell(namespace)
    try:
        tree = ast.parse(text, name)
    except SyntaxError:
        plain = shell.transform_cell(text) if shell else text
        if plain.rstrip() == text.rstrip():
            raise
        source.remember(name, plain)
        tree = ast.parse(plain, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return compile(tree, name, "exec", dont_inherit=True), None
    tree.body.pop()
    body = compile(tree, name, "exec", dont_inherit=True)
    return body, compile(ast.Expression(last.value), name, "eval", dont_inherit=True)


def _shell(namespace: dict):
    """The rank's IPython shell, if it is one's."""
    get = namespace.get("get_ipython")
    return get() if get else None


def _is_silenced(text: str) -> bool:
    return text.rstrip().endswith(";")


def _shown(value: object) -> str:
    text = repr(value)
    over = len(text) - VALUE_CHARS
    return f"{text[:VALUE_CHARS]} ... ({over:,} more characters)" if over > 0 else text


def _told(error: BaseException, name: str) -> dict:
    told = source.report(error, name)
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        told["text"] = f"the cell called exit({code}); the rank and its variables stay."
    elif isinstance(error, KeyboardInterrupt):
        told["text"] = "the cell was interrupted; variables keep what it had set."
    return told


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], object]]:
    """SIGINT raises in the cell, and nowhere after the call of what this yields."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _displayed(namespace: dict, displays: list[dict]) -> Iterator[None]:
    """What display() is given in the cell goes into the list."""
    publisher = getattr(_shell(namespace), "display_pub", None)
    if publisher is None or not hasattr(publisher, "register_hook"):
        yield
        return

    def keep(message: dict) -> None:
        content = message["content"]
        data = dict(content.get("data", {}))
        # A widget's model lives on the rank, where no front end can reach it.
        data.pop("application/vnd.jupyter.widget-view+json", None)
        if data:
            displays.append({"data": data, "metadata": content.get("metadata", {})})

    publisher.register_hook(keep)
    try:
        yield
    finally:
        publisher.unregister_hook(keep)


def _figures() -> list[dict]:
    """The open matplotlib figures as mime bundles; closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    found: list[dict] = []
    if pyplot is None:
        return found
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", bbox_inches="tight")
        image = base64.b64encode(file.getvalue()).decode()
        found.append({"data": {"image/png": image, "text/plain": "<Figure>"}, "metadata": {}})
    if found:
        pyplot.close("all")
    return found
