"""How a process is known: by its pid and start time, never by its name."""

from __future__ import annotations

import psutil


def start_time(pid: int) -> float:
    """When a process started, seconds since the epoch; 0.0 if it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP; by a debugger is another matter."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
