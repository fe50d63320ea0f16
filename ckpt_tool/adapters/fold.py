"""`ckpt merge BASE ADAPTER... OUT --method lora`: adapters folded into their base, whatever its format and dialect.

    base named as the adapter names it -> each part matched -> recipes (`arithmetic`) -> named as the output wants it

The base may be any checkpoint: a fused and sharded one is first seen under the hub's names (strided chunks, no byte
moves), folded, and written back as it was, or as `--to` and `--dialect` say. Folded tensors are computed while they are
written, tile by tile, and rounded once to the base's dtype, or to `--dtype`. Several adapters are folded one after
another, each times its `--weight`: W + w1 s1 B1 A1 + w2 s2 B2 A2, which is what PEFT merges after `set_scale` (and what
its `add_weighted_adapter` gives by `cat`; its `linear` mixes A of one with B of the other, and is not this).

Before a byte moves, every reason why the adapter can't be folded is reported at once: targets that the base lacks,
shapes, ranks, leftovers. Other states of training (optimizer, masters, averages) are dropped, and the report names
them: they would belong to other weights. A single source has its adapter inside (`inside`). What it does not do: merge
other methods than LoRA's family (`adapter` names them), undo a merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.adapters.adapter import Adapter, open_adapter
from ckpt_tool.adapters.changed_base import NO_FLOATS, apply_changes
from ckpt_tool.adapters.inside import split_inside
from ckpt_tool.adapters.targets import Matched, Tokens, match
from ckpt_tool.conversion.adapter_inside import inside_of, weights_of
from ckpt_tool.conversion.passes import NAMES, passed, selected
from ckpt_tool.conversion.tied_head import TIED as TIE
from ckpt_tool.conversion.unused_options import refuse_dropped_model, refuse_unused_reading
from ckpt_tool.conversion.vocabulary import EMBEDDINGS
from ckpt_tool.conversion.writing import write
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import MODEL, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.adapters.settings import LARGEST
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.quantised.keep_together import found_in, model_kinds
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind, refuse_saved_plan
from ckpt_tool.sources.config import config_of
from ckpt_tool.sources.opening import Opened, open_source

OPTION = "--method lora"
USAGE = "E1420"
WEIGHTS = "E1421"
OTHER_BASE = "E1424"
TIED = "E1425"
PARTS = "E1434"
HUB = "hf"
FUSED = "hf-fused"
PADDLE = "paddle"
_HEADS = ("lm_head.weight", "embed_out.weight")


def fold(
    sources: list[str],
    dst: str,
    reading: Reading,
    writing: Writing,
    progress: Progress,
    *,
    weights: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Merge the adapters `sources[1:]` into the base `sources[0]`. weights: one for each adapter, () for 1.

    Raises UsageError E1420, E2401, E2402 (sources, states), E1421 (weights), E1422, E1426 (no such adapter), E1425
    (tied embeddings), E1427 (a base without floats); InconsistentCheckpoint E1424 (an adapter of another base, all
    faults), E1429 (two adapters that replace the same tensor); and what reading and writing raise.
    """
    refuse_saved_plan(writing, OPTION)
    refuse_dropped_model("merge", writing)
    if writing.states and not {MODEL, "all"} & set(writing.states):
        raise UsageError(
            f"--state {','.join(writing.states)}: an adapter is folded into the model",
            code="E2401",
            hint="leave --state off",
        )
    if beyond := [weight for weight in weights if abs(weight) > LARGEST]:
        raise UsageError(
            f"--weight {beyond[0]:g} exceeds the range of fp32", code=WEIGHTS, hint="adapters are folded in fp32"
        )
    count = max(1, len(sources) - 1)  # a single source has its adapter inside
    if weights and len(weights) != count:
        raise UsageError(
            f"{len(weights)} weights for {count} adapters",
            code=WEIGHTS,
            hint="--weight once for each adapter, in their order; the base has none",
        )
    base = open_source(sources[0], reading)
    job = Conversion.of(base, reading, writing)
    if len(sources) == 1:
        refuse_unused_reading(reading, base)
        everything = _add_masters(base, job)
        everything, adapter = split_inside(everything, base, reading, weights[0] if weights else 1.0)
        named, matched = _match_adapters(everything, [adapter], job)
        folded = apply_changes(named, [adapter], matched, writing, option=OPTION)
        return write(_as_wanted(folded, everything, named, job), dst, job, progress)

    adapters = [
        open_adapter(src, reading, weight, config_of(base, reading).config)
        for src, weight in zip(sources[1:], weights or (1.0,) * count, strict=True)
    ]
    refuse_unused_reading(reading, base, *(adapter.opened for adapter in adapters))
    everything = _model(base, job._replace(writing=replace(writing, remove_keys=(), keep_keys=())))
    inside = inside_of(everything)
    if inside is not None:
        raise UsageError(
            f"the base has an adapter inside already ({len(inside.adapter)} tensors)",
            code=USAGE,
            path=base.path,
            hint="fold that one first: ckpt merge BASE OUT --method lora",
        )
    named, matched = _match_adapters(everything, adapters, job)
    renamed = named
    if writing.remove_keys or writing.keep_keys:
        renamed = _model(base, job)
        renamed = _rename_base(renamed, job, named.all_hints.dialect if named is not everything else None)
    folded = apply_changes(renamed, adapters, matched, writing, option=OPTION)
    return write(_as_wanted(folded, everything, named, job), dst, job, progress)


def _add_masters(base: Opened, job: Conversion) -> Chosen:
    """The base's weights as `_model` gives them, with fp32 masters for weights that exist only as such (ZeRO 3)."""
    alone = _model(base, job)
    lacking = weights_of(selected(base, job))
    model = alone.model
    masters = []
    for name, row in lacking.items():
        if name not in model:
            masters.append(row._replace(tensor=row.tensor._replace(key=TensorKey(name, MODEL), path=())))
    return replace(alone, stored=(*alone.stored, *masters))


def _model(base: Opened, job: Conversion) -> Chosen:
    """The base's weights that the options select; its other states are dropped, and the report names them."""
    chosen = selected(base, job)
    others = [row.tensor for row in chosen.stored if row.tensor.key.state != MODEL]
    requested = next((tensor.key.state for tensor in others if tensor.key.state in job.writing.states), None)
    if requested is not None:
        raise UsageError(
            f"--state {requested}: it belongs to the weights before the adapter",
            code="E2401",
            hint="leave it off: folding writes the model alone",
        )
    stale = left_behind(others, "it belongs to the weights as they were before the adapter", named=False)
    stored = tuple(row for row in chosen.stored if row.tensor.key.state == MODEL)
    return replace(chosen, stored=stored, dropped=(*chosen.dropped, *stale))


# -- names -------------------------------------------------------------------------------------------------------------


def _rename_base(chosen: Chosen, job: Conversion, dialect: str | None) -> Chosen:
    """The base under the names that adapters use. dialect: None for the hub's names, if the source says or shows that
    it has other ones."""
    if job.writing.dialect == "keep" and dialect is None:
        return chosen
    untie = job.writing.tied_head if job.writing.tied_head == "untie" else None
    requested = replace(job.writing, dialect=dialect, aoa=None, tied_head=untie)
    return passed(chosen, job._replace(writing=requested, fmt=registry.of_dialect(HUB)), NAMES)


def _match_adapters(everything: Chosen, adapters: Sequence[Adapter], job: Conversion) -> tuple[Chosen, list[Matched]]:
    """The base under the first names that all adapters fit, and their changes. Raises InconsistentCheckpoint E1424 if
    they fit none."""
    tried: list[tuple[Chosen, list[Matched]]] = []
    unnamed: CkptError | None = None
    reading = job.reading
    for dialect in _dialects(adapters, job.writing):
        try:
            named = _rename_base(everything, job, dialect)
        except (UsageError, InputError) as e:
            if not tried and dialect in (None, PADDLE):
                raise
            unnamed = e  # most often the family has no such dialect
            continue
        tried.append((named, _against(named, adapters, reading)))
        if not any(matched.faults for matched in tried[-1][1]):
            named, matches = tried[-1]
            _refuse_parts(adapters, matches, reading)
            _refuse_tied(named, adapters, matches, reading)
            return named, matches
        if not any(matched.missing for matched in tried[-1][1]):
            break  # all names exist, so the shapes differ: other names would not help
    _refuse_quantised(everything, reading)
    raise _report_other_base(adapters, *tried[0], unnamed)


def _refuse_quantised(base: Chosen, reading: Reading) -> None:
    """Raise UsageError E1427 for an adapter that does not fit a quantised base: until the base is dequantised, it is
    unknown whether the adapter belongs to another one."""
    kinds = model_kinds(row.tensor for row in base.stored)
    scheme, weights = found_in(kinds, _config(base, reading), checked=False) if kinds else (None, None)
    is_unknown = scheme is not None and not scheme.known
    if weights is None or (not weights.weights and not is_unknown):
        return
    named = f" by {scheme.scheme}" if scheme is not None else ""
    lead = next(iter(weights.weights), None)
    hint = "--dequantize converts the base's weights to floats, into which the adapter is folded"
    if is_unknown:
        hint = "convert the base to floats with its own library, and fold the adapter into those"
    raise UsageError(
        f"the base's weights are quantised{named}: adapters are folded into floats",
        code=NO_FLOATS,
        key=lead,
        path=base.sources[0].path,
        hint=hint,
    )


def _dialects(adapters: Sequence[Adapter], writing: Writing) -> tuple[str | None, ...]:
    """The dialects in which the adapters may name the base, in the order in which they are tried.

    None: the base's own names, unless it says that they are foreign. Then those that transformers 5 has in memory (a
    layer's experts in two tensors), then the hub's. For adapters of PaddleFormers, Paddle's dialects.
    """
    paddle = {adapter.paddle for adapter in adapters}
    if len(paddle) > 1:
        raise UsageError(
            "adapters of PEFT and of PaddleFormers name one base in two ways",
            code="E2402",
            hint="fold them one after another, each into the output of the last",
        )
    if writing.dialect == "keep":
        return (None,)
    return (PADDLE, "paddle-nlp", "paddle-hf") if True in paddle else (None, FUSED, HUB)


def _report_other_base(
    adapters: Sequence[Adapter], named: Chosen, found: Sequence[Matched], unnamed: CkptError | None
) -> InconsistentCheckpoint:
    """The error E1424 for an adapter of another base. unnamed: why the base could not be given other names."""
    faults = [(adapter, fault) for adapter, matched in zip(adapters, found, strict=True) for fault in matched.faults]
    adapter, first_match = faults[0]
    hint = "pass the base that it was trained on"
    if adapter.settings.base:
        hint += f": {adapter.settings.base}"
    names = {row.tensor.key.name for row in named.stored}
    missing = [name for matched in found for name in matched.missing]
    if any(name.endswith(_HEADS) for name in missing) and any(name.endswith(EMBEDDINGS) for name in names):
        hint += "; where the base's head is its embedding, --tied-head untie writes it for the adapter"
    if not any(matched.changes for matched in found):
        hint += "; or say whose names the base has with --family NAME, with the model's config.json next to it"
        hint += f" (as the hub's they could not be read: {unnamed.message})" if unnamed is not None else ""
    return InconsistentCheckpoint(
        f"the adapter is not one of this base: {first_match}",
        code=OTHER_BASE,
        path=adapter.opened.path,
        faults=[fault for _, fault in faults[1:200]],
        hint=hint,
    )


def _refuse_parts(adapters: Sequence[Adapter], found: Sequence[Matched], reading: Reading) -> None:
    """Raise Incomplete E1434 for an adapter that lacks tensors named in its config, or that has no tensor at all."""
    for adapter, matched in zip(adapters, found, strict=True):
        lacks = () if reading.lenient else matched.absent
        if not lacks and matched.changes:
            continue
        raise Incomplete(
            f"the adapter is incomplete: {lacks[0] if lacks else 'it holds no tensor'}",
            code=PARTS,
            path=adapter.opened.path,
            faults=lacks[1:200],
            hint="fetch or save it again" + ("; --lenient folds the part that is there" if lacks else ""),
        )


def _against(named: Chosen, adapters: Sequence[Adapter], reading: Reading) -> list[Matched]:
    """Match each adapter with the base under its present names."""
    base = {row.tensor.key.name: row.tensor for row in named.stored}
    config = _config(named, reading)
    return [match(adapter.tensors, base, adapter.settings, config) for adapter in adapters]


def _config(chosen: Chosen, reading: Reading) -> Mapping[str, Any]:
    """The base's config, {} if there is none."""
    return chosen.config or config_of(chosen.sources[0], reading).config or {}


def _refuse_tied(named: Chosen, adapters: Sequence[Adapter], found: Sequence[Matched], reading: Reading) -> None:
    """Raise UsageError E1425 for an adapter that changes an embedding which is the head too, unless it was trained
    so."""
    names = {row.tensor.key.name for row in named.stored}
    if any(name.endswith(_HEADS) for name in names) or not _ties(_config(named, reading)):
        return
    for adapter, matched in zip(adapters, found, strict=True):
        touched = []
        for name, changes in matched.changes.items():
            if name.endswith(EMBEDDINGS) and not all(isinstance(change, Tokens) for change in changes):
                touched.append(name)
        if touched and not adapter.settings.tied and not reading.lenient:
            raise UsageError(
                f"the adapter changes {touched[0]}, which is the base's head too, and it was trained with the "
                "head as it was",
                code=TIED,
                path=adapter.opened.path,
                key=touched[0],
                hint="--tied-head untie writes them apart, as they were trained; --lenient changes both, as "
                "PEFT's merge does",
            )


def _ties(config: Mapping[str, Any]) -> bool:
    """Is the embedding also the head of a base without a tensor for the head? If the config does not say, it is in
    language models."""
    tied = config.get(TIE)
    classes = config.get("architectures")
    words = classes if isinstance(classes, list) else []
    if tied is not None:
        return tied is True
    return any("CausalLM" in str(architecture) or "LMHead" in str(architecture) for architecture in words)


def _as_wanted(folded: Chosen, everything: Chosen, named: Chosen, job: Conversion) -> Chosen:
    """The folded base under the output's names: those it came with, unless `--to` or `--dialect` say otherwise."""
    fmt = job.fmt
    reading = job.reading
    writing = job.writing
    home = _home(everything, named, reading)
    if reading.family:
        job = job._replace(reading=replace(reading, family=reading.family.partition(":")[0]))
    requested = writing.dialect not in (None, "keep") or writing.aoa
    if requested or (
        writing.dialect is None
        and fmt.holds.dialect not in ("keep", home)
        and fmt.name != everything.sources[0].catalog.format
    ):
        if not requested and named.all_hints.dialect == FUSED:  # these names exist in memory only, no format has them
            job = job._replace(writing=replace(writing, dialect=fmt.holds.dialect))
        return passed(folded, job, NAMES)
    if home is None:  # the base came with the adapters' names
        return folded
    back = passed(folded, job._replace(writing=replace(writing, dialect=home)), NAMES)
    return replace(back, hints=everything.hints, config=everything.config)


def _home(everything: Chosen, named: Chosen, reading: Reading) -> str | None:
    """The dialect that the base came in; None if it already had the names that the adapters use."""
    by_key = {row.tensor.key: row for row in named.stored}
    if all(by_key.get(row.tensor.key) == row for row in everything.stored):  # nothing but an untied head has come
        return None
    from ckpt_tool.families.registry import find
    from ckpt_tool.plan.mapping import parameter_shapes

    catalog = everything.sources[0].catalog
    dialect = catalog.hints.dialect or registry.by_name(catalog.format).holds.dialect
    named_dialect = dialect if dialect not in ("keep", HUB) else None
    return find(
        _config(named, reading), parameter_shapes(everything.stored), stated=named_dialect, family=reading.family
    ).dialect
