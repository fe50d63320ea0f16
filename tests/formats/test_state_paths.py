"""Paths to names: every layout that trainers write, by hand-made paths; the real files are in test_torch_{file,dcp}."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.formats.state_dict.optimizer_ids import Candidate, align
from ckpt_tool.formats.state_dict.paths import Leaf, common_prefix, name_leaves
from ckpt_tool.formats.state_dict.roots import Roots

W = (4, 3)


def leaf(*path: Any, shape: tuple[int, ...] = W, same: Any = None) -> Leaf:
    return Leaf(tuple(path), shape, same)


def named(leaves: list[Leaf], extras: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    return [(key.name, key.state) for key in name_leaves(leaves, extras or {}).keys]


def test_the_layout_of_get_state_dict() -> None:
    leaves = [
        leaf("model", "layers.0.w1.weight"),
        leaf("optim", "state", "layers.0.w1.weight", "exp_avg"),
        leaf("optim", "state", "layers.0.w1.weight", "step", shape=()),
        leaf("rng", shape=(16,)),
    ]
    assert named(leaves) == [
        ("layers.0.w1.weight", "model"),
        ("layers.0.w1.weight", "exp_avg"),
        ("layers.0.w1.weight", "step"),
        ("rng", "extras"),
    ]


def test_torchtitan_flat_states_at_the_root_and_under_optimizer() -> None:
    for root in ((), ("optimizer",)):
        leaves = [leaf("tok.weight"), leaf("layers.0.w.weight"), leaf(*root, "state.layers.0.w.weight.exp_avg")]
        found = name_leaves(leaves, {})
        assert [str(key) for key in found.keys] == ["tok.weight", "layers.0.w.weight", "layers.0.w.weight [exp_avg]"]
        assert found.roots.path(TensorKey("tok.weight", "exp_avg_sq")) == (*root, "state.tok.weight.exp_avg_sq")
        assert found.roots.path(TensorKey("tok.weight")) == ("tok.weight",)


def test_flat_states_count_only_with_evidence() -> None:
    """A model may well have a part called `state`."""
    assert named([leaf("enc.weight"), leaf("state.cell.weight")]) == [
        ("enc.weight", "model"),
        ("state.cell.weight", "model"),
    ]
    beside = {"param_groups.cell.w.lr": 0.1}
    assert named([leaf("state.cell.w.exp_avg")], beside) == [("cell.w", "exp_avg")]


def test_no_planner_data_takes_the_models_prefix_from_the_optimizers_names() -> None:
    leaves = [
        leaf("model.enc.weight"),
        leaf("model.enc.bias"),
        leaf("optim.state.enc.weight.exp_avg"),
        leaf("sched.x"),
    ]
    found = name_leaves(leaves, {})
    assert [str(key) for key in found.keys] == ["enc.weight", "enc.bias", "enc.weight [exp_avg]", "sched.x [extras]"]
    assert any("'model.'" in note.message for note in found.notes)
    assert found.roots.path(TensorKey("enc.bias", "step")) == ("optim.state.enc.bias.step",)
    assert found.roots.path(TensorKey("enc.bias")) == ("model.enc.bias",)
    # without an optimizer there is no evidence: names stay as they are
    assert named([leaf("model.enc.weight"), leaf("model.enc.bias")]) == [
        ("model.enc.weight", "model"),
        ("model.enc.bias", "model"),
    ]


def test_optimizers_by_structure_not_by_name() -> None:
    leaves = [leaf("net_g", "w"), leaf("inner", "state", "w", "exp_avg"), leaf("adam", "state", "w", "foo")]
    found = named(leaves, {"adam": {"param_groups": []}})
    assert found[1:] == [("w", "exp_avg"), ("w", "foo")]
    assert named([leaf("model", "w"), leaf("optimizers", 0, "state", "w", "odd")])[1] == ("w", "odd")
    assert named([leaf("state", "w", "exp_avg")], {"param_groups": [{}]}) == [("w", "exp_avg")], "a bare optimizer file"
    assert named([leaf("model", "w"), leaf("sampler", "state", "a", "b")])[1] == ("sampler.state.a.b", "extras")


def test_ema_and_master() -> None:
    leaves = [
        leaf("model", "w"),
        leaf("ema", "w"),
        leaf("master_weights", "w"),
        leaf("model_ema", "module", "v"),
        leaf("optim", "state", "w", "master_param"),
    ]
    assert named(leaves) == [
        ("w", "model"),
        ("w", "ema"),
        ("w", "master"),
        ("v", "ema"),
        ("optim.state.w.master_param", "extras"),
    ]


def test_one_level_is_taken_off_and_never_two() -> None:
    assert named([leaf("model", "model", "w")]) == [("model.w", "model")]
    assert named([leaf("state_dict", "model.w")]) == [("model.w", "model")]
    assert named([leaf("app", "model", "w"), leaf("app", "optim", "state", "w", "exp_avg")]) == [
        ("w", "model"),
        ("w", "exp_avg"),
    ]


def test_without_a_model_level_all_is_the_model() -> None:
    assert named([leaf("enc", "w"), leaf("dec", "w")]) == [("enc.w", "model"), ("dec.w", "model")]
    assert named([leaf("net", "w"), leaf("head", "w")]) == [("net.w", "model"), ("head.w", "model")], (
        "net is a part here"
    )
    assert named([leaf("net", "w")]) == [("w", "model")]
    assert named([leaf("a.w"), leaf("rng_state", shape=(16,))]) == [("a.w", "model"), ("rng_state", "extras")]
    assert named([leaf("a.w"), leaf("step", shape=())], {"epoch": 1})[1] == ("step", "extras")


def test_wrapper_parts_leave_the_names() -> None:
    assert clean("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
    assert clean("my_orig_mod.w") == "my_orig_mod.w"
    found = name_leaves([leaf("model", "_orig_mod.a"), leaf("optim", "state", "_orig_mod.a", "exp_avg")], {})
    assert [str(key) for key in found.keys] == ["a", "a [exp_avg]"]
    assert [note.code for note in found.notes] == ["N-wrapper-names"]


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (("enc", "w"), ("enc.w",), "enc.w"),
        (("enc.w",), ("enc", "w"), "enc.w"),
        (("model", "enc", "w"), ("model", "enc.w"), "enc.w"),
        (("model", 0), ("model", "0"), "0"),
        (("model", "_orig_mod.a"), ("model", "a"), "a"),
        (("optim", "state", "a.b", "exp_avg"), ("optim", "state", "a", "b.exp_avg"), ""),
        (("ema", "a", "b"), ("ema", "a.b"), "a.b"),
    ],
)
def test_two_tensors_of_one_name_are_an_error(one: tuple[Any, ...], other: tuple[Any, ...], name: str) -> None:
    found = name_leaves([leaf(*one), leaf(*other)], {}, path="file.pt")
    assert len(set(found.keys)) == 2
    if name:
        ((key, fault),) = found.faults.items()
        assert (key.name, fault.code, fault.path) == (name, "E3018", "file.pt")
        assert repr(one[-1]) in fault.message and repr(other[-1]) in fault.message


def test_one_tensor_at_two_places_of_one_name_is_kept_as_an_extra() -> None:
    found = name_leaves([Leaf(("model", "_orig_mod.a"), (2,), 1), Leaf(("model", "a"), (2,), 1)], {})
    assert [str(key) for key in found.keys] == ["a", "model.a [extras]"]
    assert "N-same-name" in [note.code for note in found.notes] and not found.faults


def test_two_averages_and_two_optimizers_of_one_name_stay_two() -> None:
    found = name_leaves([leaf("ema", "a"), leaf("model_ema", "a"), leaf("model", "a")], {})
    assert len(set(found.keys)) == 3 and not found.faults


# -- numbered parameters -----------------------------------------------------------------------------------------------


def numbered(shapes: dict[int, tuple[int, ...]], params: Any = None) -> tuple[list[Leaf], dict[str, Any]]:
    leaves = [leaf("optimizer", "state", n, "exp_avg", shape=shape) for n, shape in shapes.items()]
    groups = params if params is not None else [{"params": sorted(shapes)}]
    return leaves, {"optimizer": {"param_groups": groups}}


def test_numbers_are_named_by_order_and_shape() -> None:
    moments, extras = numbered({0: (33, 10), 1: (23, 10), 2: (33, 10)})
    model = [
        leaf("model", "embed", shape=(33, 10)),
        leaf("model", "w1", shape=(23, 10)),
        leaf("model", "scale", shape=(3,)),
        leaf("model", "head", shape=(33, 10)),
    ]
    found = name_leaves([*model, *moments], extras)
    assert [key.name for key in found.keys[4:]] == ["embed", "w1", "head"]
    assert found.roots.ids == {("optimizer",): {"0": "embed", "1": "w1", "2": "head"}}


def test_ambiguous_numbers_stay_numbers_with_a_note_that_says_what_to_do() -> None:
    moments, extras = numbered({0: (5,), 1: (5,)})
    model = [leaf("model", name, shape=(5,)) for name in ("a", "b", "c")]
    found = name_leaves([*model, *moments], extras)
    assert [str(key) for key in found.keys[3:]] == ["0 [exp_avg]", "1 [exp_avg]"]
    assert any("more than one" in note.message and "named_parameters()" in note.message for note in found.notes)


def test_names_in_the_groups_decide() -> None:
    groups = [{"params": [0, 1], "param_names": ["c", "a"]}]
    moments, extras = numbered({0: (5,), 1: (5,)}, groups)
    found = name_leaves([*(leaf("model", name, shape=(5,)) for name in "abc"), *moments], extras)
    assert [key.name for key in found.keys[3:]] == ["c", "a"]


def test_tied_tensors_and_batch_norm_buffers_are_no_candidates() -> None:
    model = [
        Candidate("embed", (9, 4), same=1),
        Candidate("bn.weight", (4,)),
        Candidate("bn.bias", (4,)),
        Candidate("bn.running_mean", (4,)),
        Candidate("bn.running_var", (4,)),
        Candidate("head", (9, 4), same=1),
    ]
    moments = {n: {"exp_avg": shape} for n, shape in enumerate([(9, 4), (4,), (4,)])}
    assert align([{"params": [0, 1, 2]}], moments, model).names == {0: "embed", 1: "bn.weight", 2: "bn.bias"}


def test_digits_are_numbers_only_where_the_groups_number() -> None:
    leaves = [leaf("model", "0"), leaf("model", "1"), leaf("optim", "state", "1", "exp_avg")]
    assert named(leaves, {"optim": {"param_groups": [{"params": ["0", "1"]}]}})[2] == ("1", "exp_avg")
    spelled = [leaf("model", "a"), leaf("optim", "state", "0", "exp_avg")]
    assert named(spelled, {"optim": {"param_groups": [{"params": [0]}]}})[1] == ("a", "exp_avg")


@given(st.lists(st.sampled_from([(2,), (3,), (2, 3)]), max_size=6), st.data())
def test_an_alignment_is_found_exactly_when_it_is_the_only_one(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """Against a slow oracle: try every way to deal the model's tensors to two groups in order."""
    chosen = [data.draw(st.sampled_from([None, 0, 1])) for _ in shapes]
    groups: list[list[int]] = [[i for i, c in enumerate(chosen) if c == g] for g in (0, 1)]
    ids = {t: n for n, t in enumerate(t for group in groups for t in group)}
    moments = {ids[t]: {"exp_avg": shapes[t]} for t in ids}
    param_groups = [{"params": [ids[t] for t in group]} for group in groups if group]
    want = [[shapes[t] for t in group] for group in groups if group]
    deals = set()
    for code in range((len(want) + 1) ** len(shapes)):
        deal: list[list[int]] = [[] for _ in want]
        for t in range(len(shapes)):
            code, take = divmod(code, len(want) + 1)
            if take:
                deal[take - 1].append(t)
        if [[shapes[t] for t in part] for part in deal] == want:
            deals.add(tuple(map(tuple, deal)))
    found = align(param_groups, moments, [Candidate(str(i), shape) for i, shape in enumerate(shapes)])
    if ids and len(deals) == 1:
        assert found.names == {n: str(t) for t, n in ids.items()}
    else:
        assert found.names == {}


# -- roots -------------------------------------------------------------------------------------------------------------


def test_roots_survive_the_hints() -> None:
    moments, extras = numbered({0: (5,)})
    roots = name_leaves([leaf("app", "model", "a", shape=(5,)), *moments], extras).roots
    assert Hints.of(roots).get(Roots) == roots
    assert Hints().get(Roots) is None
    assert Roots().path(TensorKey("a", "exp_avg")) == ("optim", "state", "a", "exp_avg")
    assert Roots().path(TensorKey("a", "ema")) == ("ema", "a")


@pytest.mark.parametrize(
    ("names", "keys", "want"),
    [
        (["w"], ["model.w", "step"], "model."),
        (["w"], ["w", "model.w"], ""),
        (["w", "v"], ["a.w", "b.w", "b.v"], "b."),
        (["w", "v"], ["a.w"], None),
        ([], ["a"], None),
    ],
)
def test_common_prefix(names: list[str], keys: list[str], want: str | None) -> None:
    assert common_prefix(names, keys) == want
