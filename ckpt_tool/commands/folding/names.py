"""The names of an adapter's tensors: which module each belongs to, and what it is there.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     model.layers.0.self_attn.q_proj, A
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight   model.layers.0.mlp.experts, B, level 1
    base_model.model.lm_head.weight                                    lm_head.weight, whole

Names that were saved with the adapter's own name in them (`lora_A.default.weight`), or with those of wrappers (FSDP,
torch.compile), mean the same. Modules are those of the
model that was wrapped: a causal LM's are the base's; a bare model's lack its `model.`, and newer transformers moved some
(`Root`). Source: PEFT 0.21.2 `utils/save_and_load.py`; see `formats.peft.format`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from ckpt_tool.formats.state_dict.paths import clean

A, B, BIAS, MAGNITUDE, EMBEDDING_A, EMBEDDING_B, TOKENS, WHOLE = (
    "lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B", "trainable tokens",
    "whole",
)  # fmt: skip
PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(A|B)(?:\.(?!weight$|bias$)[^.]+)?\.(weight|bias)")
_PADDLE = re.compile(r"(.+)\.lora_(A|B)")  # parameters of PaddleFormers' layers, seen the other way round
_EMBEDDING = re.compile(r"(.+)\.lora_embedding_(A|B)(?:\.[^.]+)?")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.[^.]+){0,2}")
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?")
_SAVED = re.compile(r"\.modules_to_save(?:\.(?!weight$|bias$)[^.]+)?(?=\.)")
_LEVEL = ".base_layer"


class Part(NamedTuple):
    """module: of the base; of a WHOLE, the tensor's own name. kind: as above. level: wrappers around it that have a name
    (`.base_layer`): stacked experts with several parameters."""

    module: str
    kind: str
    level: int = 0


def part_of(name: str) -> Part | None:
    """What the tensor is, None for a name that PEFT's LoRA does not write."""
    name = clean(name).removeprefix(PREFIX)
    for pattern, kinds in (
        (_LORA, {"A": A, "B": B}),
        (_PADDLE, {"A": A, "B": B}),
        (_EMBEDDING, {"A": EMBEDDING_A, "B": EMBEDDING_B}),
        (_MAGNITUDE, None),
        (_TOKENS, None),
    ):
        found = pattern.fullmatch(name)
        if found is None:
            continue
        module, level = _unwrapped(found[1])
        if kinds is None:
            return Part(module, MAGNITUDE if pattern is _MAGNITUDE else TOKENS, level)
        if pattern is _LORA and found[3] == "bias":
            return Part(module, BIAS, level) if found[2] == "B" else None
        return Part(module, kinds[found[2]], level)
    if any(each.startswith("lora_") or each == "token_adapter" for each in name.split(".")):
        return None
    module, last = _SAVED.sub("", name).rpartition(".")[::2]
    return Part(f"{_unwrapped(module)[0]}.{last}" if module else last, WHOLE)


def _unwrapped(module: str) -> tuple[str, int]:
    level = 0
    while module.endswith(_LEVEL):
        module, level = module.removesuffix(_LEVEL), level + 1
    return module, level


class Root(NamedTuple):
    """Modules that begin with `old` in the adapter begin with `new` in the base."""

    old: str
    new: str

    def of(self, module: str) -> str | None:
        return self.new + module[len(self.old) :] if module.startswith(self.old) else None


# Where the base's names begin otherwise than the wrapped model's: a bare model's, those of transformers before and after 4.52
ROOTS = (
    Root("", ""), Root("", "model."), Root("model.", ""), Root("", "transformer."), Root("transformer.", ""),
    Root("model.language_model.", "language_model.model."), Root("language_model.model.", "model.language_model."),
    Root("model.", "model.language_model."), Root("model.", "language_model.model."),
    Root("model.language_model.", "model."), Root("language_model.model.", "model."), Root("base_model.", ""),
)  # fmt: skip


def root_for(modules: Iterable[str], known: Collection[str]) -> tuple[Root, int]:
    """The way to begin names under which the most of `modules` are modules of the base, and how many. known: modules."""
    modules = list(modules)
    counts = [sum(root.of(module) in known for module in modules) for root in ROOTS]
    most = max(counts)
    return ROOTS[counts.index(most)], most
