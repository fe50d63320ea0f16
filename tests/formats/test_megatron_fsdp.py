"""Megatron-FSDP: names, halves and groups against what Megatron-LM itself saved, other formats of Megatron's and back.

The values of every fixture are held against its live run in `test_conformance.py`. Here the oracles are torch's own
loader (without ranks), the keys of the real files, and torch's rounding. What Megatron's own `load_checkpoint` makes of
what is written shows `fixtures/make/megatron_fsdp.py --load` (the README of the fixtures has what it showed).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from targets import FIXTURES

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.formats.dcp_container.dcp_metadata import (
    METADATA,
    DcpListing,
    DcpTensorEntry,
    ObjectEntry,
    pickled,
    read_listing,
)
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.fsdp_dtensor import read as fsdp_read
from ckpt_tool.systems.megatron.fsdp_dtensor.keys import parse

HOME = FIXTURES / "megatron-fsdp"
CASES = sorted(path.name.removesuffix(".truth.safetensors") for path in HOME.glob("*.truth.safetensors"))
FC2 = "decoder.layers.1.mlp.linear_fc2"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
Entry = DcpTensorEntry | ObjectEntry


def write(source: Path, target: Path, to: str = "megatron-fsdp", family: str | None = None, **degrees: int) -> Any:
    writing = Writing(to=to, degrees=degrees, fsync=False, verify="full")
    return convert(str(source), str(target), Reading(family=family), writing, Silent())


def differences(a: Path, b: Path, **chosen: Any) -> list[Any]:
    document = diff(str(a), str(b), Reading(), Comparison(**chosen), progress=Silent())
    return list(document["differences"])


def steps(folder: Path) -> Path:
    """The folder that the pointer names."""
    name = (folder / "latest_checkpointed_iteration.txt").read_text()
    return folder / (name if name == "release" else f"iter_{int(name):07d}")


def listed(folder: Path) -> DcpListing:
    """What the metadata of a run's step lists."""
    return read_listing(Tree(steps(folder)), "", (METADATA,))


def by_torch(folder: Path) -> dict[str, Any]:
    """Every tensor of a DCP, by torch's own loader, one process."""
    kinds = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in kinds.items() if hasattr(m, "size")}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def test_hyperparameters_states_and_the_rest_come_along() -> None:
    opened = open_source(str(HOME / "moe_ep2dp4"), Reading())
    catalog = opened.catalog
    groups = catalog.extras["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["weight_decay"]) for group in groups] == [(1.0, 0.1), (0.0, 0.0)]
    assert groups[0]["betas"] == (0.9, 0.999) and not any("params" in group for group in groups)
    assert catalog.extras["iteration"] == 2 and catalog.extras["checkpoint_version"] == 3.0
    assert catalog.hints.get(Degrees) == Degrees(1, 1, 1, 2, 1, 4, 1) and dict(catalog.mesh.dims) == {"ep": 2, "dp": 2}
    (rng,) = catalog.extras["rng_state"].values()
    assert list(catalog.extras["rng_state"]) == ["mp_rank_00"] and len(rng[0]["torch_rng_state"]) == 5056
    assert "N-main-weights" in {note.code for note in catalog.notes}


def test_a_pointer_a_step_and_a_plain_reading() -> None:
    run = HOME / "fsdp_dp2"
    step = HOME / "fsdp_dp2" / "iter_0000002"
    assert registry.detect(Tree(run))[0].name == registry.detect(Tree(step))[0].name == "megatron-fsdp"
    plain = open_source(str(step), Reading(from_format="dcp")).catalog
    assert {f"module.{FC1}_w", f"module.{FC1}_v"} <= {key.name for key in plain.tensors}, "as it lies"


def test_a_users_own_dcp_of_the_package_alone_is_a_dcp(tmp_path: Path) -> None:
    dcp.save({"model": {"module.w": torch.ones(4)}, "epoch": 3}, checkpoint_id=tmp_path, no_dist=True)
    assert registry.detect(Tree(tmp_path))[0].name == "dcp"


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("case", CASES)
def test_keys_and_tensors_are_those_that_megatron_wrote(case: str, tmp_path: Path) -> None:
    """The same degrees: nothing is named otherwise, nothing left out, for another loader of the same files."""
    source = open_source(str(HOME / case), Reading()).catalog
    degrees = source.hints.get(Degrees).stated()
    write(HOME / case, tmp_path / "out", **{**degrees, "dp": degrees["dp"] * 2})
    have = listed(tmp_path / "out")
    want = listed(HOME / case)
    assert have.tensors.keys() == want.tensors.keys() and have.objects.keys() == want.objects.keys()
    mine = by_torch(steps(tmp_path / "out"))
    theirs = by_torch(steps(HOME / case))
    assert [key for key, tensor in theirs.items() if not torch.equal(tensor, mine[key])] == []
    pieces = [piece for entry in have.tensors.values() for piece in entry.pieces]
    assert len({piece.file for piece in pieces}) > degrees["tp"], "data ranks share the rows"


@pytest.mark.parametrize(
    ("case", "to", "degrees"),
    [
        ("gpt2_fp32_dp2", "megatron-dist", {"tp": 2}),
        ("moe_ep2dp4", "megatron-dist", {"ep": 2, "dp": 2}),
        ("fsdp_dp2", "megatron", {"tp": 2}),
        ("mtp_dp2", "megatron-dist", {}),
        ("geglu_tp2", "dcp", {"dp": 2}),
    ],
)
def test_there_and_back(case: str, to: str, degrees: dict[str, int], tmp_path: Path) -> None:
    report = write(HOME / case, tmp_path / "through", to, **degrees)
    write(tmp_path / "through", tmp_path / "back", dp=3)
    assert differences(HOME / case, tmp_path / "back") == []
    back, source = (
        {key for key in listed(folder).tensors if not key.startswith("rng_state")}
        for folder in (tmp_path / "back", HOME / case)
    )
    assert back == source, "spelled as Megatron does, by the arguments alone"
    first, last = (open_source(str(p), Reading()).catalog.extras["optimizer"] for p in (HOME / case, tmp_path / "back"))
    assert first == last, "every parameter has its hyperparameters again"
    if to == "dcp" or case == "gpt2_fp32_dp2":
        assert report["dropped"] == [], "a DCP has no masters, and what was trained in fp32 is the model"
        return
    assert {entry["state"] for entry in report["dropped"]} == {"model", "master"}
    opened = open_source(str(tmp_path / "through"), Reading())
    through = OpenCatalog(opened.tree, opened.catalog)
    truth = load_file(HOME / f"{case}.truth.safetensors")
    for name in [key.removeprefix("exp_avg/") for key in truth if key.startswith("exp_avg/")]:
        main = truth[f"model/{name}"]
        assert torch.equal(through[name].torch(), main.bfloat16()), name
        assert torch.equal(through.state("master")[name].torch(), main), name


def test_rows_of_tensor_ranks_lie_together_where_a_gated_fc1_is_whole(tmp_path: Path) -> None:
    write(HOME / "geglu_tp2", tmp_path / "one", tp=1)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    key = "model.module.decoder.layers.0.mlp.linear_fc1.weight"
    two = by_torch(steps(HOME / "geglu_tp2"))[key]
    one = by_torch(steps(tmp_path / "one"))[key]
    assert torch.equal(one, load_file(HOME / "geglu_tp2.truth.safetensors")[f"model/{name}"])
    gate, up = one.chunk(2)
    assert torch.equal(two, torch.cat([gate[:10], up[:10], gate[10:], up[10:]]))
    report = write(tmp_path / "one", tmp_path / "again", tp=2)
    assert torch.equal(by_torch(steps(tmp_path / "again"))[key], two)
    assert any("--tensor-model-parallel-size 2" in note for note in report["notes"])


def test_hugging_face_and_back_and_a_padded_vocabulary(tmp_path: Path) -> None:
    write(HOME / "fsdp_dp2", tmp_path / "hf", "safetensors", family="qwen3")
    write(tmp_path / "hf", tmp_path / "back", dp=2, tp=2)
    left = differences(HOME / "fsdp_dp2", tmp_path / "back", states=("model",))
    assert {(d["name"], d["kind"]) for d in left} == {
        ("embedding.word_embeddings.weight", "shape"),  # 37 rows without Megatron's padding
        ("output_layer.weight", "shape"),
    }
    stored = by_torch(steps(tmp_path / "back"))["model.module.output_layer.weight"]
    truth = load_file(HOME / "fsdp_dp2.truth.safetensors")["model/output_layer.weight"]
    assert stored.shape == (256, 24) and torch.equal(stored[:37], truth[:37]) and not stored[37:].any()
    write(tmp_path / "back", tmp_path / "again", "safetensors", family="qwen3")
    assert differences(tmp_path / "hf", tmp_path / "again") == [], "the padding is ours, and known as that"


# -- what is wrong -----------------------------------------------------------------------------------------------------


def edited(case: str, folder: Path, change: Callable[[str], str | None]) -> Path:
    """The fixture's step with other keys: `change` of a key is its new one, None leaves it out."""
    source = steps(HOME / case)
    listing = read_listing(Tree(source), "", (METADATA,))
    kept: list[Entry] = []
    for entry in (*listing.tensors.values(), *listing.objects.values()):
        fqn = change(entry.fqn)
        if fqn is None:
            continue
        path = entry.path if fqn == entry.fqn else (fqn,)
        kept.append(
            replace(entry, fqn=fqn, path=path) if isinstance(entry, DcpTensorEntry) else entry._replace(fqn=fqn)
        )
    folder.mkdir()
    for file in source.glob("*.distcp"):
        shutil.copy(file, folder / file.name)  # a link would change the fixture, for who reads it meanwhile
    (folder / METADATA).write_bytes(pickled(kept))
    return folder


def without(*ends: str) -> Callable[[str], str | None]:
    return lambda fqn: None if fqn.endswith(ends) else fqn


def renamed(old: str, new: str) -> Callable[[str], str | None]:
    return lambda fqn: fqn.replace(old, new)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (without(f"model.module.{FC1}_v"), "E0309", "up (_v) half"),
        (without(f"{FC1}_w.exp_avg"), "E0309", "gate (_w) half"),
        (without("layers.0.mlp.linear_fc2.weight.exp_avg"), "E0302", "exp_avg"),
        (without(*(f"output_layer.weight.{s}" for s in ("exp_avg", "exp_avg_sq", "step"))), "E0302", "have no state"),
        (renamed("linear_qkv.weight", "linear_qkv_down_proj.weight"), "E2007", "down projections"),
        (
            renamed("model.module.decoder.layers.1.mlp.linear_fc2", "model0.module.decoder.layers.0.mlp.linear_fc2"),
            "E0389",
            "twice",
        ),
    ],
    ids=["half", "half-of-a-moment", "moment", "states", "fused", "twice"],
)
def test_what_is_missing_or_not_known_is_refused(
    change: Callable[[str], str | None], code: str, words: str, tmp_path: Path
) -> None:
    source = edited("fsdp_dp2", tmp_path / "source", change)
    with pytest.raises(CkptError) as e:
        write(source, tmp_path / "out", "dcp")
    assert e.value.code == code and words in e.value.message, e.value


def test_stages_that_share_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = fsdp_read.facts_of
    monkeypatch.setattr(fsdp_read, "facts_of", lambda args: facts(args)._replace(pp=2, layers=4))
    with pytest.raises(CkptError) as e:
        open_source(str(HOME / "fsdp_dp2"), Reading())
    assert e.value.code == "E2008" and "2 layers are stored, the model has 4" in e.value.message


def test_one_below_the_folder_is_named(tmp_path: Path) -> None:
    inner = tmp_path / "run" / "export"
    shutil.copytree(steps(HOME / "fsdp_dp2"), inner)
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path / "run"), Reading())
    assert (e.value.code, e.value.exit_code) == ("E1640", 3) and "Megatron-FSDP" in e.value.message


def test_keys_of_transformer_engine_of_experts_and_of_bridge() -> None:
    """Spellings that the fixtures do not have: their sources are named in `megatron.fsdp_dtensor.format`."""
    for fqn, want in {
        "model.module.decoder.layers.0.mlp.experts.linear_fc1.weight3_w": (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight [model]",
            "w",
        ),
        "model0.module.decoder.layers.0.self_attention.in_proj.weight.beta": (
            "decoder.layers.0.self_attention.in_proj.weight [model]",
            "beta",
        ),
        "optimizer.state.module.module.module.decoder.layers.2.self_attention.linear_qkv.layer_norm_weight.exp_avg": (
            "decoder.layers.2.input_layernorm.weight [exp_avg]",
            "",
        ),
    }.items():
        found = parse(fqn)
        assert found is not None
        assert (f"{found.key.name} [{found.key.state}]", found.part) == want
    assert parse("opt_param_scheduler.max_lr") is None
