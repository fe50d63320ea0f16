"""`--dequantize`: quantised weights and optimizer states are converted to floats while they are read.

Weights (`weight_schemes.quantised_weights`) get the dtype of `--dtype`, else of the model's config, else bf16. Their
scales, the scales of activations and caches, and the config's section on quantisation are not written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES, DType, from_name
from ckpt_tool.core.tensor import MODEL, LogicalTensor, Path, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, UsageError
from ckpt_tool.formats.state_dict.coded import part_of
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.quantised.layer_choice import is_conv1d
from ckpt_tool.quantised.torchao_headers import header_faults
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind, refuse_saved_plan, with_computed
from ckpt_tool.sources.config import quantised_config
from ckpt_tool.weight_schemes.declared_scheme import DeclaredScheme, section
from ckpt_tool.weight_schemes.quantised_weights import (
    BYTES,
    CONFIG_KEYS,
    MATRIX,
    OF_127,
    QUANTISER_FILES,
    TABLED,
    FoundWeights,
    Quantised,
    Shape,
    TensorKind,
    WeightFault,
    is_block_assumed,
)

if TYPE_CHECKING:
    from ckpt_tool.families.rewrite import Unfitting
    from ckpt_tool.run.computed import Recipe
    from ckpt_tool.storage.source import Tree

OPTION = "--dequantize"
LACKING = "E1460"
MISFIT = "E1461"
UNKNOWN = "E1464"
NOTHING = "E2403"
_VOCABULARY = re.compile(r"embed|lm_head|wte|output\.weight")  # weights whose rows trainers pad to a round number
_MOST_TEXT = 4096  # bytes; bitsandbytes writes 80 to 300
_CONFIGURED = ("dtype", "torch_dtype")


def dequantize(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with its quantised weights and states as floats.

    Raises:
        UsageError: E2403 if nothing is quantised; E0264 with --plan and --ray; E1469 for states that torchao keeps as
            codes, without the option; E1464 (exit 2) for a scheme that this build can't dequantise.
        Incomplete, InconsistentCheckpoint: E1460-E1462 for scales that are missing or have another shape; while values
            are read, E1463 for scales that are NaN.
    """
    writing = job.writing
    if not writing.dequantize:
        if any("@" in row.tensor.key.state for row in chosen.stored):
            from ckpt_tool.quantised.codecs.torchao_states import refuse_codes

            if writing.states or job.fmt.holds.has("optimizer"):
                refuse_codes([row.tensor for row in chosen.stored])
            chosen = _without_codes(chosen, f"{job.fmt.name} has no place for them")
        if any(row.tensor.dtype.coded for row in chosen.stored):
            from ckpt_tool.quantised.gguf_conversion import refuse_blocks

            refuse_blocks(chosen, job)
        return chosen

    refuse_saved_plan(writing, OPTION)
    if any(row.tensor.dtype.coded for row in chosen.stored):
        return _dequantize_blocks(chosen, writing)
    from ckpt_tool.quantised.codecs.paddle_moments import States, find_paddle_states
    from ckpt_tool.quantised.codecs.torchao_states import find_torchao_states

    rows = [row for row in chosen.stored if row.source == 0]
    source_tensors = [row.tensor for row in rows]
    tree = chosen.sources[0].tree
    paddle = find_paddle_states(source_tensors, tree)
    torchao = find_torchao_states(source_tensors, tree)
    moments = States((*paddle.recipes, *torchao.recipes), paddle.used | torchao.used)

    config = model_config(chosen)
    tensors = {row.tensor.key.name: row.tensor for row in rows if row.tensor.key.state == MODEL}
    kinds = {name: TensorKind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    scheme, found = found_in(kinds, config)
    _refuse_unknown(scheme)
    more_faults = list(header_faults(chosen.sources[0].catalog.extras, found, kinds))
    if not job.reading.lenient:
        more_faults += misshapen(found, kinds, config, stated_shapes(found, tensors, tree))
    refuse_misfits(found._replace(faults=(*found.faults, *more_faults)))

    if not moments.recipes and not found.weights:
        raise UsageError(
            f"{OPTION}: there is no quantised weight and no quantised state here",
            code=NOTHING,
            hint="leave it off; plain FP8 values without scales are cast with --dtype",
        )

    converted = _replace_weights(chosen, tensors, found, writing, config) if found.weights else chosen
    if moments.recipes:
        plain_rows = tuple(row for row in converted.stored if row.tensor.key not in moments.used)
        note = f"{len(moments.used)} quantised tensors are read as {len(moments.recipes)} of F32 ({OPTION})"
        tree_name = f"{chosen.sources[0].path} (dequantised states)"
        converted = with_computed(
            replace(converted, stored=plain_rows),
            moments.recipes,
            tree_name,
            writing,
            option=OPTION,
            dtypes={},
            notes=(note,),
        )
        converted = replace(
            converted, stored=tuple(_put_where_codes_were(row, torchao.paths) for row in converted.stored)
        )
    return converted


def _without_codes(chosen: Chosen, reason: str) -> Chosen:
    """`chosen` without the optimizer states that torchao keeps as codes; the report names what is dropped."""
    coded = [row.tensor for row in chosen.stored if part_of(row.tensor.key.state)]
    remaining = tuple(row for row in chosen.stored if not part_of(row.tensor.key.state))
    return replace(chosen, stored=remaining, dropped=(*chosen.dropped, *left_behind(coded, reason, named=False)))


def _dequantize_blocks(chosen: Chosen, writing: Writing) -> Chosen:
    """Convert GGUF's types of blocks to the model's dtype; tensors of plain numbers keep their own dtype."""
    from ckpt_tool.quantised.gguf_conversion import floats_of_blocks

    recipes = floats_of_blocks(chosen.stored, chosen)
    dtype = _model_dtype(model_config(chosen))
    big_endian = {row.tensor.key: row.tensor.dtype for row in chosen.stored if row.tensor.dtype.block == 1}
    dtypes = {
        recipe.key: _to_little_endian(big_endian[recipe.key]) if recipe.key in big_endian else dtype
        for recipe in recipes
    }
    kind = writing.dtypes.get(MODEL) or writing.dtypes.get("") or dtype.name
    note = f"{len(recipes) - len(big_endian)} quantised tensors are written as {kind} ({OPTION})"
    if big_endian:
        note += f", {len(big_endian)} of big-endian numbers as they are"
    tree_name = f"{chosen.sources[0].path} (dequantised)"
    return with_computed(chosen, recipes, tree_name, writing, option=OPTION, dtypes=dtypes, notes=(note,))


def _to_little_endian(dtype: DType) -> DType:
    """The dtype with the same numbers in little-endian order, which is how ckpt writes them."""
    return DTYPES[dtype.name.removesuffix("_BE")]


def _put_where_codes_were(row: Stored, paths: Mapping[TensorKey, Path]) -> Stored:
    """The row at the path of its codes, so that an optimizer with numbered parameters keeps its entries in place."""
    path = paths.get(row.tensor.key)
    return row._replace(tensor=row.tensor._replace(path=path)) if path else row


def model_config(chosen: Chosen) -> Mapping[str, Any] | None:
    """The config of `--config`, if it has a section on quantisation; else the config.json next to the first source."""
    if chosen.config is not None and section(chosen.config) is not None:
        return chosen.config
    return quantised_config(chosen.sources[0]) or chosen.config


def _replace_weights(
    chosen: Chosen,
    tensors: Mapping[str, LogicalTensor],
    found: FoundWeights,
    writing: Writing,
    config: Mapping[str, Any] | None,
) -> Chosen:
    """`chosen` with floats in place of each weight's codes, and without scales."""
    from ckpt_tool.quantised.codecs.choose_codec import make_recipe, transpose_view
    from ckpt_tool.run.computed import Input

    tree = chosen.sources[0].tree
    recipes: list[Recipe] = []
    for weight in found.weights.values():
        inputs = {name: Input(tensors[name], tree) for name in weight.names}
        recipes.append(make_recipe(weight, TensorKey(weight.made), inputs, small_numbers))

    consumed = found.names | set(found.beside)
    made_names = {weight.made for weight in found.weights.values()}
    made_of_lead = {weight.lead: weight.made for weight in found.weights.values()}

    # Computed tensors take the place of their codes, so the order of the output is that of the source.
    kept_rows = []
    for row in chosen.stored:
        key = row.tensor.key
        if row.source == 0 and key.state == MODEL and key.name in made_of_lead:
            kept_rows.append(row._replace(tensor=row.tensor._replace(key=TensorKey(made_of_lead[key.name]), path=())))
        elif not (row.source == 0 and key.state == MODEL and key.name in consumed):
            kept_rows.append(row)

    dtype = _model_dtype(config)
    converted = with_computed(
        replace(chosen, stored=tuple(kept_rows)),
        recipes,
        f"{chosen.sources[0].path} (dequantised)",
        writing,
        option=OPTION,
        dtypes={TensorKey(name): dtype for name in made_names},
        notes=(_note(found, writing, dtype), *_note_assumed_blocks(found, tensors, config)),
    )

    # Some schemes store weights transposed, and so does the hub with weights of Conv1D. If exactly one of the two
    # applies, the floats have to be transposed.
    transposed = {
        TensorKey(weight.made) for weight in found.weights.values() if weight.turns != _is_of_conv1d(weight, config)
    }
    stored = tuple(
        row._replace(tensor=transpose_view(row.tensor)) if row.tensor.key in transposed else row
        for row in converted.stored
    )

    names = {name: (weight.made,) for weight in found.weights.values() for name in weight.names}
    return replace(
        converted,
        stored=stored,
        names={**converted.names, **names},
        untrue=(*converted.untrue, *CONFIG_KEYS),
        stale=(*converted.stale, *QUANTISER_FILES),
        dropped=(*converted.dropped, *_list_dropped(found, tensors)),
    )


def _is_of_conv1d(weight: Quantised, config: Mapping[str, Any] | None) -> bool:
    """Does the weight belong to a Conv1D, which the hub stores transposed? transformers 5.23
    (`integrations/bitsandbytes.py`) and GPTQ's libraries (`QuantLinear.pack`) transpose it and store it like a
    Linear's."""
    return weight.codes in (TABLED, OF_127, MATRIX) and is_conv1d(weight.made, (config or {}).get("model_type"))


def small_numbers(source: Any) -> Sequence[int]:
    """The integers in a small tensor: a shape (`X_shape`), or the bytes of a text."""
    from ckpt_tool.run.lazy import OpenCatalog

    tensor = source.tensor
    if tensor.numel > (_MOST_TEXT if tensor.dtype.name == "U8" else 8) or not tensor.dtype.name.startswith(("I", "U")):
        raise InconsistentCheckpoint(
            f"a shape is stated by {tensor.dtype.name} {list(tensor.shape)}",
            code=MISFIT,
            key=str(tensor.key),
            hint="want a few integers: fetch the checkpoint again",
        )
    values = OpenCatalog(source.tree, Catalog("", {tensor.key: tensor}))[tensor.key.name].numpy()
    return [int(value) for value in values.reshape(-1)]


def stated_shapes(found: FoundWeights, tensors: Mapping[str, LogicalTensor], tree: Tree) -> dict[str, Shape]:
    """Name of a weight's codes -> the shape that its own state gives (bitsandbytes' 4 bits). Unreadable states are left
    out here; reading the weight reports them."""
    from ckpt_tool.quantised.codecs.bitsandbytes import shape_in_state
    from ckpt_tool.run.computed import Input

    shapes: dict[str, Shape] = {}
    for lead, weight in found.weights.items():
        state = tensors.get(weight.parts.get("state", ""))
        if weight.codes == TABLED and state is not None:
            try:
                shapes[lead] = shape_in_state(state.key.name, small_numbers(Input(state, tree)))
            except CkptError:
                continue
    return shapes


def misshapen(
    found: FoundWeights,
    tensors: Mapping[str, TensorKind],
    config: Mapping[str, Any] | None,
    stated: Mapping[str, Shape],
) -> list[WeightFault]:
    """Weights whose dequantised shape is not the one that the model's config implies, by the rules of its family.

    Codes that were cut short often still fit their scales, so this check is needed. [] without a config or a known
    family. stated: what `stated_shapes` returns.
    """
    is_tabled = is_of_bitsandbytes(config)
    if not config or not config.get("model_type") or not (found.weights or is_tabled):
        return []
    from ckpt_tool.families.registry import find
    from ckpt_tool.families.rewrite import unfitting
    from ckpt_tool.families.table import one_of_each

    # Shapes under the names that the family's rules know: of plain tensors, and of weights once dequantised.
    part_names = found.names - found.weights.keys()
    shapes = {
        name: kind.shape for name, kind in tensors.items() if name not in part_names and name not in found.weights
    }
    leads: dict[str, str] = {}
    for lead, weight in found.weights.items():
        shape = stated.get(lead) if weight.codes == TABLED else weight.floats
        if shape is None or _is_of_conv1d(weight, config) or weight.made in shapes:
            continue
        shapes[weight.made] = shape
        leads[weight.made] = lead
    try:
        one_of_each_shape = {name: shapes[name] for name in one_of_each(shapes)}
        family, dialect = find(config, one_of_each_shape)
        found_unfitting = list(unfitting(family, dialect, shapes, family.facts(config), every=True))
    except CkptError:  # no family is known, or its rules do not cover these names
        return []

    faults = []
    for unfit in found_unfitting:
        wanted_shape = ", ".join("any" if size is None else str(size) for size in unfit.wanted)
        if is_tabled and unfit.name not in leads and len(unfit.shape) == 2 and unfit.shape[1] == 1:
            what = f"a column of {unfit.shape[0]}, by the config [{wanted_shape}]: codes of 4 bits without their parts"
            faults.append(WeightFault(unfit.name, what, lacking=True))
        if _VOCABULARY.search(unfit.name) and _differs_in_rows_alone(unfit):
            continue
        if unfit.name in leads:
            what = f"codes of a weight of {list(unfit.shape)}, by the config [{wanted_shape}]"
            faults.append(WeightFault(leads[unfit.name], what, lacking=False))
    return faults


def _differs_in_rows_alone(unfit: Unfitting) -> bool:
    """Is it a vocabulary that a trainer padded or cut, so that it differs from the config in the number of rows
    only?"""
    columns = unfit.shape[1:]
    wanted_columns = unfit.wanted[1:]
    return len(columns) == len(wanted_columns) and all(
        want in (None, size) for size, want in zip(columns, wanted_columns, strict=True)
    )


def is_of_bitsandbytes(config: Mapping[str, Any] | None) -> bool:
    """Does a config declare bitsandbytes' scheme? If so, codes may be stored as floats (`bnb_4bit_quant_storage`)."""
    return str((section(config or {}) or {}).get("quant_method", "")).lower() == "bitsandbytes"


def _model_dtype(config: Mapping[str, Any] | None) -> DType:
    """The dtype that the config says the model computes in; bf16 if it says none, or one of less than 16 bits."""
    model: Mapping[str, Any] = config or {}
    inner = model.get("text_config")
    for place in (model, inner if isinstance(inner, dict) else model):
        for name in _CONFIGURED:
            dtype = from_name(str(place.get(name)))
            if dtype is not None and dtype.is_float and dtype.bits >= 16:
                return dtype
    return DTYPES["BF16"]


def _note(found: FoundWeights, writing: Writing, dtype: DType) -> str:
    kind = writing.dtypes.get(MODEL) or writing.dtypes.get("") or dtype.name
    return f"{len(found.weights)} quantised weights are written as {kind} ({OPTION})"


def _note_assumed_blocks(
    found: FoundWeights, tensors: Mapping[str, LogicalTensor], config: Mapping[str, Any] | None
) -> list[str]:
    """A note on weights for which nothing declares how many codes share a scale and several numbers fit the shapes.
    Scales that are powers of two are not among them: MX defines blocks of 32."""
    if section(config or {}) is not None:
        return []
    assumed = [
        weight
        for weight in found.weights.values()
        if weight.codes == BYTES and not _is_mx(weight, tensors) and is_block_assumed(weight)
    ]
    if not assumed:
        return []
    first = assumed[0]
    height, width = first.block
    return [
        f"no config says how many codes share a scale in {len(assumed)} of them: the shapes fit {height} x {width} in"
        f" {first.made}, and other blocks too (--config FILE says which)"
    ]


def _is_mx(weight: Quantised, tensors: Mapping[str, LogicalTensor]) -> bool:
    """Is it a weight of the MX formats: 32 codes of a row share a power of two?"""
    scale = tensors[weight.parts["scale"]] if "scale" in weight.parts else None
    return weight.block == (1, 32) and scale is not None and scale.dtype.name in ("U8", "F8_E8M0")


def _list_dropped(found: FoundWeights, tensors: Mapping[str, LogicalTensor]) -> list[dict[str, Any]]:
    """Entries of the report: scales that the floats include now, and scales that a float model has no use for."""
    parts = (tensors[name] for weight in found.weights.values() for name in weight.parts.values())
    return [
        *left_behind(parts, f"{OPTION}: they went into the weights"),
        *left_behind((tensors[name] for name in found.beside), f"{OPTION}: scales of activations and caches"),
    ]


def _refuse_unknown(scheme: DeclaredScheme | None) -> None:
    """Raise UsageError E1464 if this build can't dequantise the scheme."""
    if scheme is not None and scheme.wants_config:
        raise UsageError(
            f"{OPTION}: the weights are quantised by {scheme.scheme} ({scheme.why}), and no config says how: bits, "
            "groups and the order of codes",
            code=UNKNOWN,
            hint="put its quantize_config.json or config.json next to the weights, or name it with --config FILE",
        )
    if scheme is not None and not scheme.known:
        raise UsageError(
            f"{OPTION}: the weights are quantised by {scheme.scheme}, which this build can't undo ({scheme.why})",
            code=UNKNOWN,
            hint="convert them to floats with its own library, or leave it off: they are moved byte for byte",
        )


def refuse_misfits(found: FoundWeights) -> None:
    """Raise one error for all tensors that do not fit: E1460 if all are missing, else E1461."""
    if not found.faults:
        return
    first, *rest = found.faults
    lacking = all(fault.lacking for fault in found.faults)
    kind = Incomplete if lacking else InconsistentCheckpoint
    raise kind(
        f"{first.name}: {first.what}",
        code=LACKING if lacking else MISFIT,
        key=first.name,
        faults=[f"{fault.name}: {fault.what}" for fault in rest],
        hint="is a file missing? Values that are no codes of a scheme are cast with --dtype alone"
        if lacking
        else "do all files belong to one checkpoint, and its config to it?",
    )
