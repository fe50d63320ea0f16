"""Matches an adapter with its base: which tensor each part of it changes, and every reason why it can't.

    base       model.layers.0.self_attn.q_proj.weight (24, 20)
    adapter    ....q_proj.lora_A.weight (4, 20), ....q_proj.lora_B.weight (24, 4)
    -> {"model.layers.0.self_attn.q_proj.weight": [Low(A, B, rank=4, scaling=2.0, turned=False, experts=1)]}

Shapes decide whether a weight is transposed; a square one follows its namesakes in other layers, then the config's
`fan_in_fan_out`. Stacked experts (`target_parameters`) nest a level for each parameter of a module: the levels are
given to the parameters whose shapes they fit, the first registered innermost. Nothing raises here: faults are
collected, so that an adapter of another base is reported as a whole. Source: PEFT 0.21.2, see `systems.hub.peft.format`
and `adapters.arithmetic`.

Names say which module each tensor of the adapter belongs to, and what it is there:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     model.layers.0.self_attn.q_proj, A
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight   model.layers.0.mlp.experts, B, level 1
    base_model.model.lm_head.weight                                    lm_head.weight, whole

Names that were saved with the adapter's own name in them (`lora_A.default.weight`), or with those of wrappers (FSDP,
torch.compile), mean the same. Modules are those of the model that was wrapped: a causal LM's are the base's; a bare
model's lack its `model.`, and newer transformers moved some (`Root`). Source: PEFT 0.21.2 `utils/save_and_load.py`; see
`systems.hub.peft.format`.

What the config names and the file lacks is reported: an adapter that was cut short would fold without a fault, in part.

    target_modules: [q_proj], tensors of layers 0 and 1, a base of three
          model.layers.2.self_attn.q_proj: no lora_A, lora_B
    modules_to_save: [lm_head], no lm_head.weight                         lm_head.weight: not there

Only what is sure is reported: lists of endings (PEFT takes every module that has one), and modules whose namesakes in
other layers are there; so experts that are modules on disk and none in memory, or a pattern, raise no false alarm.
Source: PEFT 0.21.2 `tuners/tuners_utils.py` check_target_module_exists, `utils/other.py` ModulesToSaveWrapper.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.adapters.expert_lists import find_list, stack_pairs
from ckpt_tool.adapters.towers import Towers, describe_renaming
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.errors import near_misses
from ckpt_tool.formats.adapters.settings import Settings

Shape = tuple[int, ...]
TRANSPOSED = ("gpt_oss", "aria", "openai_privacy_filter")  # model types whose stacked experts are (experts, in, out)
_MOST = 6  # parameters of one module
# How many names get a search for near misses if the base has less than _MANY: each is compared with all of them.
_NEAR = 10
_MANY = 2000


class Low(NamedTuple):
    """A low-rank term: see `adapters.arithmetic.ProductTerm`."""

    a: LogicalTensor
    b: LogicalTensor
    rank: int
    scaling: float
    turned: bool
    experts: int = 1
    magnitude: LogicalTensor | None = None


class Bias(NamedTuple):
    """A trained bias: `added` times `scaling` is added to the base."""

    added: LogicalTensor
    scaling: float


class Tokens(NamedTuple):
    """Rows of an embedding that an adapter replaces."""

    rows: tuple[int, ...]  # their numbers
    values: LogicalTensor  # (len(rows), width)


class ReplacedTensor(NamedTuple):
    """A tensor that takes the place of the base's."""

    tensor: LogicalTensor


Change = Low | Bias | Tokens | ReplacedTensor


class Matched(NamedTuple):
    """An adapter's changes, by the tensors of the base that they belong to."""

    changes: Mapping[str, list[Change]]  # base tensor -> what the adapter does to it
    faults: tuple[str, ...]  # one line each
    missing: tuple[str, ...]  # tensors that the adapter changes and the base lacks
    notes: tuple[str, ...]
    absent: tuple[str, ...] = ()  # what the adapter's config names and its file lacks


def match(
    tensors: Iterable[LogicalTensor], base: Mapping[str, LogicalTensor], settings: Settings, config: Mapping[str, Any]
) -> Matched:
    """Match the adapter's `tensors` with the `base` (name -> tensor, in the adapter's dialect). config: the base's."""
    return _Matching(tensors, base, settings, config).matched()


class _Matching:
    def __init__(
        self,
        tensors: Iterable[LogicalTensor],
        base: Mapping[str, LogicalTensor],
        settings: Settings,
        config: Mapping[str, Any],
    ) -> None:
        self.base = base
        self.settings = settings
        self.children: dict[str, dict[str, LogicalTensor]] = {}
        for name, tensor in base.items():
            if len(tensor.shape) in (2, 3):
                self.children.setdefault(name.rpartition(".")[0], {})[name] = tensor
        self.near = _NEAR if len(base) < _MANY else 1
        self.transposed = config.get("model_type") in TRANSPOSED
        self.faults: list[str] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.changes: dict[str, list[Change]] = {}
        self.parts: dict[tuple[str, int], dict[str, LogicalTensor]] = {}
        self.whole: dict[str, LogicalTensor] = {}
        self.own: dict[str, str] = {}  # module of the base -> what the adapter's config calls it
        self.turned: dict[str, set[bool]] = {}  # module's last name -> orientations of its weights that are not square
        found = [(tensor, part_of(tensor.key.name)) for tensor in tensors]
        self._assign_modules([(tensor, part) for tensor, part in found if part is not None])
        self.faults += [f"{tensor.key.name}: no name that PEFT's LoRA writes" for tensor, part in found if part is None]

    def _assign_modules(self, found: Sequence[tuple[LogicalTensor, AdapterPart]]) -> None:
        """Sort the adapter's tensors by the modules of the base."""
        known = {name.rpartition(".")[0] for name in self.base}
        modules = dict.fromkeys(
            part.module.rpartition(".")[0] if part.kind == WHOLE else part.module for _, part in found
        )
        root, _ = root_for(modules, known)
        if root.old != root.new:
            self.notes.append(f"the adapter's modules {root.old}* are {root.new}* of the base")

        # Modules that are not below the common root belong to another tower of the model, which has a root of its own.
        towers = Towers((*known, *self.base))
        elsewhere: list[tuple[str, str]] = []
        for tensor, part in found:
            module = root.of(part.module) or part.module
            of_base = self.base if part.kind == WHOLE else known
            if module not in of_base:
                other = towers.find(part.module)
                if other is not None and other in of_base:
                    elsewhere.append((part.module, other))
                    module = other
            self.own[module] = part.module
            if part.kind == WHOLE:
                known_as = module
                row = self.whole
            else:
                known_as = part.kind
                row = self.parts.setdefault((module, part.level), {})
            if known_as in row:
                self.faults.append(f"{tensor.key.name}: appears twice, under two adapter names")
            row[known_as] = tensor
        self.notes += describe_renaming(elsewhere)

    def matched(self) -> Matched:
        """Match all tensors. Orientations of plain weights are noted first: square ones follow the others."""
        for name, tensor in self.whole.items():
            self._match_replaced(name, tensor)
        self._match_lists()
        stacked: dict[str, dict[int, dict[str, LogicalTensor]]] = {}
        plain: list[tuple[str, dict[str, LogicalTensor]]] = []
        for (module, level), row in self.parts.items():
            if level or (f"{module}.weight" not in self.base and self._find_parameters(module)):
                stacked.setdefault(module, {})[level] = row
            else:
                plain.append((module, row))
        for module, row in plain:
            self._note_orientation(module, row)
        for module, row in plain:
            self._match_plain(module, row)
        for module, levels in stacked.items():
            self._match_stacked(module, levels)
        adapted = {module for module, _ in self.parts}
        lacks = absent(self.base, adapted, self.whole, self.settings)
        if any(self.settings.tokens.values()) and not any(TOKENS in row for row in self.parts.values()):
            lacks.append("trainable_tokens_delta: the config names rows of an embedding")
        return Matched(self.changes, tuple(self.faults), tuple(self.missing), tuple(self.notes), tuple(lacks))

    def _match_lists(self) -> None:
        """Stack the pairs of experts that are modules of a list in the adapter and one tensor in the base."""
        lists: dict[str, dict[int, tuple[str, int]]] = {}
        for module, level in self.parts:
            found = find_list(module, self.base)
            if found is not None:
                lists.setdefault(found.tensor, {})[found.expert] = (module, level)
        for name, modules in lists.items():
            rows = {expert: self.parts.pop(at) for expert, at in modules.items()}
            first = next(iter(next(iter(rows.values())).values()))
            odd = next((row for row in rows.values() if set(row) != {A, B}), None)
            if odd is not None:
                self._add_fault(next(iter(odd.values())), "an expert of a list has a lora_A and a lora_B alone")
                continue
            pairs = {expert: (row[A], row[B]) for expert, row in rows.items()}
            stacked = stack_pairs(pairs, self.base[name].shape[0])
            if isinstance(stacked, str):
                self._add_fault(first, f"{name}: {stacked}")
                continue
            self.own[name] = self.own[next(iter(modules.values()))[0]]
            row = {A: stacked[0], B: stacked[1]}
            if _find_orientations(row, self.base[name]):
                self._add_experts({name: self.base[name]}, {name: row})
            else:
                shapes = f"{list(stacked[0].shape)} and {list(stacked[1].shape)}"
                self._add_fault(first, f"{shapes} of all experts don't fit {name} {list(self.base[name].shape)}")

    # -- whole tensors -------------------------------------------------------------------------------------------------

    def _match_replaced(self, name: str, tensor: LogicalTensor) -> None:
        target = self._find_target(name, tensor)
        if target is None:
            return
        if target.shape != tensor.shape:
            self._add_fault(tensor, f"its shape {list(tensor.shape)} is not the base's {list(target.shape)}")
        else:
            self.changes.setdefault(name, []).insert(0, ReplacedTensor(tensor))

    def _find_target(self, name: str, tensor: LogicalTensor) -> LogicalTensor | None:
        target = self.base.get(name)
        if target is None:
            self.missing.append(name)
            near = near_misses(name, self.base, most=1) if len(self.missing) <= self.near else ""
            self._add_fault(tensor, f"the base has no {name}" + (f" ({near})" if near else ""))
        return target

    def _add_fault(self, tensor: LogicalTensor, what: str) -> None:
        self.faults.append(f"{tensor.key.name}: {what}")

    # -- modules with a weight -----------------------------------------------------------------------------------------

    def _note_orientation(self, module: str, row: Mapping[str, LogicalTensor]) -> None:
        target = self.base.get(f"{module}.weight")
        a = row.get(A)
        b = row.get(B)
        if (
            target is not None
            and a is not None
            and b is not None
            and len(target.shape) == 2
            and a.shape
            and b.shape
            and b.shape[0] != prod(a.shape[1:])
        ):
            self.turned.setdefault(module.rpartition(".")[2], set()).add(
                target.shape == (prod(a.shape[1:]), b.shape[0])
            )

    def _match_plain(self, module: str, row: Mapping[str, LogicalTensor]) -> None:
        first = next(iter(row.values()))
        name = f"{module}.weight"
        target = self._find_target(name, first)
        if target is None:
            return
        if TOKENS in row:
            self._match_tokens(name, module, target, row[TOKENS])
        pairs = [(row.get(a), row.get(b), b) for a, b in ((A, B), (EMBEDDING_A, EMBEDDING_B))]
        if not any(a or b for a, b, _ in pairs):
            if set(row) - {TOKENS}:
                self._add_fault(first, "without its lora_A and lora_B")
            return
        for a, b, kind in pairs:
            if (a is None) != (b is None):
                self._add_fault(a or b or first, "the other half of the pair is not there")
            elif a is not None and b is not None:
                self._match_pair(name, module, target, row, a, b, embedding=kind == EMBEDDING_B)

    def _match_pair(
        self,
        name: str,
        module: str,
        target: LogicalTensor,
        row: Mapping[str, LogicalTensor],
        a: LogicalTensor,
        b: LogicalTensor,
        *,
        embedding: bool,
    ) -> None:
        rank = a.shape[0] if a.shape else 0
        outputs = b.shape[0] if b.shape else 0
        straight = target.shape == (outputs, *a.shape[1:])
        turned = target.shape == (prod(a.shape[1:]), outputs)
        if rank == 0 or len(a.shape) < 2 or prod(b.shape[1:]) != rank:
            self._add_fault(
                a, f"shapes {list(a.shape)} and {list(b.shape)} are no pair of lora_A and lora_B: a rank's part alone?"
            )
        elif not (turned if embedding else straight or turned):
            self._add_fault(a, f"{list(a.shape)} and {list(b.shape)} don't fit {name} of shape {list(target.shape)}")
        elif self._check_rank(module, rank, a) and self._check_magnitude(row, outputs, a):
            low = Low(
                a,
                b,
                rank,
                self.settings.scaling(self._name_in_config(module), rank),
                embedding or (turned and (not straight or self._is_stored_transposed(module))),
                magnitude=row.get(MAGNITUDE),
            )
            self.changes.setdefault(name, []).append(low)
            if BIAS in row:
                self._match_bias(f"{module}.bias", row[BIAS], low.scaling)

    def _is_stored_transposed(self, module: str) -> bool:
        """Is a square weight stored transposed? Its shape does not show it, so weights of the same name in other layers
        decide, else all other weights, else the config."""
        own = self.turned.get(module.rpartition(".")[2], set())
        every = set().union(*self.turned.values())
        for votes in (own, every):
            if len(votes) == 1:
                return next(iter(votes))
        return self.settings.fan_in_fan_out

    def _check_rank(self, module: str, rank: int, a: LogicalTensor) -> bool:
        want = self.settings.rank_of(self._name_in_config(module))
        if want != rank:
            self._add_fault(a, f"rank {rank}, and the config says {want}")
        return want == rank

    def _name_in_config(self, name: str) -> str:
        """A module, or a parameter of one, as the adapter's config calls it."""
        module, _, last = name.rpartition(".")
        return self.own.get(name) or (f"{self.own[module]}.{last}" if module in self.own else name)

    def _check_magnitude(self, row: Mapping[str, LogicalTensor], outputs: int, a: LogicalTensor) -> bool:
        magnitude = row.get(MAGNITUDE)
        if self.settings.dora and magnitude is None:
            self._add_fault(a, "the config says DoRA, and there is no lora_magnitude_vector")
        elif magnitude is not None and not self.settings.dora:
            self._add_fault(magnitude, "the config says nothing of DoRA")
        elif magnitude is not None and magnitude.numel != outputs:
            self._add_fault(magnitude, f"{magnitude.numel} magnitudes for {outputs} outputs")
        else:
            return True
        return False

    def _match_bias(self, name: str, added: LogicalTensor, scaling: float) -> None:
        target = self._find_target(name, added)
        if target is not None and target.shape != added.shape:
            self._add_fault(added, f"its shape {list(added.shape)} is not the base's {list(target.shape)}")
        elif target is not None:
            self.changes.setdefault(name, []).append(Bias(added, scaling))

    def _match_tokens(self, name: str, module: str, target: LogicalTensor, values: LogicalTensor) -> None:
        tokens = self.settings.tokens
        found = [rows for key, rows in tokens.items() if key and f".{module}".endswith(f".{key}")]
        rows = found[0] if found else tokens.get("", ())
        if (
            values.shape != (len(rows), *target.shape[1:])
            or len(set(rows)) != len(rows)
            or any(r >= target.shape[0] for r in rows)
        ):
            wanted = f"{len(rows)} rows by the config, for a weight of {list(target.shape)}"
            self._add_fault(values, f"its shape {list(values.shape)} does not fit {wanted}")
        else:
            self.changes.setdefault(name, []).append(Tokens(rows, values))

    # -- parameters of a module without a weight: stacked experts ------------------------------------------------------

    def _find_parameters(self, module: str) -> dict[str, LogicalTensor]:
        """The module's own matrices that the config targets, or all of them where it names none."""
        requested = self.settings.parameters
        matrices = {}
        for name, tensor in self.children.get(module, {}).items():
            if not requested or any(name == each or name.endswith(f".{each}") for each in requested):
                matrices[name] = tensor
        return matrices

    def _match_stacked(self, module: str, levels: Mapping[int, Mapping[str, LogicalTensor]]) -> None:
        first = next(iter(next(iter(levels.values())).values()))
        parameters = self._find_parameters(module)
        inner_first = [levels[level] for level in sorted(levels, reverse=True)]

        if not parameters:
            self._find_target(f"{module}.weight", first)
        elif sorted(levels) != list(range(len(levels))) or len(levels) > min(_MOST, len(parameters)):
            self._add_fault(
                first,
                f"{len(levels)} levels of wrappers, and the base has {', '.join(parameters) or 'no parameter'} there",
            )
        elif any(set(row) != {A, B} for row in inner_first):
            self._add_fault(first, "a parameter's wrapper holds a lora_A and a lora_B alone")
        else:
            fits = []
            for names in permutations(parameters, len(levels)):
                pairs = zip(inner_first, names, strict=True)
                if all(_find_orientations(row, parameters[name]) for row, name in pairs):
                    fits.append(names)
            order = [names for names in fits if list(names) == sorted(names, key=_find_registration_order)]
            if not fits:
                shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in parameters.items())
                rows = []
                for row in inner_first:
                    rows.append(str([list(tensor.shape) for tensor in row.values()]))
                self._add_fault(first, f"shapes {', '.join(rows)} don't fit {shapes}")
            elif len(fits) > 1 and len(order) != 1:
                self._add_fault(first, f"its shapes fit {', '.join(parameters)} in more than one way")
            else:
                self._add_experts(parameters, dict(zip((order or fits)[0], inner_first, strict=True)))

    def _add_experts(
        self, parameters: Mapping[str, LogicalTensor], rows: Mapping[str, Mapping[str, LogicalTensor]]
    ) -> None:
        ways = {name: _find_orientations(row, parameters[name]) for name, row in rows.items()}
        sure = {next(iter(way)) for way in ways.values() if len(way) == 1}
        for name, row in rows.items():
            tensor = parameters[name]
            a = row[A]
            b = row[B]
            experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
            rank = a.shape[0] // experts
            turned = self.transposed
            if len(ways[name]) == 1:
                turned = next(iter(ways[name]))
            elif len(sure) == 1:
                turned = next(iter(sure))
            if self._check_rank(name, rank, a):
                self.changes.setdefault(name, []).append(
                    Low(a, b, rank, self.settings.scaling(self._name_in_config(name), rank), turned, experts)
                )


def _find_orientations(row: Mapping[str, LogicalTensor], tensor: LogicalTensor) -> set[bool]:
    """How A (e r, in) and B (out, e r) fit stacked matrices: False for (e, out, in), True for (e, in, out)."""
    a = row[A].shape
    b = row[B].shape
    experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0 or a[0] % experts:
        return set()
    matrix = tensor.shape[-2:]
    ways = {(b[0], a[1]): False, (a[1], b[0]): True} if len(tensor.shape) == 3 else {(b[0], a[1]): False}
    return {turned for shape, turned in ways.items() if shape == matrix} | (
        {False} if b[0] == a[1] and matrix == (b[0], a[1]) else set()
    )


def _find_registration_order(name: str) -> int:
    """Where transformers registers the parameter in its module: the fused first matrix before the second."""
    parameter = name.rpartition(".")[2]
    order = ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "down_proj", "w2")
    return order.index(parameter) if parameter in order else len(order)


# -- names of an adapter's tensors -------------------------------------------------------------------------------------


A = "lora_A"
B = "lora_B"
BIAS = "lora_B.bias"
MAGNITUDE = "lora_magnitude_vector"
EMBEDDING_A = "lora_embedding_A"
EMBEDDING_B = "lora_embedding_B"
TOKENS = "trainable tokens"
WHOLE = "whole"
PREFIX = "base_model.model."
_WRAPPED = re.compile(rf"^(?:module\.)*{re.escape(PREFIX)}")  # `module.`: of DDP and DeepSpeed
_LORA = re.compile(r"(.+)\.lora_(A|B)(?:\.(?!weight$|bias$)[^.]+)?\.(weight|bias)")
_PADDLE = re.compile(r"(.+)\.lora_(A|B)")  # parameters of PaddleFormers' layers, seen the other way round
_EMBEDDING = re.compile(r"(.+)\.lora_embedding_(A|B)(?:\.[^.]+)?")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.[^.]+){0,2}")
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?")
_SAVED = re.compile(r"\.modules_to_save(?:\.(?!weight$|bias$)[^.]+)?(?=\.)")
_LEVEL = ".base_layer"


class AdapterPart(NamedTuple):
    """module: of the base; of a WHOLE, the tensor's own name. kind: as above. level: wrappers around it that have a
    name (`.base_layer`): stacked experts with several parameters."""

    module: str
    kind: str
    level: int = 0


def part_of(name: str) -> AdapterPart | None:
    """What the tensor is, None for a name that PEFT's LoRA does not write."""
    name = _WRAPPED.sub("", clean(name))
    for pattern, letters in (
        (_LORA, {"A": A, "B": B}),
        (_PADDLE, {"A": A, "B": B}),
        (_EMBEDDING, {"A": EMBEDDING_A, "B": EMBEDDING_B}),
        (_MAGNITUDE, None),
        (_TOKENS, None),
    ):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        module, level = _unwrap(match[1])
        if letters is None:
            return AdapterPart(module, MAGNITUDE if pattern is _MAGNITUDE else TOKENS, level)
        if pattern is _LORA and match[3] == "bias":
            return AdapterPart(module, BIAS, level) if match[2] == "B" else None
        return AdapterPart(module, letters[match[2]], level)
    if any(word.startswith("lora_") or word == "token_adapter" for word in name.split(".")):
        return None
    module, parameter = _SAVED.sub("", name).rpartition(".")[::2]
    return AdapterPart(f"{_unwrap(module)[0]}.{parameter}" if module else parameter, WHOLE)


def _unwrap(module: str) -> tuple[str, int]:
    level = 0
    while module.endswith(_LEVEL):
        module = module.removesuffix(_LEVEL)
        level = level + 1
    return module, level


class Root(NamedTuple):
    """Modules that begin with `old` in the adapter begin with `new` in the base."""

    old: str
    new: str

    def of(self, module: str) -> str | None:
        """The module's name below the new root; None if it is not below the old one."""
        return self.new + module[len(self.old) :] if module.startswith(self.old) else None


# Where the base's names begin otherwise than the wrapped model's: a bare model's, those of transformers before and
# after 4.52
ROOTS = (
    Root("", ""),
    Root("", "model."),
    Root("model.", ""),
    Root("", "transformer."),
    Root("transformer.", ""),
    Root("model.language_model.", "language_model.model."),
    Root("language_model.model.", "model.language_model."),
    Root("model.", "model.language_model."),
    Root("model.", "language_model.model."),
    Root("model.language_model.", "model."),
    Root("language_model.model.", "model."),
    Root("base_model.", ""),
)


def root_for(modules: Iterable[str], known: Collection[str]) -> tuple[Root, int]:
    """The way to begin names under which the most of `modules` are modules of the base, and how many. known:
    modules."""
    modules = list(modules)
    counts: list[int] = []
    for root in ROOTS:
        counts.append(sum(root.of(module) in known for module in modules))
    best = max(counts)
    return ROOTS[counts.index(best)], best


# -- what is absent ----------------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"\d+")


def absent(base: Iterable[str], adapted: Collection[str], whole: Collection[str], settings: Settings) -> list[str]:
    """One line each. base: names of its tensors; adapted: its modules with a pair; whole: its tensors that are
    replaced."""
    lines = []
    targets = frozenset(settings.targets)
    kinds = {_NUMBER.sub("#", module) for module in adapted} if targets else set()
    for name in base:
        module, _, parameter = name.rpartition(".")
        if (
            parameter == "weight"
            and module not in adapted
            and _NUMBER.sub("#", module) in kinds
            and _ends_with_any(module, targets)
        ):
            lines.append(f"{module}: no lora_A and lora_B")
        elif name not in whole and any(f".{saved}." in f".{module}." for saved in settings.saved):
            lines.append(f"{name}: not there, and it belongs to modules_to_save")
    return lines


def _ends_with_any(module: str, endings: frozenset[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[k:]) in endings for k in range(len(parts)))
