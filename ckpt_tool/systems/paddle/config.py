"""Paddle's configs: a config.json of PaddleFormers or PaddleNLP under the hub's keys, and the other way round.

    hub  {"model_type": "llama", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "dtype":
      "bfloat16"}
    paddle  {"model_type": "llama", "rope_theta": 500000.0, "tie_word_embeddings": false, ..., "torch_dtype":
      "bfloat16"}

The one idea: the keys are the same, but the defaults differ. Paddle ties embeddings unless the config says otherwise,
has 10000 for ERNIE's rope where transformers has 500000, and ignores `rope_parameters`. So every value is written into
a Paddle config explicitly, and Paddle's defaults are written into a config for the hub.

Sources: PaddleFormers 1.2.0 `transformers/configuration_utils.py`, `transformers/*/configuration.py`,
`modeling_rope_utils.py` (`standardize_rope_params`); PaddleNLP 3.0.0b4 the same files. Cost: none. What it does not do:
degrees of the job (`sources.config.without_degrees`), tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.families.config import VERSIONS, ernie_vision
from ckpt_tool.families.config.forms import rope_of
from ckpt_tool.families.config.translation import Translated, kind_of
from ckpt_tool.families.config.words import OTHER_WORDS, ConfigWords, Values, sound
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.families.models import CLASSES, family_of_class

# Prefixes of keys that describe a training job, not the model
_JOB = ("fuse_", "recompute", "use_fused_", "use_flash_attention", "sequence_parallel", "pp_seg_method", "virtual_pp")


def paddle_config(config: Mapping[str, Any]) -> Translated:
    """The hub config as Paddle reads it, with every default written explicitly."""
    if ernie_vision.is_nested(config):
        return Translated(*ernie_vision.flatten_config(config))

    kind = kind_of(config)
    facts: ModelClass
    notes: tuple[str, ...]

    if kind is None:
        facts = ModelClass("", "")
        notes = (f"{config.get('model_type')!r} is none of our classes: what Paddle takes for unsaid keys may differ",)
    else:
        facts = CLASSES[kind]
        notes = ()

    config = sound(config, facts)
    model = ConfigWords(config, facts)
    out: Values = {}

    for key in facts.defaults:
        own = facts.keys.get(key, key)
        if (value := model.get(key)) is not None:
            out[own] = value

    twins = {name for own in out for name in OTHER_WORDS.get(own, ()) if name not in out}
    out |= {key: value for key, value in config.items() if key not in twins}
    rope = rope_of(config, facts.defaults)
    if rope["theta"] is not None:
        out["rope_theta"] = rope["theta"]
        scaling = {key: value for key, value in rope.items() if key not in ("theta", "part", "type")}
        rope_scaling = {"rope_type": rope["type"], "type": rope["type"], **scaling}
        if "latent" in facts.forms:  # Paddle's latent attention reads the factor whatever the type is
            rope_scaling.setdefault("factor", 1.0)
        out["rope_scaling"] = rope_scaling if rope["type"] != "default" or "factor" in rope_scaling else None
        notes += _windowed_rope(config, out)
        out.pop("rope_parameters", None)
        if rope["part"] != 1.0 or "partial_rotary_factor" in facts.defaults:
            out["partial_rotary_factor"] = rope["part"]

    if "dtype" in out:
        out["torch_dtype"] = out.pop("dtype")
    if kind is not None:
        out |= facts.paddle
        out["num_key_value_heads"] = model.get("num_key_value_heads") or model.get("num_attention_heads")

    if "ahead" in facts.forms:
        out["num_nextn_predict_layers"] = model.get("num_nextn_predict_layers") or 0
    return Translated(out, notes)


def _as_transformers_has_it(name: str) -> str:
    """The name in transformers of one of Paddle's model classes; the same name if it is not known."""
    family = family_of_class(name) if name.endswith("ForCausalLM") else None
    found = (each for each in family.classes if each.forms and name in each.also) if family else ()
    return next((each.architecture for each in found), name)


def _windowed_rope(config: Mapping[str, Any], out: Values) -> tuple[str, ...]:
    """Write the rope base of layers with a sliding window (Gemma 3) under its older key; returns a note on it."""
    rope = config.get("rope_parameters")
    local = rope.get("sliding_attention") if isinstance(rope, Mapping) else None
    base = local.get("rope_theta") if isinstance(local, Mapping) else config.get("rope_local_base_freq")
    if base is None:
        return ()
    out["rope_local_base_freq"] = base
    return (f"rope_local_base_freq {base}: PaddleFormers 1.2.0 has one rope for all layers",)


def from_paddle(config: Mapping[str, Any]) -> Translated:
    """Paddle's config as transformers reads it, with Paddle's defaults written explicitly."""
    if ernie_vision.is_flat(config):
        return Translated(ernie_vision.nest_config(config), ())

    out = dict(config)
    classes = out.get("architectures")
    if isinstance(classes, list):
        # Paddle has variants of a class for pipelines and for PaddleFleet: the same model.
        plain = [str(each).removesuffix("Fleet").removesuffix("Pipe") for each in classes]
        out["architectures"] = [_as_transformers_has_it(each) for each in plain]

    kind = kind_of(out)
    if kind is None:
        return Translated(out, ())

    out["model_type"] = kind
    out.setdefault("architectures", [CLASSES[kind].architecture])
    for key, value in CLASSES[kind].paddle_defaults.items():
        if key == "rope_theta" and isinstance(out.get("rope_parameters"), Mapping):
            continue
        out.setdefault(key, value)

    scaling = out.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "default":
        del out["rope_scaling"]

    if "rope_scaling" in CLASSES[kind].defaults and not out.get("rope_scaling") and "rope_parameters" not in out:
        out["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": out.get("rope_theta"),
        }  # or the class takes its own

    for key in VERSIONS:
        out.pop(key, None)
    for key in [key for key in out if key.startswith(_JOB)]:
        del out[key]
    if "dpo_config" in out and out["dpo_config"] is None:
        del out["dpo_config"]
    return Translated(out, ())
