"""`--repack compressed-tensors`: weights of GPTQ and AWQ as compressed-tensors' `pack-quantized`: the same integers,
scales and zero points (`repack_recipes` has the layouts), and a config that declares them.

    m.qweight, m.scales, m.qzeros, m.g_idx   ->   m.weight_packed, m.weight_scale, m.weight_zero_point, m.weight_shape

compressed-tensors dequantises the output to the same bits as the library that wrote the input, in the dtype of the
scales. What can't be stored so is an error with a reason: groups in the order of activations, groups that do not divide
the inputs, and the arithmetic of bitsandbytes and MLX. Every other tensor stays as it is; modules that are not
quantised are listed in `ignore`. As a check, the reader of such folders has to find every weight in what is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tool.core.tensor import MODEL, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.quantised.dequantize import model_config, refuse_misfits
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.quantised.quantize import check_found, modules_that_stay, refuse_names
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind, with_computed
from ckpt_tool.weight_schemes.declared_scheme import INEXACT, DeclaredScheme
from ckpt_tool.weight_schemes.quantised_weights import (
    CONFIG_KEYS,
    MATRIX,
    QUANTISER_FILES,
    FoundWeights,
    Quantised,
    TensorKind,
)
from ckpt_tool.weight_schemes.written_schemes import Packing, packed_config, packed_parts

if TYPE_CHECKING:
    from ckpt_tool.run.computed import Input, Recipe

OPTION = "--repack"
NOTHING = "E1473"
# Library -> why its weights can't be stored as compressed-tensors stores integers.
_WHY = {
    "bitsandbytes": "its floats are numbers of a table, or products of three factors that are rounded twice",
    "mlx": "its groups have a bias that is no multiple of their scale, or codes in an order of their own",
}


class _Weight(NamedTuple):
    """A weight, and how it will be stored."""

    weight: Quantised
    packing: Packing
    # Role -> the new tensor, as `written_schemes.packed_parts` gives it.
    parts: Mapping[str, tuple[str, TensorKind]]


def repack(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with compressed-tensors' weights in place of those of GPTQ and AWQ.

    Raises:
        UsageError: E1471 for what compressed-tensors can't store exactly, also while values are read; E1473 if there is
            nothing to repack; E2725 for names that are not the hub's; E0264 with --plan and --ray.
        Incomplete, InconsistentCheckpoint: E1460, E1461 for parts that are missing or do not fit; while values are
            read, E1472 for zero points that contradict the config.
    """
    writing = job.writing
    if writing.repack is None:
        return chosen
    refuse_names(chosen, job, OPTION)
    config = model_config(chosen)
    rows = {row.tensor.key.name: row for row in chosen.stored if row.tensor.key.state == MODEL}
    kinds = {name: TensorKind(row.tensor.dtype, row.tensor.shape) for name, row in rows.items()}
    scheme, found = found_in(kinds, config)
    _refuse_others(scheme, found)
    refuse_misfits(found)

    planned: list[_Weight] = []
    recipes: list[Recipe] = []
    for weight in found.weights.values():
        is_symmetric = scheme is not None and scheme.symmetric_in(weight.made.removesuffix(".weight"))
        plan = _plan_weight(weight, rows, symmetric=is_symmetric)
        planned.append(plan)
        recipes += _recipes(plan, {name: chosen.input(rows[name]) for name in weight.names})

    # The config of the output. With it, a reader must find every weight in what will be written.
    parts_by_weight = {plan.weight.made: plan.parts for plan in planned}
    shapes = {name: row.tensor.shape for name, row in rows.items() if name not in found.names}
    packings = {plan.weight.made: plan.packing for plan in planned}
    new_config = packed_config(packings, modules_that_stay(shapes, taken=parts_by_weight))
    check_found(parts_by_weight, new_config, OPTION)

    converted = with_computed(
        replace(chosen, stored=tuple(_replace_weights(chosen.stored, planned))),
        recipes,
        f"{chosen.sources[0].path} (repacked)",
        writing,
        option=OPTION,
        dtypes={},
        notes=(f"{len(planned)} weights are repacked as {writing.repack} stores them, the same values ({OPTION})",),
    )
    from ckpt_tool.quantised.codecs.choose_codec import transpose_view

    # All parts but the shape are computed with inputs as rows, so they have to be transposed.
    transposed = {
        TensorKey(name) for parts in parts_by_weight.values() for role, (name, _) in parts.items() if role != "shape"
    }
    stored = [
        row._replace(tensor=transpose_view(row.tensor)) if row.tensor.key in transposed else row
        for row in converted.stored
    ]
    new_names: dict[str, tuple[str, ...]] = {}
    for plan in planned:
        part_names = tuple(name for name, _ in plan.parts.values())
        new_names |= dict.fromkeys(plan.weight.names, part_names)
    unwritten = [rows[name].tensor for plan in planned for name in _list_unwritten(plan)]
    return replace(
        converted,
        stored=tuple(stored),
        casts={**converted.casts, **{recipe.key: recipe.dtype for recipe in recipes}},
        names={**converted.names, **new_names},
        untrue=(*converted.untrue, *CONFIG_KEYS),
        stale=(*converted.stale, *QUANTISER_FILES),
        stated={**converted.stated, **new_config},
        dropped=(
            *converted.dropped,
            *left_behind(unwritten, f"{OPTION}: groups are in the order of the inputs, zero points the middle"),
        ),
    )


def _refuse_others(scheme: DeclaredScheme | None, found: FoundWeights) -> None:
    """Raise UsageError E1471 for weights of another library, E1473 where there are none of GPTQ's or AWQ's."""
    named = scheme.scheme if scheme is not None else ""
    others = [weight.made for weight in found.weights.values() if weight.codes != MATRIX]
    if scheme is not None and (named in _WHY or not scheme.known):
        floats = "--dequantize writes them as floats; with --quantize SCHEME they are quantised again"
        raise UsageError(
            f"{OPTION}: weights of {named} can't be repacked as they are: {scheme.why or _WHY[named]}",
            code=INEXACT,
            hint=floats if scheme.known else "convert them to floats with their own library first",
        )
    if others or (not found.weights and not found.faults):
        raise UsageError(
            f"{OPTION}: there are no weights of GPTQ or AWQ here" + (f", they belong to {named}" if named else ""),
            code=NOTHING,
            key=others[0] if others else None,
            hint="leave it off: what compressed-tensors or transformers wrote is read by them as it is",
        )


def _plan_weight(weight: Quantised, rows: Mapping[str, Stored], *, symmetric: bool) -> _Weight:
    """How a weight will be stored. Raises UsageError E1471 if compressed-tensors has no such groups."""
    inputs, _ = weight.shape
    scales = rows[weight.parts["scale"]].tensor
    if inputs % scales.shape[0] or inputs * weight.bits % 32:
        raise UsageError(
            f"{weight.made}: {scales.shape[0]} groups of {inputs} inputs, and compressed-tensors has groups of one "
            "size, and whole words of inputs",
            code=INEXACT,
            key=weight.lead,
            hint="--dequantize writes the weights as floats",
        )
    packing = Packing(weight.bits, inputs // scales.shape[0], symmetric, channel=scales.shape[0] == 1)
    return _Weight(weight, packing, packed_parts(packing, weight.made, weight.floats, scales.dtype))


def _recipes(planned: _Weight, inputs_by_name: Mapping[str, Input]) -> Iterator[Recipe]:
    """How to compute the new tensors of a weight. inputs_by_name: its present tensors."""
    from ckpt_tool.quantised.repack_recipes import Packed, RepackedScales, Shape, ZeroPoints

    weight, (outputs, inputs) = planned.weight, planned.weight.floats
    parts = weight.parts
    bits = weight.bits
    order = weight.order

    def own(role: str) -> tuple[TensorKey, tuple[int, ...]]:
        name, kind = planned.parts[role]
        return TensorKey(name), tuple(reversed(kind.shape))  # transposed later

    text = f"repacked {order} {bits} {planned.packing}"
    codes = inputs_by_name[weight.lead]
    scales = [inputs_by_name[parts["scale"]]]
    yield Packed(*own("codes"), (codes,), text, bits, order)
    checks: dict[str, int] = {}
    for role, is_checked in (("g_idx", "g_idx" in parts), ("zero_point", planned.packing.symmetric)):
        if is_checked:
            checks[role] = len(scales)
            scales.append(inputs_by_name[parts[role]])
    yield RepackedScales(
        *own("scale"),
        tuple(scales),
        text,
        bits,
        order,
        planned.packing.group,
        checks.get("g_idx"),
        checks.get("zero_point"),
    )
    if not planned.packing.symmetric:
        yield ZeroPoints(*own("zero_point"), (inputs_by_name[parts["zero_point"]],), text, bits, order)
    yield Shape(TensorKey(planned.parts["shape"][0]), (2,), (codes,), text, (outputs, inputs))


def _list_unwritten(planned: _Weight) -> Iterator[str]:
    """The tensors of a weight that are not written, because compressed-tensors assumes their contents."""
    for role, name in planned.weight.parts.items():
        if role == "g_idx" or (role == "zero_point" and planned.packing.symmetric):
            yield name


def _replace_weights(stored: Sequence[Stored], made: Sequence[_Weight]) -> Iterator[Stored]:
    """The tensors, with those that a weight becomes in the place of its codes."""
    leads = {each.weight.lead: each for each in made}
    parts = {name for each in made for name in each.weight.parts.values()}
    for row in stored:
        name = row.tensor.key.name if row.tensor.key.state == MODEL else ""
        if name in leads:
            for new, _ in leads[name].parts.values():
                yield row._replace(tensor=row.tensor._replace(key=TensorKey(new), path=()))
        elif name not in parts:
            yield row
