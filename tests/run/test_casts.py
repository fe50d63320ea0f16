"""Casts against torch: every 16-bit and 8-bit value, fp32 at random and at its edges; what is lost is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.run.compute import cast

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
MOST = {
    "F64": 1.8e308,
    "F32": 3.4028235677973366e38,
    "F16": 65520.0,
    "BF16": 3.3961775292304601e38,
    "F8_E4M3": 464.0,
    "F8_E5M2": 61440.0,
    "F8_E4M3FNUZ": 248.0,
    "F8_E5M2FNUZ": 61440.0,
}
# where rounding a finite value gives no finite value any more; F8_E4M3 rounds 464, a tie, to its largest value


def check(values: torch.Tensor, source: str, target: str) -> None:
    raw = values.contiguous().view(torch.uint8).numpy()
    found, lost = cast(raw.data, DTYPES[source], DTYPES[target])
    ours = torch.frombuffer(bytearray(found), dtype=torch.uint8).view(KINDS[target])
    theirs = values.to(torch.float32).to(KINDS[target]) if source.startswith("F8") else values.to(KINDS[target])
    nan = torch.isnan(theirs.double())
    assert torch.equal(torch.isnan(ours.double()), nan), f"{source} -> {target}"
    size = ours.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    assert torch.equal(ours[~nan].view(bits), theirs[~nan].view(bits)), f"{source} -> {target}"
    wide = values.double().abs()
    beyond = wide > MOST[target] if target == "F8_E4M3" else (wide >= MOST[target]) & torch.isfinite(wide)
    assert lost == int(beyond.sum()), f"{source} -> {target}"


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", [name for name in KINDS if name not in ("F32", "F64")])
def test_every_value_of_sixteen_and_eight_bits(source: str, target: str) -> None:
    size = torch.empty(0, dtype=KINDS[source]).element_size()
    every = torch.arange(1 << (8 * size), dtype=torch.int32)
    check((every.to(torch.uint8) if size == 1 else every.to(torch.int16)).view(KINDS[source]), source, target)


EDGES = np.array(
    [
        0x00000000,
        0x80000000,
        1,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F7F8001,
        0x477FEFFF,
        0x477FF000,
        0x477FF001,
        0x43E80000,
        0x43E80001,
        0x43E7FFFF,
        0x476FFFFF,
        0x47700000,
        0x33000000,
        0x33000001,
        0x3A800000,
    ],
    np.uint32,
)


@pytest.mark.parametrize("target", [name for name in KINDS if name != "F32"])
def test_fp32_around_every_value_that_the_target_has(target: str) -> None:
    """Edges, ties between neighbours of the target and their neighbours, all exponents, and a million at random."""
    size = 2 if target in ("F16", "BF16") else 1
    near = np.arange(1 << (8 * size)).astype(f"u{size}")
    kind = KINDS[target] if target != "F64" else torch.bfloat16
    near = np.arange(65536).astype("u2") if target == "F64" else near
    values = torch.from_numpy(near.view("i2") if near.itemsize == 2 else near).view(kind).float().numpy()
    values = np.sort(values[np.isfinite(values)])
    with np.errstate(over="ignore", invalid="ignore"):
        ties = (values[1:].astype(np.float64) + values[:-1]) / 2
        around = np.concatenate([values, ties.astype(np.float32)])
        around = np.concatenate(
            [around, np.nextafter(around, np.float32(np.inf)), np.nextafter(around, np.float32(-np.inf))]
        )
    random = np.random.default_rng(2).integers(0, 1 << 32, 1_000_000, dtype=np.uint64).astype(np.uint32)
    every = np.concatenate([EDGES, random, around.view(np.uint32)])
    check(torch.from_numpy(every.view(np.int32)).view(torch.float32), "F32", target)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=40),
    st.sampled_from(["F16", "BF16", "F8_E4M3", "F8_E5M2"]),
)
def test_few_values_of_fp32(bits: list[int], target: str) -> None:
    check(torch.from_numpy(np.array(bits, np.uint32).view(np.int32)).view(torch.float32), "F32", target)


@pytest.mark.parametrize("target", [name for name in KINDS if name != "F64"])
def test_fp64(target: str) -> None:
    edges = [
        0.0,
        -0.0,
        -1.5,
        1e39,
        -1e300,
        float("inf"),
        float("nan"),
        65519.99,
        65520.0,
        3.4e38,
        1e-310,
        464.0,
        -465.0,
        5e-324,
    ]
    values = torch.cat([torch.tensor(edges, dtype=torch.float64), torch.randn(100_000, dtype=torch.float64)])
    check(values, "F64", target)


@pytest.mark.parametrize("target", ["F32", "F16", "BF16", "F8_E5M2"])
def test_powers_of_two_have_no_sign(target: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    found, lost = cast(every.numpy().data, DTYPES["F8_E8M0"], DTYPES[target])
    theirs = every.view(torch.float8_e8m0fnu).float()
    ours = torch.frombuffer(bytearray(found), dtype=torch.uint8).view(KINDS[target]).float()
    want = theirs.to(KINDS[target]).float()
    assert torch.equal(ours[:255], want[:255]) and torch.isnan(ours[255])
    assert lost == int((torch.isinf(want[:255])).sum())


def test_nan_stays_nan_with_its_sign_in_bf16() -> None:
    """Payloads are the machine's: torch itself makes 0x7fc0 or 0xffff of one NaN, by how many there are."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32)
    found = np.frombuffer(cast(bits.view(np.uint8).data, DTYPES["F32"], DTYPES["BF16"])[0], np.uint16)
    assert all(0x7F80 < each & 0x7FFF for each in found.tolist())


def test_integers_widen_and_empty_blocks_stay_empty() -> None:
    values = np.array([-128, -1, 0, 127], np.int8)
    found, lost = cast(values.view(np.uint8).data, DTYPES["I8"], DTYPES["F32"])
    assert np.frombuffer(found, "f4").tolist() == [-128, -1, 0, 127] and lost == 0
    for source in ("F32", "BF16", "F8_E4M3"):
        assert cast(memoryview(b""), DTYPES[source], DTYPES["F8_E5M2"]) == (b"", 0)
