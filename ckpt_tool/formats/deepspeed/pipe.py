"""A PipelineModule's names: layer files hold local names, the optimizer's tables hold global ones.

    layer_03-model_states.pt  {"norm.weight": ...}            ->  3.norm.weight
    layer_00-model_states.pt  {"weight": ..., "word.weight"}  ->
          tied_modules.embed.weight, tied_modules.embed.word.weight

A tied layer is saved once, by the first stage that has it; its parameters stand as `tied_modules.KEY.NAME` in the
tables of every stage that uses it. The file does not say its key: it is the one whose names and shapes the file has.
Source: DeepSpeed 0.19.8 `runtime/pipe/module.py` (`save_state_dict`, `ckpt_layer_path`, `_build`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

TIED = "tied_modules."
Shape = tuple[int, ...]


def tied_keys(shapes: Mapping[str, Shape], shared: Iterable[str]) -> dict[str, dict[str, Shape | None]]:
    """Key -> its local names, with the shapes of those that the optimizer knows, in order of first sight."""
    out: dict[str, dict[str, Shape | None]] = {}
    for name in (*shapes, *shared):
        if name.startswith(TIED):
            key, _, local = name[len(TIED) :].partition(".")
            out.setdefault(key, {}).setdefault(local, shapes.get(name))
    return out


def key_of_layer(
    index: int, local: Mapping[str, Shape], known: Mapping[str, Shape], tied: Mapping[str, Mapping[str, Shape | None]]
) -> str | None:
    """The tied key whose names the file of layer `index` has; None for a layer of its own.

    local: the file's names and shapes. known: the shapes of all global names. tied: keys that no file was given yet.
    """
    if any(f"{index}.{name}" in known for name in local):
        return None
    for key, names in tied.items():
        wanted = [name for name, shape in names.items() if shape is not None]
        if wanted and all(name in local and local[name] == names[name] for name in wanted):
            return key
    return None


def prefix_of(index: int, key: str | None) -> str:
    """What stands before a layer's local names."""
    return f"{index}." if key is None else f"{TIED}{key}."
