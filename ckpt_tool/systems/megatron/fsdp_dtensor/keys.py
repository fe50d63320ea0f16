"""The keys of a Megatron-FSDP checkpoint and the logical names of its tensors, both ways.

    model.module.decoder.layers.1.mlp.experts.linear_fc1.weight3_w
         wrappers -^^^^^^                                      ^^- the gate's half
         -> decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight, part `w`
    optimizer.state.module.module.module.mtp.layers.0.mtp_model_layer.input_layernorm.weight.exp_avg
         -> mtp.layers.0.transformer_layer.input_layernorm.weight [exp_avg]

Sources: `systems.megatron.fsdp_dtensor.format`; names as `megatron.stored_names` and `megatron.parts` have them. Cost:
some us a key. What it does not do: shapes, files."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ckpt_tool.core.hints import Hint
from ckpt_tool.core.tensor import MODEL, TensorKey
from ckpt_tool.errors import InputError
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.parts import apart, of_part

FUSED = "E2007"
STATES = "optimizer.state."
_MODEL_KEY = re.compile(r"model\d{0,4}\.((?:module\.)*)(.+)", re.DOTALL)
_STATE_KEY = re.compile(rf"{re.escape(STATES)}((?:module\.)*)(.+)\.([^.]+)", re.DOTALL)
_WRAPPERS = re.compile(r"(?:module\.)*")
WRAPPER = "module."
VOCAB_ROWS = "vocab_rows"  # under a key of ours: rows of the vocabulary that are the model's, the others are padding
_MLA = "linear_qkv_down_proj."


class FsdpKey(NamedTuple):
    """A tensor's key, parsed."""

    key: TensorKey
    wrappers: str  # the prefix: `module.` for each wrapper
    local: str  # the module's name of the whole tensor
    part: str  # of `megatron.parts`, "" for a whole tensor


@dataclass(frozen=True, slots=True)
class FsdpHints(Hint):
    """How the source spells its keys."""

    KEY: ClassVar[str] = "megatron_fsdp"
    model: str  # the wrappers' prefix in the model's keys
    optimizer: str  # the wrappers' prefix in the optimizer's keys
    te: bool  # norms are fused into the linears that follow
    container: str | None  # of experts
    mtp_inner: str | None  # what an MTP layer calls its inner one
    halves: bool  # a gated fc1 is stored in halves
    sections: bool  # projections of recurrent modules are stored in sections
    convolution: str | None  # the separator in Mamba's `conv1d_weight`
    # parameters in another group than their name and shape say (`megatron.groups`) -> its number
    groups: Mapping[str, int]


def parse(fqn: str) -> FsdpKey | None:
    """Return the parsed key of a tensor of the model or the optimizer, None for any other. Raises InputError E2007."""
    found = _MODEL_KEY.fullmatch(fqn)
    if found is not None:
        return _parse_local(found[2], MODEL, found[1])
    found = _STATE_KEY.fullmatch(fqn)
    return _parse_local(found[2], found[3], found[1]) if found is not None else None


def _parse_local(local: str, state: str, wrappers: str) -> FsdpKey:
    whole, part = apart(local)
    return FsdpKey(TensorKey(logical(whole), state), wrappers, whole, part)


def unwrapped(name: str) -> str:
    """Return a parameter's name without the wrappers' prefix."""
    return name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # matches nothing too


def logical(local: str) -> str:
    """Return the logical name of a module's tensor `local`. Raises InputError E2007 if it holds several logical
    tensors."""
    if _MLA in local or names.grouped_of(local) is not None:
        what = "MLA's down projections of queries and of keys and values" if _MLA in local else "all experts of a layer"
        raise InputError(
            f"{local} holds {what} in one tensor, cut as one: Megatron-FSDP stores them apart",
            code=FUSED,
            key=local,
            hint="save it again with a Megatron-LM that does, or without the fusion (--mla-down-proj-fusion, "
            "--moe-use-legacy-grouped-gemm)",
        )
    expert = names.expert_of(local)
    return names.canonical(expert.logical() if expert else local)


def spelled(name: str, hints: FsdpHints, every: Container[str]) -> str:
    """Return the module's name of a logical tensor: the inverse of `logical`. every: all logical names."""
    expert = names.expert_of(name)
    if expert is not None:
        return names.in_container(expert, hints.container or names.SEQUENTIAL)
    name = names.fused_norm(name, every) if hints.te else name
    return names.convolution(names.mtp_inner(name, hints.mtp_inner or MTP_INNER), hints.convolution or "_")


MTP_INNER = "mtp_model_layer"  # of core 0.19, whose loader silently skips parameters that it does not find


def model_key(local: str, hints: FsdpHints, part: str = "") -> str:
    """Return the key of a model's tensor, or of its part `part`."""
    return f"model.{hints.model}{of_part(local, part) if part else local}"


def state_key(local: str, state: str, hints: FsdpHints, part: str = "") -> str:
    """Return the key of an optimizer's state of a tensor, or of its part `part`."""
    return f"{STATES}{hints.optimizer}{of_part(local, part) if part else local}.{state}"
