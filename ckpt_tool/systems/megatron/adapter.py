"""Adapters of Megatron's models: what a run's config says of them, and the tensors that lie otherwise than they mean.

A checkpoint of a LoRA run of Megatron-Bridge is a torch_dist whose model section has the adapter alone
(`apply_peft_adapter_filter_to_state_dict`), beside `run_config.yaml`:

    peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8, alpha: 16, ...}    LoRA, VLMLoRA, CanonicalLoRA, DoRA
    model: {num_layers: 2, hidden_size: 16, ...}                               the base, in the provider's words
    checkpoint: {pretrained_checkpoint: ...}                                   where the base lies

    M.adapter.linear_in.weight (r, in), M.adapter.linear_out.weight (out, r), M.adapter.weight_magnitude (out,)
    M.adapter.adapter_q.linear_in.weight, ...                                  CanonicalLoRA: q, k, v, gate, up

The scaling is alpha / r, r the tensor's own (`normalize_moe_lora`: experts have dim / topk). Two kinds of tensors are
stored in an order that depends on the tensor ranks of the job that saved them:

    canonical gate and up, B: each rank's rows are taken for gate and up and cut in two (`ParallelLinearAdapter.
        sharded_state_dict`, `"linear_fc1" in self.base_linear_name`): all first halves, then all second halves
    magnitudes of a gated fc1 (`ParallelLinearDoRAAdapter.sharded_state_dict`), and ms-swift's B of one
        (`LoraParallelLinear.sharded_state_dict` has the factory for the base alone): each rank's [gate; up] one below
        the other

`stretches` is the map, `read_adapter` gives the rows in the order of the whole tensor. So such tensors can't be told
without the ranks: `run_config.yaml` states them, else the boxes do. Source: megatron-bridge 0.6.2
`peft/{utils,canonical_lora,adapter_wrapper}.py`, `training/checkpointing.py`; mcore-bridge 1.6.5 `tuners/lora.py`,
ms-swift 4.6.0 `megatron/utils/megatron_lm_utils.py`. Cost: one small file. What it does not do: names of the hub
(`families.low_rank`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts import strict_yaml
from ckpt_tool.systems.megatron.args import facts_of
from ckpt_tool.systems.megatron.rules import rule_of

RUN_CONFIG = "run_config.yaml"  # megatron-bridge 0.6.2, `training/utils/checkpoint_utils.py` (`CONFIG_FILE`)
UNREADABLE = "E2009"
STATED = "E2791"
_LIMIT = 1 << 20  # bytes
_SECTIONS = "peft model checkpoint".split()
_OF_ADAPTER = re.compile(
    r".+(?:\.adapter(?:\.adapter_(?:q|k|v|gate|up))?\.(?:linear_in\.weight|linear_out\.weight|weight_magnitude)"
    r"|\.lora_(?:A|B)\.[^.]+\.weight)"
)
_DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_MADE = ("canonical_mapping", "params_to_save")  # sets that the bridge makes itself
_STRIPED = re.compile(r"(?:.+\.)?linear_fc1\.(?:adapter\.weight_magnitude|lora_B\.[^.]+\.weight)")
_HALVED = re.compile(r".+\.linear_fc1\.adapter\.adapter_(?:gate|up)\.linear_out\.weight")


def is_adapter(names: Iterable[str]) -> bool:
    """Are these the tensors of an adapter alone?"""
    names = list(names)
    return bool(names) and all(_OF_ADAPTER.fullmatch(name) for name in names)


_SCALING = "is {}, and it says what the adapter's scaling is"
_AGAIN = "get the file again from where the job wrote it"


def run_config(
    tree: Tree, folder: str, *, code: str = UNREADABLE, fault: str = _SCALING, hint: str = _AGAIN
) -> Mapping[str, Any]:
    """`run_config.yaml` beside the items, {} without one. Raises InputError of `code` for what is no plain YAML; fault:
    what that is, and what it means to who reads it."""
    path = folder + RUN_CONFIG
    if not tree.exists(path):
        return {}
    try:
        document = strict_yaml.parse(tree.read_whole(path, limit=_LIMIT))
    except strict_yaml.NotPlain as e:
        raise InputError(
            f"{RUN_CONFIG} {fault.format(e.what)}",
            code=code,
            path=tree.display(path),
            place=e.place,
            offset=e.offset,
            hint=hint,
        ) from e
    return document if isinstance(document, dict) else {}


def _section(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def hints_of(document: Mapping[str, Any]) -> LoraHints:
    """What a `run_config.yaml` says of the adapter and its base."""
    peft, model, checkpoint = (_section(document, key) for key in _SECTIONS)
    plain = {key: value for key, value in model.items() if isinstance(value, int | float | str | bool | list)}
    stated = (model.get("hf_model_id"), checkpoint.get("pretrained_checkpoint"))
    return LoraHints(peft, plain, next((each for each in stated if isinstance(each, str) and each), ""))


def degrees_of_run(hints: LoraHints) -> dict[str, int]:
    """The degrees of the job that saved the adapter, {} where nothing states them. Experts lie on data ranks."""
    degrees = facts_of(hints.arguments).degrees if hints.model else {}
    return {**degrees, "dp": max(degrees["dp"], degrees["ep"])} if degrees else {}


class Stretch(NamedTuple):
    """`rows` rows of a tensor from row `there` on, which lie from row `here` on where it is stored; tensor rank `rank`
    has them."""

    there: int
    here: int
    rows: int
    rank: int


def stretches(name: str, rows: int, ranks: int, *, gated: bool) -> list[Stretch]:
    """How the rows of an adapter's tensor lie that is not stored in its own order; [] for one that is.

    >>> stretches("linear_fc1.adapter.weight_magnitude", 8, 2, gated=True)[1]
    Stretch(there=4, here=2, rows=2, rank=0)
    """
    if ranks < 2 or rows % (2 * ranks):
        return []
    half = rows // (2 * ranks)
    if _HALVED.fullmatch(name):  # all first halves of the ranks' rows, then all second halves
        places = [(2 * k + half_of, k + half_of * ranks, k) for half_of in (0, 1) for k in range(ranks)]
    elif gated and _STRIPED.fullmatch(name) and ".experts." not in name:  # each rank's gate above its up
        places = [(k + half_of * ranks, 2 * k + half_of, k) for k in range(ranks) for half_of in (0, 1)]
    else:
        return []
    return [Stretch(there * half, here * half, half, rank) for there, here, rank in places]


def with_alpha(hints: LoraHints, shapes: Mapping[str, tuple[int, ...]], alpha: float | None, path: str) -> LoraHints:
    """The hints with the alpha that the user states (`--lora-alpha`), None for none; the class and the rank are what
    names and shapes show. path: of the checkpoint. Raises UsageError E2791 where the run's config says another."""
    if alpha is None or not shapes:
        return hints
    if hints.peft and hints.peft.get("alpha") != alpha:
        raise UsageError(
            f"--lora-alpha {alpha:g}, but the run's config says {str(hints.peft.get('alpha'))[:40]}",
            code=STATED,
            path=path,
            hint="leave --lora-alpha off: what the run says counts",
        )
    if hints.peft:
        return hints
    ranks = [shape[0] for name, shape in shapes.items() if name.endswith((".linear_in.weight", ".lora_A.weight"))]
    magnitudes = any(name.endswith("weight_magnitude") for name in shapes)
    apart = any(".adapter.adapter_" in name for name in shapes)
    if magnitudes:
        kind = "dora.DoRA"
    else:
        kind = "canonical_lora.CanonicalLoRA" if apart else "lora.LoRA"
    said = {"dim": max(set(ranks), key=ranks.count), "alpha": int(alpha) if alpha == int(alpha) else alpha}
    return replace(hints, peft={"_target_": f"megatron.bridge.peft.{kind}", **said, "dropout": 0.0})


def read_adapter(
    tree: Tree,
    folder: str,
    tensors: Mapping[TensorKey, LogicalTensor],
    args: Mapping[str, Any],
    alpha: float | None = None,
) -> tuple[Mapping[TensorKey, LogicalTensor], LoraHints | None, list[Note]]:
    """(the tensors with rows in the order of the whole, what the run says of its adapter, notes). Beside its base an
    adapter says nothing of the run: None. args: the job's arguments, {} for none. alpha: what the user states."""
    own = {key: tensor for key, tensor in tensors.items() if _OF_ADAPTER.fullmatch(key.name)}
    if not own:
        return tensors, None, []

    document = run_config(tree, folder)
    hints = hints_of(document) if document or not args else hints_of_arguments(args)
    alone = not any(key.state == MODEL for key in tensors.keys() - own.keys())
    ranks = hints.tensor_ranks
    unknown = False
    out = dict(tensors)
    gated = is_gated(hints, {key.name: tensor.shape for key, tensor in own.items()})
    gated = gated is not False if alone else gated is True  # as the writer takes a whole model that does not say it

    for key, tensor in own.items():
        if tensor.shape:
            boxes = len({chunk.box.offset[0] for chunk in tensor.chunks})
            count = ranks or (boxes // 2 if _HALVED.fullmatch(key.name) else boxes)
            rows = stretches(key.name, tensor.shape[0], count, gated=gated)
            unknown |= bool(rows) and ranks is None
            out[key] = _reorder_rows(tensor, rows) if rows else tensor

    line = "rows of fused projections are stored as the tensor ranks had them; their boxes show how many"
    notes = [Note("N-adapter-order", line, folder)] if unknown else []
    if not alone:
        return out, None, notes

    shapes = {key.name: tensor.shape for key, tensor in tensors.items() if key.state == MODEL}
    said = bool(hints.peft)
    hints = with_alpha(hints, shapes, alpha, tree.display())
    if not hints.peft:
        line = f"an adapter, and nothing says its scaling: neither {RUN_CONFIG} next to it nor a job's arguments"
    else:
        what = {"": "an adapter of ms-swift", "LoRA": "a LoRA of Megatron-Bridge"}
        kind = what.get(hints.kind, f"a {hints.kind} of Megatron-Bridge")
        if not said:
            origin = "--lora-alpha"
        else:
            origin = RUN_CONFIG if document else "the job's arguments"
        line = f"{kind}: rank {hints.peft.get('dim')}, alpha {hints.peft.get('alpha')} by {origin}"

    return out, hints, [Note("N-adapter", line, folder + RUN_CONFIG), *notes]


def hints_of_arguments(args: Mapping[str, Any]) -> LoraHints:
    """What ms-swift's arguments say of the adapter (`lora_rank`, `lora_alpha`, ...). Its base is `model`."""
    words = {"lora_rank": "dim", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "use_rslora"}
    peft = {word: args[own] for own, word in words.items() if args.get(own) is not None}
    plain = {key: value for key, value in args.items() if isinstance(value, int | float | str | bool)}
    base = args.get("model")
    return LoraHints(peft if "dim" in peft else {}, plain, base if isinstance(base, str) else "")


def faults_of_ranks(parts: Iterable[tuple[str, str]], hints: LoraHints | None) -> tuple[int, list[str]]:
    """(the tensor ranks, why what they left is no adapter of whole weights). parts: (module, kind) of each tensor."""
    ranks = (hints.tensor_ranks if hints is not None else None) or 1
    if ranks == 1:
        return ranks, []

    faults = []
    for module, kind in parts:
        cut = rule_of(f"{module}.weight", 2, gated=False, down_shared=False).dim
        if kind == "magnitude" and cut == 1:
            faults.append(f"{module}: its magnitudes were trained against the norm of a share of each row")
        elif kind == "b" and module.endswith(".in_proj"):
            faults.append(f"{module}: the rows of its B are stored rank by rank, in sections of each")
    return ranks, faults


def is_gated(hints: LoraHints, shapes: Mapping[str, tuple[int, ...]]) -> bool | None:
    """Does fc1 hold gate and up: by what the run says, else by the adapters of fc1 and fc2; None where neither does."""
    said = hints.arguments.get("swiglu")
    if isinstance(said, bool):
        return said
    for name, shape in shapes.items():
        other = shapes.get(name.replace(".linear_fc1.lora_B.", ".linear_fc2.lora_A."), ())
        if ".linear_fc1.lora_B." in name and len(shape) == len(other) == 2:
            return shape[0] == 2 * other[1]
    return None


def _reorder_rows(tensor: LogicalTensor, rows: Iterable[Stretch]) -> LogicalTensor:
    """The tensor with its rows in order."""
    chunks = []
    rest = tensor.shape[1:]
    for each in rows:
        stored = Box((each.here, *(0,) * len(rest)), (each.rows, *rest))
        for chunk in tensor.chunks:
            shared = chunk.box & stored
            if shared is None:
                continue
            pairs = zip(shared.offset, chunk.box.offset, chunk.within.offset, strict=True)
            within = Box(tuple(own - box + start for own, box, start in pairs), shared.shape)
            box = Box((shared.offset[0] - each.here + each.there, *shared.offset[1:]), shared.shape)
            chunks.append(Chunk(box, chunk.array, within, chunk.replica))
    return tensor._replace(chunks=tuple(chunks))


def run_text(hints: LoraHints, degrees: Mapping[str, int], gated: bool | None) -> bytes:
    """`run_config.yaml` of an adapter: what says its scaling, and the ranks on which the order of its rows depends.
    JSON, which is YAML."""
    ranks = {name: degrees[dim] for name, dim in _DEGREES.items() if dim in degrees}
    model = {**hints.model, **ranks, **({} if gated is None else {"gated_linear_unit": gated})}
    peft = {key: value for key, value in hints.peft.items() if key not in _MADE}
    sections = (peft, model, {"pretrained_checkpoint": hints.base or None})
    said = dict(zip(_SECTIONS, sections, strict=True))
    return (json.dumps(said, indent=2) + "\n").encode()
