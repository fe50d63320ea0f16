"""Writing a legacy Megatron checkpoint: every rank's files, their pickles known before a value moves.

The one idea: decisions first (`megatron.wanted`), then for each rank its shares (`megatron.shares`) and its part of the
optimizer (`megatron.states_target`) become a skeleton whose tensors are holes of known size. Which ranks: every
existing pair of tensor and expert rank of every stage, since each of them reads a file of its own; data ranks share it.

    --tp 2 --pp 2, iteration 2:  iter_0000002/mp_rank_{00,01}_{000,001}/{model_optim_rng,distrib_optim}.pt
                                 latest_checkpointed_iteration.txt   "2"

`args` are the source's with the new degrees; without any, the few that a reader needs are made. RNG states are kept
when the layout is the source's own, else left out and named. Values of classes that the writer may not name are left
out, by name.

Specification: `formats.megatron.format`. Cost: some us a parameter, rank and state. What it does not do: move bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.target import Target, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import EXTRAS, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.megatron.args import NAMESPACE, updated
from ckpt_tool.formats.megatron.model import EMBEDDING, TIED_HEAD
from ckpt_tool.formats.megatron.optimizer import chained, groups_of
from ckpt_tool.formats.megatron.ranks import MODEL_FILE, OPTIM_FILE, Rank, folder_name, pairs, stage_ranks
from ckpt_tool.formats.megatron.rules import VOCABULARY
from ckpt_tool.formats.megatron.shares import Share, Sharing
from ckpt_tool.formats.megatron.states_target import States
from ckpt_tool.formats.megatron.wanted import Shape, decide
from ckpt_tool.formats.state_dict.tree import join
from ckpt_tool.formats.torch.content import Part, TorchComposer
from ckpt_tool.storage.pickle_values import OrderedMap
from ckpt_tool.storage.pickle_writer import dumps

OURS = "ckpt"
MOST = 1 << 62  # an iteration: more is no number of steps, and would be a long name
_OWN = frozenset(
    {"args", "checkpoint_version", "iteration", "model", "optimizer", "rng_state", OURS, "ckpt_vocab_rows"}
)
_EXTRA_STATES = frozenset(
    {
        "linear_proj",
        "linear_qkv",
        "linear_fc1",
        "linear_fc2",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "eh_proj",
        "output_layer",
    }
)
_SCALE = ("grad_scaler", "scale")


def legacy_target(wanted: Wanted) -> Target:
    """The files of every rank. Raises UsageError as `megatron.wanted.decide` does."""
    return _Writing(decide(wanted)).target()


class _Writing:
    """One target in the making."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.extras = dict(shape.wanted.extras)
        self.notes = list(shape.notes)
        self.sharing = Sharing(shape)
        self.states = States(shape)
        self.iteration = self._iteration()
        self.folder = "release" if self.iteration is None else f"iter_{self.iteration:07d}"
        self.args = self._args()
        self.rng = self._rng()
        self.common = self._common()
        self.scale, self.placed, self.kept = self._extra_tensors()
        if self.states.form.none and States.is_ours(self.extras.get("optimizer")):
            self.notes.append("the optimizer's hyperparameters are left out: none of its states are written")

    def target(self) -> Target:
        files: list[TargetFile] = []
        degrees = self.shape.degrees
        tp, ep, etp = degrees["tp"], degrees["ep"], degrees["etp"]
        existing = pairs(degrees)
        dense = {(r % tp, r // etp % ep) for r in range(tp)}
        experts = {(r % tp, r // etp % ep) for r in range(min(ep * etp, stage_ranks(degrees)))}
        for pp in range(degrees["pp"]):
            for (t, e), r in sorted(existing.items()):
                rank = Rank(folder_name(t, pp, e, degrees), t, pp, e, r % etp)
                shares = self.sharing.of(rank)
                files.append(self._model_file(rank, shares, pp * stage_ranks(degrees) + r, first=not files))
                holds = [(t, e) in dense, (t, e) in experts][: len(self.states.chains)]
                if self.states.form.flat and any(holds):
                    composer = TorchComposer()
                    value = self.states.flat(rank, shares, holds, composer)
                    files.append(composer.file(f"{self.folder}/{rank.path}/{OPTIM_FILE}", value))
        tracker = "release" if self.iteration is None else str(self.iteration)
        files.append(whole_file("latest_checkpointed_iteration.txt", tracker.encode("ascii")))
        files += [TargetFile(path, size, copy_of=path) for path, size in self.shape.wanted.sidefiles]
        return Target("megatron", tuple(files), None, tuple(dict.fromkeys(self.notes)))

    # -- values that all ranks share -----------------------------------------------------------------------------------

    def _iteration(self) -> int | None:
        said = self.extras.get("iteration")
        if type(said) is int and 0 <= said < MOST and not (self.shape.style.release and said == 0):
            return said
        if self.shape.style.release:
            return None
        steps = {g.get("step") for one in chained(self.extras.get("optimizer")) for g in groups_of(one)}
        steps |= {self.extras.get(name) for name in ("step", "global_step")}
        known = [
            int(step)
            for step in steps
            if isinstance(step, int | float) and not isinstance(step, bool) and 0 <= step < MOST
        ]
        if len(known) == 1:
            self.notes.append(f"the source names no iteration: its step {known[0]} is taken")
            return known[0]
        if self.states.form.none:
            return None
        self.notes.append("the source names no iteration: 0 is written")
        return 0

    def _args(self) -> dict[str, Any]:
        """The source's arguments as far as they can be written, or the few that a reader needs."""
        shape, facts = self.shape, self.shape.facts
        sizes: dict[str, Any] = {}
        if facts.layers or not shape.args:
            sizes["num_layers"] = facts.layers
        if facts.experts or "num_experts" in shape.args:
            sizes["num_experts"] = facts.experts
        if shape.rows is not None:
            sizes["padded_vocab_size"] = shape.rows
        if EMBEDDING in shape.model or TIED_HEAD in shape.model:
            sizes["untie_embeddings_and_output_weights"] = not facts.tied
        if "use_distributed_optimizer" in shape.args and not self.states.form.none:
            sizes["use_distributed_optimizer"] = self.states.form.flat
        if not shape.args:
            self.notes.append("the source has no Megatron arguments: degrees and sizes alone are written into args")
            return sizes | {
                "swiglu": shape.cutting.gated,
                "use_distributed_optimizer": self.states.form.flat,
                "mtp_num_layers": facts.mtp or None,
                "multi_latent_attention": facts.mla,
                "transformer_impl": "transformer_engine" if shape.style.te else "local",
            }
        out, refused = {}, []
        for name, value in {**shape.args, **sizes}.items():
            if writable(value):
                out[name] = value
            else:
                refused.append(name)
        if refused:
            self.notes.append(f"args without {', '.join(refused[:20])}: values of classes that are not written")
        if facts.mtp != (shape.args.get("mtp_num_layers") or 0):
            out["mtp_num_layers"] = facts.mtp or None
        return out

    def _rng(self) -> Mapping[str, Any]:
        """RNG states by folder, when they are of this very layout."""
        stored = self.extras.get("rng_state")
        if not stored:
            return {}
        if not (isinstance(stored, Mapping) and all(isinstance(k, str) and k.startswith("mp_rank_") for k in stored)):
            self.notes.append("RNG states are left out: they are of another format")
            return {}
        if not self.shape.same_layout:
            self.notes.append("RNG states are left out: they belong to the ranks of another layout")
            return {}
        return stored

    def _common(self) -> dict[str, Any]:
        """Extras that stand beside the model in every file; what can't be written is named."""
        out, refused = {}, []
        for key, value in self.extras.items():
            if key in _OWN or str(key).startswith("model"):
                continue
            if writable(value):
                out[key] = value
            else:
                refused.append(str(key))
        if refused:
            self.notes.append(f"extras left out, values of classes that are not written: {', '.join(refused[:20])}")
        return out

    def _extra_tensors(self) -> tuple[int | None, list[tuple[tuple[str | int, ...], int]], list[int]]:
        """Tensors among the extras: (the loss scale, those with a place of their own, those under our key)."""
        scale, placed, kept = None, [], []
        for number, tensor in enumerate(self.shape.wanted.tensors):
            if tensor.key.state != EXTRAS:
                continue
            path = tensor.path
            if path[:1] == ("optimizer",) and path[-2:] == _SCALE and not self.states.form.none:
                scale = number if scale is None else scale
            elif (
                self.shape.wanted.source_format == "megatron"
                and path
                and path[0] not in _OWN
                and path[0] in self.extras
            ):
                placed.append((path, number))
            else:
                kept.append(number)
        return scale, placed, kept

    # -- a rank's model file -------------------------------------------------------------------------------------------

    def _model_file(self, rank: Rank, shares: list[list[Share]], number: int, *, first: bool) -> TargetFile:
        composer = TorchComposer()
        args = updated(self.args, self.shape.degrees, self.shape.stages, number)
        out: dict[Any, Any] = {"args": Opaque(NAMESPACE, (), args)}
        out["checkpoint_version"] = self.extras.get("checkpoint_version", 3.0)
        out["iteration"] = self.iteration or 0
        for chunk, own in enumerate(shares):
            model = out["model" if len(shares) == 1 else f"model{chunk}"] = self._model(own, composer)
            if self.shape.facts.tied and self.shape.stages.of(rank.pp, chunk).head:
                model.setdefault("output_layer._extra_state", None)  # the layer is there, its weight is the embedding's
        if not self.states.form.none:
            out["optimizer"] = self._optimizer(rank, shares, composer)
        common = join(self.common, [(path, self._whole(at, composer)) for path, at in self.placed])
        out |= common
        if rank.path in self.rng:
            out["rng_state"] = _rng_tensors(self.rng[rank.path], composer)
        ours = self._ours(shares, composer, first=first)
        if ours:
            out[OURS] = ours
        return composer.file(f"{self.folder}/{rank.path}/{MODEL_FILE}", out)

    def _model(self, shares: list[Share], composer: TorchComposer) -> OrderedMap:
        """The model's dict, extra states (None) behind the parameters of their modules."""
        out = OrderedMap()
        last: dict[str, str] = {}
        for share in shares:
            last[share.local.rpartition(".")[0]] = share.local
        behind = {local: module for module, local in last.items() if self._has_extra_state(module)}
        for share in shares:
            parts = [Part(self.states.at[MODEL, run.name], run.box, run.start) for run in share.runs]
            out[share.local] = composer.tensor(share.shape, share.dtype, parts)
            if share.local in behind:
                out[f"{behind[share.local]}._extra_state"] = None
        return out

    def _has_extra_state(self, module: str) -> bool:
        known = self.shape.style.extra_states
        if known is not None:
            return ".".join("*" if w.isdecimal() else w for w in module.split(".")) + "._extra_state" in known
        layered = module.startswith(("decoder.", "encoder.", "mtp.", "output_layer"))
        return layered and module.rpartition(".")[2] in _EXTRA_STATES

    def _optimizer(self, rank: Rank, shares: list[list[Share]], composer: TorchComposer) -> Any:
        made = self.states.numbered(rank, shares, composer)
        scaler = next(
            (
                one["grad_scaler"]
                for one in chained(self.extras.get("optimizer"))
                if isinstance(one, dict) and isinstance(one.get("grad_scaler"), dict)
            ),
            None,
        )
        for one in made:
            if scaler is None and self.scale is None or "optimizer" not in one:
                continue
            own = dict(scaler or {})
            scale = {} if self.scale is None else {"scale": self._whole(self.scale, composer)}
            masters = {
                key: one.pop(key) for key in ("fp32_from_fp16_params",) if key in one
            }  # Megatron's order of keys
            one |= {"grad_scaler": scale | own} | masters
        return made if len(made) > 1 else made[0]

    def _tail(self, composer: TorchComposer) -> dict[str, dict[str, Any]]:
        """Rows of vocabularies that Megatron does not load at this tensor parallel size: {state: {name: tensor}}."""
        kept, every = self.shape.kept_rows, self.shape.all_rows
        out: dict[str, dict[str, Any]] = {}
        for number, tensor in enumerate(self.shape.wanted.tensors):
            if kept is None or every is None or kept >= every or tensor.key.name not in VOCABULARY:
                continue
            if tensor.shape[:1] == (every,):
                shape = (every - kept, *tensor.shape[1:])
                box = Box((kept, *(0,) * (len(shape) - 1)), shape)
                made = composer.tensor(shape, tensor.dtype, [Part(number, box, 0)])
                out.setdefault(tensor.key.state, {})[tensor.key.name] = made
        return out

    def _whole(self, number: int, composer: TorchComposer) -> Any:
        tensor = self.shape.tensor(number)
        return composer.tensor(tensor.shape, tensor.dtype, [Part(number, whole(tensor.shape), 0)])

    def _ours(self, shares: list[list[Share]], composer: TorchComposer, *, first: bool) -> dict[str, Any]:
        """What Megatron has no place for; whole tensors and extras in the first file alone."""
        out: dict[str, Any] = {}
        cut = self.states.cut(shares, composer)
        if cut:
            out["states"] = cut
        if not first:
            return out
        tensors: dict[str, dict[str, Any]] = {}
        for number in (*self.states.form.whole, *self.kept):
            key = self.shape.tensor(number).key
            tensors.setdefault(key.state, {})[key.name] = self._whole(number, composer)
        if tensors:
            out["tensors"] = tensors
        extras: dict[str, Any] = {}
        optimizer = self.extras.get("optimizer")
        if optimizer is not None and not States.is_ours(optimizer) and writable(optimizer):
            extras["optimizer"] = optimizer
        rows, kept = self.shape.rows, self.shape.kept_rows
        if rows is not None and kept is not None and rows > kept:
            out["vocab_rows"] = kept
        tail = self._tail(composer)
        if tail:
            out["vocab_tail"] = tail
        if extras:
            out["extras"] = extras
        return out


def writable(value: Any) -> bool:
    """Can the pickle writer write it?"""
    try:
        dumps(value)
    except UsageError:
        return False
    return True


def _rng_tensors(value: Any, composer: TorchComposer) -> Any:
    """RNG states with bytes as the uint8 tensors that they were."""
    if isinstance(value, bytes):
        return composer.value((len(value),), DTYPES["U8"], value)
    if isinstance(value, dict):
        return {key: _rng_tensors(item, composer) for key, item in value.items()}
    if isinstance(value, list):
        return [_rng_tensors(item, composer) for item in value]
    return value if not isinstance(value, Symbol) else value
