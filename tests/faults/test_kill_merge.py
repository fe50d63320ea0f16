"""Kills of a merge: computed tensors are gone on with as moved ones are, and another seed starts anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_kill import KILLED, kill_after_the_commit, kill_everywhere


def test_kills_leave_nothing_and_the_same_command_goes_on(merge_ground: Any) -> None:
    total = len(merge_ground.operations)
    seen = kill_everywhere(merge_ground, "kill", sorted({2, *range(4, total, max(1, total // 6)), total - 2}))
    assert seen.get("absent", 0) >= 3
    kill_after_the_commit(merge_ground)


def test_finished_units_are_kept_but_not_for_another_seed(merge_ground: Any) -> None:
    journal = [i for i, op in enumerate(merge_ground.operations, 1) if op.startswith("write ")]

    def writes_after_a_kill(*extra: str) -> int:
        merge_ground.reset()
        assert merge_ground.run(at=journal[-1] + 1, do="kill").status == KILLED
        again = merge_ground.run(*extra, at=0, do="none")
        assert again.status == 0, again.err
        return sum(op.startswith("pwrite") for op in again.ops)

    whole = sum(op.startswith("pwrite") for op in merge_ground.operations)
    assert writes_after_a_kill() < whole
    merge_ground.check_clean()
    assert writes_after_a_kill("--seed", "4") == whole
