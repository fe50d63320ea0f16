"""Orbax: what its metadata and databases say, written folders, and what is kept of a tree.

Values of real saves are held by the conformance suite (`fixtures/orbax`, made by orbax-checkpoint); here are what it
does not see: plain values, value types, paths, steps, the fill value, runs, and trees from other formats.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.cli import run
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.arrays import ocdbt
from ckpt_tool.storage.arrays.crc32c import crc32c
from ckpt_tool.storage.arrays.ocdbt import OcdbtNode, encode, read_keys
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.views import Compressed, base_of, behind, fill_view
from ckpt_tool.systems.jax.orbax import read as orbax_read
from ckpt_tool.systems.jax.orbax.names import name_leaves

CASES = Path(__file__).parents[2] / "fixtures" / "orbax"


def opened(path):
    return open_source(str(path), Reading())


def leaves_of(path):
    """{keys of the path: value_type} as `_METADATA` has it."""
    rows = json.loads((path / "_METADATA").read_text())["tree_metadata"].values()
    kinds = {}
    for row in rows:
        keys = tuple((each["key"], each["key_type"]) for each in row["key_metadata"])
        kinds[keys] = row["value_metadata"]["value_type"]
    return kinds


def test_plain_values_of_a_tree():
    assert opened(CASES / "dtypes_ocdbt_zarr3").catalog.extras == {"step": 7, "note": "a text", "lr": 0.25}
    extras = opened(CASES / "manager").catalog.extras
    assert extras["config"] == {"width": 8, "name": "tiny"}
    assert extras["step"] == 3 and extras["opt_state"] == {"1": {"0": {"count": 3}, "2": {"count": 3}}}


def test_every_chunk_is_where_the_database_says():
    catalog = opened(CASES / "plain_ocdbt").catalog
    tensor = next(tensor for key, tensor in catalog.tensors.items() if key.name == "w")
    assert len(tensor.chunks) == 8 and not any("//" in chunk.array.path for chunk in tensor.chunks)
    chunk = next(iter(opened(CASES / "adamw_ocdbt_zarr2").catalog.tensors.values())).chunks[0]
    assert "//zstd@" in chunk.array.path and base_of(chunk.array.path) in os.fsdecode(chunk.array.path)


@pytest.mark.parametrize("case", ["adamw_ocdbt_zarr2", "dtypes_ocdbt_zarr3", "manager", "bare_slashes"])
def test_a_written_tree_is_the_tree_that_was_read(case, tmp_path):
    """Paths, kinds of keys and what holds nothing come back; arrays are NumPy's for Orbax, scalars stay scalars."""
    out = tmp_path / "out"
    assert run(["reshard", str(CASES / case), str(out), "-q"]) == 0
    assert run(["diff", str(CASES / case), str(out), "-q"]) == 0
    inner = "checkpoint_00000003/state" if case == "manager" else ""
    want = leaves_of(CASES / case / inner)
    have = leaves_of(out / ("state" if case == "manager" else ""))
    assert have == {keys: "np.ndarray" if kind == "jax.Array" else kind for keys, kind in want.items()}
    assert opened(out).catalog.extras == opened(CASES / case).catalog.extras
    if case == "manager":
        assert json.loads((out / "config/metadata").read_text()) == {"width": 8, "name": "tiny"}
        assert json.loads((out / "_CHECKPOINT_METADATA").read_text())["item_handlers"].keys() == {"state", "config"}


def test_what_comes_from_elsewhere_hangs_as_optax_has_it(tmp_path):
    """Through DCP, which knows nothing of optax: names with dots are levels, moments hang beside one count."""
    through = tmp_path / "dcp"
    out = tmp_path / "out"
    assert run(["convert", str(CASES / "adamw_ocdbt_zarr2"), str(through), "--to", "dcp", "-q"]) == 0
    assert run(["convert", str(through), str(out), "--to", "orbax", "-q"]) == 0
    assert run(["diff", str(CASES / "adamw_ocdbt_zarr2"), str(out), "-q"]) == 0
    kinds = leaves_of(out)
    state = ("opt_state", 2), ("0", 1)
    assert kinds[("params", 2), ("layer_0", 2), ("q", 2), ("kernel", 2)] == "np.ndarray"
    assert kinds[(*state, ("mu", 2), ("layer_0", 2), ("q", 2), ("kernel", 2))] == "np.ndarray"
    assert kinds[("opt_state", 2), ("2", 1)] == "None"


def test_steps_of_parameters_become_one_count(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    for step, code in ((2, 0), (5, 3)):
        state["bias"]["step"] = torch.tensor(float(step))
        source = tmp_path / f"{step}.pt"
        out = tmp_path / f"out{step}"
        torch.save({"model": model.state_dict(), "optim": {"state": state, "param_groups": []}}, source)
        assert run(["convert", str(source), str(out), "--to", "orbax", "-q"]) == code
    extras = opened(tmp_path / "out2").catalog.extras
    assert extras["opt_state"] == [{"count": 2}] and type(extras["opt_state"][0]["count"]) is int


def steps_of(path):
    """{parameter: (its step, the dtype)}."""
    o = opened(path)
    if "step" not in o.catalog.states():
        return {}
    state = OpenCatalog(o.tree, o.catalog).state("step")
    return {name: (float(state[name].numpy()), state[name].dtype) for name in state}


@pytest.mark.parametrize("fmt", ["dcp", "torch", "sharded"])
def test_the_one_count_is_the_step_of_each_parameter_and_back(fmt, tmp_path, capsys):
    source = CASES / "manager"
    there = tmp_path / ("m.pt" if fmt == "torch" else "out")
    back = tmp_path / "back"
    assert run(["convert", str(source), str(there), "--to", fmt, "--json"]) == 0
    line = "opt_state.1.0.count, the one count of the optimizer, is the step of 6 parameters, in F32"
    assert line in json.loads(capsys.readouterr().out)["notes"]
    moments = {key.name for key in opened(source).catalog.tensors if key.state == "exp_avg"}
    assert steps_of(there) == dict.fromkeys(moments, (3.0, "F32")) and len(moments) == 6
    extras = opened(there).catalog.extras
    assert extras["opt_state"] == {"1": {"2": {"count": 3}}} and extras["step"] == 3  # the schedule's own stays
    assert run(["convert", str(there), str(back), "--to", "orbax", "-q"]) == 0
    o = opened(back)
    where = ("opt_state", 1, 0) if fmt == "sharded" else ("opt_state", 0)  # it keeps where leaves hung
    assert o.catalog.count.path == (*where, "count")
    assert o.catalog.count.dtype.name == "I32"
    made = o.catalog.extras["opt_state"]
    for step in where[1:]:
        made = made[step] if isinstance(made, list) else made[str(step)]
    assert made["count"] == 3
    assert run(["diff", str(source), str(back), "-q"]) == 0
    assert run(["diff", str(source), str(there), "-q"]) == run(["diff", str(there), str(source), "-q"]) == 0


def test_steps_that_are_not_the_count_differ(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    source = tmp_path / "m.pt"
    assert run(["convert", str(CASES / "adamw_ocdbt_zarr2"), str(source), "--to", "torch", "-q"]) == 0
    o = opened(source)
    states = ("exp_avg", "exp_avg_sq", "step")
    held = {state: OpenCatalog(o.tree, o.catalog).state(state) for state in states}
    state = {name: {each: held[each][name].torch() for each in states} for name in held["step"]}
    state["layer_0.norm.scale"]["step"] += 1
    model = {name: value.torch() for name, value in OpenCatalog(o.tree, o.catalog).items()}
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": []}}, source)
    assert run(["diff", str(CASES / "adamw_ocdbt_zarr2"), str(source), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["differences"] == [{"name": "layer_0.norm.scale", "state": "step", "kind": "value", "elements": 1}]
    assert document["compared"] == 24


def test_a_plan_of_steps_can_be_saved(tmp_path):
    plan = tmp_path / "plan.json"
    out = tmp_path / "out"
    words = ["convert", str(CASES / "adamw_ocdbt_zarr2"), str(out), "--to", "dcp", "--dp", "2", "--plan", str(plan)]
    assert run([*words, "-q"]) == 0 and run(["apply", str(plan), "-q"]) == 0
    count = opened(CASES / "adamw_ocdbt_zarr2").catalog.extras["opt_state"]["1"]["0"]["count"]
    assert count > 0 and set(steps_of(out).values()) == {(float(count), "F32")}


@pytest.mark.parametrize(
    ("words", "stays"),
    [(["--drop", "step"], True), (["--state", "model"], None), (["--state", "model", "--state", "exp_avg"], None),
     (["--drop", "optimizer"], True), (["--drop", "extras"], None)],
)  # fmt: skip
def test_steps_are_left_out_where_nobody_asks_for_them(words, stays, tmp_path):
    out = tmp_path / "out"
    assert run(["convert", str(CASES / "adamw_ocdbt_zarr2"), str(out), "--to", "dcp", *words, "-q"]) == 0
    assert bool(steps_of(out)) == (words == ["--drop", "extras"])
    assert ("opt_state" in opened(out).catalog.extras) == bool(stays)


def test_a_trainer_counts_on_and_an_optimizer_of_torch_takes_it(tmp_path):
    torch = pytest.importorskip("torch")
    assert run(["convert", str(CASES / "adamw_ocdbt_zarr2"), str(tmp_path / "m.pt"), "--to", "torch", "-q"]) == 0
    o = opened(tmp_path / "m.pt")
    lazy = OpenCatalog(o.tree, o.catalog)
    name = "layer_0.mlp.kernel"
    parameter = torch.nn.Parameter(lazy[name].torch())
    optimizer = torch.optim.AdamW([parameter])
    parts = {state: lazy.state(state)[name].torch() for state in ("exp_avg", "exp_avg_sq", "step")}
    optimizer.load_state_dict({"state": {0: parts}, "param_groups": optimizer.state_dict()["param_groups"]})
    parameter.grad = torch.ones_like(parameter)
    before = float(optimizer.state[parameter]["step"])
    optimizer.step()
    step = optimizer.state[parameter]["step"]
    assert step.dtype == torch.float32 and float(step) == before + 1 > 1


def test_several_counts_are_nobody_s():
    def leaf(*path):
        return orbax_read._StoredLeaf(path, SimpleNamespace(shape=(), dtype=DTYPES["I32"], chunks=lambda: [object()]))

    paths = [("params", "a"), ("params", "b")]
    paths += [("opt_state", n, name, part) for n, part in enumerate("ab") for name in ("mu", "nu")]
    counts = [("opt_state", n, "count") for n in range(2)]
    for many in (2, 1, 0):
        stored = [leaf(*path) for path in (*paths, *counts[:many], ("opt_state", 9, "count"))]
        named = name_leaves([each.path for each in stored], [each.path[-1] == "count" for each in stored])
        tensors = {key: each for key, each in zip(named.keys, stored, strict=True) if key is not None}
        notes = []
        found = orbax_read._count(stored, named, tensors, notes)
        assert (found.path if found else None, len(notes)) == ((counts[0], 0) if many == 1 else (None, many // 2))


@pytest.mark.parametrize(("case", "stepped"), [("nnx", "inner.kernel"), ("muon_zarr3", "layer_0.norm.scale")])
def test_counts_of_nnx_and_beside_muon_are_steps(case, stepped, tmp_path):
    """Of Adam's parameters: Muon's have none, in torch neither. Both are sound, and come back leaf for leaf."""
    assert run(["verify", str(CASES / case), "-q"]) == 0
    assert run(["convert", str(CASES / case), str(tmp_path / "job"), "--to", "dcp", "-q"]) == 0
    catalog = opened(tmp_path / "job").catalog
    names = {key.name for key in catalog.tensors if key.state == "step"}
    assert names == {key.name for key in catalog.tensors if key.state == "exp_avg"} and stepped in names
    assert run(["reshard", str(CASES / case), str(tmp_path / "out"), "-q"]) == 0
    assert run(["diff", str(CASES / case), str(tmp_path / "out"), "-q"]) == 0
    assert leaves_of(tmp_path / "out").keys() == leaves_of(CASES / case).keys()


def rewrite_database(folder, keeps):
    """The database of the item in this folder with those keys alone that it keeps."""
    tree = Tree(folder)
    values = {key: value for key, value in read_keys(tree).items() if keeps(key)}
    files = sorted({value.path for value in values.values() if "//" not in value.path})
    rows = []
    for key, value in values.items():
        if value.path in files:
            rows.append(OcdbtNode(key.encode(), None, files.index(value.path), value.offset, value.nbytes))
        else:
            rows.append(OcdbtNode(key.encode(), read_view(tree, value)))
    manifest, nodes = encode(files, rows, bytes(16), "d/" + "0" * 32)
    (folder / "d" / ("0" * 32)).write_bytes(nodes)
    (folder / ocdbt.MANIFEST).write_bytes(manifest)


def read_view(tree, value):
    return bytes(tree.read(value.path, value.offset, value.nbytes))


def test_a_fault_of_a_compressed_chunk_names_its_file(tmp_path, capsys):
    """And not the view by which it is read."""
    shutil.copytree(CASES / "adamw_ocdbt_zarr2", tmp_path / "in")
    file = tmp_path / "in/_METADATA"
    tree = json.loads(file.read_text())
    lost = next(name for name in tree["tree_metadata"] if "'nu'" in name)
    row = tree["tree_metadata"].pop(lost)
    file.write_text(json.dumps(tree))
    array = ".".join(each["key"] for each in row["key_metadata"])
    rewrite_database(tmp_path / "in", lambda key: not key.startswith(f"{array}/"))
    assert run(["verify", str(tmp_path / "in")]) == 1
    said = capsys.readouterr().out
    assert "E0302" in said and "zstd@" not in said


def test_names_that_begin_others_are_one_key(tmp_path):
    source = tmp_path / "m.safetensors"
    out = tmp_path / "out"
    save_file({"a": np.arange(3, dtype="f4"), "a.b": np.arange(4, dtype="f4")}, source)
    assert run(["convert", str(source), str(out), "--to", "orbax", "-q"]) == 0
    assert set(leaves_of(out)) == {(("params", 2), ("a", 2)), (("params", 2), ("a.b", 2))}
    assert run(["diff", str(source), str(out), "-q"]) == 0


def test_large_arrays_are_cut_and_padded(tmp_path, monkeypatch):
    from ckpt_tool.systems.jax.orbax import target

    monkeypatch.setattr(target, "CHUNK", 64)
    values = np.arange(7 * 5 * 3, dtype="f4").reshape(7, 5, 3)
    source = tmp_path / "m.safetensors"
    out = tmp_path / "out"
    save_file({"w": values}, source)
    assert run(["convert", str(source), str(out), "--to", "orbax", "-q"]) == 0
    o = opened(out)
    (tensor,) = o.catalog.tensors.values()
    assert len(tensor.chunks) == 35 // 5 and tensor.chunks[0].array.shape == (1, 5, 3)
    assert (OpenCatalog(o.tree, o.catalog)["w"].numpy() == values).all()


def test_max_shard_size_parts_the_values(tmp_path):
    source = tmp_path / "m.safetensors"
    out = tmp_path / "out"
    save_file({name: np.zeros((1000, 1000), "f4") for name in "abc"}, source)
    assert run(["convert", str(source), str(out), "--to", "orbax", "--max-shard-size", "5MB", "-q"]) == 0
    assert sorted(path.stat().st_size for path in (out / "d").iterdir())[-3:] == [4_000_000] * 3


def test_a_chunk_that_nobody_stored_holds_the_fill_value(tmp_path):
    folder = tmp_path / "item"
    shutil.copytree(CASES / "files_zarr2", folder)
    metadata = json.loads((folder / "_METADATA").read_text())
    lost = next((folder / "params.params.embed.embedding").glob("1.*"))
    lost.unlink()
    with pytest.raises(CkptError, match="1 of its 8 chunks are not there: 1.0") as fault:
        opened(folder)
    assert fault.value.code == "E0309"
    header = folder / "params.params.embed.embedding/.zarray"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"fill_value": 1.5}))
    metadata["store_array_data_equal_to_fill_value"] = False
    (folder / "_METADATA").write_text(json.dumps(metadata))
    o = opened(folder)
    values = OpenCatalog(o.tree, o.catalog)["embed.embedding"].numpy()
    assert (values[2:4] == 1.5).all() and not (values[:2] == 1.5).any()
    assert run(["convert", str(folder), str(tmp_path / "out"), "--to", "safetensors", "-q"]) == 0
    assert run(["diff", str(folder), str(tmp_path / "out"), "-q", "--state", "model"]) == 0


def test_keys_of_prngs_are_named(tmp_path):
    shutil.copytree(CASES / "files_zarr2", tmp_path / "in")
    path = tmp_path / "in/array_metadatas/process_0"
    rows = [{"param_name": "rng.ids", "ext_metadata": {"random_key_impl": "threefry2x32"}}]
    path.write_text(json.dumps({"array_metadatas": [{"array_metadata": row} for row in rows]}))
    (note,) = opened(tmp_path / "in").catalog.notes
    assert "1 arrays are keys of a PRNG, such as rng.ids (threefry2x32)" in note.message
    path.write_text('{"array_metadatas": ["random_key_impl"]}')
    with pytest.raises(CkptError, match="lacks a field"):
        opened(tmp_path / "in")


@pytest.mark.parametrize("name", ["adamw_ocdbt_zarr2", "manager"])
def test_what_a_process_left_is_looked_at_by_verify(name, tmp_path, capsys):
    """Nothing reads the manifest of one process once there is that of all: damage of it is no loss, but a sign."""
    out = tmp_path / "tree"
    shutil.copytree(CASES / name, out)
    assert run(["verify", str(out), "-q"]) == 0
    (left,) = out.rglob("ocdbt.process_0/manifest.ocdbt")
    raw = bytearray(left.read_bytes())
    raw[-9] ^= 1
    left.write_bytes(raw)
    capsys.readouterr()
    assert run(["verify", str(out)]) == 1
    said = "".join(capsys.readouterr())
    assert "E2751" in said and "the stored CRC-32C is" in said
    assert run(["convert", str(out), str(tmp_path / "read"), "--to", "sharded", "-q"]) == 0


def test_metrics_of_a_manager(tmp_path):
    shutil.copytree(CASES / "manager/checkpoint_00000003", tmp_path / "in")
    (tmp_path / "in/metrics").mkdir()
    (tmp_path / "in/metrics/metrics").write_text('{"loss": 1.5}')
    assert opened(tmp_path / "in").catalog.extras["metrics"] == {"loss": 1.5}
    assert run(["reshard", str(tmp_path / "in"), str(tmp_path / "out"), "-q"]) == 0
    assert json.loads((tmp_path / "out/metrics/metrics").read_text()) == {"loss": 1.5}


def test_a_run_of_several_steps_names_them(tmp_path, capsys):
    for number in ("2", "10"):
        shutil.copytree(CASES / "bare_slashes", tmp_path / number / "default")
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(CkptError) as fault:
        opened(tmp_path)
    assert fault.value.code == "E0392" and fault.value.hint.startswith(f"pass one of them: {tmp_path}/2, {tmp_path}/10")
    assert run(["latest", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().endswith("/10")


def test_several_trees_of_a_step_are_one_checkpoint(tmp_path):
    tree = json.loads((CASES / "adamw_ocdbt_zarr2/_METADATA").read_text())
    for item in ("params", "opt_state"):
        shutil.copytree(CASES / "adamw_ocdbt_zarr2", tmp_path / "in" / item)
        rows = {}
        for name, row in tree["tree_metadata"].items():
            if row["key_metadata"][0]["key"] == item:
                rows[name] = row
        (tmp_path / "in" / item / "_METADATA").write_text(json.dumps(tree | {"tree_metadata": rows}))
        rewrite_database(tmp_path / "in" / item, lambda key, item=item: key.startswith(f"{item}."))
    catalog = opened(tmp_path / "in").catalog
    assert catalog.states() == ("exp_avg", "exp_avg_sq", "model") and len(catalog.tensors) == 18
    assert run(["reshard", str(tmp_path / "in"), str(tmp_path / "out"), "-q"]) == 0
    assert run(["diff", str(tmp_path / "in"), str(tmp_path / "out"), "-q"]) == 0
    assert (tmp_path / "out/params/manifest.ocdbt").exists() and (tmp_path / "out/opt_state/_METADATA").exists()


LEAVES = {
    "a train state": (
        [("params", "w"), ("opt_state", 0, "mu", "w"), ("opt_state", 0, "nu", "w"), ("ema_params", "w"), ("rng",)],
        ["w", "w [exp_avg]", "w [exp_avg_sq]", "w [ema]", "rng [extras]"],
    ),
    "params twice": (
        [("params", "params", "a", "w"), ("opt_state", 1, 0, "mu", "params", "a", "w")],
        ["a.w", "a.w [exp_avg]"],
    ),
    "a trace": ([("params", "w"), ("opt_state", 0, "trace", "w")], ["w", "w [momentum_buffer]"]),
    "accumulated": ([("params", "w"), ("opt_state", "acc_grads", "w")], ["w", "w [acc_grads]"]),
    "Muon beside Adam": (
        [
            ("params", "a"),
            ("params", "b"),
            ("opt_state", "m", 0, "mu", "a"),
            ("opt_state", "m", 0, "ns_coeffs"),
            ("opt_state", "n", 0, "mu", "b"),
            ("opt_state", "n", 0, "nu", "b"),
        ],
        ["a", "b", "a [momentum_buffer]", "opt_state.m.0.ns_coeffs [extras]", "b [exp_avg]", "b [exp_avg_sq]"],
    ),
    "rows and columns of SM3": (
        [("params", "w"), ("opt_state", 0, "mu", "w", 0), ("opt_state", 0, "mu", "w", 1), ("opt_state", 0, "nu", "w")],
        ["w", "opt_state.0.mu.w.0 [extras]", "opt_state.0.mu.w.1 [extras]", "w [exp_avg_sq]"],
    ),
    "values of nnx": (
        [("model", "a", "w", "value"), ("optimizer", "opt_state", 0, "mu", "a", "w", "value")],
        ["a.w", "a.w [exp_avg]"],
    ),
    "a projection called value": (
        [("params", "query"), ("params", "value"), ("opt_state", 0, "mu", "value")],
        ["query", "value", "value [exp_avg]"],
    ),
    "a tree without a root": ([("a/b", "w"), ("c", "w")], ["a/b.w", "c.w"]),
    "mu that is no state": ([("params", "mu", "w")], ["mu.w"]),
    "two of one state": (
        [("params", "w"), ("opt_state", 0, "mu", "w"), ("opt_state", 1, "mu", "w")],
        ["w", "w [exp_avg]", "opt_state.1.mu.w [extras]"],
    ),
}


@pytest.mark.parametrize("name", LEAVES)
def test_names_and_states_follow_from_where_a_leaf_hangs(name):
    paths, want = LEAVES[name]
    named = name_leaves(paths, [False] * len(paths))
    assert [str(key) for key in named.keys] == want


def test_a_database_of_many_keys_has_an_inner_node(tmp_path, monkeypatch):
    monkeypatch.setattr(ocdbt, "_LEAF_KEYS", 3)
    values = [OcdbtNode(f"w.{n:03}".encode(), bytes([n]) * n) for n in range(10)]
    values += [OcdbtNode(f"x.{n}".encode(), None, n % 2, 10 * n, 10) for n in range(4)]
    manifest, nodes = encode(["d/one", "d/two"], values, bytes(16), "d/tree")
    (tmp_path / "d").mkdir()
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    (tmp_path / "d/tree").write_bytes(nodes)
    tree = Tree(tmp_path)
    found = read_keys(tree)
    assert list(found) == sorted(value.key.decode() for value in values)
    assert tree.read(*found["w.007"]) == bytes([7]) * 7 and found["x.3"] == ("d/two", 30, 10)
    assert read_keys_of_nothing(tmp_path) == {}


def read_keys_of_nothing(folder):
    manifest, nodes = encode([], [], bytes(16), "d/none")
    (folder / "manifest.ocdbt").write_bytes(manifest)
    assert nodes == b""
    return read_keys(Tree(folder))


def test_views_of_files(tmp_path):
    import gzip

    import zstandard

    data = np.random.default_rng(1).integers(0, 4, 3 << 20, dtype=np.uint8).tobytes()
    for codec, packed in (("zstd", zstandard.ZstdCompressor().compress(data)), ("gzip", gzip.compress(data, 1))):
        (tmp_path / codec).write_bytes(b"head" + packed)
        tree = Tree(tmp_path)
        path = Compressed(codec, 4, len(packed), len(data), codec).view
        assert tree.size(path) == len(data) and tree.identity(path) == tree.identity(codec)
        assert tree.read(path, 2 << 20, 1000) == data[2 << 20 :][:1000] and tree.read(path, 0, 9) == data[:9]
        inner = Compressed(path, 100, 200, 4096, codec).view
        assert behind(path, 0, 50) == (codec, 4, len(packed)) and behind(path, 8, 50)[2] == behind(inner, 8, 50)[2] == 0
        with pytest.raises(CkptError, match="do not decompress"):
            tree.read(inner, 0, 4)
        with pytest.raises(CkptError, match="of its view zstd@|of its view gzip@"):
            tree.read(path, len(data), 1)
    assert tree.read(fill_view("zstd", b"\x00\x3f"), 0, 2) == b"\x00\x3f"


def test_small_views_are_kept_within_bounds(tmp_path, monkeypatch):
    import zstandard

    from ckpt_tool.storage import views

    monkeypatch.setattr(views, "KEPT", 3000)
    packed = zstandard.ZstdCompressor().compress(bytes(1000))
    (tmp_path / "f").write_bytes(packed * 9)
    tree = Tree(tmp_path)
    for _ in range(2):
        for n in range(9):
            assert tree.read(Compressed("f", n * len(packed), len(packed), 1000).view, 0, 1000) == bytes(1000)
    assert len(tree.views._small) == 3 and tree.views._kept == 3000


def test_a_view_beyond_the_disk_is_refused_before_it_is_made(tmp_path):
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(CkptError) as fault:
        Tree(tmp_path).read(Compressed("f", 0, 100, 10**17).view, 0, 4)
    assert fault.value.exit_code == 7 and "decompressing" in fault.value.message


def test_large_views_are_forgotten_by_halves(tmp_path, monkeypatch):
    import zstandard

    from ckpt_tool.storage import views

    monkeypatch.setattr(views, "SMALL", 10)
    packed = [zstandard.ZstdCompressor().compress(bytes([n]) * 1000) for n in range(9)]
    (tmp_path / "f").write_bytes(b"".join(packed))
    tree = Tree(tmp_path)
    starts = [sum(map(len, packed[:n])) for n in range(9)]
    for n in (*range(9), *range(9)):
        if tree.views._halves:
            tree.views._most = 2500
        path = Compressed("f", starts[n], len(packed[n]), 1000).view
        assert tree.read(path, 10, 20) == bytes([n]) * 20
        assert len(tree.views._halves) <= 2 and sum(len(own) for _, own in tree.views._halves) <= 4


def test_crc32c_of_the_rfc():
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(bytes([255]) * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_inspect_shows_what_lies_there():
    document = inspect(str(CASES / "adamw_ocdbt_zarr2"), Reading())
    assert document["format"] == "orbax" and document["total"]["tensors"] == 18
    assert document["extras"]["step"] == 3


def test_an_item_of_a_leafs_name_is_left_out_and_said(tmp_path):
    """The leaf is part of the tree: the JSON item beside it may not replace it."""
    step = tmp_path / "7"
    shutil.copytree(CASES / "dtypes_ocdbt_zarr3", step / "state")
    extras = opened(step).catalog.extras
    name, value = next((key, value) for key, value in extras.items() if not isinstance(value, dict))
    (step / name).mkdir()
    (step / name / "metadata").write_text('{"another": 1}')
    (step / "config").mkdir()
    (step / "config" / "metadata").write_text('{"a": 1}')
    catalog = opened(step).catalog
    assert catalog.extras == {**extras, name: value, "config": {"a": 1}}
    assert [note.path for note in catalog.notes if note.code == "N-same-name"] == [str(step / name)]
