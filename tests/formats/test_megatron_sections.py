"""Recurrent layers, towers and prefixes in Megatron's formats. The recurrent ones are held against files that
megatron-core 0.19.2 wrote (`fixtures/make/megatron_sections.py`): the same keys, boxes, ranks and values in both
directions; models that see against slicing by hand."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from writings import writing_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import Incomplete, UnmappedTensor, UsageError
from ckpt_tool.formats.dcp_container.dcp_metadata import METADATA, read_listing
from ckpt_tool.formats.state_dict.content import read_content
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.args import updated
from ckpt_tool.systems.megatron.stages import from_args, from_counts
from ckpt_tool.systems.megatron.torch_dist.keys import name_of, parse, styles_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
DIST = FIXTURES / "megatron-dist"
RANKS = FIXTURES / "megatron" / "hybrid_tp2pp2"
STEP = "iter_0000002"
MIXER = {"in_proj.weight": (42, 4), "out_proj.weight": (4, 12), "A_log": (6,), "conv1d_weight": (24, 1, 4)}


def write(source, target, to, *, keep=(), split=(), spec=None, **degrees):
    writing = writing_of(
        to=to, degrees=degrees, pp_split=split, spec=spec, keep_keys=keep, verify="full", dialect="keep"
    )
    return convert(str(source), str(target), Reading(), writing, Silent())


def differences(a, b):
    return diff(str(a), str(b), Reading(), progress=Silent())["differences"][:3]


def listing(folder):
    return read_listing(Tree(folder), "", (METADATA,))


def boxes(folder):
    """Key -> (shape, its boxes) of every tensor in `.metadata`."""
    found = {}
    for key, entry in listing(folder).tensors.items():
        found[key] = (entry.shape, Counter((piece.offset, piece.shape) for piece in entry.pieces))
    return found


def leaves(path):
    """The tensors of a torch file in its order, RNG states aside: path -> (dtype, shape, bytes)."""
    tree = Tree(path)
    found = read_content(tree, path.name).leaves
    return {at: (array.dtype, array.shape, read_array(tree, array)) for at, array in found if at[0] != "rng_state"}


# -- what core writes --------------------------------------------------------------------------------------------------


def test_two_tensor_ranks_hold_what_one_holds():
    assert differences(DIST / "hybrid_tp1", DIST / "hybrid_tp2") == []


@pytest.mark.parametrize(("source", "tp", "like"), [("hybrid_tp1", 2, "hybrid_tp2"), ("hybrid_tp2", 1, "hybrid_tp1")])
def test_keys_and_boxes_are_those_that_core_writes(source, tp, like, tmp_path):
    write(DIST / source, tmp_path / "out", "megatron-dist", tp=tp)
    assert boxes(tmp_path / "out" / STEP) == boxes(DIST / like / STEP)
    theirs = listing(DIST / like / STEP).objects
    ours = listing(tmp_path / "out" / STEP).objects
    assert set(ours) == {key for key in theirs if not key.startswith(("rng_state/", "rerun_state_machine_state/"))}
    assert differences(tmp_path / "out", DIST / like) == []


def test_optimizer_states_stand_under_sections_too(tmp_path):
    write(RANKS, tmp_path / "out", "megatron-dist", tp=2, pp=1, spec="te")
    want = json.loads((DIST / "hybrid_tp2_full.json").read_text())
    assert len(want) == 228 and boxes(tmp_path / "out" / STEP) == {
        key: (tuple(shape), Counter(zip(map(tuple, offsets), map(tuple, sizes), strict=True)))
        for key, (shape, offsets, sizes) in want.items()
    }
    assert differences(tmp_path / "out", RANKS) == []
    made = listing(tmp_path / "out" / STEP).objects
    assert "output_layer._extra_state/shard_0_1" in made, "a hybrid model asks for it"
    assert "decoder.layers.0.mixer.in_proj._extra_state/shard_0_1" in made
    assert not any(".mixer.norm." in key for key in made)


def test_each_rank_holds_what_cores_rank_holds(tmp_path):
    write(RANKS, tmp_path / "one", "megatron", tp=1, pp=1)
    assert open_source(str(tmp_path / "one"), Reading()).catalog.extras["args"].state["hybrid_layer_pattern"] == "MGM*-"
    write(tmp_path / "one", tmp_path / "out", "megatron", tp=2, pp=2, split=(3, 2))
    files = sorted(path.relative_to(RANKS) for path in RANKS.rglob("*.pt"))
    assert len(files) == 8
    for file in files:
        theirs = leaves(RANKS / file)
        ours = leaves(tmp_path / "out" / file)
        assert list(theirs) == list(ours) and theirs == ours, file
    args = open_source(str(tmp_path / "out"), Reading()).catalog.extras["args"].state
    assert args["hybrid_layer_pattern"] == "MGM|*-"


def test_rows_of_a_rank_by_hand(tmp_path):
    """What is written for each of two tensor ranks, from the truth of the run, cut by NumPy."""
    write(RANKS, tmp_path / "out", "megatron", tp=2, pp=1)
    rows = {"mixer.in_proj.weight": (20, 20, 6, 6, 4), "mixer.conv1d_bias": (20, 6, 6)}
    rows |= {"self_attention.in_proj.weight": (6, 6, 8, 8, 4, 4), "self_attention.conv1d.weight": (6, 6, 8)}
    with safe_open(f"{RANKS}.truth.safetensors", "pt") as truth:
        for rank in range(2):
            made = leaves(tmp_path / "out" / STEP / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
            model = {at[1]: leaf for at, leaf in made.items() if at[0] == "model"}
            every = [(name, own) for name in model for end, own in rows.items() if name.endswith(end)]
            assert len(every) == 6
            for name, sections in every:
                array = truth.get_tensor(f"model/{name}").view(torch.int16).numpy()
                parts = np.split(array, np.cumsum(sections)[:-1])
                want = np.concatenate([np.split(part, 2)[rank] for part in parts])
                assert model[name][1:] == (want.shape, want.tobytes()), (rank, name)


def test_extra_states_are_those_of_transformer_engines_norms(tmp_path):
    """As Megatron-Bridge's falcon_h1 has them: the layer's norm stands apart, Mamba's own is no module of TE's."""
    front = "decoder.layers.0."
    shapes = {f"{front}mamba_mixer.{leaf}": shape for leaf, shape in MIXER.items()}
    shapes |= {f"{front}norm.weight": (4,), f"{front}mamba_mixer.norm.weight": (12,), "decoder.final_norm.weight": (4,)}
    write(file_of(tmp_path / "a.safetensors", whole(**shapes)), tmp_path / "out", "megatron-dist", spec="te")
    made = listing(tmp_path / "out" / "release").objects
    assert {f"{front}norm._extra_state/shard_0_1", "decoder.final_norm._extra_state/shard_0_1"} <= set(made)
    assert f"{front}mamba_mixer.norm._extra_state/shard_0_1" not in made
    assert f"{front}norm.weight" in boxes(tmp_path / "out" / "release")


# -- what is not known -------------------------------------------------------------------------------------------------

FRONT = "decoder.layers.0.self_attention."


def file_of(path, tensors):
    save_file(tensors, path)
    return path


def whole(**shapes):
    return {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}


def test_sections_that_nothing_states_are_an_error_that_names_what_to_pass(tmp_path):
    source = file_of(tmp_path / "a.safetensors", whole(**{f"{FRONT}in_proj.weight": (48, 4)}))
    for to, tp in (("megatron", 2), ("megatron-dist", 1)):
        with pytest.raises(UsageError, match="in_proj") as e:
            write(source, tmp_path / to, to, tp=tp)
        assert e.value.code == "E0275" and "linear_num_key_heads" in e.value.hint
    write(source, tmp_path / "one", "megatron", tp=1)
    assert differences(source, tmp_path / "one") == []


def test_a_degree_that_parts_no_heads_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="do not divide by 4") as e:
        write(DIST / "hybrid_tp1", tmp_path / "out", "megatron", tp=4)
    assert e.value.code == "E0273"


def test_ranks_without_what_shows_their_sections_are_not_read(tmp_path):
    model = {"decoder.layers.0.mixer.in_proj.weight": torch.zeros(28, 4)}
    for rank in range(2):
        folder = tmp_path / "bare" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        torch.save({"model": model, "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    with pytest.raises(UnmappedTensor, match="mixer.in_proj") as e:
        open_source(str(tmp_path / "bare"), Reading())
    assert e.value.code == "E2003" and "mamba_num_groups" in e.value.hint


def test_a_missing_section_is_named(tmp_path):
    write(DIST / "hybrid_tp1", tmp_path / "out", "megatron-dist", tp=1)
    path = tmp_path / "out" / STEP / METADATA
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["decoder.layers.1.self_attention.in_proj.weight.beta"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(Incomplete, match="section 'beta'") as e:
        open_source(str(tmp_path / "out"), Reading())
    assert "decoder.layers.1.self_attention.in_proj.weight" in str(e.value.key)


def test_keys_of_sections_and_of_what_lies_by_key_head():
    states = {
        "decoder.layers.3.mixer.conv1d.bias.C": ("decoder.layers.3.mixer.conv1d_bias", "C"),
        "language_model.decoder.layers.3.self_attention.in_proj.weight.z": (
            "language_model.decoder.layers.3.self_attention.in_proj.weight",
            "z",
        ),
        "decoder.layers.3.self_attention.in_proj.weight": (f"{FRONT.replace('0', '3')}in_proj.weight_by_head", ""),
        "decoder.layers.3.self_attention.conv1d.weight": (f"{FRONT.replace('0', '3')}conv1d.weight_by_head", ""),
        "vision_model.transformer.resblocks.0.attn.in_proj.weight": (
            "vision_model.transformer.resblocks.0.attn.in_proj.weight",
            "",
        ),
    }
    for fqn, (name, part) in states.items():
        assert (name_of(parse(fqn)), parse(fqn).part) == (name, part)
    stacked = parse("decoder.layers.self_attention.in_proj.weight.alpha")
    assert stacked.layers and name_of(stacked, (2,)) == "decoder.layers.2.self_attention.in_proj.weight"


def test_what_lies_by_key_head_is_shared_by_rows_and_not_written_as_ranks(tmp_path):
    names = {f"{FRONT}in_proj.weight_by_head": (48, 4), f"{FRONT}conv1d.weight_by_head": (24, 1, 4)}
    source = file_of(tmp_path / "a.safetensors", whole(**names))
    write(source, tmp_path / "out", "megatron-dist", tp=2)
    made = boxes(tmp_path / "out" / "release")
    assert made["decoder.layers.self_attention.in_proj.weight"] == (
        (1, 48, 4),
        Counter({((0, 0, 0), (1, 24, 4)): 1, ((0, 24, 0), (1, 24, 4)): 1}),
    )
    assert differences(source, tmp_path / "out") == []
    with pytest.raises(UsageError, match="by key head") as e:
        write(source, tmp_path / "ranks", "megatron", tp=1)
    assert e.value.code == "E0275"


# -- stages of a pattern -----------------------------------------------------------------------------------------------


def test_a_hybrid_pattern_says_the_stages_and_gets_them():
    stages = from_args({"hybrid_layer_pattern": "MG*-|M/MM", "pipeline_model_parallel_layout": None}, 2, 1, 5, mtp=1)
    assert stages.counts == (4, 1)
    assert from_args({"hybrid_layer_pattern": "MG*-|M"}, 3, 1, 5) is None
    degrees = dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "dp", "cp"), 1)
    args = updated({"hybrid_layer_pattern": "MG*-|M/MM"}, degrees | {"pp": 3}, from_counts([2, 2, 1], 3), 0)
    assert args["hybrid_layer_pattern"] == "MG|*-|M/MM" and not args.get("pipeline_model_parallel_layout")
    assert updated(args, degrees, from_counts([5], 1), 0)["hybrid_layer_pattern"] == "MG*-M/MM"


# -- models that see ---------------------------------------------------------------------------------------------------

SHAPES = {  # one whole model that sees: (shape, how tensor rank r of n cuts it)
    "vision_model.patch_embed.proj.weight": ((6, 3), None),
    **{
        f"vision_model.decoder.layers.{i}.{leaf}": cut
        for i in range(3)
        for leaf, cut in {
            "self_attention.linear_qkv.weight": ((12, 4), 0),
            "mlp.linear_fc1.weight": ((10, 4), 0),
            "mlp.linear_fc2.weight": ((4, 10), 1),
        }.items()
    },
    "vision_model.decoder.deepstack_merger_list.0.linear_fc1.weight": ((8, 4), 0),
    "vision_model.decoder.deepstack_merger_list.1.linear_fc1.weight": ((8, 4), 0),
    "vision_model.merger.linear_fc2.weight": ((4, 8), 1),
    "visual.blocks.0.mlp.linear_fc1.weight": ((7, 4), None),
    "language_model.embedding.word_embeddings.weight": ((16, 4), 0),
    **{
        f"language_model.decoder.layers.{i}.{leaf}": cut
        for i in range(4)
        for leaf, cut in {
            "input_layernorm.weight": ((4,), None),
            "self_attention.linear_proj.weight": ((4, 8), 1),
            "self_attention.linear_qkv.weight": ((16, 4), 0),
            "mlp.linear_fc1.weight": ((12, 4), "halves"),
            "mlp.linear_fc2.weight": ((4, 6), 1),
        }.items()
    },
    "language_model.decoder.final_layernorm.weight": ((4,), None),
    "language_model.output_layer.weight": ((16, 4), 0),
}


def seeing(path):
    model = whole(**{name: shape for name, (shape, _) in SHAPES.items()})
    return file_of(path, {name: array + 1000 * at for at, (name, array) in enumerate(model.items())})


def test_a_model_that_sees_over_ranks_and_stages(tmp_path):
    source = seeing(tmp_path / "a.safetensors")
    write(source, tmp_path / "out", "megatron", tp=2, pp=2)
    model = load_file(source)
    for pp in range(2):
        for tp in range(2):
            file = tmp_path / "out" / "release" / f"mp_rank_{tp:02d}_{pp:03d}" / "model_optim_rng.pt"
            have = {at[1]: leaf for at, leaf in leaves(file).items() if at[0] == "model"}
            want = {}
            for name, (_, how) in SHAPES.items():
                array = model[name]
                local = name
                if name.startswith("language_model.decoder.layers."):
                    layer = int(name.split(".")[3])
                    here = layer // 2
                    local = name.replace(f".{layer}.", f".{layer % 2}.", 1)
                else:
                    here = int(name.startswith(("language_model.decoder.final", "language_model.output")))
                if here != pp:
                    continue
                halves = np.split(array, 2) if how == "halves" else [array]
                cut = [np.split(half, 2, axis=how == 1)[tp] if how is not None else half for half in halves]
                want[local] = np.concatenate(cut)
            assert set(have) == set(want)
            for name, array in want.items():
                assert have[name][1:] == (array.shape, array.tobytes()), (tp, pp, name)
    assert differences(source, tmp_path / "out") == []


def test_a_model_that_sees_under_shared_keys(tmp_path):
    source = seeing(tmp_path / "a.safetensors")
    write(source, tmp_path / "out", "megatron-dist", tp=2, pp=2)
    made = {key: shape for key, (shape, _) in boxes(tmp_path / "out" / "release").items()}
    assert made["language_model.decoder.layers.mlp.linear_fc1.weight"] == (4, 12, 4)
    assert made["vision_model.decoder.layers.mlp.linear_fc1.weight"] == (3, 10, 4)
    assert made["vision_model.decoder.deepstack_merger_list.linear_fc1.weight"] == (2, 8, 4)
    assert made["visual.blocks.0.mlp.linear_fc1.weight"] == (7, 4)
    assert "language_model.decoder.layers.self_attention.linear_qkv.layer_norm_weight" in made
    assert differences(source, tmp_path / "out") == []
    write(tmp_path / "out", tmp_path / "again", "megatron-dist", tp=1)
    assert {key: shape for key, (shape, _) in boxes(tmp_path / "again" / "release").items()} == made


def test_styles_of_a_tower_are_its_own():
    assert styles_of(parse("vision_model.decoder.layers.mlp.linear_fc2.weight")) == (
        "stacked:vision_model.decoder.layers",
    )
    assert styles_of(parse("language_model.decoder.layers.mlp.linear_fc2.weight")) == ("stacked-layers",)
    assert styles_of(parse("decoder.layers.mlp.linear_fc2.weight")) == ("stacked-layers",)
