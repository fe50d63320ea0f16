"""Quantisation as declared: what a model's config says of it, or the tensors' names if there is no config.

    quantisation({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, names)
      -> DeclaredScheme("fp8", block=(128, 128), ...)

`known` schemes are those that `dequantize` can turn into floats. Weights of others are moved as they are, and reported
if the user asks for floats: HQQ, AQLM and others keep codes in orders that need their own kernels' tables.

Source of the keys: transformers 5.23 `utils/quantization_config.py`, compressed-tensors 0.20
`quantization/quant_config.py`, GPTQModel 7.7.0 `quantization/config.py` (`_resolve_dynamic_override`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tool.core.module_patterns import NotUnderstood, first_at_the_front
from ckpt_tool.weight_schemes.quantised_weights import (
    AFFINE,
    CONFIG_KEYS,
    MODES,
    QUANTISER_FILES,
    FoundWeights,
    TensorKind,
    find,
)
from ckpt_tool.weight_schemes.weight_layouts import STATED, UNSTATED, Declared, WantedParts

INEXACT = "E1471"  # weights that `--repack` can't convert to another layout without a change
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
_METHODS = ("fp8", "mxfp8", "mxfp4", "fbgemm_fp8", "modelopt", "modelopt_fp4", "bitsandbytes", "bitnet", "quanto")
# torchao's configs whose weights names, dtypes and shapes describe; other configs' codes only their kernels can read.
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
# Schemes whose names alone don't say how codes are stored.
_GPTQ_OR_AWQ = "GPTQ or AWQ"
_MLX = "MLX without its config"
_QUANTO = "quanto"
_QUANTO_PACKED = "quanto of 2 or 4 bits"
# Endings of names that only one scheme has -> the scheme.
_BY_NAME = {
    ".qweight": _GPTQ_OR_AWQ,
    ".qzeros": _GPTQ_OR_AWQ,
    ".quant_map": "bitsandbytes",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".biases": _MLX,
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".weight_format": "bitsandbytes",
    "._data": _QUANTO,
    "._shift": _QUANTO_PACKED,
    ".weight_g_idx": "compressed-tensors with g_idx",
    ".W_q": "HQQ",
    ".codebooks": "AQLM",
    ".sparse_24_bitmask": "marlin-24",
    ".bitmask": "sparse-bitmask",
}


class ModuleRule(NamedTuple):
    """An entry of GPTQModel's `dynamic`: settings of modules whose names begin with `pattern`. None: as in general."""

    pattern: str
    bits: int | None
    symmetric: bool | None
    group: int | None = None


class DeclaredScheme(NamedTuple):
    """A model's quantisation as its config describes it, or as the names of its tensors suggest without a config."""

    scheme: str  # in words, for the user
    block: tuple[int, ...] = ()  # (rows, columns) that share a scale, () if not stated
    bits: tuple[int, ...] = ()  # of packed codes, each number that the config names
    why: str = ""  # why it can't be dequantised, "" if it can

    # Of matrices (GPTQ, AWQ) one of `quantised_weights.ORDERS`, of streams (MLX) one of `MODES`.
    order: str = ""

    # MLX: module with settings of its own -> (columns that share a scale, bits, mode).
    apart: Mapping[str, tuple[int, int, str]] = MappingProxyType({})

    rules: tuple[ModuleRule, ...] = ()  # GPTQModel's `dynamic`, in its order: the first that fits counts
    symmetric: bool = False  # is the zero point the middle in modules that no rule is about?
    declared: Declared = UNSTATED  # what the config says of the parts of weights
    trits: str = ""  # how BitNet's scale is applied, one of `quantised_weights.TRIT_SCALES`

    @property
    def known(self) -> bool:
        """Can `dequantize` make floats of it?"""
        return not self.why

    @property
    def wants_config(self) -> bool:
        """Are the weights unreadable because names are not enough and no config gives the rest?"""
        return self.scheme in (_GPTQ_OR_AWQ, _MLX)

    @property
    def found_by(self) -> dict[str, Any]:
        """The keyword arguments that `quantised_weights.find` needs for this scheme."""
        own = self.bits_of if self.rules else None
        check = self.declared.check if self.known else None
        return {
            "block": self.block,
            "bits": self.bits,
            "order": self.order,
            "apart": self.apart,
            "own": own,
            "check": check,
            "trits": self.trits,
        }

    def bits_of(self, module: str) -> int:
        """Bits of the codes of a module."""
        rule = self.rule_of(module)
        return self.bits[0] if rule is None or rule.bits is None else rule.bits

    def symmetric_in(self, module: str) -> bool:
        """Is the middle the zero point of all codes of a module?"""
        rule = self.rule_of(module)
        return self.symmetric if rule is None or rule.symmetric is None else rule.symmetric

    def rule_of(self, module: str) -> ModuleRule | None:
        """The first rule that fits a module, None if none does.

        It may not be the rule that the writer used: to GPTQModel 7.7 a pattern without special characters is a full
        name, to older versions and vLLM the beginning of one. Shapes and zero points reveal the difference later.
        """
        try:
            number = first_at_the_front([rule.pattern for rule in self.rules], module)
        except NotUnderstood:
            return None
        return None if number is None else self.rules[number]


def quantisation(config: Mapping[str, Any] | None, names: Iterable[str] = ()) -> DeclaredScheme | None:
    """The scheme that the config declares, else the one that the names suggest, None if there is neither.

    Never raises: a section that is not about quantisation at all gives an unknown scheme.
    """
    stated = section(config or {})
    if stated is None:
        return _recognise_names(names)
    method = str(stated.get("quant_method") or stated.get("quant_algo") or "").lower()
    if method == "compressed-tensors" or (not method and "config_groups" in stated):
        return _read_compressed(stated)
    blocks = stated.get("weight_block_size") or ()
    sizes = tuple(int(n) for n in blocks if isinstance(n, int)) if isinstance(blocks, list | tuple) else ()
    if method == "bitnet":
        return _read_bitnet(stated)
    if method == "quanto" and stated.get("weights") not in (None, "int8", "float8"):
        return DeclaredScheme(_QUANTO_PACKED, why=f"its weights {stated['weights']}"[:100])
    if method in _METHODS:
        block = sizes if len(sizes) == 2 and min(sizes) > 0 else ()
        return DeclaredScheme(method, block, declared=_declare_parts(method, stated, block))
    if method == "torchao":
        return _read_torchao(stated)
    if method in ("gptq", "awq"):
        return _read_gptq_or_awq(method, stated)
    if not method and {"group_size", "bits"} <= stated.keys():
        return _read_mlx(stated)
    return DeclaredScheme(method or "without a name", why=f"quant_method {method or 'is not stated'}")


def found_by(scheme: DeclaredScheme | None, tensors: Mapping[str, TensorKind], *, checked: bool = True) -> FoundWeights:
    """Find the quantised weights among tensors, given the scheme of the model. checked: add the faults of weights that
    don't fit the scheme; if none is declared, of weights that fit no known layout."""
    how = scheme.found_by if scheme else {"check": UNSTATED.check}
    return find(tensors, **(how if checked else {**how, "check": None}))


def _read_gptq_or_awq(method: str, stated: Mapping[str, Any]) -> DeclaredScheme:
    """GPTQ, where a stored zero point is one too low unless the format is `gptq_v2`, and AWQ's `gemm`."""
    bits = stated.get("bits", 4)
    layout = str(stated.get("checkpoint_format") or stated.get("version") or "").lower()
    orders = {"gptq": {"": "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}, "awq": {"": "awq", "gemm": "awq"}}
    order = orders[method].get(layout, "")
    why = "" if order else f"its layout {layout}"
    rules = _read_dynamic(stated.get("dynamic")) if method == "gptq" else ()
    if isinstance(rules, str):
        why = rules
        rules = ()
    every = (bits, *(rule.bits for rule in rules if rule.bits is not None))
    strange = [each for each in every if type(each) is not int or each not in _BITS[method]]  # 4.0 is refused too
    if strange:
        why = f"codes of {strange[0]!r} bits"
    if why:
        return DeclaredScheme(method, why=why)
    found = DeclaredScheme(method, bits=(bits,), order=order, rules=rules, symmetric=bool(stated.get("sym")))
    return found._replace(declared=_declare_matrices(found, stated))


def _declare_matrices(found: DeclaredScheme, stated: Mapping[str, Any]) -> Declared:
    """The size of groups in each module, as a config of GPTQ or AWQ says it."""
    group = stated.get("group_size", stated.get("q_group_size"))
    needs = frozenset({"g_idx"} if stated.get("desc_act") is True and found.scheme == "gptq" else ())

    def of_module(module: str) -> WantedParts:
        rule = found.rule_of(module)
        own = group if rule is None or rule.group is None else rule.group
        is_stated = type(own) is int and (own > 0 or own == -1)
        return WantedParts(block=(max(own, 0), 1) if is_stated else None, needs=needs)

    endings = (".qweight", ".qzeros", ".scales", ".g_idx")
    return Declared(of_module=of_module, is_stated=True, endings=endings)


def _read_bitnet(stated: Mapping[str, Any]) -> DeclaredScheme:
    """BitNet: `bitlinear` divides by a weight's scale, `autobitlinear` multiplies with it. In its mode `online` it
    stores floats and quantises as it computes."""
    kind = str(stated.get("linear_class", "bitlinear"))
    mode = str(stated.get("quantization_mode", "offline"))
    if kind not in ("bitlinear", "autobitlinear"):
        return DeclaredScheme("bitnet", why=f"its linear_class {kind}"[:100])
    if kind == "autobitlinear" and mode == "online":
        return DeclaredScheme("bitnet", why="its quantization_mode online: the weights are floats already")
    declared = Declared((WantedParts(frozenset({"bitnet"})),), is_stated=True)
    return DeclaredScheme("bitnet", declared=declared, trits="divided" if kind == "bitlinear" else "multiplied")


def _declare_parts(method: str, stated: Mapping[str, Any], block: tuple[int, ...]) -> Declared:
    """What a config of one of `_METHODS` says of the parts of weights."""
    if method == "fp8":
        return Declared(_list_fp8_parts(stated, block), is_stated=True)
    if method == "mxfp8":
        return Declared((WantedParts(frozenset({"fp8"}), (1, 32)),), is_stated=True)
    if method == "mxfp4":
        return Declared((WantedParts(frozenset({"mxfp4 of gpt-oss", "fp4"})),), is_stated=True, expert_biases=True)
    if method == "bitsandbytes":
        return Declared(_list_bitsandbytes_parts(stated), is_stated=True)
    if method in ("modelopt", "modelopt_fp4"):
        return _declare_modelopt(stated)
    return QUANTO if method == _QUANTO else STATED


# quanto: a scale for each row, for all dtypes of weights.
QUANTO = Declared((WantedParts(frozenset({"quanto"}), (1, 0)),), is_stated=True)


def _list_fp8_parts(stated: Mapping[str, Any], block: tuple[int, ...]) -> tuple[WantedParts, ...]:
    """The block of FP8 weights: as the config says, else one scale a tensor, one a row, or 128 x 128 (transformers).
    FP4 weights in the same model (DeepSeek V4's experts) have groups of their own."""
    fp8 = frozenset({"fp8", "int8"})
    beside = WantedParts(frozenset({"fp4"}))
    if len(block) == 2:
        return WantedParts(fp8, (block[0], block[1])), beside
    return WantedParts(fp8, (0, 0)), WantedParts(fp8, (1, 0)), WantedParts(fp8, (128, 128)), beside


def _list_bitsandbytes_parts(stated: Mapping[str, Any]) -> tuple[WantedParts, ...]:
    """4 or 8 bits, as the config says; either if it does not."""
    four = frozenset({"bitsandbytes of 4 bits"})
    eight = frozenset({"bitsandbytes of 8 bits"})
    if stated.get("load_in_4bit") is True:
        return (WantedParts(four),)
    if stated.get("load_in_8bit") is True:
        return (WantedParts(eight),)
    return (WantedParts(four | eight),)


_MODELOPT = {
    "FP8": WantedParts(frozenset({"fp8"}), (0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": WantedParts(frozenset({"fp8"}), (1, 0)),
    "NVFP4": WantedParts(frozenset({"nvfp4 of ModelOpt"}), (1, 16)),
    "MXFP8": WantedParts(frozenset({"fp8"}), (1, 32)),
}


def _declare_modelopt(stated: Mapping[str, Any]) -> Declared:
    """NVIDIA's ModelOpt: one algorithm for all modules, or one for each module by name."""
    layers = stated.get("quantized_layers")
    rows = layers.items() if isinstance(layers, dict) else ()
    apart = {
        str(name): _MODELOPT[row["quant_algo"]]
        for name, row in rows
        if isinstance(row, dict) and row.get("quant_algo") in _MODELOPT
    }
    whole = _MODELOPT.get(str(stated.get("quant_algo")))
    return Declared((whole,) if whole else (), apart.get, is_stated=True)


def _read_dynamic(stated: Any) -> tuple[ModuleRule, ...] | str:
    """The rules of GPTQModel's `dynamic`, or in words why they can't be read.

    `dynamic` is {pattern: values that replace the config's}; the first pattern that fits counts. `-:` in front of a
    pattern excludes modules from quantisation, `+:` in front means nothing.
    """
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
        found.append(
            ModuleRule(
                pattern,
                bits=own.get("bits"),
                symmetric=symmetric if isinstance(symmetric, bool) else None,
                group=own.get("group_size"),
            )
        )
    return tuple(found)


def _read_torchao(stated: Mapping[str, Any]) -> DeclaredScheme:
    """torchao: one config for all modules, or one for each module by name or pattern."""
    kind = stated.get("quant_type")
    whole = kind.get("default") if isinstance(kind, dict) else None
    data = whole.get("_data") if isinstance(whole, dict) else None
    inside = data if isinstance(data, dict) else {}
    apart = next((inside[key] for key in _OF_MODULES if isinstance(inside.get(key), dict)), None)
    each = [*apart.values()] if apart else [whole]
    names = dict.fromkeys(
        str(one.get("_type")) if isinstance(one, dict) else _name_config(str(kind))
        for one in each
        if one is not None or not apart
    )
    strange = [name for name in names if name not in _TORCHAO]
    shown = ", ".join(name.removesuffix("Config") for name in names)
    why = f"its {strange[0]}"[:100] if strange else ""
    return DeclaredScheme(f"torchao ({shown})"[:200], why=why, declared=STATED)


def _name_config(words: str) -> str:
    """The name of torchao's config class, from the older notation in words.

    >>> _name_config("int8_dynamic_activation_int8_weight")
    'Int8DynamicActivationInt8WeightConfig'
    """
    return "".join(word.capitalize() for word in words.split("_")) + "Config"


def _read_mlx(stated: Mapping[str, Any]) -> DeclaredScheme:
    """MLX: settings of all modules, and of modules that have their own."""
    named = {name: each for name, each in stated.items() if isinstance(each, dict)}
    whole = stated["group_size"], stated["bits"], stated.get("mode", AFFINE)
    apart = {  # the mode is not inherited: mlx-lm passes on only what the module's own entry contains
        name: (each.get("group_size", whole[0]), each.get("bits", whole[1]), each.get("mode", AFFINE))
        for name, each in named.items()
    }
    for group, bits, mode in (whole, *apart.values()):
        if not isinstance(mode, str) or mode not in MODES:
            return DeclaredScheme("mlx", why=f"its mode {mode}")
        only = MODES[mode]
        whole_numbers = type(group) is int and group > 0 and type(bits) is int and bits in (2, 3, 4, 5, 6, 8)
        if not whole_numbers or only not in (None, (group, bits)):
            return DeclaredScheme("mlx", why=f"groups of {group!r} codes of {bits!r} bits, mode {mode}")
    if any(each.get("global_scale") for each in (stated, *named.values())):
        return DeclaredScheme("mlx", why="its global_scale")
    declared = Declared(is_stated=True, endings=(".scales", ".biases"))
    return DeclaredScheme("mlx", (1, whole[0]), (whole[1],), order=whole[2], apart=apart, declared=declared)


def section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section of a config that is about quantisation, at its top or in its text model's; None without one."""
    for place in (config, *(config[name] for name in _NESTED if isinstance(config.get(name), dict))):
        for key in CONFIG_KEYS:
            if isinstance(place.get(key), dict) and place[key]:
                found: Mapping[str, Any] = place[key]
                return found
    return None


def of_quantiser(file: str, stated: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The contents of one of `QUANTISER_FILES`, translated to a config's section; None if it declares nothing.

    AutoGPTQ and GPTQModel (`quantize_config.json`), AutoAWQ (`quant_config.json`) and NVIDIA's ModelOpt
    (`hf_quant_config.json`) each have a file of their own.

    >>> of_quantiser("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"})["bits"]
    4
    """
    modelopt, gptq, awq = QUANTISER_FILES
    if file == modelopt:
        inner = stated.get("quantization")
        return {**inner, "quant_method": "modelopt"} if isinstance(inner, dict) else None
    if file == gptq and "bits" in stated:
        return {"quant_method": "gptq", **stated}
    if file == awq and "w_bit" in stated:
        group = stated.get("q_group_size")
        return {"quant_method": "awq", "bits": stated["w_bit"], "group_size": group, **stated}
    return None


def without(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The config without `keys`, at its top and in the configs of the models inside it.

    >>> without({"a": 1, "text_config": {"quantization_config": {}}}, CONFIG_KEYS)
    {'a': 1, 'text_config': {}}
    """
    gone = set(keys)
    kept = {key: value for key, value in config.items() if key not in gone}
    for name in _NESTED:
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key not in gone}
    return kept


def _read_compressed(stated: Mapping[str, Any]) -> DeclaredScheme:
    """compressed-tensors: formats, bits and blocks of all groups, and what prevents dequantising."""
    groups = stated.get("config_groups")
    rows = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    stated_formats = [stated.get("format"), *(row.get("format") for row in rows)]
    formats = list(dict.fromkeys(str(stated_format) for stated_format in stated_formats if stated_format))
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

    lacking = [each for each in weights if each.get("strategy") == "block" and not _find_block(each)]
    if lacking:
        why = "its strategy of blocks, without a block_structure that says how large they are"
    elif groups and not weights and any(form in _LAYOUTS for form in formats):
        why = "its config_groups, of which none says how weights are stored"

    groups = tuple(_read_group(row, str(row.get("format") or stated.get("format") or "")) for row in rows)
    return DeclaredScheme(named, block, bits, why, declared=Declared(groups, is_stated=True))


# Format of compressed-tensors -> the name of its layout in `weight_layouts.LAYOUTS`.
_LAYOUTS = {
    "pack-quantized": "packed integers",
    "float-quantized": "fp8",
    "int-quantized": "int8",
    "mxfp8-quantized": "fp8",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}


def _read_group(row: Mapping[str, Any], form: str) -> WantedParts:
    """What a group of compressed-tensors' config says of its modules."""
    weights = row.get("weights")
    if not isinstance(weights, dict):
        return WantedParts()
    layouts = frozenset({_LAYOUTS[form]} if form in _LAYOUTS else ())
    is_integer = str(weights.get("type", "int")) == "int"
    needs = frozenset({"zero_point"} if is_integer and weights.get("symmetric") is False else ())
    targets = row.get("targets")
    named = tuple(map(str, targets)) if isinstance(targets, list) else ()
    bits = weights.get("num_bits")
    stated_bits = bits if is_integer and type(bits) is int and 1 <= bits <= 8 else 0
    # compressed-tensors refuses other groups ("tensor column shape must be divisble by the given group_size").
    divides = weights.get("strategy") in ("group", "tensor_group")
    return WantedParts(layouts, _find_block(weights), needs, named, stated_bits, divides)


_WITHOUT_GROUPS = {None: "tensor", -1: "channel"}  # group_size -> strategy


def _find_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block that a group's strategy implies, (rows, columns), 0 for all; None if the strategy is unknown."""
    group = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:  # the default that compressed-tensors derives from group_size
        strategy = "group" if group is not None and group != -1 else _WITHOUT_GROUPS[group]
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy in ("group", "tensor_group") and type(group) is int and group > 0:
        return 1, group
    sizes = weights.get("block_structure")
    if strategy == "block" and isinstance(sizes, list) and len(sizes) == 2:
        height, width = sizes
        if type(height) is int and type(width) is int and height > 0 and width > 0:
            return height, width
    return None


def _recognise_names(names: Iterable[str]) -> DeclaredScheme | None:
    """The scheme of the first name that only one scheme has; None without such a name.

    For quanto all names are searched: codes of 2 and 4 bits differ from 8 bits only by the `_shift` stored with them.
    """
    names = iter(names)
    for name in names:
        found = _find_scheme_of_name(name)
        if found == _QUANTO:
            found = next((_QUANTO_PACKED for other in names if _find_scheme_of_name(other) == _QUANTO_PACKED), found)
        if found:
            why = "" if found in _METHODS else f"tensors such as {name}"
            return DeclaredScheme(found, why=why, declared=QUANTO if found == _QUANTO else STATED)
    return None


def is_of_one_scheme(name: str) -> bool:
    """Does only one scheme use such a name for a tensor?

    >>> is_of_one_scheme("model.layers.0.mlp.up_proj.W_q"), is_of_one_scheme("model.layers.0.mlp.up_proj.weight")
    (True, False)
    """
    return _find_scheme_of_name(name) is not None


def _find_scheme_of_name(name: str) -> str | None:
    """Look up the last one or two components of the name."""
    dot = name.rfind(".")
    return _BY_NAME.get(name[dot:]) or _BY_NAME.get(name[name.rfind(".", 0, dot) :])
