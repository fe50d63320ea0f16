"""Writing the module files: `mp_rank_*`, `zero_pp_rank_*`, pipeline layers, experts, and what the client gave.

    ZeRO 1, dp 3  mp_rank_00_model_states.pt: module, param_shapes, counters, client state
    ZeRO 3, dp 3
          zero_pp_rank_{0,1,2}_mp_rank_00_model_states.pt: placeholders, buffers, a share of each frozen parameter

The one idea: a `ModuleWriter` knows every wanted tensor of the module once, by kind (parameter, frozen, buffer, expert,
layer), and each file takes its part. Keys and their order as DeepSpeed 0.19.8 `runtime/engine.py`
`_common_checkpoint_state` has them. Cost: a few microseconds a tensor. What it does not do: optimizer files
(`deepspeed.target`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.box import flat_boxes, whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import TargetFile
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, Path, TensorKey
from ckpt_tool.formats.deepspeed.described import HOME, OPTIMIZER, UNUSED
from ckpt_tool.formats.deepspeed.files import expert_name, expp_name, layer_name, model3_name, model_name
from ckpt_tool.formats.deepspeed.flat import deal, share
from ckpt_tool.formats.deepspeed.moe import counts, expert_name_of, local_names
from ckpt_tool.formats.deepspeed.off import WRAPPER
from ckpt_tool.formats.deepspeed.optimizer import VERSION, with_stage
from ckpt_tool.formats.deepspeed.pipe import TIED
from ckpt_tool.formats.deepspeed.plan import Plan, is_random, sub_group_names
from ckpt_tool.formats.deepspeed.rank import LAYOUT_KEYS
from ckpt_tool.formats.state_dict.tree import join
from ckpt_tool.formats.torch.content import Part, TorchComposer
from ckpt_tool.storage.pickle_values import OrderedMap, TensorRef
from ckpt_tool.storage.pickle_writer import TorchSize

_KNOWN = ("lr_scheduler", "data_sampler", "random_ltd")  # None where the source does not say
_COUNTERS = ("skipped_steps", "global_steps")


class ModuleWriter:
    """The module of a plan, by kinds of tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = [t.key.name for t in plan.wanted.tensors if t.key.state == MODEL]
        said = plan.described
        self.pipeline = bool(said.stages)
        self.trained = {t.key.name for t in plan.wanted.tensors if t.key.state == MASTER}
        self.shared = {a: k for a, k in said.shared.items() if k in self.trained or k in set(self.model)}
        self.buffers = [name for name in said.buffers if name in set(self.model)]
        layers = counts(self.model)
        self.layers = [prefix for prefix in said.moe if prefix in layers]
        self.layers += [prefix for prefix in layers if prefix not in set(self.layers)]
        held = set(self.buffers) | self.trained | self.shared.keys()
        self.frozen = [name for name in self.model if name not in held and expert_name_of(name) is None]

    def files(self) -> Iterator[TargetFile]:
        """Every file but the optimizers'."""
        plan = self.plan
        for model in range(plan.pp):
            for data in range(plan.dp if plan.stage == 3 else 1):
                yield self._file(data, model)
        if self.pipeline:
            yield from self._layer_files()
        yield from self._expert_files()
        for expert in range(plan.ep if plan.stage == 0 and any(group.ep for group in plan.stages[0]) else 0):
            composer = TorchComposer()
            yield composer.file(expp_name(expert), {"optimizer": self._plain_optimizer(composer, 0, expert)})

    # -- one module file -----------------------------------------------------------------------------------------------

    def _file(self, data: int, model: int) -> TargetFile:
        plan, composer = self.plan, TorchComposer()
        refs = {} if self.pipeline else self._refs(composer, model)
        skeleton: dict[str, Any] = {
            "module": None if self.pipeline else self._module(composer, refs),
            "buffer_names": [] if self.pipeline else list(self.buffers),
            "optimizer": self._plain_optimizer(composer, model) if plan.stage == 0 else None,
            "param_shapes": self._param_shapes(model) if plan.stage else None,
            "frozen_param_shapes": self._frozen(refs, shapes=True),
            "shared_params": dict(self.shared) if data == model == 0 else {},
            "frozen_param_fragments": self._fragments(composer, data)
            if plan.stage == 3
            else self._frozen(refs, shapes=False),
        }
        if not plan.stage:
            skeleton["shared_params"] = dict(self.shared) or None
        left = plan.extras.get("module")
        if isinstance(left, Mapping) and skeleton["module"] is not None:
            skeleton["module"] |= {key: item for key, item in left.items() if key not in skeleton["module"]}
        skeleton |= join(self._values(), self._client(composer))
        name = model3_name(data, model) if plan.stage == 3 else model_name(model)
        return composer.file(name, skeleton)

    def _refs(self, composer: TorchComposer, model: int) -> dict[str, TensorRef]:
        """What lies whole in the module: everything but experts; at stage 3 buffers alone."""
        plan = self.plan
        names = [name for name in self.model if expert_name_of(name) is None]
        if plan.stage == 3:
            frozen = set(self.frozen)
            names = [name for name in names if name not in frozen]
        return {name: self._whole(composer, name, MODEL) for name in names}

    def _whole(self, composer: TorchComposer, name: str, state: str) -> TensorRef:
        row = self.plan.rows[TensorKey(name, state)]
        tensor = self.plan.wanted.tensors[row]
        return composer.tensor(tensor.shape, tensor.dtype, [Part(row, whole(tensor.shape), 0)])

    def _module(self, composer: TorchComposer, refs: Mapping[str, TensorRef]) -> OrderedMap:
        """`module` in the module's own order, with placeholders at stage 3."""
        plan, out = self.plan, OrderedMap()
        empty: TensorRef | None = None  # one for all placeholders
        rest = [*refs, *(self.trained if plan.stage == 3 else ()), *(self.frozen if plan.stage == 3 else ())]
        for name in dict.fromkeys([*plan.described.module, *self._in_order(rest)]):
            if name in refs:
                out[name] = refs[name]
            elif plan.stage == 3 and (name in self.trained or name in self.shared or name in self.frozen):
                empty = empty or composer.value((0,), DTYPES.get(plan.described.dtype) or DTYPES["BF16"], b"")
                out[name] = empty
        for attributes in (item for path, item in _ordered(plan.wanted.hints) if path == ("module",)):
            out.attributes = attributes
        return out

    def _in_order(self, names: list[str]) -> list[str]:
        """`names` in the order of the wanted tensors."""
        mine = set(names)
        return [t.key.name for t in self.plan.wanted.tensors if t.key.name in mine]

    def _param_shapes(self, model: int) -> list[OrderedMap]:
        plan = self.plan
        out = []
        for group in plan.stages[model]:
            lines = [group.names]
            if plan.stage == 3:
                lines = sub_group_names(plan, group)
            elif group.ep:
                count = plan.dp // group.ep
                mine = local_names(group.names, group.ep)[0]
                mine = deal(mine, count) if plan.described.round_robin else mine
                out.append(_map((local, tuple(plan.shape(name))) for name, local in mine))
                continue
            elif plan.described.round_robin:
                lines = [deal(group.names, plan.dp)]
            kind = tuple if any(other.ep for other in plan.stages[model]) else TorchSize
            out += [_map((name, kind(plan.shape(name))) for name in line) for line in lines]
        return out

    def _frozen(self, refs: Mapping[str, TensorRef], *, shapes: bool) -> OrderedMap | None:
        """Frozen parameters whole (stage 2) or their shapes (2 and 3); None at 1, where the module alone has them."""
        if self.plan.stage < 2:
            return None
        if shapes:
            tensors = {t.key.name: t.shape for t in self.plan.wanted.tensors if t.key.state == MODEL}
            return _map((name, TorchSize(tensors[name])) for name in self.frozen)
        return _map((name, refs[name]) for name in self.frozen if name in refs)

    def _fragments(self, composer: TorchComposer, data: int) -> OrderedMap:
        """A rank's share of each frozen parameter."""
        plan, out = self.plan, OrderedMap()
        for name in self.frozen:
            row = plan.rows[TensorKey(name, MODEL)]
            tensor = plan.wanted.tensors[row]
            numel = prod(tensor.shape)
            count = share(numel, plan.dp)
            start, stop = min(data * count, numel), min((data + 1) * count, numel)
            parts, at = [], 0
            for box in flat_boxes(tensor.shape, start, stop):
                parts.append(Part(row, box, at))
                at += box.numel
            out[name] = composer.tensor((count,), tensor.dtype, parts)
        return out

    def _values(self) -> dict[str, Any]:
        """Counters, sizes, configuration, then the client's state."""
        plan, extras = self.plan, self.plan.extras
        out: dict[str, Any] = {key: extras.get(key) for key in _KNOWN}
        out |= {key: extras.get(key, 0) for key in _COUNTERS}
        if "global_samples" in extras:
            out["global_samples"] = extras["global_samples"]
        out["dp_world_size"] = plan.dp
        out["mp_world_size"] = plan.pp
        out["checkpoint_parallel_dimensions"] = {"pp_degree": plan.pp, "tp_degree": 1}
        out["ds_config"] = with_stage(plan.config, plan.stage)
        out["ds_version"] = extras.get("ds_version", VERSION)
        found = counts(self.model)
        if found and "num_experts" not in extras:
            out["num_experts"] = [found[layer] for layer in self.layers]
        taken = (*out, HOME, OPTIMIZER, "module")
        return out | {key: item for key, item in extras.items() if key not in taken}

    def _client(self, composer: TorchComposer) -> Iterator[tuple[Path, TensorRef]]:
        """Tensors of the client's state, where they hung; averages under `ema`."""
        plan = self.plan
        own = plan.wanted.source_format == "deepspeed"
        said = plan.extras.get(UNUSED)
        unused = {*(said if isinstance(said, Mapping) else ()), *LAYOUT_KEYS}
        for tensor in plan.wanted.tensors:
            if tensor.key.state == EMA:
                yield (EMA, tensor.key.name), self._whole(composer, tensor.key.name, EMA)
            elif tensor.key.state == EXTRAS:
                path = tensor.path if own and tensor.path else (tensor.key.name,)
                aside = path[0] in unused or plan.moved and path[0] != UNUSED and is_random(str(path[0]))
                head = (UNUSED,) if aside else ()
                yield (*head, *path), self._whole(composer, tensor.key.name, EXTRAS)

    def _plain_optimizer(self, composer: TorchComposer, model: int, expert: int = 0) -> dict[str, Any] | None:
        """Without ZeRO: the optimizer of a stage and expert rank as torch has it, with the parameters' names beside
        their numbers; in DeepSpeed's 16-bit wrapper where the source had one."""
        plan = self.plan
        numbers: dict[str, int] = {}
        groups, masters = [], []
        for group in plan.stages[model]:
            names = [name for name, _ in local_names(group.names, group.ep)[expert]] if group.ep else list(group.names)
            mine = [numbers.setdefault(name, len(numbers)) for name in names]
            groups.append({**group.options, "params": mine, "param_names": names})
            held = [name for name in names if plan.row(name, MASTER) is not None]
            masters.append([self._whole(composer, name, MASTER)._replace(requires_grad=True) for name in held])
        if not numbers:
            return None
        state: dict[int, dict[str, TensorRef]] = {number: {} for number in numbers.values()}
        for tensor in plan.wanted.tensors:
            if tensor.key.state in plan.states and tensor.key.name in numbers:
                state[numbers[tensor.key.name]][tensor.key.state] = self._whole(composer, *tensor.key)
        inner = {"state": state, "param_groups": groups}
        home = plan.extras.get(OPTIMIZER)
        wrapper = home.get(WRAPPER) if isinstance(home, Mapping) else None
        if not isinstance(wrapper, Mapping) and not any(masters):
            return inner
        return {**(wrapper or {}), "optimizer_state_dict": inner, "fp32_groups": masters}

    # -- layers and experts --------------------------------------------------------------------------------------------

    def _layer_files(self) -> Iterator[TargetFile]:
        """Layer files: their names are global, so every stage finds its own."""
        said = self.plan.described
        layers: dict[int, list[tuple[str, str]]] = {}
        for name in dict.fromkeys([*(n for n in said.module if n in set(self.model)), *self.model]):
            if name.startswith(TIED):
                key, _, local = name[len(TIED) :].partition(".")
                layers.setdefault(said.tied.get(key, 0), []).append((name, local))
            else:
                index, _, local = name.partition(".")
                layers.setdefault(int(index) if numeral(index) else 0, []).append((name, local))
        for number, names in sorted(layers.items()):
            composer = TorchComposer()
            state = _map((local, self._whole(composer, name, MODEL)) for name, local in names)
            yield composer.file(layer_name(number), state)

    def _expert_files(self) -> Iterator[TargetFile]:
        """A file for each expert of each MoE layer."""
        experts: dict[tuple[int, int], list[str]] = {}
        numbers = {prefix: number for number, prefix in enumerate(self.layers)}
        for name in self.model:
            found = expert_name_of(name)
            if found is not None:
                experts.setdefault((numbers[found.layer], found.number), []).append(name)
        for (layer, number), names in sorted(experts.items()):
            composer = TorchComposer()
            yield composer.file(
                expert_name(layer, number), {name: self._whole(composer, name, MODEL) for name in names}
            )


def _map(items: Any) -> OrderedMap:
    out = OrderedMap()
    for key, item in items:
        out[key] = item
    return out


def _ordered(hints: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    said = hints.get("ordered", ())
    for entry in said if isinstance(said, list | tuple) else ():
        if isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[1], Mapping):
            yield tuple(entry[0]) if isinstance(entry[0], list | tuple) else (), dict(entry[1])
