"""What Paddle's own engine made of the same statements: every box of every target, and the expansion step by step.

The arrays are built from the engine's slice maps with NumPy, so nothing of ours judges itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiling import check_tiling

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.piece import apply
from ckpt_tool.systems.paddle.aoa.program import Shards, compile_aoa, steps_for

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle-aoa"
RANDOM: list[dict[str, Any]] = json.loads((FIXTURES / "random.json").read_text())["cases"]
GOLDEN: dict[str, dict[str, Any]] = json.loads((FIXTURES / "golden.json").read_text())
CASTS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Tensors whose every element is another number, none 0."""
    out = {}
    tag = 1
    for name, shape in shapes.items():
        out[name] = np.arange(tag, tag + int(np.prod(shape))).reshape(shape)
        tag += int(np.prod(shape)) + 1000
    return out


def by_maps(maps: list[list[Any]], arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The targets as the engine's boxes say, and their casts."""
    shapes: dict[str, list[int]] = {}
    for target, offset, shape, *_ in maps:
        ends = [a + n for a, n in zip(offset, shape, strict=True)]
        shapes[target] = [max(pair) for pair in zip(shapes.get(target, ends), ends, strict=True)]
    out = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    casts = {}
    for target, offset, shape, source, start, extent, post in maps:
        block = arrays[source][tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
        for change in post:
            if change.startswith("["):
                block = block.transpose(json.loads(change))
            else:
                casts[target] = CASTS[change]
        out[target][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))] = block
    return out, casts


def check(mapped: Mapped, arrays: dict[str, np.ndarray], maps: list[list[Any]]) -> None:
    want, casts = by_maps(maps, arrays)
    shapes = {made.name: made.shape for made in mapped.made}
    pieces = [piece for made in mapped.made for piece in made.pieces]
    got = apply(pieces, arrays, shapes)
    assert set(got) == set(want)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    check_tiling(pieces, shapes, "dst")
    assert {made.name: made.dtype.name for made in mapped.made if made.dtype} == casts


def tables(case: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]] | None, Shards]:
    source = {name: tuple(shape) for name, (shape, _) in case["source"].items()}
    counts = {name: shards for name, (_, shards) in case["source"].items()}
    if case["wanted"] is None:
        return source, None, Shards(counts)
    wanted = {name: tuple(shape) for name, (shape, _) in case["wanted"].items()}
    return source, wanted, Shards(counts, {name: shards for name, (_, shards) in case["wanted"].items()})


@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case["statements"][0][:40] if case["statements"] else "none")
def test_programs_of_paddles_engine(case: dict[str, Any]) -> None:
    source, wanted, shards = tables(case)
    mapped = compile_aoa(case["statements"], source, reverse=case["reverse"], shards=shards, wanted=wanted)
    check(mapped, numbered(source), case["maps"])
    if wanted is not None:
        assert [made.name for made in mapped.made] == [name for name in wanted if name not in mapped.unfilled]


def spelled(step: str) -> tuple[str, ...]:
    """A step of the engine's as (left names, right names) without spaces."""
    left, right = "".join(step.split()).split("->")
    names = [item for item in right.split(",") if "=" not in item and not item[:1].isdigit() and "]" not in item]
    return left, ",".join(names)


@pytest.mark.parametrize("case", [c for c in RANDOM if not c["reverse"]], ids=lambda case: str(case["statements"])[:40])
def test_expansions_of_paddles_engine(case: dict[str, Any]) -> None:
    """Names made on the way included. (Fusions of several names by shards take one step less here.)"""
    source, wanted, shards = tables(case)
    if any("," in s.split("->")[0] and ("fused_ffn" in s or "fused_qkv_old" in s) for s in case["statements"]):
        return
    ours = [
        (",".join(step.left), ",".join(step.right))
        for step in steps_for(case["statements"], source, shards=shards, wanted=wanted)
    ]
    assert sorted((a.replace("~", ""), b.replace("~", "")) for a, b in ours) == sorted(map(spelled, case["steps"]))


SHARDS = {
    "hf_to_tp2": Shards(destination={f"model.layers.{i}.mlp.up_gate_proj.weight": 2 for i in range(2)}),
    "optimizer_states": Shards(destination={f"model.layers.{i}.mlp.up_gate_proj.weight": 2 for i in range(2)}),
    "tp2_to_tp1_ffn_macro": Shards({f"model.layers.{i}.mlp.up_gate_proj.weight": 2 for i in range(2)}),
    "qkv_old_tp2_to_tp1": Shards({f"model.layers.{i}.self_attn.qkv_proj.weight": 2 for i in range(2)}),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_cases(name: str) -> None:
    """Of an older run of the engine, states among them: they follow their parameter, so one of them is looked at."""
    case = GOLDEN[name]
    rows = [row for row in case["mappings"] if not row["target"].endswith(("_pow_acc_0", ".moment1_0", ".moment2_0"))]
    maps = [
        [
            row["target"].removesuffix(".w_0"),
            row["t_off"],
            row["t_shape"],
            row["source"].removesuffix(".w_0"),
            row["s_off"],
            row["s_shape"],
            row["post"] or [],
        ]
        for row in rows
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for _, _, _, source, start, extent, _ in maps:
        ends = [a + n for a, n in zip(start, extent, strict=True)]
        shapes[source] = tuple(max(pair) for pair in zip(shapes.get(source, ends), ends, strict=True))
    if name == "rename_delete_add":
        shapes["c"] = (4,)
    mapped = compile_aoa(case["statements"], shapes, shards=SHARDS.get(name))
    check(mapped, numbered(shapes), maps)
    assert (mapped.dropped, mapped.unfilled) == ((("c",), ("d",)) if name == "rename_delete_add" else ((), ()))
