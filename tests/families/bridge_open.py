"""What the golden files of `bridge_golden.py` leave open, each with why: the table of fixtures/README.md.

UNRUN: families with a mapping to Megatron, ours or a bridge's, of which no golden file is here. ALIKE: files of
Megatron-Bridge whose tensors and keys mcore-bridge 1.6.5 makes too, and what its model lacks ("": nothing), as
`bridge_golden.py FOLDER --alike` shows. SWIFT_UNRUN: families that mcore-bridge has, where it does not run.
"""

from __future__ import annotations

_CORE = "neither bridge has it: core's standard modules"
UNRUN: dict[str, str] = {
    "bailing_hybrid": "mcore-bridge maps Ling 2.5, an older model under the same model_type, with other names",
    "falcon": "neither bridge has it: the layer is NeMo 1's",
    "glm5_next": "mcore-bridge wants Megatron-LM's dev of after 2026-08-22 (`ssm/gated_delta_net/kda.py`) and a "
    "patch of its own for it (`require_glm5_hybrid`); our rules are read from its code",
    "gpt2": _CORE,
    "kimi_k25": "the bridge builds the tower of code that lies with the model's files; the language model is Kimi K2's",
    "minimax_m3_vl": "the bridge's model was not built here; its fields are held against our arguments",
    "mixtral": _CORE,
    "phi3": _CORE,
    "qwen3_5_moe_text": "the language model of qwen3_5_moe, without the root of its names",
    "seed_oss": _CORE,
    "smollm3": _CORE,
    "starcoder2": _CORE,
    "step3p5": "the bridge repeats a gate's row for each element of a head where core has no `head_wise_attn_gate`, as "
    "neither 0.19.2 has nor main of 2026-08-22: no rule brings the rows back once a job has trained them",
}
_BIAS = "no expert bias, of which the small config says nothing to it"
ALIKE: dict[str, str] = {
    **dict.fromkeys(
        "llama qwen2 qwen3 qwen3_moe gpt_oss glm4_moe kimi_k2 glm4_moe_lite glm_moe_dsa deepseek_v2".split(), ""
    ),
    "deepseek_v3": _BIAS,
    "deepseek_v32": _BIAS,
    "ernie4_5_moe": _BIAS,
    "minimax_m2": "neither expert bias nor norms of q and k, of which the small config says nothing to it",
}
SWIFT_UNRUN: dict[str, str] = {
    "bailing_moe_v2": "it wants a score function of the router, which the small config leaves out",
    "deepseek_v4": "read, not run: its names are the same",
    "ernie4_5_vl_moe": "it takes the two widths of experts for one",
    "hy_v3": "it asks for `shared_head.norm` of MTP, where released files have `final_layernorm`",
    "mimo": "it does not read MTP's names",
    "nemotron_h": "it does not know latent experts",
}
