"""Forms of experts: which layers have them, how a router chooses, what they share.

    first_dense     first_k_dense_replace = 1, 3 layers      moe_layer_freq = [0, 1, 1]
    sparse_layers   mlp_only_layers = [0], 3 layers          moe_layer_freq = [0, 1, 1]
    interleaved     interleave_moe_layer_step = 2, 4 layers  moe_layer_freq = [0, 1, 0, 1]
    listed          mlp_layer_types = ["dense", "sparse"]    moe_layer_freq = [0, 1]
    softmax         norm_topk_prob = False                   moe_router_pre_softmax = True
    shared_experts  n_shared_experts = 2, each of 5          moe_shared_expert_intermediate_size = 10

A softmax over the chosen experts alone (`pre_softmax` off) is a softmax over all, divided by the sum of the chosen:
what `norm_topk_prob` says. Sources: Megatron-LM core 0.16.1 `core/transformer/moe/moe_utils.py`
(`topk_routing_with_score_function`, `group_limited_topk`), `core/models/gpt/gpt_layer_specs.py`; transformers 5.23
`modeling_*.py`. Cost: none. What it does not do: see `families.config.forms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.families.config.words import LAYERS, Arguments, ConfigWords, Form, Values, same

_EXPERTS = same(
    ("num_experts_per_tok", "moe_router_topk"),
    ("moe_intermediate_size", "moe_ffn_hidden_size"),
    ("router_aux_loss_coef", "moe_aux_loss_coeff"),
)


def _experts_to(model: ConfigWords, out: Values) -> None:
    out["num_experts"] = model.get("num_experts") or None
    _EXPERTS.to(model, out)


def _experts_back(args: Arguments, out: Values) -> None:
    if args.get("num_experts"):
        out[args.key("num_experts")] = args.get("num_experts")
        _EXPERTS.back(args, out)


def sparse_pattern(freq: Any, layers: int) -> list[int]:
    """1 for each layer with experts, as `get_gpt_decoder_layer_specs` reads `moe_layer_freq`."""
    if isinstance(freq, list):
        return [int(bool(is_sparse)) for is_sparse in freq]
    interval = freq if type(freq) is int and freq > 0 else 1
    return [int(i % interval == 0) for i in range(min(layers, LAYERS))]


def _sparse(out: Values, layers: list[int]) -> None:
    """Write the pattern; a model without any layer of experts has none."""
    out["moe_layer_freq"] = 1 if all(layers) else layers
    if not any(layers):
        without_experts(out)


def without_experts(out: Values) -> None:
    """Leaves out what arguments say of experts, for a model that has none."""
    for name in [name for name in out if name.startswith("moe_") or name == "num_experts"]:
        del out[name]
    out["num_experts"] = None


def _pattern(args: Arguments) -> list[int]:
    layers = args.get("num_layers") or 0
    return sparse_pattern(args.get("moe_layer_freq"), layers) if args.get("num_experts") else [0] * min(layers, LAYERS)


def _layers(model: ConfigWords) -> range:
    return range(min(model.count("num_hidden_layers") or 0, LAYERS))


def _sparse_layers_to(model: ConfigWords, out: Values) -> None:
    dense = model.get("mlp_only_layers") or []
    step = model.count("decoder_sparse_step") or 1
    _sparse(out, [int(i not in dense and (i + 1) % step == 0) for i in _layers(model)])


def _sparse_layers_back(args: Arguments, out: Values) -> None:
    layers = _pattern(args)
    step = layers.index(1) + 1 if 1 in layers else 0
    even = step > 0 and layers == [int((i + 1) % step == 0) for i in range(len(layers))]
    out["decoder_sparse_step"] = step if even else 1
    out["mlp_only_layers"] = [] if even else [i for i, is_sparse in enumerate(layers) if not is_sparse]


def _first_dense_to(model: ConfigWords, out: Values) -> None:
    dense_count = model.count("first_k_dense_replace") or 0
    kinds = model.get("mlp_layer_types")
    layers = _layers(model)
    is_listed = isinstance(kinds, list) and len(kinds) == len(layers)  # as transformers 5 saves them
    _sparse(out, [int(kind == "sparse") for kind in kinds] if is_listed else [int(i >= dense_count) for i in layers])


def _first_dense_back(args: Arguments, out: Values) -> None:
    layers = _pattern(args)
    dense_count = layers.index(1) if 1 in layers else len(layers)
    out["first_k_dense_replace"] = dense_count
    if not all(layers[dense_count:]):
        args.lost("moe_layer_freq: the class has experts from one layer on, the arguments leave some out")


def _kinds_to(model: ConfigWords, out: Values) -> None:
    """Where no other form has written which layers are sparse."""
    if "moe_layer_freq" not in out:
        _listed_to(model, out)


def _kinds_back(args: Arguments, out: Values) -> None:
    """Add the key that transformers 5 reads and that the released files do not have."""
    out["mlp_layer_types"] = ["sparse" if is_sparse else "dense" for is_sparse in _pattern(args)]


def _interval_to(model: ConfigWords, out: Values) -> None:
    start = model.count("moe_layer_start_index") or 0
    interval = model.count("moe_layer_interval") or 1
    end = model.get("moe_layer_end_index")
    layers = _layers(model)
    stop = end if type(end) is int and end >= 0 else len(layers) - 1
    _sparse(out, [int((i + 1) % interval == 0 and start <= i <= stop) for i in layers])


def _interval_back(args: Arguments, out: Values) -> None:
    layers = _pattern(args)
    sparse_layers = [i for i, is_sparse in enumerate(layers) if is_sparse]
    interval = sparse_layers[1] - sparse_layers[0] if len(sparse_layers) > 1 else 1
    start, stop = (sparse_layers[0], sparse_layers[-1]) if sparse_layers else (len(layers), len(layers))
    out |= {"moe_layer_start_index": start, "moe_layer_end_index": stop, "moe_layer_interval": interval}
    if layers != [int((i + 1) % interval == 0 and start <= i <= stop) for i in range(len(layers))]:
        args.lost("moe_layer_freq: the class has experts at an interval, the arguments do not")


def _softmax_to(model: ConfigWords, out: Values) -> None:
    if out.get("num_experts"):
        out["moe_router_pre_softmax"] = not model.get("norm_topk_prob")


def _softmax_back(args: Arguments, out: Values) -> None:
    out["norm_topk_prob"] = not args.get("moe_router_pre_softmax")


def _listed_to(model: ConfigWords, out: Values) -> None:
    """A list of which layers are sparse, under either name; without it the class's own (`mlp_layer_types`)."""
    layers = _layers(model)
    freq = model.config.get("moe_layer_freq")
    kinds = model.config.get("mlp_layer_types")
    dense = model.facts.defaults.get("first_k_dense_replace", 0)
    if isinstance(freq, list) and len(freq) == len(layers):
        _sparse(out, [int(bool(is_sparse)) for is_sparse in freq])
    elif isinstance(kinds, list) and len(kinds) == len(layers):
        _sparse(out, [int(kind == "sparse") for kind in kinds])
    else:
        _sparse(out, [int(i >= dense) for i in layers])


def _listed_back(args: Arguments, out: Values) -> None:
    out["moe_layer_freq"] = _pattern(args)
    _kinds_back(args, out)


def _scaled_to(model: ConfigWords, out: Values) -> None:
    if out.get("num_experts"):
        scale = model.get("routed_scaling_factor")
        out["moe_router_topk_scaling_factor"] = float(scale) if scale not in (None, 1, 1.0) else None


def _scaled_back(args: Arguments, out: Values) -> None:
    if args.get("num_experts"):
        out[args.key("routed_scaling_factor")] = args.get("moe_router_topk_scaling_factor") or 1.0


def _groups_to(model: ConfigWords, out: Values) -> None:
    _set_group_routing(model, out, rated_by=2)


def _set_group_routing(model: ConfigWords, out: Values, *, rated_by: int, used: bool = True) -> None:
    """Routing that first chooses groups of experts, each rated by so many of its best. used: does the model do so?"""
    if not out.get("num_experts"):
        return
    groups, best, top = (model.count(key) or 1 for key in ("n_group", "topk_group", "num_experts_per_tok"))
    _scaled_to(model, out)
    if groups > 1 and used:
        out |= {"moe_router_num_groups": groups, "moe_router_group_topk": best}
        if top // best != rated_by:
            model.lost(
                f"n_group: Megatron rates a group by its best {top // best} experts (moe_router_topk over"
                f" moe_router_group_topk), the model by its best {'one' if rated_by == 1 else rated_by}"
            )


def _groups_back(args: Arguments, out: Values) -> None:
    out["n_group"] = args.get("moe_router_num_groups") or 1
    out["topk_group"] = args.get("moe_router_group_topk") or 1
    out["routed_scaling_factor"] = args.get("moe_router_topk_scaling_factor") or 1.0
    out["norm_topk_prob"] = True


def _limited_to(model: ConfigWords, out: Values) -> None:
    """DeepSeek-V2's: a softmax over all, groups rated by their best expert, `topk_method` says whether at all."""
    _set_group_routing(model, out, rated_by=1, used=model.get("topk_method") == "group_limited_greedy")


def _limited_back(args: Arguments, out: Values) -> None:
    out["n_group"] = args.get("moe_router_num_groups") or 1
    out["topk_group"] = args.get("moe_router_group_topk") or 1
    out["topk_method"] = "group_limited_greedy" if out["n_group"] > 1 else "greedy"
    out["routed_scaling_factor"] = args.get("moe_router_topk_scaling_factor") or 1.0
    out["norm_topk_prob"] = False


def _shared_to(model: ConfigWords, out: Values) -> None:
    count = model.count("n_shared_experts")
    width = model.count("moe_intermediate_size")
    if out.get("num_experts") and count and width:
        out["moe_shared_expert_intermediate_size"] = count * width


def _shared_back(args: Arguments, out: Values) -> None:
    total_size = args.get("moe_shared_expert_intermediate_size")
    width = args.get("moe_ffn_hidden_size")
    if not args.get("num_experts"):
        return
    count = (total_size or 0) // width if width else 0
    if width and count * width != (total_size or 0):
        args.lost(
            f"no class has shared experts of {total_size} next to experts of {width}: "
            f"{args.key('n_shared_experts')} is left out"
        )
    else:
        out[args.key("n_shared_experts")] = count


def _shared_expert_to(model: ConfigWords, out: Values) -> None:
    if out.get("num_experts"):
        out["moe_shared_expert_intermediate_size"] = model.get("shared_expert_intermediate_size")


def _shared_expert_back(args: Arguments, out: Values) -> None:
    if args.get("moe_shared_expert_intermediate_size"):
        out["shared_expert_intermediate_size"] = args.get("moe_shared_expert_intermediate_size")


def _one_shared_to(model: ConfigWords, out: Values) -> None:
    if out.get("num_experts") and model.count("shared_intermediate_size"):
        out["moe_shared_expert_intermediate_size"] = model.count("shared_intermediate_size")


def _one_shared_back(args: Arguments, out: Values) -> None:
    if args.get("num_experts"):
        out["shared_intermediate_size"] = args.get("moe_shared_expert_intermediate_size") or 0


def _two_pools_to(model: ConfigWords, out: Values) -> None:
    """ERNIE 4.5 VL's: experts of text and, as many, of images, each of their own width."""
    widths = model.get("moe_intermediate_size")
    if out.get("num_experts") and isinstance(widths, list) and widths:
        out |= {"moe_ffn_hidden_size": widths[0], "moe_intermediate_size": widths}
        out["moe_shared_expert_intermediate_size"] = (model.count("n_shared_experts") or 0) * widths[0] or None
        model.lost(
            "experts of images in addition to those of text: Megatron-LM has one kind; Megatron-Bridge's layer has both"
        )


def _two_pools_back(args: Arguments, out: Values) -> None:
    widths = args.get("moe_intermediate_size")
    if args.get("num_experts") and isinstance(widths, list | tuple) and widths and widths[0] > 0:
        out["moe_intermediate_size"] = list(widths)
        out[args.key("n_shared_experts")] = (args.get("moe_shared_expert_intermediate_size") or 0) // widths[0]


def _convert_mtp_to(model: ConfigWords, out: Values) -> None:
    out["mtp_num_layers"] = model.count("num_nextn_predict_layers") or None


def _convert_mtp_back(args: Arguments, out: Values) -> None:
    ahead = args.get("mtp_num_layers") or 0
    if ahead or "first_k_dense_replace" in args.facts.defaults:
        out[args.key("num_nextn_predict_layers")] = ahead


def _interleaved_to(model: ConfigWords, out: Values) -> None:
    """Llama 4's: by a list or a step; one shared expert as wide as each of the others, probabilities at the input."""
    sparse = model.get("moe_layers")
    step = model.count("interleave_moe_layer_step") or 1
    if isinstance(sparse, list):
        _sparse(out, [int(i in sparse) for i in _layers(model)])
    else:
        _sparse(out, [int((i + 1) % step == 0) for i in _layers(model)])
    if out.get("num_experts"):
        out["moe_shared_expert_intermediate_size"] = model.count("moe_intermediate_size")


def _interleaved_back(args: Arguments, out: Values) -> None:
    layers = _pattern(args)
    step = layers.index(1) + 1 if 1 in layers else 0
    if step and layers == [int((i + 1) % step == 0) for i in range(len(layers))]:
        out["interleave_moe_layer_step"] = step
    out["moe_layers"] = [i for i, is_sparse in enumerate(layers) if is_sparse]
    if args.get("moe_shared_expert_intermediate_size") != args.get("moe_ffn_hidden_size"):
        args.lost("moe_shared_expert_intermediate_size: the class's shared expert is as wide as each of the others")


def _all_sparse_to(model: ConfigWords, out: Values) -> None:
    out["moe_layer_freq"] = 1


def _nothing_back(args: Arguments, out: Values) -> None:
    """What the class always does."""


EXPERT_FORMS: Mapping[str, Form] = {
    "experts": Form(_experts_to, _experts_back),
    "all_sparse": Form(_all_sparse_to, _nothing_back),
    "sparse_layers": Form(_sparse_layers_to, _sparse_layers_back),
    "first_dense": Form(_first_dense_to, _first_dense_back),
    "mlp_kinds": Form(_kinds_to, _kinds_back),
    "interval": Form(_interval_to, _interval_back),
    "interleaved": Form(_interleaved_to, _interleaved_back),
    "listed": Form(_listed_to, _listed_back),
    "softmax": Form(_softmax_to, _softmax_back),
    "groups": Form(_groups_to, _groups_back),
    "scaled": Form(_scaled_to, _scaled_back),
    "limited": Form(_limited_to, _limited_back),
    "shared_experts": Form(_shared_to, _shared_back),
    "shared_expert": Form(_shared_expert_to, _shared_expert_back),
    "one_shared": Form(_one_shared_to, _one_shared_back),
    "two_pools": Form(_two_pools_to, _two_pools_back),
    "ahead": Form(_convert_mtp_to, _convert_mtp_back),
}
