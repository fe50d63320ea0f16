"""Reads the optimizer that a trainer saved in a file next to its model, and names its states by their parameters.

    accelerator.save_state:  model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl
    transformers' Trainer:   model.safetensors, optimizer.pt, scheduler.pt, rng_state.pth

`optimizer.state_dict()` identifies parameters by number (`formats.state_dict.optimizer_ids`). Their names follow from
the order in which the model has them: that of a `.bin` file, else what `formats.state_dict.parameter_order` derives. If
neither gives an order, the file is not read, and a note gives the reason; `conversion.selection` refuses to drop it
without `--drop`. transformers 5 has other parameters in memory than in its files (experts are fused), and numbers
those in memory: `ReadOptions.walked`.

Sources: accelerate 1.15.0 `checkpointing.py`, transformers 5.23.0 `trainer.py`. Cost: the pickles of two small files'
heads. What it does not do: several models or optimizers (`model_1.safetensors`), 8-bit states, RNG states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.tensor import EXTRAS, MODEL, LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats.base import ReadOptions, WalkedModel
from ckpt_tool.formats.beside import RECIPE, SCHEDULER, UNREAD, lost_optimizer, optimizer_files, recipe_note
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.optimizer_ids import numbers_of, shape_of
from ckpt_tool.formats.state_dict.parameter_order import Shape, class_order, tree_order
from ckpt_tool.formats.state_dict.paths import UNNAMED, Leaf, name_leaves
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.pickles.survey import unsafe_names
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse

_ROOT = "optimizer"
_BESIDE = "where it has names, ckpt convert it with --dialect hf, and ckpt merge the two"
_CONFIG = "config.json"
_LIMIT = 16 << 20
_Walk = Callable[[Mapping[str, Any], Mapping[str, Shape]], WalkedModel | None]


def with_optimizer(tree: Tree, catalog: Catalog, options: ReadOptions, *, in_order: bool) -> Catalog:
    """The catalog with the states of the optimizer next to its model, where there is one whose parameters can be named.
    in_order: are the tensors as the model has them?"""
    found = [
        name
        for name in optimizer_files(tree.names() if tree.single is None else (), catalog.files)
        if not name.endswith(".pdopt")
    ]
    if not found or any(key.state != MODEL for key in catalog.tensors):
        lost = lost_optimizer(tree.names()) if tree.single is None else ()
        return replace(catalog, notes=(*catalog.notes, *lost)) if lost else catalog
    if found[0] == RECIPE:
        return replace(catalog, notes=(*catalog.notes, recipe_note(RECIPE, _BESIDE)))
    if len(found) > 1:
        return _unread(catalog, found[0], f"one of {len(found)} optimizers")
    try:
        content = read_content(tree, found[0])
        if content.unsafe:
            catalog = replace(catalog, unsafe=(*catalog.unsafe, *content.unsafe))
        config = _config(tree) if options.config is None else options.config
        ways = _ways(catalog, content, config, options.walked, in_order=in_order)
        return _with_scheduler(tree, joined(tree.display(found[0]), catalog, found[0], content, ways))
    except StorageError:  # a disk that fails: the optimizer is there, and must not be left out
        raise
    except CkptError as e:
        code = unsafe_names(tree, found)
        return replace(_unread(catalog, found[0], e.message, e), unsafe=(*catalog.unsafe, *code))


def _unread(catalog: Catalog, name: str, why: str, fault: CkptError | None = None) -> Catalog:
    note = Note(UNREAD, f"{name} is not read: {why}", name, fault=fault)
    return replace(catalog, notes=(*catalog.notes, note))


class Way(NamedTuple):
    """How the trainer may have had the model."""

    shapes: Mapping[str, Shape]  # {parameter: elements}
    order: Sequence[str]  # of its parameters
    walked: WalkedModel | None  # how its names become those in the files, None where they are the same


def _ways(
    catalog: Catalog, content: TorchContent, config: Mapping[str, Any], walk: _Walk, *, in_order: bool
) -> list[Way]:
    """The ways in which the model's parameters may be numbered, the likeliest first: as the class has them in memory,
    then as the files have them."""
    stored = {key.name: tensor.shape for key, tensor in catalog.tensors.items()}
    if in_order:
        return [Way(stored, list(stored), None)]
    walked = walk(config, stored)
    found = []
    for shapes, each in ((walked.shapes, walked), (stored, None)) if walked else ((stored, None),):
        order = _order(shapes, config.get("model_type"), content)
        found += [] if order is None else [Way(shapes, order, each)]
    return found


def joined(shown: str, catalog: Catalog, name: str, content: TorchContent, ways: Sequence[Way]) -> Catalog:
    """The catalog with the states of an optimizer's file, by the first way that fits; with a note where none does.
    shown: the file in messages, name: in the tree."""
    why = "it numbers its parameters, and nothing states in which order the model has them"
    beside = content.extras if isinstance(content.extras, dict) else {}
    for shapes, order, walked in ways:
        leaves = [Leaf(("model", each), shapes[each], _place(catalog, each, walked)) for each in order]
        leaves += [Leaf((_ROOT, *path), array.shape) for path, array in content.leaves]
        named = name_leaves(leaves, {_ROOT: beside}, path=shown)
        unnamed = next((note.message for note in named.notes if note.code == UNNAMED), None)
        if unnamed is None:
            break
        why = unnamed
    else:
        return _unread(catalog, name, why)

    states: dict[TensorKey, LogicalTensor] = {}
    for key, (path, array) in zip(named.keys[len(order) :], content.leaves, strict=True):
        is_rate = key.state == EXTRAS and path[:1] == ("param_groups",)  # an lr that is a tensor, as torchao's have
        if key.name not in shapes and not is_rate:
            return _unread(catalog, name, f"it has states of {key.name}, which the model does not have")
        states[key] = simple_tensor(key, array, (_ROOT, *path))

    states, unread = set_apart(states)
    roots = named.roots
    if walked is not None:
        rates = {key: tensor for key, tensor in states.items() if key.state == EXTRAS}
        moved, names = walked.stored([tensor for key, tensor in states.items() if key not in rates])
        states = {tensor.key: tensor._replace(path=()) for tensor in moved} | rates
        beside = {**beside, "param_groups": _by_name(beside.get("param_groups"), roots.ids.get((_ROOT,), {}), names)}
        roots = replace(roots, ids={})

    return replace(
        catalog,
        tensors={**catalog.tensors, **states},
        extras={**catalog.extras, _ROOT: beside},
        files=(*catalog.files, name),
        notes=(*catalog.notes, *named.notes, *notes_of(unread)),
        hints=catalog.hints.having(roots),
        unread=(*catalog.unread, *unread),
    )


def _by_name(groups: Any, ids: Mapping[str, str], names: Mapping[str, tuple[str, ...]]) -> Any:
    """Groups that list parameters as the files name them in place of their numbers: one number may be of several."""
    if not isinstance(groups, list):
        return groups

    named_groups = []
    for group in groups:
        params: dict[str, None] = {}
        for number in group["params"]:
            stored_name = ids.get(str(number), str(number))
            params |= dict.fromkeys(names.get(stored_name, (stored_name,)))
        named_groups.append({key: value for key, value in group.items() if key != "param_names"})
        named_groups[-1]["params"] = list(params)
    return named_groups


def _with_scheduler(tree: Tree, catalog: Catalog) -> Catalog:
    """The catalog with the plain values of a schedule among its extras."""
    for name in filter(SCHEDULER.fullmatch, tree.names()):
        try:
            content = read_content(tree, name)
        except StorageError:
            raise
        except CkptError:  # it stays among the files that are not read
            catalog = replace(catalog, unsafe=(*catalog.unsafe, *unsafe_names(tree, (name,))))
            continue
        catalog = replace(catalog, unsafe=(*catalog.unsafe, *content.unsafe))
        if not content.leaves and not content.unsafe:
            extras = {**catalog.extras, "scheduler": content.extras}
            catalog = replace(catalog, extras=extras, files=(*catalog.files, name))
    return catalog


def _place(catalog: Catalog, name: str, walked: WalkedModel | None) -> tuple[object, ...] | None:
    """Equal for tied weights, which an optimizer counts once; None for what may be made of several."""
    if walked is not None:
        return None
    array = catalog.tensors[TensorKey(name)].chunks[0].array
    return array.path, array.offset, array.shape, array.strides


def _order(shapes: Mapping[str, Shape], model_type: object, content: TorchContent) -> list[str] | None:
    """The names of the model in the order of its parameters."""
    by_class = class_order(shapes, model_type)
    groups = content.extras.get("param_groups") if isinstance(content.extras, dict) else None
    numbers = numbers_of(groups if isinstance(groups, list) else [])
    if by_class is not None or numbers is None:
        return by_class or list(shapes)  # names of its own need no order
    moments: dict[Any, dict[str, tuple[int, ...]]] = {}
    for path, array in content.leaves:
        if len(path) == 3:
            moments.setdefault(path[1], {})[str(path[2])] = array.shape
    return _filled(shapes, tree_order(shapes, _shapes(numbers, moments)))


def _shapes(
    numbers: Sequence[Sequence[int]], moments: Mapping[Any, Mapping[str, tuple[int, ...]]]
) -> list[list[tuple[int, ...] | None]]:
    shapes = {number: shape_of(states) for number, states in moments.items()}
    return [list(map(shapes.get, group)) for group in numbers]


def _filled(shapes: Mapping[str, Any], order: list[str] | None) -> list[str] | None:
    """The order with what it passes over behind it."""
    return None if order is None else [*order, *(name for name in shapes if name not in set(order))]


def _config(tree: Tree) -> Mapping[str, Any]:
    if not tree.exists(_CONFIG):
        return {}
    config = parse(tree.read_whole(_CONFIG, limit=_LIMIT), path=tree.display(_CONFIG))
    return config if isinstance(config, dict) else {}
