"""Translates a model's config between Hugging Face's config.json and Megatron's arguments.

    megatron_args({"model_type": "qwen3", "num_hidden_layers": 36, "num_key_value_heads": 8, ...})
      -> {"num_layers": 36, "group_query_attention": True, "num_query_groups": 8, "qk_layernorm": True, ...}
    from_megatron({"num_layers": 36, "qk_layernorm": True, ...})
      -> {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, ...}

The one idea: the class of a model is never guessed from arguments. For each class, the arguments are translated into a
config and back; the class is the one whose arguments come out equal, in everything that affects what the model
computes. If there is none, only the sizes are reported, and `notes` list the differences from the nearest class.
Settings without a counterpart on the other side are in `notes` too.

The resulting config is written so that transformers 4 and 5 both read it (`rope_theta`, `rope_scaling`,
`torch_dtype`). Cost: some 50 us a class. What it does not do: files (`sources.config`), Paddle's words
(`systems.paddle.config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.attention_window import window_pattern
from ckpt_tool.families.base import Family
from ckpt_tool.families.config import ernie_vision
from ckpt_tool.families.config.experts import sparse_pattern
from ckpt_tool.families.config.forms import FORMS, rope_of
from ckpt_tool.families.config.megatron_arguments import (
    ARGUMENTS,
    BRIDGE_ARGUMENTS,
    DELTA_ARGUMENTS,
    EXPERT_ARGUMENTS,
    LATENT_ARGUMENTS,
    MAMBA_ARGUMENTS,
    OLD_NAMES,
    ROPE_ARGUMENTS,
)
from ckpt_tool.families.config.mixers import FALCON_H1_ARGUMENTS, hybrid_pattern
from ckpt_tool.families.config.words import (
    Arguments,
    ConfigWords,
    Values,
    fits,
    kinds_of,
    linear_pattern,
    no_rope_pattern,
    sound,
)
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.families.models import CLASSES, FAMILIES, NAMES, family_of_class, known_family, language_classes, load

TIED = "tie_word_embeddings"
_NONE = ("q_lora_rank", "sliding_window", "attention_chunk_size")  # keys that say something by having no value
_SIZES = ModelClass("", "", ("sizes", "heads", "rope", "tied"))  # what can be determined of any decoder


class Translated(NamedTuple):
    """A config in other words, and what the other words can't say."""

    config: Values
    notes: tuple[str, ...]


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The class (`model_type`) that a config names, None where it is none of ours."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CLASSES:
        return kind
    classes = config.get("architectures")
    names = [str(model_class).removesuffix("Pipe") for model_class in classes] if isinstance(classes, list) else []
    for name in names if kind is None else ():
        family = family_of_class(name)
        for model_class in family.classes if family else ():
            if model_class.forms and model_class.architecture == name:
                return model_class.model_type
    return None


def language_model(config: Mapping[str, Any]) -> tuple[ModelClass | None, Mapping[str, Any]]:
    """(class, config) of the language model in a multimodal model's config, if that class is known; else (None, config).

    In a flat config, keys that belong to no other part describe the language model.
    """
    if ernie_vision.is_flat(config):
        if not ernie_vision.is_sound(config):
            return None, config
        config = ernie_vision.nest_config(config)
    family = known_family(config.get("model_type"))
    parts = language_classes(family) if family else ()
    part = family.part(config) if family else config.get("text_config")
    first_part = parts[0] if parts else None
    if not isinstance(part, Mapping):
        return first_part, config
    kind = part.get("model_type")
    facts = next((part_class for part_class in parts if part_class.model_type == kind), None) or CLASSES.get(
        str(kind), first_part
    )
    tied = {key: value for key, value in config.items() if key == TIED}
    return facts, {**part, **tied} if facts else config


def megatron_args(config: Mapping[str, Any], kind: str | None = None) -> Translated:
    """Megatron-LM's arguments for a model: those that affect what it computes, and settings of a job whose defaults
    would change the result (dropout).

    For a config of an unknown class the result is {} with a note that gives the reason. Arguments of a multimodal model
    are derived from the part of its language model, if that has a known class.

    Args:
        kind: the class, if the config does not state it.
    """
    kind = kind or kind_of(config)
    facts, config = (CLASSES[kind], config) if kind is not None else language_model(config)
    if facts is None:
        return Translated(
            {},
            (
                f"no Megatron arguments are written: a config of model_type {config.get('model_type')!r} has no "
                "translation to them",
            ),
        )
    return _arguments(config, facts)


def _arguments(config: Mapping[str, Any], facts: ModelClass) -> Translated:
    model = ConfigWords(sound(config, facts), facts)
    arguments = dict(facts.megatron)
    for form in facts.forms:
        FORMS[form].to(model, arguments)
    for key, value in facts.unsayable.items():
        if model.get(key) not in (None, value):
            model.lost(f"{key} {model.get(key)}: Megatron always has {value}")
    if (
        arguments.get("moe_router_enable_expert_bias")
        and arguments.get("moe_router_score_function", "softmax") == "softmax"
    ):
        model.lost(
            "the experts' bias with a softmax: Megatron has it for sigmoid alone, and refuses to build this model"
        )
    arguments.setdefault("hidden_dropout", 0.0)
    if arguments.get("max_position_embeddings") is not None:
        arguments["seq_length"] = arguments["max_position_embeddings"]
    arguments["add_position_embedding"] = True
    for new_name, old_name in OLD_NAMES.items():
        if new_name in arguments:
            arguments[old_name] = arguments[new_name]
    return Translated(arguments, tuple(model.notes))


def set_mtp_layers(args: Mapping[str, Any], layers: int) -> Values:
    """The arguments with so many layers of multi-token prediction; without any a hybrid model's pattern has none."""
    changed = {**args, "mtp_num_layers": layers or None}
    pattern = args.get("hybrid_layer_pattern")
    if not layers and isinstance(pattern, str):
        changed |= {"hybrid_layer_pattern": pattern.partition("/")[0], "mtp_use_repeated_layer": False}
    return changed


def from_megatron(args: Mapping[str, Any], family: str | None = None) -> Translated:
    """The config.json of the model that the arguments build.

    family: of `families.registry`, where the user says so: then its class is taken that fits best, with what does not
    fit in the notes. Without it, a config without `model_type` where no class fits.
    """
    args = sound(args, _SIZES)
    families = FAMILIES
    if family is not None:
        families = [load(family)] if family in NAMES else []
    known = [(each, facts) for each in families for facts in (*_plain(each), *language_classes(each))]
    best: tuple[tuple[int, int], Family, ModelClass, list[str], Translated] | None = None
    parts: list[str] = []  # of models that see or hear, all that fit: nothing in the arguments says with what

    # of those that fit alike the simplest, of those with experts the one whose own values most of the arguments are
    for home, facts in sorted(known, key=lambda row: (len(row[1].forms), row[1].part)):
        translated = _translated_back(args, facts)
        config = {"architectures": [facts.architecture], "model_type": facts.model_type, **translated.config}
        wrong = list(differing(args, _arguments(config, facts).config))
        parts += [home.name] if facts.part and not wrong and home.name not in parts else []
        rank = len(wrong), _strange(config, facts) if args.get("num_experts") else 0
        if best is None or rank < best[0]:
            best = rank, home, facts, wrong, Translated(config, translated.notes)

    if best is None or (best[3] and family is None):
        near = f"; the nearest, {best[2].model_type}, has {_some(best[3])}" if best else ""
        return Translated(
            _translated_back(args, _SIZES).config, (f"Megatron's arguments are those of no class that we know{near}",)
        )

    _, home, facts, wrong, translated = best
    if facts.part and len(parts) > 1 and family is None:
        note = (
            f"Megatron's arguments are those of several models that see or hear: {', '.join(parts)}; say which with "
            "--family NAME"
        )
        return Translated(_translated_back(args, _SIZES).config, (note,))

    if facts.part:
        translated = _as_a_part(home, translated)
    lines = (f"{facts.model_type}: Megatron's arguments say {line}" for line in wrong)
    return Translated(translated.config, (*translated.notes, *lines))


def _strange(config: Mapping[str, Any], facts: ModelClass) -> int:
    """How many of the values that the class takes by itself are others in the config."""
    model = ConfigWords(config, replace(facts, defaults={}))
    rope = rope_of(config, {})
    rope_values = {"rope_theta": rope["theta"], "partial_rotary_factor": rope["part"]}
    return sum(rope_values.get(key, model.get(key)) != value for key, value in facts.defaults.items())


def _plain(family: Family) -> list[ModelClass]:
    """Its classes that are no part of another model."""
    return [model_class for model_class in family.classes if model_class.forms and not model_class.part]


def _as_a_part(family: Family, translated: Translated) -> Translated:
    """The config of the whole model, of which Megatron's arguments have the language model's part."""
    whole_class = family.classes[0]
    part: Values = {key: value for key, value in translated.config.items() if key not in ("architectures", TIED)}
    for key in reversed(family.language.split(".")):
        part = {key: part}
    note = f"Megatron's arguments do not describe the image or audio part of a {whole_class.model_type}: that part is not in the config"
    tied = {TIED: translated.config[TIED]} if TIED in translated.config else {}
    config = {"architectures": [whole_class.architecture], "model_type": whole_class.model_type, **tied, **part}
    return Translated(config, (*translated.notes, note))


def _translated_back(args: Mapping[str, Any], facts: ModelClass) -> Translated:
    arguments = Arguments(args, facts)
    out = Values()
    for form in facts.forms:
        FORMS[form].back(arguments, out)
    return Translated(
        {key: value for key, value in out.items() if value is not None or key in _NONE},
        tuple(arguments.notes),
    )


def differing(args: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[str]:
    """`name is this, not that` for each argument that decides what a model computes and is another in `others`."""
    left = _decisive(args)
    right = _decisive(others)
    for name in dict.fromkeys((*left, *right)):
        if left.get(name) != right.get(name):
            yield f"{name} {left.get(name)!r}, not {right.get(name)!r}"


def _decisive(args: Mapping[str, Any]) -> Values:
    """The arguments that decide what the model computes, in one spelling each."""
    facts = Arguments(sound(args, _SIZES), _SIZES)
    latent = bool(facts.get("multi_latent_attention"))
    experts = bool(facts.get("num_experts"))
    names = [
        *ARGUMENTS,
        *BRIDGE_ARGUMENTS,
        *(LATENT_ARGUMENTS if latent else ()),
        *(EXPERT_ARGUMENTS if experts else ()),
    ]
    if facts.get("position_embedding_type") in ("rope", "yarn", "mrope"):
        names += list(ROPE_ARGUMENTS)
    if facts.get("falconh1_ratio"):
        names += FALCON_H1_ARGUMENTS
    if facts.get("experimental_attention_variant") == "gated_delta_net":
        names += list(DELTA_ARGUMENTS)

    hybrid, ahead = hybrid_pattern(facts)
    names += list(MAMBA_ARGUMENTS) if hybrid else []
    names += ["v_head_dim"] if facts.get("swa_num_query_groups") else []
    out: Values = {name: facts.get(name) for name in names}
    layers = out["num_layers"] if type(out["num_layers"]) is int else 0
    heads = out["num_attention_heads"]
    grouped = out["group_query_attention"] and not latent
    out["num_query_groups"] = facts.args.get("num_query_groups") if grouped else heads
    out["group_query_attention"] = out["num_query_groups"] != heads
    out["normalization"] = str(out["normalization"]).lower()
    if out["dsa_indexer_topk"] is None:  # core 0.19 states 1 and 0 for models without an indexer
        out |= dict.fromkeys(("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"))

    if latent:
        del out["kv_channels"]
        out["rope_type"] = "rope" if out["rope_type"] == "rope" or out["rotary_scaling_factor"] == 1.0 else "yarn"
        if out["rope_type"] == "rope":
            for name in (
                "rotary_scaling_factor",
                "mscale",
                "mscale_all_dim",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
            ):
                del out[name]
    elif out["kv_channels"] is None and heads and type(out["hidden_size"]) is int:
        out["kv_channels"] = out["hidden_size"] // heads

    if experts:
        out["moe_layer_freq"] = sparse_pattern(out["moe_layer_freq"], layers)
        if out["moe_ffn_hidden_size"] is None:
            out["moe_ffn_hidden_size"] = out["ffn_hidden_size"]
        if all(out["moe_layer_freq"]):  # no layer is dense
            del out["ffn_hidden_size"]
        if out["moe_router_score_function"] == "sigmoid":
            del out["moe_router_pre_softmax"]
        if out["moe_router_num_groups"] == 1:  # as without
            out |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
        if out["moe_router_topk_scaling_factor"] == 1.0:
            out["moe_router_topk_scaling_factor"] = None

    if isinstance(out["window_size"], list | tuple) and out["window_size"]:
        out["window_size"] = list(out["window_size"])
        out["window_attn_skip_freq"] = window_pattern(out["window_attn_skip_freq"], layers)
    else:
        out["window_attn_skip_freq"] = None

    out["no_rope_freq"] = no_rope_pattern(out["no_rope_freq"], layers)
    if "linear_attention_freq" in out:
        out["linear_attention_freq"] = linear_pattern(out["linear_attention_freq"], layers)
    if hybrid:  # which counts its layers itself
        out |= {"hybrid_layer_pattern": "/".join((hybrid, *ahead)), "num_layers": len(hybrid), "is_hybrid_model": True}
    if not out.get("use_rope_scaling"):
        out.pop("rope_scaling_factor", None)
    return out


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:4]) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")


def contradictions(config: Mapping[str, Any]) -> Iterator[str]:
    """What no model of such a config can be: heads that do not divide, more experts a token than there are, ..."""
    kind = kind_of(config)
    model = ConfigWords(config, CLASSES[kind] if kind else _SIZES)
    types = kinds_of(model.facts)
    counted = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
        "num_key_value_heads",
    )
    for key in counted:
        config_key = model.key(key)
        value = config.get(config_key)
        several = value if key == "intermediate_size" and isinstance(value, list) and value else [value]  # Gemma 3n
        sound_count = all(type(each) is int and each >= (key != "num_hidden_layers") for each in several)
        if config_key in config and value is not None and not sound_count:
            yield f"{config_key} is {value!r}"

    for key, value in config.items():
        of_each = isinstance(value, list) and all(type(each) is int for each in value)  # text and vision, in ERNIE's
        if key not in counted and not of_each and not fits(key, value, types):
            yield f"{key} is {value!r}"

    heads, groups, hidden = (model.count(key) for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    latent = model.get("kv_lora_rank")  # every head makes its keys of it, whatever the config says
    if heads and groups and heads % groups and not latent:
        yield f"{heads} attention heads do not divide over {groups} key-value heads"
    if heads and hidden and hidden % heads and not model.get("head_dim") and not latent:
        yield f"a hidden size of {hidden} does not divide over {heads} attention heads, and there is no head_dim"

    experts = model.count("num_experts")
    top = model.count("num_experts_per_tok")
    if experts and top and top > experts and model.key("num_experts") in config:
        yield f"{top} experts a token of {experts} experts"

    parts = model.count("n_group")
    best = model.count("topk_group")
    if "n_group" in config and experts and parts and experts % parts:
        yield f"{experts} experts do not divide over n_group {parts}"
    if "topk_group" in config and parts and best and best > parts:
        yield f"topk_group {best} of n_group {parts}"

    layers = model.count("num_hidden_layers")
    kinds = config.get("layer_types")
    if layers is not None and isinstance(kinds, list) and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for {layers} layers"
