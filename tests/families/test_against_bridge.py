"""Dialect `megatron` of every family that NVIDIA's Megatron-Bridge knows: the same elements under the same names.

The golden files in `fixtures/bridge` are what the real bridge loads into real Megatron models from tiny
checkpoints in which no two elements are alike (`bridge_golden.py`, run by hand). Here our rules make Megatron's tensors
of the same checkpoints, and the checkpoints of Megatron's tensors; and our job model cuts them as Megatron's ranks do.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from writings import writing_of

import ckpt_tool as ckpt
from ckpt_tool.algebra.piece import apply
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.box import Box
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.families.completeness import missing, strange
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import find
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.formats.dcp_container.dcp_metadata import read_listing
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron import rules
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import MegatronFacts

Arrays = dict[str, np.ndarray]
GOLDEN = Path(__file__).parents[2] / "fixtures" / "bridge"
CASES = sorted(file.name.removesuffix(".config.json") for file in GOLDEN.glob("*.config.json"))
# Of ms-swift's Gemma 4 core saves no distributed checkpoint: layers of unlike shapes would lie under one key
UNSAVED = {"swift_gemma4_vl", "swift_gemma4_vl_moe", "swift_gemma4_ple", "gemma4_unified"}
# Cases that our job model does not cut as the ranks of Megatron hold them, each with why. When it does, it must go.
UNCUT: dict[str, str] = {}
ONE_RANK = {"deepseek_v4"}  # of models that core has on one tensor-parallel rank alone


def golden(case: str) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / f"{case}.json").read_text()))


def config_of(case: str) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / f"{case}.config.json").read_text()))


def hub_of(document: dict[str, Any]) -> Arrays:
    """The checkpoint that the bridge was given: 2, 4, 6, ..."""
    arrays = {}
    start = 1
    for name, shape in document["hub"].items():
        n = int(np.prod(shape))
        arrays[name] = 2 * np.arange(start, start + n, dtype=np.int64).reshape(shape)
        start += n
    return arrays


def arrays_of(tensors: dict[str, Any], *, by_head: bool = False) -> Arrays:
    """Megatron's tensors under the names of our dialect: `systems.megatron.stored_names` knows Transformer Engine's.
    by_head:
    of mcore-bridge, whose gated delta nets have rows by key head."""
    found: Arrays = {}
    for name, (shape, runs) in tensors.items():
        values = [first + step * np.arange(length) for first, length, step in runs]
        expert = names.expert_of(name) if ".experts." in name else None
        own = names.canonical(expert.logical() if expert else name)
        if by_head and own.endswith(("self_attention.in_proj.weight", "self_attention.conv1d.weight")):
            own += rules.BY_HEAD
        assert own not in found, f"{name}: two tensors of this name"
        found[own] = np.concatenate(values).reshape(shape)
    return found


def by_head(document: dict[str, Any]) -> bool:
    """Are gated delta nets those of mcore-bridge?"""
    return document["versions"].startswith("mcore-bridge")


def target(case: str) -> str:
    """Our name of what the bridge makes: ms-swift lays some models otherwise."""
    return "megatron-swift" if case.startswith("swift_") else "megatron"


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def made(family: Any, source: str, target: str, arrays: Arrays, config: dict[str, Any]) -> tuple[Arrays, set[str]]:
    mapped = mapping(family, source, target, shapes_of(arrays), config)
    pieces = [piece for each in mapped.made for piece in each.pieces]
    whole = {each.name: each.shape for each in mapped.made}
    unmapped = shapes_of(arrays).keys() - {piece.src.name for piece in pieces} - set(mapped.dropped)
    apart = {name for name in unmapped if family.table(source).in_tower(name)}  # they travel under their own names
    assert unmapped == apart, f"neither mapped nor dropped: {sorted(unmapped - apart)}"
    return apply(pieces, arrays, whole), {*mapped.dropped, *apart}


def equal(got: Arrays, want: Arrays) -> None:
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(box.offset, box.shape, strict=True))


def test_what_is_listed_is_there() -> None:
    assert UNCUT.keys() <= set(CASES)
    assert {case for case in CASES if golden(case).get("unsaved")} == UNSAVED
    assert {case for case in CASES if "tp2" not in golden(case)} == ONE_RANK


def test_what_no_bridge_was_run_for_is_listed() -> None:
    """Every family that a project maps to Megatron has a golden file, or a reason why not."""
    from bridge_open import ALIKE, SWIFT_UNRUN, UNRUN

    run = {find(config_of(case), golden(case)["hub"]).family.name for case in CASES}
    mapped = {family.name for family in FAMILIES if "megatron" in family.dialects or family.unmapped}
    assert mapped - run == UNRUN.keys()
    swift = {find(config_of(case), golden(case)["hub"]).family.name for case in CASES if case.startswith("swift_")}
    assert swift == {family.name for family in FAMILIES if "megatron-swift" in family.dialects}
    assert ALIKE.keys() <= {case for case in CASES if golden(case)["versions"].startswith("megatron-bridge")}
    assert SWIFT_UNRUN.keys() <= run and not SWIFT_UNRUN.keys() & swift


@pytest.mark.parametrize("case", CASES)
def test_megatron_s_tensors_are_the_bridge_s(case: str) -> None:
    document = golden(case)
    config = config_of(case)
    hub = hub_of(document)
    family, dialect = find(config, shapes_of(hub))  # `hf`, or what transformers saves in another layout
    want = arrays_of(document["megatron"], by_head=by_head(document))
    for name in document["untouched"]:  # of the model's own, that no element of the hub's is for
        if name.endswith(".k_layernorm.weight"):
            want[name] = np.zeros_like(want[name.replace("k_layernorm", "q_layernorm")])
    got, dropped = made(family, dialect, target(case), hub, config)
    equal(got, want)
    assert dropped == set(document["unused"])
    assert missing(family, target(case), want, config) == strange(family, target(case), want) == []
    back, _ = made(family, target(case), dialect, want, config)
    equal(back, {name: array for name, array in hub.items() if name not in document["unused"]})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.xfail(reason=UNCUT[case], strict=True) if case in UNCUT else ())
        for case in CASES
        if case not in ONE_RANK
    ],
)
def test_two_tensor_parallel_ranks_hold_what_megatron_s_hold(case: str) -> None:
    document = golden(case)
    whole = arrays_of(document["megatron"], by_head=by_head(document))
    shapes = shapes_of(whole)
    known = {
        "gated": rules.gated(shapes, MegatronFacts()),
        "down_shared": False,  # Transformer Engine's
        "sections": rules.sections_of(shapes, MegatronFacts()),
        "spanning": rules.norms_span(shapes, MegatronFacts(), 1),
    }
    ranks = [arrays_of(rank, by_head=by_head(document)) for rank in document["tp2"]]
    assert len(ranks) == 2
    for rank, held in enumerate(ranks):
        for name, array in whole.items():
            rule = rules.rule_of(name, array.ndim, **known)
            assert rule.known, name
            if rule.axis == rules.ETP:  # the job has experts whole on each rank
                assert name not in held
                continue
            own = np.zeros(rules.local_shape(rule, array.shape, len(ranks)), array.dtype)
            for piece in rules.pieces(rule, array.shape, rank, len(ranks)):
                own[inside(piece.within)] = array[inside(piece.box)]
            np.testing.assert_array_equal(own, held.get(name, array), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_names_alone_tell_the_order_of_the_model_s_parameters(case: str) -> None:
    """Which the flat buffers of its optimizer have. Norms that Transformer Engine fuses are left aside: its stand-in
    (`bridge_on_cpu.py`) says where they are."""
    kept = (each for each in golden(case)["megatron"] if not names.is_buffer(each) and not names.is_tower(each))
    want = [name for name in kept if ".layer_norm_" not in name]
    mixed = random.Random(case).sample(want, len(want))
    assert [mixed[i] for i in names.registration_order(mixed)] == want


@pytest.mark.share(6)
@pytest.mark.parametrize("case", CASES)
def test_keys_of_a_distributed_checkpoint_are_megatron_s(case: str, tmp_path: Path) -> None:
    """By Transformer Engine's modules, from the hub's files. What core would not save has a key a layer, as core has it
    where it is told that layers differ."""
    document = golden(case)
    swift = target(case) == "megatron-swift"
    writing = writing_of(to="megatron-dist", spec="te", dialect="megatron-swift" if swift else None, fsync=False)
    report = convert(hub_folder(case, tmp_path / "model"), str(tmp_path / "there"), Reading(), writing, Silent())
    (file,) = (tmp_path / "there").rglob(".metadata")
    found = read_listing(Tree(file.parent), "", [".metadata"]).tensors
    assert {key: list(entry.shape) for key, entry in found.items()} == document["torch_dist"]
    assert any(f"to {target(case)}" in note for note in report["notes"])
    family, _ = find(config_of(case), document["hub"])
    other = "megatron-swift" in family.dialects and not swift
    assert any("ms-swift's is --dialect megatron-swift" in note for note in report["notes"]) == other


@pytest.mark.parametrize("to", ["megatron-dist", "megatron"])
@pytest.mark.parametrize("case", sorted(ONE_RANK))
def test_no_more_ranks_than_core_takes(case: str, to: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 key and value that all heads share do not divide by 2") as caught:
        writing = Writing(to=to, degrees={"tp": 2}, fsync=False)
        convert(hub_folder(case, tmp_path / "hub"), str(tmp_path / "there"), Reading(), writing, Silent())
    assert caught.value.code == "E0273" and not (tmp_path / "there").exists()


def hub_folder(case: str, folder: Path) -> str:
    """The checkpoint that the bridge was given, without what it has no use for."""
    document = golden(case)
    folder.mkdir()
    arrays = {name: array for name, array in hub_of(document).items() if name not in document["unused"]}
    save_file({name: array.astype(np.float32) for name, array in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    return str(folder)


@pytest.mark.share(3)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("swift_")])
def test_ms_swift_s_layout_is_written_and_read(case: str, tmp_path: Path) -> None:
    """By the command, over two ranks: its elements are those of the real model, and the hub's files come back."""
    document = golden(case)
    hub = hub_folder(case, tmp_path / "hub")
    there = str(tmp_path / "there")
    writing = Writing(to="megatron-dist", dialect="megatron-swift", degrees={"tp": 2}, fsync=False)
    convert(hub, there, Reading(), writing, Silent())
    found = ckpt.open(there)
    want = arrays_of(document["megatron"], by_head=True)
    assert {key.name for key in found.catalog.tensors if key.state == "model"} == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)
    split = "split" if case == "swift_qwen3_5_moe" else None  # as transformers saves it, the released one is fused
    writing = Writing(to="safetensors", experts=split, fsync=False)
    convert(there, str(tmp_path / "back"), Reading(), writing, Silent())
    got, theirs = (load_file(Path(each) / "model.safetensors") for each in (tmp_path / "back", hub))
    assert got.keys() == theirs.keys() and all(np.array_equal(got[name], theirs[name]) for name in theirs)
    legacy = Writing(to="megatron", dialect="megatron-swift", fsync=False)
    if any(name.endswith(rules.BY_HEAD) for name in want):  # no file of ranks shows whose rows they are
        with pytest.raises(UsageError) as caught:
            convert(hub, str(tmp_path / "ranks"), Reading(), legacy, Silent())
        assert caught.value.code == "E0275" and not (tmp_path / "ranks").exists()
    else:
        convert(hub, str(tmp_path / "ranks"), Reading(), legacy, Silent())
        convert(str(tmp_path / "ranks"), str(tmp_path / "hub2"), Reading(), writing, Silent())
        assert (tmp_path / "hub2" / "model.safetensors").read_bytes() == (
            tmp_path / "back" / "model.safetensors"
        ).read_bytes()


def test_one_bridge_s_layout_becomes_the_other_s(tmp_path: Path) -> None:
    """From Megatron-Bridge's checkpoint, without the hub between."""
    hub = hub_folder("swift_qwen3_next", tmp_path / "hub")
    nvidia = str(tmp_path / "nvidia")
    convert(hub, nvidia, Reading(), Writing(to="megatron-dist", fsync=False), Silent())
    writing = Writing(to="megatron-dist", dialect="megatron-swift", fsync=False)
    convert(nvidia, str(tmp_path / "swift"), Reading(), writing, Silent())
    found = ckpt.open(str(tmp_path / "swift"))
    for name, array in arrays_of(golden("swift_qwen3_next")["megatron"], by_head=True).items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)


def test_a_family_with_one_layout_has_no_other(tmp_path: Path) -> None:
    writing = Writing(to="megatron-dist", dialect="megatron-swift", fsync=False)
    with pytest.raises(UsageError, match="family qwen3 has no dialect 'megatron-swift'") as caught:
        convert(hub_folder("qwen3", tmp_path / "hub"), str(tmp_path / "there"), Reading(), writing, Silent())
    assert caught.value.code == "E1231" and not (tmp_path / "there").exists()
