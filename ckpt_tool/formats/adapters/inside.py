"""A whole model with an adapter inside: what a job saves that calls `state_dict()` on the wrapped model.

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight        the base's q_proj.weight
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight    the adapter's q_proj.lora_A.weight
    base_model.model.lm_head.original_module.weight                           the base's, from before the training
    base_model.model.lm_head.modules_to_save.default.weight                   the adapter's whole lm_head.weight
    base_model.model.model.embed_tokens.weight                                the base's, as it is

transformers loads none of it under the model's names: every module that has an adapter would start from random values.
So such a state is recognised by its names, in every format, and split in two: the base under its own names, and the
adapter under those of PEFT's files. An adapter's own file is none of this, though PEFT keeps the base's weight of an
embedding in it: see `_is_frozen`.

Source: PEFT 0.21.2 `tuners/tuners_utils.py` (BaseTunerLayer), `utils/other.py` (ModulesToSaveWrapper,
TrainableTokensWrapper), `mapping.py` (the prefix of each method); written by accelerate, verl, LLaMA-Factory and FSDP.
Cost: two looks at each name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ckpt_tool.core.wrapper_words import clean

PREFIX = "base_model.model."
BASE = ".base_layer"
_WRAPPED = re.compile(rf"^(?:module\.)*{re.escape(PREFIX)}")
_PART = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?(?P<ending>\.weight|\.bias)?"
)
_TOKENS = re.compile(
    r"(?P<module>.+)\.token_adapter\.trainable_tokens_(?P<kind>delta|original)(?:\.(?P<adapter>[^.]+))?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<ending>.+)")
_ORIGINAL = ".original_module."
# How the parameters of PEFT's other methods begin, and those of LoRA in other libraries (torchtune, mlx)
_OTHER = re.compile(
    r"\.((?:ia3|vera|hada|lokr|oft|boft|randlora|fourierft|hra|shira|miss|bone|road|c3a|waveft|delora|gralora|vblora"
    r"|tinylora|unilora|pvera|hira|psoft|lily|glora|frod|peanut|adamss|osf|poly|beft|deft)_[A-Za-z0-9_]+|ln_tuning_layers|adaption_(?:prompt|gate)"
    r"|lora_[abE]|lora_ranknum)(?:\.|$)"
)
# What prompt, prefix and P-tuning train is a module next to the model's. SAM's prompt_encoder has other parts.
_PROMPTS = re.compile(
    r"(?:base_model\.)?prompt_encoder\.[^.]+\.(?:embedding\.weight|(?:transform|mlp_head|lstm_head)\..+|prefix_task_\w+)"
)
_PROMPT_ENCODER = "prompt_encoder"
_WORDS = (".lora_", BASE, ".modules_to_save.", f"{_PROMPT_ENCODER}.", ".adaption_")  # one of them is in every adapter
_VOCABULARY = (
    "embed_tokens",
    "lm_head",
    "wte",
    "word_embeddings",
    "embed_out",
    "embed_in",
    "embeddings",
    "shared",
    "tok_embeddings",
    "output_layer",
    "output",
    "token_embedding",
)
# Frozen weights next to parts with the adapter's name: more than a trainer would save deliberately.
_WEIGHTS_OF_A_MODEL = 3


class AdapterInside(NamedTuple):
    """The names of a model and of the adapter in it. Each mapping goes from the stored name."""

    base: Mapping[str, str]  # of the base's tensors, to the name in the model alone
    wrapped: Mapping[str, str]  # of the base's tensors, to the name that PEFT would write
    embeddings: Mapping[str, str]  # of those that PEFT saves with an adapter of an embedding, to the same
    adapter: Mapping[str, str]  # of the adapter's tensors, to the name in PEFT's file
    copies: frozenset[str]  # rows of an embedding as they were before the training
    adapters: tuple[str, ...]  # what the adapters are called: "default"
    others: tuple[str, ...]  # parameters of methods that are not PEFT's LoRA
    foreign_modules: frozenset[str]  # the modules that have such parameters


def find_inside(names: Collection[str]) -> AdapterInside | None:
    """The model and the adapter in it, by the names of a whole state; None for a model alone and an adapter alone."""
    if not any(word in name for name in names for word in _WORDS):
        return None
    inside = split_names(names)
    if _PROMPT_ENCODER in inside.others and len(inside.base) >= _WEIGHTS_OF_A_MODEL:
        return inside
    modules = {_plain(name.removeprefix(PREFIX).partition(".lora_")[0]) for name in inside.adapter.values()}
    modules |= {_plain(name) for name in inside.foreign_modules}
    named = bool(inside.adapters) and not inside.others
    return inside if _is_whole(inside.base, modules, named=named) else None


def split_names(names: Collection[str]) -> AdapterInside:
    """What of a state is the base's, and what the adapter's, by names alone."""
    base: dict[str, str] = {}
    adapter: dict[str, str] = {}
    copies: set[str] = set()
    adapters: dict[str, None] = {}
    others: dict[str, None] = {}
    foreign_modules: set[str] = set()

    for stored in names:
        name = _WRAPPED.sub("", clean(stored))
        other = _OTHER.search(name)
        part = _PART.fullmatch(name)
        tokens = _TOKENS.fullmatch(name)
        saved = _SAVED.fullmatch(name)
        if other is not None:
            others[other[1]] = None
            foreign_modules.add(name[: other.start()])
        elif _PROMPTS.fullmatch(name) is not None:
            others[_PROMPT_ENCODER] = None
        elif part is not None:
            adapter[stored] = f"{PREFIX}{part['module']}.{part['kind']}{part['ending'] or ''}"
            if part["kind"] == "lora_magnitude_vector":  # PEFT writes it as a parameter
                adapter[stored] = f"{PREFIX}{part['module']}.{part['kind']}"
            adapters.setdefault(part["adapter"] or "")
        elif tokens is not None and tokens["kind"] == "original":
            copies.add(stored)
        elif tokens is not None:
            adapter[stored] = f"{PREFIX}{tokens['module']}.token_adapter.trainable_tokens_delta"
            adapters.setdefault(tokens["adapter"] or "")
        elif saved is not None:
            adapter[stored] = f"{PREFIX}{saved['module']}.{saved['ending']}"
            adapters.setdefault(saved["adapter"])
        else:
            base[stored] = _plain(name)

    wrapped = {stored: f"{PREFIX}{_WRAPPED.sub('', clean(stored))}" for stored in base if _ORIGINAL not in stored}
    embeddings = {}
    for stored, name in base.items():
        module, _, last = name.rpartition(".")
        if f"{BASE}." in stored and last == "weight" and module.rpartition(".")[2] in _VOCABULARY:
            embeddings[stored] = f"{PREFIX}{module}{BASE}.weight"
    own_names = tuple(filter(None, adapters))
    foreign = frozenset(foreign_modules)
    return AdapterInside(base, wrapped, embeddings, adapter, frozenset(copies), own_names, tuple(others), foreign)


def find_bare_modules(names: Collection[str]) -> list[str]:
    """The modules of which a state has the base's weight under a wrapper's name, and no part of an adapter: what was
    trained was saved elsewhere, or is lost."""
    parts = split_names(names)
    if parts.others:
        return []
    trained = {_plain(name.removeprefix(PREFIX)) for name in parts.adapter.values()}
    adapted = {_plain(re.split(r"\.lora_|\.token_adapter\.", name)[0]) for name in trained}

    bare: dict[str, None] = {}
    for stored, plain in parts.base.items():
        name = _WRAPPED.sub("", clean(stored))
        module = _plain(name.partition(f"{BASE}.")[0].removesuffix(".token_adapter"))
        if f"{BASE}." in name and module not in adapted:
            bare.setdefault(module)
        elif _ORIGINAL in name and plain not in trained:
            bare.setdefault(name.partition(_ORIGINAL)[0])
    return list(bare)


def _plain(name: str) -> str:
    """A name without the steps that wrappers of PEFT put into it."""
    name = name.replace(".token_adapter.base_layer.", ".").replace(_ORIGINAL, ".")
    while f"{BASE}." in name:
        name = name.replace(f"{BASE}.", ".")
    return name.removesuffix(BASE)


def _is_whole(base: Mapping[str, str], modules: Collection[str], *, named: bool) -> bool:
    """Are the weights of a whole model there, and not what PEFT saves with an adapter?

    named: the adapter's parts bear its own name (`lora_A.default`), which PEFT takes off in its files."""
    if not modules:
        return False
    if any(_is_frozen(stored, name, modules) for stored, name in base.items()):
        return True
    weights = sum(name.endswith(".weight") for name in base.values())
    return named and weights >= _WEIGHTS_OF_A_MODEL


def _is_frozen(stored: str, name: str, modules: Collection[str]) -> bool:
    """Is it the base's own weight of a module that has an adapter? Of embeddings and heads PEFT saves it too, and of
    all modules the biases, where they are trained."""
    module, _, last = name.rpartition(".")
    in_wrapper = f"{BASE}." in stored or module in modules
    if not in_wrapper or last == "bias":
        return False
    return module.rpartition(".")[2] not in _VOCABULARY
