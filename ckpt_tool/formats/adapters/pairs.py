"""What headers show to be wrong with an adapter: tensors without elements, half pairs, ranks and targets that its
config contradicts.

    every tensor is [0]                          saved from ZeRO 3 without gathering: the values are in global_step*/
    q_proj.lora_A (2, 16), r is 4                of another training than its config
    q_proj.lora_A without q_proj.lora_B          cut short
    k_proj.lora_A, target_modules [q_proj]       PEFT makes no adapter for k_proj, and leaves the tensor out unsaid
    modules_to_save [lm_head], no lm_head        cut short

PEFT loads most of these without a word (0.21.2 `utils/save_and_load.py`: load_state_dict with strict=False). What is
found here is certain; whether the adapter is one of a given base is `adapters.targets`'. Cost: one look at each name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.adapters.inside import split_names
from ckpt_tool.formats.adapters.lone import adapter_config
from ckpt_tool.formats.adapters.settings import settings_of

EMPTY = "E2935"
CONTRADICTED = "E2936"
_SHOWN = 20
_PREFIX = "base_model.model."


def is_empty(catalog: Catalog) -> bool:
    """Has none of its tensors an element?"""
    return bool(catalog.tensors) and all(tensor.numel == 0 for tensor in catalog.tensors.values())


def find_adapter_faults(catalog: Catalog, path: str) -> Iterator[CkptError]:
    """Every fault of this kind: Incomplete E2935 (tensors without elements), InconsistentCheckpoint E2936.

    Args:
        path: what messages call the adapter's folder.
    """
    for fault in _find_faults(catalog):
        fault.path = fault.path or path
        yield fault


def _find_faults(catalog: Catalog) -> Iterator[CkptError]:
    config = adapter_config(catalog)
    if config.get("peft_type") != "LORA":
        return
    tensors = {key.name: tensor for key, tensor in catalog.tensors.items()}
    empty = [name for name, tensor in tensors.items() if tensor.numel == 0]
    if empty:
        which = "no tensor has" if len(empty) == len(tensors) else f"{len(empty)} of {len(tensors)} tensors are not"
        yield Incomplete(
            f"{which} a single element: the adapter was saved from ZeRO 3 without its values being gathered",
            code=EMPTY,
            key=empty[0],
            faults=empty[1:_SHOWN],
            hint="take it out of the job's checkpoint: ckpt convert CHECKPOINT/global_stepN OUT --to peft",
        )
    yield from find_contradictions(config, tensors)


def find_contradictions(
    config: Mapping[str, Any], tensors: Mapping[str, LogicalTensor]
) -> Iterator[InconsistentCheckpoint]:
    """E2936 for each half of a pair without the other, and for what the config contradicts."""
    pairs = _pairs_of(tensors)
    try:
        settings = settings_of(config, "", lenient=True)
        ranks = {module: settings.rank_of(module) for module in pairs}
    except CkptError:  # a method that is no sum, or a config that makes no sense: folding says which
        return

    for module, (a, b) in pairs.items():
        if a is None or b is None:
            present = a or b
            name = present.key.name if present is not None else module
            yield _contradiction(name, f"{module} has a lora_{'B' if a is None else 'A'} alone")
            continue
        if a.numel == 0 or b.numel == 0 or len(a.shape) < 2 or len(b.shape) < 2:
            continue
        rank = a.shape[0]
        if b.shape[1] != rank:
            yield _contradiction(a.key.name, f"lora_A {list(a.shape)} and lora_B {list(b.shape)} are no pair")
        elif rank != ranks[module] and not (settings.parameters and rank % ranks[module] == 0):
            yield _contradiction(a.key.name, f"its rank is {rank}, and the config says {ranks[module]}")

    targets = config.get("target_modules")
    if isinstance(targets, list) and not settings.parameters and not config.get("target_parameters"):
        endings = tuple(f".{target}" for target in targets if isinstance(target, str))
        strange = [module for module in pairs if not f".{module}".endswith(endings)]
        if strange:
            yield _contradiction(
                _name_in(tensors, strange[0]),
                f"{len(strange)} adapted modules, such as {strange[0]}, are no target_modules of the config: PEFT "
                "would leave them out",
            )
    promised = config.get("modules_to_save")
    for saved in promised if isinstance(promised, list) else ():
        if not any(f".{saved}." in f".{name}" for name in tensors):
            yield _contradiction(None, f"{saved} belongs to modules_to_save, and no tensor of it is there")


def _pairs_of(
    tensors: Mapping[str, LogicalTensor],
) -> dict[str, tuple[LogicalTensor | None, LogicalTensor | None]]:
    """Module -> its lora_A and lora_B. Embeddings have theirs the other way round, and are not looked at."""
    pairs: dict[str, tuple[LogicalTensor | None, LogicalTensor | None]] = {}
    for stored, name in split_names(tensors).adapter.items():
        module, _, kind = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        a, b = pairs.get(module, (None, None))
        if kind == "lora_A":
            pairs[module] = (tensors[stored], b)
        elif kind == "lora_B":
            pairs[module] = (a, tensors[stored])
    return pairs


def _name_in(tensors: Mapping[str, LogicalTensor], module: str) -> str | None:
    return next((name for name in tensors if f".{module}." in name), None)


def _contradiction(name: str | None, what: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(what, code=CONTRADICTED, key=name)
