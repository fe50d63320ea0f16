"""What fuzzing found stays mended: every kept input goes through its target, and what each target starts from.

Without atheris: `targets.py` are plain functions. Each input ends within seconds; nothing but `CkptError` escapes.
"""

from __future__ import annotations

import importlib.util
import itertools
import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(name):
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


targets, checkpoints = _load("targets"), _load("fuzz_checkpoints")
KEPT = sorted(path for path in (HERE / "corpus").glob("*/*"))


@pytest.fixture(autouse=True)
def soon():
    """An input that takes longer than libFuzzer's own limit is a finding; of the processor: other tests run beside."""
    before = signal.signal(signal.SIGPROF, lambda *_: pytest.fail("more than 10 s"))
    signal.setitimer(signal.ITIMER_PROF, 10)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_stays_mended(path):
    target = path.parent.name
    targets.TARGETS[target](targets.from_corpus(target, path.read_bytes()))


@pytest.mark.parametrize("target", targets.TARGETS)
def test_the_seeds_pass(target):
    found = [data for name, data in targets.seeds() if name == target]
    assert found, "a target without seeds finds nothing"
    for data in itertools.islice(found, 0, None, max(1, len(found) // 60)):
        targets.TARGETS[target](data)


def test_edits_leave_the_containers_sound():
    """The parts of each fixture's files are taken out and put back; a number in the place of itself changes no
    value."""
    for name, files in targets.fixtures():
        for path, data in files.items():
            part = targets.edits.part_of(data)
            if part is None:
                continue
            if part.kind != "pickle":
                assert part.file(part.data) == data, (name, path)
                continue
            again = targets.edits.part_of(part.file(part.data))
            assert again.data == part.data, (name, path)
            for number in targets.edits.numbers(part)[:3]:
                made = targets.edits.with_number(part, number, number.value)
                values = [found.value for found in targets.edits.numbers(part._replace(data=made))]
                assert values == [found.value for found in targets.edits.numbers(part)], (name, path)


@pytest.mark.parametrize("group", checkpoints.GROUPS)
def test_edited_checkpoints_are_read_by_the_contract(group):
    """A few cases of `fuzz_checkpoints`: through the readers alone."""
    wrong = [finding for number in range(12) for finding in checkpoints.read(group, number)[0]]
    assert not wrong, wrong[0]


def test_a_case_is_the_same_again():
    """Numbers of cases are what findings are told by."""
    for group in checkpoints.GROUPS:
        one, two = (checkpoints.case(group, 5) for _ in range(2))
        assert one[:4] == two[:4] and one[3], group
