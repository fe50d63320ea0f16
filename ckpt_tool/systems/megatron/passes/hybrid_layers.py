"""`--hybrid-layer-pattern`: converts a GPTModel to a HybridModel, with a layer for each attention and MLP, and back.

    --hybrid-layer-pattern '*-*-'    the output is a HybridModel with these layers
    --hybrid-layer-pattern none      the output is a GPTModel; the source's arguments say the pattern

Only names and arguments change (`systems.megatron.hybrid`). For other dialects a HybridModel must be a GPTModel first,
so `none` runs before names are translated, and a pattern after that. Cost: none. What it does not do: make layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.conversion.optimizer_groups import renamed_groups
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.tensor import EXTRAS, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.systems.megatron import hybrid
from ckpt_tool.systems.megatron.args import arguments
from ckpt_tool.systems.megatron.hints import DistHints, MegatronHints
from ckpt_tool.systems.megatron.options import MegatronOptions

NONE = "none"
FAULT = "E2792"
_MEGATRON = "megatron"


def as_gpt(chosen: Chosen, job: Conversion) -> Chosen:
    """Convert a HybridModel to a GPTModel (`--hybrid-layer-pattern none`). Raises UsageError E2792."""
    if job.writing.of(MegatronOptions).hybrid_layer_pattern != NONE:
        return chosen
    _refuse_others(chosen, "the source", _dialect(chosen))
    args = arguments(chosen.sources[0].catalog.extras)
    pattern = hybrid.pattern_of(args)
    if not pattern or not hybrid.is_hybrid(chosen.model):
        raise UsageError(
            "--hybrid-layer-pattern none: the source is no HybridModel whose arguments say its pattern",
            code=FAULT,
            path=chosen.sources[0].path,
            hint="leave the option off",
        )
    return _across(chosen, pattern, args, back=True)


def as_hybrid(chosen: Chosen, job: Conversion) -> Chosen:
    """Convert a GPTModel to a HybridModel (`--hybrid-layer-pattern PATTERN`). Raises UsageError E2792."""
    pattern = job.writing.of(MegatronOptions).hybrid_layer_pattern
    if pattern in (None, NONE):
        return chosen
    _refuse_others(chosen, "the output", _dialect(chosen))
    if hybrid.is_hybrid(chosen.model):
        raise UsageError(
            "--hybrid-layer-pattern: the source is a HybridModel already",
            code=FAULT,
            path=chosen.sources[0].path,
            hint="--hybrid-layer-pattern none makes a GPTModel of it first",
        )
    args = arguments(chosen.extras) or arguments(chosen.sources[0].catalog.extras)
    return _across(chosen, pattern, args, back=False)


def _dialect(chosen: Chosen) -> str | None:
    said = chosen.all_hints.dialect
    return said if isinstance(said, str) else chosen.home


def _refuse_others(chosen: Chosen, which: str, dialect: str | None) -> None:
    if not (dialect or "").startswith(_MEGATRON):
        raise UsageError(
            f"--hybrid-layer-pattern is about Megatron's layers, and {which} has none",
            code=FAULT,
            path=chosen.sources[0].path,
            hint="--to megatron-dist, or leave the option off",
        )


def _across(chosen: Chosen, pattern: str, args: Mapping[str, Any], *, back: bool) -> Chosen:
    try:
        letters = hybrid.letters_of(pattern)
        if hybrid.MIXER in letters and not back:
            raise hybrid.Unfit(
                f"the pattern {pattern[:80]!r} has mixers (M), of which the source has nothing",
                "Megatron's gpt_hybrid_conversion.py draws them at random; without them the models are the same",
            )
        hybrid.refuse_args(args)
        own = dict.fromkeys(row.tensor.key.name for row in chosen.stored if row.tensor.key.state != EXTRAS)
        names = hybrid.across(own, letters, back=back)
    except hybrid.Unfit as e:
        message = f"--hybrid-layer-pattern: {e.args[0]}"
        raise UsageError(message, code=FAULT, path=chosen.sources[0].path, hint=e.hint) from e

    stored = tuple(_rename_row(row, names) for row in chosen.stored)
    moved = {name: (there,) for name, there in names.items()}
    said = hybrid.changed(args, letters, back=back)

    def rename(key: TensorKey) -> TensorKey:
        return TensorKey(names.get(key.name, key.name), key.state)

    traced: dict[str, tuple[str, ...]] = {}
    if chosen.names:
        for old, current_names in chosen.names.items():
            traced[old] = tuple(names.get(name, name) for name in current_names)
    traced |= moved

    out = replace(
        chosen,
        stored=stored,
        extras=renamed_groups(_add_args(chosen.extras, said), moved),
        names=traced,
        casts={rename(key): dtype for key, dtype in chosen.casts.items()},
        renewed=frozenset(map(rename, chosen.renewed)),
        hints=chosen.all_hints.without(DistHints, MegatronHints),
        sources=_sources(chosen, said) if said else chosen.sources,
    )
    what = f"HybridModel, {letters}, to GPTModel" if back else f"GPTModel to HybridModel, {letters}"
    run = "" if _is_in_order(letters) else "; they run in another order than GPTModel's"
    return out.noted(f"layers: {what}: {len(letters)} and {letters.count(hybrid.ATTENTION)} of them{run}")


def _rename_row(row: Stored, names: Mapping[str, str]) -> Stored:
    key = row.tensor.key
    if key.state == EXTRAS or key.name not in names:
        return row
    return row._replace(tensor=row.tensor._replace(key=key._replace(name=names[key.name]), path=()))


def _is_in_order(letters: str) -> bool:
    """Return whether attentions and MLPs alternate, as in a GPTModel; else the layers run in another order."""
    plain = letters.replace(hybrid.MIXER, "").replace(hybrid.EXPERTS, hybrid.DENSE)
    return plain == (hybrid.ATTENTION + hybrid.DENSE) * (len(plain) // 2)


def _add_args(extras: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    own = extras.get("args")
    return {**extras, "args": replace(own, state=dict(said))} if isinstance(own, Opaque) and said else dict(extras)


def _sources(chosen: Chosen, said: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sources, the first with the new arguments.

    The model's config is derived from them, and so are the output's arguments if the extras are dropped.
    """
    first = chosen.sources[0]
    catalog = replace(first.catalog, extras=_add_args(first.catalog.extras, said))
    return (first._replace(catalog=catalog), *chosen.sources[1:])
