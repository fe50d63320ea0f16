"""What the harness writes in each format, read by the tool: sound, value for value the truth, the same after A -> X ->
A."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))

import made_states as made  # noqa: E402

from ckpt_tool.errors import UsageError  # noqa: E402
from ckpt_tool.harness.loading import Loader, prepare_checkpoint, run_tool  # noqa: E402
from ckpt_tool.harness.saving import formats, megatron_dist, megatron_model  # noqa: E402
from ckpt_tool.harness.saving.whole import assemble  # noqa: E402

SPEC = made.Spec()
FOUR = {"tp": 2, "pp": 2, "dp": 2, "ep": 2}
# format, the layout that is written, the layout between
QUICK: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sharded", FOUR, {"dp": 4, "ep": 2}),
    ("dcp", {"dp": 3, "zero": 3}, {"tp": 2, "dp": 2}),
    ("deepspeed", {"dp": 4, "zero": 1}, {"dp": 3, "zero": 2}),
    ("deepspeed", {"dp": 3, "zero": 3}, {"dp": 2, "zero": 3}),
    ("megatron-dist", FOUR, {"tp": 4}),
    ("megatron", FOUR, {"tp": 4}),
    ("megatron-fsdp", {"tp": 2, "dp": 2, "ep": 2, "zero": 3}, {"tp": 4}),
    ("paddle-unified", FOUR, {}),
    ("paddle-flex", FOUR, {"tp": 4}),
]
MORE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sharded", {"dp": 4, "ep": 4, "zero": 3}, FOUR),
    ("sharded", {}, {"tp": 4}),
    ("dcp", FOUR, {}),
    ("dcp", {"tp": 2, "dp": 4, "ep": 2, "zero": 2}, {"dp": 3}),
    ("deepspeed", {"dp": 2, "zero": 2}, {"dp": 1}),
    ("megatron-dist", {"pp": 3}, {"dp": 4, "ep": 4}),
    ("megatron-dist", {"tp": 2, "zero": 0}, {"pp": 3}),
    ("megatron", {"tp": 2, "pp": 3, "zero": 0}, {"dp": 2, "ep": 2}),
    ("megatron", {"dp": 4, "ep": 2, "zero": 1}, {"pp": 3, "tp": 2}),
    ("paddle-unified", {}, {}),
    ("paddle-flex", {"tp": 2, "pp": 3}, {"dp": 4, "ep": 4}),
    ("paddle-flex", {"dp": 3, "zero": 2}, {"tp": 2, "dp": 2}),
]
# on models with other forms: tied embeddings, four layers over two virtual stages of two
FORMS: list[tuple[str, made.Spec, dict[str, Any], dict[str, Any]]] = [
    ("sharded", made.Spec(tied=True), {"tp": 2, "pp": 2, "dp": 2}, {"pp": 3}),
    ("dcp", made.Spec(tied=True), {"pp": 2, "dp": 2}, {"tp": 2}),
    ("deepspeed", made.Spec(tied=True), {"dp": 2, "zero": 2}, {"dp": 3, "zero": 1}),
    ("megatron", made.Spec(tied=True), {"tp": 2, "pp": 3, "zero": 0}, {"dp": 2}),
    ("megatron", made.Spec(tied=True), {"tp": 2, "pp": 3, "dp": 2, "ep": 2}, {"tp": 4}),
    ("megatron", made.Spec(layers=4), {"pp": 2, "vpp": 2, "dp": 2}, {"tp": 2}),
    ("megatron-dist", made.Spec(tied=True), {"tp": 2, "pp": 3}, {"dp": 2, "ep": 2}),
    ("megatron-fsdp", made.Spec(tied=True), {"tp": 2, "dp": 2}, {"dp": 4, "ep": 4}),
    ("paddle-flex", made.Spec(tied=True), {"tp": 2, "pp": 3, "dp": 2}, {"tp": 4}),
    ("paddle-unified", made.Spec(tied=True), {"tp": 2, "pp": 3, "dp": 2}, {}),
    ("paddle-flex", made.Spec(tied=True), {"dp": 2}, {"tp": 4}),
    ("megatron-dist", made.Spec(layers=4), {"pp": 2, "vpp": 2, "dp": 2}, {"tp": 2}),
]


def layout(degrees: dict[str, Any]) -> Any:
    return made.layout(**{"zero": 1 if degrees.get("dp", 1) > 1 else 0, "split": (), **degrees})


def words(fmt: str, degrees: dict[str, Any], spec: made.Spec) -> list[str]:
    lay = layout(degrees)
    stages = made.chunks(spec, lay)
    counts = [len(stages[stage][chunk]) for chunk in range(lay.vpp) for stage in range(lay.pp)]
    return formats.words(fmt, lay, counts)


def name(case: Any) -> str:
    if isinstance(case, made.Spec):
        return "tied" if case.tied else f"layers{case.layers}"
    return "-".join(f"{key}{value}" for key, value in case.items()) or "one" if isinstance(case, dict) else str(case)


def write(fmt: str, degrees: dict[str, Any], folder: Path, spec: made.Spec = SPEC) -> Path:
    folder.mkdir()
    formats.write(fmt, assemble(made.ranks(spec, layout(degrees))), folder)
    return folder


def digests(path: Path) -> dict[str, Any]:
    document = run_tool("verify", path)
    assert document["ok"], document["findings"][:5]
    return dict(document["digests"])


def check(fmt: str, first: dict[str, Any], between: dict[str, Any], tmp_path: Path, spec: made.Spec = SPEC) -> None:
    a = write(fmt, first, tmp_path / "a", spec)
    before = digests(a)
    assert "ema" in before and "exp_avg_sq" in before
    _is_the_truth(a, tmp_path / "hub_a", spec)
    run_tool("reshard", a, tmp_path / "x", *words(fmt, between, spec))
    run_tool("reshard", tmp_path / "x", tmp_path / "back", *words(fmt, first, spec))
    assert digests(tmp_path / "back") == before
    _is_the_truth(tmp_path / "x", tmp_path / "hub_x", spec)


def _is_the_truth(path: Path, scratch: Path, spec: made.Spec) -> None:
    loader = Loader(prepare_checkpoint(path, scratch))
    assert loader.scalars == made.SCALARS
    for (state, tensor), values in made.truth(spec).items():
        got = loader.read(tensor, state, (0,) * values.ndim, values.shape)
        assert torch.equal(got.to(values.dtype), values), (state, tensor)


@pytest.mark.share(12)
@pytest.mark.parametrize(("fmt", "first", "between"), QUICK, ids=name)
def test_written_read_and_there_and_back(
    fmt: str, first: dict[str, Any], between: dict[str, Any], tmp_path: Path
) -> None:
    check(fmt, first, between, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "first", "between"), MORE, ids=name)
def test_more_layouts(fmt: str, first: dict[str, Any], between: dict[str, Any], tmp_path: Path) -> None:
    check(fmt, first, between, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "spec", "first", "between"), FORMS, ids=name)
def test_more_models(fmt: str, spec: made.Spec, first: dict[str, Any], between: dict[str, Any], tmp_path: Path) -> None:
    check(fmt, first, between, tmp_path, spec)


def test_a_wrong_fusion_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: [up; gate] where Megatron has [gate; up], in the averages alone."""

    def swapped(module: Any, state: str, whole: Any) -> torch.Tensor:
        tensor = megatron_model.join_module(module, state, whole)
        return tensor.roll(tensor.shape[0] // 2, 0) if (module.kind, state) == ("gated", "ema") else tensor

    monkeypatch.setattr(megatron_dist, "join_module", swapped)
    path = write("megatron-dist", {"tp": 2}, tmp_path / "a")
    with pytest.raises(AssertionError, match=r"'ema', 'model.layers.0.mlp.gate_proj.weight'"):
        _is_the_truth(path, tmp_path / "hub", SPEC)


def test_every_format_is_tried() -> None:
    assert {fmt for fmt, _, _ in QUICK} == set(formats.WRITERS)


def test_a_layout_that_the_files_have_no_place_for_is_refused() -> None:
    with pytest.raises(UsageError, match="deepspeed has no place for tp2, zero0") as caught:
        formats.check("deepspeed", layout({"tp": 2, "dp": 2, "zero": 0}))
    assert "zero1" in (caught.value.hint or "")


@pytest.mark.parametrize("fmt", ["megatron", "megatron-dist", "paddle-flex"])
def test_a_weight_that_megatron_could_not_hold_so_is_refused(fmt: str, tmp_path: Path) -> None:
    states = made.ranks(SPEC, layout({"tp": 2}), replicated=("mlp.gate_proj.weight",))
    with pytest.raises(UsageError, match=r"gate_proj.weight of \[20, 12\] is held as \[20, 12\]"):
        formats.write(fmt, assemble(states), tmp_path)
