"""Writing: one rank's part of a checkpoint, from memory to disk, beside the training.

Nothing here is collective: it would meet the training's own operations. The ranks see each other's
parts in the directory. Each writes its file and then, under another name first, a note with its
size and hash; rank 0 waits for all notes, writes the manifest, and lets the directory appear under
its name. A rank that cannot write removes its file, and the lock on the file of a rank that is gone
is free: in both cases rank 0 gives up and removes the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.engine.finish import Finish
from workbench.engine.share import Share, file_of, note_of
from workbench.errors import CheckpointError
from workbench.spec import aside

# Hashed and written while it is in the cache; large enough that both let other threads run.
CHUNK_BYTES = 4 << 20
# How often rank 0 looks for the notes of the others: at first, and in the end.
LOOK_S, LOOK_MOST_S = 0.002, 0.05
# The next step of a training that goes on follows a save by a few milliseconds.
NEXT_STEP_S = 0.05


class Stall:
    """How long the training stood still on this rank for a save.

    From the end of the last step before it, or the begin of the save where nothing was being
    trained, to the begin of what comes next.
    """

    def __init__(self, since_s: float, *, is_training: bool) -> None:
        self._since_s = since_s
        self._is_training = is_training
        self._so_far_s = 0.0
        self._is_over = threading.Event()

    def staged(self) -> None:
        """This rank is free to go on."""
        self._so_far_s = time.perf_counter() - self._since_s
        if not self._is_training:
            self._is_over.set()

    def over(self) -> None:
        """Something else begins on this rank."""
        if not self._is_over.is_set():
            self._so_far_s = time.perf_counter() - self._since_s
            self._is_over.set()

    def seconds(self) -> float:
        """As it is known; waits a moment for the next step of a training that goes on."""
        self._is_over.wait(NEXT_STEP_S)
        return self._so_far_s


class Writing:
    """What this rank writes; made on all ranks, which then have all opened their files.

    problem: why there will be no checkpoint, once `over` is set; None when it is whole, or where
    this rank's part is there. is_first: it is no consequence of what another rank met.
    """

    def __init__(self, directory: Path, rank: int, share: Share, data: Tensor) -> None:
        self.directory, self.rank, self.share = directory, rank, share
        self.over = threading.Event()
        self.problem: str | None = None
        self.is_first = False
        self.stall = Stall(time.perf_counter(), is_training=False)
        self.finish: Finish | None = None
        self._data = data
        self._file = -1
        if share.head:
            with aside.says_where(directory):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                self._file = os.open(directory / file_of(rank), flags, 0o600)
                # Until the note is there: how rank 0 knows that this rank lives.
                fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def name(self) -> str | None:
        """Of the checkpoint, as rank 0 knows it."""
        return self.finish and self.finish.name

    def start(self) -> None:
        """Write in a thread of its own."""
        threading.Thread(target=self.run, name="checkpoint", daemon=True).start()

    def run(self) -> None:
        """Write this rank's part; on rank 0 then finish the checkpoint, or give it up."""
        began_s = time.perf_counter()
        try:
            notes = self._write() if self.share.head else {}
            if self.finish is not None:
                notes |= self._others()
                self.is_first = True
                self.finish.close(self.share, notes, time.perf_counter() - began_s)
        except CheckpointError as error:
            self.problem = str(error)
            # Where rank 0 has removed the directory, it had its reason before.
            self.is_first = self.is_first and self.directory.exists()
        except Exception as error:  # noqa: BLE001 - whoever waits for the save is told
            self.problem, self.is_first = f"{type(error).__name__}: {error}", True
        finally:
            self.discard()
            self.over.set()

    def discard(self) -> None:
        """Let go of everything, and of what is not whole on the disk as well."""
        if self.problem is not None and self._file >= 0:
            with contextlib.suppress(OSError):
                (self.directory / file_of(self.rank)).unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self.finish is not None:
            self.finish.discard()

    def _write(self) -> dict[int, dict[str, Any]]:
        """The file and its note -> the note, by rank."""
        digest = hashlib.sha256()
        self.is_first = True
        with aside.says_where(self.directory):
            for chunk in self._chunks():
                digest.update(chunk)
                _write_all(self._file, chunk)
            os.fsync(self._file)
            note = {
                "bytes": len(self.share.head) + self.share.data_bytes,
                "sha256": digest.hexdigest(),
                "stall_s": self.stall.seconds(),
            }
            if self.rank:
                self._leave(note)
        self.is_first = False
        return {self.rank: note}

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield self.share.head
        data = memoryview(self._data.numpy())  # type: ignore[arg-type] - a buffer
        for first in range(0, len(data), CHUNK_BYTES):
            yield data[first : first + CHUNK_BYTES]

    def _leave(self, note: dict[str, Any]) -> None:
        path = note_of(self.directory, self.rank)
        path.with_suffix(".new").write_text(json.dumps(note))
        path.with_suffix(".new").rename(path)

    def _others(self) -> dict[int, dict[str, Any]]:
        """The notes of all other ranks. Raises CheckpointError where one will not come."""
        found: dict[int, dict[str, Any]] = {}
        missing = [rank for rank in self.share.writers if rank != self.rank]
        wait_s = LOOK_S
        while True:
            for rank in list(missing):
                if (note := self._look(rank)) is not None:
                    missing.remove(rank)
                    found[rank] = note
            if not missing:
                return found
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, LOOK_MOST_S)

    def _look(self, rank: int) -> dict[str, Any] | None:
        file = self.directory / file_of(rank)
        # In this order: a rank that lets go of its file has left its note before.
        is_left = not file.exists() or aside.is_free(file)
        try:
            return json.loads(note_of(self.directory, rank).read_text())
        except FileNotFoundError:
            if not is_left:
                return None
        raise CheckpointError(
            f"Rank {rank} did not write its part of the checkpoint in {self.directory.parent}."
        )


def _write_all(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
