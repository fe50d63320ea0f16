"""Megatron's arguments for a source that has none: `args` of the output, from the model's config, as Megatron-LM saves
them.

    config.json of a Qwen3, --to megatron-dist --tp 2  ->
          args: num_layers, qk_layernorm, ..., params_dtype, padded for TP 2

So `--use-checkpoint-args` works, and the way back needs no config. That option takes over only part of them
(Megatron-LM 0.16.1 `training/checkpointing.py`, `load_args_from_checkpoint`): what it leaves to the command line is a
line in the report. Cost: none. What it does not do: degrees (each format's own `updated`), arguments of the job
(learning rate, batch).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from typing import Any

from ckpt_tool.conversion.output_config import torch_dtype
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import Format
from ckpt_tool.formats.entry import of_dialect
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.config import file_config
from ckpt_tool.systems.megatron import hybrid
from ckpt_tool.systems.megatron.options import MegatronOptions
from ckpt_tool.systems.megatron.source_config import model_arguments
from ckpt_tool.systems.megatron.stored_names import ROOT

_EMBEDDING = re.compile(rf"{ROOT}embedding\.word_embeddings\.weight")
_AHEAD = re.compile(rf"{ROOT}mtp\.layers\.(\d+)\.")
_MULTIPLE = 128  # Megatron's own default of make_vocab_size_divisible_by
# Arguments that `load_args_from_checkpoint` does not take from a checkpoint -> (Megatron's default, the flag to give if
# the model's value differs from it).
_FLAGS: Mapping[str, tuple[Any, str]] = {
    "layernorm_epsilon": (1e-5, "--norm-epsilon {}"),
    "qk_layernorm": (False, "--qk-layernorm"),
    "layernorm_zero_centered_gamma": (False, "--apply-layernorm-1p"),
    "quick_geglu": (False, "--quick-geglu"),
    "multi_latent_attention": (False, "--multi-latent-attention"),
    "q_lora_rank": (None, "--q-lora-rank {}"),
    "kv_lora_rank": (32, "--kv-lora-rank {}"),
    "qk_head_dim": (128, "--qk-head-dim {}"),
    "qk_pos_emb_head_dim": (64, "--qk-pos-emb-head-dim {}"),
    "v_head_dim": (128, "--v-head-dim {}"),
    "rope_type": (None, "--rope-type {}"),
    "rotary_scaling_factor": (1.0, "--rotary-scaling-factor {}"),
    "mscale": (1.0, "--mscale {}"),
    "mscale_all_dim": (0.0, "--mscale-all-dim {}"),
    "use_rope_scaling": (False, "--use-rope-scaling"),
    "mrope_section": (None, "--mrope-section {}"),
    "rope_scaling_factor": (8.0, "--rope-scaling-factor {}"),
    "mtp_num_layers": (None, "--mtp-num-layers {}"),
    "attention_output_gate": (False, "--attention-output-gate"),
    "experimental_attention_variant": (None, "--experimental-attention-variant {}"),
    "linear_attention_freq": (None, "--linear-attention-freq {}"),
    "linear_conv_kernel_dim": (4, "--linear-conv-kernel-dim {}"),
    "linear_key_head_dim": (128, "--linear-key-head-dim {}"),
    "linear_value_head_dim": (128, "--linear-value-head-dim {}"),
    "linear_num_key_heads": (16, "--linear-num-key-heads {}"),
    "linear_num_value_heads": (32, "--linear-num-value-heads {}"),
    "dsa_indexer_n_heads": (None, "--dsa-indexer-n-heads {}"),
    "dsa_indexer_head_dim": (None, "--dsa-indexer-head-dim {}"),
    "dsa_indexer_topk": (None, "--dsa-indexer-topk {}"),
    "dsa_indexer_topk_freq": (1, "--dsa-indexer-topk-freq {}"),
    "dsa_indexer_skip_topk_offset": (0, "--dsa-indexer-skip-topk-offset {}"),
    "dsa_indexer_rope_interleaved": (False, "--dsa-indexer-rope-interleaved"),
    "qk_l2_norm": (False, "--qk-l2-norm"),
    "moe_apply_probs_on_input": (False, "--moe-apply-probs-on-input"),
    "fp32_residual_connection": (False, "--fp32-residual-connection"),
    "moe_router_num_groups": (None, "--moe-router-num-groups {}"),
    "moe_router_group_topk": (None, "--moe-router-group-topk {}"),
    "moe_shared_expert_gate": (False, "--moe-shared-expert-gate"),
    "window_size": (None, "--window-size {}"),
    "window_attn_skip_freq": (None, "--window-attn-skip-freq {}"),
    "no_rope_freq": (None, "--no-rope-freq {}"),
    "softmax_type": ("vanilla", "--softmax-type {}"),
    "activation_func_clamp_value": (None, "--activation-func-clamp-value {}"),
    "glu_linear_offset": (0.0, "--glu-linear-offset {}"),
    "make_vocab_size_divisible_by": (128, "--make-vocab-size-divisible-by {}"),
}


def with_arguments(wanted: Wanted, chosen: Chosen, fmt: Format) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return (extras with `args`, notes) for an output under Megatron's names.

    The extras are unchanged if the output has other names, if they have arguments already, or if nothing states the
    model's config.
    """
    extras = wanted.extras
    if chosen.dialect_in(fmt) != "megatron" or "args" in extras:
        return extras, ()
    opened = chosen.sources[0]
    known = model_arguments(opened)
    if known:  # the user dropped the extras, but the model's arguments belong to the model
        args: dict[str, Any] = dict(known)
        return {**extras, "args": Opaque("argparse.Namespace", (), args)}, ()
    config = chosen.config
    if config is None:
        try:
            config = file_config(opened)
        except UsageError:
            config = None
    if config is None:
        return extras, ()
    from ckpt_tool.families.config import is_paddle
    from ckpt_tool.families.config.translation import megatron_args

    if is_paddle(config) or registry.by_name(opened.catalog.format).holds.dialect == "paddle":
        in_hub_words = of_dialect("paddle", "hub_config")
        config = in_hub_words(config).config if in_hub_words is not None else config
    args, notes = megatron_args(config)
    if not args:
        return extras, notes
    args = _complete_by_tensors(args, wanted)
    flags = flags_beside(args)
    if flags:
        notes = (*notes, f"Megatron-LM needs these in addition to --use-checkpoint-args: {' '.join(flags)}")
    return {"args": Opaque("argparse.Namespace", (), args), **fmt.holds.with_args, **extras}, notes


def _complete_by_tensors(args: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """Return the arguments, completed from the tensors and the options: dtype, vocabulary, MTP layers, the spec."""
    from ckpt_tool.families.config.translation import set_mtp_layers

    out = dict(args)
    model = {tensor.key.name: tensor for tensor in wanted.tensors if tensor.key.state == MODEL}
    dtype = torch_dtype(wanted)
    out |= {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    if dtype is not None:
        out["params_dtype"] = Symbol(f"torch.{dtype}")
    tp = wanted.wish.degrees.at("tp")
    embedding = next((tensor for name, tensor in model.items() if _EMBEDDING.fullmatch(name)), None)
    if embedding is not None and embedding.shape:
        rows = embedding.shape[0]
        out["vocab_size"] = wanted.wish.vocab_size or rows
        out["make_vocab_size_divisible_by"] = vocabulary_multiple(rows, tp)
        unit = out["make_vocab_size_divisible_by"] * tp
        out["padded_vocab_size"] = ceil_div(out["vocab_size"], unit) * unit
    ahead = {match[1] for match in map(_AHEAD.match, model) if match}
    out = set_mtp_layers(out, len(ahead))
    te = wanted.wish.of(MegatronOptions).spec == "te"
    out["transformer_impl"] = "transformer_engine" if te else "local"
    if out.get("num_experts"):
        out["moe_grouped_gemm"] = te
    letters = "" if hybrid.pattern_of(out) else hybrid.shown(model)
    return hybrid.changed(out, letters, back=False) if letters else out


def vocabulary_multiple(rows: int, tp: int) -> int:
    """Return the largest power of two up to 128 with which Megatron would not pad the rows at `tp` ranks.

    128, Megatron's default, if `tp` does not divide the rows.

    >>> vocabulary_multiple(32000, 2), vocabulary_multiple(104, 2), vocabulary_multiple(50257, 2)
    (128, 4, 128)
    """
    return gcd(rows // tp, _MULTIPLE) if rows % tp == 0 and rows else _MULTIPLE


def flags_beside(args: Mapping[str, Any]) -> list[str]:
    """Return the flags of Megatron-LM for values that it does not take from a checkpoint and that are not its
    defaults."""
    out = []
    latent = args.get("multi_latent_attention")
    scaled = args.get("use_rope_scaling")
    for name, (default, flag) in _FLAGS.items():
        value = args.get(name, default)
        ours = not (
            name.startswith(("q_lora", "kv_lora", "qk_head", "qk_pos", "v_head", "rope_type", "rotary_s", "mscale"))
            and not latent
        )
        if value in (None, False, default) or not ours or (name == "rope_scaling_factor" and not scaled):
            continue
        if isinstance(value, tuple | list):
            between = {"window_size": ",", "mrope_section": " "}
            value = between[name].join(map(str, value)) if name in between else f"[{','.join(map(str, value))}]"
        out.append(flag.format(value))
    return out
