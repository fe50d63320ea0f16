"""What Paddle's files hold in other tensors than the source: tied pairs, weights that are rounded masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Degrees, Hints
from ckpt_tool.core.target import LayoutWish, Wanted, WantedTensor
from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.formats.base import Fitted
from ckpt_tool.systems.paddle.job import PaddleHints
from ckpt_tool.systems.paddle.pdparams.target import fit, paddle_target

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NAMES = (EMBEDDING, *(f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)), HEAD)


def tensors(states: Mapping[str, tuple[str, ...]]) -> list[LogicalTensor]:
    """One (12, 8) tensor a state and name."""
    dtypes = {"model": "BF16"}
    return [
        simple_tensor(TensorKey(name, state), StoredArray("f", 0, DTYPES[dtypes.get(state, "F32")], (12, 8)))
        for state, names in states.items()
        for name in names
    ]


def fitted(states: Mapping[str, tuple[str, ...]], degrees: Mapping[str, int], **hints: Any) -> Fitted:
    known = Hints.of(PaddleHints(**hints), Degrees())
    return fit(tensors(states), {}, known, LayoutWish(Degrees(**degrees)))


def held(made: Fitted, state: str) -> set[str]:
    return {tensor.key.name for _, tensor in made.tensors if tensor.key.state == state}


def test_states_of_a_tied_pair_stand_under_the_embedding() -> None:
    for names in (NAMES[:-1], NAMES[1:]):  # stored once, under either name
        states = {"model": NAMES, "master": names, "exp_avg": names}
        made = fitted(states, {})
        assert held(made, "exp_avg") == held(made, "master") == set(NAMES[:-1])
        assert len(made.dropped) == (0 if names[0] == EMBEDDING else 2)
        where = {tensor.key: number for number, tensor in made.tensors}
        source = tensors(states)[where[TensorKey(EMBEDDING, "exp_avg")]].key
        assert source.name in (EMBEDDING, HEAD) and source.state == "exp_avg"


def test_a_pair_that_the_config_ties_is_kept_once_and_said() -> None:
    states = {"model": NAMES, "exp_avg": NAMES}
    made = fitted(states, {}, config={"tie_word_embeddings": True})
    assert held(made, "exp_avg") == set(NAMES[:-1])
    (entry,) = made.dropped
    assert (entry["state"], entry["tensors"], entry["bytes"]) == ("exp_avg", 1, 384)
    apart = fitted(states, {}, config={"tie_word_embeddings": False})
    assert held(apart, "exp_avg") == set(NAMES) and not apart.dropped


def test_the_first_and_the_last_stage_have_a_copy_each() -> None:
    made = fitted({"model": NAMES, "exp_avg": NAMES[:-1]}, {"pp": 2})
    assert held(made, "exp_avg") == set(NAMES)
    assert {entry["state"] for entry in made.dropped} == {"exp_avg"}


def test_a_tied_head_is_written_though_the_source_leaves_it_out() -> None:
    made = fitted({"model": NAMES[:-1]}, {}, config={"tie_word_embeddings": True})
    assert held(made, "model") == set(NAMES) and len(made.dropped) == 1
    assert held(fitted({"model": NAMES[:-1]}, {}), "model") == set(NAMES[:-1])


def test_weights_are_rounded_masters_only_where_paddle_would_round_them() -> None:
    states = {"master": NAMES, "exp_avg": NAMES}
    made = fitted(states, {}, kind="sharding_io", sharding_degree=2)
    assert held(made, "model") == set(NAMES) and {d.name for d in made.casts.values()} == {"BF16"}
    assert made.dropped[-1]["state"] == "model"
    assert not held(fitted(states, {"dp": 2}, kind="sharding_io", sharding_degree=2), "model")  # shared again
    assert not held(fitted(states, {}), "model")  # of a stranger's weights nobody knows the dtype


def test_a_weight_that_was_removed_is_not_made_anew() -> None:
    hints = Hints.of(PaddleHints(kind="sharding_io", sharding_degree=2))
    made = fit(tensors({"master": NAMES}), {}, hints, LayoutWish(removed=frozenset({TensorKey(HEAD)})))
    assert held(made, "model") == set(NAMES[:-1])


def test_masters_of_float32_weights_in_a_bf16_model_are_left_out_and_said() -> None:
    names = ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.down_proj.weight")

    def rows(*model: str) -> list[LogicalTensor]:
        kinds = [(name, "model", dtype) for name, dtype in zip(names, model, strict=True)]
        kinds += [(name, state, "F32") for name in names for state in ("master", "exp_avg")]
        return [
            simple_tensor(TensorKey(name, state), StoredArray("f", 0, DTYPES[dtype], (12, 8)))
            for name, state, dtype in kinds
        ]

    made = fit(rows("F32", "BF16"), {}, Hints(), LayoutWish())
    assert held(made, "master") == {names[1]} and held(made, "exp_avg") == set(names)
    (entry,) = made.dropped
    assert (entry["state"], entry["tensors"], entry["bytes"]) == ("master", 1, 384)
    assert held(fit(rows("F32", "F32"), {}, Hints(), LayoutWish()), "master") == set(names)


def test_files_are_named_as_paddle_looks_for_them() -> None:
    """A unified checkpoint calls its file `model`, an adapter's ranks `lora_model_state`: the first is no name here."""
    listed = tuple(WantedTensor(row.key, row.shape, row.dtype) for row in tensors({"model": NAMES}))
    for stem, wanted in (("model", "model_state"), ("lora_model_state", "lora_model_state")):
        target = paddle_target(Wanted(listed, {}, Hints.of(PaddleHints(stem=stem))))
        assert f"{wanted}.pdparams" in {file.path for file in target.files}
