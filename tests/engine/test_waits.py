"""What a rank waits for in another thread, and is freed from."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from workbench.engine.waits import Waits

LIMIT_S = 20.0


@pytest.fixture
def waits():
    found = Waits()
    yield found
    found.close()


def test_a_wait_gives_what_the_function_gives_and_raises_what_it_raises(waits):
    assert [waits.call(lambda n=n: n + 1) for n in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(ZeroDivisionError):
        waits.call(lambda: 1 // 0)
    assert waits.call(threading.current_thread).name == "waits"


def test_whoever_waits_is_freed_and_waits_no_more(waits):
    begun, end = threading.Event(), threading.Event()

    def endless():
        begun.set()
        end.wait(LIMIT_S)

    def free():
        assert begun.wait(LIMIT_S)
        waits.free()

    thread = threading.Thread(target=free)
    thread.start()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waits.call(endless)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waits.call(lambda: 1)
    end.set()
    thread.join(LIMIT_S)


def test_the_thread_left_behind_ends_once_its_wait_does():
    waits, end = Waits(), threading.Event()
    threading.Timer(0.05, waits.free).start()
    with pytest.raises(RuntimeError):
        waits.call(lambda: end.wait(LIMIT_S))
    (left,) = [thread for thread in threading.enumerate() if thread.name == "waits"]
    waits.close()
    end.set()
    left.join(LIMIT_S)
    assert not left.is_alive()


def test_nothing_that_was_found_is_kept(waits):
    class Found:
        pass

    found = waits.call(Found)
    seen = weakref.ref(found)
    waits.call(lambda: None)
    del found
    gc.collect()
    assert seen() is None
