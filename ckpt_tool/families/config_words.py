"""Words: a config and Megatron's arguments as forms look at them, and the form that says the same in the same shape.

    Model(config, facts).get("num_experts")        config["num_local_experts"] of a Mixtral, else the class's default
    Arguments(args, facts).get("rotary_percent")   1.0 where the arguments are silent, as in Megatron
    same(("num_hidden_layers", "num_layers"))      a form of one pair

Source of the defaults: `families.config_facts`. Cost: none. What it does not do: forms of another shape (`families.config_forms`,
`families.config_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.families.config_facts import (
    ARGUMENTS,
    EXPERT_ARGUMENTS,
    LATENT_ARGUMENTS,
    OLD_NAMES,
    ROPE_ARGUMENTS,
    Facts,
)

Values = dict[str, Any]
LAYERS = 1 << 16  # a config that claims more layers is not spelled out
# What a key is called elsewhere too: transformers 5 saves by the names of its attribute maps
OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts"), "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_local_experts": ("num_experts",), "moe_num_experts": ("num_experts",), "moe_k": ("num_experts_per_tok",),
    "num_nextn_predict_layers": ("num_mtp_layers",), "hidden_act": ("hidden_activation",),
}  # fmt: skip
_DEFAULTS = {**ARGUMENTS, **ROPE_ARGUMENTS, **EXPERT_ARGUMENTS, **LATENT_ARGUMENTS}


@dataclass(slots=True)
class Model:
    """A config while it is told in arguments. get: by our word for a key, the class's default where it is silent."""

    config: Mapping[str, Any]
    facts: Facts
    notes: list[str] = field(default_factory=list)

    def key(self, key: str) -> str:
        return self.facts.keys.get(key, key)

    def get(self, key: str) -> Any:
        own = self.key(key)
        for name in (own, *OTHER_WORDS.get(own, ())):
            if name in self.config:
                return self.config[name]
        return self.facts.defaults.get(own, self.facts.defaults.get(key))

    def count(self, key: str) -> int | None:
        value = self.get(key)
        return value if type(value) is int and 0 <= value else None

    def lost(self, what: str) -> None:
        self.notes.append(what)


@dataclass(slots=True)
class Arguments:
    """Megatron's arguments while they are told in a config. get: Megatron's default where they are silent."""

    args: Mapping[str, Any]
    facts: Facts
    notes: list[str] = field(default_factory=list)

    def key(self, key: str) -> str:
        return self.facts.keys.get(key, key)

    def get(self, name: str) -> Any:
        for known in (name, OLD_NAMES.get(name, name)):
            if known in self.args and (self.args[known] is not None or known == name):
                return self.args[known]
        return _DEFAULTS.get(name)

    def lost(self, what: str) -> None:
        self.notes.append(what)


class Form(NamedTuple):
    to: Callable[[Model, Values], None]
    back: Callable[[Arguments, Values], None]


def same(*pairs: tuple[str, str]) -> Form:
    """Keys and arguments that say the same in the same shape: (key, argument)."""

    def to(model: Model, out: Values) -> None:
        for key, name in pairs:
            if (value := model.get(key)) is not None:
                out[name] = value

    def back(args: Arguments, out: Values) -> None:
        for key, name in pairs:
            if (value := args.get(name)) is not None:
                out[args.key(key)] = value

    return Form(to, back)


def window_pattern(freq: Any, layers: int) -> list[bool]:
    """Which layers look through the window, as `is_layer_window_attention` reads the argument."""
    if isinstance(freq, list):
        return [bool(each) for each in freq]
    layers = min(layers, LAYERS)
    return [freq is None or bool((i + 1) % freq) for i in range(layers)] if freq != 0 else [True] * layers
