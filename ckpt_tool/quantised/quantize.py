"""`--quantize SCHEME`: floats as codes and scales, to nearest, without data, made while they are read.

    m.weight BF16 [300, 256], --quantize fp8-block   ->   m.weight F8_E4M3 [300, 256], m.weight_scale_inv F32 [3, 2]

It is the last step applied to a model's tensors, under the names and in the layout of the output. Its input is what
would be written without the option: values that `--dequantize` makes or `--dtype` rounds are rounded first, so that one
run and two runs give the same bytes. `layer_choice` decides which weights stay as they are; those whose rows the
scheme's groups do not divide stay too. The config of the output declares the scheme (`written_schemes.config_of`). As a
check, the reader of such folders has to find every weight in what is planned, or the run stops with an internal error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.patterns import Names, refuse_misses
from ckpt_tool.core.tensor import MODEL, TensorKey
from ckpt_tool.errors import InternalError, UsageError
from ckpt_tool.families.base import HUB
from ckpt_tool.formats.hub_folder.subclasses import Subclasses
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.quantised.dequantize import model_config
from ckpt_tool.quantised.keep_together import refuse_codes
from ckpt_tool.quantised.layer_choice import EXPERTS, module_of, why_not
from ckpt_tool.sources.chosen import Chosen, Conversion, dtypes_of, with_computed, written_as
from ckpt_tool.weight_schemes.declared_scheme import found_by, quantisation
from ckpt_tool.weight_schemes.quantised_weights import TURNED, Shape, TensorKind
from ckpt_tool.weight_schemes.written_schemes import Scheme, config_of, laid_out, scheme_of, stated_of

if TYPE_CHECKING:
    from ckpt_tool.quantised.error_stats import Figures
    from ckpt_tool.run.computed import ComputedTree, Recipe

OPTION = "--quantize"
_HEAD = "lm_head"
NOTHING = "E2721"
STACKED = "E2723"
INDIVISIBLE = "rows that the groups of the scheme do not divide"
UNEVEN = "sizes that are no multiples of {}, which its library's product wants"


def quantize(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with codes and scales in place of its weights.

    Raises:
        UsageError: E1465 for weights that are codes already, E2721 if there is nothing to quantise, E2723 for stacked
            experts that the scheme can't store, E2724 for patterns without the option, E2725 for names that are not the
            hub's, E0264 with --plan and --ray.
        InconsistentCheckpoint: E2720, while values are read, for one that is no finite number.
    """
    writing = job.writing
    if writing.quantize is None:
        _refuse_options_alone(writing)
        return chosen

    refuse_names(chosen, job, OPTION)
    scheme = scheme_of(writing.quantize, model_config(chosen))
    rows = {row.tensor.key.name: row for row in chosen.stored if row.tensor.key.state == MODEL}
    refuse_codes([row.tensor for row in rows.values()], OPTION, chosen.sources[0].path)
    stays = _find_staying(rows, scheme, writing.quantize_skip, writing.quantize_only)
    chosen_names = [name for name in rows if name not in stays]
    if not chosen_names:
        raise UsageError(
            f"{OPTION} {scheme.name}: no weight is to be quantised",
            code=NOTHING,
            faults=[f"{number} stay: {why}" for why, number in Counter(stays.values()).most_common()],
            hint="matrices of layers under the hub's names are; --quantize-only PATTERN names others",
        )

    _refuse_stacked(chosen_names, scheme)
    dtypes = dtypes_of(writing)
    floats = {name: written_as(rows[name].tensor, dtypes, chosen.casts) for name in chosen_names}
    parts_by_weight = {
        name: laid_out(scheme, name, rows[name].tensor.shape, _narrow(floats[name])) for name in chosen_names
    }
    config = config_of(scheme, modules_that_stay({name: rows[name].tensor.shape for name in stays}, chosen_names))
    check_found(parts_by_weight, config, OPTION)
    pairs = _recipes(chosen, [rows[name] for name in chosen_names], scheme, parts_by_weight, floats)
    recipes = [recipe for weight_recipes, _ in pairs for recipe in weight_recipes]

    converted = with_computed(
        replace(chosen, stored=_replace_weights(chosen.stored, parts_by_weight)),
        recipes,
        f"{chosen.sources[0].path} (quantised)",
        writing,
        option=OPTION,
        dtypes={},
        notes=_notes({name: rows[name].tensor.shape for name in chosen_names}, stays, scheme),
    )
    if scheme.subclass:
        texts = {name: stated_of(scheme, rows[name].tensor.shape, floats[name]) for name in chosen_names}
        converted = replace(converted, hints=converted.all_hints.having(Subclasses(texts)))

    own_dtypes = {recipe.key: recipe.dtype for recipe in recipes}  # --dtype is for what stays
    tree: Any = converted.sources[-1].tree
    names: dict[str, tuple[str, ...]] = {}
    for name, parts in parts_by_weight.items():
        names[name] = tuple(tensor for tensor, _ in parts.values())
    return replace(
        converted,
        casts={**converted.casts, **own_dtypes},
        names={**converted.names, **names},
        stated={**converted.stated, **config, "dtype": _torch_name(floats.values())},
        reported=Errors(scheme, tuple(figure for _, figure in pairs), tree, dict(Counter(stays.values()))),
    )


def refuse_names(chosen: Chosen, job: Conversion, option: str) -> None:
    """Raise UsageError E2725 if the output has another system's names: quantised folders always have the hub's."""
    names = chosen.all_hints.dialect or chosen.home if job.dialect == "keep" else job.dialect
    if names not in (HUB, "keep"):
        raise UsageError(
            f"{option}: the output is to have {names}'s names, and quantised folders have the hub's",
            code="E2725",
            hint="leave --dialect off",
        )


def _refuse_options_alone(writing: Writing) -> None:
    """Raise UsageError E2724 for --quantize-skip or --quantize-only without --quantize."""
    lone = [name for name, given in (("skip", writing.quantize_skip), ("only", writing.quantize_only)) if given]
    if lone:
        raise UsageError(
            f"{OPTION}-{lone[0]} says which weights are quantised, and nothing asks for that",
            code="E2724",
            hint=f"add {OPTION} SCHEME, or leave it off",
        )


def _find_staying(
    rows: Mapping[str, Stored], scheme: Scheme, skip: Sequence[str], only: Sequence[str]
) -> dict[str, str]:
    """The tensors that are not quantised: name -> the reason. Raises UsageError E0255 for patterns without a match."""
    all_names = Names(rows)
    skipped, misses = all_names.matched(skip)
    only_names, only_misses = all_names.matched(only)
    refuse_misses([*misses, *only_misses], all_names.names)

    reasons: dict[str, str] = {}
    for name, row in rows.items():
        shape = row.tensor.shape
        dtype = row.tensor.dtype
        # What usually stays as it is may be quantised where --quantize-only names it.
        usual_reason = "" if only else why_not(row.tensor)
        if name in skipped:
            reasons[name] = "--quantize-skip"
        elif only and name not in only_names:
            reasons[name] = "not in --quantize-only"
        elif scheme.codes == TURNED and (len(shape) != 3 or EXPERTS not in name):
            reasons[name] = "no stacked experts, which this family's releases quantise alone"
        elif usual_reason:
            reasons[name] = usual_reason
        elif len(shape) < 2 or not dtype.is_float or dtype.bits < 16:
            reasons[name] = "no matrix of floats"
        elif not scheme.fits(shape):
            reasons[name] = INDIVISIBLE
        elif any(size % scheme.multiple for size in shape[-2:]):
            reasons[name] = UNEVEN.format(scheme.multiple)
    return reasons


def _refuse_stacked(taken: Iterable[str], scheme: Scheme) -> None:
    """Raise UsageError E2723 for stacked experts, unless the scheme can store them."""
    stacked = [name for name in taken if EXPERTS in name and not name.endswith(".weight")]
    if scheme.form and stacked:
        raise UsageError(
            f"{OPTION} {scheme.name}: {scheme.method} has no place for experts that are stacked in one tensor",
            code=STACKED,
            key=stacked[0],
            faults=stacked[1:],
            hint="write them one by one with --experts split, or leave them out with --quantize-skip",
        )


def _torch_name(dtypes: Iterable[DType]) -> str | None:
    """torch's name for the most frequent dtype among the weights, as a config states it."""
    ((dtype, _),) = Counter(dtypes).most_common(1)
    return dtype.torch


def _narrow(dtype: DType) -> DType:
    """The dtype of scales for weights of this dtype: F32 instead of F64, since nothing computes in more."""
    return DTYPES["F32"] if dtype.name == "F64" else dtype


def modules_that_stay(stays: Mapping[str, Shape], taken: Iterable[str]) -> list[str]:
    """The modules that the config lists as not quantised: every matrix that stays, and the head, even if it is tied and
    so not stored. stays: name -> shape; taken: names of the weights that are quantised."""
    modules = [module_of(name) for name, shape in stays.items() if name.endswith(".weight") and len(shape) > 1]
    modules = [name for name in modules if "embed" not in name.rpartition(".")[2]]
    head = () if any(module_of(name) == _HEAD for name in taken) else (_HEAD,)
    return list(dict.fromkeys((*modules, *head)))


def _recipes(
    chosen: Chosen,
    rows: Sequence[Stored],
    scheme: Scheme,
    made: Mapping[str, Mapping[str, tuple[str, TensorKind]]],
    floats: Mapping[str, DType],
) -> list[tuple[list[Recipe], Figures]]:
    """For each weight, how to compute the tensors that replace it, and its errors. made, floats: by the weight's
    name."""
    from ckpt_tool.quantised.error_stats import Figures
    from ckpt_tool.quantised.quantize_recipes import Codes, GlobalScale, KnownMaxima, Numbers, Scales, ThreadCache

    thread_cache = ThreadCache()
    known_maxima = KnownMaxima()
    weights: list[tuple[list[Recipe], Figures]] = []
    for row in rows:
        tensor = row.tensor
        parts = made[row.tensor.key.name]
        rounded = floats[tensor.key.name]
        scales = parts["scale"][1].dtype
        figure = Figures(tensor.key.name, parts["codes"][0], tensor.numel)

        # All parts of a weight share the factor of its scales: it is found in one pass over the weight.
        global_scale = GlobalScale() if "global_scale" in parts else None
        recipes: list[Recipe] = []
        for role, (name, kind) in parts.items():
            text = f"{role} of {scheme.name}, of {rounded.name}"
            tensor_fields = (TensorKey(name), kind.shape, (chosen.input(row),), text)
            common = (*tensor_fields, scheme, kind.dtype, rounded, scales, global_scale, thread_cache, known_maxima)
            if role == "codes":
                recipes.append(Codes(*common, figure))
            else:
                recipes.append(Scales(*common) if role == "scale" else Numbers(*common))
        weights.append((recipes, figure))
    return weights


def _replace_weights(
    stored: Iterable[Stored], made: Mapping[str, Mapping[str, tuple[str, TensorKind]]]
) -> tuple[Stored, ...]:
    """The rows, with those of codes and scales in place of each weight. They keep the weight's other fields:
    `with_computed` replaces tensors by key."""
    out: list[Stored] = []
    for row in stored:
        parts = made.get(row.tensor.key.name) if row.tensor.key.state == MODEL else None
        if parts is None:
            out.append(row)
            continue
        for name, _ in parts.values():
            out.append(row._replace(tensor=row.tensor._replace(key=TensorKey(name), path=())))
    return tuple(out)


def check_found(
    made: Mapping[str, Mapping[str, tuple[str, TensorKind]]], config: Mapping[str, Any], option: str
) -> None:
    """Raise InternalError unless the reader of quantised folders finds exactly these weights in the planned tensors."""
    kinds = {name: kind for parts in made.values() for name, kind in parts.values()}
    scheme = quantisation(config)
    if scheme is not None:  # only the tensors of weights are checked here, and experts' biases are not among them
        scheme = scheme._replace(declared=scheme.declared._replace(expert_biases=False))
    found = found_by(scheme, kinds)
    found_names = {weight.made for weight in found.weights.values()}
    if scheme is None or not scheme.known or found.faults or found_names != made.keys():
        raise InternalError(f"{option}: what is laid out is not read back: {found.faults[:1]}")


def _notes(taken: Mapping[str, Shape], stays: Mapping[str, str], scheme: Scheme) -> tuple[str, ...]:
    notes = [f"{len(taken)} weights are quantised as {scheme.name} ({OPTION})"]
    indivisible = [name for name, why in stays.items() if why == INDIVISIBLE]
    if indivisible:
        notes.append(f"{len(indivisible)} weights stay, with {INDIVISIBLE}: {_few(indivisible)}")
    short = [name for name, shape in taken.items() if scheme.is_short(shape)]
    if short:
        notes.append(
            f"{len(short)} weights end in short blocks, as DeepSeek's do; where transformers 5.23 makes floats of them "
            f"it misreads them, and --quantize-skip leaves them as they are: {_few(short)}"
        )
    return tuple(notes)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


@dataclass(frozen=True)
class Errors:
    """The quantisation errors in the report, as `sources.chosen.Reported`."""

    scheme: Scheme
    figures: tuple[Figures, ...]
    tree: ComputedTree
    stays: Mapping[str, int]  # why tensors stay -> how many

    def document(self, *, done: bool) -> dict[str, Any]:
        """The report's entry; once the output is written (done), with the error of each weight."""
        rows = list[dict[str, object]]()
        if done:
            for figure in self.figures:
                self._complete(figure)
                rows.append(figure.document())
            self.tree.close()
        return {
            "quantized": {
                "scheme": self.scheme.name,
                "weights": len(self.figures),
                "stays": dict(self.stays),
                "errors": rows,
            }
        }

    def _complete(self, figure: Figures) -> None:
        """Quantise once more the grains that no thread had completely, or that an interrupted run had written."""
        bits = self.scheme.bits
        for start, stop in [*figure.missing()]:
            self.tree.view(f"{MODEL}/{figure.lead}", start * bits // 8, (stop - start) * bits // 8)
