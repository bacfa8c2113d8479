"""A child that is killed at its n-th system call on files, as ptrace stops it there.

The kernel is asked, not Python: what is counted is what reaches the file system, whoever calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable

IS_POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"
# By their numbers on x86-64.
CALLS = {
    1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 18: "pwrite64",
    20: "writev", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 78: "getdents",
    82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink", 137: "statfs", 217: "getdents64",
    257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat",
    316: "renameat2", 332: "statx",
}  # fmt: skip
_TRACEME, _PEEKUSER, _SYSCALL, _SETOPTIONS = 0, 3, 24, 0x4200
_ORIG_RAX = ctypes.c_void_p(8 * 15)
_SYSGOOD, _EXITKILL = 1, 0x100000
_STOP_AT_CALL = signal.SIGTRAP | 0x80


def _ptrace(request: int, pid: int, where: object = None, value: int | None = None) -> int:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return call(request, pid, where, value)


class Traced:
    """A forked child that runs `function` under the eyes of this process."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _ptrace(_TRACEME, 0)
                os.kill(os.getpid(), signal.SIGSTOP)
                function()
                code = 0
            finally:
                os._exit(code)
        os.waitpid(self.pid, 0)
        _ptrace(_SETOPTIONS, self.pid, None, _SYSGOOD | _EXITKILL)

    def kill_at(self, number: int) -> str | None:
        """Let it run, and kill it at the begin of this call -> which one; None: it ended before."""
        seen, is_entry = 0, True
        _ptrace(_SYSCALL, self.pid)
        while True:
            _, status = os.waitpid(self.pid, 0)
            if not os.WIFSTOPPED(status):
                assert status == 0, f"the child ended with {status}"
                return None
            if os.WSTOPSIG(status) == _STOP_AT_CALL:
                name = CALLS.get(_ptrace(_PEEKUSER, self.pid, _ORIG_RAX)) if is_entry else None
                is_entry = not is_entry
                seen += name is not None
                if name is not None and seen == number:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return name
            _ptrace(_SYSCALL, self.pid)
