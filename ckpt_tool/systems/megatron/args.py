"""What a conversion needs of Megatron's `args`: the degrees, the model's sizes, the optimizer's kind. Read as data.

The one idea: `args` is an `argparse.Namespace` of some 650 attributes, an `Opaque` here. `facts_of` takes the few that
decide how tensors are cut and ordered, each checked for its type, and `updated` returns a copy for other degrees; all
other attributes are copied unchanged.

    facts_of(Opaque("argparse.Namespace", (), {"tensor_model_parallel_size": 2, "swiglu": True})).tp      # 2

Defaults are Megatron's own where an attribute is absent (old versions lack many): degrees 1, num_query_groups = heads,
expert_tensor_parallel_size = tensor_model_parallel_size.

Sources (NVIDIA/Megatron-LM): 0.16.1 `training/arguments.py` (names, defaults, `validate_args`),
`training/checkpointing.py` (`generate_state_dict`, `load_args_from_checkpoint`: which of them a later run takes over).

Cost: constant. What it does not do: judge whether the model can take a degree (`megatron.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.systems.megatron.options import SPECS
from ckpt_tool.systems.megatron.stages import Stages, args_of
from ckpt_tool.systems.megatron.stored_names import GROUPED, SEQUENTIAL, TE_GROUPED

NAMESPACE = "argparse.Namespace"
DIMS = ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")
LOCAL, TE = SPECS
_OWN = frozenset(("rank", "local_rank", "node_rank"))  # these differ from process to process
# Arguments that decide sizes, splits or the step, though `facts_of` does not read them.
_SIZES = (
    "hidden_size ffn_hidden_size moe_ffn_hidden_size moe_shared_expert_intermediate_size kv_channels qk_head_dim "
    "v_head_dim padded_vocab_size world_size use_tp_pp_dp_mapping params_dtype pipeline_model_parallel_layout "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split moe_layer_freq consumed_train_samples consumed_valid_samples curr_iteration"
).split()
_LARGEST = 1 << 20  # the largest degree, head count or expert count; more means a damaged file


class MegatronFacts(NamedTuple):
    """Facts about the model and the job. None: the arguments do not state it."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1  # data ranks without context-parallel ones
    cp: int = 1
    layers: int | None = None
    mtp: int = 0
    experts: int | None = None
    heads: int | None = None
    groups: int | None = None
    groups_whole: bool = False  # no query group is shared by tensor ranks
    gated: bool | None = None  # fc1 holds gate and up
    tied: bool = False
    te: bool = False  # norms are fused into Transformer Engine's linears
    container: str = SEQUENTIAL  # of experts
    mla: bool = False
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    distributed: bool | None = None
    layer_wise: bool = False  # matrices have an optimizer that keeps them whole, the rest a distributed one
    grad_fp32: bool = True  # gradients are reduced in fp32
    overlap: bool = False
    bucket_size: int | None = None  # elements, None for one bucket a buffer
    busbw: bool = False
    qk_decay: bool = False
    decoupled_lr: float | None = None
    vocab: int | None = None  # the tokenizer's size, without padding
    vocab_multiple: int | None = None  # what a rank's rows are padded to
    mamba: tuple[int, int, int] | None = None  # rows of a Mamba layer's sections: (inner, group, heads)
    mamba_groups: int | None = None  # groups of a Mamba layer; tensor ranks must divide them as well as the heads
    delta: tuple[int, int, int] | None = None  # rows of a delta net's sections: (keys, values, value heads)
    delta_heads: int | None = None  # key heads; tensor ranks must divide them as well as the value heads
    stated: bool = False  # the checkpoint has arguments

    @property
    def degrees(self) -> dict[str, int]:
        """Mesh dim -> size, dp: data ranks without cp."""
        return {dim: getattr(self, dim) for dim in DIMS}


def arguments(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of `args` in a checkpoint's extras, {} if there are none."""
    args = extras.get("args")
    if not (isinstance(args, Opaque) and args.name == NAMESPACE and isinstance(args.state, dict)):
        return {}
    parsed = args.state.get("pipeline_model_parallel_layout")
    if isinstance(parsed, Opaque):  # a PipelineParallelLayerLayout: the text (or lists) that it was made from
        text = parsed.state.get("input_data") if isinstance(parsed.state, dict) else None
        return args.state | {"pipeline_model_parallel_layout": text}
    return args.state


def with_spec(args: Mapping[str, Any], spec: object) -> Mapping[str, Any]:
    """Return `args` for the requested layer spec, one of `SPECS`; None keeps the stated one.

    Transformer Engine's spec computes all experts in one grouped product (Megatron's default for training), the local
    one computes them one after the other, so the arguments that choose the experts' container change too.
    """
    if spec not in SPECS or not args:
        return args
    grouped = {"moe_grouped_gemm": spec == TE, "moe_use_legacy_grouped_gemm": False} if args.get("num_experts") else {}
    return {**args, "transformer_impl": "transformer_engine" if spec == TE else "local", **grouped}


def facts_of(args: Mapping[str, Any], spec: object = None) -> MegatronFacts:
    """Return the facts that `args` (attributes by name) state.

    Args:
        args: the attributes; {} gives the defaults.
        spec: the requested layer spec, one of `SPECS`; counts only if there are no arguments.
    """
    if spec == TE and not args:
        return MegatronFacts(te=True, container=TE_GROUPED)

    def whole(name: str, least: int = 1) -> int | None:
        # `type() is int` because True is an int as well.
        value = args.get(name)
        return value if type(value) is int and least <= value < _LARGEST else None

    def number(name: str, least: int = 1) -> int | None:
        value = args.get(name)
        return value if type(value) is int and value >= least else None

    tp = whole("tensor_model_parallel_size") or 1
    heads = whole("num_attention_heads")
    grouped = bool(args.get("group_query_attention")) or args.get("group_query_attention") is None
    te = args.get("transformer_impl") == "transformer_engine"
    overlap = bool(args.get("overlap_grad_reduce"))
    lr = args.get("decoupled_lr")
    return MegatronFacts(
        tp=tp,
        pp=whole("pipeline_model_parallel_size") or 1,
        vpp=whole("virtual_pipeline_model_parallel_size") or 1,
        ep=whole("expert_model_parallel_size") or 1,
        etp=whole("expert_tensor_parallel_size") or tp,
        dp=whole("data_parallel_size") or 1,
        cp=whole("context_parallel_size") or 1,
        layers=whole("num_layers", 0) or whole("encoder_num_layers"),
        mtp=whole("mtp_num_layers") or 0,
        experts=whole("num_experts"),
        heads=heads,
        groups=(whole("num_query_groups") if grouped else heads) or heads,
        groups_whole=whole("swa_num_query_groups") is not None,
        gated=(bool(args.get("swiglu")) or bool(args.get("quick_geglu"))) if "swiglu" in args else None,
        tied=args.get("untie_embeddings_and_output_weights") is False,
        te=te,
        container=_container(args, te=te),
        mla=bool(args.get("multi_latent_attention")),
        q_rank=whole("q_lora_rank"),
        kv_rank=whole("kv_lora_rank"),
        rope_dim=whole("qk_pos_emb_head_dim", 0),
        distributed=bool(args["use_distributed_optimizer"]) if "use_distributed_optimizer" in args else None,
        layer_wise=bool(args.get("use_layer_wise_distributed_optimizer"))
        and args.get("use_layer_wise_param_layout") is not False,
        grad_fp32=bool(args.get("accumulate_allreduce_grads_in_fp32", True)),
        overlap=overlap,
        bucket_size=number("ddp_bucket_size"),
        busbw=bool(args.get("ddp_pad_buckets_for_high_nccl_busbw")),
        qk_decay=bool(args.get("apply_wd_to_qk_layernorm")),
        decoupled_lr=lr if isinstance(lr, float) else None,
        vocab=number("vocab_size"),
        vocab_multiple=whole("make_vocab_size_divisible_by"),
        mamba=_mamba(whole),
        mamba_groups=whole("mamba_num_groups"),
        delta=_delta(whole),
        delta_heads=whole("linear_num_key_heads"),
        stated=bool(args),
    )


def _mamba(whole: Callable[[str], int | None]) -> tuple[int, int, int] | None:
    heads = whole("mamba_num_heads")
    wide = whole("mamba_head_dim")
    groups = whole("mamba_num_groups")
    state = whole("mamba_state_dim")
    hidden = whole("hidden_size")
    if heads is None and wide and hidden and 2 * hidden % wide == 0:
        heads = 2 * hidden // wide  # core's default: `expand` 2
    return (heads * wide, groups * state, heads) if heads and wide and groups and state else None


def _delta(whole: Callable[[str], int | None]) -> tuple[int, int, int] | None:
    keys = whole("linear_num_key_heads")
    key = whole("linear_key_head_dim")
    values = whole("linear_num_value_heads")
    value = whole("linear_value_head_dim")
    return (keys * key, values * value, values) if keys and key and values and value else None


def _container(args: Mapping[str, Any], *, te: bool) -> str:
    if not args.get("moe_grouped_gemm"):
        return SEQUENTIAL
    return GROUPED if not te or args.get("moe_use_legacy_grouped_gemm") else TE_GROUPED


def updated(args: Mapping[str, Any], degrees: Mapping[str, int], stages: Stages, rank: int) -> dict[str, Any]:
    """Return a copy of `args` for other degrees and rank number `rank`.

    Attributes that the source lacks are added only if Megatron needs them to load the new checkpoint: versions of
    Megatron differ in the arguments that they know.
    """
    tp = degrees["tp"]
    pp = degrees["pp"]
    vpp = degrees["vpp"]
    world = tp * pp * degrees["dp"] * degrees["cp"]
    chunk = max(stages.counts, default=0)

    new: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": degrees["cp"],
        "expert_model_parallel_size": degrees["ep"],
        "expert_tensor_parallel_size": degrees["etp"],
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "data_parallel_size": degrees["dp"],
        "world_size": world,
    }

    beside: dict[str, Any] = {
        "transformer_pipeline_model_parallel_size": pp,
        "num_layers_per_virtual_pipeline_stage": chunk if vpp > 1 else None,
        "num_virtual_stages_per_pipeline_rank": None,
        "rank": rank,
        **args_of(stages, args),
    }
    out = {**args, **new}
    for name, value in beside.items():
        if name in args or value not in (None, False):
            out[name] = value

    # Without this argument Megatron uses the dense tensor degree, so it is added only if the two differ.
    if "expert_tensor_parallel_size" not in args and degrees["etp"] == tp:
        del out["expert_tensor_parallel_size"]
    if vpp > 1 and pp > 1 and args.get("overlap_p2p_comm") is False and "overlap_p2p_comm" in args:
        out["overlap_p2p_comm"] = args["overlap_p2p_comm"]
    return out


class _Watched(dict[str, Any]):
    """Arguments that record which names were looked up, so that `differences` knows what `facts_of` reads."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args)
        self.used: dict[str, None] = {}

    def __contains__(self, key: object) -> bool:
        self.used[str(key)] = None
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if key in self else default


def differences(args: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the arguments in which two ranks differ: first those that matter, then all others.

    Those that matter decide the ranks' tensors or the training step. Megatron gives every rank the same arguments,
    except for the rank's own number, which is ignored here.
    """
    watched = _Watched(args)
    facts_of(watched)
    decide = {*watched.used, *_SIZES}
    differ = [key for key in dict.fromkeys((*args, *other)) if key not in _OWN and args.get(key) != other.get(key)]
    return [key for key in differ if key in decide], [key for key in differ if key not in decide]


def torch_dtype(value: Any) -> str | None:
    """Return `bfloat16` for a `torch.bfloat16` symbol, None for anything else."""
    return value.name.removeprefix("torch.") if isinstance(value, Symbol) and value.name.startswith("torch.") else None
