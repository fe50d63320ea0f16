"""A Paddle job's files made without our code: NumPy cuts, `pickle` writes. What the tests of reading ranks compare
with.

`Job` lays a tiny Llama-like model (with experts where asked) over tensor, pipeline, sharding and expert ranks, as
PaddleFormers 1.2.0 does, and `save` writes plain or sharding_io files.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TABLE = "StructuredToParameterName@@"
HIDDEN = 8
FFN = 12
VOCAB = 20
KV = 4
CONFIG = {
    "model_type": "qwen2_moe",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def columns(w, tp):
    return np.split(w, tp, axis=-1)


def rows(w, tp):
    return np.split(w, tp, axis=0)


def copies(w, tp):
    return [w] * tp


def gated(w, tp):
    gate, up = np.split(w, 2, axis=-1)
    return [np.concatenate(pair, axis=-1) for pair in zip(columns(gate, tp), columns(up, tp), strict=True)]


Cut = Callable[[np.ndarray, int], list[np.ndarray]]


@dataclass
class Job:
    """degrees; `layers` decoder layers dealt evenly to stages; `experts` a layer (0: dense). v2: sharding by slices."""

    tp: int = 1
    pp: int = 1
    sharding: int = 1
    ep: int = 1
    layers: int = 2
    experts: int = 0
    v2: bool = False
    bf16: bool = True
    local_names: bool = False
    seed: int = 0
    parameters: dict[str, tuple[np.ndarray, Cut, int]] = field(default_factory=dict)  # whole fp32, cut, stage
    states: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = iter(range(1, 10**6))

        def add(name: str, shape: tuple[int, ...], cut: Cut, stage: int) -> None:
            start = next(base) * 1024
            self.parameters[name] = (np.arange(start, start + np.prod(shape), dtype="f4").reshape(shape), cut, stage)

        add("model.embed_tokens.weight", (VOCAB, HIDDEN), rows, 0)
        for i in range(self.layers):
            stage = i * self.pp // self.layers
            at = f"model.layers.{i}."
            add(at + "self_attn.q_proj.weight", (HIDDEN, HIDDEN), columns, stage)
            add(at + "self_attn.k_proj.weight", (HIDDEN, KV), columns, stage)
            add(at + "self_attn.o_proj.weight", (HIDDEN, HIDDEN), rows, stage)
            add(at + "input_layernorm.weight", (HIDDEN,), copies, stage)
            if not self.experts:
                add(at + "mlp.up_gate_proj.weight", (HIDDEN, 2 * FFN), gated, stage)
                add(at + "mlp.down_proj.weight", (FFN, HIDDEN), rows, stage)
            for e in range(self.experts):
                whole = self.ep > 1
                add(at + f"mlp.experts.{e}.up_gate_proj.weight", (HIDDEN, 2 * FFN), copies if whole else gated, stage)
                add(at + f"mlp.experts.{e}.down_proj.weight", (FFN, HIDDEN), copies if whole else rows, stage)
        add("model.norm.weight", (HIDDEN,), copies, self.pp - 1)
        add("lm_head.weight", (VOCAB, HIDDEN), rows, self.pp - 1)
        for name, (whole_, _, _) in self.parameters.items():
            for n, state in enumerate(("master", "exp_avg", "exp_avg_sq")):
                self.states[state, name] = whole_ + 0.25 * (n + 1) if state != "master" else whole_.copy()

    # -- the ranks' parts --

    def expert_rank(self, name: str) -> int | None:
        if ".experts." not in name or self.ep == 1:
            return None
        return int(name.split(".experts.")[1].split(".")[0]) // (self.experts // self.ep)

    def spelt(self, name: str) -> str:
        e = self.expert_rank(name)
        if e is None or not self.local_names:
            return name
        front, back = name.split(".experts.")
        number, rest = back.split(".", 1)
        return f"{front}.experts.{int(number) - e * (self.experts // self.ep)}.{rest}"

    def held(self, tp: int, pp: int, ep: int) -> list[str]:
        return [
            name
            for name, (_, _, stage) in self.parameters.items()
            if stage == pp and self.expert_rank(name) in (None, ep)
        ]

    def static(self, tp: int, pp: int, ep: int) -> dict[str, str]:
        """Structured -> static, counted per stage: the same counters mean other parameters on another stage."""
        return {name: f"linear_{i}.w_0" for i, name in enumerate(self.held(tp, pp, ep))}

    def part(self, array: np.ndarray, name: str, tp: int) -> np.ndarray:
        return self.parameters[name][1](array, self.tp)[tp]

    def groups(self, tp: int, shard: int) -> tuple[int, int, int]:
        """(expert rank, rank in the experts' sharding group, its size)."""
        r = shard * self.tp + tp
        return r % self.ep, r // self.ep, self.tp * self.sharding // self.ep

    def kept(self, array: np.ndarray, name: str, tp: int, shard: int) -> np.ndarray | None:
        """What a sharding rank keeps of a state: by owner (v1), or a slice of one padded buffer a parameter (v2)."""
        ep, moe_rank, moe_size = self.groups(tp, shard)
        own = self.expert_rank(name)
        if own is not None and own != ep:
            return None
        rank, size = (moe_rank, moe_size) if own is not None else (shard, self.sharding)
        local = self.part(array, name, tp)
        if size == 1 and not self.v2:
            return local
        if not self.v2:
            return local if list(self.parameters).index(name) % size == rank else None
        unit = 128 * size
        padded = np.zeros(-(-local.size // unit) * unit, local.dtype)
        padded[: local.size] = local.reshape(-1)
        # a buffer of its own would cut evenly: shift the border so that slices are uneven
        border = [0, *(min(padded.size, padded.size * (i + 1) // size + 7) for i in range(size - 1)), padded.size]
        return padded[border[rank] : border[rank + 1]]

    # -- files --

    def suffix(self, **at: int) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "shard": self.sharding, "moe_sharding": self.ep}
        text = "_".join(f"{k}{v:02d}" for k, v in at.items() if sizes[k] > 1)
        return f".{text}" if text else ""

    def stored(self, array: np.ndarray) -> np.ndarray:
        return bf16_bits(array) if self.bf16 else array

    def save(self, folder: Path, *, io: bool = False, config: bool = True, ema: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for pp in range(self.pp):
            for shard in range(self.sharding):
                for tp in range(self.tp):
                    self._save_rank(folder, tp, pp, shard, io, ema)
        if io:
            (folder / "model_meta.json").write_text(json.dumps(self.meta()))
        if config:
            (folder / "config.json").write_text(json.dumps(CONFIG))

    def _save_rank(self, folder: Path, tp: int, pp: int, shard: int, io: bool, ema: bool) -> None:
        ep, moe_rank, _ = self.groups(tp, shard)
        static = self.static(tp, pp, ep)
        names = self.held(tp, pp, ep)
        if io:
            if self.bf16:
                mine: list[str] = []
            else:
                mine = [n for i, n in enumerate(names) if i % self.sharding == shard]
            at = {"tp": tp, "pp": pp, "shard": shard}
        else:
            mine = names if (moe_rank == 0 if self.ep > 1 else shard == 0) else []
            at = {"tp": tp, "pp": pp, "moe_sharding": ep}
        if mine or io:
            model = {self.spelt(n): self.stored(self.part(self.parameters[n][0], n, tp)) for n in mine}
            write(
                folder / f"model_state{self.suffix(**at)}.pdparams",
                {**model, TABLE: {self.spelt(n): static[n] for n in mine}},
            )
        where = self.suffix(tp=tp, pp=pp, shard=shard)
        infix = "_fp32_master_0" if self.bf16 else ""
        optimizer: dict[str, Any] = {}
        masters = {}
        averages = {}
        for n in names:
            for state, key in (("exp_avg", "moment1_0"), ("exp_avg_sq", "moment2_0")):
                kept = self.kept(self.states[state, n], n, tp, shard)
                if kept is not None:
                    name = f"{static[n]}{infix}_{key}"
                    optimizer[name] = (name, kept)
                    beta = f"{static[n]}{infix}_beta1_pow_acc_0"
                    optimizer[beta] = (beta, np.array([0.81], "f4"))
            kept = self.kept(self.states["master", n], n, tp, shard)
            if kept is not None and self.bf16:
                masters[static[n]] = (f"{static[n]}_fp32_master_0", kept)
                averages[static[n]] = (f"{static[n]}_fp32_master_0", kept + 100)
        optimizer |= {"master_weights": masters} if self.bf16 else {}
        optimizer["LR_Scheduler"] = {"last_epoch": 3, "last_lr": 0.5}
        write(folder / f"optimizer{where}.pdopt", optimizer)
        if ema:
            write(folder / f"ema{where}.pdopt", {"master_weights": averages})

    def meta(self) -> dict[str, Any]:
        metas = {}
        for pp in range(self.pp):
            for shard in range(self.sharding):
                for tp in range(self.tp):
                    ep, _, moe_size = self.groups(tp, shard)
                    key = f"tp{tp:02d}_pp{pp:02d}" + (f"_ep{ep:02d}" if self.ep > 1 else "")
                    static = self.static(tp, pp, ep)
                    names = self.held(tp, pp, ep)
                    owners = {}
                    for n in names:
                        size = moe_size if self.expert_rank(n) is not None else self.sharding
                        owners[static[n]] = list(self.parameters).index(n) % size
                    metas[key] = {
                        "param2rank": {} if self.v2 else owners,
                        "structure_name_mapping": {self.spelt(n): static[n] for n in names},
                        "param_meta": {
                            self.spelt(n): [
                                list(self.part(self.parameters[n][0], n, tp).shape),
                                16 if self.bf16 else 10,
                                self.parameters[n][1] is not copies or self.expert_rank(n) is not None,
                                self.expert_rank(n) is not None,
                            ]
                            for n in names
                        },
                        "param_meta_keys": ["shape", "dtype", "is_distributed", "no_sync"],
                        "sharding_strategy": "ShardingV2" if self.v2 else "ShardingV1",
                        "enable_overlap": False,
                    }
        config = {
            "pp_degree": self.pp,
            "mp_degree": self.tp,
            "sharding_degree": self.sharding,
            "ep_degree": self.ep,
            "moe_sharding_degree": self.tp * self.sharding // self.ep if self.ep > 1 else 0,
        }
        return {"parallel_config": config, "sharding_metas": metas}

    def truth(self, *, io: bool = False, ema: bool = False) -> dict[tuple[str, str], np.ndarray]:
        """(state, name) -> the whole values, bf16 as bits."""
        out: dict[tuple[str, str], np.ndarray] = {}
        for name, (whole_, _, _) in self.parameters.items():
            if not (io and self.bf16):
                out["model", name] = self.stored(whole_)
            if self.bf16:
                out["master", name] = self.states["master", name]
            if self.bf16 and ema:
                out["ema", name] = self.states["master", name] + 100
            out["exp_avg", name] = self.states["exp_avg", name]
            out["exp_avg_sq", name] = self.states["exp_avg_sq", name]
            out["beta1_pow_acc", name] = np.array([0.81], "f4")
        return out


def bf16_bits(array: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(array, "f4").view("u4") >> 16).astype("u2")


def write(path: Path, state: Any) -> None:
    path.write_bytes(pickle.dumps(state, protocol=4))
