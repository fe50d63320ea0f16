"""Paddle's names of a parameter: its structured name, its static name, the keys of its optimizer states, and their
order.

A structured name (`model.layers.0.self_attn.q_proj.weight`) is that of one card, on every rank. A static name
(`linear_3.w_0`) is the layer class and a counter of it in the process: it changes with the stage and the code, and only
a table of the same rank (the model file's, or model_meta.json's) says whose it is. It may be any text (`moe_gate_0`),
so the longest one of the table that begins an optimizer's key is taken:

    table {"a.weight": "linear_1.w_0", "b.weight": "linear_11.w_0"}
    linear_11.w_0_moment1_0              b.weight [exp_avg]
    linear_1.w_0_fp32_master_0_beta1_pow_acc_0      a.weight [beta1_pow_acc]
    master_weights / linear_1.w_0        a.weight [master]

Two structured names may share one static name (tied embeddings): what is stored once is shown once, under the
embedding's name (the first of the table, where Paddle wrote it). Unified and flex checkpoints have keys of structured
names, with the same accumulators: `w/moment1_0`, `w.moment1_0`.

New static names are derived from the order in which parameters are registered. The source's tables show that order; for
names from another system it follows from the modules, which all of PaddleFormers' decoders declare in the same order:

    embed_tokens; layers in turn: self_attn (qkv_proj | q_proj k_proj v_proj, o_proj, q_norm, k_norm),
    mlp (gate router, experts in turn, shared experts, moe_statics | up_gate_proj | gate_proj up_proj, down_proj),
    input_layernorm, post_attention_layernorm; norm; multi-token prediction; lm_head

    model.embed_tokens.weight                   embedding_0.w_0         VocabParallelEmbedding too
    ...layers.0.self_attn.q_proj.weight, .bias  linear_0.w_0, .b_0      column and row parallel layers too
    ...layers.0.input_layernorm.weight          create_parameter_0.w_0  RMSNorm; LayerNorm: layer_norm_0.w_0, .b_0
    ...layers.1.mlp.gate.weight  moe_gate_0              ... moe_statics.e_score_correction_bias: mm_layer_1_corr_bias_0
    lm_head.weight                              lm_head_0.w_0           in a pipeline lm_head_pipe_0.w_0

Names that a run of other code would give may differ: a sharding_io loader maps them by model_meta.json, the plain one
takes them as they are. Sharding deals parameters in this order (`paddle.job`); a loader that reshards accepts any.

Sources: paddlepaddle 3.3.1 `python/paddle/optimizer/optimizer.py` (`_add_accumulator`, `_create_master_weight`,
`state_dict`), PaddleFormers 1.2.0 `trainer/utils/reshard/common.py` (`convert_opt_name_to_tname`), `nn/norm.py`,
`nn/lm_head.py`, `nn/moe/*.py`; name tables of runs (Llama, ERNIE-4.5, ERNIE-4.5-MoE).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.core.tensor import EMA, MASTER, MODEL, TensorKey
from ckpt_tool.errors import UsageError

# -- accumulators ------------------------------------------------------------------------------------------------------

MASTER_WEIGHTS = "master_weights"
SCHEDULER = "LR_Scheduler"
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight")
HEAD = "lm_head.weight"
INFIX = "_fp32_master_0"  # in the keys of a parameter's states, if it has a master
STATES = {
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moment2_max": "max_exp_avg_sq",
    "velocity": "momentum_buffer",
    "beta1_pow_acc": "beta1_pow_acc",
    "beta2_pow_acc": "beta2_pow_acc",
}
ACCUMULATORS = {state: name for name, state in STATES.items()}
SCALARS = frozenset(("beta1_pow_acc", "beta2_pow_acc"))
_COUNTER = re.compile(r"_\d+$")
_GUESS = re.compile(
    rf"(.+?)(?:{INFIX})?_({'|'.join(STATES)}|moment|inf_norm|_avg_squared_grad|_avg_squared_update|mean_square|"
    r"mean_grad|momentum)_0"
)


class Owner(NamedTuple):
    """The parameter and state that a tensor of the optimizer belongs to."""

    static: str  # static name of the parameter
    state: str  # our name of the state


class NameTable:
    """One rank's map from static names to structured names: the first that has it, of a tied pair the embedding's."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.structured: dict[str, str] = {}
        for name, static in names.items():
            if self.structured.setdefault(static, name) != name and name.endswith(EMBEDDINGS):
                self.structured[static] = name

    def owner(self, key: str) -> Owner | None:
        """The owner of accumulator `key`, None if it begins with no static name of the table."""
        at = len(key)
        # Cut at each `_` from the end, so that the longest static name of the table wins.
        while (at := key.rfind("_", 0, at)) > 0:
            if key[:at] in self.structured:
                return Owner(key[:at], state_of(key[at + 1 :]))
        return None

    def guess(self, key: str) -> Owner | None:
        """The owner of accumulator `key` without a table, by the known names of accumulators; None if none fits."""
        found = _GUESS.fullmatch(key)
        return Owner(found[1], state_of(f"{found[2]}_0")) if found else None


def state_of(accumulator: str) -> str:
    """The state of an accumulator: `moment1_0` is exp_avg; unknown ones keep their name without the counter."""
    bare = _COUNTER.sub("", accumulator.removeprefix(f"{INFIX[1:]}_"))
    return STATES.get(bare, bare)


def static_key(static: str, state: str, *, mastered: bool = True) -> str:
    """Paddle's key of a parameter's state. mastered: the parameter has a master weight."""
    base = static + INFIX if mastered else static
    return base if state in (MODEL, MASTER, EMA) else f"{base}_{ACCUMULATORS.get(state, state)}_0"


# -- keys by structured names (unified, flex) --------------------------------------------------------------------------

AMBIGUOUS = "E1271"
KINDS = {f"{name}_0": state for name, state in STATES.items()}
_KIND_OF = {state: kind for kind, state in KINDS.items()}


def kind_of(key: TensorKey, own: Mapping[str, str], unfit: str, taken: Collection[str] = ()) -> str:
    """The suffix of a state's key after the parameter's name.

    Args:
        key: The tensor.
        own: State -> suffix, for states that only one format has.
        unfit: Text that no suffix may contain in this format.
        taken: Suffixes that mean something else.

    Raises:
        UsageError: E1271, a state that would be read as another; E1606, a tensor without a name, as its key would be
            the suffix alone.
    """
    if not key.name:
        raise UsageError(
            f"the state {key.state} of a tensor without a name can't be written: Paddle calls a state after "
            "its parameter",
            code="E1606",
            key=str(key),
            hint="rename the tensor in the source, leave it out with --remove-keys '', or write another format",
        )
    known = own.get(key.state) or _KIND_OF.get(key.state)
    kind = known or f"{key.state}_0"
    if not known and (kind in KINDS or unfit in kind or kind in taken):
        raise UsageError(
            f"the state {key.state} can't be written: Paddle calls {KINDS.get(kind, 'no state')} so",
            code=AMBIGUOUS,
            key=str(key),
            hint=f"add --drop {key.state}",
        )
    return kind


def without_master(tensors: Iterable[tuple[tuple[str | int, ...], tuple[int, ...]]]) -> list[str]:
    """Static names whose moments imply a master (`linear_3.w_0_fp32_master_0_moment1_0`) that the file does not hold.

    Paddle writes both or none, so the file is incomplete. tensors: (path, shape) of all tensors in the file; scalars
    are ignored, because they may be on any rank.
    """
    wanted: dict[str, None] = {}
    held = set()
    for path, shape in tensors:
        first = str(path[0])
        if first == MASTER_WEIGHTS and len(path) == 2:
            held.add(str(path[1]))
        elif shape not in ((), (1,)) and f"{INFIX}_" in first:
            wanted[first.rpartition(f"{INFIX}_")[0]] = None
    return [static for static in wanted if static not in held]


# -- the order of registration -----------------------------------------------------------------------------------------

_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.", re.ASCII)
_FIRST = ("embed_tokens", "word_embeddings", "wte", "embeddings")
_LAST = ("lm_head", "output_layer", "score", "classifier")
_WORDS = """
    embed_tokens enorm hnorm eh_proj self_attn self_attention attn attention qkv_proj q_a_proj q_a_layernorm
    q_b_proj q_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj k_proj v_proj o_proj out_proj q_norm k_norm mlp
    gate router experts shared_experts shared_expert shared_expert_gate moe_statics up_gate_proj
    gate_up_fused_proj gate_up_proj gate_proj up_proj down_proj input_layernorm post_attention_layernorm norm
    shared_head mtp_block mtp_hidden_norm mtp_emb_norm mtp_linear_proj weight bias e_score_correction_bias
    lora_A lora_B
""".split()
_PLACE = {word: number for number, word in enumerate(_WORDS)}


def registration_order(names: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """`names` in the order in which Paddle registers parameters.

    known: names in the order of the source's files. It is used if it has all of `names`, else the order of the modules.
    """
    place = {name: number for number, name in enumerate(known)}
    if not names or not all(name in place for name in names):
        return sorted(names, key=_key)
    # Other ranks list their experts later: they belong next to the first expert of the same layer.
    first: dict[str, int] = {}
    for name in names:
        front = _EXPERT.split(name, 1)[0]
        first[front] = min(first.get(front, len(place)), place[name])

    def key(name: str) -> tuple[int, int, int]:
        """Experts sort by their number, at the place of their layer's first expert."""
        found = _EXPERT.search(name)
        return (first[name[: found.start()]], int(found[1]), place[name]) if found else (place[name], 0, 0)

    return sorted(names, key=key)


def _key(name: str) -> tuple[tuple[int, int, str], ...]:
    words = name.split(".")
    if any(word in _LAST for word in words):
        group = 4
    elif any(word.startswith("mtp_") for word in words):
        group = 3
    elif "layers" in words:
        group = 1
    else:
        group = 0 if any(word in _FIRST for word in words) else 2
    return ((group, 0, ""), *(_word(word) for word in words))


def _word(word: str) -> tuple[int, int, str]:
    if word.isdecimal() and len(word) < 10:  # more digits are no number of a layer
        return 0, int(word), ""
    return 1, _PLACE.get(word, len(_WORDS)), word


# -- new static names --------------------------------------------------------------------------------------------------

_CLASSES = {
    **dict.fromkeys(("embed_tokens", "word_embeddings", "wte", "embed_positions", "position_embeddings"), "embedding"),
    **dict.fromkeys(("lm_head",), "lm_head"),
}
_NORM = re.compile(r"norm|^ln_|layernorm")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def static_names(names: Sequence[str], aliases: Mapping[str, str], *, pipeline: bool = False) -> dict[str, str]:
    """New static names of one rank's parameters: {structured name: static name}.

    Args:
        names: Structured names in the order of registration, by which the counters run.
        aliases: Tied name -> the name of the parameter whose tensor it shares.
        pipeline: The job has several stages, in which the head has another class (`lm_head_pipe`).
    """
    counters: dict[str, int] = {}
    modules: dict[str, str] = {}
    known = frozenset(name for name in names if name.endswith(".bias"))
    out: dict[str, str] = {}
    for name in names:
        if name in aliases and aliases[name] in out:
            out[name] = out[aliases[name]]
            continue
        module, _, leaf = name.rpartition(".")
        kind = _kind(module, leaf, known)
        kind = "lm_head_pipe" if pipeline and kind == "lm_head" else kind
        if kind in ("moe_gate", "corr_bias"):
            found = _LAYER.search(name)
            front = f"mm_layer_{found[1]}_" if found and kind == "corr_bias" else ""
            out[name] = f"{front}{kind}_{_next(counters, front + kind)}"
            continue
        if module not in modules or kind == "create_parameter":
            modules[module] = f"{kind}_{_next(counters, kind)}"
        out[name] = f"{modules[module]}.{'b_0' if leaf == 'bias' else 'w_0'}"
    return out


def _next(counters: dict[str, int], kind: str) -> int:
    number = counters.get(kind, 0)
    counters[kind] = number + 1
    return number


def _kind(module: str, leaf: str, biases: frozenset[str]) -> str:
    """The layer class in Paddle's spelling, by the module's name."""
    word = next((word for word in reversed(module.split(".")) if not word.isdecimal()), "")
    if leaf == "e_score_correction_bias":
        return "corr_bias"
    if word in ("gate", "router") and leaf == "weight":
        return "moe_gate"
    if leaf not in ("weight", "bias"):
        return "create_parameter"
    if _NORM.search(word):
        return "layer_norm" if f"{module}.bias" in biases else "create_parameter"
    return _CLASSES.get(word, "linear")
