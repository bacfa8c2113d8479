"""Finish: what rank 0 alone does for a checkpoint: the directory, the manifest, the rename."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.engine.share import Share, file_of, note_of
from workbench.errors import CheckpointError
from workbench.spec import aside
from workbench.spec import manifest as manifests
from workbench.spec.formats import size

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Finish:
    """One checkpoint, from its name being taken to its directory having it."""

    def __init__(self, root: Path, name: str, *, unique: bool) -> None:
        self.root, self.name, self.unique = root, name, unique
        self._aside: Path | None = None
        self._lock = -1
        self._meta: Any = {}
        # What else is made of the checkpoint before it is over, from where it then is.
        self.also: Callable[[Path], None] | None = None
        self._ranks = 1

    def open(self, meta: Mapping[str, Any], num_ranks: int) -> Path:
        """Make the directory that the ranks write into. Raises CheckpointError."""
        if not NAME.fullmatch(self.name):
            raise CheckpointError(
                f"{self.name!r} cannot name a checkpoint. Use letters, digits, '.', '_' and '-'."
            )
        if taken := set(meta) & set(manifests.OWN_FIELDS):
            raise CheckpointError(f"meta has fields of the format itself: {', '.join(taken)}.")
        self._meta = manifests.plain(meta)  # before any byte is written
        self._ranks = num_ranks
        with aside.says_where(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with aside.locked(self.root):
                self.name = self._free_name()
                directory = aside.new(self.root, self.name)
                # Held until this process ends: how others know that the writer lives.
                self._lock = aside.lock(aside.lock_of(directory))
                self._aside = directory
                directory.mkdir(mode=0o700)
        return directory

    def check_room(self, num_bytes: int) -> None:
        """Raises CheckpointError where so much does not fit on the disk."""
        if self._free_bytes() < num_bytes * 1.02:
            aside.sweep(self.root)
        if (free_bytes := self._free_bytes()) < num_bytes * 1.02:
            raise CheckpointError(
                f"A checkpoint of {size(num_bytes)} does not fit in {self.root}: "
                f"{size(free_bytes)} are free. Remove old checkpoints or save elsewhere."
            )

    def _free_bytes(self) -> int:
        with aside.says_where(self.root):
            return shutil.disk_usage(self.root).free

    def close(self, share: Share, notes: Mapping[int, Mapping[str, Any]], write_s: float) -> None:
        """Write the manifest and let the checkpoint appear under its name.

        notes: of each rank that wrote a file, what it said of it. write_s: until all did.
        """
        assert self._aside is not None
        directory, now_s = self._aside, time.time()
        facts = {rank: notes[rank] for rank in sorted(notes)}
        manifest = {
            "format": manifests.FORMAT,
            "name": self.name,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s)),
            "time_s": now_s,
            "stall_s": max((note["stall_s"] for note in facts.values()), default=0.0),
            "write_s": write_s,
            **self._meta,
            "ranks": self._ranks,
            "torch": str(torch.__version__),
            "files": {
                file_of(rank): {"bytes": note["bytes"], "sha256": note["sha256"]}
                for rank, note in facts.items()
            },
            "keys": share.keys,
        }
        with aside.says_where(self.root):
            _write_new(directory / manifests.FILE_NAME, manifests.to_text(manifest).encode())
            for rank in facts:
                note_of(directory, rank).unlink(missing_ok=True)
            aside.sync(directory)
            with aside.locked(self.root):
                # Not rename alone: it would silently take the place of an empty directory.
                self._free_name(may_change=False)
                os.rename(directory, self.root / self.name)
                self._aside = None
            aside.sync(self.root)
            try:
                if self.also is not None:
                    self.also(self.root / self.name)
            finally:
                # Now it is whole for whoever looks.
                aside.lock_of(directory).unlink()
        aside.sweep(self.root)

    def discard(self) -> None:
        """Remove what was not renamed, and let go of it."""
        if self._aside is not None:
            aside.discard(self._aside)
            self._aside = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _free_name(self, *, may_change: bool = True) -> str:
        name, number = self.name, 1
        while os.path.lexists(self.root / name):
            if not (self.unique and may_change):
                raise CheckpointError(
                    f"A checkpoint named {name!r} exists in {self.root}. Choose another name."
                )
            number += 1
            name = f"{self.name}-{number}"
        return name


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
