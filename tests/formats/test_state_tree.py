"""Taking a nested state apart and putting it together: the identity, and what happens at the edges."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from targets import ramp, wanted_of

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CorruptFile, UsageError
from ckpt_tool.formats.state_dict.nesting import nest, writable
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.formats.state_dict.roots import Roots
from ckpt_tool.formats.state_dict.tree import SLOT, join, part
from ckpt_tool.storage.pickles.pickle_values import StorageRef, TensorRef


def ref(number: int = 0) -> TensorRef:
    storage = StorageRef(str(number), DTYPES["F32"], 6, 24, "cpu", "FloatStorage")
    return TensorRef(storage, 0, (2, 3), (3, 1), DTYPES["F32"])


keys = st.one_of(st.sampled_from(["a", "b.c", "model", "0", "state"]), st.integers(0, 3))
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
leaves = st.one_of(plain, st.integers(0, 9).map(ref))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3), st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), states, max_size=3))
def test_parts_join_to_the_whole(state: dict[str, Any]) -> None:
    parted = part(state)
    assert join(parted.extras, parted.leaves) == state
    assert not parted.hanging


def test_what_is_left_is_readable() -> None:
    state = {"model": {"w": ref()}, "epoch": 3, "rng": [ref(1), None], "pair": (ref(2), 5), "none": {}}
    parted = part(state)
    assert parted.extras == {"epoch": 3, "rng": [SLOT, None], "pair": (SLOT, 5), "none": {}}
    assert [path for path, _ in parted.leaves] == [("model", "w"), ("rng", 0), ("pair", 0)]
    assert join(parted.extras, []) == {"epoch": 3, "rng": [None, None], "pair": (None, 5), "none": {}}


def test_an_extra_in_a_tensors_way_moves_and_stays() -> None:
    assert join({"model": "gpt2"}, [(("model", "w"), 1)]) == {"model": {"w": 1}, "extras": {"model": "gpt2"}}


def test_a_set_with_a_tensor_is_told() -> None:
    assert "set" in part({"x": {ref()}}).hanging[0]


def test_depth_is_bounded() -> None:
    state: Any = 1
    for _ in range(300):
        state = {"a": state}
    with pytest.raises(CorruptFile):
        part(state)


def test_a_list_too_short_for_its_tensor_is_told() -> None:
    with pytest.raises(CorruptFile, match="2 entries"):
        join({"a": [1, 2]}, [(("a", 5, "w"), 1)])


# -- nesting -----------------------------------------------------------------------------------------------------------


def names_again(wanted: Wanted, *, whole_numbers: bool = True) -> tuple[list[TensorKey], dict[Any, Any], list[str]]:
    """What a reader makes of the nested state: (keys in the wanted's order, the extras he finds, the writer's
    notes)."""
    places = [ref(i)._replace(offset=i) for i in range(len(wanted.tensors))]
    nested = nest(wanted, places, whole_numbers=whole_numbers)
    parted = part(nested.tree)
    found = name_leaves(
        [Leaf(path, wanted.tensors[place.offset].shape) for path, place in parted.leaves], parted.extras
    )
    by_place = {place.offset: key for (_, place), key in zip(parted.leaves, found.keys, strict=True)}
    return [by_place[i] for i in range(len(places))], parted.extras, nested.notes


def test_paths_that_lost_their_evidence_are_given_up(tmp_path: Any) -> None:
    """torchtitan's flat states without model and groups look like a model: they get the usual places instead."""
    tensors = {TensorKey("w", "exp_avg"): ramp((2, 2)), TensorKey("w", "odd"): ramp((2, 2))}
    paths = {key: (f"state.w.{key.state}",) for key in tensors}
    hints = Roots(model=(), optimizer=(), flat=True)
    keys, _, notes = names_again(wanted_of(tensors, paths, hints=Hints.of(hints)))
    assert keys == list(tensors) and "get_state_dict" in notes[0]


def test_numbers_that_order_no_longer_names_get_names() -> None:
    """Two parameters of one shape, and a third that may be skipped: their names must stand in the file."""
    tensors = {TensorKey(name): ramp((3,)) for name in "cab"} | {TensorKey("a", "exp_avg"): ramp((3,))}
    paths = {key: ("model", key.name) for key in tensors} | {
        TensorKey("a", "exp_avg"): ("optim", "state", 0, "exp_avg")
    }
    hints = Roots(ids={("optim",): {"0": "a", "1": "b"}})
    extras = {"optim": {"param_groups": [{"params": [0, 1], "lr": 0.1}]}}
    keys, found, notes = names_again(wanted_of(tensors, paths, hints=Hints.of(hints), extras=extras))
    assert keys == list(tensors)
    assert found["optim"]["param_groups"] == [{"params": [0, 1], "lr": 0.1, "param_names": ["a", "b"]}]
    assert "param_names" in notes[0]


def test_numbers_that_were_never_named_keep_their_numbers() -> None:
    """Removing the tensors that made it ambiguous must not give the states a name they did not have."""
    tensors = {TensorKey("a"): ramp((3,)), TensorKey("0", "exp_avg"): ramp((3,))}
    paths = {TensorKey("a"): ("model", "a"), TensorKey("0", "exp_avg"): ("optim", "state", 0, "exp_avg")}
    extras = {"optim": {"param_groups": [{"params": [0]}]}}
    keys, _, _ = names_again(wanted_of(tensors, paths, hints=Hints.of(Roots()), extras=extras))
    assert keys == list(tensors)


def test_a_renamed_tensor_does_not_go_back_to_its_old_place() -> None:
    tensors = {TensorKey("new.name"): ramp((3,))}
    wanted = wanted_of(
        tensors, {TensorKey("new.name"): ("app", "model", "old")}, hints=Hints.of(Roots(model=("app", "model")))
    )
    assert nest(wanted, [1], whole_numbers=True).tree == {"app": {"model": {"new.name": 1}}}


def test_hints_from_an_edited_index_do_no_harm() -> None:
    for said in (3, {"model": 7}, {"ids": [[1]]}, {"ids": "x"}, {"model": [["a"]]}, {"flat": {}, "ema": [None]}):
        assert Roots.read(said) is None or isinstance(Roots.read(said), Roots)
        wanted = wanted_of(
            {TensorKey("w"): ramp((2,))}, hints={"roots": said, "ordered": [["model"], 5], "folders": [1, None]}
        )
        assert nest(wanted, [1], whole_numbers=True).tree == {"model": {"w": 1}}


def test_a_name_that_no_place_gives_back_is_a_usage_error() -> None:
    wanted = Wanted((WantedTensor(TensorKey("_orig_mod.w"), (2,), DTYPES["F32"]),))
    with pytest.raises(UsageError) as raised:
        nest(wanted, [1], whole_numbers=True)
    assert raised.value.code == "E0243"


def test_writable_keeps_what_it_can() -> None:
    kept, left = writable({"a": {1, 2}, "b": {"c": object()}, "d": [1, object()], "e": b"x"})
    assert kept == {"a": {1, 2}, "b": {}, "d": [1, None], "e": b"x"} and left == ["b.c: object", "d.1: object"]
