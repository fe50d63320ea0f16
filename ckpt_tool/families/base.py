"""Family: a model architecture as a list of equations between names, and what they come to for one checkpoint.

A family has one table a dialect, each against the hub (Hugging Face's unfused names), so that any two dialects compose:

    paddle   model.layers.{i}.mlp.up_gate_proj.weight : h ((1 + 1) f) = model.layers.{i}.mlp.<gate|up>_proj.weight : f h
    hub      model.layers.{i}.mlp.<gate|up>_proj.weight : f h

    mapping(family, "hf", "paddle", {"model.layers.0.mlp.gate_proj.weight": (48, 32), ...up...}, {"hidden_size": 32})
      -> Made("model.layers.0.mlp.up_gate_proj.weight", (32, 96), two pieces)

What is there decides: rules are worked out for the layers, experts and optional tensors (biases, norms, MTP) that the
source names, so a part of a checkpoint maps as well as a whole one. A tensor is made when all its sources are there,
left out when none is, and a fault that names the missing ones otherwise. Names that no rule knows are not in the
result: they stay as they are. Tied heads: both names are mapped as stored, and where the target leaves one out the
result names it as an alias.

Cost: some 45 us a tensor both ways (671B, 48k tensors: 2 s). What it does not do: choose the family
(`families.registry`), read a file, or change values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.families.table import Table, table_of

Shape = tuple[int, ...]
Config = Mapping[str, Any]
HUB = "hf"
MEMORY = "hf-5"  # what transformers 5 has in memory, where names differ too
BARE = "hf-bare"  # the hub's files of a model without a head (`Qwen3Model`): every name without its root
_ROOT = re.compile(r"(?<![\w.])model\.")
SHIFTED = "megatron-1p"  # Megatron's dialect where its norms are centred otherwise than the hub's
SYSTEMS: Mapping[str, str] = {
    "megatron": "Megatron",
    "paddle": "Paddle",
    "meta": "Meta",
    "gguf": "llama.cpp",
    "torchtune": "torchtune",
    "olmo": "OLMo-core",
    "maxtext": "MaxText",
    "gemma": "Gemma's library for JAX",
}  # by how dialects begin
# The axes of a decoder with grouped heads, as its config names their sizes
DECODER: Mapping[str, str] = {
    "i": "num_hidden_layers",
    "v": "vocab_size",
    "h": "hidden_size",
    "f": "intermediate_size",
    "g": "num_key_value_heads? or num_attention_heads",
    "r": "num_attention_heads // g",
    "d": "head_dim? or h // num_attention_heads",
}
# The axes of DeepSeek's decoder, with latent attention, experts and layers of multi-token prediction
LATENT: Mapping[str, str] = {
    "i": "num_hidden_layers + (num_nextn_predict_layers? or 1)",
    "v": "vocab_size",
    "h": "hidden_size",
    "f": "intermediate_size",
    "a": "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
    "q": "q_lora_rank",
    "l": "kv_lora_rank",
    "b": "kv_lora_rank + qk_rope_head_dim",
    "c": "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
    "u": "num_attention_heads * v_head_dim",
    "w": "2 * h",
    "e": "n_routed_experts",
    "m": "moe_intermediate_size",
    "s": "m * n_shared_experts",
}
# Those of Qwen's gated delta net, and of its one layer of multi-token prediction
DELTA_NET: Mapping[str, str] = {
    "n": "linear_num_key_heads",
    "k": "linear_key_head_dim",
    "p": "linear_num_value_heads // n",
    "u": "linear_value_head_dim",
    "c": "linear_conv_kernel_dim",
    "t": "1",
    "w": "2 * h",
}
# ERNIE's own code (PaddlePaddle/ERNIE of 2025, ernie/modeling.py, `Ernie4_5_Attention.forward`) takes qkv_proj apart as
# [Q | K | V]
# where heads share keys, as its tools/paddle2torch does, and head by head where each has its own.
SHARED_KEYS = "num_key_value_heads? and num_key_value_heads != num_attention_heads"
CONTIGUOUS = ("(g (r + 1 + 1) d)", "(g r d + g d + g d)")
OWN_KEYS = "not num_key_value_heads? or num_key_value_heads == num_attention_heads"
# PaddleNLP 3.0.0b4 and ERNIE's own code: the head is a Linear unless it is the embedding itself
NLP_HEAD = """
    lm_head.weight : h v = lm_head.weight : v h if not tie_word_embeddings?
    lm_head.weight : v h = lm_head.weight : v h if tie_word_embeddings?
"""
# PaddleFormers 1.2.0, its fused decoders: Linear weights (inputs, outputs), q, k and v of each group of heads side by
# side, gate and
# up in one. A family adds its norms and experts
PADDLE_FUSED = """
    [model.embed_tokens|lm_head].weight : v h
    model.norm.weight : h
    model.layers.{i}.self_attn.qkv_proj.weight : h (g (r + 1 + 1) d)
        = ..<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    model.layers.{i}.self_attn.qkv_proj.bias : (g (r + 1 + 1) d) = ..<q|k|v>_proj.bias : (g r d), (g d), (g d)
    model.layers.{i}.self_attn.o_proj.weight : (g r d) h = : h (g r d)
    model.layers.{i}.mlp.up_gate_proj.weight : h ((1 + 1) f) = ..<gate|up>_proj.weight : f h
    model.layers.{i}.mlp.down_proj.weight : f h = : h f
"""
# transformers 5 in memory, as its training jobs save it: a layer's experts in two tensors
FUSED_EXPERTS = """
    model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
        = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
    model.layers.{i}.mlp.experts.down_proj : e h m = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
"""
FUSED_MIXTRAL_EXPERTS = """
    model.layers.{i}.mlp.gate.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
    model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) f) h
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
    model.layers.{i}.mlp.experts.down_proj : e h f
        = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
"""


class Variant(NamedTuple):
    """A dialect derived from another one, or from a table, in this order:"""

    of: str  # the other dialect's name, or a table
    root: str = "model."  # in place of `instead`, `model.` (GPT-2: `transformer.`) unless it says so
    over: str = ""  # rules that come first and instead of those of their names
    swap: tuple[str, str] = ("", "")  # `swap[1]` for `swap[0]` in the text of that table
    # where `inner[1]` holds of a layer, its `inner[2:]` are one level down, under `inner[0]`
    inner: tuple[str, ...] = ()
    apart: bool = False  # what is fused may also be stored unfused, under the hub's names, transposed
    like_hub: bool = False  # names that the hub has are laid out as in the hub
    ahead: bool = False  # layers beyond the decoder's are Megatron's of MTP
    short: bool = False  # they are left out
    # a condition on the config; if names and shapes fit two dialects, the one whose condition holds is chosen
    when: str = ""
    instead: str = ""
    # do the rules list exactly the tensors of a complete model with a given config, except for a tied head?
    exact: bool = False

    def derive(self, table: Table, hub: Table, kinds: Mapping[str, str]) -> Table:
        """The table of this dialect, derived from the table of the dialect `of`."""
        if self.root != "model." or self.instead:
            table = table.with_root(self.root, self.instead)
        if self.over:
            table = table_of(self.over, kinds).override(table)
        if self.apart:
            table = table.with_unfused_spelling()
        if self.inner:
            level, condition, *modules = self.inner
            table = table.with_nested_modules(level, condition, modules)
        if self.ahead:
            table = table.with_mtp_layers("i >= num_hidden_layers")
        if self.short:
            table = table.without_layers("i >= num_hidden_layers", hub)
        return table.extend_hub(hub) if self.like_hub else table


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One model architecture.

    hub: the table of dialect `hf`.
    dialects: the other dialects, as a table's text or as a variant. Tables are parsed on first use.
    own: axes whose size follows from each tensor's shape and may differ by layer (n-gram tables of different heights);
        `axes` gives their size for a tensor that does not exist yet.
    kinds: the words for kinds of layers in conditions (`if windowed`): {word: expression of the layer's index and the
        config}.
    centred: the hub's norms multiply by 1 + weight. If Megatron's norms don't, or if they do and the hub's don't (a job
        with --apply-layernorm-1p), Megatron's dialect is `megatron-1p`: the same names, with one added to or subtracted
        from each norm.
    apart: prefixes of the names of parts for which Megatron has no module; they keep their names, and the report says
        so.
    language: the key of the language model's part in config.json (`text_config`, `thinker_config.text_config`), if
        there may be one; axes and conditions read that part as if it were the config (`facts`).
    parts: classes of other families that the part may have: {model_type: Megatron's arguments that differ there}.
    unmapped: {prefix of a system's dialects: why this family has none, although a project maps it}.
    saved: the dialect in which transformers 5 saves, if the released files have another one, `hf`.
    tiny: what the config of a small model needs in addition to the sizes of every decoder (tests build the first class
        from it).
    """

    name: str
    classes: tuple[ModelClass, ...]  # the classes of transformers that have its tensors
    axes: Mapping[str, str]  # {axis: expression of the config}; `{axis}` in a name counts below its size
    hub: str
    dialects: Mapping[str, str | Variant] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    centred: bool = False
    apart: tuple[str, ...] = ()
    language: str = ""
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unmapped: Mapping[str, str] = field(default_factory=dict)
    saved: str = HUB
    tiny: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_types(self) -> tuple[str, ...]:
        """The `model_type` of each class, as config.json has it."""
        return tuple(each.model_type for each in self.classes)

    @property
    def known_dialects(self) -> tuple[str, ...]:
        """The names of all dialects, the hub's first; without a root in the hub's names there is no BARE."""
        bare = (BARE,) if BARE not in self.dialects and _ROOT.search(self.hub) else ()
        return (HUB, *self.dialects, *bare)

    def facts(self, config: Config) -> Config:
        """The config values that axes and conditions read.

        The language model's part of a config.json, if it has one, overrides the keys at the top, and these override the
        defaults of the part's class (else of the first class). Only `tie_word_embeddings` at the top wins over the
        part's.

        >>> Family("x", (), {}, "", language="text_config").facts({"text_config": {"hidden_size": 8}})["hidden_size"]
        8
        """
        part = self.part(config)
        if part is None:
            return {**config, **_read_shared_layer_settings(config)} if "per_layer_config" in config else config
        defaults = next(
            (each.defaults for each in self.classes if each.model_type == part.get("model_type", each.model_type)),
            self.classes[0].defaults if self.classes else {},
        )
        tied = {key: config[key] for key in ("tie_word_embeddings",) if isinstance(config.get(key), bool)}
        return {**defaults, **config, **part, **_read_shared_layer_settings(part), **tied}

    def part(self, config: Config) -> Config | None:
        """The language model's part of a config.json, None if the config is not split into parts."""
        part: Any = config if self.language else None
        for key in self.language.split("."):
            part = part.get(key) if isinstance(part, Mapping) else None
        return part if isinstance(part, Mapping) else None

    def exact(self, dialect: str) -> bool:
        """Do the dialect's rules list exactly the tensors of a complete model (`Variant.exact`)?"""
        variant = self.dialects.get(dialect)
        return isinstance(variant, Variant) and variant.exact

    def table(self, dialect: str) -> Table:
        """The dialect's rules. Raises UsageError: E1231 no such dialect, E0220-E0235 and E1234 a table at fault."""
        return _table(self, dialect)


def _read_shared_layer_settings(config: Config) -> dict[str, Any]:
    """The settings of single layers in transformers 5's `per_layer_config` that are equal in all layers listed there.

    >>> _read_shared_layer_settings({"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 8}}})
    {'per_layer_head_dim': 8}
    """
    by_layer = config.get("per_layer_config")
    rows = [row for row in by_layer.values() if isinstance(row, Mapping)] if isinstance(by_layer, Mapping) else []
    shared: dict[str, Any] = {}
    for key in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(key) for row in rows]
        if values.count(values[0]) == len(values):
            shared[f"per_layer_{key}"] = values[0]
    return shared


# Every dialect of every family (some 400) has room: whoever asks them all in turn, as for names of no family, would
# parse each table at each turn with a smaller cache (1.4 s of CPU in place of 0.55).
@lru_cache(maxsize=2048)
def _table(family: Family, dialect: str) -> Table:
    if dialect == HUB:
        return table_of(family.hub, family.kinds)
    if dialect == SHIFTED and "megatron" in family.dialects:
        return family.table("megatron").with_norm_offset(1 if family.centred else -1)
    if dialect == BARE and dialect not in family.dialects and dialect in family.known_dialects:
        return Variant(HUB, root="").derive(family.table(HUB), family.table(HUB), family.kinds)
    if dialect not in family.dialects:
        dialects = family.known_dialects
        begins = dialect.partition("-")[0]
        system = SYSTEMS.get(begins)
        is_other_system = not any(name.partition("-")[0] == begins for name in dialects)
        project_reason = family.unmapped.get(begins)
        reason = (
            f": {project_reason or f'no project that ckpt knows maps it to {system}'}"
            if system and is_other_system
            else ""
        )
        advice = near_misses(dialect, dialects) or ("--dialect keep keeps the source's names" if system else "")
        raise UsageError(
            f"family {family.name} has no dialect {dialect!r}{reason}",
            code="E1231",
            hint=f"it has {', '.join(dialects)}; {advice}".rstrip("; "),
        )
    return _resolve_variant(family, family.dialects[dialect], ("", ""))


def _resolve_variant(family: Family, given: str | Variant, swap: tuple[str, str]) -> Table:
    if isinstance(given, str):
        return table_of(given.replace(*swap) if swap[0] else given, family.kinds)
    origin: str | Variant
    if "\n" in given.of:  # a table's own text
        origin = given.of
    else:
        origin = family.hub if given.of == HUB else family.dialects[given.of]
    return given.derive(
        _resolve_variant(family, origin, given.swap if given.swap[0] else swap), family.table(HUB), family.kinds
    )
