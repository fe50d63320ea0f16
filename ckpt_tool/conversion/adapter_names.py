"""Converts LoRA and DoRA adapters between PEFT and Megatron: names, layouts and configs.

    megatron-dist of a LoRA run -> --to peft             names and rows by the family's equations (`families.low_rank`),
                                                         adapter_config.json from the run's config
    PEFT's folder               -> --to megatron-dist    the same equations backwards, run_config.yaml from PEFT's

Megatron has one A for all projections that a weight fuses, PEFT one for each. On the way to PEFT, A is copied for each
projection. On the way back the copies are read and compared: equal ones are written once, others as Megatron-Bridge's
canonical LoRA, which has separate adapters for q, k, v, gate and up. If that has no place for them either (experts,
DoRA, ms-swift), nothing is written. Ranks are those of the tensors and alpha is the config's, so the scaling of each
module stays alpha / rank.

Cost: the A's of fused projections are read once more. What it does not do: optimizer states of an adapter's run, and
biases, embeddings and full modules that were trained together with the adapter (refused by name).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD, Piece, Side
from ckpt_tool.conversion.naming import SYSTEMS, holds_adapter, renamed
from ckpt_tool.core.hints import Dialect, Hint
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.families.base import HUB
from ckpt_tool.families.low_rank import (
    CANONICAL,
    GROUPS,
    MEGATRON,
    PEFT,
    RANK,
    SPELLINGS,
    SWIFT,
    adapter_family,
    part_of,
)
from ckpt_tool.formats.adapters.lone import PeftHints, without_config
from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.formats.entry import offered
from ckpt_tool.options.writing import VARIANTS
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.config import config_of

if TYPE_CHECKING:
    from ckpt_tool.families.base import Family

PADDLE = "paddle"
UNEQUAL = "E1435"
UNSAID = "E1436"
PARTS = "E1437"
_CLASSES = {"LoRA": "lora.LoRA", "DoRA": "dora.DoRA", "CanonicalLoRA": "canonical_lora.CanonicalLoRA"}
_OF_KEY = {
    "adapter_q": "linear_q",
    "adapter_k": "linear_k",
    "adapter_v": "linear_v",
    "adapter_gate": "linear_fc1_gate",
    "adapter_up": "linear_fc1_up",
}


def adapters_named(chosen: Chosen, job: Conversion) -> Chosen:
    """Convert an adapter to the names of the output's system. Any other source, and an adapter that has these names
    already, is returned unchanged.

    Raises UsageError E1436 (what the other system can't hold), InputError E1435 (other A's of fused projections),
    Incomplete E1437 (half an adapter), and what finding the family and `families.rewrite.mapping` raise."""
    if job.writing.aoa or not holds_adapter(chosen):
        return chosen
    if job.dialect not in SYSTEMS:
        lost = chosen.all_hints.get(LoraHints) is not None and not job.fmt.holds.run_config
        return chosen.noted(f"{job.fmt.name} has no place for what says the adapter's scaling") if lost else chosen
    source = _source(chosen)
    wanted = job.writing.dialect if job.writing.dialect in VARIANTS else job.dialect
    if chosen.home == PADDLE and wanted != PADDLE:
        _refuse_paddle(chosen)
    if source != HUB or wanted != HUB:
        _refuse_to_lose_scaling(job)
    if source == wanted or (source != HUB and wanted == MEGATRON and job.writing.dialect is None):
        return chosen
    return under_names(chosen, job, wanted)


def _refuse_paddle(chosen: Chosen) -> None:
    """Raise UsageError E1436 for an adapter of PaddleFormers, for which there are no rules: its factors are transposed,
    and its names differ from those of all other systems."""
    raise UsageError(
        "no rules lead from PaddleFormers' adapters to PEFT's or Megatron's",
        code=UNSAID,
        path=chosen.sources[0].path,
        hint="ckpt merge BASE ADAPTER OUT --method lora folds it into the base; --dialect keep moves the tensors as "
        "they are",
    )


def _refuse_to_lose_scaling(job: Conversion) -> None:
    """Raise UsageError E1436 if the output's format cannot store the adapter's rank and scaling."""
    holds = job.fmt.holds
    if not (holds.adapter or holds.run_config):
        way = "peft" if job.dialect == HUB else "megatron-dist"
        raise UsageError(
            f"{job.fmt.name} has no place for the rank and the scaling of an adapter",
            code=UNSAID,
            hint=f"--to {way} keeps an adapter with its config; --dialect keep moves the tensors as they are",
        )


def under_names(chosen: Chosen, job: Conversion, wanted: str = HUB) -> Chosen:
    """Convert the adapter to the names of dialect `wanted`. Raises as `adapters_named`."""
    source = _source(chosen)
    _refuse_others(chosen, source)
    if wanted == HUB:
        _refuse_ranks(chosen)
    chosen = _spelled(chosen, source)
    config, chosen = _config(chosen, job)
    family = _family(chosen, job, source, config)
    settings = _settings(chosen, job, config)
    if wanted == HUB:
        mapped = _mapping(family, source, HUB, chosen, config)
        hints: list[Hint] = [Dialect(HUB), PeftHints(_peft_config(mapped, settings, chosen))]
        lines = list[str]()
    else:
        dialect, mapped, lines = _to_megatron(family, source, wanted, chosen, config, settings)
        hints = [Dialect(MEGATRON), _lora_hints(mapped, dialect, settings)]
        by_columns = (".linear_proj.adapter.weight_magnitude", ".linear_fc2.adapter.weight_magnitude")
        if any(made.name.endswith(by_columns) for made in mapped.made):
            lines.append("Megatron-Bridge takes the norm of a rank's share of linear_proj and linear_fc2: use one rank")
    by = f"the family {family.name}, {source} to {wanted}, of its adapters"
    out = renamed(chosen, mapped, job.writing, by, hints)
    return out.noted(f"names and structure: {by}", *lines)


def _source(chosen: Chosen) -> str:
    names = list(chosen.model)
    if chosen.all_hints.get(PeftHints) is not None or any(name.startswith(PEFT.prefix) for name in names):
        return HUB
    return SWIFT if any(".lora_A." in name for name in names) else MEGATRON  # ms-swift keeps PEFT's own names


def _refuse_others(chosen: Chosen, source: str) -> None:
    """Raise UsageError E1436 for tensors that are no part of a LoRA, Incomplete E1437 for incomplete pairs."""
    parts = {name: part_of(name) for name in chosen.model}
    odd = [name for name, part in parts.items() if part is None]
    if odd:
        raise UsageError(
            f"{len(odd)} tensors of the adapter have no place in the other system: {odd[0]}",
            code=UNSAID,
            path=chosen.sources[0].path,
            key=odd[0],
            faults=odd[1:50],
            hint="ckpt merge BASE ADAPTER folds them into the base; --remove-keys leaves them out",
        )

    seen: dict[tuple[str, str], set[str]] = {}
    for part in parts.values():
        if part is not None:
            seen.setdefault((part.module, part.key), set()).add(part.kind)

    lacking = [
        f"{module}{f' ({key})' if key else ''}: no lora_{'B' if 'a' in kinds else 'A'}"
        for (module, key), kinds in seen.items()
        if not {"a", "b"} <= kinds
    ]
    if lacking:
        raise Incomplete(
            f"the adapter is incomplete: {lacking[0]}",
            code=PARTS,
            path=chosen.sources[0].path,
            faults=lacking[1:50],
            hint="save or fetch it again",
        )


def _refuse_ranks(chosen: Chosen) -> None:
    """Raise UsageError E1436 if several tensor parallel ranks saved the adapter in a form that cannot be converted to
    an adapter of the unsharded weight."""
    run = chosen.all_hints.get(LoraHints)
    parts = [(part.module, part.kind) for part in map(part_of, chosen.model) if part is not None]
    for find_faults in offered("adapter_faults"):
        ranks, faults = find_faults(parts, run)
        if faults:
            raise UsageError(
                f"the adapter of {ranks} tensor ranks can't be made one of the whole weight: {faults[0]}",
                code=UNSAID,
                path=chosen.sources[0].path,
                faults=faults[1:50],
                hint="export it with Megatron-Bridge at as many tensor ranks, or leave it out with --remove-keys",
            )


def _spelled(chosen: Chosen, dialect: str) -> Chosen:
    """Rename the adapter's tensors to the spelling of the dialect's table, without the name of the job's adapter."""
    own = SPELLINGS[dialect]
    stored = []
    for row in chosen.stored:
        part = part_of(row.tensor.key.name)
        if part is not None:
            ending = getattr(own, part.kind)
            if part.key:
                ending = ending.replace(".adapter.", f".adapter.{part.key}.", 1)
            key = row.tensor.key._replace(name=f"{own.prefix}{part.module}{ending}")
            row = row._replace(tensor=row.tensor._replace(key=key))
        stored.append(row)
    return replace(chosen, stored=tuple(stored))


# -- whose adapter it is -----------------------------------------------------------------------------------------------


def _config(chosen: Chosen, job: Conversion) -> tuple[Mapping[str, Any] | None, Chosen]:
    if chosen.config is not None:
        return chosen.config, chosen
    model = config_of(chosen.sources[0], job.reading)
    if model.config is not None and model.derived:
        chosen = chosen.noted(f"the base's config is derived from {model.origin}, as the run's config has them")
    return model.config, chosen


def _family(chosen: Chosen, job: Conversion, source: str, config: Mapping[str, Any] | None) -> Family:
    """The family of the base, by its config, by `--family`, or by the names of the modules."""
    from ckpt_tool.families.registry import find
    from ckpt_tool.families.table import one_of_each

    parts = [part_of(name) for name in chosen.model]
    names = [f"{part.module}.weight" for part in parts if part is not None]
    try:
        return find(
            config,
            one_of_each(dict.fromkeys(names)),
            stated=HUB if source == HUB else MEGATRON,
            family=job.reading.family,
        ).family
    except (UsageError, InputError) as e:
        e.path = e.path or chosen.sources[0].path
        if not job.reading.config and job.reading.family is None:
            e.hint = "an adapter does not say what its base is: pass the base's folder with --config, or --family NAME"
        raise


def _mapping(family: Family, source: str, target: str, chosen: Chosen, config: Mapping[str, Any] | None) -> Mapped:
    from ckpt_tool.families.rewrite import mapping
    from ckpt_tool.plan.mapping import parameter_shapes

    shapes = parameter_shapes(chosen.stored)
    made = mapping(adapter_family(family), source, target, shapes, config)
    known = {piece.src.name for each in made.made for piece in each.pieces}
    odd = [name for name in shapes if name not in known]
    if odd:
        raise UsageError(
            f"no rule of {family.name} says what the adapter of {part_module(odd[0])} is in the other system",
            code=UNSAID,
            path=chosen.sources[0].path,
            key=odd[0],
            faults=odd[1:50],
            hint="ckpt merge folds an adapter of any module; --remove-keys leaves it out",
        )
    return made


def part_module(name: str) -> str:
    """The module that an adapter's tensor belongs to."""
    part = part_of(name)
    return part.module if part else name


# -- from and to Megatron ----------------------------------------------------------------------------------------------


def _to_megatron(
    family: Family,
    source: str,
    wanted: str,
    chosen: Chosen,
    config: Mapping[str, Any] | None,
    settings: AdapterSettings,
) -> tuple[str, Mapped, list[str]]:
    """(the dialect that can hold the adapter, the mapping, lines for the report).

    The dialect has one A for a fused weight if the A's of all its projections are equal, else separate adapters.
    """
    faults: list[CkptError] = []
    filled: list[str] = []
    tried: list[str] = []
    layouts: tuple[str, ...] = (MEGATRON, CANONICAL)
    if wanted == SWIFT:
        layouts = (SWIFT,)
    elif settings.dora:
        layouts = (MEGATRON,)
    for dialect in layouts:
        try:
            mapped = _mapping(family, source, dialect, chosen, config)
        except InconsistentCheckpoint as e:
            if e.code != "E1371":
                raise
            faults.append(_in_part(e, chosen))
            continue
        if dialect == CANONICAL:
            mapped, filled = _filled(mapped, family, chosen, config)
        mapped, unequal, shared = _one_a(mapped, chosen)
        if not unequal:
            lines = [f"{shared} lora_A of fused projections are equal: written once for each weight"] if shared else []
            return dialect, mapped, [*lines, *_apart(mapped, dialect, tried), *filled]
        tried = tried or unequal
        fault = InputError(
            f"{len(unequal)} weights that Megatron fuses are adapted with another lora_A for each part: {unequal[0]}",
            code=UNEQUAL,
            path=chosen.sources[0].path,
            faults=unequal[1:50],
            hint=_no_place(dialect, settings),
        )
        faults.append(fault)

    raise faults[-1]


def _filled(
    mapped: Mapped, family: Family, chosen: Chosen, config: Mapping[str, Any] | None
) -> tuple[Mapped, list[str]]:
    """(the mapping with adapters added for projections without one, lines for the report).

    megatron-bridge 0.6.2 neither saves nor loads a CanonicalLoRA in which only some projections of a module have an
    adapter. An added adapter has the A of another projection and a B of zeros, so it changes nothing.
    """
    held: dict[str, dict[str, dict[str, Made]]] = {}
    for made in mapped.made:
        part = part_of(made.name)
        if part is not None and part.key:
            held.setdefault(part.module, {}).setdefault(part.key, {})[part.kind] = made

    more = list[Made]()
    modules = list[str]()
    for module, keys in held.items():
        group = next(each for each in GROUPS if next(iter(keys)) in each)
        for key in (each for each in group if each not in keys):
            a, b = (keys[next(iter(keys))][kind] for kind in ("a", "b"))
            source = part_of(a.name)
            other = f".{source.key}." if source is not None else ""
            like = a.name.replace(other, f".{key}.")
            name = b.name.replace(other, f".{key}.")
            moved = tuple(piece._replace(dst=piece.dst._replace(name=like)) for piece in a.pieces)
            rows = _rows(name, family, chosen, config)
            shape = (rows, b.shape[1])
            zeros = Piece(shape, Side(PAD, 0, (b.shape[1], 1)), Side(name, 0, (b.shape[1], 1)))
            more += [Made(like, a.shape, moved), Made(name, shape, (zeros,), like=b.pieces[0].src.name)]
            modules.append(f"{module}.{key}")

    if not more:
        return mapped, []

    line = f"{len(modules)} projections have no adapter and one that adds nothing (B of zeros): {modules[0]}"
    return mapped._replace(made=(*mapped.made, *more)), [f"{line}: CanonicalLoRA wants all of a weight"]


def _rows(name: str, family: Family, chosen: Chosen, config: Mapping[str, Any] | None) -> int:
    """The number of outputs of a canonical B by the family's rule. Raises as `check_known` if a size is unknown."""
    from ckpt_tool.families.rewrite import sizes_of
    from ckpt_tool.families.sizes import check_known
    from ckpt_tool.families.table import form_of, instances
    from ckpt_tool.plan.mapping import parameter_shapes

    own = adapter_family(family)
    shapes = parameter_shapes(chosen.stored)
    table = own.table(HUB)
    facts = own.facts(config or {})
    sizes, reasons = sizes_of(own, table, instances(table.left, shapes)[0], shapes, facts)
    terms = [term for rule in own.table(CANONICAL).rules for term in rule.left]
    pattern = next(term.pattern for term in terms if term.name and term.name.form == form_of(name)[0])
    check_known(
        {axis: name for axis in pattern.axes if axis != RANK and not axis.isdigit()}, sizes, reasons, family.name
    )
    return pattern.shape({**sizes, RANK: 1})[0]


def _apart(mapped: Mapped, dialect: str, unequal: Sequence[str]) -> Iterator[str]:
    """What is to be said of an adapter of several ranks, or that is written apart for each of what a weight fuses."""
    if dialect != CANONICAL:
        return
    why = f"lora_A differs between {unequal[0]}" if unequal else "projections that Megatron fuses are adapted in part"
    yield f"written as canonical LoRA (CanonicalLoRA of Megatron-Bridge), apart for q, k, v, gate and up: {why}"
    parts = [part_of(made.name) for made in mapped.made]
    if any(part is not None and part.key in ("adapter_gate", "adapter_up") for part in parts):
        yield "Megatron-Bridge loads gate and up of a canonical LoRA with the tensor ranks alone that saved it: --tp N"


def _no_place(dialect: str, settings: AdapterSettings) -> str:
    why = {
        SWIFT: "ms-swift's layout has one A for a fused weight",
        CANONICAL: "canonical LoRA keeps experts' gate and up in one",
    }
    reason = "Megatron-Bridge's DoRA has one A for a fused weight" if settings.dora else why.get(dialect, "")
    return f"{reason}: nothing is averaged; ckpt merge BASE ADAPTER folds it into the base".lstrip(": ")


def _in_part(e: CkptError, chosen: Chosen) -> Incomplete:
    return Incomplete(
        f"projections that Megatron fuses are adapted in part: {e.message}",
        code=PARTS,
        path=chosen.sources[0].path,
        key=e.key,
        faults=e.faults[:50],
        hint="ckpt merge BASE ADAPTER folds it into the base",
    )


def _one_a(mapped: Mapped, chosen: Chosen) -> tuple[Mapped, list[str], int]:
    """(the mapping with one source for each A, lines on weights whose A's differ, how many A's are not written
    again)."""
    made = list[Made]()
    unequal = list[str]()
    again = list[str]()
    for each in mapped.made:
        names = list(dict.fromkeys(piece.src.name for piece in each.pieces))
        part = part_of(each.name)
        if part is None or part.kind != "a" or len(names) < 2:
            made.append(each)
            continue
        other = next((name for name in names[1:] if not _equal(chosen, names[0], name)), None)
        if other is not None:
            unequal.append(f"{part_module(names[0])} and {part_module(other)}, of {part.module}")
        again += names[1:]
        made.append(each._replace(pieces=tuple(piece for piece in each.pieces if piece.src.name == names[0])))
    return mapped._replace(made=tuple(made), dropped=(*mapped.dropped, *again)), unequal, len(again)


def _equal(chosen: Chosen, one: str, other: str) -> bool:
    from ckpt_tool.run.compare import compare

    rows = chosen.model
    first, a = rows[one]
    second, b = rows[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    (found,) = compare([(a, b)], chosen.sources[first].tree, chosen.sources[second].tree)
    return not found


# -- what the configs say ----------------------------------------------------------------------------------------------


class AdapterSettings(NamedTuple):
    """The settings of an adapter, whichever system they come from."""

    rank: int  # of most modules
    alpha: float  # of all, so that the scaling of each is alpha / its rank
    dropout: float
    dora: bool
    base: str  # the model that the adapter was trained on
    plain: Mapping[str, Any]  # PEFT's config or the run's section, as the source has it
    normalized: bool = False  # experts have rank / topk (`normalize_moe_lora`)
    rslora: bool = False  # the scaling is alpha / sqrt(rank)


def _ranks(chosen: Chosen) -> dict[str, int]:
    """{module, and which part of a canonical LoRA: rank}, by the shapes of the A's."""
    found = {}
    for name, row in chosen.model.items():
        part = part_of(name)
        if part is not None and part.kind == "a" and row.tensor.shape:
            found[f"{part.module}.{part.key}" if part.key else part.module] = row.tensor.shape[0]
    return found


def _topk(config: Mapping[str, Any] | None) -> int:
    found = (config or {}).get("num_experts_per_tok")
    return found if type(found) is int and found > 0 else 0


def _settings(chosen: Chosen, job: Conversion, config: Mapping[str, Any] | None) -> AdapterSettings:
    """What the source's config says. Raises UsageError E1436 where it says nothing of the scaling, or one that the
    other system has no word for."""
    path = chosen.sources[0].path
    hints = chosen.all_hints
    peft = hints.get(PeftHints)
    lora = hints.get(LoraHints)
    ranks = _ranks(chosen)
    common = Counter(ranks.values()).most_common(1)[0][0]
    dora = any(part is not None and part.kind == "magnitude" for part in map(part_of, chosen.model))
    if peft is not None:
        return _of_peft(peft.config, ranks, common, path, _topk(config), lenient=job.reading.lenient)

    if lora is None or not lora.peft:
        if _source(chosen) == HUB:
            raise without_config(chosen.sources[0].tree)
        raise UsageError(
            "nothing says the adapter's scaling: neither run_config.yaml nor ms-swift's arguments are there",
            code=UNSAID,
            path=path,
            hint="put the run's run_config.yaml back next to the items, or say the run's alpha with --lora-alpha N",
        )

    dim = lora.peft.get("dim")
    alpha = lora.peft.get("alpha")
    if type(dim) is not int or not isinstance(alpha, int | float):
        raise UsageError(
            f"the run's config says rank {str(dim)[:40]} and alpha {str(alpha)[:40]}, want two numbers",
            code=UNSAID,
            path=path,
            hint="get run_config.yaml again",
        )

    dropout = _float(lora.peft.get("dropout"))
    rank = dim if dim in ranks.values() else common
    rslora = lora.peft.get("use_rslora") is True
    return AdapterSettings(rank, float(alpha), dropout, dora, lora.base, lora.peft, rslora=rslora)


def _of_peft(
    config: Mapping[str, Any], ranks: Mapping[str, int], common: int, path: str, topk: int, *, lenient: bool
) -> AdapterSettings:
    from ckpt_tool.formats.adapters.settings import settings_of

    said = settings_of(config, path, lenient=lenient)
    scaled = {module: said.scaling(module, rank) for module, rank in ranks.items()}
    alphas = {scaled[module] * rank for module, rank in ranks.items()}
    if len(alphas) > 1:
        first = next(iter(scaled))
        other = next(module for module in scaled if scaled[module] * ranks[module] != scaled[first] * ranks[first])
        raise UsageError(
            f"Megatron has one alpha for all modules, and this adapter scales {first} by {scaled[first]:g} at rank "
            f"{ranks[first]}, {other} by {scaled[other]:g} at rank {ranks[other]}",
            code=UNSAID,
            path=path,
            hint="ckpt merge BASE ADAPTER folds it into the base",
        )
    dense = [rank for module, rank in ranks.items() if ".experts." not in module]
    rank = Counter(dense).most_common(1)[0][0] if dense else common
    others = {each for module, each in ranks.items() if ".experts." in module}
    shared = others == {rank // topk} and rank % topk == 0 if topk else False
    odd = [
        f"{module}: rank {each}"
        for module, each in ranks.items()
        if each != rank and not (shared and ".experts." in module)
    ]
    if odd:
        raise UsageError(
            f"Megatron has one rank for all modules: most have {rank}, {odd[0]}",
            code=UNSAID,
            path=path,
            faults=odd[1:50],
            hint="ckpt merge BASE ADAPTER folds it into the base",
        )
    own = _float(config.get("lora_dropout"))
    return AdapterSettings(
        rank, alphas.pop(), own, said.dora, said.base, config, normalized=shared and others != {rank}
    )


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _peft_config(mapped: Mapped, settings: AdapterSettings, chosen: Chosen) -> dict[str, Any]:
    """adapter_config.json as PEFT writes it, of what is said."""
    ranks = {}
    for made in mapped.made:
        part = part_of(made.name)
        if part is not None and part.kind == "a":
            ranks[part.module] = made.shape[0]

    odd = {module: rank for module, rank in ranks.items() if rank != settings.rank}
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": settings.base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _number(settings.alpha),
        "lora_dropout": settings.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": odd,
        "target_modules": _targets(ranks),
        "task_type": "CAUSAL_LM",
        "use_dora": settings.dora,
        "use_rslora": settings.rslora,
    }


def _targets(modules: Iterable[str]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in modules})


def _lora_hints(mapped: Mapped, dialect: str, settings: AdapterSettings) -> LoraHints:
    """The section `peft` of run_config.yaml as Megatron-Bridge reads it back."""
    parts = (part_of(made.name) for made in mapped.made)
    found = [part for part in parts if part is not None]
    kind = "CanonicalLoRA" if dialect == CANONICAL else "LoRA"
    if settings.dora:
        kind = "DoRA"
    peft: dict[str, Any] = {
        "_target_": f"megatron.bridge.peft.{_CLASSES[kind]}",
        "target_modules": sorted({_OF_KEY.get(part.key) or part.module.rpartition(".")[2] for part in found}),
        "dim": settings.rank,
        "alpha": _number(settings.alpha),
        "dropout": settings.dropout,
    }
    if any(".experts." in part.module for part in found) and kind != "DoRA":
        peft["share_expert_adapters"] = False
        peft["normalize_moe_lora"] = settings.normalized
    return LoraHints(peft, {}, settings.base)
