"""NeMo 2's folder, saved by megatron-core as NeMo saves it: fixtures/make/nemo2.py says what is NeMo's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.api import latest
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InconsistentCheckpoint, UnknownFormat
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.systems.megatron.args import arguments
from ckpt_tool.systems.megatron.stored_names import EMBEDDING
from ckpt_tool.systems.megatron.torch_dist import nemo

NEMO = Path(__file__).parents[2] / "fixtures" / "nemo2" / "llama_tp2"
GATHERED = NEMO.with_name("gathered_tp2pp2")


def held(path: Path) -> tuple[dict[str, torch.Tensor], OpenCatalog]:
    opened = open_source(str(path), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog)
    names = [key for key in opened.catalog.tensors if key.state not in ("extras", "step")]
    return {f"{key.state}/{key.name}": lazy.state(key.state)[key.name].torch() for key in names}, lazy


def same(path: Path, of: Path = NEMO) -> OpenCatalog:
    truth, (found, lazy) = load_file(f"{of}.truth.safetensors"), held(path)
    assert found.keys() == truth.keys()
    assert not [key for key, value in truth.items() if not torch.equal(found[key], value)]
    return lazy


def test_it_opens_from_its_root_with_the_sizes_of_its_config_and_from_its_weights(tmp_path):
    lazy = same(NEMO)
    args = arguments(lazy.catalog.extras)
    assert (args["swiglu"], args["untie_embeddings_and_output_weights"]) == (True, True)
    assert "activation_func" not in args and lazy.catalog.mesh == Mesh.of(tp=2)
    notes = [note.message for note in lazy.catalog.notes]
    assert any("context/io.json" in note for note in notes)
    assert not arguments(same(NEMO / "weights").catalog.extras)
    out = tmp_path / "out"
    convert(str(NEMO), str(out), Reading(), Writing(to="megatron-dist", degrees={"tp": 2, "pp": 2}), Silent())
    same(out)


def test_it_becomes_a_model_of_the_hub_whose_config_comes_from_nemo_s(tmp_path):
    convert(str(NEMO), str(tmp_path / "hub"), Reading(), Writing(to="safetensors"), Silent())
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (2, 2, 5)


def test_a_config_that_is_no_plain_yaml_is_named_and_nothing_is_made_of_it(tmp_path):
    copy = Path(shutil.copytree(NEMO, tmp_path / "copy"))
    (copy / "context" / "model.yaml").write_text("!!python/object/apply:os.system ['true']")
    _, lazy = held(copy)
    assert not arguments(lazy.catalog.extras)
    assert any("sizes are not known" in note.message for note in lazy.catalog.notes)


def test_a_run_opens_at_its_only_step_and_lists_several(tmp_path):
    """`checkpoints/NAME--val_loss=...-step=N...`, as NeMo's callback calls them, `-last` for a copy of the newest."""
    steps = tmp_path / "run" / "checkpoints"
    first = steps / "gpt--val_loss=2.10-step=9-consumed_samples=80.0"
    shutil.copytree(NEMO, first)
    for path in (steps, steps.parent):
        opened = open_source(str(path), Reading())
        assert opened.tree.display() == str(first) and "only checkpoint" in opened.resolved
        same(path)
    shutil.copytree(NEMO, steps / "gpt--val_loss=1.90-step=19-consumed_samples=160.0-last")
    for path in (steps, steps.parent):
        with pytest.raises(UnknownFormat, match="holds 2 checkpoints") as caught:
            open_source(str(path), Reading())
        assert "step=19-consumed_samples=160.0-last" in str(caught.value.hint)
    assert latest(str(steps))["path"].endswith("step=19-consumed_samples=160.0-last")


def test_flat_buffers_of_several_ranks_have_the_names_that_the_config_s_degrees_give_them(tmp_path):
    """`ckpt_parallel_save_optim=False`: a gathered buffer for each of four model-parallel ranks."""
    lazy = same(GATHERED, GATHERED)
    assert lazy.catalog.mesh == Mesh.of(tp=2, pp=2) and not lazy.catalog.unread
    out = tmp_path / "out"
    convert(str(GATHERED), str(out), Reading(), Writing(to="megatron-dist", degrees={"tp": 1, "dp": 2}), Silent())
    same(out, GATHERED)


def another_run_s(copy: Path) -> None:
    config = copy / "context" / "model.yaml"
    config.write_text(config.read_text().replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 1"))


def other_stages(copy: Path) -> None:
    config = copy / "context" / "model.yaml"
    config.write_text(
        config.read_text().replace("  num_layers: 2", "  num_layers_in_first_pipeline_stage: 2\n  num_layers: 2")
    )


def no_context(copy: Path) -> None:
    shutil.rmtree(copy / "context")


@pytest.mark.parametrize(
    ("change", "message", "note"),
    [
        (
            another_run_s,
            "1888 elements|1008 elements",
            "1 tensor ranks, but embedding.word_embeddings.weight is cut in 2",
        ),
        (other_stages, "1 parameters are left over|elements: the parameters", ""),
        (no_context, "nothing says in which order", ""),
    ],
)
def test_buffers_whose_order_nothing_proves_stay_unread_and_the_rest_can_be_had(change, message, note, tmp_path):
    copy = Path(shutil.copytree(GATHERED, tmp_path / "copy"))
    change(copy)
    opened = open_source(str(copy), Reading())
    assert {(row.key.state, row.shown) for row in opened.catalog.unread} >= {("exp_avg", "F32 [1008]")}
    assert not note or any(note in one.message for one in opened.catalog.notes)
    with pytest.raises(InconsistentCheckpoint, match=message) as caught:
        convert(str(copy), str(tmp_path / "out"), Reading(), Writing(to="dcp"), Silent())
    assert caught.value.code == "E2004" and "ckpt_parallel_save_optim=True" in str(caught.value.hint)
    for number, writing in enumerate(
        (Writing(to="dcp", drop=["master", "optimizer"]), Writing(to="dcp", states=["model"]))
    ):
        convert(str(copy), str(tmp_path / f"out{number}"), Reading(), writing, Silent())
        found, _ = held(tmp_path / f"out{number}")
        truth = load_file(f"{GATHERED}.truth.safetensors")
        assert all(torch.equal(found[key], truth[key]) for key in truth if key.startswith("model/"))


def test_layers_of_transformer_engine_are_told_by_their_states_since_their_norms_stand_elsewhere_in_a_buffer():
    entry = DcpTensorEntry(EMBEDDING, (EMBEDDING,), DTYPES["BF16"], (8, 2), [])
    for keys, want in (
        (["decoder.layers.mlp.linear_fc1._extra_state"], "local"),
        (["decoder.layers.mlp.linear_fc1._extra_state", "decoder.final_layernorm._extra_state"], "transformer_engine"),
        (["module.decoder.layers.self_attention.core_attention._extra_state"], "transformer_engine"),
        ([], None),
    ):
        found: dict[str, object] = {}
        nemo._run(found, {EMBEDDING: entry}, keys, "model.yaml")
        assert found.get("transformer_impl") == want
