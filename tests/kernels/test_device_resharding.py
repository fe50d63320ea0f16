"""Shards on the device into other shards: any cut of a tensor, held by several, against NumPy slices of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.device.library import Device, Memory
from ckpt_tool.device.resharding import DeviceBox, plan_resharding, reshard
from ckpt_tool.errors import CkptError

POISON = 0xA5


class Held:
    """Arrays that lie on the device while a test runs."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memory = list[Memory]()

    def put(self, values: np.ndarray) -> int:
        self.memory.append(self.device.upload(np.ascontiguousarray(values)))
        return self.memory[-1].address

    def room(self, nbytes: int) -> int:
        self.memory.append(self.device.alloc(nbytes))
        self.device.fill(self.memory[-1].address, POISON, nbytes)
        return self.memory[-1].address

    def get(self, address: int, shape: Sequence[int], kind: np.dtype) -> np.ndarray:
        return self.device.download(address, int(np.prod(shape)) * kind.itemsize).view(kind).reshape(shape)


@pytest.fixture
def held(device: Device) -> Iterator[Held]:
    here = Held(device)
    yield here
    for memory in here.memory:
        memory.close()


def cut(rng: np.random.Generator, shape: Sequence[int]) -> list[Box]:
    """A grid of boxes that tile a tensor, cut where chance will."""
    boxes = [Box((), ())]
    for extent in shape:
        inner = sorted({0, extent, *map(int, rng.integers(0, extent + 1, rng.integers(0, 3)))})
        parts = list(zip(inner[:-1], inner[1:], strict=True)) or [(0, 0)]
        boxes = [Box((*box.offset, low), (*box.shape, high - low)) for box in boxes for low, high in parts]
    rng.shuffle(boxes)
    return boxes


def part(values: np.ndarray, box: Box) -> np.ndarray:
    return values[tuple(slice(low, low + count) for low, count in zip(box.offset, box.shape, strict=True))]


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(60))
def test_any_cut_becomes_any_other(held: Held, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = DTYPES[rng.choice(["U8", "BF16", "F32", "F64"])]
    kind = np.dtype(f"u{dtype.bits // 8}")
    have = []
    want = []
    values = {}
    for name in ("a", "b.weight"):
        shape = tuple(map(int, rng.integers(0 if seed % 10 == 0 else 1, 9, rng.integers(0, 4))))
        values[name] = np.arange(np.prod(shape, dtype=int), dtype=kind).reshape(shape)
        for cuts in range(rng.integers(1, 3)):  # the second is a replica, cut another way
            have += [
                DeviceBox(
                    name, shape, dtype, box, held.put(part(values[name], box) if not cuts else part(values[name], box))
                )
                for box in cut(rng, shape)
            ]
        want += [
            DeviceBox(name, shape, dtype, box, held.room(box.numel * kind.itemsize))
            for box in cut(rng, shape)[: rng.integers(1, 9)]
        ]
    moved = reshard(held.device, have, want)
    assert moved == sum(shard.box.numel * kind.itemsize for shard in want)
    for shard in want:
        np.testing.assert_array_equal(
            held.get(shard.address, shard.box.shape, kind), part(values[shard.tensor], shard.box), err_msg=f"{seed=}"
        )


def test_one_launch_moves_thousands_of_experts(held: Held) -> None:
    whole = np.arange(64 * 12 * 10, dtype=np.uint16).reshape(64, 12, 10)
    experts = [
        DeviceBox(f"e{i}", (12, 10), DTYPES["BF16"], Box((r, 0), (6, 10)), held.put(whole[i, r : r + 6]))
        for i in range(64)
        for r in (0, 6)
    ]
    out = [
        DeviceBox(f"e{i}", (12, 10), DTYPES["BF16"], Box((0, c), (12, 5)), held.room(120))
        for i in range(64)
        for c in (0, 5)
    ]
    plan = plan_resharding(experts, out)
    assert [launch.kernel for launch in plan.launches] == ["box_copy"] and plan.nbytes == whole.nbytes
    for _ in range(2):  # a plan may run again
        plan.run(held.device)
    for shard in out:
        want = part(whole[int(shard.tensor[1:])], shard.box)
        np.testing.assert_array_equal(held.get(shard.address, (12, 5), np.dtype("u2")), want)


def test_a_transposed_holder(held: Held) -> None:
    whole = np.arange(96 * 70, dtype=np.uint16).reshape(96, 70)
    have = [DeviceBox("w", (96, 70), DTYPES["BF16"], Box((0, 0), (96, 70)), held.put(whole.T), strides=(2, 192))]
    want = [DeviceBox("w", (96, 70), DTYPES["BF16"], Box((5, 3), (90, 60)), held.room(90 * 60 * 2))]
    assert [launch.kernel for launch in plan_resharding(have, want).launches] == ["box_transpose"]
    reshard(held.device, have, want)
    np.testing.assert_array_equal(held.get(want[0].address, (90, 60), np.dtype("u2")), whole[5:95, 3:63])


def test_half_bytes_move_as_bytes(held: Held) -> None:
    whole = np.arange(6 * 8, dtype=np.uint8).reshape(6, 8)  # (6, 16) of F4
    have = [
        DeviceBox("q", (6, 16), DTYPES["F4"], Box((0, c * 2), (6, 8)), held.put(whole[:, c : c + 4])) for c in (0, 4)
    ]
    want = [DeviceBox("q", (6, 16), DTYPES["F4"], Box((1, 4), (4, 10)), held.room(20))]
    reshard(held.device, have, want)
    np.testing.assert_array_equal(held.get(want[0].address, (4, 5), np.dtype("u1")), whole[1:5, 2:7])
    with pytest.raises(CkptError, match="inside a byte"):
        plan_resharding(have, [want[0]._replace(box=Box((0, 1), (6, 2)))])


def test_what_nobody_holds_is_named_whole(held: Held) -> None:
    have = [
        DeviceBox("w", (8, 4), DTYPES["F32"], Box((0, 0), (4, 4)), held.room(64)),
        DeviceBox("w", (8, 4), DTYPES["F32"], Box((2, 0), (4, 2)), held.room(32)),
    ]
    want = [
        DeviceBox("w", (8, 4), DTYPES["F32"], Box((3, 0), (4, 4)), held.room(64)),
        DeviceBox("v", (2,), DTYPES["F32"], Box((0,), (2,)), held.room(8)),
    ]
    with pytest.raises(CkptError) as caught:
        plan_resharding(have, want)
    assert caught.value.code == "E1566" and caught.value.exit_code == 3
    told = [caught.value.message, *caught.value.faults]
    assert told == [
        "w: no rank holds (1, 4) from (6, 0) on",
        "w: no rank holds (2, 2) from (4, 2) on",
        "v: no rank holds (2,) from (0,) on",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (4, 8)},
        {"dtype": DTYPES["I32"]},
        {"box": Box((7, 0), (2, 4))},
        {"strides": (4,)},
    ],
)
def test_shards_that_contradict_each_other_are_refused(held: Held, other: dict[str, object]) -> None:
    shard = DeviceBox("w", (8, 4), DTYPES["F32"], Box((0, 0), (8, 4)), held.room(128))
    with pytest.raises(CkptError) as caught:
        plan_resharding([shard], [shard._replace(address=held.room(128), **other)])
    assert caught.value.code == "E1565" and caught.value.key == "w"


def test_memory_that_is_read_and_written_is_refused(held: Held) -> None:
    shard = DeviceBox("w", (8, 4), DTYPES["F32"], Box((0, 0), (8, 4)), held.room(256))
    with pytest.raises(CkptError) as caught:
        plan_resharding([shard], [shard._replace(address=shard.address + 64)])
    assert caught.value.code == "E1571"


def test_nothing_wanted_moves_nothing(held: Held) -> None:
    empty = DeviceBox("w", (0, 4), DTYPES["F32"], Box((0, 0), (0, 4)), 0)
    assert reshard(held.device, [], [empty]) == 0 and plan_resharding([], []).launches == ()
