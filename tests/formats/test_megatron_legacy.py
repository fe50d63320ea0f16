"""Legacy Megatron folders made by torch and slicing (`megatron_oracle`): read, resharded, and read back by
`torch.load`."""

from __future__ import annotations

import enum
import importlib.util
import io
import shutil
import sys
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source

_spec = importlib.util.spec_from_file_location("megatron_oracle", Path(__file__).with_name("megatron_oracle.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
MOE = FIXTURES / "moe_tp2ep2etp1"
ADAMW = FIXTURES / "gpt2_tied_pp2_adamw"


def write(source, out, *, split=(), dtypes=None, keep=(), vocab=None, **degrees):
    more = {} if vocab is None else {"vocab_size": vocab}
    writing = Writing(to="megatron", degrees=degrees, pp_split=split, keep_keys=keep, verify="full", **more)
    return convert(str(source), str(out), Reading(), writing, Silent())


def equal(a, b):
    found = diff(str(a), str(b), Reading(), progress=Silent())
    return found["differences"][:3]


def values(path):
    opened = open_source(str(path), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog)
    out = {}
    for key in opened.catalog.tensors:
        out[key.state, key.name] = lazy.state(key.state)[key.name].torch()
    return out


def rank_model(folder, name):
    return oracle.load(folder / name / "model_optim_rng.pt")["model"]


# -- reading -----------------------------------------------------------------------------------------------------------


def dense_job(root, layers=3, tp=2, pp=1, *, te=False, tied=False):
    """A model alone over tensor ranks and even stages."""
    whole = oracle.model(layers, tied=tied)
    states = {}
    own = layers // pp
    for p in range(pp):
        for t in range(tp):
            chunk = OrderedDict()
            for name, tensor in whole.items():
                words = name.split(".")
                if words[0] == "decoder" and words[1] == "layers":
                    if int(words[2]) // own != p:
                        continue
                    words[2] = str(int(words[2]) % own)
                elif p != (0 if name.startswith("embedding") else pp - 1):
                    continue
                local = ".".join(words)
                if te:
                    local = local.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
                    local = local.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
                chunk[local] = oracle.share(name, tensor, t, tp).to(torch.bfloat16).clone()
            if tied and p == pp - 1 and pp > 1:
                embedding = whole["embedding.word_embeddings.weight"]
                chunk["output_layer.weight"] = oracle.share("output_layer.weight", embedding, t, tp).bfloat16().clone()
            folder = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            states[folder] = {"model": chunk}
    args = oracle.arguments(layers, tied=tied, tp=tp, pp=pp)
    if te:
        args.transformer_impl = "transformer_engine"
    oracle.save(root, states, args)
    return whole


@pytest.mark.parametrize(
    ("tp", "pp", "te", "tied"), [(2, 1, False, False), (2, 3, True, False), (1, 3, False, True), (2, 3, True, True)]
)
def test_reads_what_slicing_cut(tmp_path, tp, pp, te, tied):
    whole = dense_job(tmp_path / "a", tp=tp, pp=pp, te=te, tied=tied)
    read = values(tmp_path / "a")
    assert {name for _, name in read} == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(read["model", name], tensor.to(torch.bfloat16)), name


def test_writes_what_slicing_cuts(tmp_path):
    whole = dense_job(tmp_path / "a", layers=4, tp=1, te=True)
    write(tmp_path / "a", tmp_path / "b", tp=2, pp=2, vpp=2)
    folder = tmp_path / "b" / "iter_0000007"
    assert sorted(p.name for p in folder.iterdir()) == [
        "mp_rank_00_000",
        "mp_rank_00_001",
        "mp_rank_01_000",
        "mp_rank_01_001",
    ]
    state = oracle.load(folder / "mp_rank_01_001" / "model_optim_rng.pt")
    first = state["model0"]
    second = state["model1"]
    assert "model" not in state and "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in first
    name = "decoder.layers.3.mlp.linear_fc1.weight"  # chunk 1 of stage 1 holds layer 3 alone
    assert torch.equal(
        second["decoder.layers.0.mlp.linear_fc1.weight"], oracle.share(name, whole[name], 1, 2).bfloat16()
    )
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    assert torch.equal(
        first["decoder.layers.0.self_attention.linear_proj.weight"], oracle.share(name, whole[name], 1, 2).bfloat16()
    )
    assert torch.equal(second["output_layer.weight"], whole["output_layer.weight"][8:].bfloat16())
    assert first["decoder.layers.0.mlp.linear_fc1._extra_state"] is None
    args = state["args"]
    assert (args.tensor_model_parallel_size, args.virtual_pipeline_model_parallel_size, args.world_size) == (2, 2, 4)
    assert args.num_layers_per_virtual_pipeline_stage == 1 and args.rank == 3
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "7"


def test_containers_of_experts_are_one_model(tmp_path):
    """SequentialMLP, TEGroupedMLP and GroupedMLP of the same experts read alike, and GroupedMLP is written back as it
    was."""
    whole = oracle.model(2, experts=4)
    for kind in ("sequential", "te", "grouped"):
        states = {}
        for e in range(2):
            chunk = OrderedDict()
            for name, tensor in whole.items():
                if ".local_experts." not in name:
                    chunk[name] = tensor.bfloat16()
                    continue
                front, _, rest = name.partition("local_experts.")
                number, _, leaf = rest.partition(".")
                if int(number) // 2 != e:
                    continue
                own = int(number) % 2
                if kind == "sequential":
                    chunk[f"{front}local_experts.{own}.{leaf}"] = tensor.bfloat16()
                elif kind == "te":
                    chunk[f"{front}{leaf}{own}"] = tensor.bfloat16()
                elif own == 0:
                    pair = torch.stack([whole[name], whole[f"{front}local_experts.{int(number) + 1}.{leaf}"]])
                    turned = pair.transpose(1, 2).contiguous().bfloat16()
                    which = leaf[9]
                    shape = (oracle.HIDDEN, -1) if which == "1" else (-1, oracle.HIDDEN)
                    chunk[f"{front}weight{which}"] = turned.reshape(shape)
            states[f"mp_rank_00_00{e}"] = {"model": chunk}
        args = oracle.arguments(2, experts=4, ep=2)
        args.moe_grouped_gemm = kind != "sequential"
        args.transformer_impl = "transformer_engine" if kind == "te" else "local"
        oracle.save(tmp_path / kind, states, args)
    for kind in ("sequential", "te", "grouped"):
        read = values(tmp_path / kind)
        assert {name for _, name in read} == set(whole), kind
        for name, tensor in whole.items():
            assert torch.equal(read["model", name], tensor.bfloat16()), (kind, name)
        write(tmp_path / kind, tmp_path / f"{kind}_4", ep=4, dp=4, tp=2)
        write(tmp_path / f"{kind}_4", tmp_path / f"{kind}_back", ep=2, dp=2)
        for e in range(2):
            a = rank_model(tmp_path / kind / "iter_0000007", f"mp_rank_00_00{e}")
            b = rank_model(tmp_path / f"{kind}_back" / "iter_0000007", f"mp_rank_00_00{e}")
            own = {k: v for k, v in b.items() if v is not None}
            assert a.keys() == own.keys() and all(torch.equal(a[k], own[k]) for k in a), kind


# -- there and back, every degree alone and all at once ----------------------------------------------------------------


LAYOUTS = [
    {"tp": 1, "ep": 1, "dp": 1},
    {"tp": 2, "ep": 1, "dp": 1},
    {"tp": 1, "pp": 2, "ep": 2, "dp": 2},
    {"tp": 1, "ep": 4, "dp": 4},
    {"tp": 1, "pp": 2, "vpp": 2, "ep": 1},
    {"tp": 2, "ep": 2, "etp": 2, "dp": 2},
    {"tp": 4, "etp": 2, "ep": 2, "dp": 3},
    {"tp": 2, "pp": 2, "vpp": 2, "ep": 4, "etp": 1, "dp": 4},
    {"tp": 1, "pp": 3, "split": (1, 2, 1)},
]
WHERE = {"moe": (MOE, {"tp": 2, "ep": 2, "etp": 1, "dp": 2}), "adamw": (ADAMW, {"pp": 2, "dp": 1})}


@pytest.mark.share(6)
@pytest.mark.parametrize(
    ("which", "layout"),
    [
        (which, layout)
        for which in WHERE
        for layout in LAYOUTS
        if which == "moe" or (layout.get("ep", 1) == 1 and "etp" not in layout)
    ],
)
def test_there_and_back_is_the_same_bit_for_bit(tmp_path, which, layout):
    source, home = WHERE[which]
    degrees = {k: v for k, v in layout.items() if k != "split"}
    write(source, tmp_path / "x", split=layout.get("split", ()), **degrees)
    assert not equal(source, tmp_path / "x")
    write(tmp_path / "x", tmp_path / "back", **home)
    assert not equal(source, tmp_path / "back")
    for file in sorted(source.rglob("*.pt")):
        mine = tmp_path / "back" / file.relative_to(source)
        assert not list(differences(oracle_load(file), oracle_load(mine), "")), file.name
    shutil.rmtree(tmp_path / "x")


class _Stand:
    def __init__(self, *args):
        self.args = args

    def __eq__(self, other):
        return self.args == other.args


def oracle_load(path):
    """torch.load with Megatron's enums stood in for."""
    import pickle

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return _Stand if module.startswith("megatron") else super().find_class(module, name)

    class Module:
        __name__ = "pickle"
        load = staticmethod(lambda f, **k: Unpickler(f, **k).load())

    Module.Unpickler = Unpickler
    return torch.load(path, weights_only=False, pickle_module=Module)


IGNORED = ("local_rank", "rng_state")  # the rank's place on its node; RNG states belong to the layout


def differences(a, b, at):
    if any(word in at for word in IGNORED):
        return
    if hasattr(a, "__dict__") and type(a).__name__ == "Namespace":
        a = vars(a)
        b = vars(b)
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            yield at
    elif isinstance(a, dict):
        if set(a) - {"rng_state"} != set(b) - {"rng_state"}:
            yield at, set(a) ^ set(b)
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield at, len(a), len(b)
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{at}[{i}]")
    elif isinstance(a, np.ndarray):
        if not np.array_equal(a, b):
            yield at
    elif a != b:
        yield at, a, b


def test_rng_states_stay_with_their_layout(tmp_path):
    same = write(MOE, tmp_path / "same", tp=2, ep=2, etp=1, dp=2)
    kept = oracle_load(tmp_path / "same/iter_0000002/mp_rank_01_001/model_optim_rng.pt")["rng_state"]
    want = oracle_load(MOE / "iter_0000002/mp_rank_01_001/model_optim_rng.pt")["rng_state"]
    assert torch.equal(kept[0]["torch_rng_state"], want[0]["torch_rng_state"])
    assert np.array_equal(kept[0]["np_rng_state"][1], want[0]["np_rng_state"][1])
    assert kept[0]["random_rng_state"] == want[0]["random_rng_state"]
    other = write(MOE, tmp_path / "other", tp=1, ep=1)
    assert "rng_state" not in oracle_load(tmp_path / "other/iter_0000002/mp_rank_00/model_optim_rng.pt")
    assert any("RNG" in note for note in other["notes"]) and not any("RNG" in note for note in same["notes"])


def test_experts_optimizer_splits_and_merges(tmp_path):
    write(MOE, tmp_path / "one", tp=1, ep=1)
    merged = oracle_load(tmp_path / "one/iter_0000002/mp_rank_00/model_optim_rng.pt")["optimizer"]
    assert isinstance(merged, dict) and not any(g["is_expert_parallel"] for g in merged["optimizer"]["param_groups"])
    write(tmp_path / "one", tmp_path / "four", tp=1, ep=4, dp=4)
    dense, experts = oracle_load(tmp_path / "four/iter_0000002/mp_rank_00_003/model_optim_rng.pt")["optimizer"]
    assert [g["wd_mult"] for g in dense["optimizer"]["param_groups"]] == [1.0, 0.0]
    assert [(g["wd_mult"], g["is_expert_parallel"]) for g in experts["optimizer"]["param_groups"]] == [(1.0, True)]
    flat = oracle_load(tmp_path / "four/iter_0000002/mp_rank_00_003/distrib_optim.pt")
    assert flat[0] is None and list(flat[1]) == ["buckets_coalesced", 0]


# -- vocabulary --------------------------------------------------------------------------------------------------------


def test_vocabulary_is_padded_and_cut_as_megatron_does_and_comes_back(tmp_path):
    dense_job(tmp_path / "a", tp=1)  # 16 rows of 15, multiple 4
    report = write(tmp_path / "a", tmp_path / "b", tp=4)
    assert not equal(tmp_path / "a", tmp_path / "b") and report["notes"] == []
    cut = oracle.arguments(3)
    cut.vocab_size = 10  # 12 rows at tp 1, 16 at tp 4
    states = {"mp_rank_00": {"model": rank_model(tmp_path / "a/iter_0000007", "mp_rank_00")}}
    oracle.save(tmp_path / "c", states, cut)
    report = write(tmp_path / "c", tmp_path / "d", tp=1)
    assert rank_model(tmp_path / "d/iter_0000007", "mp_rank_00")["output_layer.weight"].shape[0] == 12
    assert any("12 rows" in note for note in report["notes"]) and not equal(tmp_path / "c", tmp_path / "d")
    write(tmp_path / "d", tmp_path / "e", tp=4)
    assert not equal(tmp_path / "c", tmp_path / "e")
    small = {
        "mp_rank_00": {
            "model": {
                k: v[:12] if "word" in k or "output" in k else v for k, v in states["mp_rank_00"]["model"].items()
            }
        }
    }
    oracle.save(tmp_path / "f", small, cut)
    write(tmp_path / "f", tmp_path / "g", tp=4)
    last = rank_model(tmp_path / "g/iter_0000007", "mp_rank_03")["embedding.word_embeddings.weight"]
    assert last.shape[0] == 4 and not last.any() and not equal(tmp_path / "f", tmp_path / "g")


def test_an_unknown_vocabulary_is_asked_for(tmp_path, monkeypatch):
    """18 rows on 3 ranks, multiple 2: 13 to 18 words, which are 16 or 20 rows on 2 ranks."""
    monkeypatch.setattr(oracle, "VOCAB", 18)
    dense_job(tmp_path / "a", tp=3)
    for rank in range(3):
        edited(tmp_path / f"a/iter_0000007/mp_rank_0{rank}/model_optim_rng.pt", _unknown_vocabulary)
    write(tmp_path / "a", tmp_path / "one", tp=1)  # 18 is a size that one rank can have
    with pytest.raises(CkptError, match="16 or 20 rows") as e:
        write(tmp_path / "a", tmp_path / "two", tp=2)
    assert e.value.exit_code == 2 and "--vocab-size" in e.value.hint
    write(tmp_path / "a", tmp_path / "two", tp=2, vocab=15)
    rows = rank_model(tmp_path / "two/iter_0000007", "mp_rank_01")["output_layer.weight"]
    want = oracle.counting(18, oracle.HIDDEN, start=19)[8:15].bfloat16()
    assert rows.shape[0] == 8 and torch.equal(rows[:7], want) and not rows[7].any()


def _unknown_vocabulary(state):
    state["args"].vocab_size, state["args"].make_vocab_size_divisible_by = None, 2


# -- what can't be, and what is broken ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "code", "hint"),
    [
        ({"tp": 3}, "E0273", "2, 4"),
        ({"pp": 3}, "E0272", "2, 4"),
        ({"ep": 3, "dp": 3}, "E0274", "2, 4"),
        ({"tp": 1, "etp": 2}, "E0274", "megatron-dist"),
        ({"vpp": 2}, "E0272", "--pp"),
        ({"tp": 8, "ep": 1}, "E0273", "2, 4"),
    ],
)
def test_a_degree_that_the_model_cant_take(tmp_path, degrees, code, hint):
    with pytest.raises(CkptError) as e:
        write(MOE, tmp_path / "x", **degrees)
    assert (e.value.exit_code, e.value.code) == (2, code) and hint in e.value.hint, (e.value, e.value.hint)
    assert not (tmp_path / "x").exists()


def broken(tmp_path, source=MOE):
    shutil.copytree(source, tmp_path / "s")
    return tmp_path / "s" / "iter_0000002"


def refused(path, words, code=3, hint=""):
    with pytest.raises(CkptError, match=words) as e:
        convert(str(path), str(path) + "_out", Reading(), Writing(to="sharded"), Silent())
    assert e.value.exit_code == code and hint in (e.value.hint or ""), (e.value, e.value.hint)
    assert e.value.path or e.value.key


def test_a_missing_rank_is_named(tmp_path):
    folder = broken(tmp_path)
    shutil.rmtree(folder / "mp_rank_01_001")
    refused(tmp_path / "s", "mp_rank_01_001")


def test_ranks_that_megatron_never_wrote_are_named_as_such(tmp_path):
    """Core up to 0.18 with TP 2, EP 1, ETP 1 wrote tensor rank 0 alone."""
    whole = oracle.model(2, experts=2)
    chunk = OrderedDict(
        (k, oracle.share(k, v, 0, 2 if ".experts." not in k else 1).bfloat16()) for k, v in whole.items()
    )
    oracle.save(tmp_path / "a", {"mp_rank_00": {"model": chunk}}, oracle.arguments(2, experts=2, tp=2, etp=1, dp=1))
    refused(tmp_path / "a", "mp_rank_01", hint="4200")


def edited(file, change):
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.__setitem__("iteration", 8), "iteration"),
        (lambda s: s["model"].__setitem__("decoder.layers.0.mlp.linear_fc2.weight", torch.zeros(8, 5)), "one rank has"),
        (lambda s: [s["model"].pop(k) for k in list(s["model"]) if ".layers.2." in k], "elements are in no file"),
        (lambda s: s["model"].__setitem__("decoder.layers.0.mixer.in_proj.weight", torch.zeros(8, 5)), "no rule"),
    ],
)
def test_ranks_that_contradict_each_other(tmp_path, change, words):
    dense_job(tmp_path / "a", tp=2)
    edited(tmp_path / "a/iter_0000007/mp_rank_01/model_optim_rng.pt", change)
    refused(tmp_path / "a", words)


def test_layers_that_are_not_there(tmp_path):
    dense_job(tmp_path / "a", tp=1)
    edited(
        tmp_path / "a/iter_0000007/mp_rank_00/model_optim_rng.pt",
        lambda s: [s["model"].pop(k) for k in list(s["model"]) if ".layers.2." in k],
    )
    refused(tmp_path / "a", "2 layers, the arguments say 3")


def test_replicas_that_differ(tmp_path):
    dense_job(tmp_path / "a", tp=2)
    edited(
        tmp_path / "a/iter_0000007/mp_rank_01/model_optim_rng.pt",
        lambda s: s["model"]["decoder.final_layernorm.weight"].add_(1),
    )
    refused(tmp_path / "a", "differ")


def test_tied_weights_that_differ(tmp_path):
    dense_job(tmp_path / "a", tp=1, pp=3, tied=True)
    edited(
        tmp_path / "a/iter_0000007/mp_rank_00_002/model_optim_rng.pt",
        lambda s: s["model"]["output_layer.weight"].add_(1),
    )
    refused(tmp_path / "a", "differ")


def numbered(chunk, step=2.0, **wrong):
    """The non-distributed optimizer's state of a model chunk, by hand."""
    decay = [k for k, v in chunk.items() if v.dim() > 1]
    names = decay + [k for k, v in chunk.items() if v.dim() == 1]
    state = {
        i: {"step": torch.tensor(step), "exp_avg": chunk[k].float() + 1, "exp_avg_sq": chunk[k].float() + 2}
        for i, k in enumerate(names)
    }
    groups = [
        {"wd_mult": 1.0, "params": list(range(len(decay))), "step": 2},
        {"wd_mult": 0.0, "params": list(range(len(decay), len(names))), "step": wrong.get("step", 2)},
    ]
    masters = [[chunk[k].float() for k in names[: len(decay)]], [chunk[k].float() for k in names[len(decay) :]]]
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}


def job_with_optimizer(root, change=lambda optimizer: None, **wrong):
    dense_job(root, tp=1)
    file = root / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["optimizer"] = numbered(state["model"], **wrong)
    change(state["optimizer"])
    torch.save(state, file)


def test_numbered_arrays_get_their_names(tmp_path):
    job_with_optimizer(tmp_path / "a")
    read = values(tmp_path / "a")
    for (state, name), value in read.items():
        if state in ("exp_avg", "exp_avg_sq", "master"):
            more = {"exp_avg": 1, "exp_avg_sq": 2, "master": 0}[state]
            assert torch.equal(value, read["model", name].float() + more), (state, name)
    assert {state for state, _ in read} == {"model", "master", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o["optimizer"]["state"][3].__setitem__("exp_avg", torch.zeros(3, 3)), "exp_avg of shape"),
        (lambda o: o["optimizer"]["param_groups"][0]["params"].pop(), "groups hold"),
        (lambda o: o["optimizer"]["state"].__setitem__(99, {"exp_avg": torch.zeros(2)}), "has no parameter"),
        (lambda o: o["optimizer"]["param_groups"][1].__setitem__("step", 3), "step counters disagree"),
    ],
)
def test_an_optimizer_that_does_not_fit(tmp_path, change, words):
    job_with_optimizer(tmp_path / "a", change)
    refused(tmp_path / "a", words)


def test_a_flat_buffer_of_another_length(tmp_path):
    dense_job(tmp_path / "a", tp=1)
    file = tmp_path / "a/iter_0000007/mp_rank_00/model_optim_rng.pt"
    edited(file, lambda s: s.__setitem__("optimizer", {"optimizer": {"param_groups": [{"wd_mult": 1.0}]}}))
    world = {key: torch.zeros(100) for key in ("param", "exp_avg", "exp_avg_sq")} | {"numel_unpadded": 100}
    torch.save(
        {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): world}}, file.with_name("distrib_optim.pt")
    )
    refused(tmp_path / "a", "flat buffers of", hint="--state model")


def test_the_form_before_february_2024_is_named(tmp_path):
    dense_job(tmp_path / "a", tp=1)
    file = tmp_path / "a/iter_0000007/mp_rank_00/distrib_optim.pt"
    torch.save({0: {torch.float32: {"param": [torch.zeros(100)]}}}, file)
    refused(tmp_path / "a", "another form", hint="2024-02-13")


# -- what Megatron has no place for ------------------------------------------------------------------------------------


def test_an_ema_is_cut_like_its_parameter(tmp_path):
    whole = oracle.model(2)
    state = {"model": {k: v.bfloat16() for k, v in whole.items()}, "ema": {k: v + 0.5 for k, v in whole.items()}}
    torch.save(state, tmp_path / "plain.pt")
    write(tmp_path / "plain.pt", tmp_path / "a", tp=2, pp=2)
    assert not equal(tmp_path / "plain.pt", tmp_path / "a")
    own = oracle.load(
        tmp_path / "a/iter_0000000/mp_rank_01_001/model_optim_rng.pt"
        if (tmp_path / "a/iter_0000000").exists()
        else tmp_path / "a/release/mp_rank_01_001/model_optim_rng.pt"
    )
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(
        own["ckpt"]["states"][0]["ema"][name.replace(".1.", ".0.")], oracle.share(name, whole[name], 1, 2) + 0.5
    )


def test_extra_states_that_hold_something_are_told_to_stay_behind(tmp_path):
    dense_job(tmp_path / "a", tp=1, te=True)
    name = "decoder.layers.0.self_attention.linear_qkv._extra_state"

    def scales(state):
        state["model"][name] = io.BytesIO(b"scale")
        state["model"][name.replace(".0.", ".1.")] = torch.zeros(3, dtype=torch.uint8)

    edited(tmp_path / "a/iter_0000007/mp_rank_00/model_optim_rng.pt", scales)
    notes = open_source(str(tmp_path / "a"), Reading()).catalog.notes
    assert any(note.key == name and "2 extra states" in note.message for note in notes)
    write(tmp_path / "a", tmp_path / "b", tp=2)
    chunk = rank_model(tmp_path / "b/iter_0000007", "mp_rank_01")
    assert chunk[name] is None and "decoder.layers.0.mlp.linear_fc1._extra_state" not in chunk


def test_a_model_alone_has_no_optimizer(tmp_path):
    writing = Writing(to="megatron", degrees={"tp": 2}, states=("model", "extras"))
    report = convert(str(MOE), str(tmp_path / "m"), Reading(), writing, Silent())
    state = oracle_load(tmp_path / "m/iter_0000002/mp_rank_01/model_optim_rng.pt")
    assert "optimizer" not in state and any("hyperparameters" in note for note in report["notes"])
    assert not list((tmp_path / "m").rglob("distrib_optim.pt"))


def test_removed_keys_take_their_moments_along(tmp_path):
    writing = Writing(to="megatron", degrees={"tp": 2}, remove_keys=("decoder.layers.3.*",))
    convert(str(MOE), str(tmp_path / "m"), Reading(), writing, Silent())
    read = values(tmp_path / "m")
    assert ("master", "decoder.layers.2.mlp.router.weight") in read and not any(
        ".layers.3." in name for _, name in read
    )
    args = oracle_load(tmp_path / "m/iter_0000002/mp_rank_01/model_optim_rng.pt")["args"]
    assert args.num_layers == 3


def test_megatron_objects_among_the_arguments(tmp_path, monkeypatch):
    """Enums travel, a parsed pipeline layout becomes its text, what is of no known class is named and left out."""
    made = {}
    for parent in ("megatron", "megatron.core", "megatron.core.transformer", "megatron.training"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for module, names in (
        ("megatron.core.transformer.enums", ("CudaGraphScope",)),
        ("megatron.core.transformer.pipeline_parallel_layer_layout", ("PipelineParallelLayerLayout",)),
        ("megatron.training.odd", ("Odd",)),
    ):
        stand = types.ModuleType(module)
        for name in names:
            if name == "CudaGraphScope":
                kind = enum.Enum(name, {"full_iteration": 1, "attn": 2}, module=module, qualname=name)
            else:
                kind = type(name, (), {"__module__": module})
            setattr(stand, name, kind)
            made[name] = kind
        monkeypatch.setitem(sys.modules, module, stand)
    dense_job(tmp_path / "a", layers=3, tp=1)
    layout = made["PipelineParallelLayerLayout"]()
    layout.input_data = "Et|ttL"

    def change(state):
        args = state["args"]
        args.cuda_graph_scope = [made["CudaGraphScope"].attn]
        args.pipeline_model_parallel_layout = layout
        args.odd = made["Odd"]()

    edited(tmp_path / "a/iter_0000007/mp_rank_00/model_optim_rng.pt", change)
    report = write(tmp_path / "a", tmp_path / "b", tp=2)
    args = oracle.load(tmp_path / "b/iter_0000007/mp_rank_01/model_optim_rng.pt")["args"]
    assert args.cuda_graph_scope == [made["CudaGraphScope"].attn] and not hasattr(args, "odd")
    assert args.pipeline_model_parallel_layout is None  # it was made for two stages
    assert any("args without odd" in note for note in report["notes"])
    write(tmp_path / "a", tmp_path / "c", pp=2, split=(1, 2))
    args = oracle.load(tmp_path / "c/iter_0000007/mp_rank_00_001/model_optim_rng.pt")["args"]
    assert args.decoder_first_pipeline_num_layers == 1
