"""What belongs together in a training state, and what is no fault: small catalogs, made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Holds
from ckpt_tool.formats.soundness import check_sound, unsound


def catalog(*tensors: tuple[str, str, tuple[int, ...]], **extras: Any) -> Catalog:
    made = {}
    for name, state, shape in tensors:
        key = TensorKey(name, state)
        made[key] = simple_tensor(key, StoredArray(f"{state}.bin", 0, DTYPES["F32"], shape))
    return Catalog("made", made, extras)


W = ("w", "model", (3, 4))
V = ("v", "model", (2,))
MOMENTS = (("w", "exp_avg", (3, 4)), ("w", "exp_avg_sq", (3, 4)), ("v", "exp_avg", (2,)), ("w", "step", ()))


def codes(of: Catalog) -> list[str | None]:
    return [fault.code for fault in unsound(of, Holds())]


def test_a_whole_state_has_no_fault() -> None:
    assert not codes(catalog(W, V, *MOMENTS, ("w", "master", (3, 4))))
    assert not codes(catalog(*MOMENTS))  # an optimizer alone
    assert not codes(catalog(("s", "model", ()), ("s", "exp_avg", ())))


def test_moments_of_another_shape_are_named() -> None:
    found = list(unsound(catalog(W, V, *MOMENTS[1:], ("w", "exp_avg", (4, 3))), Holds()))
    assert len(found) == 1 and found[0].key == "w [exp_avg]" and found[0].path == "exp_avg.bin"
    assert "[4, 3]" in found[0].message and "[3, 4]" in found[0].message and found[0].exit_code == 3 and found[0].hint
    assert codes(catalog(W, ("w", "master", (12,)))) == ["E0305"]
    assert codes(catalog(("w", "master", (3, 4)), ("w", "exp_avg", (3, 5)))) == ["E0305"]


def test_moments_without_a_parameter_are_named_unless_no_name_fits() -> None:
    found = list(unsound(catalog(W, *MOMENTS), Holds()))
    assert [fault.key for fault in found] == ["v [exp_avg]"]
    assert not codes(catalog(("module.w", "model", (3, 4)), *MOMENTS))  # another dialect's names: nothing can be said
    assert not codes(catalog(W, ("0", "exp_avg", (3, 4)), ("w", "exp_avg", (3, 4))))  # numbers that were not told apart


def test_states_of_other_shapes_by_design_are_no_fault() -> None:
    assert not codes(catalog(W, ("w", "exp_avg_sq_row", (3,)), ("w", "state1", (12,)), ("w", "exp_avg", (3, 4))))


def test_groups_at_two_steps_are_named_wherever_they_lie() -> None:
    groups = [{"lr": 0.1, "step": 3}, {"lr": 0.2}, {"lr": 0.3, "step": 4}]
    (fault,) = unsound(catalog(W, optimizer={"param_groups": groups}), Holds())
    assert "group 2 is at step 4, group 0 at 3" in fault.message and "optimizer.param_groups" in fault.message
    assert codes(catalog(W, optimizer={"chained": [{"param_groups": groups[:2]}, {"param_groups": groups}]})) == [
        "E0305"
    ]
    assert codes(catalog(W, optimizer={"scalars": [{"step": 1.0}, {"step": 2.0}]})) == ["E0305"]
    assert not codes(catalog(W, optimizer={"param_groups": [{"step": 3}, {"step": 3}]}))
    # torch counts each parameter's own steps: one without a gradient stands still
    assert not codes(catalog(W, V, ("w", "step", ()), ("v", "step", ())))


def expert(number: int, state: str = "model", part: str = "fc1") -> tuple[str, str, tuple[int, ...]]:
    return (f"layers.0.mlp.experts.local_experts.{number}.{part}.weight", state, (2, 2))


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ([expert(0), expert(1), expert(3)], "1 of 4 experts are missing: 2"),
        ([expert(1)], "1 of 2 experts are missing: 0"),
        ([expert(0), expert(1), expert(0, part="fc2")], "expert 1 lacks fc2.weight"),
        ([expert(0), expert(1), expert(0, "exp_avg")], "1 of 2 experts are missing: 1"),
    ],
)
def test_experts_that_no_rank_wrote_are_named(tensors: list[Any], word: str) -> None:
    found = [fault.message for fault in unsound(catalog(*tensors), Holds(all_experts=True))]
    assert word in found
    assert not list(unsound(catalog(*tensors), Holds(lone_shards=True, all_experts=True)))  # a lone shard of a model


def test_all_faults_are_told_at_once() -> None:
    of = catalog(
        W, V, ("w", "exp_avg", (4, 3)), ("v", "exp_avg", (3,)), optimizer={"param_groups": [{"step": 1}, {"step": 2}]}
    )
    with pytest.raises(CkptError) as raised:
        check_sound(of, Holds())
    assert len(raised.value.faults) == 2 and any("v [exp_avg]" in fault for fault in raised.value.faults)


def test_one_of_two_moments_lost_is_named_where_most_have_both() -> None:
    both = [(name, state, (2,)) for name in "abc" for state in ("model", "exp_avg", "exp_avg_sq")]
    (fault,) = unsound(catalog(*(row for row in both if row != ("b", "exp_avg", (2,)))), Holds())
    assert fault.key == "b [exp_avg]" and fault.path == "exp_avg_sq.bin" and fault.exit_code == 3 and fault.hint
    assert not codes(catalog(*both))
    others = [(name, state, (2,)) for name in "def" for state in ("model", "exp_avg")]
    assert not codes(catalog(*both, *others))  # as many with one alone: an optimizer that keeps one
    assert not codes(catalog(*both[:-1], ("c", "exp_avg_sq_row", (2,))))  # Adafactor


def test_lion_keeps_one_moment_beside_adam_s_two() -> None:
    def rows(name: str, *states: str) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, state, (2,)) for state in ("model", *states)]

    norms = [row for i in range(4) for row in rows(f"layers.{i}.norm", "exp_avg", "exp_avg_sq")]
    matrices = [row for i in range(2) for row in rows(f"layers.{i}.w", "exp_avg")]
    assert not codes(catalog(*norms, *matrices))
    (fault,) = unsound(catalog(*norms, *rows("layers.4.norm", "exp_avg"), *matrices), Holds())
    assert fault.key == "layers.4.norm [exp_avg_sq]"
