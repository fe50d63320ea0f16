"""How keys are spelled and boxes cut for a checkpoint that was none of Megatron's: by its arguments, as its layer specs
do.

The expected keys are those of megatron-core 0.16.1's `gpt_layer_specs.py` and `transformer_block.py`, read there and
put down by hand; ranks by the order tp-cp-ep-dp-pp of its `RankGenerator`.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.megatron.args import DIMS
from ckpt_tool.systems.megatron.torch_dist.layout import DistLayout
from ckpt_tool.systems.megatron.torch_dist.stored_state import stored_state

NAMES = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.final_layernorm.weight": (4,),
    **{f"decoder.layers.{i}.input_layernorm.weight": (4,) for i in range(2)},
    **{f"decoder.layers.{i}.pre_mlp_layernorm.weight": (4,) for i in range(2)},
    **{f"decoder.layers.{i}.self_attention.linear_proj.weight": (4, 4) for i in range(2)},
}
DENSE = NAMES | {f"decoder.layers.{i}.mlp.linear_fc1.weight": (8, 4) for i in range(2)}
QKV = {f"decoder.layers.{i}.self_attention.linear_qkv.weight": (12, 4) for i in range(2)}
LATENT = {
    f"decoder.layers.{i}.self_attention.{name}.weight": shape
    for i in range(2)
    for name, shape in (("linear_kv_down_proj", (3, 4)), ("linear_kv_up_proj", (8, 3)), ("kv_layernorm", (3,)))
}
EXPERTS = NAMES | {
    f"decoder.layers.{i}.mlp.{name}.weight": shape
    for i in range(2)
    for name, shape in (
        ("router", (2, 4)),
        ("experts.local_experts.0.linear_fc1", (8, 4)),
        ("experts.local_experts.1.linear_fc1", (8, 4)),
    )
}


def layout(
    names: dict[str, tuple[int, ...]], args: dict[str, Any], *, state: str = "model", **degrees: int
) -> DistLayout:
    tensors = tuple(WantedTensor(TensorKey(name, state), shape, DTYPES["F32"]) for name, shape in names.items())
    wanted = Wanted(tensors, {"args": Opaque("argparse.Namespace", (), args)}, source_format="safetensors")
    return DistLayout(wanted, args, dict.fromkeys(DIMS, 1) | {"etp": degrees.get("tp", 1)} | degrees)


def keys(made: DistLayout) -> set[str]:
    return set(made.entries())


TE = {"transformer_impl": "transformer_engine"}
STACK = "decoder.layers."


@pytest.mark.parametrize(
    ("names", "args", "expected"),
    [
        (DENSE | QKV, {}, {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}),
        (DENSE | QKV, TE, {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}),
        (EXPERTS | QKV, {}, {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}),
        (EXPERTS | QKV, TE, {"self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"}),
        (
            DENSE | LATENT,
            {},
            {"input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.kv_layernorm.weight"},
        ),
        (
            DENSE | LATENT,
            TE,
            {
                "input_layernorm.weight",
                "mlp.linear_fc1.layer_norm_weight",
                "self_attention.linear_kv_up_proj.layer_norm_weight",
            },
        ),
    ],
)
def test_norms_are_stored_where_the_layer_spec_puts_them(names: Any, args: Any, expected: set[str]) -> None:
    norms = {key for key in keys(layout(names, args)) if "norm" in key and key.startswith(STACK)}
    assert norms == {STACK + key for key in expected}


@pytest.mark.parametrize("freq", [[0, 1], 2])
def test_layers_that_differ_have_keys_of_their_own(freq: Any) -> None:
    made = keys(layout(EXPERTS | QKV, {"moe_layer_freq": freq}))
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in made
    assert not any(key.startswith("decoder.layers.mlp") for key in made)


def test_stacked_layers_need_one_shape() -> None:
    odd = DENSE | {"decoder.layers.1.mlp.linear_fc1.weight": (12, 4)}
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"} <= keys(layout(odd, {}))


def test_boxes_and_the_ranks_that_write_them() -> None:
    """tp 2, ep 2, dp 2, pp 2: 8 ranks; experts' tensor ranks are the dense ones (etp 2), expert 1 lies with ranks 2,
    3."""
    made = layout(EXPERTS | QKV, {"swiglu": True, "num_attention_heads": 2}, tp=2, ep=2, dp=2, pp=2)
    shape, shares = made.entries()["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert shape == (2, 2, 8, 4) and len({id(share.cut) for share in shares}) == 1
    items = [(share, item) for share in shares for item in share.cut]
    assert {((*share.lead, *item.offset), item.shape, share.first + item.rank) for share, item in items} == {
        ((layer, expert, half * 4 + rank * 2, 0), (2, 4), 4 * layer + 2 * expert + rank)
        for layer in range(2)
        for expert in range(2)
        for half in range(2)
        for rank in range(2)
    }
    _, dense = made.entries()["decoder.layers.self_attention.linear_proj.weight"]
    assert {((*share.lead, *item.offset), share.first + item.rank) for share in dense for item in share.cut} == {
        ((i, 0, 2 * r), 4 * i + r) for i in range(2) for r in range(2)
    }


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    odd = DENSE | {"embedding.word_embeddings.weight": (7, 4)}
    _, shares = layout(odd, {}, tp=2).entries()["embedding.word_embeddings.weight"]
    assert [item.shape for share in shares for item in share.cut] == [(7, 4)]


def test_what_would_be_read_back_under_another_name_is_refused() -> None:
    with pytest.raises(UsageError) as e:
        layout({"model.layers.0.x": (2,), "decoder.layers.norm": (2,)}, {}).entries()
    assert e.value.code == "E2001" and "decoder.layers.norm" in e.value.message


@pytest.mark.parametrize(("args", "more"), [({}, set()), (TE, {"self_attention.core_attention", "pre_mlp_layernorm"})])
def test_extra_states_are_those_that_the_modules_look_for(args: Any, more: set[str]) -> None:
    made = layout(EXPERTS | QKV, args)
    found = {key for key, _ in stored_state(made.wanted, made).objects if key.startswith(STACK)}
    want = {"self_attention.linear_proj", "self_attention.linear_qkv"} | more
    assert found == {f"{STACK}{m}._extra_state/shard_{i}_2" for m in want for i in range(2)} | {
        f"{STACK}mlp.experts.experts.linear_fc1._extra_state/shard_{i}.{e}_2.2" for i in range(2) for e in range(2)
    }


def test_ema_and_masters_have_keys() -> None:
    args = {"use_distributed_optimizer": False}
    assert "optimizer.state.ema.decoder.final_layernorm.weight" in keys(layout(DENSE, {}, state="ema"))
    assert "optimizer.state.param.decoder.final_layernorm.weight" in keys(layout(DENSE, {}, state="master"))
    assert "optimizer.state.fp32_param.decoder.final_layernorm.weight" in keys(layout(DENSE, args, state="master"))
