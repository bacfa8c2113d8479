"""Three ranks, and a screen to run cells on."""

from __future__ import annotations

import io
import os
import signal

import pytest


class Trigger(io.StringIO):
    """A screen that interrupts this process when a word is written on it."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def write(self, text: str) -> int:
        if self.word and self.word in text:
            self.word = ""
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


class Run:
    """Runs cells on the ranks; keeps what was written last."""

    def __init__(self, engines) -> None:
        self.engines = engines
        self.displays = []

    def __call__(self, source: str, *, interrupt_at: str = "", **how):
        self.screen, self.errors = Trigger(interrupt_at), io.StringIO()
        return self.engines.run_cell(
            source, out=self.screen, err=self.errors, display=self._display, **how
        )

    def _display(self, ranks, bundle) -> None:
        self.displays.append((ranks, bundle["data"]))

    @property
    def out(self) -> list[str]:
        return self.screen.getvalue().splitlines()

    @property
    def err(self) -> list[str]:
        return self.errors.getvalue().splitlines()


@pytest.fixture
def run(clusters):
    return Run(clusters(3))
