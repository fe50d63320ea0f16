"""Muon and Lion by Megatron-LM: layer-wise files without names, buckets that hold what Muon leaves, chains of two.

The truth is what the live optimizers held (fixtures/make/megatron_muon.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.systems.megatron.args import facts_of
from ckpt_tool.systems.megatron.chains import SAYS_ADAM, chain_members, dealt, matrices_at
from ckpt_tool.systems.megatron.groups import chained, groups_of
from ckpt_tool.systems.megatron.job import RankArray

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILES = FIXTURES / "megatron" / "muon_files_tp2dp2"
FLAT = FIXTURES / "megatron-dist" / "muon_flat_pp2dp2"
LION = FIXTURES / "megatron" / "lion_files_tp2"
STATES = {FILES: "momentum_buffer", FLAT: "momentum_buffer", LION: "exp_avg"}


def held(path: Path) -> tuple[dict[str, torch.Tensor], OpenCatalog]:
    opened = open_source(str(path), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog)
    names = [key for key in opened.catalog.tensors if key.state not in ("extras", "step")]
    return {f"{key.state}/{key.name}": lazy.state(key.state)[key.name].torch() for key in names}, lazy


def same(path: Path, source: Path) -> OpenCatalog:
    """Hold `path` against the truth of `source`, both ways."""
    truth = load_file(source.with_name(source.name + ".truth.safetensors"))
    found, lazy = held(path)
    truth = {key: value for key, value in truth.items() if not key.startswith("step/")}
    assert found.keys() == truth.keys()
    assert not [key for key, value in truth.items() if not torch.equal(found[key], value)]
    return lazy


@pytest.mark.parametrize("source", STATES, ids=lambda path: path.name)
def test_every_state_has_its_name_and_comes_through_other_degrees_in_both_formats(source, tmp_path):
    lazy = same(source, source)
    matrices = {key.name for key in lazy.catalog.tensors if key.state == STATES[source]}
    assert "decoder.layers.1.mlp.linear_fc2.weight" in matrices
    for to, degrees in (("megatron-dist", {"tp": 1, "pp": 2}), ("megatron", {"tp": 2, "pp": 2})):
        out = tmp_path / to
        done = convert(str(source), str(out), Reading(), Writing(to=to, degrees=degrees), Silent())
        again = same(out, source)
        every = again.catalog.extras["optimizer"]
        chain = [every[at] for at in (0, 1)]  # list or dict: both optimizers keep what they say
        assert ["eps" in one["optimizer"]["param_groups"][0] for one in chain] == [False, True]
        assert any("written whole" in note for note in done["notes"]) == (to == "megatron" and source != LION)
        steps = {key.name for key in again.catalog.tensors if key.state == "step"}
        assert not steps & {"decoder.layers.1.mlp.linear_fc2.weight"}


def test_a_layer_wise_job_s_masters_lie_under_the_keys_of_their_optimizers(tmp_path):
    out = tmp_path / "out"
    convert(str(FLAT), str(out), Reading(), Writing(to="megatron-dist", degrees={"tp": 2, "pp": 1}), Silent())
    text = next(out.glob("iter_*/.metadata")).read_bytes()
    assert b"optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight" in text
    assert b"optimizer.state.param.embedding.word_embeddings.weight" in text
    assert b"optimizer.state.param.decoder.layers.mlp.linear_fc2.weight" not in text


@pytest.mark.parametrize(
    ("break_it", "code", "word"),
    [
        (lambda folder: (folder / "layer_wise_optimizer_1.pt").unlink(), "E0302", "layer_wise_optimizer_1.pt"),
        (
            lambda folder: shutil.copy(folder / "layer_wise_optimizer_0.pt", folder / "layer_wise_optimizer_1.pt"),
            "E2004",
            "groups hold",
        ),
    ],
    ids=["a share is missing", "a share is another's"],
)
def test_shares_that_are_not_the_rule_s_are_refused(break_it, code, word, tmp_path):
    copy = Path(shutil.copytree(FILES, tmp_path / "copy"))
    break_it(copy / "iter_0000002" / "mp_rank_01")
    with pytest.raises(CkptError) as e:
        held(copy)
    assert e.value.code == code
    assert word in e.value.message


def array(name: str, *shape: int) -> RankArray:
    return RankArray(name, 0, shape, DTYPES["BF16"], (name,), ())


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_adam_s_groups_say_so_where_a_newer_core_asks(to, tmp_path):
    """Files of core 0.17 don't, and 0.19 finds no group in them; what 0.19 wrote stays as it is."""
    source = open_source(str(FILES), Reading()).catalog.extras["optimizer"]
    assert not any("optimizer" in group for one in chained(source) for group in groups_of(one))
    done = convert(str(FILES), str(tmp_path / "out"), Reading(), Writing(to=to), Silent())
    muon, adam = map(groups_of, chained(open_source(str(tmp_path / "out"), Reading()).catalog.extras["optimizer"]))
    assert ["optimizer" in group for group in muon] == [False] and SAYS_ADAM in done["notes"]
    assert [(group["optimizer"], group["wd_mult"]) for group in adam] == [("adam", 1.0), ("adam", 0.0)]
    again = convert(str(FLAT), str(tmp_path / "flat"), Reading(), Writing(to=to), Silent())
    assert SAYS_ADAM not in again["notes"]


def test_shares_are_dealt_as_megatron_says_in_its_own_example():
    names = [array(f"decoder.layers.{i}.mlp.linear_fc1.weight", i + 1, 1) for i in range(10)]
    chain = [{"optimizer": {"param_groups": [{"wd_mult": 1.0}]}}]
    members = chain_members(chain, names, facts_of({}))
    found = [[names.index(a) for a in dealt(members, chain, (rank, 4), (0, 1))[0][0]] for rank in range(4)]
    assert found == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]  # layer_wise_optimizer.py, _shard_params_ping_pong


def test_parallel_experts_are_dealt_apart_and_the_rest_is_told_by_its_norms():
    dense = array("decoder.layers.0.self_attention.linear_proj.weight", 4, 4)
    norm = array("decoder.final_layernorm.weight", 4)
    experts = [array(f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc1.weight", 2, 2) for e in range(2)]
    rest = {"optimizer": {"param_groups": [{"wd_mult": 0.0}]}}
    muon = {"optimizer": {"param_groups": [{"wd_mult": 1.0}, {"wd_mult": 1.0, "is_expert_parallel": True}]}}
    facts = facts_of({})
    assert (matrices_at([muon, rest], facts), matrices_at([rest, muon], facts)) == (0, 1)
    members = chain_members([muon, rest], [dense, norm, *experts], facts)
    assert members == [[[dense], experts], [[norm]]]
    assert dealt(members, [muon, rest], (1, 2), (0, 2)) == [[[dense], experts[:1]], [[]]]


def test_data_ranks_of_context_parallel_groups_wrote_over_each_other():
    from ckpt_tool.systems.megatron.chains import shares_beside
    from ckpt_tool.systems.megatron.job import MegatronRank

    degrees = {"tp": 1, "ep": 1, "etp": 1, "dp": 2, "cp": 2}
    tree = SimpleNamespace(display=lambda path: path)
    with pytest.raises(CkptError) as e:
        list(shares_beside("mp_rank_00", MegatronRank("mp_rank_00", 0, 0, 0, 0), degrees, {}, tree))
    assert e.value.code == "E2002"
