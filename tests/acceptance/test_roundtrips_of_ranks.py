"""E16 for the formats of ranks: a random training state, A -> B -> A at random degrees, every value bit for bit.

The state is written with `torch.save`: weights in bf16 with their masters or in fp32, frozen weights, buffers, moments
and one step; NaN payloads, denormals, infinities, 0-d and empty tensors among them (E12, E15). What comes back is laid
open as `sharded` and read by safetensors. Where ZeRO keeps a master that the source had not, it is the weight itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peers import Tensors, load_sharded

import ckpt_tool

DEGREES: dict[str, Any] = {
    "deepspeed": st.fixed_dictionaries({"dp": st.integers(1, 5), "zero": st.integers(1, 3)}),
    "deepspeed-universal": st.just({}),
    "megatron-dist": st.fixed_dictionaries({"dp": st.integers(1, 3)}),
    "dcp": st.fixed_dictionaries({"dp": st.integers(1, 4)}),
    "sharded": st.fixed_dictionaries({"tp": st.integers(1, 3), "dp": st.integers(1, 3), "zero": st.integers(0, 3)}),
}
PAIRS = [(first, second) for first in DEGREES for second in DEGREES if first != second]
SHAPES = st.sampled_from([(7,), (3, 5), (1,), (), (11, 2), (2, 3, 4), (0, 3), (64,), (37, 10)])
# NaNs with payloads, quiet and signalling, both infinities, denormals, both zeros
ODD = (0x7FC00001, 0xFFC0BEEF, 0x7F800001, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF, 0x00000000, 0x80000000)


class Drawn(NamedTuple):
    tensors: Tensors
    groups: list[dict[str, Any]]


def words(shape: tuple[int, ...], start: int, odd: bool) -> torch.Tensor:
    """fp32 values that are all another; odd: each fifth is a strange one."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) / 64 + start + 1
    bits = count.view(torch.int32).clone()
    if odd:
        strange = torch.tensor([word - (1 << 32 if word >> 31 else 0) for word in ODD], dtype=torch.int32)
        bits[::5] = strange[torch.arange(len(bits[::5])) % len(ODD)]
    return bits.view(torch.float32).reshape(shape)


@st.composite
def training_states(draw: st.DrawFn) -> Drawn:
    half = draw(st.booleans())
    odd = draw(st.booleans())
    tensors: Tensors = {}
    groups: list[list[str]] = [[] for _ in range(draw(st.integers(1, 2)))]
    for number in range(draw(st.integers(1, 6))):
        name = f"layers.{number}.{draw(st.sampled_from(('weight', 'bias', 'mlp.w1')))}"
        shape = draw(SHAPES)
        kind = draw(st.sampled_from(("trained", "trained", "trained", "frozen", "buffer")))
        weight = words(shape, 100 * number, odd and kind == "trained" and not half)
        if kind == "buffer":
            tensors[f"model/{name}"] = (weight * 64).nan_to_num(0).to(torch.int64)
            continue
        tensors[f"model/{name}"] = weight.to(torch.bfloat16) if half else weight
        if kind == "trained":
            groups[number % len(groups)].append(name)
            if half:
                tensors[f"master/{name}"] = weight
            tensors[f"exp_avg/{name}"] = words(shape, 100 * number + 1000, odd)
            tensors[f"exp_avg_sq/{name}"] = words(shape, 100 * number + 2000, odd)
    return Drawn(
        tensors,
        [{"lr": 0.125 / (i + 1), "betas": (0.9, 0.95), "params": names} for i, names in enumerate(groups) if names],
    )


def save(drawn: Drawn, path: Path) -> Path:
    out: dict[str, Any] = {"model": {}, "iteration": 7}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in drawn.tensors.items():
        kind, name = key.split("/", 1)
        if kind in ("model", "master"):
            out.setdefault(kind, {})[name] = tensor
        else:
            state.setdefault(name, {"step": torch.tensor(7.0)})[kind] = tensor
    if state:
        out["optimizer"] = {"state": state, "param_groups": drawn.groups}
    torch.save(out, path)
    return path


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def there_and_back(first: str, second: str, drawn: Drawn, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = save(drawn, folder / "state.pt")
        ckpt_tool.convert(source, folder / "a", to=first, **one)
        ckpt_tool.convert(folder / "a", folder / "b", to=second, **other)
        ckpt_tool.convert(folder / "b", folder / "back", to=first, **one)
        ckpt_tool.convert(folder / "back", folder / "open", to="sharded")
        got = load_sharded(folder / "open")
    no_weights = any(to == "deepspeed" and by.get("zero") == 3 for to, by in ((first, one), (second, other)))
    for key, tensor in drawn.tensors.items():
        state, name = key.split("/", 1)
        if state == "model" and no_weights and f"exp_avg/{name}" in drawn.tensors:
            continue  # ZeRO 3 keeps the master alone, here or on the way
        assert key in got, (key, sorted(got))
        assert raw(got[key]) == raw(tensor), key
    for key in got.keys() - drawn.tensors.keys():
        state, name = key.split("/", 1)
        weight = drawn.tensors[f"model/{name}"]
        assert state == "step" or (state == "master" and raw(got[key]) == raw(weight)), key


@pytest.mark.share(3)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda pair: pair)
@settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
@given(data=st.data())
def test_there_and_back(first: str, second: str, data: st.DataObject) -> None:
    drawn = data.draw(training_states())
    there_and_back(first, second, drawn, data.draw(DEGREES[first], "there"), data.draw(DEGREES[second], "back"))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda pair: pair)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_there_and_back_at_length(first: str, second: str, data: st.DataObject) -> None:
    drawn = data.draw(training_states())
    there_and_back(first, second, drawn, data.draw(DEGREES[first], "there"), data.draw(DEGREES[second], "back"))
