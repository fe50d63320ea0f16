"""Forms of models with Mamba mixers.

    falcon_h1   mamba_n_heads = 24, mamba_d_head = 64      mamba_num_heads = 24, mamba_head_dim = 64, falconh1_ratio = 1.0

Megatron-LM has arguments for a mixer's sizes, and no layer with a mixer and an attention side by side; the words for
that and for the factors are those of Megatron-Bridge's provider. Source: Megatron-Bridge 0.6.2
`models/falcon_h1/falconh1_bridge.py`, `modeling_falconh1/falconh1_model.py`. Cost: none. What it does not do: see
`families.config.forms`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.families.config.words import Arguments, Form, Model, Values, same

_OWN = (
    "embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
    "ssm_in_multiplier ssm_out_multiplier mlp_multipliers ssm_multipliers".split()
)
_SAME = same(
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_state", "mamba_state_dim"),
    ("mamba_n_groups", "mamba_num_groups"),
    ("mamba_d_conv", "d_conv"),
    ("mamba_conv_bias", "conv_bias"),
    ("mamba_chunk_size", "chunk_size"),
    ("mamba_rms_norm", "rmsnorm"),
    ("mamba_norm_before_gate", "norm_before_gate"),
    *((name, name) for name in _OWN),
)


def _falcon_h1_to(model: Model, out: Values) -> None:
    _SAME.to(model, out)
    heads, wide = model.count("mamba_n_heads"), model.count("mamba_d_ssm")
    wide = wide or (model.count("mamba_expand") or 2) * (model.count("hidden_size") or 0)
    if heads and wide % heads == 0:
        out["mamba_head_dim"] = wide // heads
    out["falconh1_ratio"] = 1.0
    model.lost("a mixer beside the attention: Megatron-LM has no such layer; Megatron-Bridge's model has")


def _falcon_h1_back(args: Arguments, out: Values) -> None:
    _SAME.back(args, out)
    heads, width = args.args.get("mamba_num_heads"), args.args.get("mamba_head_dim")
    if type(heads) is int and type(width) is int:
        out |= {"mamba_d_ssm": heads * width, "mamba_d_head": width}


MIXER_FORMS: Mapping[str, Form] = {"falcon_h1": Form(_falcon_h1_to, _falcon_h1_back)}
FALCON_H1_ARGUMENTS = (
    *"mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups d_conv conv_bias rmsnorm norm_before_gate".split(),
    *_OWN,
)
