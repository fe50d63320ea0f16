"""What holds for every test: property tests judge values, not how busy the machine is, and of many like cases some run
by default."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ckpt_tool import errors

sys.path.append(str(Path(__file__).resolve().parent))

import syntax
import tiers

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run a process a core already
os.environ.pop("COLUMNS", None)  # xdist states one to its workers, and pipes would be as narrow
os.environ.setdefault("CKPT_COMPILED", "off")  # tests of compiled blocks ask for them; all others see NumPy alone

settings.register_profile("ckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("ckpt"), max_examples=25)
settings.load_profile("ckpt")


PEERS_LIMIT = 1800  # seconds of one test: jobs of several ranks save and load in it


def pytest_configure(config: pytest.Config) -> None:
    """A shell that runs tests in the background (`&`, nohup) hands ignored signals down, and `ckpt` honours that. Tests
    that interrupt it need what a terminal gives."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if _is_quick(config):
        settings.load_profile("quick")


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick tier does not even import what it can't run."""
    if (
        not _is_quick(config)
        or collection_path.suffix not in ("", ".py")
        or not collection_path.is_relative_to(tiers.TESTS)
    ):
        return None
    return None if tiers.is_quick_module(collection_path) else True


@pytest.fixture(scope="session", autouse=True)
def errors_have_the_class_of_their_code() -> None:
    """Codes reach an error by many roads (tables, helpers, other errors): each that is built is held against the
    catalogue."""
    codes = errors.catalogue()
    build = errors.CkptError.__init__

    def checked(self: errors.CkptError, message: str, *, code: str | None = None, **fields: Any) -> None:
        build(self, message, code=code, **fields)
        if code in codes:
            kinds = {kind.__name__ for kind in type(self).__mro__}
            wanted = codes[code].kind
            public = type(self).__module__ == errors.__name__
            assert type(self).__name__ == wanted if public else wanted in kinds, (
                f"{code} is {wanted}, not {type(self).__name__}"
            )

    errors.CkptError.__init__ = checked  # type: ignore[assignment,method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """Collecting makes tens of thousands of tests and syntax trees that stay, and no garbage to look for among them."""
    with syntax.no_garbage():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """`share(n)`: of the cases of a test one of n; of many that are left half or a third; the others are slow.
    `quick`: see tiers. `peers`: more time."""
    shares: dict[int, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("peers") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PEERS_LIMIT))
        share = item.get_closest_marker("share")
        if share is not None and item.get_closest_marker("slow") is None:
            shares[share.args[0]].append(item)
    for one_of, like in shares.items():
        _leave(like, one_of)
    common = [item for item in items if not any(map(item.get_closest_marker, ("slow", "peers", "crash")))]
    counts = Counter(item.nodeid.partition("[")[0] for item in common)
    some, many = [], []
    for item in common:
        like = counts[item.nodeid.partition("[")[0]]
        if like > tiers.FEW:
            (some if like <= tiers.MANY else many).append(item)
    _leave(some, 2)
    _leave(many, 3)
    if _is_quick(config):
        some = tiers.chosen(((item.nodeid, item) for item in items if _may_be_quick(item)), tiers.ONE_OF)
        for item in tiers.chosen(((item.nodeid, item) for item in some), tiers.ONE_OF_A_FILE, like="::"):
            item.add_marker(pytest.mark.quick)
    _deselect(items, config)
    # the longest: nothing waits for it at the end
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def _leave(items: list[pytest.Item], one_of: int) -> None:
    """Of the cases of each test one of so many; the others are slow."""
    taken = set(tiers.chosen(((item.nodeid, item) for item in items), one_of))
    for item in items:
        if item not in taken:
            item.add_marker(pytest.mark.slow)


def _deselect(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out what `-m` of the default and the quick tier leaves out, before other plugins order four times as many
    tests as run."""
    unwanted = {"quick": (), "not slow and not peers and not crash": ("slow", "peers", "crash")}
    markers = unwanted.get(config.option.markexpr)
    if markers is None:
        return
    kept, left = [], []
    for item in items:
        wanted = not any(map(item.get_closest_marker, markers)) if markers else item.get_closest_marker("quick")
        (kept if wanted else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _may_be_quick(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(name) for name in ("slow", "first", "peers", "crash"))
    return not marked and getattr(item, "originalname", "") not in tiers.needing_more(item.path)


def pytest_collection_finish() -> None:
    """Tens of thousands of tests and torch are millions of objects that stay: no search for garbage looks at them."""
    gc.freeze()
