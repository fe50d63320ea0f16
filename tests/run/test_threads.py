"""Threads are waited for, whatever interrupts the wait."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ckpt_tool.run.threads import Workers


@pytest.mark.parametrize("waits", [True, False])
def test_an_interruption_is_handed_on_when_all_have_ended(waits: bool) -> None:
    stopped = threading.Event()
    ended = list[float]()
    first = threading.Lock()

    def work() -> None:
        if first.acquire(blocking=False):
            signal.raise_signal(signal.SIGINT)
        stopped.wait(10)
        time.sleep(0.2)
        ended.append(time.monotonic())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = Workers(work, 3)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.run(lambda _: stopped.set(), waits=waits)
        entered = workers._entered
        assert len(ended) == (entered if waits else 0) and entered
    finally:
        stopped.set()
        signal.signal(signal.SIGINT, before)


def test_without_one_every_thread_works_once() -> None:
    seen: list[str] = []
    Workers(lambda: seen.append(threading.current_thread().name), 4).run(lambda _: None)
    assert sorted(seen) == ["ckpt-0", "ckpt-1", "ckpt-2", "ckpt-3"]
