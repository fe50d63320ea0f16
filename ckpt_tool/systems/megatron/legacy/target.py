"""Plans a legacy Megatron checkpoint: every rank's files, whose pickles are known before a value is copied.

Decisions come first (`megatron.wanted`); then each rank's arrays (`megatron.job`) and its part of the optimizer become
pickles with gaps of known size for the tensors. There is a file for every existing pair of tensor and expert rank of
every stage, because each of them reads a file of its own; data ranks share it.

    --tp 2 --pp 2, iteration 2:  iter_0000002/mp_rank_{00,01}_{000,001}/{model_optim_rng,distrib_optim}.pt
                                 latest_checkpointed_iteration.txt   "2"

`args` are the source's with the new degrees; without any, the few that a reader needs are made. RNG states are kept if
the layout is the source's own, else they are left out, with a note. Values of classes that the writer must not name in
a pickle are left out, with a note.

The optimizer's form is the same for all ranks and follows from the states. Flat buffers require fp32 master, exp_avg
and exp_avg_sq of every parameter; numbered arrays accept any states; everything else (an EMA, states of tensors that
are no parameters) is stored under a key of ours, cut like its parameter.

    states {master, exp_avg, exp_avg_sq} of all  -> distrib_optim.pt, when the job used the distributed optimizer
    the same and `step`, of torch's Adam      -> optimizer.state {0: {step, exp_avg, exp_avg_sq}}, fp32_from_fp16_params

Groups have the source's hyperparameters; a group that the source lacks (experts', when they become parallel) is made
from its most similar one.

Specification: `systems.megatron.legacy.format`. Cost: some us a parameter, rank and state; no value is read or
written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.target import Target, TargetFile, Wanted
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.run_pointer import RELEASE, step_name
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.formats.state_dict.tree import join
from ckpt_tool.storage.pickles.pickle_values import OrderedMap
from ckpt_tool.storage.pickles.pickle_writer import dumps
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import NAMESPACE, updated
from ckpt_tool.systems.megatron.chains import SAYS_ADAM, is_layer_wise, matrices_at, say_adam
from ckpt_tool.systems.megatron.extra_states import EXTRA_STATES, LEFT, NAME
from ckpt_tool.systems.megatron.groups import (
    VALUES,
    GroupKey,
    chained,
    groups_for,
    groups_of,
    is_matrix,
    key_of_param,
    members_of,
)
from ckpt_tool.systems.megatron.hints import MegatronHints
from ckpt_tool.systems.megatron.job import JobRanks, MegatronRank, RankArray
from ckpt_tool.systems.megatron.legacy.folders import MODEL_FILE, OPTIM_FILE, folder_name, pairs, stage_ranks
from ckpt_tool.systems.megatron.optimizer import bucketing_of, lay_buffers
from ckpt_tool.systems.megatron.pointer import pointer_to
from ckpt_tool.systems.megatron.rng import NO_STATES, OTHER_RANKS, can_resume, note_of_missing, tensors_of_rng
from ckpt_tool.systems.megatron.rules import is_vocabulary
from ckpt_tool.systems.megatron.stored_names import EMBEDDING, TIED_HEAD
from ckpt_tool.systems.megatron.wanted import Decided, decide

OURS = "ckpt"
MOST = 1 << 62  # an iteration: more is no number of steps, and would be a long name
_RESERVED_KEYS = frozenset(
    {
        "args",
        "checkpoint_version",
        "iteration",
        "model",
        "optimizer",
        "rng_state",
        OURS,
        "ckpt_vocab_rows",
        EXTRA_STATES,
        VALUES,
    }
)
_SCALE = ("grad_scaler", "scale")
FLAT = (MASTER, "exp_avg", "exp_avg_sq")
F32 = DTYPES["F32"]


def legacy_target(wanted: Wanted) -> Target:
    """Return the files of every rank. Raises UsageError as `megatron.wanted.decide` does."""
    return _Writing(decide(wanted)).target()


class _Form(NamedTuple):
    """How the optimizer is stored: one form for all ranks."""

    flat: bool  # in the flat buffers of distrib_optim.pt
    inner: bool  # only the inner dict, as fp32 models have it
    masters: bool  # with fp32 masters of 16-bit parameters
    states: tuple[str, ...]  # the states of numbered arrays
    cut: Mapping[str, frozenset[str]]  # state -> names that are stored under our key, cut like their parameter
    whole: tuple[int, ...]  # numbers of wanted tensors that are stored there whole
    groups: tuple[tuple[dict[str, Any], ...], ...]  # of each chained optimizer
    none: bool  # no optimizer is written


class _Link(NamedTuple):
    """An optimizer of the chain, and which parameters it updates."""

    experts: bool | None  # True: experts' parameters, False: all others, None: both
    matrices: bool | None = None  # True: those that Muon or Lion updates, False: the rest, None: all
    at: int | None = None  # its number in the source's chain, None if that is not a chain of two

    def holds(self, name: str, shape: Sequence[int], *, expert: bool) -> bool:
        """Return whether this optimizer updates the parameter."""
        fits_shape = self.matrices is None or is_matrix(name, shape) == self.matrices
        fits_kind = self.experts is None or expert == self.experts
        return fits_shape and fits_kind


class _States:
    """All states except the model's, and the form in which they are stored."""

    def __init__(self, decided: Decided) -> None:
        self.decided = decided
        self.at = {(t.key.state, t.key.name): i for i, t in enumerate(decided.wanted.tensors)}
        self.params = {name for name in decided.model if not names.is_buffer(name)}
        self.values: Mapping[str, Mapping[str, Any]] = decided.wanted.extras.get(VALUES, {})
        self.says_adam = False  # groups were marked as Adam's (`chains.say_adam`)
        self.form = self._choose_form()

    def _choose_form(self) -> _Form:
        names_by_state: dict[str, set[str]] = {}
        whole: list[int] = []
        for (state, name), number in self.at.items():
            if state in (MODEL, EXTRAS):
                continue
            if name in self.params and self._fits(state, name, number):
                names_by_state.setdefault(state, set()).add(name)
            else:
                whole.append(number)

        # A state that can't be cut like its parameter, or has none, is stored whole.
        self._check_shapes()
        flat = self.flat_form = self._can_be_flat(names_by_state)
        half_precision = self._half_precision()
        masters = not flat and bool(half_precision) and names_by_state.get(MASTER, set()) == half_precision

        numbered = () if flat else tuple(state for state in names_by_state if state not in (MASTER, EMA))
        optimizer_states = {*FLAT} if flat else {*numbered, *([MASTER] if masters else [])}

        # What the optimizer's form has no place for goes under our key; scalars there are whole.
        cut = {}
        for state, state_names in names_by_state.items():
            if state in optimizer_states:
                continue
            scalars = {name for name in state_names if self._differs_in_shape(state, name)}
            whole += [self.at[state, name] for name in sorted(scalars)]
            if state_names - scalars:
                cut[state] = frozenset(state_names - scalars)

        none = not any(state in names_by_state for state in optimizer_states)
        return _Form(
            flat,
            not flat and not masters and bool(numbered) and not half_precision,
            masters,
            numbered,
            cut,
            tuple(whole),
            () if none else self._groups(),
            none,
        )

    def _fits(self, state: str, name: str, number: int) -> bool:
        """Return whether the state can be stored with its parameter: cut like it, as a counter, or whole."""
        tensor = self.decided.tensor(number)
        parameter = self.decided.tensor(self.decided.model[name])
        is_kept_whole = self._keeps_parameters_whole() and state not in (MASTER, EMA) and prod(tensor.shape) != 1
        is_counter = state == STEP and len(tensor.shape) == 0
        return tensor.shape == parameter.shape or is_counter or is_kept_whole

    def _keeps_parameters_whole(self) -> bool:
        """Return whether every parameter is whole on its rank, under its own name.

        Then a state of any shape can be stored with its parameter.
        """
        job = self.decided.job
        return job.degrees["tp"] == job.degrees["etp"] == 1 and job.container != names.GROUPED

    def _check_shapes(self) -> None:
        """Raise UsageError E0275 for states without their parameters' shapes if parameters are cut between ranks.

        The same state of a square matrix happens to have the parameter's shape, and would wrongly be cut like it.
        """
        if self._keeps_parameters_whole():
            return
        for state, name in self.at:
            if state in (MODEL, MASTER, EMA, EXTRAS, STEP) or name not in self.params:
                continue
            if self._differs_in_shape(state, name) and prod(self.decided.tensor(self.at[state, name]).shape) != 1:
                raise UsageError(
                    f"--tp {self.decided.job.degrees['tp']}: no rule says how tensor ranks share {name} [{state}], "
                    "which does not have its parameter's shape",
                    code="E0275",
                    key=f"{name} [{state}]",
                    hint=f"write with --tp 1, or leave it out with --drop {state}",
                )

    def _differs_in_shape(self, state: str, name: str) -> bool:
        """Return whether the state has another shape than its parameter."""
        return self.decided.tensor(self.at[state, name]).shape != self.decided.tensor(self.decided.model[name]).shape

    def _half_precision(self) -> set[str]:
        """Return the names of the 16-bit parameters, which Megatron gives an fp32 master."""
        return {name for name in self.params if self.decided.tensor(self.decided.model[name]).dtype.bits == 16}

    def _can_be_flat(self, names_by_state: Mapping[str, set[str]]) -> bool:
        """Return whether the states fill flat fp32 buffers completely, and the job used a distributed optimizer."""
        is_complete = bool(self.params) and all(names_by_state.get(state) == self.params for state in FLAT)
        is_fp32 = is_complete and all(
            self.decided.tensor(self.at[state, name]).dtype == F32 for state in FLAT for name in self.params
        )

        # Flat buffers have no place for a step of each parameter.
        stated = self.decided.distributed
        wants_flat = stated if stated is not None else STEP not in names_by_state
        return is_fp32 and wants_flat

    # -- groups --------------------------------------------------------------------------------------------------------

    @cached_property
    def chains(self) -> tuple[_Link, ...]:
        """The optimizers of the chain. Raises UsageError E0274 for a chain of two whose experts are parallel."""
        parallel = self.decided.job.degrees["ep"] > 1
        first = matrices_at(chained(self.decided.wanted.extras.get("optimizer")), self.decided.job.facts)
        if first is None or self.flat_form:
            return (_Link(False), _Link(True)) if parallel else (_Link(None),)
        if parallel:
            raise UsageError(
                "the optimizers of matrices and of the rest have experts' of their own where experts are parallel, in "
                "an order that differs from version to version",
                code="E0274",
                hint="write with --ep 1, --to megatron-dist, or leave the optimizer out with --state model",
            )
        return tuple(_Link(None, at == first, at) for at in (0, 1))

    @staticmethod
    def is_ours(optimizer: Any) -> bool:
        """Return whether the optimizer is Megatron's, whose groups have `wd_mult`."""
        return any("wd_mult" in group for one in chained(optimizer) for group in groups_of(one))

    def _groups(self) -> tuple[tuple[dict[str, Any], ...], ...]:
        source_groups = [groups_of(optimizer) for optimizer in chained(self.decided.wanted.extras.get("optimizer"))]
        facts = self.decided.job.facts
        groups_by_link = list[tuple[dict[str, Any], ...]]()
        for link in self.chains:
            # A chain of two keeps its order; any other source may have the link's groups in any of its optimizers.
            candidates = source_groups if link.at is None else [source_groups[link.at]]
            stored = [group for groups in candidates for group in groups if "wd_mult" in group]
            link_groups = groups_for(stored, self._group_keys(link), facts, experts=bool(link.experts))
            groups_by_link.append(tuple(link_groups))
        self.says_adam = say_adam(groups_by_link)
        return tuple(groups_by_link)

    def _group_keys(self, link: _Link) -> set[GroupKey]:
        keys = set()
        for name in self.params:
            tensor = self.decided.tensor(self.decided.model[name])
            if link.holds(name, tensor.shape, expert=".experts." in name):
                keys.add(key_of_param(name, tensor.shape, self.decided.job.facts))
        return keys

    # -- a rank's ------------------------------------------------------------------------------------------------------

    def _parameters_by_link(self, arrays: Iterable[RankArray]) -> list[list[RankArray]]:
        """Return a rank's trainable parameters, by chained optimizer."""
        params = [array for array in arrays if not names.is_buffer(array.names[0])]
        by_link: list[list[RankArray]] = []
        for link in self.chains:
            by_link.append([array for array in params if link.holds(array.local, array.shape, expert=array.expert)])
        return by_link

    def parts(self, array: RankArray, state: str, at: int = 0) -> list[StoragePart]:
        """Return the sources of the values of a state. at: the element of the storage at which the array begins."""
        return [
            StoragePart(self.at[state, name], box, at + start, strides)
            for name, box, start, strides in array.parts()
            if (state, name) in self.at
        ]

    def compose_optimizers(self, arrays: Iterable[RankArray], composer: TorchComposer) -> list[dict[str, Any]]:
        """Return the optimizers of a rank, by chain: with numbered arrays, or only the groups if there are flat
        buffers."""
        optimizers: list[dict[str, Any]] = []
        for params, groups in zip(self._parameters_by_link(arrays), self.form.groups, strict=True):
            if self.form.flat:
                optimizers.append({"optimizer": {"param_groups": [dict(group) for group in groups]}})
                continue

            # Parameters are numbered group by group, through all groups of an optimizer.
            members = members_of(groups, params, self.decided.job.facts) or []
            entries = dict[int, Any]()
            listed = list[dict[str, Any]]()
            number = 0
            for group, group_params in zip(groups, members, strict=True):
                listed.append({**group, "params": list(range(number, number + len(group_params)))})
                for array in group_params:
                    states = [state for state in self.form.states if (state, array.names[0]) in self.at]
                    values = self.values.get(array.names[0], {})
                    if states or values:
                        entries[number] = {
                            **values,
                            **{state: self._compose_state(array, state, composer) for state in states},
                        }
                    number += 1

            inner = {"state": entries, "param_groups": listed}

            if self.form.inner:
                optimizers.append(inner)
                continue
            optimizer: dict[str, Any] = {"optimizer": inner}
            if self.form.masters:
                optimizer["fp32_from_fp16_params"] = [self._masters(group, composer) for group in members]
            optimizers.append(optimizer)
        return optimizers

    def _masters(self, group: Iterable[RankArray], composer: TorchComposer) -> list[Any]:
        return [self._compose_state(array, MASTER, composer) for array in group if array.dtype.bits == 16]

    def _compose_state(self, array: RankArray, state: str, composer: TorchComposer) -> Any:
        number = self.at[state, array.names[0]]
        tensor = self.decided.tensor(number)
        if self._differs_in_shape(state, array.names[0]):
            return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(number, whole(tensor.shape), 0)])
        return composer.tensor(array.shape, tensor.dtype, self.parts(array, state))

    def compose_cut_states(
        self, arrays: Iterable[RankArray], composer: TorchComposer
    ) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the states under our key: {chunk: {state: {the rank's name: tensor}}}."""
        out: dict[int, dict[str, dict[str, Any]]] = {}
        for array in arrays if self.form.cut else ():
            for state, state_names in self.form.cut.items():
                if array.names[0] in state_names:
                    tensor = self._compose_state(array, state, composer)
                    out.setdefault(array.chunk, {}).setdefault(state, {})[array.local] = tensor
        return out

    def compose_flat(
        self, rank: MegatronRank, arrays: Iterable[RankArray], holds: Sequence[bool], composer: TorchComposer
    ) -> Any:
        """Return the value of `distrib_optim.pt`: one optimizer's dict, or the list [dense, experts].

        An entry of the list is None if the file of another rank holds it.

        Args:
            rank: whose file it is.
            arrays: the rank's.
            holds: for each optimizer of the chain, whether this file holds it.
            composer: of the file.
        """
        values: list[Any] = []
        for link, params, is_held in zip(self.chains, self._parameters_by_link(arrays), holds, strict=True):
            if not is_held:
                values.append(None)
                continue

            buckets = bucketing_of(self.decided.job, experts=bool(link.experts))
            buffers: dict[Any, Any] = {"buckets_coalesced": True}
            for number, buffer in enumerate(lay_buffers(params, self.decided.job, rank.pp, buckets, F32)):
                states: dict[str, Any] = {}
                for state in FLAT:
                    parts = [
                        part
                        for position, member in enumerate(buffer.members)
                        for part in self.parts(member, state, buffer.flat.coalesced(position))
                    ]
                    states["param" if state == MASTER else state] = composer.tensor((buffer.flat.unpadded,), F32, parts)

                states["numel_unpadded"] = buffer.flat.unpadded
                pair = (Symbol(f"torch.{buffer.dtype.torch}"), Symbol(f"torch.{buffer.grads.torch}"))
                buffers[number] = {pair: states}
            values.append(buffers)
        return values if len(values) > 1 else values[0]


class _Writing:
    """The planning of one target: decisions in `__init__`, files in `target`."""

    def __init__(self, decided: Decided) -> None:
        self.decided = decided
        self.job = decided.job
        self.extras = dict(decided.wanted.extras)
        tensors = {name: decided.tensor(number) for name, number in decided.model.items()}
        self.ranks = JobRanks(self.job, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        self.states = _States(decided)
        self.notes = [*decided.notes, *([SAYS_ADAM] if self.states.says_adam else [])]
        self.iteration = self._choose_iteration()
        self.folder = RELEASE if self.iteration is None else f"{step_name(self.iteration)}/"
        self.args = self._choose_args()
        self.rng = self._choose_rng()
        self.scales = self._choose_scales()
        self.common = self._choose_common()
        self.scale, self.placed, self.kept = self._extra_tensors()
        if self.states.form.none and _States.is_ours(self.extras.get("optimizer")):
            self.notes.append("the optimizer's hyperparameters are left out: none of its states are written")

    def target(self) -> Target:
        """Return the files of all ranks, and the pointer to the folder."""
        files: list[TargetFile] = []
        degrees = self.job.degrees
        tp = degrees["tp"]
        ep = degrees["ep"]
        etp = degrees["etp"]

        # The pairs of ranks that write the flat buffers of dense and of experts' parameters: others would repeat them.
        existing = pairs(degrees)
        dense = {(stage_rank % tp, stage_rank // etp % ep) for stage_rank in range(tp)}
        experts = {
            (stage_rank % tp, stage_rank // etp % ep) for stage_rank in range(min(ep * etp, stage_ranks(degrees)))
        }

        for pp in range(degrees["pp"]):
            for (tp_rank, ep_rank), stage_rank in sorted(existing.items()):
                rank = MegatronRank(folder_name(tp_rank, pp, ep_rank, degrees), tp_rank, pp, ep_rank, stage_rank % etp)
                arrays = self.ranks.arrays(rank)
                files.append(self._model_file(rank, arrays, pp * stage_ranks(degrees) + stage_rank, first=not files))

                holds = [(tp_rank, ep_rank) in dense, (tp_rank, ep_rank) in experts][: len(self.states.chains)]
                if self.states.form.flat and any(holds):
                    composer = TorchComposer()
                    value = self.states.compose_flat(rank, arrays, holds, composer)
                    files.append(composer.file(f"{self.folder}{rank.path}/{OPTIM_FILE}", value))

        files.append(pointer_to(self.folder))
        files += self.decided.wanted.side_file_copies()
        return Target("megatron", tuple(files), None, tuple(dict.fromkeys(self.notes)))

    # -- values that all ranks share -----------------------------------------------------------------------------------

    def _choose_iteration(self) -> int | None:
        iteration = self.extras.get("iteration")
        if type(iteration) is int and 0 <= iteration < MOST and not (self.decided.release and iteration == 0):
            return iteration
        if self.decided.release:
            return None

        # Other systems count steps: in a group of the optimizer, or among the extras.
        steps = set()
        for optimizer in chained(self.extras.get("optimizer")):
            steps |= {group.get("step") for group in groups_of(optimizer)}
        steps |= {self.extras.get(name) for name in ("step", "global_step")}
        valid_steps = [
            int(step)
            for step in steps
            if isinstance(step, int | float) and not isinstance(step, bool) and 0 <= step < MOST
        ]
        if len(valid_steps) == 1:
            self.notes.append(f"the source names no iteration: its step {valid_steps[0]} is taken")
            return valid_steps[0]

        if self.states.form.none:
            return None
        self.notes.append("the source names no iteration: 0 is written")
        return 0

    def _choose_args(self) -> dict[str, Any]:
        """The source's arguments as far as they can be written, or the few that a reader needs."""
        decided = self.decided
        facts = self.job.facts
        sizes: dict[str, Any] = {}
        if facts.layers or not decided.args:
            sizes["num_layers"] = facts.layers
        if facts.experts or "num_experts" in decided.args:
            sizes["num_experts"] = facts.experts
        if self.job.rows is not None:
            sizes["padded_vocab_size"] = self.job.rows
        if {EMBEDDING, TIED_HEAD} & {names.stem(name) for name in decided.model}:
            sizes["untie_embeddings_and_output_weights"] = not facts.tied
        if "use_distributed_optimizer" in decided.args and not self.states.form.none:
            sizes["use_distributed_optimizer"] = self.states.form.flat

        if is_layer_wise(decided.args) and not self.states.form.none:
            self.notes.append(WHOLE)
            sizes |= {"optimizer": str(decided.args.get("optimizer")).removeprefix("dist_")}
            if "use_layer_wise_distributed_optimizer" in decided.args:
                sizes["use_layer_wise_distributed_optimizer"] = False

        if not decided.args:
            self.notes.append("the source has no Megatron arguments: degrees and sizes alone are written into args")
            return sizes | {
                "swiglu": self.job.gated,
                "use_distributed_optimizer": self.states.form.flat,
                "mtp_num_layers": facts.mtp or None,
                "multi_latent_attention": facts.mla,
                "transformer_impl": "transformer_engine" if self.job.te else "local",
            }
        args = written_of({**decided.args, **sizes}, ARGS_LEFT, self.notes)
        if facts.mtp != (decided.args.get("mtp_num_layers") or 0):
            args["mtp_num_layers"] = facts.mtp or None
        return args

    def _choose_rng(self) -> Mapping[str, Any]:
        """Return the source's RNG states by folder, {} (with a note) if its layout is another one."""
        stored = self.extras.get("rng_state")
        if not stored:
            if can_resume(self.decided.wanted.tensors):
                self.notes.append(note_of_missing(NO_STATES))
            return {}

        if not isinstance(stored, Mapping) or not all(_is_rank_folder(key) for key in stored):
            self.notes.append(note_of_missing("they have another format"))
            return {}
        if not self.decided.same_layout:
            self.notes.append(note_of_missing(OTHER_RANKS))
            return {}
        return stored

    def _choose_scales(self) -> Mapping[str, Any]:
        """Return the source's extra states with FP8 scales by folder, {} (with a note) if its ranks differ."""
        stored = self.extras.get(EXTRA_STATES)
        if not isinstance(stored, Mapping) or not stored:
            return {}
        source = self.decided.wanted.hints.get(MegatronHints)
        if source is not None and source.counts == tuple(self.job.stages.counts) and self.decided.same_ranks:
            return stored
        first = next(iter(stored))
        self.notes.append(f"the {LEFT} those of {first}: they belong to the ranks of another layout, or of torch_dist")
        return {}

    def _choose_common(self) -> dict[str, Any]:
        """Return the extras that are written next to the model in every file; a note names those that can't be."""
        common = {
            key: value
            for key, value in self.extras.items()
            if key not in _RESERVED_KEYS and not str(key).startswith("model")
        }
        return written_of(common, EXTRAS_LEFT, self.notes)

    def _extra_tensors(self) -> tuple[int | None, list[tuple[tuple[str | int, ...], int]], list[int]]:
        """Return the numbers of the tensors among the extras: (loss scale, those with a path, those under our key)."""
        scale = None
        placed = []
        kept = []
        is_from_megatron = self.decided.wanted.source_format == "megatron"
        for number, tensor in enumerate(self.decided.wanted.tensors):
            if tensor.key.state != EXTRAS:
                continue
            path = tensor.path

            # Only a source of this format has paths that are valid in this format.
            if path[:1] == ("optimizer",) and path[-2:] == _SCALE and not self.states.form.none:
                scale = number if scale is None else scale
            elif is_from_megatron and path and path[0] not in _RESERVED_KEYS and path[0] in self.extras:
                placed.append((path, number))
            else:
                kept.append(number)
        return scale, placed, kept

    # -- a rank's model file -------------------------------------------------------------------------------------------

    def _model_file(self, rank: MegatronRank, arrays: list[RankArray], number: int, *, first: bool) -> TargetFile:
        composer = TorchComposer()
        args = updated(self.args, self.job.degrees, self.job.stages, number)

        content: dict[Any, Any] = {"args": Opaque(NAMESPACE, (), args)}
        content["checkpoint_version"] = self.extras.get("checkpoint_version", 3.0)
        content["iteration"] = self.iteration or 0

        for chunk in range(self.job.stages.vpp):
            key = "model" if self.job.stages.vpp == 1 else f"model{chunk}"
            scales = self.scales.get(rank.path, {}).get(str(chunk), {})
            model = content[key] = self._compose_model(
                [array for array in arrays if array.chunk == chunk], scales, composer
            )
            if self.job.facts.tied and self.job.stages.of(rank.pp, chunk).head:
                model.setdefault("output_layer._extra_state", None)  # the layer is there, its weight is the embedding's

        if not self.states.form.none:
            content["optimizer"] = self._compose_optimizer(arrays, composer)
        common = join(self.common, [(path, self._compose_whole(at, composer)) for path, at in self.placed])
        content |= common

        if rank.path in self.rng:
            content["rng_state"] = tensors_of_rng(self.rng[rank.path], composer.value, inside=True)
        ours = self._compose_ours(arrays, composer, first=first)
        if ours:
            content[OURS] = ours
        return composer.file(f"{self.folder}{rank.path}/{MODEL_FILE}", content)

    def _compose_model(self, arrays: list[RankArray], scales: Mapping[str, Any], composer: TorchComposer) -> OrderedMap:
        """Return the model's dict, with extra states (None, or the source's scales) after their modules' parameters."""
        model = OrderedMap()
        last_of_module: dict[str, str] = {}

        for array in arrays:
            last_of_module[array.local.rpartition(".")[0]] = array.local
        module_by_last = {local: module for module, local in last_of_module.items() if self._has_extra_state(module)}
        for array in arrays:
            model[array.local] = composer.tensor(array.shape, array.dtype, self.states.parts(array, MODEL))
            if array.local in module_by_last:
                name = f"{module_by_last[array.local]}.{NAME}"
                value = scales.get(name)
                model[name] = tensors_of_rng(value, composer.value, inside=isinstance(value, bytes))
        return model

    def _has_extra_state(self, module: str) -> bool:
        """Return whether the module has an extra state: as in the source, else if it is a linear of Transformer
        Engine."""
        source_patterns = self.decided.extra_states
        if source_patterns is not None:
            pattern = ".".join("*" if word.isdecimal() else word for word in module.split("."))
            return f"{pattern}._extra_state" in source_patterns
        is_in_layer = names.stem(module).startswith(("decoder.", "encoder.", "mtp.", "output_layer"))
        is_in_megatron_tower = names.is_tower(module) and not names.is_foreign(module)
        is_linear = module.rpartition(".")[2] in {*names.LINEARS, "output_layer"}
        return (is_in_layer or is_in_megatron_tower) and is_linear

    def _compose_optimizer(self, arrays: list[RankArray], composer: TorchComposer) -> Any:
        optimizers = self.states.compose_optimizers(arrays, composer)
        scaler = self._source_scaler()
        for optimizer in optimizers:
            if (scaler is None and self.scale is None) or "optimizer" not in optimizer:
                continue
            scale = {} if self.scale is None else {"scale": self._compose_whole(self.scale, composer)}

            # In Megatron's order of keys: masters come after the scaler.
            masters = optimizer.pop("fp32_from_fp16_params", None)
            optimizer["grad_scaler"] = scale | (scaler or {})
            if masters is not None:
                optimizer["fp32_from_fp16_params"] = masters
        return optimizers if len(optimizers) > 1 else optimizers[0]

    def _source_scaler(self) -> dict[str, Any] | None:
        """Return fp16's loss scaler, which all chained optimizers share, None if there is none."""
        for optimizer in chained(self.extras.get("optimizer")):
            if isinstance(optimizer, dict) and isinstance(optimizer.get("grad_scaler"), dict):
                return dict(optimizer["grad_scaler"])
        return None

    def _compose_vocabulary_tail(self, composer: TorchComposer) -> dict[str, dict[str, Any]]:
        """Return the rows of vocabularies that Megatron does not load at this degree: {state: {name: tensor}}."""
        kept = self.job.kept
        all_rows = self.decided.all_rows
        out: dict[str, dict[str, Any]] = {}
        for number, tensor in enumerate(self.decided.wanted.tensors):
            if kept is None or all_rows is None or kept >= all_rows or not is_vocabulary(tensor.key.name):
                continue
            if tensor.shape[:1] == (all_rows,):
                shape = (all_rows - kept, *tensor.shape[1:])
                box = Box((kept, *(0,) * (len(shape) - 1)), shape)
                tail = composer.tensor(shape, tensor.dtype, [StoragePart(number, box, 0)])
                out.setdefault(tensor.key.state, {})[tensor.key.name] = tail
        return out

    def _compose_whole(self, number: int, composer: TorchComposer) -> Any:
        tensor = self.decided.tensor(number)
        return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(number, whole(tensor.shape), 0)])

    def _compose_ours(self, arrays: list[RankArray], composer: TorchComposer, *, first: bool) -> dict[str, Any]:
        """Return the values that Megatron has no place for, for our key; whole tensors and extras only for the first
        file.
        """
        ours: dict[str, Any] = {}
        cut_states = self.states.compose_cut_states(arrays, composer)
        if cut_states:
            ours["states"] = cut_states
        if not first:
            return ours

        tensors: dict[str, dict[str, Any]] = {}
        for number in (*self.states.form.whole, *self.kept):
            key = self.decided.tensor(number).key
            tensors.setdefault(key.state, {})[key.name] = self._compose_whole(number, composer)
        if tensors:
            ours["tensors"] = tensors

        extras: dict[str, Any] = {}
        optimizer = self.extras.get("optimizer")
        if optimizer is not None and not _States.is_ours(optimizer) and writable(optimizer):
            extras["optimizer"] = optimizer

        rows = self.job.rows
        kept = self.job.kept
        if rows is not None and kept is not None and rows > kept:
            ours["vocab_rows"] = kept
        tail = self._compose_vocabulary_tail(composer)
        if tail:
            ours["vocab_tail"] = tail
        if extras:
            ours["extras"] = extras
        return ours


WHOLE = (
    "the states that a layer-wise optimizer shares out among data ranks are written whole: a job with --optimizer muon "
    "and without --use-distributed-optimizer loads them; for one with it, write --to megatron-dist"
)
ARGS_LEFT = "args without {}: values of classes that are not written"
EXTRAS_LEFT = "extras left out, values of classes that are not written: {}"


def written_of(values: Mapping[Any, Any], line: str, notes: list[str]) -> dict[Any, Any]:
    """Return the values that the pickle writer can write. line: the note on the others, with `{}` for their names."""
    refused = [key for key, value in values.items() if not writable(value)]
    if refused:
        notes.append(line.format(", ".join(map(str, refused[:20]))))
    return {key: value for key, value in values.items() if key not in refused}


def _is_rank_folder(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("mp_rank_")


def writable(value: Any) -> bool:
    """Return whether the pickle writer can write the value."""
    try:
        dumps(value)
    except UsageError:
        return False
    return True
