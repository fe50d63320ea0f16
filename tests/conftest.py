"""What holds for every test: property tests judge values, not how busy the machine is, and of many like cases some run by default."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ckpt_tool import errors

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run a process a core already

settings.register_profile("ckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ckpt")


def pytest_configure() -> None:
    """A shell that runs tests in the background (`&`, nohup) hands ignored signals down, and `ckpt` honours that. Tests
    that interrupt it need what a terminal gives."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def errors_have_the_class_of_their_code() -> None:
    """Codes reach an error by many roads (tables, helpers, other errors): each that is built is held against the catalogue."""
    codes, build = errors.catalogue(), errors.CkptError.__init__

    def checked(self: errors.CkptError, message: str, *, code: str | None = None, **fields: Any) -> None:
        build(self, message, code=code, **fields)
        if code in codes:
            kinds = {kind.__name__ for kind in type(self).__mro__}
            wanted, public = codes[code].kind, type(self).__module__ == errors.__name__
            assert type(self).__name__ == wanted if public else wanted in kinds, (
                f"{code} is {wanted}, not {type(self).__name__}"
            )

    errors.CkptError.__init__ = checked  # type: ignore[assignment,method-assign]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`share(n)`: of the cases of this test the first, the one n later, and so on; the others are slow."""
    met: Counter[str] = Counter()
    for item in items:
        share = item.get_closest_marker("share")
        if share is not None:
            name = item.nodeid.partition("[")[0]
            if met[name] % share.args[0]:
                item.add_marker(pytest.mark.slow)
            met[name] += 1
    items.sort(
        key=lambda item: item.get_closest_marker("first") is None
    )  # the longest: nothing waits for it at the end


def pytest_collection_finish() -> None:
    """Fifteen thousand tests and torch are millions of objects that stay: no collection need look at them again."""
    gc.collect()
    gc.freeze()
