"""Adapters of Megatron's models: the settings in the run's config, and tensors whose rows are stored out of order.

A checkpoint of a LoRA run of Megatron-Bridge is a torch_dist folder whose model section has only the adapter
(`apply_peft_adapter_filter_to_state_dict`), with a `run_config.yaml` next to it:

    peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8, alpha: 16, ...}    LoRA, VLMLoRA, CanonicalLoRA, DoRA
    model: {num_layers: 2, hidden_size: 16, ...}                               the base, in the provider's words
    checkpoint: {pretrained_checkpoint: ...}                                   the path of the base

    M.adapter.linear_in.weight (r, in), M.adapter.linear_out.weight (out, r), M.adapter.weight_magnitude (out,)
    M.adapter.adapter_q.linear_in.weight, ...                                  CanonicalLoRA: q, k, v, gate, up

The scaling is alpha / r, where r is the rank of that tensor (`normalize_moe_lora`: experts have dim / topk). Two kinds
of tensors are stored in an order that depends on the tensor ranks of the job that saved them:

    canonical gate and up, B: each rank's rows are taken for gate and up and cut in two (`ParallelLinearAdapter.
        sharded_state_dict`, `"linear_fc1" in self.base_linear_name`): all first halves, then all second halves
    magnitudes of a gated fc1 (`ParallelLinearDoRAAdapter.sharded_state_dict`), and ms-swift's B of one
        (`LoraParallelLinear.sharded_state_dict` has the factory for the base alone): each rank's [gate; up] one below
        the other

`stretches` is the map, `read_adapter` returns the rows in the order of the whole tensor. Such tensors can't be read
without the number of ranks: `run_config.yaml` states it, else the stored boxes show it. Source: megatron-bridge 0.6.2
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
_MADE = ("canonical_mapping", "params_to_save")  # sets that the bridge builds itself; left out when writing
# Tensors that are stored rank by rank, [gate; up] of each rank.
_STRIPED = re.compile(r"(?:.+\.)?linear_fc1\.(?:adapter\.weight_magnitude|lora_B\.[^.]+\.weight)")
# Tensors that are stored as all first halves of the ranks' rows, then all second halves.
_HALVED = re.compile(r".+\.linear_fc1\.adapter\.adapter_(?:gate|up)\.linear_out\.weight")


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether every name belongs to an adapter, so that the checkpoint has no base weights."""
    names = list(names)
    return bool(names) and all(_OF_ADAPTER.fullmatch(name) for name in names)


_SCALING = "is {}, and it says what the adapter's scaling is"
_AGAIN = "get the file again from where the job wrote it"


def run_config(
    tree: Tree, folder: str, *, code: str = UNREADABLE, fault: str = _SCALING, hint: str = _AGAIN
) -> Mapping[str, Any]:
    """Return the document in `folder`'s `run_config.yaml`, {} if there is no such file.

    Args:
        tree: the checkpoint.
        folder: where the file is looked for.
        code: the error code if the file can't be parsed.
        fault: the message for that case, with `{}` for what the parser met.
        hint: the hint for that case.

    Raises:
        InputError: `code`, the file is not plain YAML.
    """
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
    """Return the settings of the adapter and of its base in a parsed `run_config.yaml`."""
    peft, model, checkpoint = (_section(document, key) for key in _SECTIONS)
    plain = {key: value for key, value in model.items() if isinstance(value, int | float | str | bool | list)}
    stated = (model.get("hf_model_id"), checkpoint.get("pretrained_checkpoint"))
    return LoraHints(peft, plain, next((each for each in stated if isinstance(each, str) and each), ""))


def degrees_of_run(hints: LoraHints) -> dict[str, int]:
    """Return the degrees of the job that saved the adapter, {} if its config does not state them."""
    degrees = facts_of(hints.arguments).degrees if hints.model else {}
    # Expert ranks are carved out of the data ranks, so there are at least as many data ranks.
    return {**degrees, "dp": max(degrees["dp"], degrees["ep"])} if degrees else {}


class Stretch(NamedTuple):
    """A run of consecutive rows: rows `there`.. of the whole tensor are rows `here`.. of the stored one; `rank` is the
    tensor rank that has them."""

    there: int
    here: int
    rows: int
    rank: int


def stretches(name: str, rows: int, ranks: int, *, gated: bool) -> list[Stretch]:
    """Return where each run of rows of an adapter's tensor is stored, [] if the rows are stored in order.

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
    """Return the hints with the user's alpha (`--lora-alpha`; None: not given).

    A run without a config also gets the adapter's class, from the tensors' names, and its rank, from their shapes.

    Args:
        hints: what the run's config states.
        shapes: of the adapter's tensors, by name.
        alpha: the user's alpha.
        path: of the checkpoint, for the message.

    Raises:
        UsageError: E2791, the run's config states another alpha.
    """
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
    # Only DoRA has magnitudes; only CanonicalLoRA has an adapter for each of q, k, v, gate and up.
    magnitudes = any(name.endswith("weight_magnitude") for name in shapes)
    apart = any(".adapter.adapter_" in name for name in shapes)
    if magnitudes:
        kind = "dora.DoRA"
    else:
        kind = "canonical_lora.CanonicalLoRA" if apart else "lora.LoRA"
    # Experts may have a smaller rank (`normalize_moe_lora`), so the most frequent rank is the run's.
    said = {"dim": max(set(ranks), key=ranks.count), "alpha": int(alpha) if alpha == int(alpha) else alpha}
    return replace(hints, peft={"_target_": f"megatron.bridge.peft.{kind}", **said, "dropout": 0.0})


def read_adapter(
    tree: Tree,
    folder: str,
    tensors: Mapping[TensorKey, LogicalTensor],
    args: Mapping[str, Any],
    alpha: float | None = None,
) -> tuple[Mapping[TensorKey, LogicalTensor], LoraHints | None, list[Note]]:
    """Return the tensors with their rows in order, the hints of the run, and notes.

    The hints are None if the checkpoint has base weights too: then it is not a checkpoint of an adapter.

    Args:
        tree: the checkpoint.
        folder: of its `run_config.yaml`.
        tensors: all tensors of the checkpoint.
        args: the job's arguments, {} for none.
        alpha: the user's alpha (`--lora-alpha`), None if not given.
    """
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
    # Unknown counts as gated for an adapter, and as not gated next to a base: the writer assumes the same.
    gated = gated is not False if alone else gated is True

    for key, tensor in own.items():
        if tensor.shape:
            boxes = len({chunk.box.offset[0] for chunk in tensor.chunks})
            # Each rank stored one box, or two where its rows were cut in halves.
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
    """Return the adapter's settings in ms-swift's arguments (`lora_rank`, `lora_alpha`, ...); `model` is the base."""
    words = {"lora_rank": "dim", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "use_rslora"}
    peft = {word: args[own] for own, word in words.items() if args.get(own) is not None}
    plain = {key: value for key, value in args.items() if isinstance(value, int | float | str | bool)}
    base = args.get("model")
    return LoraHints(peft if "dim" in peft else {}, plain, base if isinstance(base, str) else "")


def faults_of_ranks(parts: Iterable[tuple[str, str]], hints: LoraHints | None) -> tuple[int, list[str]]:
    """Return the number of tensor ranks, and the reasons why their tensors don't form an adapter of the whole weights.

    Args:
        parts: (module, kind) of each tensor; the kind is the part of the adapter, such as "b" or "magnitude".
        hints: of the run, None if there are none.
    """
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
    """Return whether fc1 holds gate and up, None if unknown: from the run's config, else from the adapters' shapes."""
    said = hints.arguments.get("swiglu")
    if isinstance(said, bool):
        return said
    for name, shape in shapes.items():
        other = shapes.get(name.replace(".linear_fc1.lora_B.", ".linear_fc2.lora_A."), ())
        if ".linear_fc1.lora_B." in name and len(shape) == len(other) == 2:
            return shape[0] == 2 * other[1]
    return None


def _reorder_rows(tensor: LogicalTensor, rows: Iterable[Stretch]) -> LogicalTensor:
    """Return the tensor with its rows in order: each chunk is cut at the borders of the runs. No data is read."""
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
    """Return the `run_config.yaml` of an adapter, as JSON, which is YAML.

    It states the scaling, and the number of ranks, on which the order of the stored rows depends.
    """
    ranks = {name: degrees[dim] for name, dim in _DEGREES.items() if dim in degrees}
    model = {**hints.model, **ranks, **({} if gated is None else {"gated_linear_unit": gated})}
    peft = {key: value for key, value in hints.peft.items() if key not in _MADE}
    sections = (peft, model, {"pretrained_checkpoint": hints.base or None})
    said = dict(zip(_SECTIONS, sections, strict=True))
    return (json.dumps(said, indent=2) + "\n").encode()
