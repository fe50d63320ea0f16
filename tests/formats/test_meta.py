"""Meta's shards: what joins them, what is wrong with them, how they are cut; values by slices, damage by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import bits, gather

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).parents[2] / "fixtures" / "meta"
QUICK: dict[str, Any] = {"dialect": "keep", "verify": "full"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the two shards of a Llama 2, to damage."""
    shutil.copytree(FIXTURES / "llama2_tp2", tmp_path / "in")
    return tmp_path / "in"


def shard(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"consolidated.{rank:02d}.pth", weights_only=True)


def changed(folder: Path, rank: int, change: Any) -> None:
    state = shard(folder, rank)
    change(state)
    torch.save(state, folder / f"consolidated.{rank:02d}.pth")


def told(folder: Path, **params: Any) -> None:
    stated = json.loads((folder / "params.json").read_text()) | params
    (folder / "params.json").write_text(json.dumps(stated))


def fault(folder: Path, **reading: Any) -> CkptError:
    with pytest.raises(CkptError) as e:
        open_source(str(folder), Reading(**reading))
    assert e.value.exit_code == 3 and e.value.hint
    return e.value


def test_embeddings_are_cut_as_shapes_and_params_say() -> None:
    for name, dim in (("llama2_tp2", 1), ("llama3_tp4", 0)):
        found = open_source(str(FIXTURES / name), Reading()).catalog.tensors[TensorKey("tok_embeddings.weight")]
        assert found.shape == (40, 24)
        assert {chunk.box.shape[1 - dim] for chunk in found.chunks} == {(40, 24)[1 - dim]}


def test_more_shards_than_heads_of_keys_hold_them_twice() -> None:
    opened = open_source(str(FIXTURES / "llama3_tp4"), Reading())
    found = opened.catalog.tensors[TensorKey("layers.0.attention.wk.weight")]
    assert [(c.box.offset[0], c.replica) for c in found.chunks] == [(0, 0), (0, 1), (6, 0), (6, 1)]


def test_replicas_that_differ_are_found_while_bytes_pass(folder: Path, tmp_path: Path) -> None:
    changed(folder, 1, lambda state: state["norm.weight"].add_(1))
    with pytest.raises(CkptError) as e:
        convert(str(folder), str(tmp_path / "out"), Reading(), Writing(to="safetensors", **QUICK), Silent())
    assert e.value.exit_code == 3 and "norm.weight" in f"{e.value.key} {e.value.message}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda f: (f / "consolidated.00.pth").unlink(), "E1400", "consolidated.00.pth"),
        (lambda f: shutil.copy(f / "consolidated.01.pth", f / "consolidated.03.pth"), "E1400", "consolidated.02.pth"),
        (lambda f: shutil.copy(f / "consolidated.01.pth", f / "consolidated.1.pth"), "E1401", "twice"),
        (lambda f: shutil.copy(f / "consolidated.01.pth", f / "consolidated.02.pth"), "E1403", "params.json wants"),
        (lambda f: (f / "consolidated.01.pth").unlink(), "E1400", "1 of 2 shards are missing: consolidated.01.pth"),
        (lambda f: (f / "params.json").unlink(), "E1402", "params.json is missing"),
        (lambda f: told(f, n_layers=3), "E1406", "layers 2 of 3 are missing"),
        (lambda f: told(f, n_layers=1), "E1406", "more than n_layers"),
        (lambda f: told(f, n_kv_heads=4), "E1403", "[12, 24], params.json wants [24, 24]"),
        (lambda f: told(f, dim="24"), "E1405", "dim is '24'"),
        (lambda f: told(f, n_layers=10**15), "E1405", "n_layers is 1000000000000000"),
        (
            lambda f: told(f, n_layers=10**12),
            "E1406",
            "layers 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 of 1000000000000 are missing",
        ),
        (lambda f: told(f, multiple_of=0), "E1405", "multiple_of is 0"),
        (lambda f: told(f, ffn_dim_multiplier=1e300), "E1405", "ffn_dim_multiplier is 1e+300"),
        (lambda f: told(f, norm_eps="small"), "E1405", "norm_eps is 'small'"),
        (lambda f: told(f, dim=25), "E1405", "25 doesn't divide among 4 heads"),
        (lambda f: (f / "params.json").write_text("[1]"), "E1405", "no JSON object"),
        (lambda f: changed(f, 1, lambda s: s.pop("norm.weight")), "E1407", "consolidated.01.pth lacks it"),
        (lambda f: changed(f, 0, lambda s: s.update({"norm.weight": torch.zeros(23)})), "E1408", "[24]"),
        (lambda f: changed(f, 1, lambda s: s.update({"norm.weight": s["norm.weight"].float()})), "E1408", "F32"),
        (lambda f: changed(f, 0, lambda s: s.update({"epoch": 3})), "E1409", "epoch"),
        (
            lambda f: [changed(f, r, lambda s: s.update({"odd": torch.zeros(2)})) for r in (0, 1)],
            "E1404",
            "2 shards share it",
        ),
    ],
)
def test_damage_is_told(folder: Path, damage: Any, code: str, words: str) -> None:
    damage(folder)
    found = fault(folder)
    assert found.code == code and words in found.message, found.message


def test_all_faults_come_at_once(folder: Path) -> None:
    changed(folder, 1, lambda state: [state.pop("norm.weight"), state.update({"output.weight": torch.zeros(3, 3)})])
    found = fault(folder)
    assert len(found.faults) == 1 and {found.code} <= {"E1407", "E1408"}


def test_lenient_leaves_strangers_out(folder: Path) -> None:
    for rank in (0, 1):
        changed(folder, rank, lambda state: state.update({"odd": torch.zeros(2)}))
    catalog = open_source(str(folder), Reading(lenient=True)).catalog
    assert TensorKey("odd") not in catalog.tensors and any(note.key == "odd" for note in catalog.notes)


def test_one_shard_needs_no_params(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4)}, tmp_path / "consolidated.00.pth")
    catalog = open_source(str(tmp_path), Reading()).catalog
    assert [key.name for key in catalog.tensors] == ["a"] and any(
        "params.json" in note.message for note in catalog.notes
    )


def test_one_shard_alone_is_told_to_be_one() -> None:
    opened = open_source(str(FIXTURES / "llama2_tp2" / "consolidated.00.pth"), Reading())
    assert opened.catalog.format == "torch" and any("pass the folder" in note.message for note in opened.catalog.notes)


def test_a_folder_of_both_worlds_is_told(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "mistral", tmp_path / "in")
    shutil.copy(tmp_path / "in" / "consolidated.safetensors", tmp_path / "in" / "model.safetensors")
    assert registry.detect(Tree(tmp_path / "in"))[0].name == "safetensors"


@pytest.mark.parametrize("case", ["llama1", "llama2_tp2", "llama3_tp4", "mistral"])
@pytest.mark.parametrize("tp", [1, 2])
def test_cut_anew_each_rank_holds_what_meta_s_modules_hold(case: str, tp: int, tmp_path: Path) -> None:
    """The truth is the whole model; a rank's part by `chunk`, as fairscale's layers would take it."""
    from safetensors.torch import load_file

    truth = {name.removeprefix("model/"): t for name, t in load_file(FIXTURES / f"{case}.truth.safetensors").items()}
    out = tmp_path / "out"
    reshard(str(FIXTURES / case), str(out), Reading(), Writing(degrees={"tp": tp}, **QUICK), Silent())
    assert {path.name for path in out.iterdir()} == {*(f"consolidated.{r:02d}.pth" for r in range(tp)), "params.json"}
    assert (out / "params.json").read_bytes() == (FIXTURES / case / "params.json").read_bytes()
    vocabulary = case == "llama3_tp4"
    for rank in range(tp):
        mine = shard(out, rank)
        assert list(mine) == [row.name for row in open_source(str(FIXTURES / case), Reading()).catalog.rows()]
        for name, value in truth.items():
            end = name.rpartition(".weight")[0].rpartition(".")[2]
            columns = end in ("wo", "w2") or (end == "tok_embeddings" and not vocabulary)
            rows = end in ("wq", "wk", "wv", "w1", "w3", "output") or (end == "tok_embeddings" and vocabulary)
            part = value.chunk(tp, 1 if columns else 0)[rank] if columns or rows else value
            assert mine[name].is_contiguous() and (bits(mine[name]) == bits(part)).all(), name
    back = open_source(str(out), Reading())
    for name, value in truth.items():
        assert (gather(back.tree, back.catalog.tensors[TensorKey(name)]) == bits(value)).all(), name


@pytest.mark.parametrize(
    ("degrees", "code"),
    [({"tp": 3}, "E1412"), ({"tp": 4}, "E1412"), ({"pp": 2}, "E1410"), ({"tp": 2, "ep": 2}, "E1410")],
)
def test_degrees_that_can_t_be_had(degrees: dict[str, int], code: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as e:
        reshard(
            str(FIXTURES / "llama2_tp2"), str(tmp_path / "o"), Reading(), Writing(degrees=degrees, **QUICK), Silent()
        )
    assert (e.value.exit_code, e.value.code) == (2, code) and e.value.hint


def test_strange_tensors_are_not_cut_by_guess(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4)}, tmp_path / "a.pt")
    with pytest.raises(CkptError) as e:
        convert(
            str(tmp_path / "a.pt"),
            str(tmp_path / "o"),
            Reading(),
            Writing(to="meta", degrees={"tp": 2}, **QUICK),
            Silent(),
        )
    assert (e.value.exit_code, e.value.code, e.value.key) == (2, "E1411", "a")


def test_a_trimmed_vocabulary_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(
        str(FIXTURES / "llama3_tp4"), str(out), Reading(), Writing(degrees={"tp": 2}, vocab_size=38, **QUICK), Silent()
    )
    assert json.loads((out / "params.json").read_text())["vocab_size"] == 38
    assert shard(out, 1)["tok_embeddings.weight"].shape == (19, 24)
