"""Faults that a broken reshard could make, planted on purpose: the negative controls.

    plant(FAULTS["ema-reset"], folder)         # changes a `sharded` checkpoint of one rank in place

A check that can't fail proves nothing. Each fault is one that a real tool has made or could make, small enough to hide:
several don't move the loss at all (the EMA; one ulp of a master weight), others not in the first step (zeroed moments).

The one idea: a fault changes values and scalars of a checkpoint of one rank, whose files are plain safetensors and one
JSON index; shapes, names and dtypes stay, so that no reader could notice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tool.errors import Incomplete
from ckpt_tool.harness.pieces import EVERY_STATE
from ckpt_tool.harness.saving.sharded import canonical, digits
from ckpt_tool.harness.saving.whole import HARNESS

Tensors = MutableMapping[tuple[str, str], torch.Tensor]  # (state, name) -> values
Scalars = MutableMapping[str, Any]
INDEX = "ckpt.index.json"
_FIRST = ("exp_avg", "momentum_buffer")


class PlantedFault(NamedTuple):
    """what: for people. apply: changes the state in place."""

    what: str
    apply: Callable[[Tensors, Scalars], None]


def _make_zeroing(states: tuple[str, ...], pattern: str) -> Callable[[Tensors, Scalars], None]:
    def apply(tensors: Tensors, scalars: Scalars) -> None:
        for key in _keys(tensors, states, pattern):
            tensors[key] = torch.zeros_like(tensors[key])

    return apply


def _blocks_swapped(states: tuple[str, ...], pattern: str, dim: int = 0) -> Callable[[Tensors, Scalars], None]:
    """The first two quarters of a dim change places."""

    def apply(tensors: Tensors, scalars: Scalars) -> None:
        for key in _keys(tensors, states, pattern):
            first_block, second, *other_blocks = tensors[key].chunk(4, dim)
            tensors[key] = torch.cat([second, first_block, *other_blocks], dim)

    return apply


def _names_swapped(one: str, other: str, states: tuple[str, ...] = EVERY_STATE) -> Callable[[Tensors, Scalars], None]:
    """Tensors whose names differ in `one` and `other` alone change places."""

    def apply(tensors: Tensors, scalars: Scalars) -> None:
        for key in _keys(tensors, states, re.escape(one)):
            twin = (key[0], key[1].replace(one, other))
            tensors[key], tensors[twin] = tensors[twin], tensors[key]

    return apply


def _heads_swapped(tensors: Tensors, scalars: Scalars) -> None:
    """Query heads 0 and 1 of a layer with their columns of o_proj: the same function, but the moments stay where they
    were."""
    for state in ("model", "master", "ema"):
        (query,) = _keys(tensors, (state,), r"layers\.0\.self_attn\.q_proj")
        (output,) = _keys(tensors, (state,), r"layers\.0\.self_attn\.o_proj")
        first_head, second, *other_heads = tensors[query].chunk(8, 0)
        tensors[query] = torch.cat([second, first_head, *other_heads], 0)
        first_head, second, *other_heads = tensors[output].chunk(8, 1)
        tensors[output] = torch.cat([second, first_head, *other_heads], 1)


def _rounded_master(tensors: Tensors, scalars: Scalars) -> None:
    for key in _keys(tensors, ("master",), ""):
        tensors[key] = tensors[key].bfloat16().float()


def _one_ulp(tensors: Tensors, scalars: Scalars) -> None:
    (key,) = _keys(tensors, ("master",), r"layers\.0\.self_attn\.v_proj")
    values = tensors[key].clone()
    values.view(torch.int32).view(-1)[5] ^= 1
    tensors[key] = values


def _ema_reset(tensors: Tensors, scalars: Scalars) -> None:
    for key in _keys(tensors, ("ema",), ""):
        twin = ("master", key[1])  # what is fp32 itself may have none
        tensors[key] = (tensors[twin] if twin in tensors else tensors["model", key[1]].float()).clone()


def _step_back(tensors: Tensors, scalars: Scalars) -> None:
    scalars["step"] -= 1


def _stale_samples(tensors: Tensors, scalars: Scalars) -> None:
    scalars["consumed"] = scalars["consumed"] // 2


def _other_seed(tensors: Tensors, scalars: Scalars) -> None:
    scalars["seed"] += 1


_EXPERTS = ("mlp.experts.0.", "mlp.experts.1.")
FAULTS: Mapping[str, PlantedFault] = {
    "m-zeroed": PlantedFault("first moments zeroed", _make_zeroing(_FIRST, "")),
    "v-of-expert": PlantedFault(
        "second moments of one expert zeroed, Muon's momentum where it steps it",
        _make_zeroing(("exp_avg_sq", "momentum_buffer"), r"layers\.1\.mlp\.experts\.1\."),
    ),
    "tp-blocks": PlantedFault(
        "two TP blocks of q_proj swapped", _blocks_swapped(EVERY_STATE, r"layers\.0\.self_attn\.q_proj")
    ),
    "heads": PlantedFault("two heads swapped in q and o together, moments not", _heads_swapped),
    "gate-up": PlantedFault(
        "gate and up of one expert swapped",
        _names_swapped("layers.1.mlp.experts.1.gate_proj", "layers.1.mlp.experts.1.up_proj"),
    ),
    "experts": PlantedFault("two experts swapped, the router not", _names_swapped(*_EXPERTS)),
    "experts-moments": PlantedFault(
        "moments of two experts swapped", _names_swapped(*_EXPERTS, (*_FIRST, "exp_avg_sq"))
    ),
    "master-rounded": PlantedFault("fp32 master weights rounded to bf16", _rounded_master),
    "ema-reset": PlantedFault("EMA reset to the master weights", _ema_reset),
    "one-ulp": PlantedFault("one master weight off by one ulp", _one_ulp),
    "step": PlantedFault("step counter one too low", _step_back),
    "samples": PlantedFault("consumed samples of an older save", _stale_samples),
    "rng": PlantedFault("stale random state: another seed", _other_seed),
}


def plant(fault: PlantedFault, folder: Path) -> None:
    """Change the checkpoint in `folder` in place: `sharded`, of one rank. Raises Incomplete E1508 where there is
    nothing to break."""
    index = json.loads((folder / INDEX).read_text())
    extras = index["extras"]
    scalars = (extras if HARNESS in extras else extras["scheduler"])[HARNESS]  # where `loading.scalars_of` looks
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    marks: dict[str, dict[str, str]] = {}
    stored = [state for state in EVERY_STATE if (folder / f"{state}.safetensors").is_file()]
    for state in stored:
        marks[state] = _marks(folder / f"{state}.safetensors")
        with safe_open(folder / f"{state}.safetensors", "pt") as file:
            tensors.update({(state, name): file.get_tensor(name) for name in file.keys()})

    weights = "model" if "master" in stored else "master"  # without masters the model are the main weights
    if weights == "master":
        tensors |= {(weights, name): values for (state, name), values in tensors.items() if state == "model"}
    before = dict(tensors), dict(scalars)
    fault.apply(tensors, scalars)

    if scalars == before[1] and all(torch.equal(tensors[key], before[0][key]) for key in tensors):
        raise Incomplete(
            f"the fault {fault.what!r} changed nothing", code="E1508", path=str(folder), hint="train more steps first"
        )

    # The save id covers mesh, extras and boxes: compute it again, so that the reader does not detect the fault by it
    boxes = {file["path"]: file["boxes"] for file in index["files"]}
    index["save"] = digits(canonical([index["mesh"], index["extras"], boxes]))

    for path in boxes:  # a format may have brought states of its own along (`step`): they keep their values
        state = path.removesuffix(".safetensors")
        if state in EVERY_STATE:
            source = weights if state == "model" else state
            copies = {name: values.contiguous().clone() for (of, name), values in tensors.items() if of == source}
        else:
            copies, marks[state] = load_file(folder / path), _marks(folder / path)
        save_file(copies, folder / path, {**marks[state], "save": index["save"]})

    (folder / INDEX).write_text(json.dumps(index))


def _marks(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def _keys(tensors: Tensors, states: tuple[str, ...], pattern: str) -> list[tuple[str, str]]:
    """The tensors of any of the states; raises Incomplete E1508 where there is none."""
    matching = [key for key in tensors if key[0] in states and re.search(pattern, key[1])]
    if not matching:
        raise Incomplete(
            f"no tensor [{', '.join(states)}] matches {pattern!r}", code="E1508", hint="the fault needs another model"
        )
    return matching
