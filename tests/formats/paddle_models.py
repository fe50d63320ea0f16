"""Tiny Paddle training states as NumPy arrays, and how a Paddle job would cut them, by NumPy alone: the oracle of the
writer.

`parts` says what a rank holds by slicing whole arrays (np.split, a padded buffer, a list of owners), knowing nothing of
`ckpt_tool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Arrays = dict[tuple[str, str], np.ndarray]  # (state, name) -> the whole array
COLUMN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "vocab_size": 12}


class Model(NamedTuple):
    """names: in the order of registration. arrays: of all states; the model's are uint16 bits where `half`."""

    names: list[str]
    arrays: Arrays
    half: bool
    layers: int
    experts: int


class Job(NamedTuple):
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sharding: int = 1
    version: str = "v1"
    by_tensor: bool = False  # tensor ranks share the experts out

    @property
    def moe_sharding(self) -> int:
        return self.tp * self.sharding // self.ep


def model_of(kind: str, layers: int, experts: int, half: bool, ffn: int = 4, hidden: int = 8) -> Model:
    """A llama, a fused `ernie` or a `moe` model; every element of every tensor is another number (mod 2^16 for
    bits)."""
    names = ["model.embed_tokens.weight"]
    shapes = [(12, hidden)]

    def add(name: str, *shape: int) -> None:
        names.append(name)
        shapes.append(shape)  # type: ignore[arg-type]

    for i in range(layers):
        at = f"model.layers.{i}."
        if kind == "llama":
            for word, out in (("q", 16), ("k", 8), ("v", 8)):
                add(f"{at}self_attn.{word}_proj.weight", hidden, out)
        else:
            add(f"{at}self_attn.qkv_proj.weight", hidden, 32)
            add(f"{at}self_attn.qkv_proj.bias", 32)
        add(f"{at}self_attn.o_proj.weight", 16, hidden)
        if kind == "llama":
            add(f"{at}mlp.gate_proj.weight", hidden, ffn)
            add(f"{at}mlp.up_proj.weight", hidden, ffn)
        elif kind == "ernie" or i == 0:
            add(f"{at}mlp.up_gate_proj.weight", hidden, 2 * ffn)
        else:
            add(f"{at}mlp.gate.weight", hidden, experts)
            for e in range(experts):
                add(f"{at}mlp.experts.{e}.up_gate_proj.weight", hidden, 2 * ffn)
                add(f"{at}mlp.experts.{e}.down_proj.weight", ffn, hidden)
        if kind != "moe" or i == 0:
            add(f"{at}mlp.down_proj.weight", ffn, hidden)
        add(f"{at}input_layernorm.weight", hidden)
        add(f"{at}post_attention_layernorm.weight", hidden)
    add("model.norm.weight", hidden)
    add("lm_head.weight", 12, hidden)
    arrays: Arrays = {}
    start = 1
    for name, shape in zip(names, shapes, strict=True):
        size = int(np.prod(shape))
        fp32_island = name.endswith("mlp.gate.weight")
        bits = half and not fp32_island
        arrays["model", name] = ramp(start, shape, bits)
        states = (["master"] if bits else []) + ["exp_avg", "exp_avg_sq"]
        for k, state in enumerate(states):
            arrays[state, name] = ramp(start + (k + 1) * 100_000, shape, False)
        for k, state in enumerate(("beta1_pow_acc", "beta2_pow_acc")):
            arrays[state, name] = np.array([0.5 + start * 1e-4 + k], np.float32)
        start += size
    return Model(names, arrays, half, layers, experts if kind == "moe" else 0)


def ramp(start: int, shape: Sequence[int], bits: bool) -> np.ndarray:
    count = np.arange(start, start + int(np.prod(shape)))
    return (count.astype(np.uint16) if bits else count.astype(np.float32)).reshape(tuple(shape))


def stage_of(name: str, layers: int, pp: int) -> int:
    """Where `layers` divide by `pp`."""
    if ".layers." in name:
        return int(name.split(".layers.")[1].split(".")[0]) // (layers // pp)
    return pp - 1 if name.startswith(("model.norm", "lm_head")) else 0


def expert_of(name: str) -> int | None:
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


def cut(name: str, array: np.ndarray, job: Job, tp: int) -> np.ndarray:
    """A tensor rank's part of a whole tensor."""
    words = name.split(".")
    module = words[-2]
    if job.tp == 1 or (expert_of(name) is not None and (job.ep > 1 or job.by_tensor)):
        return array
    if module == "up_gate_proj":
        gate, up = np.split(array, 2, axis=-1)
        return np.concatenate([np.split(half, job.tp, axis=-1)[tp] for half in (gate, up)], axis=-1)
    if module in COLUMN:
        return np.split(array, job.tp, axis=-1)[tp]
    if module in (*ROW, "embed_tokens", "lm_head"):
        return np.split(array, job.tp, axis=0)[tp]
    return array


class Place(NamedTuple):
    pp: int
    tp: int
    shard: int

    def expert_rank(self, job: Job) -> tuple[int, int]:
        """(expert rank, rank in the experts' sharding group)."""
        if job.ep == 1:
            return 0, self.shard
        r = self.shard * job.tp + self.tp
        return r % job.ep, r // job.ep


def held(model: Model, job: Job, at: Place) -> list[str]:
    """The names of what a rank computes with, in order."""
    out = []
    spread = job.tp if job.by_tensor else job.ep
    mine = at.tp if job.by_tensor else at.expert_rank(job)[0]
    for name in model.names:
        number = expert_of(name)
        if stage_of(name, model.layers, job.pp) != at.pp:
            continue
        if number is not None and spread > 1 and number // (model.experts // spread) != mine:
            continue
        out.append(name)
    return out


def groups(model: Model, job: Job, at: Place) -> list[tuple[list[str], int, int]]:
    """(names, ranks of the sharding group, own rank) of dense parameters and of experts."""
    names = held(model, job, at)
    if job.ep == 1:
        return [(names, job.sharding, at.shard)]
    dense = [name for name in names if expert_of(name) is None]
    experts = [name for name in names if expert_of(name) is not None]
    return [(dense, job.sharding, at.shard), (experts, job.moe_sharding, at.expert_rank(job)[1])]


def states(model: Model, job: Job, at: Place) -> dict[tuple[str, str], np.ndarray]:
    """What the rank's optimizer file holds: (state, name) -> array."""
    out = {}
    for names, ranks, own in groups(model, job, at):
        if job.sharding == 1:
            out |= whole_states(model, job, at, names)
        elif job.version == "v1":
            load = [0] * ranks
            mine = []
            sizes = {name: cut(name, model.arrays["model", name], job, at.tp).size for name in names}
            for name in sorted(names, key=lambda n: -sizes[n]):
                rank = load.index(min(load))
                load[rank] += sizes[name]
                mine += [name] if rank == own else []
            out |= whole_states(model, job, at, mine)
        else:
            out |= slices(model, job, at, names, ranks, own)
    return out


def whole_states(model: Model, job: Job, at: Place, names: Sequence[str]) -> dict[tuple[str, str], np.ndarray]:
    found = {}
    for (state, name), array in model.arrays.items():
        if name in names and state != "model":
            found[state, name] = array if "pow" in state else cut(name, array, job, at.tp)
    return found


def slices(
    model: Model, job: Job, at: Place, names: Sequence[str], ranks: int, own: int
) -> dict[tuple[str, str], np.ndarray]:
    """The rank's part of every fused buffer, by laying the buffer out: one a dtype, each parameter padded with
    zeros."""
    out = {}
    for bits in (True, False):
        own_kind = [name for name in names if (model.arrays["model", name].dtype == np.uint16) is bits]
        unit = (256 // (2 if bits else 4)) * ranks
        for state in ("master", "exp_avg", "exp_avg_sq"):
            lines = []
            owner = []
            for name in own_kind:
                if (state, name) not in model.arrays:
                    continue
                line = cut(name, model.arrays[state, name], job, at.tp).reshape(-1)
                size = -(-line.size // unit) * unit
                lines.append(np.pad(line, (0, size - line.size)))
                owner += [name] * size
            if not lines:
                continue
            buffer = np.concatenate(lines)
            share = buffer.size // ranks
            for name in own_kind:
                inside = [i for i in range(own * share, (own + 1) * share) if owner[i] == name]
                if inside:
                    out[state, name] = buffer[inside[0] : inside[-1] + 1]
        for name in own_kind:
            for state in ("beta1_pow_acc", "beta2_pow_acc"):
                if ("exp_avg", name) in out:
                    out[state, name] = model.arrays[state, name]
    return out


def places(job: Job) -> list[Place]:
    return [Place(pp, tp, shard) for pp in range(job.pp) for shard in range(job.sharding) for tp in range(job.tp)]


def suffix(job: Job, at: Mapping[str, int]) -> str:
    """`.tp00_pp01_shard02`, of the coordinates given."""
    words = [f"{key}{number:02d}" for key, number in at.items()]
    return "." + "_".join(words) if words else ""
