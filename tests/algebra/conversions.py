"""Conversions that the tests share: an equation, random sizes for it, and NumPy's own reshapes as the other road."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckpt_tool.core.box import Box

Arrays = dict[str, NDArray[np.int64]]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Conversion:
    """`text` says that the left tensors are made of the right ones; `left` says the same with NumPy."""

    text: str
    axes: str
    right: Callable[[Sizes], dict[str, tuple[int, ...]]]
    left: Callable[[Arrays, Sizes], Arrays]


def tagged(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Tensors whose every element is another number, none 0."""
    out = {}
    tag = 1
    for name, shape in shapes.items():
        numel = int(np.prod(shape, dtype=int))
        out[name] = np.arange(tag, tag + numel).reshape(shape)
        tag += numel + 1000
    return out


def random_sizes(axes: str, rng: random.Random) -> Sizes:
    return {axis: rng.randint(1, 4) for axis in axes.split()}


def qkv(x: Arrays, s: Sizes) -> Arrays:
    g = s["g"]
    r = s["r"]
    d = s["d"]
    h = s["h"]
    by_group = [x["q"].reshape(g, r, d, h), x["k"].reshape(g, 1, d, h), x["v"].reshape(g, 1, d, h)]
    return {"qkv": np.concatenate(by_group, axis=1).reshape(-1, h)}


def qkv_columns(x: Arrays, s: Sizes) -> Arrays:
    return {"w": qkv(x, s)["qkv"].T}


def qkv_by_rank(x: Arrays, s: Sizes) -> Arrays:
    t = s["t"]
    parts = [np.split(x[name], t, axis=0) for name in "qkv"]
    return {"w": np.concatenate([part[rank] for rank in range(t) for part in parts], axis=0)}


def striped(x: Arrays, s: Sizes) -> Arrays:
    gate, up = (np.split(x[name], s["t"], axis=0) for name in ("gate", "up"))
    return {"fc1": np.concatenate([half for pair in zip(gate, up, strict=True) for half in pair], axis=0)}


def interleaved_experts(x: Arrays, s: Sizes) -> Arrays:
    out = []
    for e in range(s["e"]):
        gate, up = np.split(x[f"experts.{e}.fc1"], 2, axis=0)
        out.append(np.stack([gate.T, up.T], axis=-1).reshape(s["h"], -1))
    return {"gate_up": np.stack(out)}


def padded(x: Arrays, s: Sizes) -> Arrays:
    return {"emb": np.pad(x["embed"], ((0, s["p"]), (0, 0)))}


CONVERSIONS = {
    "megatron qkv": Conversion(
        "qkv : (g (r + 1 + 1) d) h = <q|k|v> : (g r d) h, (g d) h, (g d) h",
        "g r d h",
        lambda s: {
            "q": (s["g"] * s["r"] * s["d"], s["h"]),
            "k": (s["g"] * s["d"], s["h"]),
            "v": (s["g"] * s["d"], s["h"]),
        },
        qkv,
    ),
    "paddle qkv": Conversion(
        "w : h (g (r + 1 + 1) d) = <q|k|v> : (g r d) h, (g d) h, (g d) h",
        "g r d h",
        lambda s: {
            "q": (s["g"] * s["r"] * s["d"], s["h"]),
            "k": (s["g"] * s["d"], s["h"]),
            "v": (s["g"] * s["d"], s["h"]),
        },
        qkv_columns,
    ),
    "qkv by rank": Conversion(
        "w : (t (m + n + n) d) h = <q|k|v> : (t m d) h, (t n d) h, (t n d) h",
        "t m n d h",
        lambda s: {"q": (s["t"] * s["m"] * s["d"], s["h"]), **dict.fromkeys("kv", (s["t"] * s["n"] * s["d"], s["h"]))},
        qkv_by_rank,
    ),
    "swiglu fc1": Conversion(
        "fc1 : ((1 + 1) f) h = <gate|up> : f h",
        "f h",
        lambda s: {"gate": (s["f"], s["h"]), "up": (s["f"], s["h"])},
        lambda x, s: {"fc1": np.concatenate([x["gate"], x["up"]])},
    ),
    "striped fc1": Conversion(
        "fc1 : (t (1 + 1) u) h = <gate|up> : (t u) h",
        "t u h",
        lambda s: {"gate": (s["t"] * s["u"], s["h"]), "up": (s["t"] * s["u"], s["h"])},
        striped,
    ),
    "stacked experts, transposed": Conversion(
        "W : e h f = experts.{e}.w : f h",
        "e f h",
        lambda s: {f"experts.{e}.w": (s["f"], s["h"]) for e in range(s["e"])},
        lambda x, s: {"W": np.stack([x[f"experts.{e}.w"].T for e in range(s["e"])])},
    ),
    "experts in the middle": Conversion(
        "W : h (e f) = experts.{e}.w : f h",
        "e f h",
        lambda s: {f"experts.{e}.w": (s["f"], s["h"]) for e in range(s["e"])},
        lambda x, s: {"W": np.concatenate([x[f"experts.{e}.w"].T for e in range(s["e"])], axis=1)},
    ),
    "gate and up in alternate columns": Conversion(
        "gate_up : e h (f (1 + 1)) = experts.{e}.fc1 : ((1 + 1) f) h",
        "e f h",
        lambda s: {f"experts.{e}.fc1": (2 * s["f"], s["h"]) for e in range(s["e"])},
        interleaved_experts,
    ),
    "padded vocabulary": Conversion(
        "emb : (v + p) h = embed : v h ; _ : p h",
        "v p h",
        lambda s: {"embed": (s["v"], s["h"])},
        padded,
    ),
    "rotary pairs": Conversion(
        "wq : (n j 2) h = q : (n 2 j) h",
        "n j h",
        lambda s: {"q": (s["n"] * 2 * s["j"], s["h"])},
        lambda x, s: {"wq": x["q"].reshape(s["n"], 2, s["j"], s["h"]).transpose(0, 2, 1, 3).reshape(-1, s["h"])},
    ),
    "a stack of layers": Conversion(
        "w : i h = layers.{i}.w : h",
        "i h",
        lambda s: {f"layers.{i}.w": (s["h"],) for i in range(s["i"])},
        lambda x, s: {"w": np.stack([x[f"layers.{i}.w"] for i in range(s["i"])])},
    ),
    "scalars": Conversion(
        "scales : e = experts.{e}.scale :",
        "e",
        lambda s: {f"experts.{e}.scale": () for e in range(s["e"])},
        lambda x, s: {"scales": np.array([x[f"experts.{e}.scale"] for e in range(s["e"])])},
    ),
}


def random_boxes(shape: tuple[int, ...], rng: random.Random, cuts: int) -> list[Box]:
    """Boxes that tile `shape`, none aligned with anything: some box is cut in two, `cuts` times."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = rng.choice(dims)
        at = rng.randint(1, box.shape[dim] - 1)
        low = tuple(at if d == dim else n for d, n in enumerate(box.shape))
        high = tuple(n - at if d == dim else n for d, n in enumerate(box.shape))
        boxes += [Box(box.offset, low), Box(tuple(o + at * (d == dim) for d, o in enumerate(box.offset)), high)]
    return boxes
