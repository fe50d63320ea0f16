"""The path of a leaf in a JAX tree <-> its logical name and state.

    ("params", "layer_0", "q", "kernel")                      layer_0.q.kernel
    ("params", "params", "decoder", "layers", "w")            decoder.layers.w                  MaxText's TrainState
    ("opt_state", 1, 0, "mu", "layer_0", "q", "kernel")       layer_0.q.kernel [exp_avg]        optax, at any depth
    ("opt_state", 1, 0, "count")                              a plain value: the step of the states next to it
                                                              (`Catalog.count`, if it is the only one)
    ("transformer/layer_0/attn", "w")                         transformer/layer_0/attn.w        a bare tree
    ("step",), a scalar                                       a plain value
    ("model", "q", "kernel", "value")                         q.kernel                          nnx: a Variable's value

Rules:
1. The model is everything below `params`, `model`, ... at the top; a second `params`, if it is the only key there, is no
   part of a name.
2. Below an optimizer's root, a key that is followed by the path of a parameter is a state: `mu` is `exp_avg`, `nu`
   `exp_avg_sq`, `trace` `momentum_buffer`, others keep their own name; `mu` next to Muon's `ns_coeffs` is
   `momentum_buffer`, as in torch.optim.Muon: Muon has no `nu`, while Adam's `mu` without `nu` is a fault.
3. Leaves below `ema_params`, `master_params` and the like have that state.
4. In a tree without any of these roots every array belongs to the model.
5. Of the other leaves, scalars and texts are plain values, and arrays have the state `extras`.
6. If every leaf of the model is the `value` of a Variable, that key is no part of a name.
The path is always kept, so writing Orbax puts each leaf back at its path.

Source: optax 0.2.8 `_src/transform.py` (ScaleByAdamState, TraceState), `contrib/_muon.py` (MuonState), flax 0.12
`training/train_state.py`, `nnx/variablelib.py`, MaxText of 2026 `train_utils`. Orbax keeps named tuples as dicts of
their fields, so only these names show the classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, Path, TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.state_dict.one_name import loses_one, refuse_one_name
from ckpt_tool.formats.state_dict.words import MASTER_ROOTS, MODEL_ROOTS, OPTIMIZER_ROOTS, is_average

STATES = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq", "trace": "momentum_buffer"}
_BY_STATE = {state: name for name, state in STATES.items()}
COUNT = "count"  # of an optimizer's steps
COUNTED = ("mu", "nu", "nu_max")  # optax keeps these in the same named tuple as the count
_MUON = "ns_coeffs"  # a field that only Muon's state has
_MOMENTUM = "momentum_buffer"
_VALUE = "value"
_OPTIMIZERS = OPTIMIZER_ROOTS | {"opt_state"}
_PARAMS = "params"


@dataclass(frozen=True, slots=True)
class Trees(Hint):
    """The structure of a source's trees, so that an output can have the same."""

    KEY: ClassVar[str] = "orbax"
    rows: tuple[Any, ...]  # (path, value_type, dtype) of each leaf
    model: tuple[Any, ...]  # path of the parameters
    optimizer: tuple[Any, ...]  # path of the state that has `mu`
    items: tuple[str, ...] = ()  # first keys of paths that are items of a step
    json: tuple[str, ...] = ()  # names of the JSON items
    zarr3: bool = False
    custom: Mapping[str, Any] | None = None  # the user's `custom_metadata`, by item

    def path(self, key: TensorKey) -> Path:
        """The path for a tensor that was not in the source's trees."""
        name = tuple(key.name.split("."))
        if key.state == MODEL:
            return (*self.model, *name)
        if key.state in (EMA, MASTER):
            return (f"{key.state}_params", *name)
        if key.state == EXTRAS:
            return name
        return (*self.optimizer, _BY_STATE.get(key.state, key.state), *self.model[1:], *name)

    @property
    def count(self) -> Path:
        """The path of the optimizer's count of steps."""
        return (*self.optimizer, COUNT)


OPTAX = Trees((), (_PARAMS,), ("opt_state", 0))  # of a source that is no tree: flax's TrainState with `optax.adamw`

MAXTEXT = Trees((), (_PARAMS, _PARAMS), ("opt_state", 0), ("items",))  # of MaxText's own TrainState, in its step's item
BARE = Trees((), (), ("opt_state", 0))  # of weights alone, as Gemma's library has them


class NamedLeaf(NamedTuple):
    """The leaves of an Orbax tree under the names of tensors."""

    keys: list[TensorKey | None]  # one for each leaf; None for a plain value
    notes: list[Note]
    model: Path  # path of the parameters, () for a bare tree
    optimizer: Path | None  # path of the optimizer's state that has `mu`, None if there is none
    variables: bool  # leaves are the values of nnx's Variables
    faults: Mapping[TensorKey, CkptError]  # of tensors that can't be read, because another has the same name

    def named_by(self, path: Path) -> Path:
        """The part of a leaf's path that names it: without the `value` of a Variable."""
        return _without_value(path) if self.variables else path


def name_leaves(paths: Sequence[Path], plain: Sequence[bool]) -> NamedLeaf:
    """The tensor keys of all leaves of one step.

    Args:
        paths: The leaf's paths.
        plain: For each leaf, whether it is a scalar of a dtype that can be a plain value.
    """
    root = _model_root(paths)
    own = [path for path in paths if path[: len(root)] == root]
    variables = bool(own) and all(path[-1] == _VALUE and len(path) > len(root) + 1 for path in own)
    if variables:  # optimizer states are Variables too: drop the key everywhere, so that their paths match
        paths = [_without_value(path) for path in paths]

    model = {path[len(root) :]: i for i, path in enumerate(paths) if path[: len(root)] == root} if root else {}
    side = [_rest(path, 0, root) for path in paths if len(path) > 1 and _side(path)]
    names = {rest: _join_path(rest) for rest in (*model, *side)}
    trained = bool(root or side) or any(str(path[0]).lower() in _OPTIMIZERS for path in paths)
    muon = {path[:-1] for path in paths if path[-1] == _MUON}
    keys: list[TensorKey | None] = []
    optimizer: Path | None = None

    for i, path in enumerate(paths):
        found = _key(path, root, names, muon)
        if found is None:
            bare = not trained and not (plain[i] and len(path) == 1)
            found = (TensorKey(_join_path(path), MODEL if bare else EXTRAS), None)
            if plain[i] and not bare:
                keys.append(None)
                continue
        key, above = found
        keys.append(key)
        optimizer = above if optimizer is None else optimizer

    notes, faults = _distinct(keys, paths)
    if not trained:
        tops = ", ".join(list(dict.fromkeys(str(path[0]) for path in paths))[:4])
        notes.append(
            Note("N-bare-model", f"nothing is called params: all arrays are taken for the model, under {tops}")
        )

    return NamedLeaf(keys, notes, root, optimizer, variables, faults)


def _without_value(path: Path) -> Path:
    return path[:-1] if path[-1] == _VALUE and len(path) > 1 else path


def _model_root(paths: Sequence[Path]) -> Path:
    """The path of the parameters, () for a bare tree."""
    tops = {path[0] for path in paths if len(path) > 1}
    top = next((name for name in (_PARAMS, *MODEL_ROOTS) if name in tops), None)
    if top is None:
        return ()
    inner = {path[1] for path in paths if path[0] == top and len(path) > 1}
    # MaxText's TrainState holds flax's variables, {"params": ...}, under its own `params`.
    deep = inner == {_PARAMS} and all(len(path) > 2 for path in paths if path[0] == top)
    return (top, _PARAMS) if deep else (top,)


def _side(path: Path) -> str | None:
    """The state of leaves below a root such as `ema_params` or `master_params`, None for any other root."""
    top = str(path[0]).lower()
    if is_average(top):
        return EMA
    return MASTER if top in MASTER_ROOTS else None


def _rest(path: Path, at: int, root: Path) -> Path:
    """The path after step `at`, without the steps that the model's root has after its first one."""
    rest = path[at + 1 :]
    return rest[len(root) - 1 :] if root and rest[: len(root) - 1] == root[1:] else rest


def _key(
    path: Path, root: Path, names: Mapping[Path, str], muon: Collection[Path]
) -> tuple[TensorKey, Path | None] | None:
    """(the tensor key of a leaf, the path above the optimizer's state if it is one); None if no rule applies.

    muon: the paths above states of Muon.
    """
    if root and path[: len(root)] == root:
        return TensorKey(names[path[len(root) :]]), None
    side = _side(path) if len(path) > 1 else None
    if side is not None:
        return TensorKey(_join_path(_rest(path, 0, root)), side), None
    if str(path[0]).lower() not in _OPTIMIZERS:
        return None
    for at, step in enumerate(path[1:-1], start=1):
        rest = _rest(path, at, root)
        # A state of a parameter that is not in the tree counts if its key is one of optax's.
        if (rest in names and not numeral(step)) or (step in STATES and rest and rest[:-1] not in names):
            state = _MOMENTUM if step == "mu" and path[:at] in muon else STATES.get(str(step), str(step))
            return TensorKey(_join_path(rest), state), path[:at]
    return None


def _join_path(path: Path) -> str:
    return ".".join(map(str, path))


def _distinct(keys: list[TensorKey | None], paths: Sequence[Path]) -> tuple[list[Note], dict[TensorKey, CkptError]]:
    """Rename every second leaf of one key to an extra under its path.

    Returns notes on these, and errors for tensors of which one would be lost.
    """
    seen: dict[TensorKey, int] = {}
    notes = []
    faults: dict[TensorKey, CkptError] = {}
    for i, key in enumerate(keys):
        if key is None:
            continue
        if key in seen:
            if loses_one(key, paths[seen[key]], paths[i]):
                faults[key] = refuse_one_name(key, paths[seen[key]], paths[i])
            own = TensorKey(_join_path(paths[i]), EXTRAS)
            notes.append(
                Note("N-same-name", f"two leaves claim one name: {own.name} is kept as an extra", key=str(key))
            )
            keys[i] = key = own
        seen[key] = i
    return notes, faults
