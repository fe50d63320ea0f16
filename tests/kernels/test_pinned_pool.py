"""The pool of pinned memory: two lists that never feed on each other, blocks that grow together again, nothing lent
twice."""

from __future__ import annotations

import random
import threading

import pytest

from ckpt_tool.device.library import Device
from ckpt_tool.device.station import GRAIN, REGION, SLAB, SMALL, Pinned, Pool
from ckpt_tool.errors import CkptError

MIB = 1 << 20


def test_what_was_set_aside_serves_without_pinning_more(device: Device) -> None:
    with Pool(device, small=3 * SLAB, large=8 * MIB) as pool:
        assert pool.standing.calls == 2 and pool.standing.pinned == 3 * SLAB + 8 * MIB
        for _ in range(50):
            blocks = [pool.take(n) for n in (1, 700, SMALL, 3 * MIB, 2 * MIB + 1)]
            for block in blocks:
                block.view[:1] = b"x"
                block.close()
        assert pool.standing.calls == 2, "a run that stays within what was set aside pins no more"
        assert pool.standing.lent == 0 and pool.standing.most_lent < 8 * MIB


def test_small_blocks_never_stand_in_what_a_large_one_needs(device: Device) -> None:
    with Pool(device, small=SLAB, large=4 * MIB) as pool:
        small = [pool.take(4096) for _ in range(SLAB // 4096)]
        with pool.take(4 * MIB) as large:  # all of it, though small ones are out
            assert large.nbytes == 4 * MIB
        more = pool.take(4096)  # the slab is used up: another, though the large list is free
        assert pool.standing.calls == 3 and pool.standing.pinned == 2 * SLAB + 4 * MIB
        for block in (*small, more):
            block.close()


def test_large_blocks_grow_together_again_in_any_order(device: Device) -> None:
    for seed in range(20):
        with Pool(device, large=16 * MIB) as pool:
            blocks = [pool.take(2 * MIB - k) for k in range(8)]
            random.Random(seed).shuffle(blocks)
            for block in blocks:
                block.close()
            with pool.take(16 * MIB):
                assert pool.standing.calls == 1


def test_the_smallest_block_that_fits_is_cut(device: Device) -> None:
    with Pool(device, large=12 * MIB) as pool:
        blocks = [pool.take(size * MIB) for size in (2, 3, 2, 5)]
        first = blocks[0].address
        for k in (0, 3):
            blocks[k].close()
        with pool.take(2 * MIB) as small:  # not out of the five
            assert small.address == first
            with pool.take(5 * MIB):
                assert pool.standing.calls == 1
        blocks[1].close()
        blocks[2].close()


def test_blocks_are_aligned_apart_and_writable(device: Device) -> None:
    rng = random.Random(7)
    with Pool(device) as pool:
        held: list[tuple[Pinned, int]] = []
        for step in range(400):
            if held and rng.random() < 0.45:
                block, mark = held.pop(rng.randrange(len(held)))
                assert {block.view[0], block.view[-1]} == {mark}, step
                block.close()
            else:
                block = pool.take(rng.choice([1, 511, 513, 4096, 70_000, SMALL, SMALL + 1, 2 * MIB]))
                assert block.address % 256 == 0
                mark = step % 251
                block.view[0] = block.view[-1] = mark
                held.append((block, mark))
            spans = sorted((block.address, block.nbytes) for block, _ in held)
            assert all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
        for block, _ in held:
            block.close()
            block.close()  # a second time is nothing
        assert pool.standing.lent == 0


def test_the_bound_holds_and_says_what_to_do(device: Device) -> None:
    with Pool(device, limit=REGION + GRAIN) as pool:
        with pool.take(2 * MIB):
            with pytest.raises(CkptError) as caught:
                pool.take(REGION)
            assert caught.value.code == "E1561" and caught.value.exit_code == 2 and "--memory" in str(caught.value.hint)
        with pool.take(GRAIN + SMALL):  # what is free still serves
            pass


def test_a_region_is_no_larger_than_the_bound_leaves(device: Device) -> None:
    with Pool(device, limit=3 * MIB) as pool, pool.take(2 * MIB):
        assert pool.standing.pinned == 2 * MIB


def test_nothing_is_an_empty_block(device: Device) -> None:
    with Pool(device) as pool, pool.take(0) as block:
        assert len(block.view) == 0 and pool.standing.calls == 0


def test_closing_with_blocks_out_is_an_error_of_ours(device: Device) -> None:
    pool = Pool(device)
    pool.take(100)
    with pytest.raises(CkptError) as caught:
        pool.close()
    assert caught.value.code == "E1562" and caught.value.exit_code == 70
    pool.close(force=True)


def test_many_threads_take_and_give_back(device: Device) -> None:
    with Pool(device, small=SLAB, large=4 * MIB) as pool:
        faults: list[str] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            for _ in range(200):
                with pool.take(rng.choice([100, 5000, SMALL + 1])) as block:
                    block.view[:8] = bytes([number]) * 8
                    if bytes(block.view[:8]) != bytes([number]) * 8:
                        faults.append(f"thread {number}: another wrote to its block")

        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults and pool.standing.lent == 0
