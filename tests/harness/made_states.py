"""States as a trainer of any layout would hand them over, cut from whole tensors that are known beforehand.

`truth(spec)` has every logical tensor as a ramp with a start of its own; `ranks(spec, layout)` cuts it: TP by rows or
columns, PP by layers, EP by experts, ZeRO 1 and 2 along the line of all of a rank's parameters laid end to end, ZeRO 3
along each parameter's. The cutting is spelled out here and shares nothing with the trainer.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.harness.pieces import Coordinates, RankState, TensorPiece

STATES = ("model", "master", "exp_avg", "exp_avg_sq", "ema")
SCALES = {"model": 1 / 64, "master": 1 / 64, "exp_avg": -1 / 65536, "exp_avg_sq": 1 / (1 << 20), "ema": 1 / 8192}
SCALARS = {
    "step": 7,
    "consumed": 56,
    "seed": 1234,
    "lr": 0.0005,
    "scheduler": {"warmup": 2, "total": 40, "peak": 0.001, "floor": 0.0001},
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0, "ema": 0.99},
}


class Spec(NamedTuple):
    layers: int = 3
    hidden: int = 12
    kv: int = 4
    per: int = 2
    head: int = 3
    ff: int = 20
    experts: int = 4
    moe: int = 8
    vocab: int = 40
    tied: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.kv * self.per,
            "num_key_value_heads": self.kv,
            "head_dim": self.head,
            "intermediate_size": self.ff,
            "moe_num_experts": self.experts,
            "moe_k": 2,
            "moe_intermediate_size": self.moe,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_layer_end_index": self.layers - 1,
            "vocab_size": self.vocab,
            "use_bias": False,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        }


class Cut(NamedTuple):
    shape: tuple[int, ...]
    dim: int | None  # that TP cuts


def shapes(spec: Spec) -> dict[str, Cut]:
    h = spec.hidden
    q = spec.kv * spec.per * spec.head
    k = spec.kv * spec.head
    found = {"model.embed_tokens.weight": Cut((spec.vocab, h), 0)}
    for i in range(spec.layers):
        base = f"model.layers.{i}."
        found[base + "input_layernorm.weight"] = Cut((h,), None)
        for part, rows in (("q", q), ("k", k), ("v", k)):
            found[f"{base}self_attn.{part}_proj.weight"] = Cut((rows, h), 0)
        found[base + "self_attn.o_proj.weight"] = Cut((h, q), 1)
        found[base + "post_attention_layernorm.weight"] = Cut((h,), None)
        if i:
            found[base + "mlp.gate.weight"] = Cut((spec.experts, h), None)
        mlps = [("mlp.", spec.ff)] if not i else [(f"mlp.experts.{e}.", spec.moe) for e in range(spec.experts)]
        mlps += [("mlp.shared_experts.", spec.moe)] if i else []
        for mlp, width in mlps:
            found |= {f"{base}{mlp}{part}_proj.weight": Cut((width, h), 0) for part in ("gate", "up")}
            found[f"{base}{mlp}down_proj.weight"] = Cut((h, width), 1)
    found["model.norm.weight"] = Cut((h,), None)
    if not spec.tied:
        found["lm_head.weight"] = Cut((spec.vocab, h), 0)
    return found


def truth(spec: Spec) -> dict[tuple[str, str], torch.Tensor]:
    out = {}
    for state in STATES:
        for name, cut in shapes(spec).items():
            numel = torch.Size(cut.shape).numel()
            ramp = torch.arange(numel, dtype=torch.float64) + zlib.crc32(name.encode()) % 401
            values = ((ramp + 1 / 3) * SCALES[state]).float().reshape(cut.shape)
            plain = state != "model" or name.endswith("mlp.gate.weight")
            out[state, name] = values if plain else values.bfloat16()
    return out


def layout(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, vpp: int = 1, zero: int = 1, **more: Any) -> Any:
    return SimpleNamespace(tp=tp, pp=pp, dp=dp, ep=ep, vpp=vpp, zero=zero, **more)


def chunks(spec: Spec, lay: Any) -> list[tuple[tuple[int, ...], ...]]:
    """Of each stage, the layers of each virtual chunk; an uneven rest goes to the first."""
    parts = lay.pp * lay.vpp
    counts = getattr(lay, "split", None) or [spec.layers // parts + (i < spec.layers % parts) for i in range(parts)]
    at = 0
    every = []
    for count in counts:
        every.append(tuple(range(at, at + count)))
        at += count
    return [tuple(every[stage :: lay.pp]) for stage in range(lay.pp)]


def ranks(spec: Spec, lay: Any, replicated: tuple[str, ...] = (), values: Any = None) -> list[RankState]:
    """replicated: ends of names that TP does not cut."""
    found = []
    whole = truth(spec) if values is None else values
    stages = chunks(spec, lay)
    shape = SimpleNamespace(
        config=spec.config, parameters=lambda: [SimpleNamespace(name=name) for name in shapes(spec)]
    )
    for number in range(lay.tp * lay.dp * lay.pp):
        tp = number % lay.tp
        dp = number // lay.tp % lay.dp
        pp = number // (lay.tp * lay.dp)
        at = Coordinates(number, tp, pp, dp, dp % lay.ep, stages[pp])
        found.append(RankState(lay, shape, at, _pieces(spec, lay, at, whole, replicated), dict(SCALARS)))
    return found


def _pieces(spec: Spec, lay: Any, at: Coordinates, whole: Any, replicated: tuple[str, ...]) -> list[TensorPiece]:
    mine = []
    for name, cut in shapes(spec).items():
        if not _here(name, spec, lay, at):
            continue
        offset = [0] * len(cut.shape)
        box = list(cut.shape)
        if cut.dim is not None and lay.tp > 1 and not name.endswith(replicated or ("\0",)):
            box[cut.dim] //= lay.tp
            offset[cut.dim] = at.tp * box[cut.dim]
        mine.append((name, tuple(offset), tuple(box)))
    pieces = []
    for state in STATES:
        flat = lay.zero == 3 or (lay.zero in (1, 2) and state != "model")
        for expert in (False, True):
            ranks, index = (lay.dp // lay.ep, at.dp // lay.ep) if expert else (lay.dp, at.dp)
            group = [m for m in mine if (".experts." in m[0]) is expert]
            share = ceil_div(sum(torch.Size(m[2]).numel() for m in group), ranks)
            line = 0
            for name, offset, box in group:
                tensor = whole[state, name][tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))].clone()
                numel = tensor.numel()
                if not flat or ranks == 1:
                    pieces.append(TensorPiece(name, state, shapes(spec)[name].shape, offset, box, tensor))
                    continue
                if lay.zero == 3:
                    each = ceil_div(numel, ranks)
                    start = min(index * each, numel)
                    stop = min((index + 1) * each, numel)
                else:
                    start, stop = (min(max(edge - line, 0), numel) for edge in (index * share, (index + 1) * share))
                line += numel
                part = tensor.reshape(-1)[start:stop].clone()
                pieces.append(TensorPiece(name, state, shapes(spec)[name].shape, offset, box, part, (start, stop)))
    return pieces


def _here(name: str, spec: Spec, lay: Any, at: Coordinates) -> bool:
    if ".layers." in name:
        if int(name.split(".")[2]) not in [layer for chunk in at.chunks for layer in chunk]:
            return False
        if ".experts." in name:
            return int(name.split(".experts.")[1].split(".")[0]) // (spec.experts // lay.ep) == at.ep
        return True
    if "embed_tokens" in name:
        return at.pp == 0 or (spec.tied and at.pp == lay.pp - 1)
    return at.pp == lay.pp - 1
