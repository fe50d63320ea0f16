"""The tests of the kernels see what is wrong: mutants of every source die (`mutants.py` makes them; all of them by
hand)."""

from __future__ import annotations

import random
import re
import shutil

import pytest
from equivalent import EQUIVALENT
from library_builds import CHOICE
from mutants import ROOT, TARGETS, Mutant, Target, judge, mutants_of

from ckpt_tool.device import build


def test_mutants_of_c() -> None:
    changes = {(m.text, m.change) for m in mutants_of(TARGETS["walking"])}
    assert ("if (list[middle].tile0 <= tile)", "<= to < (1)") in changes
    assert ("const uint32_t middle = low + (high - low) / 2;", "2 to 3 (1)") in changes
    assert not any(text.startswith(("//", "#")) for text, _ in changes)


def test_mutants_of_python() -> None:
    changes = {(m.text, m.change) for m in mutants_of(TARGETS["descriptors"])}
    assert ("LEVELS = 3", "3 to 2 (1)") in changes
    assert not any(text.startswith(("from ", "import ")) for text, _ in changes)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_source_and_tests(name: str) -> None:
    target: Target = TARGETS[name]
    assert len(mutants_of(target)) > 20
    for pattern in target.tests:
        assert list((ROOT / "tests" / "kernels").glob(pattern)), pattern


def test_what_is_called_equivalent_is_still_there() -> None:
    files: dict[str, list[Mutant]] = {}
    for target in TARGETS.values():
        files.setdefault(target.file.rpartition("/")[2], []).extend(mutants_of(target))
    for known in EQUIVALENT:
        assert any(re.search(known.line, m.text) and re.search(known.change, m.change) for m in files[known.file]), (
            known
        )


def test_every_kernel_is_a_target() -> None:
    sources = {target.file for target in TARGETS.values()}
    assert {f"kernels/{kernel}.cu" for kernel in build.KERNELS} <= sources


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", TARGETS)
def test_a_sample_of_mutants_dies(name: str) -> None:
    if CHOICE != "host" or shutil.which("g++") is None:
        pytest.skip("mutants are judged in the host shim, which needs g++")
    verdicts = judge(name, random.Random(6).sample(mutants_of(TARGETS[name]), 20), loud=False)
    survived = [verdict.mutant.place for verdict in verdicts if verdict.result == "survived"]
    assert len(survived) <= 1, "\n".join(survived)
