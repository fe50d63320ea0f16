"""A whole model with an adapter inside, on its way to an output: kept under its own names, taken apart, or refused.

    --to peft                                  the adapter alone, with the config that is near the checkpoint
    formats that keep names, --dialect keep    as it is, with a note
    any other output                           an error that names the command that folds the adapter

No model has weights called `q_proj.base_layer.weight`: transformers would leave them out and start from random values.
Folding is `ckpt merge SRC OUT --method lora` (`adapters.inside`), which a conversion does not do unasked. A file of
torch's is a model's, too, where it holds no training state. Cost: one look at each name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.asked import ADAPTER_WORDS, contain_any
from ckpt_tool.core.hints import Dialect
from ckpt_tool.core.tensor import MASTER, MODEL, TensorKey
from ckpt_tool.errors import Incomplete, UsageError
from ckpt_tool.formats.adapters.lone import PeftHints, is_adapter
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind
from ckpt_tool.sources.opening import Opened

if TYPE_CHECKING:
    from ckpt_tool.formats.adapters.inside import AdapterInside

INSIDE = "E2933"
SEVERAL = "E2934"
BARE = "E3064"
HUB = "hf"


def without_adapter_inside(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen`, which holds no adapter inside a model any more unless the output keeps names.

    Raises UsageError E2933 where it would, Incomplete E3064 where the adapter is missing, E2934 and what finding a
    config raises for `--to peft`.
    """
    inside = inside_of(chosen)
    fmt = job.fmt
    writing = job.writing
    if fmt.holds.adapter and writing.dialect != "keep" and chosen.all_hints.get(PeftHints) is None:
        if inside is not None:
            return _adapter_alone(chosen, job, inside)
        lone = _lone_adapter(chosen)
        return chosen if lone is None or not has_config(chosen.sources[0], job) else _adapter_alone(chosen, job, lone)
    if inside is None:
        if not (_keeps_names(chosen, job) or writing.aoa or job.reading.lenient):
            _refuse_bare_modules(chosen, weights_of(chosen))
        return chosen
    if _keeps_names(chosen, job):
        line = f"{_described(inside)}: names are kept, and both stay as they are"
        return chosen if line in chosen.notes else chosen.noted(line)
    if writing.aoa and inside.base:  # statements say how names change; what is left is looked at afterwards
        return chosen
    raise refusal(chosen, job, inside)


def _keeps_names(chosen: Chosen, job: Conversion) -> bool:
    """Does the output keep the job's own names on purpose? What transformers would take for a model does not."""
    joined_on_purpose = any(opened.format.holds.adapter for opened in chosen.sources)  # --method union
    if job.writing.dialect == "keep" or joined_on_purpose:
        return True
    if job.dialect == "keep":
        has_training_state = any(row.tensor.key.state != MODEL for row in chosen.stored)
        return has_training_state or not job.fmt.holds.single
    return job.dialect == chosen.home != HUB


def inside_of(chosen: Chosen) -> AdapterInside | None:
    """The adapter inside the model that is chosen, None where there is none."""
    if not contain_any((row.tensor.key.name for row in chosen.stored), ADAPTER_WORDS):
        return None
    from ckpt_tool.formats.adapters.inside import find_inside

    return find_inside(weights_of(chosen))


def weights_of(chosen: Chosen) -> dict[str, Stored]:
    """The weights by name: the model's, and the fp32 masters of those that the model lacks (ZeRO 3 keeps no others of
    what it trains, such as an adapter)."""
    model = chosen.model
    masters = {row.tensor.key.name: row for row in chosen.stored if row.tensor.key.state == MASTER}
    return {**masters, **model} if masters else model


def _refuse_bare_modules(chosen: Chosen, names: Collection[str]) -> None:
    """Raise Incomplete E3064 where the base's weight of an adapted module is there, and no part of the adapter."""
    from ckpt_tool.formats.adapters.inside import find_bare_modules

    if not contain_any(names, (".base_layer.", ".original_module.")):
        return
    bare = find_bare_modules(names)
    if bare:
        raise Incomplete(
            f"{len(bare)} modules were trained with an adapter and no tensor of it is here, only the base's weights,"
            f" under names that no library loads: {bare[0]}",
            code=BARE,
            path=chosen.sources[0].path,
            key=bare[0],
            faults=[f"{module} too" for module in bare[1:50]],
            hint="fetch or save it with the adapter's tensors; if the base alone is meant, --rename"
            " '*.base_layer.*=*.*' names its weights; --dialect keep writes the names as they are",
        )


def _refuse_halves(chosen: Chosen, written: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Raise for an adapter to be written alone of which a part is missing: InconsistentCheckpoint E2936 for half a
    pair, Incomplete E3064 for a module without any.

    Args:
        written: stored name -> name in PEFT's file, of all that is to be written: what PEFT saves next to the adapter's
            own tensors (an output layer in `modules_to_save`) too.
    """
    from ckpt_tool.formats.adapters.pairs import find_contradictions

    weights = weights_of(chosen)
    adapter = {name: weights[stored].tensor for stored, name in written.items()}
    faults = list(find_contradictions(config, adapter))
    if faults:
        faults[0].path = chosen.sources[0].path
        faults[0].faults = tuple(fault.message for fault in faults[1:50])
        raise faults[0]
    stored_names = {key.name for key in chosen.sources[0].catalog.tensors if key.state in (MODEL, MASTER)}
    _refuse_bare_modules(chosen, stored_names)


def has_config(opened: Opened, job: Conversion) -> bool:
    """Does anything state the scaling of an adapter that is saved alone?"""
    from ckpt_tool.sources.adapter_config import find_near

    return job.reading.lora_alpha is not None or find_near(opened) is not None


def _lone_adapter(chosen: Chosen) -> AdapterInside | None:
    """An adapter without a model around it, as a job saves that leaves frozen weights out; None for any other."""
    from ckpt_tool.formats.adapters.inside import split_names

    weights = weights_of(chosen)
    if not is_adapter(row.tensor.key for row in weights.values()):
        return None
    parts = split_names(weights)
    return parts._replace(embeddings=parts.wrapped)  # what PEFT saved of the base with the adapter belongs to it


def refusal(chosen: Chosen, job: Conversion, inside: AdapterInside) -> UsageError:
    """The error of an output that has no place for it."""
    fold = "ckpt merge SRC OUT --method lora folds it into the model"
    adapter = "" if inside.others else "; --to peft writes the adapter alone"
    if inside.others:
        fold = "merge it with the library that trained it"
    return UsageError(
        f"{_described(inside)}, and {job.fmt.name} has no such names: no library would load them",
        code=INSIDE,
        path=chosen.sources[0].path,
        hint=f"{fold}{adapter}; --dialect keep writes the names as they are",
    )


def _described(inside: AdapterInside) -> str:
    if inside.others:
        return f"an adapter ({', '.join(inside.others[:3])}) is inside this model"
    return f"a LoRA is inside this model ({len(inside.adapter)} tensors next to {len(inside.base)} of the base)"


def refuse_several(inside: AdapterInside, path: str) -> None:
    """Raise UsageError E2934 for a model with several adapters inside, or with one that is no LoRA of PEFT's."""
    if inside.others:
        raise UsageError(
            f"the adapter inside this model is no LoRA of PEFT's: {', '.join(inside.others[:3])}",
            code=SEVERAL,
            path=path,
            hint="merge it with the library that trained it",
        )
    if len(inside.adapters) > 1:
        first, second = inside.adapters[:2]
        raise UsageError(
            f"{len(inside.adapters)} adapters are inside this model: {', '.join(inside.adapters[:5])}",
            code=SEVERAL,
            path=path,
            hint=f"leave all but one out, such as --remove-keys '*.{second}.*' '*.{second}' to keep {first}",
        )


def _trained_biases(inside: AdapterInside, which: object) -> dict[str, str]:
    """Stored name -> the name in PEFT's file, of the base's biases that were trained. which: the config's `bias`."""
    adapted = {name.partition(".lora_")[0] for name in inside.adapter.values() if ".lora_" in name}
    biases = {}
    for stored, name in inside.wrapped.items():
        module, _, last = name.rpartition(".")
        is_adapted = module.removesuffix(".base_layer") in adapted
        if last == "bias" and (which == "all" or (which == "lora_only" and is_adapted)):
            biases[stored] = name
    return biases


def _adapter_alone(chosen: Chosen, job: Conversion, inside: AdapterInside) -> Chosen:
    """The adapter under the names of PEFT's files, with its config."""
    from ckpt_tool.sources.adapter_config import config_of_inside

    refuse_several(inside, chosen.sources[0].path)
    model = weights_of(chosen)
    shapes = {name: row.tensor.shape for name, row in model.items()}
    found = config_of_inside(chosen.sources[0], inside, shapes, job.reading.lora_alpha)
    renamed = {**inside.embeddings, **inside.adapter, **_trained_biases(inside, found.config.get("bias"))}
    if not job.reading.lenient:
        _refuse_halves(chosen, renamed, found.config)

    kept = []
    for stored, name in renamed.items():
        row = model[stored]
        key = TensorKey(name, MODEL)
        kept.append(row._replace(tensor=row.tensor._replace(key=key, path=())))
    base = [row.tensor for name, row in model.items() if name not in renamed]
    taken = {row.tensor.key for row in model.values()}
    states = [row.tensor for row in chosen.stored if row.tensor.key not in taken]
    return replace(
        chosen,
        stored=tuple(kept),
        dropped=(
            *chosen.dropped,
            *left_behind(base, "it is the base's: a folder of PEFT holds the adapter alone", named=False),
            *left_behind(states, "a folder of PEFT holds no training state", named=False),
        ),
        notes=(*chosen.notes, f"the adapter inside the model, with the config of {found.path}"),
        hints=chosen.all_hints.having(PeftHints(found.config), Dialect("hf")),
    )
