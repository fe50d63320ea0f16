"""Threads that are waited for even when the wait is interrupted.

`Thread.join` of Python 3.11, interrupted once, takes a running thread for one that has ended, so that what the threads
work in would be taken from under them. Each thread therefore says itself that it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Workers:
    """`count` daemon threads that each run `work`, which raises nothing."""

    def __init__(self, work: Callable[[], None], count: int) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._entered = 0
        self._called_off = False
        self._ended = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._one, name=f"ckpt-{k}", daemon=True) for k in range(count)]

    def run(self, stop: Callable[[BaseException], None], *, waits: bool = True) -> None:
        """Start them and wait. An interruption goes to `stop` and is raised again, with `waits` when all have ended."""
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                while thread.is_alive():
                    # With a timeout, so that the main thread handles signals while it waits.
                    thread.join(0.2)
        except BaseException as e:
            stop(e)
            with self._lock:
                self._called_off = True
            for _ in range(self._entered if waits else 0):
                self._ended.acquire()
            raise

    def _one(self) -> None:
        with self._lock:
            if self._called_off:
                return
            self._entered += 1
        try:
            self._work()
        finally:
            self._ended.release()
