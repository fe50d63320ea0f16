"""Every format, by name. Modules are imported when first asked for.

To add a format: write `formats/NAME/format.py` with a `FORMAT`, add one row here, put fixtures under `fixtures/NAME/`; the
conformance suite does the rest. A row's second half is optional: a quick look at the names which is False only where
the format's own `detect` must say None; it spares the import (20 ms for those that read pickles).
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tool.errors import UnknownFormat, UsageError, near_misses
from ckpt_tool.formats.base import Evidence, Format
from ckpt_tool.storage.source import Tree


def _safetensors() -> Format:
    from ckpt_tool.formats.hf.format import FORMAT

    return FORMAT


def _torch() -> Format:
    from ckpt_tool.formats.torch.format import FORMAT

    return FORMAT


def _dcp() -> Format:
    from ckpt_tool.formats.dcp.format import FORMAT

    return FORMAT


def _sharded() -> Format:
    from ckpt_tool.formats.sharded.format import FORMAT

    return FORMAT


def _megatron() -> Format:
    from ckpt_tool.formats.megatron.format import FORMAT

    return FORMAT


def _megatron_dist() -> Format:
    from ckpt_tool.formats.megatron_dist.format import FORMAT

    return FORMAT


def _deepspeed_universal() -> Format:
    from ckpt_tool.formats.deepspeed_universal.format import FORMAT

    return FORMAT


def _deepspeed() -> Format:
    from ckpt_tool.formats.deepspeed.format import FORMAT

    return FORMAT


def _paddle_unified() -> Format:
    from ckpt_tool.formats.paddle_unified.format import FORMAT

    return FORMAT


def _paddle() -> Format:
    from ckpt_tool.formats.paddle.format import FORMAT

    return FORMAT


def _paddle_flex() -> Format:
    from ckpt_tool.formats.paddle_flex.format import FORMAT

    return FORMAT


def _meta() -> Format:
    from ckpt_tool.formats.meta.format import FORMAT

    return FORMAT


def _peft() -> Format:
    from ckpt_tool.formats.peft.format import FORMAT

    return FORMAT


def _may_be_torch(tree: Tree) -> bool:
    return tree.single is not None or not any(name.endswith(".safetensors") for name in tree.names())


def _may_be_dcp(tree: Tree) -> bool:
    return tree.single is None and any(".metadata" in path or path.endswith(".distcp") for path in tree.listing())


def _may_be_megatron(tree: Tree) -> bool:
    return tree.single is None and any("mp_rank_" in path for path in tree.listing())


def _may_be_megatron_dist(tree: Tree) -> bool:
    return _may_be_dcp(tree) or tree.single is None and "metadata.json" in tree.names()


def _may_be_universal(tree: Tree) -> bool:
    return tree.single is None and any(path.startswith("zero/") for path in tree.listing())


def _may_be_sharded(tree: Tree) -> bool:
    names = tree.names()
    return "ckpt.index.json" in names or any(n.endswith(".safetensors") and n.count(".") > 1 for n in names)


def _may_be_deepspeed(tree: Tree) -> bool:
    return tree.single is None and any(name.endswith("_states.pt") for name in tree.names())


def _may_be_paddle_unified(tree: Tree) -> bool:
    return tree.single is None and any(".safetensors" in name for name in tree.names())


def _may_be_paddle(tree: Tree) -> bool:
    return any(name.endswith((".pdparams", ".pdopt", ".pd", ".pdema")) for name in tree.names())


def _may_be_paddle_flex(tree: Tree) -> bool:
    ends = (".metadata", ".lock", ".distcp", ".safetensors")
    return tree.single is None and any(path.endswith(ends) for path in tree.listing())


def _may_be_meta(tree: Tree) -> bool:
    return tree.single is None and any(name.startswith("consolidated") for name in tree.names())


def _may_be_peft(tree: Tree) -> bool:
    return tree.single is None and "adapter_config.json" in tree.names()


def _may_be(tree: Tree) -> bool:
    return True


_ROWS: dict[str, tuple[Callable[[], Format], Callable[[Tree], bool]]] = {
    "safetensors": (_safetensors, _may_be),
    "torch": (_torch, _may_be_torch),
    "dcp": (_dcp, _may_be_dcp),
    "sharded": (_sharded, _may_be_sharded),
    "megatron": (_megatron, _may_be_megatron),
    "megatron-dist": (_megatron_dist, _may_be_megatron_dist),
    "deepspeed-universal": (_deepspeed_universal, _may_be_universal),
    "deepspeed": (_deepspeed, _may_be_deepspeed),
    "paddle": (_paddle, _may_be_paddle),
    "paddle-unified": (_paddle_unified, _may_be_paddle_unified),
    "paddle-flex": (_paddle_flex, _may_be_paddle_flex),
    "meta": (_meta, _may_be_meta),
    "peft": (_peft, _may_be_peft),
}
NAMES = tuple(_ROWS)


def by_name(name: str) -> Format:
    """The format called `name`. Raises UsageError E0251 with near misses."""
    row = _ROWS.get(name)
    if row is None:
        raise UsageError(
            f"this build has no format {name!r}", code="E0251",
            hint=near_misses(name, NAMES) or f"the formats are {', '.join(NAMES)}",
        )  # fmt: skip
    return row[0]()


def may_be(name: str, tree: Tree) -> bool:
    """False where format `name` need not be asked: its `detect` says None."""
    return _ROWS[name][1](tree)


def detect(tree: Tree) -> tuple[Format, Evidence]:
    """The one format that claims the tree. Raises UnknownFormat (E0390) for none, (E0391) for several."""
    asked = ((name, by_name(name)) for name in NAMES if may_be(name, tree))
    found = [(name, fmt, evidence) for name, fmt in asked if (evidence := fmt.detect(tree))]
    if not found:
        raise UnknownFormat(
            f"no known checkpoint: {_looks_like(tree)}", code="E0390", path=tree.display(),
            hint=f"this build reads {', '.join(NAMES)}; if it is one of them, say which with --from",
        )  # fmt: skip
    if len(found) > 1:
        raise UnknownFormat(
            f"two formats claim it: {' and '.join(name for name, _, _ in found)}", code="E0391", path=tree.display(),
            hint=f"say which with --from {found[0][0]} or --from {found[1][0]}",
            faults=[f"{name}: {evidence.why}" for name, _, evidence in found],
        )  # fmt: skip
    return found[0][1], found[0][2]


def _looks_like(tree: Tree) -> str:
    """What the tree holds, for the message of a person who passed the wrong thing."""
    names = list(tree.listing())
    if not names:
        return "the folder is empty"
    if tree.single is not None:
        head = tree.head(tree.single, 64)
        kinds = (
            (b"version https://git-lfs", "the file is a Git LFS pointer (run git lfs pull)"),
            (b"<!DOCTYPE", "the file is an HTML page, probably an error page of a download"),
            (b"<html", "the file is an HTML page, probably an error page of a download"),
            (b"\x1f\x8b", "the file is a gzip archive: unpack it first"),
            (b"GGUF", "the file is GGUF, an inference format"),
        )
        return next((words for magic, words in kinds if head.startswith(magic)), f"the file begins with {head[:8]!r}")
    return f"the folder holds {len(names)} files, among them {', '.join(names[:3])}"
