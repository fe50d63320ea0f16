"""Casts of 4 MiB blocks, the size that the executor casts: ways to do each, side by side, and whether their bits are
equal.

    python tests/bench/casts.py [--rounds 15] [--block 4]       # needs torch for its rows; without it they are left out

Every round times each way once, in turn, so that a machine that slows down slows all of them; what is shown is the
median in nanoseconds an element, and the ratio to a copy of the source's bytes. Values are those of weights (normal,
sigma 0.02); bits are compared with torch's over such values with NaN, infinities, subnormals and numbers out of range
among them, payloads of NaN aside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.run import compute

Array = np.ndarray[Any, Any]
NUMPY = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
PAIRS = (
    ("F32", "BF16"),
    ("BF16", "F32"),
    ("F32", "F16"),
    ("F16", "F32"),
    ("BF16", "F16"),
    ("F16", "BF16"),
    ("F32", "F8_E4M3"),
    ("F8_E4M3", "F32"),
    ("BF16", "F8_E4M3"),
    ("F8_E4M3", "BF16"),
    ("F32", "F8_E5M2"),
)


def by_types(values: Array, source: str, target: str) -> Array:
    """NumPy's and ml_dtypes' own astype, through fp32 where both are theirs."""
    if "F32" not in (source, target):
        values = values.astype(np.float32)
    return values.astype(NUMPY[target])


def by_shift(values: Array, source: str, target: str) -> Array:
    """bf16 is the upper half of fp32."""
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def by_bits(values: Array, source: str, target: str) -> Array:
    """Round to nearest, ties to even, by adding: half of the last place, less one unless the last place is odd."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).view(ml_dtypes.bfloat16)


TABLES: dict[tuple[str, str], Array] = {}


def by_table(values: Array, source: str, target: str) -> Array:
    """Every value of 8 or 16 bits looked up."""
    kind = np.uint8 if source.startswith("F8") else np.uint16
    if (source, target) not in TABLES:
        every = np.arange(256 if kind is np.uint8 else 65536).astype(kind).view(NUMPY[source])
        with np.errstate(all="ignore"):
            TABLES[source, target] = every.astype(np.float32).astype(NUMPY[target])
    return TABLES[source, target].take(values.view(kind))


def by_odd(values: Array, source: str, target: str) -> Array:
    """fp32 cut to 16 bits, the last one set where anything was lost, then a table: rounding to odd leaves later
    rounding right."""
    bits = values.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    return by_table(upper.view(ml_dtypes.bfloat16), "BF16", target)


def by_torch() -> tuple[Callable[..., Array], Any] | None:
    try:
        import torch
    except ImportError:
        return None
    kinds = {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
    torch.set_num_threads(1)

    def cast(values: Array, source: str, target: str) -> Array:
        given = torch.from_numpy(values.view(np.uint8)).view(kinds[source])
        found: Array = given.to(kinds[target]).view(torch.uint8).numpy()
        return found

    return cast, torch


def by_ours(values: Array, source: str, target: str) -> Array:
    """What the executor calls, overflow count and all."""
    return np.frombuffer(compute.cast(values.view(np.uint8).data, DTYPES[source], DTYPES[target])[0], np.uint8)


def ways(source: str, target: str) -> dict[str, Callable[..., Array]]:
    found: dict[str, Callable[..., Array]] = {"astype": by_types}
    if (source, target) == ("BF16", "F32"):
        found["shift"] = by_shift
    if (source, target) == ("F32", "BF16"):
        found["bits"] = by_bits
    if source != "F32":
        found["table"] = by_table
    if source == "F32" and target.startswith("F8"):
        found["odd+table"] = by_odd
    torch = by_torch()
    if torch is not None:
        found["torch"] = torch[0]
    return {**found, "ours": by_ours}


def block(source: str, mebibytes: int, *, odd: bool = False) -> Array:
    size = np.dtype(NUMPY[source]).itemsize
    count = (mebibytes << 20) // size
    values = np.random.default_rng(1).normal(0, 0.02, count).astype(np.float32)
    for place, value in enumerate((np.inf, np.nan, 1e-40, 465, -1e9, 65520, 464) if odd else ()):
        values[place::1009] = value
    with np.errstate(all="ignore"):
        return values.astype(NUMPY[source])


def equal(found: Array, want: Array, target: str) -> bool:
    a, b = (each.view(np.uint8).view(NUMPY[target]) for each in (found, want))
    nan = np.isnan(a.astype(np.float32))
    if not np.array_equal(nan, np.isnan(b.astype(np.float32))):
        return False
    kind = f"u{np.dtype(NUMPY[target]).itemsize}"
    return bool(np.array_equal(a.view(kind)[~nan], b.view(kind)[~nan]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, default=4, help="MiB of the source")
    arguments = parser.parse_args()
    print(f"{'cast':20}{'way':12}{'ns/elem':>9}{'x copy':>8}  bits")
    for source, target in PAIRS:
        values = block(source, arguments.block)
        all_ways = ways(source, target)
        times: dict[str, list[float]] = {name: [] for name in ("copy", *all_ways)}
        for turn in range(arguments.rounds + 1):
            began = time.perf_counter()
            values.copy()
            times["copy"].append(time.perf_counter() - began)
            for name, way in all_ways.items():
                began = time.perf_counter()
                with np.errstate(all="ignore"):
                    way(values, source, target)
                times[name].append(time.perf_counter() - began)
            if turn == 0:
                times = {name: [] for name in times}
        odd = block(source, 1, odd=True)
        with np.errstate(all="ignore"):
            results = {name: way(odd, source, target) for name, way in all_ways.items()}
        truth = results.get("torch", results["astype"])
        copy = statistics.median(times["copy"])
        for name in all_ways:
            median = statistics.median(times[name])
            same = "equal" if equal(results[name], truth, target) else "DIFFER"
            print(
                f"{source + ' -> ' + target:20}{name:12}{median / len(values) * 1e9:9.2f}{median / copy:8.2f}  {same}"
            )


if __name__ == "__main__":
    main()
