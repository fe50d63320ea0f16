"""Quantisation: what a model's config says of it, and what the tensors' names say where no config is.

    quantisation({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, names)
      -> Quantisation("fp8", block=(128, 128), ...)

`known` schemes are those whose floats `dequantize` makes. Everything else is moved as it is, and named when somebody
asks for floats: HQQ, AQLM and others keep codes in orders that need their own kernels' tables.

Source of the keys: transformers 5.23 `utils/quantization_config.py`, compressed-tensors 0.20
`quantization/quant_config.py`, GPTQModel 7.7.0 `quantization/config.py` (`_resolve_dynamic_override`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tool.core.module_patterns import NotUnderstood, first_at_the_front
from ckpt_tool.quantised.weights import AFFINE, MODES

# where configs keep it; the second is compressed-tensors' old name, the third MLX's
KEYS = ("quantization_config", "compression_config", "quantization")
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # what some tools write beside a config
INEXACT = "E1471"  # of weights that `--repack` can't give another layout
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FORMATS = (
    *_PACKED,
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_METHODS = ("fp8", "mxfp8", "mxfp4", "fbgemm_fp8", "modelopt", "modelopt_fp4", "bitsandbytes")
# torchao's configs whose tensors say by names, dtypes and shapes what they are; others' codes only their kernels read
_TORCHAO = frozenset(
    """
    Float8WeightOnlyConfig Float8DynamicActivationFloat8WeightConfig Float8StaticActivationFloat8WeightConfig
    Int8WeightOnlyConfig Int8DynamicActivationInt8WeightConfig Int8StaticActivationInt8WeightConfig
    IntxWeightOnlyConfig Int8DynamicActivationIntxWeightConfig Int8DynamicActivationInt4WeightConfig
    MXDynamicActivationMXWeightConfig NVFP4DynamicActivationNVFP4WeightConfig NVFP4WeightOnlyConfig
    """.split()
)
_OF_MODULES = ("fqn_to_config", "module_fqn_to_config")
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
# endings of names that only one scheme has
_BY_NAME = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".quant_map": "bitsandbytes",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".biases": "MLX without its config",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".weight_format": "bitsandbytes",
    "._data": "quanto",
    ".weight_g_idx": "compressed-tensors with g_idx",
    ".W_q": "HQQ",
    ".codebooks": "AQLM",
    ".sparse_24_bitmask": "marlin-24",
    ".bitmask": "sparse-bitmask",
}


class Rule(NamedTuple):
    """What GPTQModel's `dynamic` says of the modules whose names begin with `pattern`. bits, symmetric: None where they
    have those of all others."""

    pattern: str
    bits: int | None
    symmetric: bool | None


class Quantisation(NamedTuple):
    """scheme: in words. block: (rows, cols) that share a scale, () where it is not stated. bits: of packed codes, each
    number that the config names. known: can floats be made of it? why: why not, "" where they can. order: of codes that
    are packed along their inputs or outputs, `weights.ORDERS`, or in a stream, `weights.MODES`. apart: of modules that
    say it for themselves (columns that share a scale, bits, mode). rules: of GPTQModel's `dynamic`, in its order.
    symmetric: does the config say so of all modules but these?"""

    scheme: str
    block: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    why: str = ""
    order: str = ""
    apart: Mapping[str, tuple[int, int, str]] = MappingProxyType({})
    rules: tuple[Rule, ...] = ()
    symmetric: bool = False

    @property
    def known(self) -> bool:
        return not self.why

    @property
    def found_by(self) -> dict[str, Any]:
        """What `weights.find` wants to know of it."""
        own = self.bits_of if self.rules else None
        return {"block": self.block, "bits": self.bits, "order": self.order, "apart": self.apart, "own": own}

    def bits_of(self, module: str) -> int:
        """Of a module's codes."""
        rule = self._rule(module)
        return self.bits[0] if rule is None or rule.bits is None else rule.bits

    def symmetric_in(self, module: str) -> bool:
        """Are a module's zero points the middle?"""
        rule = self._rule(module)
        return self.symmetric if rule is None or rule.symmetric is None else rule.symmetric

    def _rule(self, module: str) -> Rule | None:
        """The first that fits. Where it is not the writer's (a pattern without special characters is a whole name to
        GPTQModel 7.7, a beginning to older ones and vLLM; one may take too long), shapes and zero points tell."""
        try:
            number = first_at_the_front([rule.pattern for rule in self.rules], module)
        except NotUnderstood:
            return None
        return None if number is None else self.rules[number]


def quantisation(config: Mapping[str, Any] | None, names: Iterable[str] = ()) -> Quantisation | None:
    """What the config says, else what the names tell; None where neither says anything. Never raises: what is no
    quantisation config at all is an unknown one."""
    stated = section(config or {})
    if stated is None:
        return _by_name(names)
    method = str(stated.get("quant_method") or stated.get("quant_algo") or "").lower()
    if method == "compressed-tensors" or not method and "config_groups" in stated:
        return _compressed(stated)
    block = stated.get("weight_block_size") or ()
    sizes = tuple(int(n) for n in block if isinstance(n, int)) if isinstance(block, list | tuple) else ()
    if method in _METHODS:
        return Quantisation(method, sizes if len(sizes) == 2 and min(sizes) > 0 else ())
    if method == "torchao":
        return _of_torchao(stated)
    if method in ("gptq", "awq"):
        return _of_matrices(method, stated)
    if not method and {"group_size", "bits"} <= stated.keys():
        return _of_mlx(stated)
    return Quantisation(method or "without a name", why=f"quant_method {method or 'is not stated'}")


def _of_matrices(method: str, stated: Mapping[str, Any]) -> Quantisation:
    """GPTQ, whose zero points are one too low unless it says `gptq_v2`, and AWQ's `gemm`."""
    bits, layout = stated.get("bits", 4), str(stated.get("checkpoint_format") or stated.get("version") or "").lower()
    orders = {"gptq": {"": "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}, "awq": {"": "awq", "gemm": "awq"}}
    order = orders[method].get(layout, "")
    why = "" if order else f"its layout {layout}"
    rules = _dynamic(stated.get("dynamic")) if method == "gptq" else ()
    if isinstance(rules, str):
        why, rules = rules, ()
    every = (bits, *(rule.bits for rule in rules if rule.bits is not None))
    strange = [each for each in every if type(each) is not int or each not in _BITS[method]]  # 4.0 is no number of bits
    if strange:
        why = f"codes of {strange[0]!r} bits"
    if why:
        return Quantisation(method, why=why)
    return Quantisation(method, bits=(bits,), order=order, rules=rules, symmetric=bool(stated.get("sym")))


def _dynamic(stated: Any) -> tuple[Rule, ...] | str:
    """The rules of GPTQModel's `dynamic`: {pattern: what replaces the config's values}, the first that fits counts;
    `-:` before a pattern leaves modules as they are, `+:` says nothing. In words why they are not read."""
    found = []
    for key, values in stated.items() if isinstance(stated, dict) else ():
        pattern = key.removeprefix("-:") if key.startswith("-:") else key.removeprefix("+:")
        own = values if isinstance(values, dict) and not key.startswith("-:") else {}
        if str(own.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
            return f"its dynamic packs {key[:80]!r} as {own['pack_dtype']}"
        try:
            first_at_the_front([pattern], "")
        except NotUnderstood as e:
            return f"its dynamic: the pattern {e}"
        symmetric = own.get("sym")
        found.append(Rule(pattern, own.get("bits"), symmetric if isinstance(symmetric, bool) else None))
    return tuple(found)


def _of_torchao(stated: Mapping[str, Any]) -> Quantisation:
    """torchao: one config for all modules, or one for each name or pattern."""
    kind = stated.get("quant_type")
    whole = kind.get("default") if isinstance(kind, dict) else None
    data = whole.get("_data") if isinstance(whole, dict) else None
    inside = data if isinstance(data, dict) else {}
    apart = next((inside[key] for key in _OF_MODULES if isinstance(inside.get(key), dict)), None)
    each = [*apart.values()] if apart else [whole]
    names = dict.fromkeys(
        str(one.get("_type")) if isinstance(one, dict) else _config_named(str(kind))
        for one in each
        if one is not None or not apart
    )
    strange = [name for name in names if name not in _TORCHAO]
    shown = ", ".join(name.removesuffix("Config") for name in names)
    return Quantisation(f"torchao ({shown})"[:200], why=f"its {strange[0]}"[:100] if strange else "")


def _config_named(words: str) -> str:
    """torchao's config of what configs called it before.

    >>> _config_named("int8_dynamic_activation_int8_weight")
    'Int8DynamicActivationInt8WeightConfig'
    """
    return "".join(word.capitalize() for word in words.split("_")) + "Config"


def _of_mlx(stated: Mapping[str, Any]) -> Quantisation:
    """MLX: what holds for all modules, and for those that are named apart."""
    named = {name: each for name, each in stated.items() if isinstance(each, dict)}
    whole = stated["group_size"], stated["bits"], stated.get("mode", AFFINE)
    apart = {  # a module's mode is not that of all others: mlx-lm hands on what stands there alone
        name: (each.get("group_size", whole[0]), each.get("bits", whole[1]), each.get("mode", AFFINE))
        for name, each in named.items()
    }
    for group, bits, mode in (whole, *apart.values()):
        if not isinstance(mode, str) or mode not in MODES:
            return Quantisation("mlx", why=f"its mode {mode}")
        only = MODES[mode]
        whole_numbers = type(group) is int and group > 0 and type(bits) is int and bits in (2, 3, 4, 5, 6, 8)
        if not whole_numbers or only not in (None, (group, bits)):
            return Quantisation("mlx", why=f"groups of {group!r} codes of {bits!r} bits, mode {mode}")
    if any(each.get("global_scale") for each in (stated, *named.values())):
        return Quantisation("mlx", why="its global_scale")
    return Quantisation("mlx", (1, whole[0]), (whole[1],), order=whole[2], apart=apart)


def section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a config that is about quantisation, at its top or in that of its text model."""
    for place in (config, *(config[name] for name in _NESTED if isinstance(config.get(name), dict))):
        for key in KEYS:
            if isinstance(place.get(key), dict) and place[key]:
                found: Mapping[str, Any] = place[key]
                return found
    return None


def without(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The config without `keys`, at its top and in those of its parts that are models.

    >>> without({"a": 1, "text_config": {"quantization_config": {}}}, KEYS)
    {'a': 1, 'text_config': {}}
    """
    gone = set(keys)
    kept = {key: value for key, value in config.items() if key not in gone}
    for name in _NESTED:
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key not in gone}
    return kept


def _compressed(stated: Mapping[str, Any]) -> Quantisation:
    """compressed-tensors: the formats of all groups, and what no floats can be made of."""
    groups = stated.get("config_groups")
    rows = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    formats = list(
        dict.fromkeys(str(each) for each in (stated.get("format"), *(row.get("format") for row in rows)) if each)
    )
    named = f"compressed-tensors ({', '.join(formats)})" if formats else "compressed-tensors"
    weights = [row["weights"] for row in rows if isinstance(row.get("weights"), dict)]
    bits = tuple(
        dict.fromkeys(
            each["num_bits"]
            for each in weights
            if type(each.get("num_bits")) is int and 1 <= each["num_bits"] <= 8 and each.get("type", "int") == "int"
        )
    )
    blocks = [tuple(each["block_structure"]) for each in weights if isinstance(each.get("block_structure"), list)]
    block = blocks[0] if blocks and all(type(n) is int and n > 0 for n in blocks[0]) and len(blocks[0]) == 2 else ()
    strange = [each for each in formats if each not in _FORMATS]
    why = f"its format {strange[0]}" if strange else ""
    sparse = stated.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format") not in (None, "dense"):
        why = f"its sparsity_config {sparse.get('format')}"
    if stated.get("transform_config"):
        why = "its transform_config: the weights are rotated, and floats of them alone are another model"
    return Quantisation(named, block, bits, why)


def _by_name(names: Iterable[str]) -> Quantisation | None:
    for name in names:
        dot = name.rfind(".")
        found = _BY_NAME.get(name[dot:]) or _BY_NAME.get(name[name.rfind(".", 0, dot) :])
        if found:
            return Quantisation(found, why="" if found in _METHODS else f"tensors such as {name}")
    return None
