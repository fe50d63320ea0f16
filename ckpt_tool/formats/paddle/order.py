"""The order in which a Paddle model registers its parameters: what its optimizer lists them in, and its files too.

The one idea: a source of Paddle's says it (its name tables run in that order); for names from elsewhere it follows from the
modules, for all of PaddleFormers' decoders declare them alike:

    embed_tokens; layers in turn: self_attn (qkv_proj | q_proj k_proj v_proj, o_proj, q_norm, k_norm),
    mlp (gate router, experts in turn, shared experts, moe_statics | up_gate_proj | gate_proj up_proj, down_proj),
    input_layernorm, post_attention_layernorm; norm; multi-token prediction; lm_head

Sharding deals parameters in this order (`paddle.slices`), so it decides which rank holds what. A loader that reshards accepts
any. Source: name tables of runs of PaddleFormers 1.2.0 (Llama, ERNIE-4.5, ERNIE-4.5-MoE). Cost: a sort.
What it does not do: names of static graphs (`paddle.static`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.", re.ASCII)
_FIRST = ("embed_tokens", "word_embeddings", "wte", "embeddings")
_LAST = ("lm_head", "output_layer", "score", "classifier")
_WORDS = (
    "embed_tokens", "enorm", "hnorm", "eh_proj", "self_attn", "self_attention", "attn", "attention",
    "qkv_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
    "k_proj", "v_proj", "o_proj", "out_proj", "q_norm", "k_norm",
    "mlp", "gate", "router", "experts", "shared_experts", "shared_expert", "shared_expert_gate", "moe_statics",
    "up_gate_proj", "gate_up_fused_proj", "gate_up_proj", "gate_proj", "up_proj", "down_proj",
    "input_layernorm", "post_attention_layernorm", "norm", "shared_head",
    "mtp_block", "mtp_hidden_norm", "mtp_emb_norm", "mtp_linear_proj",
    "weight", "bias", "e_score_correction_bias", "lora_A", "lora_B",
)  # fmt: skip
_PLACE = {word: number for number, word in enumerate(_WORDS)}


def registration_order(names: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """`names` in Paddle's order. known: names in the order in which the source's files list them; used where they are all of
    `names`, else the order of the modules is."""
    place = {name: number for number, name in enumerate(known)}
    if not names or not all(name in place for name in names):
        return sorted(names, key=_key)
    first: dict[str, int] = {}  # of the experts of a layer: ranks that hold others list them behind
    for name in names:
        front = _EXPERT.split(name, 1)[0]
        first[front] = min(first.get(front, len(place)), place[name])

    def key(name: str) -> tuple[int, int, int]:
        found = _EXPERT.search(name)
        return (first[name[: found.start()]], int(found[1]), place[name]) if found else (place[name], 0, 0)

    return sorted(names, key=key)


def _key(name: str) -> tuple[tuple[int, int, str], ...]:
    words = name.split(".")
    group = 0 if any(w in _FIRST for w in words) and "layers" not in words else 1 if "layers" in words else 2
    if any(word in _LAST for word in words):
        group = 4
    elif any(word.startswith("mtp_") for word in words):
        group = 3
    return ((group, 0, ""), *(_word(word) for word in words))


def _word(word: str) -> tuple[int, int, str]:
    if word.isdecimal() and len(word) < 10:  # more digits are no number of a layer
        return 0, int(word), ""
    return 1, _PLACE.get(word, len(_WORDS)), word
