"""Names and arguments of a GPTModel as those of a HybridModel, and back.

A layer of a GPTModel is an attention and an MLP; in a HybridModel each of the two is a layer of its own, named by a
letter of `hybrid_layer_pattern`.

    GPT, 2 layers                                   HybridModel, "*-*-"
    decoder.layers.1.input_layernorm.weight         decoder.layers.2.input_layernorm.weight
    decoder.layers.1.self_attention...              decoder.layers.2.self_attention...
    decoder.layers.1.pre_mlp_layernorm.weight       decoder.layers.3.pre_mlp_layernorm.weight
    decoder.layers.1.mlp...                         decoder.layers.3.mlp...
    decoder.final_layernorm.weight                  decoder.final_norm.weight

The attention of GPT's layer i becomes the layer of the i-th `*`, its MLP that of the i-th `-` (dense) or `E` (experts):
only names change, and optimizer states follow their parameters. A GPTModel has no mixer (`M`), and new mixers would
have to be initialised at random, so no pattern with one is written.

Source: NVIDIA/Megatron-LM d98e8a64, `tools/checkpoint/gpt_hybrid_conversion.py` (which tensors, which models are
refused), `core/models/hybrid/hybrid_layer_allocation.py` (letters). Cost: a look at each name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt_tool.systems.megatron.stored_names import ROOT

PATTERN = "hybrid_layer_pattern"
# Letters of the pattern: the kind of a HybridModel's layer.
ATTENTION = "*"
MIXER = "M"
DENSE = "-"
EXPERTS = "E"
_OLD_PATTERN = "hybrid_override_pattern"  # core 0.16 and before
_LAYER = re.compile(rf"({ROOT}decoder\.layers\.)(\d{{1,9}})\.(.+)", re.DOTALL)
# The last norm of each model; its name alone distinguishes the two.
_GPT_NORM = "final_layernorm"
_HYBRID_NORM = "final_norm"
_LAST = re.compile(rf"({ROOT}decoder\.)({_GPT_NORM}|{_HYBRID_NORM})(\..+)", re.DOTALL)
_AHEAD = re.compile(rf"{ROOT}mtp\.")
_OF_ATTENTION = ("self_attention.", "input_layernorm.")
_OF_MLP = ("mlp.", "pre_mlp_layernorm.")
# Attentions that have no letter in a HybridModel: latent attention, gated delta nets.
_OTHERS = re.compile(
    r"self_attention\.(?:linear_(?:q|kv)_(?:down|up)_proj|linear_q_proj|in_proj|conv1d|core_attention\.)"
)
_OF_EXPERTS = ("mlp.router.", "mlp.experts.")
_OF_DENSE = ("mlp.linear_fc1.", "mlp.linear_fc2.")


def _absent(value: Any) -> bool:
    return not value


# Megatron's own tool refuses these models: argument -> a test whether its value is acceptable.
_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    "moe_layer_freq": lambda n: (
        n in (None, 1, "", "1") or (isinstance(n, list | tuple) and all(each == 1 for each in n))
    ),
    "experimental_attention_variant": _absent,
    "linear_attention_freq": lambda n: n is None,
    "heterogeneous_layers_config_path": _absent,
    "heterogeneous_layers_config_encoded_json": _absent,
    "multi_latent_attention": _absent,
    "mtp_num_layers": _absent,
}


class Unfit(ValueError):
    """Raised for layers that have no counterpart. args: (message, hint)."""

    @property
    def hint(self) -> str:
        """What the user can do."""
        return str(self.args[1])


def letters_of(pattern: str) -> str:
    """Return the letters of the decoder's layers, without the `|` between stages.

    Raises Unfit for a pattern that no GPTModel has.

    >>> letters_of("*-|*-")
    '*-*-'
    """
    main, mtp, _ = pattern.partition("/")
    found = main.replace("|", "")
    odd = sorted({*found} - {ATTENTION, MIXER, DENSE, EXPERTS})
    what = ""
    if odd:
        what = f"has {', '.join(odd)}"
    elif mtp:
        what = "has layers of multi-token prediction"
    elif not found:
        what = "is empty"
    if what:
        raise Unfit(
            f"the pattern {pattern[:80]!r} {what}, GPTModel's layers are *, - and E", "give a letter a layer: *-*-"
        )
    if DENSE in found and EXPERTS in found:
        raise Unfit(
            f"the pattern {pattern[:80]!r} has dense layers (-) and experts (E), GPTModel's are all of a kind",
            "Megatron's own tool (gpt_hybrid_conversion.py) takes none either",
        )
    # The i-th attention and the i-th MLP become a layer, so there must be as many of each.
    pairs = found.count(ATTENTION), found.count(DENSE) + found.count(EXPERTS)
    if pairs[0] != pairs[1]:
        raise Unfit(
            f"the pattern {pattern[:80]!r} has {pairs[0]} layers of attention and {pairs[1]} of an MLP",
            "a layer of GPTModel is one of each: give as many",
        )
    return found


def pattern_of(args: Mapping[str, Any]) -> str:
    """Return the pattern in a job's arguments, "" if there is none."""
    found = args.get(PATTERN) or args.get(_OLD_PATTERN)
    return found if isinstance(found, str) else ""


def is_hybrid(names: Iterable[str]) -> bool:
    """Return whether the names are a HybridModel's, which the name of its last norm shows."""
    return any(found[2] == _HYBRID_NORM for found in map(_LAST.fullmatch, names) if found)


def refuse_args(args: Mapping[str, Any]) -> None:
    """Raise Unfit if the arguments state a feature that only one of the two models has."""
    odd = [name for name, fits in _PLAIN.items() if not fits(args.get(name))]
    if odd:
        said = ", ".join(f"{name} {str(args[name])[:40]}" for name in odd)
        raise Unfit(
            f"the model is not made of one kind of layer ({said})", "only attention and MLP of one kind go across"
        )


def across(names: Iterable[str], letters: str, *, back: bool) -> dict[str, str]:
    """Return {name: name in the other model} for all names that change.

    Args:
        names: of all tensors.
        letters: of the pattern, from `letters_of`.
        back: whether the names are a HybridModel's; False: a GPTModel's.

    Raises:
        Unfit: names the tensors that have no place in the other model, or a layer that has no tensor.
    """
    attention = [at for at, letter in enumerate(letters) if letter == ATTENTION]
    mlp = [at for at, letter in enumerate(letters) if letter in (DENSE, EXPERTS)]
    # Layer on this side -> layer on the other side; a GPTModel's layer i is the i-th attention and the i-th MLP.
    of_attention = dict(enumerate(attention))
    of_mlp = dict(enumerate(mlp))
    if back:
        of_attention = {layer: i for i, layer in of_attention.items()}
        of_mlp = {layer: i for i, layer in of_mlp.items()}

    last_norm = _GPT_NORM if back else _HYBRID_NORM
    out = dict[str, str]()
    odd = list[str]()
    held = set[int]()

    for name in names:
        found = _LAYER.fullmatch(name)
        if found is None:
            if last := _LAST.fullmatch(name):
                out[name] = f"{last[1]}{last_norm}{last[3]}"
            elif _AHEAD.match(name):
                odd.append(name)
            continue
        layer = int(found[2])
        inside = found[3]
        place: Mapping[int, int] = {}
        if inside.startswith(_OF_ATTENTION):
            place = of_attention
        elif inside.startswith(_OF_MLP):
            place = of_mlp
        if (
            layer not in place
            or _OTHERS.match(inside)
            or inside.startswith(_OF_DENSE if EXPERTS in letters else _OF_EXPERTS)
        ):
            odd.append(name)
        else:
            out[name] = f"{found[1]}{place[layer]}.{inside}"
        held.add(layer)

    if odd:
        raise _no_place(odd, letters, back=back)

    lost = sorted({*of_attention, *of_mlp} - held)
    if lost:
        what = f"the pattern has {len(letters)} layers, and there is no tensor of layer {lost[0]}"
        raise Unfit(what, "give the pattern of this very model")

    return out


def _no_place(odd: list[str], letters: str, *, back: bool) -> Unfit:
    numbers = [int(found[2]) for found in map(_LAYER.fullmatch, odd) if found]
    mixers = back and all(at < len(letters) and letters[at] == MIXER for at in numbers)
    where = "GPTModel" if back else f"layers {letters[:80]}"
    hint = "give the pattern of this very model; its layers are counted from 0"
    if mixers:
        hint = "--remove-keys 'decoder.layers.*.mixer.*' --remove-keys 'decoder.layers.*.norm.*' leaves the mixers out"
    return Unfit(f"{len(odd)} tensors have no place in {where}, such as {odd[0]}", hint)


def shown(names: Iterable[str]) -> str:
    """Return the pattern's letters as a HybridModel's names show them.

    "" for any other model, and if a layer is neither an attention alone nor an MLP alone.
    """
    names = list(names)
    kinds: dict[int, set[str]] = {}
    for found in filter(None, map(_LAYER.fullmatch, names)):
        inside = found[3]
        if inside.startswith(_OF_EXPERTS):
            letter = EXPERTS
        elif inside.startswith(_OF_ATTENTION):
            letter = ATTENTION
        else:
            letter = DENSE if inside.startswith(_OF_MLP) else MIXER
        kinds.setdefault(int(found[2]), set()).add(letter)
    # An MLP with shared experts has names of both kinds; it is a layer of experts.
    letters = {at: EXPERTS if kind == {DENSE, EXPERTS} else next(iter(kind)) for at, kind in kinds.items()}
    plain = all(len(kind) == 1 or kind == {DENSE, EXPERTS} for kind in kinds.values()) and MIXER not in letters.values()
    return "".join(letters[at] for at in sorted(letters)) if plain and is_hybrid(names) else ""


def advise_on_missing(names: Iterable[str]) -> str:
    """Return the option to try if the names lack tensors of a model; "" if there is nothing to advise."""
    way = "--hybrid-layer-pattern none takes this HybridModel of Megatron's for the GPTModel that it is"
    return way if shown(names) else ""


def changed(args: Mapping[str, Any], letters: str, *, back: bool) -> dict[str, Any]:
    """Return the arguments of the other model: a HybridModel with these letters, or (`back`) a GPTModel.

    {} if there are no arguments.
    """
    if not args:
        return {}
    out = {**args, "num_layers": letters.count(ATTENTION) if back else len(letters)}
    out |= {name: None for name in (PATTERN, _OLD_PATTERN) if name in args}
    if not back:
        out |= {PATTERN: letters, "is_hybrid_model": True}
    elif "is_hybrid_model" in args:
        out["is_hybrid_model"] = False
    # Megatron states the number of layers in this argument, too.
    for name in ("encoder_num_layers",):
        if args.get(name) is not None:
            out[name] = out["num_layers"]
    return out
