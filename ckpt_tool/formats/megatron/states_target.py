"""The optimizer of a new legacy Megatron checkpoint: which of the two forms it takes, its groups, and its arrays of
each rank.

The one idea: the form is one for all ranks and follows from what there is. Flat buffers want fp32 master, exp_avg and
exp_avg_sq of every parameter; numbered arrays take any states; what fits neither (an EMA, states of tensors that are no
parameters) lies under a key of ours, cut like its parameter.

    states {master, exp_avg, exp_avg_sq} of all  -> distrib_optim.pt, when the job used the distributed optimizer
    the same and `step`, of torch's Adam      -> optimizer.state {0: {step, exp_avg, exp_avg_sq}}, fp32_from_fp16_params

Groups carry the source's hyperparameters; one that is not there (experts', when they become parallel) is made from its
twin. Sources: `megatron.optimizer`. Cost: linear. What it does not do: files (`megatron.target`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Symbol
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP
from ckpt_tool.formats.megatron import names
from ckpt_tool.formats.megatron.optimizer import (
    GroupKey,
    Param,
    bucketing_of,
    chained,
    groups_of,
    is_expert_group,
    key_of_group,
    key_of_param,
    lay_buffers,
    members_of,
)
from ckpt_tool.formats.megatron.ranks import Rank
from ckpt_tool.formats.megatron.shares import Share
from ckpt_tool.formats.megatron.wanted import Shape
from ckpt_tool.formats.torch.content import Part, TorchComposer

FLAT = (MASTER, "exp_avg", "exp_avg_sq")
F32 = DTYPES["F32"]


@dataclass(frozen=True, slots=True)
class Form:
    """flat: distrib_optim.pt? inner: the inner dict alone (fp32 models)? states: those of numbered arrays. cut: (state
    -> names) that lie under our key, cut like their parameter. whole: numbers of wanted tensors that lie there whole.
    groups: of each chained optimizer. none: there is no optimizer."""

    flat: bool
    inner: bool
    masters: bool
    states: tuple[str, ...]
    cut: Mapping[str, frozenset[str]]
    whole: tuple[int, ...]
    groups: tuple[tuple[dict[str, Any], ...], ...]
    none: bool


class States:
    """All states but the model's, by name; and the form that they take."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.at = {(t.key.state, t.key.name): i for i, t in enumerate(shape.wanted.tensors)}
        self.params = {name for name in shape.model if not names.is_buffer(name)}
        self.form = self._form()

    def _form(self) -> Form:
        held: dict[str, set[str]] = {}
        whole: list[int] = []
        for (state, name), number in self.at.items():
            if state in (MODEL, EXTRAS):
                continue
            if name in self.params and self._fits(state, name, number):
                held.setdefault(state, set()).add(name)
            else:
                whole.append(number)
        flat = self._flat(held)
        masters = not flat and held.get(MASTER, set()) == self._half() != set()
        numbered = () if flat else tuple(state for state in held if state not in (MASTER, EMA))
        taken = {*FLAT} if flat else {*numbered, *([MASTER] if masters else [])}
        cut = {}
        for state, own in held.items():
            if state in taken:
                continue
            scalars = {name for name in own if self._scalar(state, name)}
            whole += [self.at[state, name] for name in sorted(scalars)]
            if own - scalars:
                cut[state] = frozenset(own - scalars)
        none = not any(state in held for state in taken)
        return Form(
            flat,
            not flat and not masters and bool(numbered) and not self._half(),
            masters,
            numbered,
            cut,
            tuple(whole),
            () if none else self._groups(),
            none,
        )

    def _fits(self, state: str, name: str, number: int) -> bool:
        """Can the state be cut like its parameter, or is it a counter of it?"""
        own, model = self.shape.tensor(number), self.shape.tensor(self.shape.model[name])
        return own.shape == model.shape or state == STEP and len(own.shape) == 0

    def _scalar(self, state: str, name: str) -> bool:
        return self.shape.tensor(self.at[state, name]).shape != self.shape.tensor(self.shape.model[name]).shape

    def _half(self) -> set[str]:
        return {name for name in self.params if self.shape.tensor(self.shape.model[name]).dtype.bits == 16}

    def _flat(self, held: Mapping[str, set[str]]) -> bool:
        whole = bool(self.params) and all(held.get(state) == self.params for state in FLAT)
        exact = whole and all(
            self.shape.tensor(self.at[state, name]).dtype == F32 for state in FLAT for name in self.params
        )
        said = self.shape.style.distributed
        return exact and (said if said is not None else STEP not in held)

    # -- groups --------------------------------------------------------------------------------------------------------

    @property
    def chains(self) -> tuple[bool | None, ...]:
        """Of each chained optimizer: are its parameters experts'? None: both kinds."""
        return (False, True) if self.shape.degrees["ep"] > 1 else (None,)

    @staticmethod
    def is_ours(optimizer: Any) -> bool:
        """Is it Megatron's optimizer (its groups say `wd_mult`)?"""
        return any("wd_mult" in group for one in chained(optimizer) for group in groups_of(one))

    def _groups(self) -> tuple[tuple[dict[str, Any], ...], ...]:
        stored = [group for one in chained(self.shape.wanted.extras.get("optimizer")) for group in groups_of(one)]
        stored = [group for group in stored if "wd_mult" in group]
        out = []
        for experts in self.chains:
            wanted = self._keys(experts)
            own = [group for group in stored if is_expert_group(group) is bool(experts)]
            twins = own + [group for group in stored if group not in own]
            made: dict[GroupKey, dict[str, Any]] = {}
            for group in own:
                key = key_of_group(group, self.shape.facts)
                if key in wanted:
                    made.setdefault(key, dict(group))
            for key in sorted(wanted, key=lambda key: (not key.decay, key.decoupled)):
                made.setdefault(key, self._made(key, twins, experts=bool(experts)))
            out.append(tuple(made.values()))
        return tuple(out)

    def _keys(self, experts: bool | None) -> set[GroupKey]:
        keys = set()
        for name in self.params:
            tensor = self.shape.tensor(self.shape.model[name])
            param = Param(name, 0, tensor.shape, tensor.dtype, 0)
            if experts is None or param.expert == experts:
                keys.add(key_of_param(param, self.shape.facts))
        return keys

    def _made(self, key: GroupKey, twins: Sequence[Mapping[str, Any]], *, experts: bool) -> dict[str, Any]:
        """A group that the source does not have, from the one nearest to it."""
        facts = self.shape.facts
        same = next((dict(twin) for twin in twins if key_of_group(twin, facts) == key), None)
        group = same or dict(twins[0]) if twins else {"lr_mult": 1.0, "is_decoupled_lr": key.decoupled}
        group["is_expert_parallel"] = experts
        if same is None:
            group["wd_mult"] = 1.0 if key.decay else 0.0
            if not key.decay and "weight_decay" in group:
                group["weight_decay"] = 0.0
        return group

    # -- a rank's ------------------------------------------------------------------------------------------------------

    def split(self, shares: Iterable[Iterable[Share]]) -> tuple[list[Param], list[Share]]:
        """A rank's trainable parameters, all chunks, in order."""
        own = [share for chunk in shares for share in chunk if not names.is_buffer(share.names[0])]
        return [Param(share.local, share.chunk, share.shape, share.dtype, share.numel) for share in own], own

    def parts(self, share: Share, state: str) -> list[Part]:
        """Where the values of `state` come from."""
        return [
            Part(self.at[state, run.name], run.box, run.start) for run in share.runs if (state, run.name) in self.at
        ]

    def numbered(self, rank: Rank, shares: Iterable[Iterable[Share]], composer: TorchComposer) -> list[dict[str, Any]]:
        """The optimizers of a rank, by chain: with the numbered arrays, or the groups alone beside flat buffers."""
        params, own = self.split(shares)
        out: list[dict[str, Any]] = []
        for experts, groups in zip(self.chains, self.form.groups, strict=True):
            if self.form.flat:
                out.append({"optimizer": {"param_groups": [dict(group) for group in groups]}})
                continue
            which = [i for i, param in enumerate(params) if experts is None or param.expert == experts]
            members = members_of(groups, params, which, self.shape.facts) or []
            order = [i for group in members for i in group]
            numbers = {i: number for number, i in enumerate(order)}
            state = {numbers[i]: made for i in order if (made := self._entry(own[i], composer))}
            listed = [
                {**group, "params": [numbers[i] for i in ids]} for group, ids in zip(groups, members, strict=True)
            ]
            inner = {"state": state, "param_groups": listed}
            if self.form.inner:
                out.append(inner)
                continue
            one: dict[str, Any] = {"optimizer": inner}
            if self.form.masters:
                one["fp32_from_fp16_params"] = [
                    [self._array(own[i], MASTER, composer) for i in ids if params[i].dtype.bits == 16]
                    for ids in members
                ]
            out.append(one)
        return out

    def _entry(self, share: Share, composer: TorchComposer) -> dict[str, Any]:
        states = [state for state in self.form.states if (state, share.names[0]) in self.at]
        return {state: self._array(share, state, composer) for state in states}

    def _array(self, share: Share, state: str, composer: TorchComposer) -> Any:
        number = self.at[state, share.names[0]]
        tensor = self.shape.tensor(number)
        if self._scalar(state, share.names[0]):
            from ckpt_tool.core.box import whole

            return composer.tensor(tensor.shape, tensor.dtype, [Part(number, whole(tensor.shape), 0)])
        return composer.tensor(share.shape, tensor.dtype, self.parts(share, state))

    def cut(self, shares: Iterable[Iterable[Share]], composer: TorchComposer) -> dict[int, dict[str, dict[str, Any]]]:
        """The states under our key: {chunk: {state: {the rank's name: tensor}}}."""
        out: dict[int, dict[str, dict[str, Any]]] = {}
        for chunk in shares if self.form.cut else ():
            for share in chunk:
                for state, own in self.form.cut.items():
                    if share.names[0] in own:
                        array = self._array(share, state, composer)
                        out.setdefault(share.chunk, {}).setdefault(state, {})[share.local] = array
        return out

    def flat(
        self, rank: Rank, shares: Iterable[Iterable[Share]], holds: Sequence[bool], composer: TorchComposer
    ) -> Any:
        """The value of `distrib_optim.pt`: a chain's dict, or the list [dense, experts] with None where the file of
        another rank holds it. holds: which chains are this file's."""
        params, own = self.split(shares)
        made: list[Any] = []
        for experts, held in zip(self.chains, holds, strict=True):
            if not held:
                made.append(None)
                continue
            which = [i for i, param in enumerate(params) if experts is None or param.expert == experts]
            buckets = bucketing_of(self.shape.facts, experts=bool(experts), degrees=self.shape.degrees)
            buffers = lay_buffers(params, self.shape.facts, self.shape.stages, rank.pp, buckets, which, F32)
            one: dict[Any, Any] = {"buckets_coalesced": True}
            for number, buffer in enumerate(buffers):
                world: dict[str, Any] = {}
                for state in FLAT:
                    parts = [
                        part._replace(start=part.start + buffer.flat.coalesced(at))
                        for at, member in enumerate(buffer.members)
                        for part in self.parts(own[member], state)
                    ]
                    world["param" if state == MASTER else state] = composer.tensor((buffer.flat.unpadded,), F32, parts)
                world["numel_unpadded"] = buffer.flat.unpadded
                pair = (Symbol(f"torch.{buffer.dtype.torch}"), Symbol(f"torch.{buffer.grads.torch}"))
                one[number] = {pair: world}
            made.append(one)
        return made if len(made) > 1 else made[0]
