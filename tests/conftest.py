"""What holds for every test: property tests judge values, not how busy the machine is."""

from __future__ import annotations

import gc
import signal

from hypothesis import HealthCheck, settings

settings.register_profile("ckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ckpt")


def pytest_configure() -> None:
    """A shell that runs tests in the background (`&`, nohup) hands ignored signals down, and `ckpt` honours that. Tests
    that interrupt it need what a terminal gives."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Fifteen thousand tests and torch are millions of objects that stay: no collection need look at them again."""
    gc.collect()
    gc.freeze()
