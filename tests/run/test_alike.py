"""Classes of modules against the same tensors judged one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.listing import RowBlock
from ckpt_tool.quantised.module_classes import Alike
from ckpt_tool.weight_schemes.quantised_weights import TensorKind, find

ENDINGS = [
    *("weight", "weight_scale_inv", "weight_scale", "scale", "weight_packed", "weight_shape", "weight_zero_point"),
    *("up_blocks", "up_scales", "up", "input_scale", "bias", "weight_scale_2"),
]
MODULES = ["", "lm_head.", "model.", *(f"model.layers.{i}.mlp." for i in range(12)), "é.\udc80."]
SHAPES = [(), (1,), (64,), (64, 1), (2, 4), (64, 32), (64, 8), (4, 64, 2, 16), (4, 64, 2)]


def blocks_of(tensors: dict[str, TensorKind], generator: np.random.Generator) -> list[RowBlock]:
    """The tensors in three files, a module's in several of them."""
    names = list(tensors)
    cuts = sorted(generator.integers(0, len(tensors) + 1, 2))
    parts = [names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]]
    return [
        RowBlock(
            "model",
            lambda part=part: [name.encode("utf-8", "surrogatepass") for name in part],  # type: ignore[misc]
            [(tensors[name].dtype, tensors[name].shape, 0) for name in part],
        )
        for part in parts
    ]


@pytest.mark.parametrize("seed", range(60))
def test_classes_say_what_every_tensor_by_itself_would(seed: int) -> None:
    """The same weights, scales of activations and faults, the faults in the same order; and of what is listed alone."""
    generator = np.random.default_rng(seed)
    dtypes = [DTYPES[name] for name in ("F8_E4M3", "I8", "U8", "I32", "BF16", "F32")]
    names = [module + ending for module in MODULES for ending in ENDINGS]
    chosen = generator.permutation(len(names))[: generator.integers(1, len(names))]
    simple = seed % 2  # few kinds, so that many modules are alike
    tensors = {
        names[i]: TensorKind(
            dtypes[generator.integers(2 if simple else 6)], SHAPES[generator.integers(2 if simple else 9)]
        )
        for i in map(int, chosen)
    }
    every = find(tensors)
    listed = set(list(tensors)[::3])
    for wanted in (None, listed):
        alike = Alike(blocks_of(tensors, generator), wanted)
        first = alike.first()
        assert first.items() <= tensors.items() and list(alike.names()) == list(tensors)
        found = find(first)

        def kinds(names: list[str], shown: set[str] | None = wanted) -> Counter[TensorKind]:
            return Counter(tensors[name] for name in names if shown is None or name in shown)

        def counted(names: list[str], alike: Alike = alike) -> Counter[TensorKind]:
            total: Counter[TensorKind] = Counter()
            for name in names:
                total[tensors[name]] += alike.count(name)
            return +total

        assert counted(list(found.weights)) == kinds(list(every.weights))
        assert counted([part for weight in found.weights.values() for part in weight.parts.values()]) == kinds(
            [part for weight in every.weights.values() for part in weight.parts.values()]
        )
        assert counted(list(found.beside)) == kinds(list(every.beside))
        assert counted(list(first)) == kinds(list(tensors))
        assert find(alike.like(fault.name for fault in found.faults)).faults == every.faults
        assert bool(found.faults) == bool(every.faults)


def test_a_thousand_layers_are_one_class() -> None:
    tensors = {
        f"layers.{i}.q.{ending}": TensorKind(DTYPES[dtype], shape)
        for i in range(1000)
        for ending, dtype, shape in (("weight", "F8_E4M3", (64, 64)), ("weight_scale_inv", "F32", (1, 1)))
    }
    alike = Alike(blocks_of(tensors, np.random.default_rng(0)))
    assert list(alike.first()) == ["layers.0.q.weight", "layers.0.q.weight_scale_inv"]
    assert alike.count("layers.999.q.weight") == 1000
