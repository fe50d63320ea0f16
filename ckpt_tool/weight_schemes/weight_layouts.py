"""The parts of a weight in each scheme, with their dtypes and shapes, and what a config demands in addition.

    layout            codes            parts that it needs                      parts that it may have
    fp8               F8_*             scale                                    zero_point
    int8              I8               scale                                    zero_point
    packed integers   I32 words        scale, shape                             zero_point, g_idx
    nvfp4             U8, two a byte   scale F8_E4M3, global_scale
    ...                                                                         (`LAYOUTS` has all)

A weight fits its layout if it has every needed part and no part that the layout lacks, with the layout's dtypes and
shapes. A config demands more (`WantedParts`): how many codes share a scale, that zero points or group numbers exist.
If the config names a scheme, codes without their parts and parts without their codes are faults too, so that no codes
are silently taken for floats or dropped.

    m.weight F8_E4M3 [256, 512], m.weight_scale F32 [1], weight_block_size [128, 128]
      -> WeightFault("m.weight_scale", "scales of shape [1], by the config [2, 4]", lacking=False)

Sources: those of `weight_schemes.quantised_weights` and `weight_schemes.declared_scheme`. Cost: some us a weight. What
it does not do: read values (`choose_codec.make_recipe` compares those that contain a shape)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.module_patterns import NotUnderstood, first_at_the_front
from ckpt_tool.weight_schemes.quantised_weights import (
    AFFINE,
    BLOCKS,
    BYTES,
    CODES,
    DATA,
    MATRIX,
    MODES,
    NIBBLES,
    OF_127,
    PACKED,
    QDATA,
    QWEIGHT,
    STREAM,
    TABLED,
    TABLES,
    TILED,
    TRITS,
    TURNED,
    WORDS,
    Quantised,
    Shape,
    TensorKind,
    WeightFault,
)

_FLOATS = frozenset({"F32", "F16", "BF16"})
_POWERS = frozenset({"F8_E8M0", "U8"})  # scales that are powers of two: the byte is the exponent + 127
_E4M3 = frozenset({"F8_E4M3"})
_INTEGERS = frozenset({"I8", "I16", "I32", "I64", "U8"})
_F32 = frozenset({"F32"})
_FLOATS_OF_8_BITS = frozenset(name for name in CODES if name.startswith("F8"))


class WeightPart(NamedTuple):
    """A tensor that a weight needs or may have in addition to its codes."""

    dtypes: frozenset[str]
    is_needed: bool = True


class WeightLayout(NamedTuple):
    """How a scheme stores a weight."""

    name: str
    codes: str  # one of `quantised_weights`' kinds: BYTES, NIBBLES, ...
    leads: frozenset[str]  # dtypes of the tensor of codes; empty if any will do
    parts: Mapping[str, WeightPart]  # by role
    ending: str = ""  # what the name of the tensor of codes ends in
    orders: tuple[str, ...] = ()  # values of `Quantised.order` that it is for; empty if any will do


# The first that fits counts: layouts with an ending of their own precede those that any name may have.
LAYOUTS: tuple[WeightLayout, ...] = (
    WeightLayout(
        "torchao",
        BYTES,
        _FLOATS_OF_8_BITS | {"I8"},
        {"scale": WeightPart(_FLOATS | _POWERS), "zero_point": WeightPart(_INTEGERS | _FLOATS, is_needed=False)},
        QDATA,
    ),
    WeightLayout(
        "torchao of 4 bits",
        NIBBLES,
        frozenset({"U8"}),
        {"scale": WeightPart(_POWERS | _E4M3), "per_tensor_scale": WeightPart(_F32, is_needed=False)},
        QDATA,
    ),
    WeightLayout("quanto", BYTES, _FLOATS_OF_8_BITS | {"I8"}, {"scale": WeightPart(_FLOATS)}, DATA),
    WeightLayout(
        "fp8",
        BYTES,
        _FLOATS_OF_8_BITS,
        {
            "scale": WeightPart(_FLOATS | _POWERS),
            "zero_point": WeightPart(_INTEGERS | _FLOATS | _FLOATS_OF_8_BITS, is_needed=False),
        },
    ),
    WeightLayout(
        "int8",
        BYTES,
        frozenset({"I8"}),
        {"scale": WeightPart(_FLOATS | _POWERS), "zero_point": WeightPart(_INTEGERS | _FLOATS, is_needed=False)},
    ),
    WeightLayout(
        "packed integers",
        WORDS,
        frozenset({"I32"}),
        {
            "scale": WeightPart(_FLOATS),
            "shape": WeightPart(frozenset({"I64", "I32"})),
            "zero_point": WeightPart(_INTEGERS | _FLOATS, is_needed=False),
            "g_idx": WeightPart(_INTEGERS, is_needed=False),
        },
        PACKED,
    ),
    WeightLayout(
        "nvfp4", NIBBLES, frozenset({"U8"}), {"scale": WeightPart(_E4M3), "global_scale": WeightPart(_F32)}, PACKED
    ),
    WeightLayout("mxfp4", NIBBLES, frozenset({"U8"}), {"scale": WeightPart(_POWERS)}, PACKED),
    WeightLayout(
        "nvfp4 of ModelOpt", NIBBLES, frozenset({"U8"}), {"scale": WeightPart(_E4M3), "scale_2": WeightPart(_F32)}
    ),
    WeightLayout("fp4", NIBBLES, frozenset({"I8", "F4"}), {"scale": WeightPart(_FLOATS | _POWERS)}),
    WeightLayout("mxfp4 of gpt-oss", TURNED, frozenset({"U8"}), {"scale": WeightPart(_POWERS)}, BLOCKS),
    WeightLayout(
        "gptq",
        MATRIX,
        frozenset({"I32"}),
        {
            "scale": WeightPart(_FLOATS),
            "zero_point": WeightPart(frozenset({"I32"})),
            "g_idx": WeightPart(frozenset({"I32"}), is_needed=False),
        },
        QWEIGHT,
        ("gptq", "gptq_v2"),
    ),
    WeightLayout(
        "awq",
        MATRIX,
        frozenset({"I32"}),
        {"scale": WeightPart(_FLOATS), "zero_point": WeightPart(frozenset({"I32"}))},
        QWEIGHT,
        ("awq",),
    ),
    WeightLayout(
        "bitsandbytes of 4 bits",
        TABLED,
        frozenset(),
        {
            "scale": WeightPart(_F32 | {"U8"}),
            "quant_map": WeightPart(_F32),
            "state": WeightPart(frozenset({"U8"})),
            "nested_absmax": WeightPart(_F32, is_needed=False),
            "nested_quant_map": WeightPart(_F32, is_needed=False),
        },
    ),
    WeightLayout(
        "bitsandbytes of 8 bits",
        OF_127,
        frozenset({"I8"}),
        {"scale": WeightPart(_FLOATS), "weight_format": WeightPart(frozenset({"U8"}), is_needed=False)},
    ),
    WeightLayout(
        "mlx",
        STREAM,
        frozenset({"U32"}),
        {"scale": WeightPart(_FLOATS), "bias": WeightPart(_FLOATS)},
        orders=(AFFINE,),
    ),
    WeightLayout(
        "mlx of floats",
        STREAM,
        frozenset({"U32"}),
        {"scale": WeightPart(frozenset({"U8"}))},
        orders=tuple(mode for mode in MODES if mode != AFFINE),
    ),
    WeightLayout("bitnet", TRITS, frozenset({"U8"}), {"scale": WeightPart(_FLOATS)}),
)
PACKED_INTEGERS = "packed integers"
_ONE_NUMBER = ("global_scale", "scale_2", "per_tensor_scale")  # roles with a single number for the entire weight


class WantedParts(NamedTuple):
    """What a config says of the weights in a group of modules."""

    layouts: frozenset[str] = frozenset()  # names in LAYOUTS; empty if any will do
    block: tuple[int, int] | None = None  # (rows, columns) that share a scale, 0 for all; None if not stated
    needs: frozenset[str] = frozenset()  # roles that are optional in the layout, but not by this config
    targets: tuple[str, ...] = ()  # names, `re:` patterns or classes of modules; empty for all modules
    bits: int = 0  # of a packed integer; 0 if the config says nothing
    divides: bool = False  # must the block divide the columns?


class Declared(NamedTuple):
    """What a config says of all modules, and the check that weights are as it says."""

    groups: tuple[WantedParts, ...] = ()  # alternatives: a weight has to fit one of them
    # What the config says of a single module, None if nothing; it replaces the groups.
    of_module: Callable[[str], WantedParts | None] | None = None
    is_stated: bool = False  # is the scheme known, from the config or from a name that only one scheme has?
    endings: tuple[str, ...] = ()  # of parts in this scheme; other schemes don't use them
    expert_biases: bool = False  # stacked experts of the scheme have a bias tensor each, as in gpt-oss

    def alternatives(self, module: str) -> Sequence[WantedParts]:
        """The alternatives that a module's weight has to fit one of; () if the config says nothing."""
        apart = self.of_module(module) if self.of_module is not None else None
        if apart is not None:
            return (apart,)
        named = [group for group in self.groups if _names(group.targets, module)]
        return named or self.groups

    def check(
        self, weights: Mapping[str, Quantised], tensors: Mapping[str, TensorKind], taken: frozenset[str]
    ) -> tuple[dict[str, Quantised], list[WeightFault]]:
        """Compare weights with their layouts and with the config.

        Args:
            taken: names that need no further look: they belong to a weight, to activations, or have a fault already.

        Returns:
            The weights, with the blocks that the config says, and the faults.
        """
        checked: dict[str, Quantised] = {}
        faults: list[WeightFault] = []
        for lead, weight in weights.items():
            layout = find_layout(weight, tensors)
            if layout is None:
                what = "codes in an order that the config does not state: it names another scheme, or none"
                faults.append(WeightFault(lead, what, lacking=False))
                checked[lead] = weight
                continue
            faults += _list_misfits(weight, layout, tensors)
            checked[lead], unlike = self._fit_to_config(weight, layout, tensors)
            faults += unlike
        if self.is_stated or weights:
            faults += self._list_left_over(weights, tensors, taken)
        return checked, faults

    def _fit_to_config(
        self, weight: Quantised, layout: WeightLayout, tensors: Mapping[str, TensorKind]
    ) -> tuple[Quantised, list[WeightFault]]:
        """The weight with the block of the first alternative that it fits, and [] or why it fits none."""
        first: list[WeightFault] = []
        for wanted in self.alternatives(weight.made.removesuffix(".weight")):
            faults, block = _compare_with_config(weight, layout, wanted, tensors)
            if not faults:
                return weight._replace(block=block), []
            first = first or faults
        return weight, first

    def _list_left_over(
        self, weights: Mapping[str, Quantised], tensors: Mapping[str, TensorKind], taken: frozenset[str]
    ) -> Iterator[WeightFault]:
        """Faults of tensors that belong to no weight: parts without codes, codes without parts, second scales."""
        grouped = [weight for weight in weights.values() if "g_idx" in weight.parts]
        matrices = [weight for weight in weights.values() if weight.codes == MATRIX and weight.order != "awq"]
        for weight in matrices if grouped else ():
            if "g_idx" not in weight.parts:
                yield WeightFault(weight.lead, "codes without g_idx, which others of this model have", lacking=True)

        # A weight that has two scales uses one of them; the other is found by the module's name and these endings.
        modules = {weight.made.removesuffix(".weight") for weight in weights.values()}
        twice = {f"{module}{ending}" for module in modules for ending in _OF_MODULE}
        endings = (*_PARTS, *self.endings)
        for name, kind in tensors.items():
            if name in taken:
                continue
            if name.endswith(endings) or name in twice or (name.endswith(".scale") and kind.dtype.name == "F8_E8M0"):
                yield WeightFault(name, "a part of a quantised weight without its codes", lacking=True)
            elif self.is_stated and kind.dtype.name == "F8_E8M0" and name.endswith(_OF_CODES):
                yield WeightFault(name, "powers of two, as scales are, under the name of codes", lacking=False)
            elif self.is_stated and _may_be_codes(name, kind):
                yield WeightFault(name, f"{kind.dtype.name} codes without their scales", lacking=True)
        if self.expert_biases:
            yield from _list_lone_biases(weights, tensors)


# Endings that only parts of quantised weights have: integers or floats of a model never have such names.
_PARTS = (
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_scale_2"),
    *(".weight_g_idx", "_proj_packed", "_proj_scale", "_proj_scales", "_proj_blocks", "_proj_scale_2"),
    *(".qscale_weight", ".SCB", ".weight_format", "._weight_qdata", "._weight_zero_point"),
    *("._weight_per_tensor_scale", ".weight._data", ".weight._scale", ".weight._shift"),
    *TABLES,
)
_OF_MODULE = (".scale", ".qscale_weight", ".SCB", ".weight_scale", ".weight_scale_inv")
_OF_CODES = (".weight", ".gate_up_proj", ".down_proj", PACKED, BLOCKS, QWEIGHT, QDATA, DATA)
# Names of tensors that hold the codes of a weight in some scheme.
_INTEGER_CODES = ("I8", "U8", "F4", "I32", "U32")


def find_layout(weight: Quantised, tensors: Mapping[str, TensorKind]) -> WeightLayout | None:
    """The layout of a weight; if its codes fit several, the first that allows the dtype of its scales. None if nothing
    says in which order the codes are."""
    lead = tensors[weight.lead].dtype.name
    fits = [
        layout
        for layout in LAYOUTS
        if layout.codes == weight.codes
        and weight.lead.endswith(layout.ending)
        and (not layout.leads or lead in layout.leads)
        and (not layout.orders or weight.order in layout.orders)
    ]
    scale = tensors[weight.parts["scale"]].dtype.name
    by_scale = [layout for layout in fits if scale in layout.parts["scale"].dtypes]
    return next(iter(by_scale or fits), None)


def _list_misfits(weight: Quantised, layout: WeightLayout, tensors: Mapping[str, TensorKind]) -> Iterator[WeightFault]:
    """Faults of a weight in its layout, apart from what a config says."""
    for role, part in layout.parts.items():
        if part.is_needed and role not in weight.parts:
            yield WeightFault(weight.lead, f"codes without {role}, which {layout.name} has next to them", lacking=True)
    for role, name in weight.parts.items():
        dtype = tensors[name].dtype.name
        shape = tensors[name].shape
        if role not in layout.parts:
            yield WeightFault(name, f"a {role} next to codes of {layout.name}, which has none", lacking=False)
        elif dtype not in layout.parts[role].dtypes:
            yield WeightFault(name, f"{dtype} {list(shape)} where {layout.name} has a {role}", lacking=False)
        elif role in _ONE_NUMBER and prod(shape) != 1:
            yield WeightFault(name, f"{prod(shape)} numbers where one serves the whole weight", lacking=False)
        elif role == "zero_point" and not _zeros_fit(weight, tensors):
            scales = list(tensors[weight.parts["scale"]].shape)
            yield WeightFault(name, f"zero points of shape {list(shape)} for scales of shape {scales}", lacking=False)


def _zeros_fit(weight: Quantised, tensors: Mapping[str, TensorKind]) -> bool:
    """Do the zero points fit the scales: one for each, or packed along the rows into 32-bit words?"""
    if weight.codes == MATRIX:
        return True  # `quantised_weights` compares them
    zeros = tensors[weight.parts["zero_point"]]
    scales = tensors[weight.parts["scale"]].shape
    if zeros.shape == scales or prod(zeros.shape) == prod(scales) == 1:
        return True
    if weight.codes == BYTES:
        return len(zeros.shape) != len(scales) and prod(zeros.shape) == prod(scales)
    words = -(-weight.shape[-2] * weight.bits // 32)
    # How many bits a code has may be known from `X_shape` alone, which is a value: any number of bits is accepted.
    of_any_bits = {-(-weight.shape[-2] * bits // 32) for bits in range(1, 9)}
    is_packed = zeros.dtype.name == "I32" and zeros.shape[:-2] == scales[:-2] and zeros.shape[-1:] == scales[-1:]
    return is_packed and len(zeros.shape) > 1 and zeros.shape[-2] in {words, *of_any_bits}


def _compare_with_config(
    weight: Quantised, layout: WeightLayout, wanted: WantedParts, tensors: Mapping[str, TensorKind]
) -> tuple[list[WeightFault], tuple[int, int]]:
    """How a weight differs from what the config says ([] if it does not), and its block according to the config."""
    faults: list[WeightFault] = []
    if wanted.layouts and layout.name not in wanted.layouts:
        what = f"codes of {layout.name}, by the config {' or '.join(sorted(wanted.layouts))}"
        faults.append(WeightFault(weight.lead, what, lacking=False))
    for role in sorted(wanted.needs - weight.parts.keys()):
        faults.append(WeightFault(weight.lead, f"codes without {role}, which the config asks for", lacking=True))
    if wanted.block is None or len(weight.shape) < 2 or weight.order == TILED:
        return faults, weight.block

    rows, columns = weight.shape[-2:]
    # If groups have different bits, the headers alone can't say which bits this weight has: the config decides.
    if wanted.bits and layout.name == PACKED_INTEGERS:
        columns = columns * weight.bits // wanted.bits
    block = (wanted.block[0] or max(rows, 1), wanted.block[1] or max(columns, 1))
    grid = (ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    if wanted.divides and columns % block[1]:
        what = f"groups of {block[1]} by the config, which do not divide rows of {columns}"
        faults.append(WeightFault(weight.lead, what, lacking=False))

    name = weight.parts["scale"]
    shape = tensors[name].shape
    if shape not in _list_shapes(grid, weight.shape[:-2]):
        faults.append(WeightFault(name, f"scales of shape {list(shape)}, by the config {list(grid)}", lacking=False))
    return faults, block


def unlike(weight: Quantised, wanted: WantedParts, tensors: Mapping[str, TensorKind]) -> list[WeightFault]:
    """How a weight differs from what is said of this weight alone; [] if it does not, or has no layout."""
    layout = find_layout(weight, tensors)
    return [] if layout is None else _compare_with_config(weight, layout, wanted, tensors)[0]


def _list_shapes(grid: tuple[int, int], lead: Shape) -> set[Shape]:
    """The shapes that scales in a grid may be stored in, for a stack of matrices with leading dims `lead`.

    >>> sorted(_list_shapes((4, 1), ()))
    [(4,), (4, 1)]
    """
    shapes = {(*lead, *grid)}
    if grid[1] == 1:
        shapes.add((*lead, grid[0]))
    if grid == (1, 1):
        shapes |= {(), (1,), (1, 1), lead, (*lead, 1)}
    return shapes


def _names(targets: Sequence[str], module: str) -> bool:
    """Do a group's targets name the module itself? Classes such as `Linear` don't: no file of a checkpoint says of
    which class a module is."""
    for target in targets:
        if target == module or module.endswith(f".{target}"):
            return True
        try:
            if target.startswith("re:") and first_at_the_front([target.removeprefix("re:")], module) is not None:
                return True
        except NotUnderstood:  # any group may be meant then
            continue
    return False


def _may_be_codes(name: str, kind: TensorKind) -> bool:
    """Is it a matrix of integers whose name is that of a weight?"""
    return kind.dtype.name in _INTEGER_CODES and len(kind.shape) > 1 and name.endswith(_OF_CODES)


def _list_lone_biases(weights: Mapping[str, Quantised], tensors: Mapping[str, TensorKind]) -> Iterator[WeightFault]:
    """Faults of stacked experts in gpt-oss that lack their bias, and of biases that lack their experts."""
    stacked = {weight.made: weight for weight in weights.values() if ".experts." in weight.made}
    for made, weight in stacked.items():
        bias = tensors.get(f"{made}_bias")
        outputs = weight.shape[:-1]
        if bias is None:
            yield WeightFault(weight.lead, f"experts without {made}_bias", lacking=True)
        elif bias.shape != outputs:
            what = f"a bias of shape {list(bias.shape)} for {list(outputs)} outputs"
            yield WeightFault(f"{made}_bias", what, lacking=False)
    for name in tensors:
        made = name.removesuffix("_bias")
        is_of_experts = made != name and ".experts." in name and name.endswith("_proj_bias")
        if is_of_experts and made not in stacked and made not in tensors:
            yield WeightFault(name, f"a bias without {made}{BLOCKS}", lacking=True)


UNSTATED = Declared()
STATED = Declared(is_stated=True)
