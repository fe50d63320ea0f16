"""What `inspect` counts: a parameter is one, whichever of its states are stored."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from ckpt_tool.commands.inspect import inspect
from ckpt_tool.options.reading import Reading

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("case", ["deepspeed/z1_bf16_dp4", "deepspeed/z3_bf16_dp4", "dcp/fsdp2_dp4"])
def test_parameters_are_counted_once(case: str) -> None:
    """ZeRO 3 stores no 16-bit weights: its parameters are the masters."""
    path = FIXTURES / case
    shapes: dict[str, tuple[int, ...]] = {}
    with safe_open(path.with_name(path.name + ".truth.safetensors"), "np") as truth:
        for key in truth.keys():
            state, name = key.split("/", 1)
            if state in ("model", "master"):
                shapes[name] = tuple(truth.get_slice(key).get_shape())
    total = inspect(str(path), Reading())["total"]
    assert total["parameters"] == sum(prod(shape) for shape in shapes.values())
