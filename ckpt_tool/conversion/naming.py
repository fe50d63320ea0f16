"""Naming: the chosen tensors under the names and the structure that the output shall have.

Three roads, and the report says which was taken: AOA statements (`--aoa FILE`), the families' equations where the
source's dialect is known and is not the target's, or none: names are kept. The mapping is applied to where the elements
are stored (`plan.mapping`), so nothing has moved yet and every later step is the same.

Chosen tensors ready for a mapping: values that it changes are computed, and what it joins is in one source.

A mapping moves elements (`plan.mapping`). Two things it asks for are not moves: a number added on the way (`* add(1)`
of a table: zero-centred norms), and one tensor made of several of different sources (q_proj that an adapter changed
beside k_proj as it was, for a fused QKV). Both become computed tensors first, and the mapping moves those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.algebra.element_map import ElementMap
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD, Side
from ckpt_tool.conversion.groups import renamed_groups
from ckpt_tool.conversion.tied_head import TIED, as_the_hub_has_it, refuse_to_lose_copies
from ckpt_tool.conversion.vocabulary import without_padding
from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.hints import Dialect, Hint
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InputError, UsageError, near_misses, wrap_os_error
from ckpt_tool.formats.megatron.hybrid import shown
from ckpt_tool.formats.peft.lone import PeftHints
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import DIALECTS, VARIANTS, Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind, with_computed
from ckpt_tool.sources.config import ARGUMENTS, centred_norms, check_config, config_of

if TYPE_CHECKING:
    from ckpt_tool.families.base import Family
    from ckpt_tool.families.registry import Found


AOA_LIMIT = 16 << 20  # bytes of a file of statements: one for each tensor of the largest models has a few megabytes
HUB = "hf"
SYSTEMS = (HUB, "megatron")  # between which an adapter is named by a pass of its own
DEQUANTIZE = "--dequantize makes floats of it on the way"
NO_FAMILY, STRANGE = "E1372", "E1373"  # of `families.registry.find`
_MEGATRON = frozenset(f"decoder.layers.0.self_attention.linear_{each}.weight" for each in ("qkv", "kv_down_proj"))
_NLP = frozenset(
    f"{root}.embed_tokens.weight" for root in ("llama", "qwen2", "qwen2_moe", "mixtral", "deepseek_v3", "ernie")
)
_TRAINERS = frozenset(("layers.0.attn.output_proj.weight", "blocks.0.attention.w_out.weight"))  # torchtune, OLMo-core
_FLAX = (".kernel", "_einsum.w")  # ends of MaxText's names and of Gemma's library
_INWARD = (".down_proj.weight", ".o_proj.weight")  # (hidden, inputs) in the hub
_MATRICES = (
    *_INWARD,
    *(f".{each}_proj.weight" for each in ("gate", "up", "k", "v", "q")),
)  # seldom square, all of them


def named(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` under the names that `--aoa` or `--dialect` (default: what is at home in the format) ask for. Raises
    UsageError, InputError."""
    reading, writing, target = job.reading, job.writing, job.dialect
    if writing.experts and (writing.aoa or target != HUB):
        refuse_experts(writing, "--aoa says how names change" if writing.aoa else _other_names(job))
    if writing.aoa:
        if writing.dialect not in (None, "keep"):
            raise UsageError("--aoa and --dialect both say how names change", code="E1282", hint="give one of the two")
        return _by_statements(chosen, reading, writing)
    if target == "keep":
        if reading.family and writing.dialect is None:
            return chosen.noted(f"--family: {job.fmt.name} keeps names; --dialect NAME changes them")
        return chosen
    if target in SYSTEMS and holds_adapter(chosen):  # named by a pass of its own
        return chosen
    source = _dialect_of(chosen)
    if writing.dialect is None and not reading.family and not writing.experts:
        if source == target != "hf":
            return chosen
        if target == "hf" and source in (None, "hf") and not _looks_foreign(row.tensor for row in chosen.stored):
            return chosen
    return _by_family(chosen, reading, writing, target, source)


def holds_adapter(chosen: Chosen) -> bool:
    """Is it an adapter alone, under PEFT's names or Megatron's?"""
    from ckpt_tool.families.low_rank import is_adapter

    return is_adapter(chosen.model) or chosen.all_hints.get(PeftHints) is not None


def _looks_foreign(tensors: Iterable[LogicalTensor]) -> bool:
    """Does what says nothing of itself, or says Hugging Face, look like Megatron's, Paddle's or a trainer's? A quick
    look that spares the families: names that no hub model has, or a matrix stored (inputs, outputs). Paddle's trainers
    also write folders that are Hugging Face's in all but the fused weights."""
    shapes = {tensor.key.name: tensor.shape for tensor in tensors if tensor.key.state == MODEL}
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


def _dialect_of(chosen: Chosen) -> str | None:
    """What the first source says of its names, or whose they were given since: `hf`, `paddle`, ...; None for
    nothing."""
    dialect = chosen.all_hints.dialect
    if isinstance(dialect, str):
        return dialect if dialect in DIALECTS and dialect != "keep" else None
    return None if chosen.home == "keep" else chosen.home


def _by_family(chosen: Chosen, reading: Reading, writing: Writing, target: str, source: str | None) -> Chosen:
    """By the equations of the family that the config, the names or `--family` tell. Where the user does not ask for it
    in words, what can't be derived is kept as it is, with a line, unless the source says that its names are foreign."""
    from ckpt_tool.families.base import SHIFTED
    from ckpt_tool.families.registry import find
    from ckpt_tool.families.table import one_of_each
    from ckpt_tool.plan.mapping import parameter_shapes

    requested = writing.dialect is not None or reading.family is not None or writing.experts is not None
    opened = chosen.sources[0]
    model = config_of(opened, reading)
    config = _as_asked(model.config if chosen.config is None else chosen.config, writing)
    shapes = parameter_shapes(chosen.stored)
    stated = None if source == "hf" else source
    try:
        alike = {name: shapes[name] for name in one_of_each(shapes)}
        try:
            found = find(config, alike, stated=stated, family=reading.family)
        except InputError as e:
            derived = model.origin == ARGUMENTS and chosen.config is None and reading.family is None
            if e.code != STRANGE or not derived:
                raise
            # arguments say what a model computes, names whose part it is: of a model that sees or hears
            found = find(None, alike, stated=stated)
            model = config_of(opened, reading, found.family.name)
            config = _as_asked(model.config, writing)
        if target not in found.family.known_dialects:
            found.family.table(target)
    except (UsageError, InputError) as e:
        nobody_knows = e.code == NO_FAMILY and not (config or {}).get("model_type")
        if requested or source not in (None, target) and not nobody_knows:
            e.faults, e.path = (*e.faults, *model.notes), e.path or opened.path
            raise
        return chosen.noted(f"names and structure are kept as they are: {e.message}")
    home, target = target, _variant(found.family, writing) or target
    if config is not None and "model_type" not in config and not model.file:
        model = config_of(opened, reading, found.family.name)
        config = _as_asked(model.config if chosen.config is None else chosen.config, writing)
    check_config(model, reading.config or opened.path)
    origin = chosen.config_from if chosen.config is not None else model.origin
    chosen = replace(chosen, config=config, config_from=origin).noted(*model.notes)
    if found.dialect == "meta" != target:
        chosen = replace(chosen, stale=(*chosen.stale, "params.json"))  # of names that are gone
    hints, lost = _hints(home, config, renamed=found.dialect != target)
    chosen = chosen.noted(*lost)
    if found.dialect == target:
        return replace(chosen, hints=chosen.all_hints.having(Dialect(home)))
    if found.dialect == "megatron" and centred_norms(opened) == (not found.family.centred):
        found = found._replace(dialect=SHIFTED)
    if found.dialect.startswith("megatron"):
        chosen = without_padding(chosen, config)
        shapes = parameter_shapes(chosen.stored)
    if not reading.lenient:
        _refuse_odd_models(found, shapes, config, whole=not chosen.removed)
    mapped = _mapped(found, target, shapes, config, dequantised=writing.dequantize)
    refuse_to_lose_copies(chosen, mapped.dropped)
    by = f"the family {found.family.name}, {found.dialect} to {target}"
    out = renamed(chosen, mapped, writing, by, hints)
    known = {name for names in out.names.values() for name in names}
    every = dict.fromkeys(row.tensor.key.name for row in out.stored)
    apart = _apart(found.family, every) if any(each.startswith("megatron") for each in (found.dialect, target)) else {}
    kept = [name for name in every if name not in known and not name.startswith(tuple(apart))]
    lines = [f"names and structure: {by}"]
    lines += [
        f"where Megatron's tools differ, the layout is NVIDIA's; ms-swift's is --dialect {of}"
        for of, whose in VARIANTS.items()
        if whose == home == target == "megatron" and of in found.family.dialects
    ]
    lines += [
        f"{n} tensors of {part[:-1]} have no place in Megatron: kept under their own names" for part, n in apart.items()
    ]
    if kept:
        shown = ", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "")
        lines.append(f"{len(kept)} tensors are in no rule of {found.family.name} and kept as they are: {shown}")
    out = out.noted(*lines)
    if home != HUB:
        return out
    return as_the_hub_has_it(out, found.dialect, config, writing.tied_head, found.family.table(HUB))


def _apart(family: Family, names: Iterable[str]) -> dict[str, int]:
    """{how names begin of a part that no module of Megatron holds: how many there are}."""
    count = Counter(part for name in names for part in family.apart if name.startswith(part))
    return {part: count[part] for part in family.apart if part in count}


def refuse_experts(writing: Writing, why: str) -> None:
    """Raise UsageError E1284 where `--experts` is given and has nothing to choose."""
    if writing.experts:
        raise UsageError(
            f"--experts {writing.experts} has no effect: {why}",
            code="E1284",
            hint="it chooses between layouts under the hub's names: ckpt convert --to safetensors, or --dialect hf",
        )


def _other_names(job: Conversion) -> str:
    """`the names are megatron's`, and why."""
    whose = "keeps names" if job.dialect == "keep" else f"has {job.dialect}'s names"
    return f"--dialect {job.writing.dialect} {whose}" if job.writing.dialect else f"{job.fmt.name} {whose}"


def _variant(family: Family, writing: Writing) -> str | None:
    """The dialect that the options ask for where a system has several. Raises UsageError E1231, E2304 for one that the
    family does not have."""
    if writing.experts:
        return _with_experts(family, writing.experts)
    if writing.dialect in VARIANTS:
        family.table(writing.dialect)
        return writing.dialect
    return None


def _with_experts(family: Family, layout: str) -> str:
    """The dialect that has a layer's experts so. Raises UsageError E2304 where there is none."""
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
    found: Found, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None, *, whole: bool
) -> None:
    """Raise InputError for what another system would not load: E1485 names in the layers that the family does not know,
    Incomplete E1484 tensors that are not there. whole: nothing was left out by patterns."""
    from ckpt_tool.families.completeness import missing, strange
    from ckpt_tool.families.table import one_of_each

    family, dialect = found
    odd = strange(family, dialect, shapes)
    if odd:
        _refuse_codes(odd, config, family.name)
        known = set(odd)
        near = near_misses(odd[0], [name for name in one_of_each(shapes) if name not in known])
        raise InputError(
            f"{len(odd)} tensors in the layers are in no rule of {family.name}, {dialect}: {odd[0]}",
            code="E1485",
            key=odd[0],
            faults=odd[1:],
            hint=f"{near} leave them behind with --remove-keys, say whose names they are with --family NAME[:DIALECT],"
            " or --lenient keeps them as they are".strip(),
        )
    lost = missing(family, dialect, shapes, config) if whole else []
    if lost:
        raise Incomplete(
            f"{len(lost)} tensors of a {family.name} model are not there: {lost[0]}",
            code="E1484",
            key=lost[0],
            faults=lost[1:],
            hint="--hybrid-layer-pattern none takes this HybridModel of Megatron's for the GPTModel that it is"
            if shown(shapes)
            else "fetch the checkpoint again; --lenient converts the part that is there",
        )


def _refuse_codes(odd: Sequence[str], config: Mapping[str, Any] | None, family: str) -> None:
    """Raise InputError E1486 where what no rule takes are the codes of a quantised release: one cause, one line."""
    from ckpt_tool.quantised.scheme import quantisation

    scheme = quantisation(config, odd)
    if scheme is None:
        return
    way = DEQUANTIZE if scheme.known else "make floats of it with its own library first"
    raise InputError(
        f"the weights are quantised by {scheme.scheme}: {len(odd)} tensors are its codes and scales, which no rule of "
        f"{family} maps, such as {odd[0]}",
        code="E1486",
        key=odd[0],
        hint=f"{way}; --to safetensors, dcp or torch moves it as it is",
    )


def _mapped(
    found: Found,
    target: str,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] | None,
    *,
    dequantised: bool,
) -> Mapped:
    """The mapping. Of a quantised release codes may lie in a shape of their own: an error's hint says what helps."""
    from ckpt_tool.families.rewrite import mapping
    from ckpt_tool.quantised.scheme import quantisation

    both = {**config, TIED: False} if target == "meta" and config is not None else config  # as `with_head` wrote them
    try:
        return mapping(found.family, found.dialect, target, shapes, both)
    except CkptError as e:
        scheme = None if dequantised else quantisation(config)
        if scheme is not None and scheme.known and "--dequantize" not in (e.hint or ""):
            what = f"the weights are quantised by {scheme.scheme}: {DEQUANTIZE}"
            e.hint = "; ".join(filter(None, (what, e.hint)))
        raise


def _hints(target: str, config: Mapping[str, Any] | None, *, renamed: bool) -> tuple[list[Hint], list[str]]:
    """(the hints for the target's format, lines about what it can't say)."""
    hints: list[Hint] = [Dialect(target)]
    if target == "paddle" and config is not None:
        from ckpt_tool.formats.paddle.job import PaddleHints

        plain = {key: value for key, value in config.items() if isinstance(value, str | int | float | bool)}
        hints.append(PaddleHints(config={**plain, "architectures": config.get("architectures")}))
    if target == "meta" and config is not None and renamed:
        from ckpt_tool.families.config.meta import params_of
        from ckpt_tool.formats.meta.params import MetaHints

        params, lost = params_of(config)
        return [*hints, MetaHints(params, None, False)], lost
    return hints, []


def _as_asked(config: Mapping[str, Any] | None, writing: Writing) -> Mapping[str, Any] | None:
    """The config of the model as the options change it: `--tied-head`, and the rows that `--vocab-size` asks for."""
    if config is None:
        return None
    changed = dict(config)
    if writing.tied_head in ("tie", "untie"):
        changed[TIED] = writing.tied_head == "tie"
    if writing.vocab_size is not None:
        if "vocab_size" in changed:
            changed["vocab_size"] = writing.vocab_size
        for key in ("text_config", "thinker_config"):
            if isinstance(inner := changed.get(key), Mapping):
                changed[key] = _as_asked(inner, replace(writing, tied_head=None))
    return changed


def _by_statements(chosen: Chosen, reading: Reading, writing: Writing) -> Chosen:
    from ckpt_tool.families.aoa.program import Shards, compile_aoa, read_aoa
    from ckpt_tool.plan.mapping import parameter_shapes

    file = Path(writing.aoa or "")
    try:
        if file.stat().st_size > AOA_LIMIT:
            raise UsageError(f"--aoa: more than {AOA_LIMIT >> 20} MiB of statements", code="E1283", path=file)
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise wrap_os_error(e, file, "reading the statements") from e
    except UnicodeDecodeError as e:
        raise UsageError("--aoa: the file is not UTF-8 text", code="E1283", path=file) from e
    statements, reverse = read_aoa(text)
    shapes = parameter_shapes(chosen.stored)
    mapped = compile_aoa(
        statements, shapes, reverse=reverse, shards=Shards(_bands(chosen)), skip_unmatched=reading.lenient
    )
    return renamed(chosen, mapped, writing, f"the statements of {file.name}", [Dialect("keep")])


def _bands(chosen: Chosen) -> dict[str, int]:
    """{parameter: bands along its last dim}, where its stored boxes cut that alone: how many ranks a fused weight was
    cut for that its format does not know to be one. (Those it knows are plain already: their boxes alternate.)"""
    out = {}
    for row in chosen.stored:
        tensor = row.tensor
        if tensor.key.state == MODEL and len(tensor.shape) == 2 and len(tensor.chunks) > 1:
            columns = {
                (chunk.box.offset[1], chunk.array) for chunk in tensor.chunks if chunk.box.shape[1] < tensor.shape[1]
            }
            files = {array for _, array in columns}
            if columns and len(columns) == len(files) and tensor.shape[1] % len(columns) == 0:
                out[tensor.key.name] = len(columns)
    return out


def renamed(chosen: Chosen, mapped: Mapped, writing: Writing, by: str, hints: Sequence[Hint]) -> Chosen:
    """`chosen` under the names of `mapped`; what the mapping leaves out is reported as dropped."""
    from ckpt_tool.plan.mapping import apply_mapping, shaped_otherwise

    chosen, mapped = ready(chosen, mapped, writing, by)
    every = [
        Stored(number, tensor)
        for number, source in enumerate(chosen.sources)
        if source.catalog.states() != (MODEL,)
        for tensor in source.catalog.tensors.values()
    ]
    applied = apply_mapping(chosen.stored, mapped, shaped_otherwise(every))
    casts = {TensorKey(made.name): made.dtype for made in mapped.made if made.dtype is not None}
    lines = [f"{by}: {name} has no source and is not written" for name in mapped.unfilled]
    lines += [f"{by}: {line}" for line in _counted(_left_over(chosen, mapped), "left out")]
    return replace(
        chosen,
        stored=applied.stored,
        extras=renamed_groups(chosen.extras, applied.names),
        dropped=(*chosen.dropped, *left_behind(applied.dropped, f"left out by {by}")),
        notes=(*chosen.notes, *lines),
        renewed=chosen.renewed | applied.renewed,
        casts={**_followed(chosen.casts, applied.names), **casts},
        names=applied.names,
        hints=chosen.all_hints.having(*hints),
    )


def _followed(casts: Mapping[TensorKey, DType], names: Mapping[str, tuple[str, ...]]) -> dict[TensorKey, DType]:
    """What each tensor is rounded to, under the new names."""
    return {
        TensorKey(new, key.state): dtype for key, dtype in casts.items() for new in names.get(key.name, (key.name,))
    }


def _counted(rows: Iterable[tuple[str, int, int]], what: str) -> Iterator[str]:
    """Lines about (tensor, so many of its elements, all), one for all layers that are alike.

    >>> list(_counted([("layers.0.A_log", 2, 6), ("layers.1.A_log", 2, 6)], "zeros"))
    ['2 of 6 elements of layers.0.A_log are zeros, and of 1 more like it']
    """
    from ckpt_tool.families.table import form_of

    alike: dict[tuple[str, int, int], list[str]] = {}
    for name, part, whole in rows:
        alike.setdefault((form_of(name)[0], part, whole), []).append(name)
    for (_, part, whole), names in alike.items():
        more = f", and of {len(names) - 1} more like it" if len(names) > 1 else ""
        yield f"{part} of {whole} elements of {names[0]} are {what}{more}"


def _left_over(chosen: Chosen, mapped: Mapped) -> Iterator[tuple[str, int, int]]:
    """(source, elements that nothing is made of, all) of sources that are taken in part."""
    taken: Counter[str] = Counter()
    for made in mapped.made:
        for piece in made.pieces:
            taken[piece.src.name] += piece.numel
    whole = {name: row.tensor.numel for name, row in chosen.model.items()}
    yield from ((name, whole[name] - n, whole[name]) for name, n in taken.items() if n < whole.get(name, 0))


# -- what a mapping can't move: values that change, sources that differ ------------------------------------------------


_VALUES = (MODEL, MASTER, EMA)  # states that hold the parameter itself; gradients' moments don't change with it


def ready(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    """(`chosen` with what has to be computed, the mapping as moves alone). by: what the mapping is called in messages.

    Raises UsageError: E1280 where one source goes into tensors with another change each, E0264 with --plan and
    --ray."""
    chosen, mapped = _changed(chosen, mapped, writing, by)
    chosen, mapped = _filled(chosen, mapped, writing, by)
    return _joined(chosen, mapped, writing), mapped


def _filled(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    """What is made of zeros in part: of rows of zeros behind those of a tensor that it is made of too."""
    if not any(piece.src.name == PAD for made in mapped.made for piece in made.pieces):
        return chosen, mapped
    from ckpt_tool.plan.mapping import parameter_shapes

    shapes, zeros, out = parameter_shapes(chosen.stored), dict[str, int](), list[Made]()
    filled = list[tuple[str, int, int]]()
    for made in mapped.made:
        empty = [piece for piece in made.pieces if piece.src.name == PAD and piece.numel]
        name = next((piece.src.name for piece in made.pieces if piece.src.name != PAD), made.like or None)
        if empty and name is not None:
            start, pieces = prod(shapes[name]), [piece for piece in made.pieces if piece.src.name != PAD]
            for piece in empty:
                pieces.append(piece._replace(src=Side(name, start, contiguous_strides(piece.ext))))
                start += piece.numel
            count = sum(piece.numel for piece in empty)
            zeros[name] = max(count, zeros.get(name, 0))
            filled.append((made.name, count, prod(made.shape)))
            made = made._replace(pieces=tuple(pieces))
        out.append(made)
    if not filled:
        return chosen, mapped
    from ckpt_tool.run.recipes import Grown

    recipes, dtypes = [], dict[TensorKey, DType]()
    for row in chosen.stored:
        key, shape = row.tensor.key, row.tensor.shape
        if key.name in zeros and shape == shapes[key.name] and row.tensor.dtype.is_float:
            rows = -(-zeros[key.name] // max(prod(shape[1:]), 1))
            recipes.append(Grown(key, (shape[0] + rows, *shape[1:]), (chosen.input(row),), f"{rows} rows of zeros"))
            dtypes[key] = chosen.casts.get(key, row.tensor.dtype)
    lines = [f"{by}: {line}" for line in _counted(filled, "zeros")]
    shown = f"{chosen.sources[0].path} (zeros behind)"
    chosen = with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes, notes=lines)
    return chosen, mapped._replace(made=tuple(out))


def _changed(chosen: Chosen, mapped: Mapped, writing: Writing, by: str) -> tuple[Chosen, Mapped]:
    if not any(piece.maps for made in mapped.made for piece in made.pieces):
        return chosen, mapped
    wanted: dict[str, set[tuple[ElementMap, ...]]] = {}
    for made in mapped.made:
        for piece in made.pieces:
            wanted.setdefault(piece.src.name, set()).add(piece.maps)
    changes = {name: maps for name, maps in wanted.items() if maps != {()} and name != PAD}
    for name, maps in changes.items():
        if len(maps) > 1:
            raise UsageError(
                f"{by} changes the values of {name} in more than one way",
                code="E1280",
                key=name,
                hint="keep the source's names with --dialect keep",
            )
    from ckpt_tool.run.recipes import Changed

    recipes, dtypes = [], dict[TensorKey, DType]()
    for row in chosen.stored:
        key, tensor = row.tensor.key, row.tensor
        (steps,) = changes.get(key.name, ((),))
        if steps and key.state in _VALUES and tensor.dtype.is_float:
            what = ", ".join(map(str, steps))
            recipes.append(Changed(key, tensor.shape, (chosen.input(row),), what, steps))
            dtypes[key] = chosen.casts.get(key, tensor.dtype)
        elif steps and key.state not in (*_VALUES, STEP, EXTRAS) and not all(step.moments for step in steps):
            raise UsageError(
                f"{by} changes the scale of {key.name}, and moments of the one scale are none of the other",
                code="E1285",
                key=key.name,
                hint="leave the optimizer behind with --drop optimizer, or keep the source's names with --dialect keep",
            )
    alike: dict[str, tuple[ElementMap, list[str]]] = {}
    for name, maps in changes.items():
        for step in next(iter(maps)):
            alike.setdefault(step.kind, (step, []))[1].append(name)
    lines = [f"{by}: {step.says(len(names))}, rounded once: {', '.join(names[:3])}" for step, names in alike.values()]
    shown = f"{chosen.sources[0].path} (values changed)"
    chosen = with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes, notes=lines)
    plain = tuple(made._replace(pieces=tuple(piece._replace(maps=()) for piece in made.pieces)) for made in mapped.made)
    return chosen, mapped._replace(made=plain)


def _joined(chosen: Chosen, mapped: Mapped, writing: Writing) -> Chosen:
    """What one tensor is made of, where several sources hold it, as computed tensors of one."""
    sources = {row.source for row in chosen.stored}
    if len(sources) == 1:
        return chosen
    rows = {row.tensor.key: row for row in chosen.stored}
    states: dict[str, list[str]] = {}
    for name, state in rows:
        states.setdefault(name, []).append(state)
    apart: dict[TensorKey, Stored] = {}
    for group in _groups(mapped.made):
        for state in dict.fromkeys(state for name in group for state in states.get(name, ())):
            held = [rows[key] for name in group if (key := TensorKey(name, state)) in rows]
            if len({row.source for row in held}) > 1 and all(row.tensor.dtype.is_float for row in held):
                apart.update((row.tensor.key, row) for row in held)
    if not apart:
        return chosen
    from ckpt_tool.run.recipes import Unchanged

    recipes = [Unchanged(key, row.tensor.shape, (chosen.input(row),), "") for key, row in apart.items()]
    dtypes = {key: chosen.casts.get(key, row.tensor.dtype) for key, row in apart.items()}
    shown = f"{chosen.sources[0].path} (joined)"
    return with_computed(chosen, recipes, shown, writing, option="this change of names", dtypes=dtypes)


def _groups(made: Iterable[Made]) -> list[list[str]]:
    """The sources of each made tensor that has several."""
    groups = (list(dict.fromkeys(piece.src.name for piece in each.pieces)) for each in made)
    return [group for group in groups if len(group) > 1]
