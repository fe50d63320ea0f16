"""Maps a tensor's path in a nested training state to its logical name and state.

The one idea: a tensor's meaning is derived from its path, and only from evidence in the state itself. `name_leaves`
turns paths into keys and reports in notes what it concluded and from what; the path itself is always kept
(`LogicalTensor.path`), so that writing the same kind of file puts each tensor back at its path.
`state_dict.roots.Roots.path` is the inverse for tensors that have no path, because they come from a format without
nesting.

    ("model", "layers.0.w1.weight")                        -> layers.0.w1.weight
    ("optim", "state", "layers.0.w1.weight", "exp_avg")    -> layers.0.w1.weight [exp_avg]
    ("optimizer", "state.layers.0.w1.weight.exp_avg")      -> layers.0.w1.weight [exp_avg]     torchtitan's flat keys
    ("optim.state.layers.0.w1.weight.exp_avg",)            -> the same, in a DCP without planner_data
    ("optimizer", "state", 0, "exp_avg")                   -> by `formats.state_dict.optimizer_ids`
    ("ema", "layers.0.w1.weight")                          -> layers.0.w1.weight [ema]
    ("rng_state",)                                         -> rng_state [extras]

Rules, in this order:

1. Optimizers, by structure: a node with `state`, below it a dict by parameter, below that a dict with tensors; and one
   more sign: `param_groups` next to it, a name such as `optim`, states that optimizers have, or parameters that the
   model has. The flat spelling `state.PARAMETER.STATE` (as one key, after any prefix) counts if its parameters are
   tensors of the model, or if there are keys `param_groups.PARAMETER.*` next to it; what precedes these parameters in
   the model's keys (`model.`) is then the model's prefix.
2. `ema`, `model_ema`, `params_ema`, ... hold the state `ema` (`formats.state_dict.averages`: lists, and `model_ema.`
   among the model's names); `master_weights`, `fp32_params`, ... the state `master`. If there are
   `current_model_state` and `averaging_state`, the averages are in `state_dict`, where Lightning's callback puts them.
3. The model's root: the first of `model`, `model_state_dict`, `state_dict`, `module`, ... that holds tensors, at the
   top or next to an optimizer; one level is taken off, never two. Without any, the model's tensors are at the top.
   A tuple, a list or a dict of tensors under the name of one parameter is an error (`formats.state_dict.in_parts`),
   and so are two tensors of one name (`formats.state_dict.one_name`).
4. Whatever else is a tensor (RNG states, a scheduler's) has the state `extras` and its dotted path as name, less a
   level that itself is called `extras`.
5. `_checkpoint_wrapped_module.`, `_orig_mod.`, `_fsdp_wrapped_module.` are left by wrappers and taken out of names.

Sources of the layouts: torch 2.13 `distributed/checkpoint/state_dict.py` (get_state_dict; the flattened form),
torchtitan 2025 `components/{optimizer,checkpoint}.py`, accelerate 1.15 `utils/fsdp_utils.py`, Lightning 2.6.6
`pytorch/callbacks/weight_averaging.py` (`on_save_checkpoint`), PyTorch's checkpoint tutorials. Cost: a few dict
operations a tensor. What it does not do: read files, or rename a model's own parts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, Path, TensorKey
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.state_dict.averages import (
    COUNTERS,
    LISTS,
    ListedAverage,
    find_twins,
    find_within,
    name_list,
    refuse_list,
    sort_averages,
    state_of_refused,
)
from ckpt_tool.formats.state_dict.in_parts import find_parameter, refuse_parts
from ckpt_tool.formats.state_dict.optimizer_ids import Candidate, align
from ckpt_tool.formats.state_dict.roots import Roots
from ckpt_tool.formats.state_dict.tree import dotted, value_at
from ckpt_tool.formats.state_dict.words import (
    AVERAGING,
    LIVE_ROOT,
    MASTER_ROOTS,
    MASTER_STATES,
    MODEL_ROOTS,
    OPTIMIZER_ROOTS,
    OPTIMIZER_STATES,
    is_average,
)

UNNAMED = "N-unnamed-parameters"  # the note on an optimizer whose numbers keep
# These may be submodules of a model whose tensors are at the top, so they count as its root only if nothing else does.
_WEAK_ROOTS = frozenset(("module", "net", "network", "params"))
_FLAT = re.compile(r"(?:^|(?<=\.))state\.")
_RNG = re.compile(r"(?:^|[._])rng(?:[._]|$)", re.IGNORECASE)
_COUNTERS = frozenset(("step", "global_step", "iteration", "iter", "epoch", "loss", "best_loss"))


class Leaf(NamedTuple):
    """A tensor of a state."""

    path: Path  # the dict keys and list indices that lead to it, never empty
    shape: tuple[int, ...]  # elements
    same: Hashable = None  # equal for tensors over the very same bytes, None when unknown


class Named(NamedTuple):
    """The logical keys of all tensors of a nested dict, and what was concluded on the way."""

    keys: list[TensorKey]  # one for each leaf, all different
    notes: list[Note]  # what was concluded
    roots: Roots  # the paths of the model, the optimizer, averages and master weights
    # why a tensor cannot be read although its bytes are stored, by key
    faults: Mapping[TensorKey, CkptError] = MappingProxyType({})


def name_leaves(
    leaves: Sequence[Leaf], extras: Mapping[str, Any], *, path: str = "", prefer: str | None = None
) -> Named:
    """The logical keys of the tensors of one nested state.

    Args:
        leaves: the tensors in the state's own order.
        extras: the plain values of the state (`formats.state_dict.tree.part`).
        path: the file, for notes.
        prefer: the level that holds the model, if the user names one (`--prefer`).
    """
    named = _name_state(leaves, extras, path)
    if prefer is None:
        return named
    from ckpt_tool.formats.state_dict.one_level import name_one_level

    return name_one_level(leaves, extras, prefer, named, path, _name_state)


def _name_state(leaves: Sequence[Leaf], extras: Mapping[str, Any], path: str) -> Named:
    """`name_leaves` without a preferred level: by evidence in the state alone."""
    # The order matters: each step names what the earlier ones left, and averages and numbers need the model's names.
    naming = _Naming(leaves, extras, path)
    naming.nested_optimizers()
    naming.side_roots()
    naming.model_root()
    naming.flat_optimizers()
    naming.model()
    naming.averages()
    naming.numbers()
    keys = naming.unique()
    return Named(keys, naming.notes, naming.roots(), {keys[leaf]: fault for leaf, fault in naming.faults.items()})


@dataclass(slots=True)
class _Optimizer:
    """One optimizer: its path, and (leaf, parameter, state) of each tensor."""

    path: Path
    entries: list[tuple[int, Any, str]]
    prefix: str | None = None  # what precedes `state.` in a flat key; None in the nested form


class _Naming:
    """The rules of the module's docstring, one method each; every method fills more of `keys`."""

    def __init__(self, leaves: Sequence[Leaf], extras: Mapping[str, Any], path: str) -> None:
        self.leaves = leaves
        self.extras = extras
        self.path = path
        self.keys: list[TensorKey | None] = [None] * len(leaves)
        self.notes: list[Note] = []
        self.optimizers: list[_Optimizer] = []
        self.found: dict[str, Path] = {}
        self.ids: dict[Path, dict[str, str]] = {}
        self.prefix = ""  # of the model's keys, where there is no nesting: "model."
        self.root: Path | None = None
        self.lists: list[ListedAverage] = []
        self.average_roots: list[tuple[str, tuple[int, ...]]] = []  # a level of averages, the leaves with names there
        self.faults: dict[int, CkptError] = {}  # leaf -> why it can't be read as what it is

    def note(self, code: str, message: str, key: str | None = None) -> None:
        self.notes.append(Note(code, message, self.path or None, key))

    def rest(self) -> list[int]:
        """Leaves that have no key yet."""
        return [i for i, key in enumerate(self.keys) if key is None]

    # -- rule 1, nested ---------------------------------------------------------------------------------------------

    def nested_optimizers(self) -> None:
        """Name the states of optimizers in nested dicts (rule 1)."""
        groups: dict[Path, list[int]] = {}
        for i, leaf in enumerate(self.leaves):
            if "state" in leaf.path[:-2]:
                groups.setdefault(leaf.path[: leaf.path.index("state")], []).append(i)
        for root, members in groups.items():
            paths = [self.leaves[i].path[len(root) + 1 :] for i in members]
            beside = value_at(self.extras, root)
            signs = (
                isinstance(beside, Mapping) and "param_groups" in beside,
                bool(root) and any(str(step).lower() in OPTIMIZER_ROOTS for step in root),
                all(str(path[-1]) in OPTIMIZER_STATES for path in paths),
            )
            if any(signs):
                entries = [(i, path[0], dotted(path[1:])) for i, path in zip(members, paths, strict=True)]
                self._take(_Optimizer(root, entries))

    def _take(self, optimizer: _Optimizer) -> None:
        self.optimizers.append(optimizer)
        self.found.setdefault("optimizer", optimizer.path)
        for i, parameter, state in optimizer.entries:
            self.keys[i] = TensorKey(clean(str(parameter)), MASTER if state in MASTER_STATES else state)

    # -- rule 1, flat -----------------------------------------------------------------------------------------------

    def flat_optimizers(self) -> None:
        """Name the states of optimizers with flat keys, `state.PARAMETER.STATE` (rule 1)."""
        groups: dict[tuple[Path, str], list[tuple[int, str]]] = {}
        others: list[str] = []
        for i in self.rest():
            path = self.leaves[i].path
            last = str(path[-1])
            at = _FLAT.search(last)
            if (
                at is not None
                and "." in last[at.end() :]
                and (self.root is None or path[: len(self.root)] != self.root)
            ):
                groups.setdefault((path[:-1], last[: at.start()]), []).append((i, last[at.end() :]))
            else:
                others.append(dotted(path))

        if not groups:
            return

        if self.root is not None:
            skip = len(dotted(self.root)) + 1
            others = [dotted(leaf.path)[skip:] for leaf in self.leaves if leaf.path[: len(self.root)] == self.root]

        for (root, prefix), members in groups.items():
            entries: list[tuple[int, Any, str]] = []
            for i, spelled in members:
                parameter, _, state = spelled.rpartition(".")
                entries.append((i, parameter, state))
            names = [parameter for _, parameter, _ in entries]
            lead = common_prefix(names, others)
            if lead is None and not self._grouped(root, prefix, names):
                continue
            if lead and self.root is None:
                self.prefix = lead
            self._take(_Optimizer(root, entries, prefix))

    def _grouped(self, root: Path, prefix: str, names: Sequence[str]) -> bool:
        """Are there keys `param_groups.NAME.*` next to these flat states that list the same parameters, or numbers?"""
        beside = value_at(self.extras, root)
        if not isinstance(beside, Mapping):
            return False
        start = f"{prefix}param_groups."
        listed = [key.removeprefix(start) for key in beside if isinstance(key, str) and key.startswith(start)]
        known = {key.rpartition(".")[0] for key in listed}
        return bool(listed) and (set(names) <= known or all(numeral(key.partition(".")[0]) for key in listed))

    # -- rules 2 and 3 ----------------------------------------------------------------------------------------------

    def side_roots(self) -> None:
        """Name the tensors below levels of averages (EMA) and of master weights."""
        members: dict[tuple[str, Path], list[int]] = {}
        averaged = self._averaged()
        for i in self.rest():
            path = self.leaves[i].path
            for depth, step in enumerate(path[:-1][:2]):
                word = str(step).lower()
                is_list = word in LISTS and type(path[depth + 1]) is int
                ema = is_average(word) or is_list or path[: depth + 1] == averaged
                state = EMA if ema else None
                if word in MASTER_ROOTS and not ema:
                    state = MASTER
                if state:
                    members.setdefault((state, path[: depth + 1]), []).append(i)
                    break
        for (state, root), own in members.items():
            inner = {self.leaves[i].path[len(root)] for i in own}
            below = root
            if len(inner) == 1 and all(len(self.leaves[i].path) > len(root) + 1 for i in own):
                (only,) = inner
                below = (*root, only) if str(only) in MODEL_ROOTS or is_average(str(only)) else root
            self.found.setdefault(state, below)
            if state == EMA:
                self._sort_averages(root, below, own)
                continue
            for i in own:
                self.keys[i] = TensorKey(clean(dotted(self.leaves[i].path[len(below) :])), state)

    def _sort_averages(self, root: Path, below: Path, own: Sequence[int]) -> None:
        """Name the tensors below a level of averages. Lists get a provisional key until the model is known
        (`averages`)."""
        sorted_out = sort_averages({i: self.leaves[i].path for i in own}, root, below)
        for i in sorted_out.others:
            self._extra(i)
        for i, name in sorted_out.named.items():
            self.keys[i] = TensorKey(clean(name), EMA)
        self.average_roots.append((str(root[-1]), tuple(sorted_out.named)))
        self.lists += sorted_out.lists
        for listed in sorted_out.lists:
            for _, i in listed.members:
                self.keys[i] = TensorKey(dotted(self.leaves[i].path), EMA)

    def averages(self) -> None:
        """Name the averages that need the model's names: lists, averages among the model's own tensors (`model_ema.`),
        and averages of one part of the model (`g_ema` next to `g`)."""
        model = self._model()
        for listed in self.lists:
            shapes = [self.leaves[i].shape for _, i in listed.members]
            aligned = name_list(listed, shapes, model)
            for number, i in listed.members:
                if aligned.names:
                    self.keys[i] = TensorKey(clean(aligned.names[number]), EMA)
                else:
                    self._refuse(i, refuse_list(listed, self.leaves[i].path, aligned.why))
            if aligned.names:
                where = dotted(listed.root)
                self.note("N-listed-averages", f"{where} lists averages; their names were found {aligned.why}")

        live = {candidate.name: candidate.shape for candidate in model}
        for word, members in self.average_roots:
            self._name_as_the_model(word, members, live)
        self._averages_within()

    def _name_as_the_model(self, word: str, members: Sequence[int], live: Mapping[str, tuple[int, ...]]) -> None:
        """Rename the averages of a level to the model's names where they differ: averages of one part (`g_ema` next to
        `g`), or of a wrapped model (`module.X` in torch's AveragedModel and timm's ModelEma for X; or the reverse)."""
        keys = ((i, self.keys[i]) for i in members)
        own = {key.name: i for i, key in keys if key is not None}
        for name in COUNTERS.intersection(own) - live.keys():
            self._extra(own.pop(name))
        if not own or live.keys() >= own.keys():
            return
        shapes = {name: self.leaves[i].shape for name, i in own.items()}
        for name, twin in find_twins(list(own), word, shapes, live).items():
            self.keys[own[name]] = TensorKey(twin, EMA)

    def _averages_within(self) -> None:
        """Averages among the model's own names: `model_ema.X`, as LDM saves them."""
        places = {key.name: i for i, key in enumerate(self.keys) if key is not None and key.state == MODEL}
        of_optimizers = [key for key in self.keys if key is not None and key.state not in (MODEL, EMA, EXTRAS)]
        trained = {key.name.partition(".")[0] for key in of_optimizers}
        within = find_within({name: self.leaves[i].shape for name, i in places.items()}, trained)
        for name in within.counters:
            self._extra(places[name])
        for name, twin in within.twins.items():
            self.keys[places[name]] = TensorKey(twin, EMA)
        for name, fault in within.refused.items():
            self.keys[places[name]] = TensorKey(name, state_of_refused(name))
            self._refuse(places[name], fault)
        for word, count in within.words.items():
            self.found.setdefault(EMA, (word,))
            self.note("N-averages-within", f"{count} tensors below {word}. are averages, the state ema")

    def _refuse(self, leaf: int, fault: CkptError) -> None:
        """Record why a leaf cannot be read."""
        fault.path = fault.path or self.path or None
        self.faults[leaf] = fault

    def _averaged(self) -> Path | None:
        """The path at which Lightning's callback stores averages: `state_dict`, the usual place of the model, which it
        moves to another key. None if the state is not one of this callback's."""
        tops = {leaf.path[0] for leaf in self.leaves if len(leaf.path) > 1}
        if not {LIVE_ROOT, AVERAGING, "state_dict"} <= tops:
            return None
        self.root = (LIVE_ROOT,)
        self.found["model"] = self.root
        self.note("N-averaged", f"state_dict holds averages, the state ema: the model is {LIVE_ROOT}, by {AVERAGING}")
        return ("state_dict",)

    def model_root(self) -> None:
        """Find the level that holds the model, if there is one."""
        if self.root is not None:
            return
        parents = {optimizer.path[:-1] for optimizer in self.optimizers if optimizer.path}
        tops = {self.leaves[i].path[0] for i in self.rest() if len(self.leaves[i].path) > 1}
        seen: dict[Path, None] = {}
        for i in self.rest():
            path = self.leaves[i].path
            for depth, step in enumerate(path[:-1][:3]):
                alone = depth == 1 and len(tops) == 1 and not any(len(self.leaves[j].path) == 1 for j in self.rest())
                if step in MODEL_ROOTS and (depth == 0 or path[:depth] in parents or alone):
                    seen.setdefault(path[: depth + 1])
                    break
        other = tops - {root[0] for root in seen}
        if other or len(seen) > 1:
            seen = {root: None for root in seen if root[-1] not in _WEAK_ROOTS}
        if seen:
            self.root = min(seen, key=lambda root: (len(root), MODEL_ROOTS.index(str(root[-1]))))
            self.found["model"] = self.root

    def model(self) -> None:
        """Name the model's tensors; all others become extras."""
        rest = self.rest()
        if self.root is not None:
            for i in rest:
                path = self.leaves[i].path
                if path[: len(self.root)] == self.root:
                    self.keys[i] = TensorKey(clean(dotted(path[len(self.root) :])))
                else:
                    self._extra(i)
            self._note_second_models(rest)
            self._refuse_parts([i for i in rest if self.leaves[i].path[: len(self.root)] == self.root], is_flat=False)
            return

        self.found.setdefault("model", ())
        bare = any(len(self.leaves[i].path) == 1 and "." in str(self.leaves[i].path[0]) for i in rest)
        training = bool(self.optimizers) or bool(self.extras)
        named = []

        for i in rest:
            path = self.leaves[i].path
            shape = self.leaves[i].shape
            word = str(path[0])
            counter = training and len(path) == 1 and word in _COUNTERS and shape in ((), (1,))
            if path[0] == EXTRAS and len(path) > 1:
                self._extra(i)
                continue
            rng = _RNG.search(dotted(path)) and (len(path) > 1 or "." not in word)
            if (bare and len(path) > 1) or rng or counter:
                self._extra(i)
            elif self.prefix and not word.startswith(self.prefix):
                if not self._prefixed_ema(i, word):
                    self._extra(i)
            else:
                self.keys[i] = TensorKey(clean(dotted(path).removeprefix(self.prefix)))
                named.append(path)

        if self.prefix:
            self.note(
                "N-model-prefix",
                f"the optimizer's names show that the model's keys begin with {self.prefix!r}: taken off",
            )
            self.found["model"] = (self.prefix.removesuffix("."),)

        if bare:
            self._refuse_parts([i for i in rest if not self._is_of_a_trainer(self.leaves[i].path)], is_flat=True)
        if not bare and any(len(path) > 1 for path in named):
            tops = dict.fromkeys(str(path[0]) for path in named)
            self.note(
                "N-bare-model", f"no level is called model: all tensors are taken for it, under {', '.join(tops)}"
            )

    def _note_second_models(self, members: Sequence[int]) -> None:
        """Note the tensors of another level that has a model's usual name, or that contains weights.

        members: leaves of the model and extras.
        """
        others: dict[str, list[int]] = {}
        for i in members:
            key = self.keys[i]
            path = self.leaves[i].path
            if key is not None and key.state == EXTRAS and self._may_be_weights(path):
                others.setdefault(str(path[0]), []).append(i)

        shown = dotted(self.root or ())
        names = {candidate.name for candidate in self._model()} if others else set()
        for word, own in others.items():
            is_called_model = word in MODEL_ROOTS
            if not is_called_model and not any(len(self.leaves[i].shape) > 1 for i in own):
                continue
            is_as_model = all(clean(dotted(self.leaves[i].path[1:])) in names for i in own)
            what = "of another model" if is_called_model else "of other names"
            if is_as_model:
                what = "under the model's names too"
            self.note(
                "N-second-model",
                f"{word} holds {len(own)} tensors {what}, which are kept as extras: the model is read from {shown},"
                f" and --prefer {word} takes it from there",
            )

    def _may_be_weights(self, path: Path) -> bool:
        """Is a tensor of the extras below a top level next to the model's, and no state of a random generator?"""
        if not self.root or len(path) < 2 or path[0] in (EXTRAS, self.root[0]):
            return False
        return not _RNG.search(dotted(path))

    def _is_of_a_trainer(self, path: Path) -> bool:
        """Is a tensor below the top of a bare model a value of its trainer, whatever its name looks like?"""
        return path[0] == EXTRAS or bool(_RNG.search(dotted(path)))

    def _refuse_parts(self, members: Sequence[int], *, is_flat: bool) -> None:
        """Record a fault for each tensor of the model that is only a part of a parameter (`in_parts`)."""
        start = len(self.root or ())
        parts: dict[Path, list[int]] = {}
        for i in members:
            parameter = find_parameter(self.leaves[i].path[start:], is_flat=is_flat)
            if parameter is not None:
                parts.setdefault(parameter, []).append(i)
        for parameter, own in parts.items():
            inner = [self.leaves[i].path[start:] for i in own]
            for i, path in zip(own, inner, strict=True):
                self.keys[i] = TensorKey(clean(dotted(path)))
                self._refuse(i, refuse_parts(parameter, path, inner))

    def _prefixed_ema(self, i: int, word: str) -> bool:
        """Name a leaf such as `ema.NAME` in a state of dotted keys. False if it is none."""
        root, _, name = word.partition(".")
        state = MASTER if root in MASTER_ROOTS else None
        if is_average(root):
            state = EMA
        if len(self.leaves[i].path) == 1 and name and state is not None:
            self.found.setdefault(state, (root,))
            self.keys[i] = TensorKey(clean(name), state)
            return True
        return False

    def _extra(self, i: int) -> None:
        path = self.leaves[i].path
        self.keys[i] = TensorKey(dotted(path[1:] if path[0] == EXTRAS and len(path) > 1 else path), EXTRAS)

    # -- numbers, notes, and that every key is one ---------------------------------------------------------------------

    def _model(self) -> list[Candidate]:
        """The model's tensors, in their own order."""
        return [
            Candidate(key.name, leaf.shape, leaf.same)
            for key, leaf in zip(self.keys, self.leaves, strict=True)
            if key is not None and key.state == MODEL
        ]

    def numbers(self) -> None:
        """Replace numbers by names in optimizers that number their parameters, if the order and shapes allow it."""
        model = self._model()
        for optimizer in self.optimizers:
            groups = value_at(self.extras, (*optimizer.path, "param_groups"))
            if optimizer.prefix is not None or not _numbered(groups, [entry[1] for entry in optimizer.entries]):
                continue
            moments: dict[int, dict[str, tuple[int, ...]]] = {}
            for i, number, state in optimizer.entries:
                moments.setdefault(int(number), {})[state] = self.leaves[i].shape
            aligned = align(groups if isinstance(groups, list) else [], moments, model)
            shown = dotted(optimizer.path) or "the optimizer"
            if not aligned.names:
                self.note(
                    UNNAMED,
                    f"{shown} numbers its parameters and their names can't be derived from the model ({aligned.why}): "
                    "its states keep the numbers as names; an optimizer of named_parameters() saves names",
                )
                continue
            self.note("N-numbered-parameters", f"{shown} numbers its parameters; their names were found {aligned.why}")
            self.ids[optimizer.path] = {str(n): clean(name) for n, name in aligned.names.items()}
            for i, number, _ in optimizer.entries:
                key = self.keys[i]
                if key is not None and int(number) in aligned.names:
                    self.keys[i] = TensorKey(clean(aligned.names[int(number)]), key.state)

    def unique(self) -> list[TensorKey]:
        """The final keys, all different: a second tensor of the same key becomes an extra under its path. If a weight
        would be lost by that, the first of the two gets a fault (`one_name`)."""
        seen: dict[TensorKey, int] = {}
        places: dict[str, int] = {}
        out: list[TensorKey] = []
        wrapped = []

        for number, (leaf, key) in enumerate(zip(self.leaves, self.keys, strict=True)):
            given = key or TensorKey(dotted(leaf.path), EXTRAS)
            if given in seen:
                from ckpt_tool.formats.state_dict.one_name import loses_one, refuse_one_name

                other = self.leaves[seen[given]]
                is_same_tensor = leaf.same is not None and leaf.same == other.same
                if not is_same_tensor and loses_one(given, other.path, leaf.path):
                    self._refuse(seen[given], refuse_one_name(given, other.path, leaf.path))
                given = TensorKey(dotted(leaf.path), EXTRAS)
                while given in seen:
                    given = TensorKey(given.name + "'", EXTRAS)
                self.note(
                    "N-same-name",
                    f"two tensors claim one name: the one at {dotted(leaf.path)} is kept as an extra",
                    str(key),
                )
            seen[given] = number
            out.append(given)
            self._refuse_joined(number, out, places)
            if any(isinstance(step, str) and clean(step) != step for step in leaf.path):
                wrapped.append(dotted(leaf.path))

        if wrapped:
            self.note("N-wrapper-names", f"wrapper parts were taken out of {len(wrapped)} names, such as {wrapped[0]}")
        return out

    def _refuse_joined(self, number: int, keys: Sequence[TensorKey], places: dict[str, int]) -> None:
        """Record a fault for a weight of the model if another tensor's path joins to the same dotted name, as
        ("a.b", "c") and ("a", "b.c") do.

        Args:
            keys: those of the leaves up to this one.
            places: dotted path -> the first leaf that has it.
        """
        other = places.setdefault(dotted(self.leaves[number].path), number)
        weights = [leaf for leaf in (other, number) if keys[leaf].state == MODEL]
        if other != number and weights and weights[0] not in self.faults:
            from ckpt_tool.formats.state_dict.one_name import refuse_one_name

            paths = self.leaves[other].path, self.leaves[number].path
            self._refuse(weights[0], refuse_one_name(keys[weights[0]], *paths))

    def roots(self) -> Roots:
        """The paths at which the model, the optimizer, averages and master weights were found, for writers."""
        first = self.optimizers[0] if self.optimizers else None
        optimizer = self.found.get("optimizer", ("optim",))
        if first is not None and first.prefix:
            optimizer = (*first.path, first.prefix.removesuffix("."))
        single = bool(self.leaves) and all(len(leaf.path) == 1 for leaf in self.leaves)
        return Roots(
            self.found.get("model", ("model",)),
            optimizer,
            self.found.get(EMA, ("ema",)),
            self.found.get(MASTER, ("master",)),
            first is not None and first.prefix is not None,
            single and bool(self.prefix or (first is not None and first.prefix)),
            self.ids,
        )


def common_prefix(names: Sequence[str], keys: Iterable[str]) -> str | None:
    """The prefix with which every one of `names` occurs in `keys`: `["w"]` in `["model.w", "step"]` -> "model.". None
    if there is no such prefix, or no name."""
    have = set(keys)
    if not names or not have:
        return None
    tail = names[0]
    leads = [key.removesuffix(tail) for key in have if key == tail or key.endswith("." + tail)]
    for lead in sorted(leads, key=len):
        if all(lead + name in have for name in names):
            return lead
    return None


def _numbered(groups: Any, parameters: Sequence[Any]) -> bool:
    """Are these parameters numbers? `"0"` counts as one if the groups list integers (DCP stores every key as text)."""
    if all(type(p) is int for p in parameters):
        return True
    listed = (
        [
            n
            for group in groups
            if isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
            for n in group["params"]
        ]
        if isinstance(groups, list)
        else []
    )
    return all(map(numeral, parameters)) and bool(listed) and all(type(n) is int for n in listed)
