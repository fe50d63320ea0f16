"""Reading a Paddle job's files: any degrees against NumPy, and every way in which a job's files can be wrong."""

from __future__ import annotations

import json
import pickle

import numpy as np
import paddle_job as job
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paddle_job import TABLE, Job, write

from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.systems.paddle.job import PaddleHints


def values(path, **options):
    """(state, name) -> values of the catalog at `path`, bf16 as bits."""
    opened = open_source(str(path), Reading(**options))
    catalog = OpenCatalog(opened.tree, opened.catalog)
    out = {}
    for key in opened.catalog.tensors:
        array = catalog.state(key.state)[key.name].numpy()
        out[key.state, key.name] = array
    return opened.catalog, out


def same(have, want):
    assert have.keys() == want.keys()
    for key, array in want.items():
        got = have[key]
        assert got.shape == array.shape, key
        assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(array).tobytes(), key


JOBS = {
    "one": Job(),
    "fp32": Job(bf16=False),
    "tp2": Job(tp=2),
    "tp2pp2": Job(tp=2, pp=2),
    "sd3v1": Job(sharding=3),
    "sd2v2": Job(sharding=2, v2=True),
    "tp2sd2v2pp2": Job(tp=2, sharding=2, pp=2, v2=True),
    "moe_tp2": Job(tp=2, experts=4),
    "ep2": Job(sharding=2, ep=2, experts=4),
    "ep2v2": Job(sharding=4, ep=2, experts=4, v2=True),
    "ep4_over_tp": Job(tp=2, sharding=2, ep=4, experts=4),
    "ep2_local": Job(sharding=2, ep=2, experts=4, local_names=True),
    "ep4_over_tp_v2_pp": Job(tp=2, pp=2, sharding=4, ep=4, experts=4, v2=True),
}


@pytest.mark.parametrize("kind", ["plain", "io"])
@pytest.mark.parametrize("name", JOBS)
def test_values_are_the_jobs(name, kind, tmp_path):
    one = JOBS[name]
    io = kind == "io"
    if io and one.sharding == 1:
        pytest.skip("sharding_io wants sharding ranks")
    one.save(tmp_path, io=io)
    catalog, have = values(tmp_path)
    same(have, one.truth(io=io))
    degrees = catalog.hints.plain["degrees"]
    assert (degrees["tp"], degrees["pp"], degrees["ep"]) == (one.tp, one.pp, one.ep)
    assert catalog.hints.dialect == "paddle"
    if one.sharding > 1:
        assert catalog.hints.get(PaddleHints).sharding == ("v2" if one.v2 else "v1")
        assert catalog.hints.get(PaddleHints).sharding_degree == one.sharding


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tp=st.sampled_from([1, 2]),
    pp=st.integers(1, 3),
    sharding=st.integers(1, 3),
    v2=st.booleans(),
    bf16=st.booleans(),
    layers=st.integers(3, 4),
    io=st.booleans(),
    experts=st.sampled_from([0, 4]),
)
def test_any_degrees(tmp_path_factory, tp, pp, sharding, v2, bf16, layers, io, experts):
    one = Job(tp=tp, pp=pp, sharding=sharding, v2=v2 and sharding > 1, bf16=bf16, layers=layers, experts=experts)
    folder = tmp_path_factory.mktemp("job")
    io = io and sharding > 1
    one.save(folder, io=io)
    same(values(folder)[1], one.truth(io=io))


def test_averages_are_a_state(tmp_path):
    one = Job(tp=2, sharding=2, v2=True)
    one.save(tmp_path, ema=True)
    same(values(tmp_path)[1], one.truth(ema=True))


def test_an_average_of_an_fp32_parameter_goes_by_its_structured_name(tmp_path):
    one = Job()
    one.save(tmp_path)
    write(tmp_path / "ema.pdopt", {"model.norm.weight": ("x", np.arange(8, dtype="f4")), "master_weights": {}})
    have = values(tmp_path)[1]
    assert have["ema", "model.norm.weight"].tolist() == list(range(8))


def test_experts_over_data_ranks(tmp_path):
    """`moeNN`: every data rank has all dense tensors and its own experts."""
    for rank in (0, 1):
        w = np.arange(6, dtype="f4").reshape(2, 3)
        expert = f"model.layers.0.mlp.experts.{rank}.up_proj.weight"
        state = {"model.norm.weight": w[0], expert: w + 10 * (rank + 1)}
        table = {"model.norm.weight": "n.w_0", expert: "linear_0.w_0"}
        write(tmp_path / f"model_state.moe{rank:02d}.pdparams", {**state, TABLE: table})
        opt = {"linear_0.w_0_moment1_0": w + rank}
        if rank == 0:
            opt["n.w_0_moment1_0"] = w[0]
        write(tmp_path / f"optimizer.moe{rank:02d}.pdopt", {**opt, TABLE: {k: k for k in opt}})
    catalog, have = values(tmp_path)
    assert have["model", "model.layers.0.mlp.experts.1.up_proj.weight"][0, 0] == 20
    assert have["exp_avg", "model.layers.0.mlp.experts.1.up_proj.weight"][0, 0] == 1
    assert catalog.hints.get(Degrees).ep == 2
    assert len(catalog.tensors[TensorKey("model.norm.weight")].chunks) == 2


def test_copies_that_differ_are_found_when_read(tmp_path):
    one = Job(tp=2)
    one.save(tmp_path)
    file = tmp_path / "model_state.tp01.pdparams"
    state = pickle.loads(file.read_bytes())
    state["model.norm.weight"] = state["model.norm.weight"] + np.uint16(1)
    write(file, state)
    with pytest.raises(CkptError, match="differ"):
        values(tmp_path)


@pytest.mark.parametrize("turned", [False, True])
def test_a_tied_pair_has_its_optimizer_under_the_embeddings_name(tmp_path, turned):
    w = np.arange(12, dtype="f4").reshape(4, 3)
    names = {"model.embed_tokens.weight": "embedding_0.w_0", "lm_head.weight": "embedding_0.w_0"}
    names = dict(reversed(names.items())) if turned else names
    write(tmp_path / "model_state.pdparams", {**dict.fromkeys(names, w), TABLE: names})
    write(tmp_path / "optimizer.pdopt", {"embedding_0.w_0_moment1_0": w, TABLE: {}})
    catalog = open_source(str(tmp_path), Reading()).catalog
    assert {tuple(key) for key in catalog.tensors} == {
        ("model.embed_tokens.weight", "model"),
        ("lm_head.weight", "model"),
        ("model.embed_tokens.weight", "exp_avg"),
    }


def test_static_names_are_matched_by_the_longest(tmp_path):
    w = np.ones(2, "f4")
    names = {"a": "linear_1.w_0", "b": "linear_1.w_0_x", "c": "moe_gate_0"}
    write(tmp_path / "model_state.pdparams", {"a": w, "b": w + 1, "c": w + 2, TABLE: names})
    opt = {
        "linear_1.w_0_moment1_0": w,
        "linear_1.w_0_x_fp32_master_0_moment2_0": w,
        "moe_gate_0_velocity_0": w,
        "moe_gate_0_my_state_0": w,
    }
    masters = {"linear_1.w_0_x": ("linear_1.w_0_x_fp32_master_0", w)}
    write(tmp_path / "optimizer.pdopt", {**opt, "master_weights": masters, TABLE: {}})
    catalog = open_source(str(tmp_path), Reading()).catalog
    states = {tuple(key) for key in catalog.tensors if key.state not in ("model", "master")}
    assert states == {("a", "exp_avg"), ("b", "exp_avg_sq"), ("c", "momentum_buffer"), ("c", "my_state")}


@pytest.mark.parametrize("v2", [False, True])
def test_a_number_a_parameter_is_whole_on_every_rank(tmp_path, v2):
    one = Job(sharding=2, v2=v2)
    one.save(tmp_path, io=True)
    key = "linear_0.w_0_fp32_master_0_scale_0"
    for shard in (0, 1):
        _edit(tmp_path, f"optimizer.shard0{shard}.pdopt", lambda s: s.update({key: (key, np.array([7], "f4"))}))
    want = {**one.truth(io=True), ("scale", "model.embed_tokens.weight"): np.array([7], "f4")}
    same(values(tmp_path)[1], want)


# -- what nothing states -----------------------------------------------------------------------------------------------


def test_sizes_that_no_config_states_are_told_by_values(tmp_path):
    one = Job(tp=2)
    one.save(tmp_path, config=False)
    catalog, have = values(tmp_path)
    same(have, one.truth())
    assert any(note.code == "N1304" for note in catalog.notes)


def test_key_heads_that_all_ranks_have_are_told_by_values(tmp_path):
    one = Job(tp=2)
    for i in range(2):
        w, _, stage = one.parameters[f"model.layers.{i}.self_attn.k_proj.weight"]
        one.parameters[f"model.layers.{i}.self_attn.k_proj.weight"] = (w, job.copies, stage)
    one.save(tmp_path, config=False)
    same(values(tmp_path)[1], one.truth())


def test_a_config_may_be_given(tmp_path):
    one = Job(tp=2)
    one.save(tmp_path / "c", config=False)
    (tmp_path / "config.json").write_text(json.dumps(job.CONFIG))
    catalog, have = values(tmp_path / "c", config=str(tmp_path / "config.json"))
    same(have, one.truth())
    assert not catalog.notes


def test_bare_sixteen_bit_integers_are_asked_about(tmp_path):
    write(tmp_path / "m.pdparams", {"w": np.arange(4, dtype="u2")})
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path / "m.pdparams"), Reading())
    assert e.value.code == "E1314" and "--config" in (e.value.hint or "")
    (tmp_path / "c.json").write_text('{"torch_dtype": "bfloat16"}')
    catalog = open_source(str(tmp_path / "m.pdparams"), Reading(config=str(tmp_path / "c.json"))).catalog
    assert catalog.tensors[TensorKey("w")].dtype.name == "BF16"


def test_a_named_array_of_sixteen_bits_is_bfloat16(tmp_path):
    write(tmp_path / "m.pdparams", {"w": np.arange(4, dtype="u2"), TABLE: {"w": "linear_0.w_0"}})
    catalog = open_source(str(tmp_path / "m.pdparams"), Reading()).catalog
    assert catalog.tensors[TensorKey("w")].dtype.name == "BF16"


def test_float8_is_told_by_the_meta(tmp_path):
    one = Job(sharding=2, bf16=False)
    one.save(tmp_path, io=True)
    meta = json.loads((tmp_path / "model_meta.json").read_text())
    stage = meta["sharding_metas"]["tp00_pp00"]
    stage["param_meta"]["model.norm.weight"][1] = 17
    (tmp_path / "model_meta.json").write_text(json.dumps(meta))
    for file in tmp_path.glob("model_state*"):
        state = pickle.loads(file.read_bytes())
        if "model.norm.weight" in state:
            state["model.norm.weight"] = np.arange(8, dtype="i1")
            write(file, state)
    catalog = open_source(str(tmp_path), Reading()).catalog
    assert catalog.tensors[TensorKey("model.norm.weight")].dtype.name == "F8_E4M3"


# -- single files ------------------------------------------------------------------------------------------------------


def test_an_optimizer_alone_takes_names_from_the_model_beside_it(tmp_path):
    one = Job()
    one.save(tmp_path)
    catalog = open_source(str(tmp_path / "optimizer.pdopt"), Reading()).catalog
    assert TensorKey("model.norm.weight", "exp_avg") in catalog.tensors
    assert "model" not in catalog.states()
    (tmp_path / "model_state.pdparams").unlink()
    lone = open_source(str(tmp_path / "optimizer.pdopt"), Reading()).catalog
    assert any(note.code == "N1301" for note in lone.notes)
    assert TensorKey("linear_0.w_0", "master") in lone.tensors


def test_a_nested_file_is_named_by_where_tensors_hang(tmp_path):
    w = np.arange(6, dtype="f4").reshape(2, 3)
    write(tmp_path / "train.pd", {"model": {"fc.weight": ("linear_0.w_0", w)}, "epoch": 3})
    catalog = open_source(str(tmp_path / "train.pd"), Reading()).catalog
    assert [str(key) for key in catalog.tensors] == ["fc.weight"] and catalog.extras["epoch"] == 3


def test_one_ranks_file_alone_is_refused_but_leniently_shown(tmp_path):
    Job(tp=2).save(tmp_path)
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path / "model_state.tp01.pdparams"), Reading())
    assert e.value.code == "E0302"
    part = open_source(str(tmp_path / "model_state.tp01.pdparams"), Reading(lenient=True)).catalog
    assert part.tensors[TensorKey("model.layers.0.self_attn.q_proj.weight")].shape == (8, 4)


def test_an_adapter_is_read_with_its_config_beside(tmp_path):
    a = np.arange(16, dtype="f4").reshape(8, 2)
    b = np.arange(16, dtype="f4").reshape(2, 8) + 100
    o = np.arange(16, dtype="f4").reshape(8, 2) + 200
    q = "model.layers.0.self_attn.q_proj."
    w = "model.layers.0.self_attn.o_proj."
    for tp in (0, 1):
        state = {
            q + "lora_A": a,
            q + "lora_B": b[:, 4 * tp : 4 * tp + 4],
            w + "lora_A": o[4 * tp : 4 * tp + 4],
            w + "lora_B": b,
        }
        write(tmp_path / f"lora_model_state.tp{tp:02d}.pdparams", {**state, TABLE: {}})
    (tmp_path / "lora_config.json").write_text('{"r": 2}')
    catalog, have = values(tmp_path)
    want = {q + "lora_A": a, q + "lora_B": b, w + "lora_A": o, w + "lora_B": b}
    same(have, {("model", name): array for name, array in want.items()})
    assert catalog.sidefiles == ("lora_config.json",) and catalog.hints.get(PaddleHints).stem == "lora_model_state"


def test_a_model_in_two_files_is_one(tmp_path):
    for part, name in ((1, "a"), (2, "b")):
        write(
            tmp_path / f"model_state-0000{part}-of-00002.pdparams", {name: np.full(2, part, "f4"), TABLE: {name: name}}
        )
    assert set(values(tmp_path)[1]) == {("model", "a"), ("model", "b")}
    (tmp_path / "model_state-00002-of-00002.pdparams").unlink()
    fails(tmp_path, "E0302", "model_state-00002-of-00002.pdparams")


def test_side_files_and_files_of_the_job(tmp_path):
    Job().save(tmp_path)
    write(tmp_path / "scheduler.pdparams", {"last_epoch": 3, "last_lr": 0.5})
    write(tmp_path / "scaler.pdparams", {"scale": ("", np.array([2.0], "f4")), "incr_count": 4})
    for name in ("training_args.bin", "rng_state_0.pth", "trainer_state.bin"):
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")  # never opened
    catalog, have = values(tmp_path)
    assert catalog.extras["scheduler"]["last_epoch"] == 3 and catalog.extras["scaler"]["incr_count"] == 4
    assert catalog.extras["LR_Scheduler"] == {"last_epoch": 3, "last_lr": 0.5}
    assert have["extras", "scaler.scale"].tolist() == [2.0]
    assert not catalog.unsafe and any("training_args.bin" in note.message for note in catalog.notes)


# -- faults ------------------------------------------------------------------------------------------------------------


def fails(path, code, *words, **options):
    with pytest.raises(CkptError) as e:
        values(path, **options)
    text = " ".join([e.value.message, *(e.value.faults), e.value.hint or "", e.value.where()])
    assert e.value.code == code, (e.value.code, text)
    assert all(word in text for word in words), text
    assert e.value.path or e.value.key


@pytest.mark.parametrize(
    "lost", ["model_state.tp01_pp00.pdparams", "optimizer.tp01_pp01_shard01.pdopt", "optimizer.tp00_pp00_shard00.pdopt"]
)
def test_a_lost_file_is_named(tmp_path, lost):
    Job(tp=2, pp=2, sharding=2).save(tmp_path)
    (tmp_path / lost).unlink()
    fails(tmp_path, "E0302", lost)


def test_the_meta_tells_of_a_lost_last_rank(tmp_path):
    Job(sharding=3, v2=True).save(tmp_path, io=True)
    for file in tmp_path.glob("*shard02*"):
        file.unlink()
    fails(tmp_path, "E0302", "optimizer.shard02.pdopt")


def test_a_lone_first_rank_is_one_of_at_least_two(tmp_path):
    Job(tp=2).save(tmp_path)
    for file in tmp_path.glob("*tp01*"):
        file.unlink()
    fails(tmp_path, "E0302", "model_state.tp01.pdparams")


def test_a_lost_optimizer_is_told_by_the_ranks_marks(tmp_path):
    Job().save(tmp_path)
    (tmp_path / "saved_signal_0").write_text("1")
    (tmp_path / "optimizer.pdopt").unlink()
    fails(tmp_path, "E0302", "optimizer")
    assert open_source(str(tmp_path), Reading(lenient=True)).catalog.states() == ("model",)


def test_an_optimizer_without_any_names(tmp_path):
    Job(sharding=2).save(tmp_path, io=True)
    (tmp_path / "model_meta.json").unlink()
    fails(tmp_path, "E1313", "model_meta.json")


def test_a_static_name_in_no_table(tmp_path):
    write(tmp_path / "model_state.pdparams", {"a": np.ones(2, "f4"), TABLE: {"a": "linear_0.w_0"}})
    write(tmp_path / "optimizer.pdopt", {"linear_9.w_0_moment1_0": np.ones(2, "f4"), TABLE: {}})
    fails(tmp_path, "E1313", "linear_9.w_0_moment1_0")


def test_two_tensors_for_one_state(tmp_path):
    w = np.ones(2, "f4")
    write(tmp_path / "model_state.pdparams", {"a": w, TABLE: {"a": "linear_0.w_0"}})
    two = {"linear_0.w_0_moment1_0": w, "linear_0.w_0_fp32_master_0_moment1_0": w, TABLE: {}}
    write(tmp_path / "optimizer.pdopt", two)
    fails(tmp_path, "E1317", "linear_0.w_0_fp32_master_0_moment1_0")


def _edit(folder, name, change):
    file = folder / name
    state = pickle.loads(file.read_bytes())
    change(state)
    write(file, state)


def test_ranks_of_other_shapes(tmp_path):
    Job(tp=2).save(tmp_path)
    _edit(tmp_path, "model_state.tp01.pdparams", lambda s: s.update({"model.norm.weight": np.zeros(9, "u2")}))
    fails(tmp_path, "E0305", "model.norm.weight")


def test_ranks_of_other_names(tmp_path):
    Job(tp=2).save(tmp_path)
    _edit(
        tmp_path, "model_state.tp01.pdparams", lambda s: (s.pop("model.norm.weight"), s[TABLE].pop("model.norm.weight"))
    )
    fails(tmp_path, "E0305", "model.norm.weight")


def test_ranks_of_two_steps(tmp_path):
    Job(tp=2).save(tmp_path)
    _edit(tmp_path, "optimizer.tp01.pdopt", lambda s: s["LR_Scheduler"].update(last_epoch=4))
    fails(tmp_path, "E0305", "LR_Scheduler")


def test_states_of_another_model(tmp_path):
    Job().save(tmp_path)
    key = "linear_0.w_0_fp32_master_0_moment1_0"
    _edit(tmp_path, "optimizer.pdopt", lambda s: s.update({key: (key, np.zeros((20, 9), "f4"))}))
    fails(tmp_path, "E0305", "model.embed_tokens.weight")


@pytest.mark.parametrize("change", ["short", "long", "gap"])
def test_slices_that_do_not_add_up(tmp_path, change):
    Job(sharding=3, v2=True).save(tmp_path, io=True)
    key = "linear_0.w_0_fp32_master_0_moment1_0"

    def edit(state):
        if change == "gap":
            state.pop(key)
        else:
            state[key] = (key, np.zeros(3 if change == "short" else 4000, "f4"))

    _edit(tmp_path, "optimizer.shard01.pdopt", edit)
    fails(tmp_path, "E1316", "model.embed_tokens.weight")


def _meta(folder, change):
    file = folder / "model_meta.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


STAGE = "tp00_pp00"
METAS = {
    "an owner beyond the ranks": (
        "E1312",
        lambda m: m["sharding_metas"][STAGE]["param2rank"].update({"linear_0.w_0": 2}),
    ),
    "a negative owner": ("E1312", lambda m: m["sharding_metas"][STAGE]["param2rank"].update({"linear_0.w_0": -1})),
    "an owner that is no number": (
        "E1311",
        lambda m: m["sharding_metas"][STAGE]["param2rank"].update({"linear_0.w_0": True}),
    ),
    "a shape that is none": (
        "E1311",
        lambda m: m["sharding_metas"][STAGE]["param_meta"].update({"model.norm.weight": [[-1], 16, False, False]}),
    ),
    "a huge rank": (
        "E1311",
        lambda m: m["sharding_metas"][STAGE]["param_meta"].update({"model.norm.weight": [[1] * 99, 16, False, False]}),
    ),
    "another shape": (
        "E0305",
        lambda m: m["sharding_metas"][STAGE]["param_meta"].update({"model.norm.weight": [[9], 16, False, False]}),
    ),
    "a name that is no text": (
        "E1311",
        lambda m: m["sharding_metas"][STAGE]["structure_name_mapping"].update({"x": 3}),
    ),
    "no names": ("E1311", lambda m: m["sharding_metas"][STAGE].pop("structure_name_mapping")),
    "a strategy that is none": ("E1311", lambda m: m["sharding_metas"][STAGE].update(sharding_strategy="ShardingV3")),
    "a key that is none": ("E1311", lambda m: m["sharding_metas"].update({"tp0": {}})),
    "a rank beyond": ("E1312", lambda m: m["sharding_metas"].update({"tp07_pp00": m["sharding_metas"][STAGE]})),
    "a rank lost": ("E1312", lambda m: m["parallel_config"].update(mp_degree=2)),
    "a degree of nonsense": ("E1311", lambda m: m["parallel_config"].update(mp_degree=1 << 40)),
    "degrees of fewer ranks": ("E0305", lambda m: m["parallel_config"].update(sharding_degree=1)),
    "experts that do not part": ("E1312", lambda m: m["parallel_config"].update(ep_degree=4, moe_sharding_degree=3)),
    "a parameter that no file has": (
        "E0302",
        lambda m: (
            m["sharding_metas"][STAGE]["structure_name_mapping"].update({"lost": "linear_99.w_0"}),
            m["sharding_metas"][STAGE]["param2rank"].update({"linear_99.w_0": 1}),
        ),
    ),
}


@pytest.mark.parametrize("what", METAS)
def test_a_meta_that_is_wrong(tmp_path, what):
    code, change = METAS[what]
    one = Job(sharding=2)
    if what == "another shape":
        one = Job(sharding=2, tp=2)
    one.save(tmp_path, io=True)
    _meta(tmp_path, change)
    if what == "degrees of fewer ranks":
        _meta(tmp_path, lambda m: m["sharding_metas"][STAGE].update(param2rank={}))
    fails(tmp_path, code)


def test_a_meta_that_contradicts_the_files(tmp_path):
    Job(sharding=2, bf16=False).save(tmp_path, io=True)
    _meta(
        tmp_path,
        lambda m: m["sharding_metas"][STAGE]["structure_name_mapping"].update({"model.norm.weight": "linear_77.w_0"}),
    )
    fails(tmp_path, "E1312", "model.norm.weight")


def test_a_meta_of_another_dtype(tmp_path):
    Job(sharding=2, bf16=False).save(tmp_path, io=True)
    _meta(tmp_path, lambda m: m["sharding_metas"][STAGE]["param_meta"]["model.norm.weight"].__setitem__(1, 16))
    fails(tmp_path, "E1312", "model.norm.weight")


def test_frozen_parameters_are_named_in_a_note(tmp_path):
    Job(sharding=2).save(tmp_path, io=True)
    _meta(
        tmp_path, lambda m: m["sharding_metas"][STAGE]["structure_name_mapping"].update({"vision.weight": "conv_0.w_0"})
    )
    catalog, _ = values(tmp_path)
    assert any("vision.weight" in note.message for note in catalog.notes)


def test_the_older_meta_a_rank(tmp_path):
    one = Job(sharding=2)
    one.save(tmp_path, io=True)
    meta = one.meta()
    for key, stage in meta.pop("sharding_metas").items():
        for later in ("param_meta", "param_meta_keys", "sharding_strategy"):
            stage.pop(later)
        (tmp_path / f"shard_meta.{key}.json").write_text(json.dumps(stage))
    (tmp_path / "model_meta.json").write_text(json.dumps(meta))
    same(values(tmp_path)[1], one.truth(io=True))


def test_files_of_two_jobs(tmp_path):
    Job(tp=2).save(tmp_path)
    Job().save(tmp_path)
    fails(tmp_path, "E0305", "model_state")


def test_an_unknown_name_under_tensor_parallelism(tmp_path):
    for tp in (0, 1):
        w = np.arange(4, dtype="f4").reshape(2, 2) + tp
        write(tmp_path / f"model_state.tp{tp:02d}.pdparams", {"model.adapter.mix.weight": w, TABLE: {}})
    fails(tmp_path, "E1310", "model.adapter.mix.weight")


def test_a_pickle_that_asks_for_code_is_never_run(tmp_path):
    Job().save(tmp_path)
    (tmp_path / "scheduler.pdparams").write_bytes(b"cos\nsystem\n(S'touch /tmp/w-legacy-read-pwned'\ntR.")
    with pytest.raises(CkptError):
        values(tmp_path)
