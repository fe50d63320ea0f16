"""An adapter without its config: what its tensors are named says that it is one, and nothing else does.

`adapter_config.json` says rank scaling, targets and method; PEFT loads no adapter without it (0.21.2 `peft_model.py`,
`from_pretrained`), and no tensor shows `lora_alpha`. Read as what they are, plain tensors, with a note.
Cost: the first name, and a look at all names where that one is an adapter's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import Incomplete
from ckpt_tool.storage.source import Tree

CONFIG = "adapter_config.json"
PADDLE_CONFIG = "lora_config.json"
NO_CONFIG = "E1612"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class PeftHints(Hint):
    """What the reader of an adapter remembers."""

    KEY: ClassVar[str] = "peft"
    config: Mapping[str, Any]  # adapter_config.json


def adapter_config(catalog: Catalog) -> Mapping[str, Any]:
    """The config of an adapter, {} of any other source."""
    hint = catalog.hints.get(PeftHints)
    return hint.config if hint else {}


def is_adapter(keys: Iterable[TensorKey]) -> bool:
    """Are these the tensors of an adapter alone: pairs of `lora_A` and `lora_B`, and otherwise only tensors that PEFT
    saves too?"""
    names = iter(keys)
    first = next(names, None)
    if first is None or not (first.name.startswith(_PREFIX) or ".lora_" in first.name):
        return False
    rest = [first.name, *(key.name for key in names)]
    pairs = any(".lora_A" in name or "lora_embedding_A" in name for name in rest)
    if not pairs or not all(name.startswith(_PREFIX) or ".lora_" in name for name in rest):
        return False
    from ckpt_tool.formats.adapters.inside import find_inside

    return find_inside(rest) is None


def _said(tree: Tree) -> tuple[str, str]:
    """(what is missing, what to do)."""
    if tree.local and tree.single is not None and (tree.root / CONFIG).is_file():
        return f"{CONFIG} is next to it and belongs to it", "pass the folder that holds both"
    return (
        f"its {CONFIG} is missing, which says scaling, targets and method",
        f"fetch {CONFIG} into the folder of the weights, and pass the folder",
    )


def note_of(tree: Tree) -> Note:
    """The note on an adapter that is read without its config."""
    what, hint = _said(tree)
    return Note("W-no-adapter-config", f"this is an adapter, and {what}: {hint}", tree.single)


def without_config(tree: Tree) -> Incomplete:
    """The error where the config is needed."""
    what, hint = _said(tree)
    return Incomplete(f"this is an adapter, and {what}", code=NO_CONFIG, path=tree.display(), hint=hint)
