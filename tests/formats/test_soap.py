"""SOAP: states of their parameter's shape, matrices that are not, and numbers (fixtures/make/soap.py)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ckpt_tool.api import diff
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.systems.megatron.job import RankArray
from ckpt_tool.systems.megatron.legacy.read import Gathering, _RankOptimizer

SOAP = Path(__file__).parents[2] / "fixtures" / "soap"
TRAINER, ONE, TWO = (SOAP / name for name in ("trainer", "megatron_tp1", "megatron_tp2"))
SQUARE = ["L", "R", "Q_L", "Q_R"]


class Lenient:
    """`pickle` for torch.load, with empty classes for Megatron's."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("megatron"):
                return type(name, (), {"__init__": lambda self, *_: None})
            return super().find_class(module, name)

    load = pickle.load
    loads = pickle.loads


def state(folder: Path, rank: int = 0, part: int = 0) -> dict[int, dict[str, Any]]:
    """What torch.load finds: the entries of one optimizer of a legacy file's chain, by number."""
    (file,) = folder.glob(f"iter_*/mp_rank_*{rank}/model_optim_rng.pt")
    return torch.load(file, weights_only=False, pickle_module=Lenient)["optimizer"][part]["optimizer"]["state"]


def values(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    opened = open_source(str(folder), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog)
    keys = [key for key in opened.catalog.tensors if key.state != "extras"]
    return {f"{key.state}/{key.name}": lazy.state(key.state)[key.name].torch() for key in keys}, opened.catalog.extras


@pytest.mark.parametrize("to", ["sharded", "dcp"])
def test_every_state_of_a_trainer_s_optimizer_comes_through(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(str(TRAINER), str(out), Reading(), Writing(to=to, degrees={"dp": 2} if to == "sharded" else {}), Silent())
    assert diff(str(TRAINER), str(out))["equal"]
    found, extras = values(out)
    stored = torch.load(TRAINER / "optimizer.pt", weights_only=False)["state"]
    up = "model.layers.0.mlp.up_proj.weight"
    (own,) = [one for one in stored.values() if torch.equal(one["exp_avg"], found[f"exp_avg/{up}"])]
    assert [tuple(matrix.shape) for matrix in own["Q"]] == [(12, 12), (8, 8)]
    for word in ("GG", "Q"):
        assert all(torch.equal(found[f"{word}.{i}/{up}"], matrix) for i, matrix in enumerate(own[word]))
    assert torch.equal(found[f"exp_avg_sq/{up}"], own["exp_avg_sq"])
    assert "precondition_frequency" in str(extras)


def test_square_matrices_are_never_taken_for_moments(tmp_path: Path) -> None:
    """q, k and v are square here, and so are theirs: no qkv is made of them, even where no others are taken."""
    for keys in ([], ["*self_attn*"]):
        writing = Writing(to="megatron-dist", keep_keys=keys)
        with pytest.raises(CkptError, match=r"\[GG.0\]") as caught:
            convert(str(TRAINER), str(tmp_path / "out"), Reading(family="llama:hf"), writing, Silent())
        assert caught.value.code == "E2303" and "--drop GG.0,GG.1,Q.0,Q.1" in str(caught.value.hint)
    writing = Writing(to="megatron-dist", drop=["GG.0", "GG.1", "Q.0", "Q.1"])
    convert(str(TRAINER), str(tmp_path / "out"), Reading(family="llama:hf"), writing, Silent())
    found, _ = values(tmp_path / "out")
    assert {key.partition("/")[0] for key in found} == {"model", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("to", ["megatron-dist", "megatron-fsdp"])
def test_states_with_a_dot_have_no_key_and_the_rest_can_be_had(to: str, tmp_path: Path) -> None:
    """Under names that are kept, where no mapping has refused them."""
    with pytest.raises(CkptError, match=r"has no key for the state GG\.0") as caught:
        convert(str(TRAINER), str(tmp_path / "out"), Reading(), Writing(to=to, dialect="keep"), Silent())
    assert caught.value.code == "E2001" and "--drop GG.0,GG.1,Q.0,Q.1" in str(caught.value.hint)
    writing = Writing(to=to, dialect="keep", drop=["GG.0", "GG.1", "Q.0", "Q.1"])
    convert(str(TRAINER), str(tmp_path / "out"), Reading(), writing, Silent())
    assert {key.partition("/")[0] for key in values(tmp_path / "out")[0]} == {"model", "exp_avg", "exp_avg_sq"}


def test_megatron_s_files_keep_all_states_where_parameters_stay_whole(tmp_path: Path) -> None:
    source = state(ONE)
    assert set(source[0]) == {"step", "exp_avg", "exp_avg_sq", *SQUARE}
    reshard(str(ONE), str(tmp_path / "pp2"), Reading(), Writing(degrees={"pp": 2}), Silent())
    for rank in range(2):
        found = state(tmp_path / "pp2", rank)
        assert len(found) == 4
        for number, one in found.items():
            want = source[4 * rank + number]
            assert one.keys() == want.keys() and one["step"] == want["step"] == 2
            assert all(torch.equal(one[word], want[word]) for word in want if word != "step")
    assert diff(str(ONE), str(tmp_path / "pp2"))["equal"]
    with pytest.raises(CkptError, match=r"no rule says how tensor ranks share .* \[L\]") as caught:
        reshard(str(ONE), str(tmp_path / "tp2"), Reading(), Writing(degrees={"tp": 2}), Silent())
    assert caught.value.code == "E0275"
    reshard(str(ONE), str(tmp_path / "tp2"), Reading(), Writing(degrees={"tp": 2}, drop=SQUARE), Silent())
    halves = [state(tmp_path / "tp2", rank)[0]["exp_avg"] for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), source[0]["exp_avg"])


def test_what_tensor_ranks_hold_of_a_shared_parameter_s_is_named_and_the_rest_can_be_had(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match=r"L of shape \[12, 12\] belongs to one rank's part \[12, 5\]") as caught:
        reshard(str(TWO), str(tmp_path / "out"), Reading(), Writing(degrees={"tp": 1}), Silent())
    assert caught.value.code == "E2004" and "--drop L,R,Q_L,Q_R" in str(caught.value.hint)
    done = reshard(str(TWO), str(tmp_path / "out"), Reading(), Writing(degrees={"tp": 1}, drop=SQUARE), Silent())
    assert {row["state"] for row in done["dropped"]} >= set(SQUARE)
    joined = state(tmp_path / "out")
    ranks = [state(TWO, rank) for rank in range(2)]
    for number, one in joined.items():
        assert one["step"] == 2 and not set(SQUARE) & set(one)
        halves = [rank[number]["exp_avg"] for rank in ranks]
        assert torch.equal(torch.sort(one["exp_avg"].flatten())[0], torch.sort(torch.cat(halves).flatten())[0])


def test_ranks_that_count_otherwise_are_refused() -> None:
    own = RankArray("w", 0, (2, 2), DTYPES["BF16"], ("w",), ())
    gathering: Any = Gathering()
    for step in (2, 2, 3):
        stored = {"optimizer": {"state": {0: {"step": step}}, "param_groups": []}}
        rank = _RankOptimizer(cast(Any, None), cast(Any, None), [], stored, "file", gathering)
        if step == 2:
            rank._add_plain_values([[own]])
            continue
        with pytest.raises(CkptError, match="on one rank") as caught:
            rank._add_plain_values([[own]])
        assert caught.value.code == "E0379"
    assert gathering.values == {"w": {"step": 2}}
