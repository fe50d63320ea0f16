"""The bench in miniature: every work is what it says, and what is reported follows from the times."""

from __future__ import annotations

import math

import numpy as np
import numpy_boxes
import pytest

from ckpt_tool.device import descriptors
from ckpt_tool.device.descriptors import PackedDescriptors, Strided
from ckpt_tool.device.library import Device
from ckpt_tool.device.trial import bench, workloads
from ckpt_tool.device.trial.workloads import WORKS, Arena, Knobs

PAYLOAD = 1 << 20


def test_every_work_runs_and_is_told(device: Device) -> None:
    seen: list[str] = []
    rows = bench.measure_kernels(device, payload=PAYLOAD, repeats=1, watch=lambda work: seen.append(work.name))
    assert [(row.kernel, row.work) for row in rows[1:]] == [
        (work.kernel, work.name) for work in sorted(WORKS.values(), key=lambda work: work.values != "bytes")
    ]
    assert rows[0].who == "cudaMemcpyAsync" and rows[0].share == pytest.approx(1)
    assert len(seen) == 2 * len(WORKS)
    for row in rows:
        assert row.milliseconds > 0 and math.isfinite(row.share) and 0 <= row.spread <= 2
        assert row.moved > PAYLOAD // 2 and row.boxes >= 1, row


def test_a_share_is_taken_pass_by_pass() -> None:
    found = bench.Measured()
    for milliseconds, plain in ((1.0, 4.0), (3.0, 1.0)):
        found.add("box_copy", "one run", "ckpt", (7, 2_000_000), milliseconds, plain)
    (row,) = found.rows()
    assert (row.boxes, row.milliseconds, row.spread) == (7, 2.0, 1.0)
    assert row.share == pytest.approx((2 / 4 + (2 / 3) / 1) / 2) and row.gbs == pytest.approx((2 + 2 / 3) / 2)


def lists_of(
    work: workloads.Workload, monkeypatch: pytest.MonkeyPatch, arena: Arena, device: Device
) -> list[list[Strided]]:
    """The boxes that a work of box_copy packs, a list a slot."""
    taken: list[list[Strided]] = []
    real = workloads.pack

    def pack(boxes: list[Strided], **knobs: object) -> PackedDescriptors:
        taken.append(list(boxes))
        return real(taken[-1])

    monkeypatch.setattr(workloads, "pack", pack)
    work.prepare(device, arena, Knobs()).close()
    return taken


@pytest.mark.parametrize(
    "work", [work for work in WORKS.values() if work.kernel == "box_copy"], ids=lambda work: work.name
)
def test_copies_stay_in_their_slots_and_move_the_payload(
    device: Device, monkeypatch: pytest.MonkeyPatch, work: workloads.Workload
) -> None:
    arena = Arena(1 << 40, 1 << 41, PAYLOAD, 2)
    for slot, boxes in enumerate(lists_of(work, monkeypatch, arena, device)):
        read, written = descriptors.sides(boxes)
        for sides, begin in zip((read, written), arena.at(slot), strict=True):
            assert begin <= min(side.hull[0] for side in sides)
            assert max(side.hull[1] for side in sides) <= begin + arena.stride
        assert sum(box.run * math.prod(box.extents) for box in boxes) >= 0.7 * PAYLOAD
        descriptors.refuse_overlap(boxes)


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_a_work_of_transposes_is_numpys(shim: Device, item: int) -> None:
    work = WORKS["box_transpose", f"{item} B, 4096 x 4096"]
    with bench.arena_on(shim, PAYLOAD, 2) as arena:
        bench.lay_out(shim, arena, "bytes")
        made = work.prepare(shim, arena, Knobs())
        made.call(1)
        source, target = arena.at(1)
        side = math.isqrt(PAYLOAD // item)
        got, want = (numpy_boxes.view(at, (side, side), (side * item, item), f"V{item}") for at in (target, source))
        assert np.array_equal(np.asarray(got), np.asarray(want).T)
        made.close()


@pytest.mark.parametrize("kind", ["bytes", "F32", "BF16", "F8_E4M3"])
def test_values_are_random_and_finite(kind: str) -> None:
    made = workloads.values(kind, 1 << 16)
    assert len(made) == 1 << 16 and len(np.unique(made)) > 100
    if kind == "F32":
        assert abs(float(made.view("<f4").std()) - 1) < 0.05
    if kind == "BF16":
        assert abs(float((made.view("<u2").astype("<u4") << 16).view("<f4").std()) - 1) < 0.05
