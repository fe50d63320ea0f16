"""Converts the names and structure of the chosen tensors to those of the output.

If the source's dialect is known and differs from the target's, the families' equations convert the names; otherwise
names are kept. The report states which was done. (`--aoa FILE` is a pass of its own, `systems.paddle.passes`.) The
mapping is applied to the locations of the elements (`plan.mapping`), so no data moves here, and every later step is the
same. Inputs of a mapping that are no moves are computed before (`mapping_inputs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.conversion.mapping_inputs import lines_alike, moves_alone
from ckpt_tool.conversion.optimizer_groups import groups_by_name, renamed_groups
from ckpt_tool.conversion.tied_head import TIED, as_the_hub_has_it, refuse_to_lose_copies
from ckpt_tool.conversion.vocabulary import is_vocabulary
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.hints import Dialect, Hint
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InputError, UsageError, near_misses
from ckpt_tool.formats.adapters.lone import PeftHints
from ckpt_tool.formats.entry import of_dialect
from ckpt_tool.formats.hub_folder.saved_by import SavedBy
from ckpt_tool.formats.state_dict.roots import Roots
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import DIALECTS, VARIANTS, Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.quantised.keep_together import refuse_to_part
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind
from ckpt_tool.sources.config import ModelConfig, check_config, config_of, file_config
from ckpt_tool.sources.source_names import SourceNames, names_of_source

if TYPE_CHECKING:
    from ckpt_tool.families.base import Family
    from ckpt_tool.families.registry import FamilyMatch


HUB = "hf"
SYSTEMS = (HUB, "megatron")  # an adapter is converted between these by a pass of its own
DEQUANTIZE = "--dequantize converts it to floats on the way"
# Codes of errors that `families.registry.find` raises.
NO_FAMILY = "E1372"
STRANGE = "E1373"
SEVERAL = "E1232"
_SHAPE = "E1370"  # raised by `families.rewrite.mapping` for a shape that does not fit
# Names that no model on the hub has, by which a source of another system is recognised without loading families.
_MEGATRON = frozenset(f"decoder.layers.0.self_attention.linear_{each}.weight" for each in ("qkv", "kv_down_proj"))
_NLP = frozenset(
    f"{root}.embed_tokens.weight" for root in ("llama", "qwen2", "qwen2_moe", "mixtral", "deepseek_v3", "ernie")
)
_TRAINERS = frozenset(("layers.0.attn.output_proj.weight", "blocks.0.attention.w_out.weight"))  # torchtune, OLMo-core
_TITAN = (".tok_embeddings.weight", ".attention.wq.", ".attention.wo.", ".attention.qkv_linear.", ".feed_forward.w1.")
_FLAX = (".kernel", "_einsum.w")  # ends of MaxText's names and of Gemma's library
_INWARD = (".down_proj.weight", ".o_proj.weight")  # (hidden, inputs) in the hub
_MATRICES = (
    *_INWARD,
    *(f".{each}_proj.weight" for each in ("gate", "up", "k", "v", "q")),
)  # seldom square, all of them


def named(chosen: Chosen, job: Conversion) -> Chosen:
    """Convert `chosen` to the names of `--dialect` (default: the format's own dialect). Unchanged if `--aoa` statements
    have named the tensors already. Raises UsageError, InputError."""
    reading = job.reading
    writing = job.writing
    target = job.dialect
    if writing.aoa:
        return chosen

    if writing.experts and target != HUB:
        refuse_experts(writing, _other_names(job))

    if target == "keep":
        if reading.family and writing.dialect is None:
            chosen = chosen.noted(f"--family: {job.fmt.name} keeps names; --dialect NAME changes them")
        return _note_names_of_tool(chosen, job)

    if target in SYSTEMS and holds_adapter(chosen):  # named by a pass of its own
        refuse_experts(writing, "an adapter has its experts as the library that trained it has them")
        return chosen

    source = dialect_of(chosen)
    of_tool = names_of_source(chosen) if source in (None, HUB) else None
    if of_tool is not None:
        asked = writing.dialect is not None or reading.family is not None
        if target == HUB and not asked and of_tool.kept:
            return chosen.noted(of_tool.kept)
        return _by_family(chosen, job, of_tool.dialect, of_tool)

    if writing.dialect is None and not reading.family and not writing.experts:
        if source == target != "hf":
            return chosen
        foreign = _looks_foreign(row.tensor for row in chosen.stored) or _is_beside_another_config(chosen, reading)
        if target == HUB and source in (None, HUB) and not foreign:
            return chosen

    return _by_family(chosen, job, source)


def _note_names_of_tool(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen`, with a note if a tool's names (MLX) are kept in a format that can't record whose names they are."""
    of_tool = names_of_source(chosen) if chosen.all_hints.get(SavedBy) is not None else None
    if of_tool is None or job.fmt.holds.dialect == HUB:
        return chosen

    from ckpt_tool.families.table import one_of_each
    from ckpt_tool.plan.mapping import parameter_shapes

    shapes = parameter_shapes(chosen.stored)
    alike = {name: shapes[name] for name in one_of_each(shapes)}
    try:
        found = of_tool.find_family(alike, config_of(chosen.sources[0], job.reading).config, job.reading.family)
    except (UsageError, InputError):
        found = None
    if found is not None and found.dialect == HUB:
        return chosen
    tool = of_tool.dialect.upper()
    return chosen.noted(
        f"names and values stay as {tool} has them, and {job.fmt.name} has no place that says so: what is converted "
        "from it later may be taken for the hub's"
    )


def holds_adapter(chosen: Chosen) -> bool:
    """Is it an adapter alone, under PEFT's names or Megatron's?"""
    from ckpt_tool.families.low_rank import is_adapter

    return is_adapter(chosen.model) or chosen.all_hints.get(PeftHints) is not None


def _looks_foreign(tensors: Iterable[LogicalTensor]) -> bool:
    """Do the tensors of a source without a dialect, or with the hub's, look like those of another system?

    It is a quick check that avoids loading the families: names that no hub model has, or a matrix stored as (inputs,
    outputs). Paddle's trainers also write folders that differ from Hugging Face's only in fused weights.
    """
    model = [tensor for tensor in tensors if tensor.key.state == MODEL]
    shapes = {tensor.key.name: tensor.shape for tensor in model}
    if any(".up_gate_proj." in name or ".gate_up_fused_proj." in name for name in shapes):
        return True
    if any(name in _MEGATRON or name in _NLP or name in _TRAINERS or name.endswith(_FLAX) for name in shapes):
        return True
    hidden = next(
        (shape[0] for name, shape in shapes.items() if name.endswith("norm.weight") and len(shape) == 1), None
    )
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[0] != shape[1] and hidden in shape and name.endswith(_MATRICES):
            return (shape[0] == hidden) != name.endswith(_INWARD)
    return False


def _is_beside_another_config(chosen: Chosen, reading: Reading) -> bool:
    """Would the output combine a hub's config.json with names that are not the hub's? No library loads such a folder.

    True if the source is not a hub folder with its own config, the config names a known family, and less than half of
    the names are that family's hub names: they are a trainer's own (torchtitan's), or have an unknown prefix.
    """
    if chosen.home == HUB and chosen.config is None:
        return False
    config = chosen.config
    if config is None:
        try:
            config = file_config(chosen.sources[0])
        except UsageError:  # a side file that only its own library reads
            return False
    from ckpt_tool.families.registry import configured_family
    from ckpt_tool.families.table import one_of_each
    from ckpt_tool.families.wrappers import describe_prefix, knows_most

    family = configured_family(config or {})
    if family is None:
        return False
    names = one_of_each(chosen.model)
    dialects = [dialect for dialect in family.known_dialects if dialect.startswith(HUB)]
    strange = [family.table(dialect).names_without_rule(names) for dialect in dialects]
    if not names or 2 * min(map(len, strange)) <= len(names):
        return False
    # They are names of such a model: a trainer's, another system's, or the family's behind a prefix. Names of which
    # nothing is known stay as they are.
    if any(word in f".{name}" for name in names for word in _TITAN):
        return True
    return knows_most(family, names) or bool(describe_prefix(names, [family]))


def dialect_of(chosen: Chosen) -> str | None:
    """The dialect that the first source states, or to which an earlier pass converted: `hf`, `paddle`, ...; None if
    unknown."""
    dialect = chosen.all_hints.dialect
    if isinstance(dialect, str):
        return dialect if dialect in DIALECTS and dialect != "keep" else None
    return None if chosen.home == "keep" else chosen.home


def _by_family(chosen: Chosen, job: Conversion, source: str | None, of_tool: SourceNames | None = None) -> Chosen:
    """Convert the names with the equations of the family given by the config, the names or `--family`.

    If the user did not request a conversion explicitly and the family can't be determined, the names are kept with a
    note, unless they are known to be those of another system.

    Args:
        source: the dialect that the source states.
        of_tool: the naming scheme of the tool that saved the source, if the source states it.
    """
    reading = job.reading
    writing = job.writing
    home = job.dialect
    opened = chosen.sources[0]
    model = config_of(opened, reading)
    config = _as_asked(model.config if chosen.config is None else chosen.config, writing)
    _refuse_foreign(model, config, reading, opened.path)

    try:
        found, model, config = _found(chosen, job, source, model, config, of_tool)
        if home not in found.family.known_dialects:
            found.family.table(home)
    except (UsageError, InputError) as e:
        requested = writing.dialect is not None or reading.family is not None or writing.experts is not None
        # One rule for all sources: names that are not the target's are an error, whatever file they come from. Models
        # without a single known name pass, unless only an unknown prefix is in the way.
        unnamed = e.code == NO_FAMILY and not (config or {}).get("model_type")
        nobody_knows = unnamed and not _known_but_for_prefix(chosen)
        if e.code == SEVERAL and source is None:
            nobody_knows |= not _mostly_known(chosen) or _is_named_as(home, chosen)
        other_names = home != HUB or source not in (None, home) or _is_beside_another_config(chosen, reading)
        if requested or (other_names and not nobody_knows):
            e.faults = (*e.faults, *model.notes)
            e.path = e.path or opened.path
            raise
        return chosen.noted(f"names and structure are kept as they are: {e.message}")

    target = _variant(found.family, writing) or home
    if config is not None and "model_type" not in config and not model.file:
        model = config_of(opened, reading, found.family.name)
        config = _as_asked(model.config if chosen.config is None else chosen.config, writing)

    check_config(model, reading.config or opened.path)
    origin = chosen.config_from if chosen.config is not None else model.origin
    chosen = replace(chosen, config=config, config_from=origin).noted(*model.notes)
    if found.dialect == "meta" != target:
        chosen = replace(chosen, stale=(*chosen.stale, "params.json"))  # of names that are gone
    if of_tool is not None:
        chosen = replace(chosen, hints=chosen.all_hints.without(SavedBy))

    hints, lost = _hints(home, config, renamed=found.dialect != target)
    chosen = chosen.noted(*lost)
    if found.dialect == target:
        return replace(chosen, hints=chosen.all_hints.having(Dialect(home)))
    return _translated(chosen, found, target, job, hints)


def _mostly_known(chosen: Chosen) -> bool:
    """Does a family know most of the names? A few common names (`norm.weight`) are no evidence for a family."""
    from ckpt_tool.families.models import FAMILIES
    from ckpt_tool.families.wrappers import knows_most

    return any(knows_most(family, [*chosen.model]) for family in FAMILIES)


def _is_named_as(home: str, chosen: Chosen) -> bool:
    """Are all names those of dialect `home` in some family, and the hub's in none? Then nothing has to be converted,
    whatever the family is. Names common to both (Paddle's of a Llama) do not show how matrices are stored."""
    from ckpt_tool.families.models import FAMILIES

    def all_known(dialect: str) -> bool:
        families = [family for family in FAMILIES if dialect in family.known_dialects]
        return any(all(map(family.table(dialect).knows, chosen.model)) for family in families)

    return home != HUB and all_known(home) and not all_known(HUB)


def _known_but_for_prefix(chosen: Chosen) -> bool:
    """Would a family know the names without their common prefix?"""
    from ckpt_tool.families.models import FAMILIES
    from ckpt_tool.families.wrappers import describe_prefix

    return bool(describe_prefix([*chosen.model], FAMILIES))


def _found(
    chosen: Chosen,
    job: Conversion,
    source: str | None,
    model: ModelConfig,
    config: Mapping[str, Any] | None,
    of_tool: SourceNames | None,
) -> tuple[FamilyMatch, ModelConfig, Mapping[str, Any] | None]:
    """(family and dialect of the names, the model's config, the config with the changes by options). Raises what
    `families.registry.find` raises."""
    from ckpt_tool.families.registry import find
    from ckpt_tool.families.table import one_of_each
    from ckpt_tool.plan.mapping import parameter_shapes

    shapes = parameter_shapes(chosen.stored)
    alike = {name: shapes[name] for name in one_of_each(shapes)}
    if of_tool is not None:
        return of_tool.find_family(alike, config, job.reading.family), model, config
    stated = None if source == HUB else source
    try:
        return find(config, alike, stated=stated, family=job.reading.family), model, config
    except InputError as e:
        derived = model.derived and chosen.config is None and job.reading.family is None
        if e.code != STRANGE or not derived:
            raise
    # Arguments describe what a model computes; the names show whether it is part of a model of images or audio.
    found = find(None, alike, stated=stated)
    model = config_of(chosen.sources[0], job.reading, found.family.name)
    return found, model, _as_asked(model.config, job.writing)


def _translated(chosen: Chosen, found: FamilyMatch, target: str, job: Conversion, hints: Sequence[Hint]) -> Chosen:
    """Convert `chosen` from the names of `found` to those of dialect `target`; its notes report what was done."""
    from ckpt_tool.plan.mapping import parameter_shapes

    config = chosen.config
    home = job.dialect
    leave_names = of_dialect(found.dialect, "leaving")
    if leave_names is not None:
        chosen, found = leave_names(chosen, found)
    if home != HUB:
        refuse_to_part(chosen, f"{home}'s names")
    shapes = parameter_shapes(chosen.stored)
    if not job.reading.lenient:
        _refuse_odd_models(found, shapes, config, whole=not chosen.removed, dequantised=job.writing.dequantize)
    mapped = _mapped(found, target, shapes, config, dequantised=job.writing.dequantize)
    if not job.reading.lenient and not chosen.removed:
        _refuse_lacking(found.family, target, mapped, config)
    if home != HUB and not job.reading.lenient:
        _refuse_unplaced(found, target, mapped, shapes, chosen.sources[0].path)
    refuse_to_lose_copies(chosen, mapped.dropped)
    by = f"the family {found.family.name}, {found.dialect} to {target}"
    out = renamed(chosen, mapped, job.writing, by, hints)
    out = out.noted(f"names and structure: {by}", *_of_translation(out, found, home, target))
    if home != HUB:
        return out
    return as_the_hub_has_it(out, found.dialect, config, job.writing.tied_head, found.family.table(HUB))


def _of_translation(out: Chosen, found: FamilyMatch, home: str, target: str) -> Iterator[str]:
    """Lines for the report: alternatives of the target's layout, and names that were kept."""
    for variant, of in VARIANTS.items():
        if of == home == target == "megatron" and variant in found.family.dialects:
            yield f"where Megatron's tools differ, the layout is NVIDIA's; ms-swift's is --dialect {variant}"
    translated = {name for names in out.names.values() for name in names}
    every = dict.fromkeys(row.tensor.key.name for row in out.stored)
    apart = _apart(found.family, every) if any(each.startswith("megatron") for each in (found.dialect, target)) else {}
    for part, n in apart.items():
        yield f"{n} tensors of {part[:-1]} have no place in Megatron: kept under their own names"
    kept = [name for name in every if name not in translated and not name.startswith(tuple(apart))]
    if kept:
        shown = ", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "")
        yield f"{len(kept)} tensors are in no rule of {found.family.name} and kept as they are: {shown}"


def _refuse_foreign(model: ModelConfig, config: Mapping[str, Any] | None, reading: Reading, path: str) -> None:
    """Raise the source's reason against concluding the family from names, if neither config nor `--family` is given."""
    if model.foreign is not None and config is None and reading.family is None:
        model.foreign.path = path
        raise model.foreign


def _apart(family: Family, names: Iterable[str]) -> dict[str, int]:
    """{prefix of a part for which Megatron has no module: number of its names}."""
    count = Counter(part for name in names for part in family.apart if name.startswith(part))
    return {part: count[part] for part in family.apart if part in count}


def refuse_experts(writing: Writing, why: str) -> None:
    """Raise UsageError E1284 if `--experts` is given but has no effect. why: the reason, for the message."""
    if writing.experts:
        raise UsageError(
            f"--experts {writing.experts} has no effect: {why}",
            code="E1284",
            hint="it chooses between layouts under the hub's names: ckpt convert --to safetensors, or --dialect hf",
        )


def _other_names(job: Conversion) -> str:
    """A phrase for messages: which option or format requires which names."""
    whose = "keeps names" if job.dialect == "keep" else f"has {job.dialect}'s names"
    return f"--dialect {job.writing.dialect} {whose}" if job.writing.dialect else f"{job.fmt.name} {whose}"


def _variant(family: Family, writing: Writing) -> str | None:
    """The variant of the target's dialect that the options request, None for the usual one. Raises UsageError E1231,
    E2304 for one that the family does not have."""
    if writing.experts:
        return _with_experts(family, writing.experts)
    if writing.dialect in VARIANTS:
        family.table(writing.dialect)
        return writing.dialect
    return None


def _with_experts(family: Family, layout: str) -> str:
    """The dialect that stores a layer's experts in this layout. Raises UsageError E2304 if there is none."""
    from ckpt_tool.families.experts import expert_layouts

    there = expert_layouts(family)
    if layout in there:
        return there[layout]
    if not there:
        raise UsageError(f"--experts {layout}: {family.name} has no experts", code="E2304", hint="leave the option off")
    raise UsageError(
        f"--experts {layout}: no files of {family.name} have its experts so",
        code="E2304",
        hint=f"there is --experts {' and --experts '.join(there)}",
    )


def _refuse_odd_models(
    found: FamilyMatch,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] | None,
    *,
    whole: bool,
    dequantised: bool,
) -> None:
    """Raise an error for models that another system would not load: InputError E1485 for unknown names in the layers,
    Incomplete E1484 for missing tensors.

    Args:
        whole: nothing was left out by patterns, so the model should be complete.
        dequantised: no codes of a quantised release are left.
    """
    from ckpt_tool.families.completeness import missing, strange
    from ckpt_tool.families.table import one_of_each

    family, dialect = found
    odd = strange(family, dialect, shapes)
    if odd:
        if not dequantised:
            _refuse_codes(odd, config, family.name)
        known = set(odd)
        near = near_misses(odd[0], [name for name in one_of_each(shapes) if name not in known])
        raise InputError(
            f"{len(odd)} tensors in the layers are in no rule of {family.name}, {dialect}: {odd[0]}",
            code="E1485",
            key=odd[0],
            faults=odd[1:],
            hint=f"{near} leave them out with --remove-keys, say whose names they are with --family NAME[:DIALECT],"
            " or --lenient keeps them as they are".strip(),
        )
    lost = missing(family, dialect, shapes, config) if whole else []
    if lost:
        advise = of_dialect(dialect, "missing")
        advice = advise(shapes) if advise is not None else ""
        raise Incomplete(
            f"{len(lost)} tensors of a {family.name} model are not there: {lost[0]}",
            code="E1484",
            key=lost[0],
            faults=lost[1:],
            hint=advice or "fetch the checkpoint again; --lenient converts the part that is there",
        )


def _refuse_unplaced(
    found: FamilyMatch, target: str, mapped: Mapped, shapes: Mapping[str, tuple[int, ...]], path: str
) -> None:
    """Raise InputError E3010 for tensors without a rule, if the target is a system with names of its own. Its loader
    fails on unknown tensors: Megatron's and Paddle's jobs stop at one, llama.cpp refuses the file."""
    from ckpt_tool.families.base import SYSTEMS as NAMES_OF_SYSTEMS

    taken = {piece.src.name for made in mapped.made for piece in made.pieces} | set(mapped.dropped)
    unplaced = [name for name in shapes if name not in taken and not name.startswith(found.family.apart)]
    if not unplaced:
        return

    system = NAMES_OF_SYSTEMS.get(target.partition("-")[0], target)
    more = f" and {len(unplaced) - 1} more" if len(unplaced) > 1 else ""
    raise InputError(
        f"{unplaced[0]}{more}: no rule of {found.family.name} has a place for it in {system}'s names, and {system} does"
        " not load a tensor that it does not know",
        code="E3010",
        path=path,
        key=unplaced[0],
        faults=[f"{name} too" for name in unplaced[1:]],
        hint=f"leave it out with --remove-keys '{unplaced[0]}'; if it is a tensor of the model under another name,"
        f" --rename '{unplaced[0]}=NAME'; --dialect keep writes all under the source's names, --lenient writes it as"
        " it is",
    )


def _refuse_lacking(family: Family, target: str, mapped: Mapped, config: Mapping[str, Any] | None) -> None:
    """Raise Incomplete E1484 for tensors that a model needs by the target's rules and that have no source.

    The source alone does not show these: if all layers lack a tensor, they are consistent.
    """
    from ckpt_tool.families.completeness import list_expected_tensors

    made = {each.name for each in mapped.made}
    lost = [name for name in list_expected_tensors(family, target, config) or () if name not in made]
    if lost:
        raise Incomplete(
            f"{len(lost)} tensors that a {family.name} model has in dialect {target} have no source: {lost[0]}",
            code="E1484",
            key=lost[0],
            faults=lost[1:],
            hint="does the config belong to this checkpoint? --lenient converts the part that is there",
        )


def _refuse_codes(odd: Sequence[str], config: Mapping[str, Any] | None, family: str) -> None:
    """Raise InputError E1486 if the tensors without a rule are codes of a quantised release: one error for one cause,
    instead of one for each tensor."""
    from ckpt_tool.weight_schemes.declared_scheme import quantisation

    scheme = quantisation(config, odd)
    if scheme is None:
        return
    way = DEQUANTIZE if scheme.known else "convert it to floats with its own library first"
    raise InputError(
        f"the weights are quantised by {scheme.scheme}: {len(odd)} tensors are its codes and scales, which no rule of "
        f"{family} maps, such as {odd[0]}",
        code="E1486",
        key=odd[0],
        hint=f"{way}; --to safetensors, dcp or torch moves it as it is",
    )


def _mapped(
    found: FamilyMatch,
    target: str,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] | None,
    *,
    dequantised: bool,
) -> Mapped:
    """The mapping from the source's names to the target's. Codes of a quantised release may have packed shapes, which
    fail here; the hint of the error then gives the option that dequantises them."""
    from ckpt_tool.families.rewrite import mapping
    from ckpt_tool.weight_schemes.declared_scheme import quantisation

    both = {**config, TIED: False} if target == "meta" and config is not None else config  # as `with_head` wrote them
    try:
        return mapping(found.family, found.dialect, target, shapes, both)
    except CkptError as e:
        if e.code == _SHAPE and is_vocabulary(e.key or ""):
            rows = found.family.facts(config or {}).get("vocab_size")
            e.hint = f"--vocab-size {rows} cuts a vocabulary, or fills it up, to what the config says; {e.hint}"
        scheme = None if dequantised else quantisation(config)
        if scheme is not None and scheme.known and "--dequantize" not in (e.hint or ""):
            what = f"the weights are quantised by {scheme.scheme}: {DEQUANTIZE}"
            e.hint = "; ".join(filter(None, (what, e.hint)))
        raise


def _hints(target: str, config: Mapping[str, Any] | None, *, renamed: bool) -> tuple[list[Hint], list[str]]:
    """(hints for the target's format, lines about settings that it can't express)."""
    stated = of_dialect(target, "hints")
    if config is None or stated is None:
        return [Dialect(target)], []
    hints, lost = stated(config, renamed=renamed)
    return [Dialect(target), *hints], lost


def _as_asked(config: Mapping[str, Any] | None, writing: Writing) -> Mapping[str, Any] | None:
    """The model's config with the changes by options: `--tied-head`, and the rows given by `--vocab-size`."""
    if config is None:
        return None
    changed = dict(config)
    if writing.tied_head in ("tie", "untie"):
        changed[TIED] = writing.tied_head == "tie"
    if writing.vocab_size is not None:
        if "vocab_size" in changed:
            changed["vocab_size"] = writing.vocab_size
        for key in ("text_config", "thinker_config"):
            inner = changed.get(key)
            if isinstance(inner, Mapping):
                changed[key] = _as_asked(inner, replace(writing, tied_head=None))
    return changed


def renamed(chosen: Chosen, mapped: Mapped, writing: Writing, by: str, hints: Sequence[Hint]) -> Chosen:
    """`chosen` under the names of `mapped`; what the mapping leaves out is reported as dropped."""
    from ckpt_tool.plan.mapping import apply_mapping, shaped_otherwise

    chosen, mapped = moves_alone(chosen, mapped, writing, by)
    every = [
        Stored(number, tensor)
        for number, source in enumerate(chosen.sources)
        if source.catalog.states() != (MODEL,)
        for tensor in source.catalog.tensors.values()
    ]
    applied = apply_mapping(chosen.stored, mapped, shaped_otherwise(every))
    casts = {TensorKey(made.name): made.dtype for made in mapped.made if made.dtype is not None}
    lines = [f"{by}: {name} has no source and is not written" for name in mapped.unfilled]
    lines += [f"{by}: {line}" for line in lines_alike(_left_over(chosen, mapped), "left out")]
    extras = chosen.extras
    hints = list(hints)
    roots = chosen.all_hints.get(Roots)
    if roots is not None and roots.ids:
        extras = groups_by_name(extras, roots.ids)
        hints.append(replace(roots, ids={}))
    return replace(
        chosen,
        stored=applied.stored,
        extras=renamed_groups(extras, applied.names),
        dropped=(*chosen.dropped, *left_behind(applied.dropped, f"left out by {by}")),
        notes=(*chosen.notes, *lines),
        renewed=chosen.renewed | applied.renewed,
        casts={**_followed(chosen.casts, applied.names), **casts},
        names=applied.names,
        hints=chosen.all_hints.having(*hints),
    )


def _followed(casts: Mapping[TensorKey, DType], names: Mapping[str, tuple[str, ...]]) -> dict[TensorKey, DType]:
    """The dtype to which each tensor is rounded, under its new name."""
    return {
        TensorKey(new, key.state): dtype for key, dtype in casts.items() for new in names.get(key.name, (key.name,))
    }


def _left_over(chosen: Chosen, mapped: Mapped) -> Iterator[tuple[str, int, int]]:
    """(source tensor, number of unused elements, number of all) for source tensors that are used only in part."""
    taken: Counter[str] = Counter()
    for made in mapped.made:
        for piece in made.pieces:
            taken[piece.src.name] += piece.numel
    whole = {name: row.tensor.numel for name, row in chosen.model.items()}
    yield from ((name, whole[name] - n, whole[name]) for name, n in taken.items() if n < whole.get(name, 0))
