"""What NVIDIA's Megatron-Bridge makes of small models of many families: the golden files of `test_against_bridge.py`.

Run by hand, in an environment of its own (Python 3.12; `--no-deps` because the bridge wants CUDA packages):

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 einops omegaconf==2.3.1 hydra-core==1.3.4 peft
    pip install --no-deps megatron-core==0.19.2 megatron-bridge==0.6.2 antlr4-python3-runtime==4.9.3
    pip install --no-deps mcore-bridge==1.6.5                               # for the cases that are ms-swift's
    python tests/families/bridge_golden.py fixtures/bridge                  # every case
    python tests/families/bridge_golden.py fixtures/bridge qwen3_next ...   # some
    python tests/families/bridge_golden.py fixtures/bridge --alike llama ...  # does mcore-bridge make the same of them?

Cases whose `versions` name another transformers (Gemma 4: 5.12.1) want that one installed instead; kimi_k3 wants
KIMI_K3=FOLDER, that of `src/megatron/bridge/models/kimi/kimi_k3_*.py` of Megatron-Bridge 067f987; those that name a
commit of Megatron-LM its folder, with `megatron/core` in it, in PYTHONPATH.

For each case: transformers saves a tiny model; its files' tensors, and those of multi-token prediction, which
transformers does not build, are filled with even numbers that all differ: 2, 4, 6, ... in the order of the names;
`AutoBridge.load_hf_weights` loads them into a Megatron model (`bridge_on_cpu.py` says how without a GPU) in which every
element was NaN. CASE.config.json is the config that transformers saved, with what released ones say beside. CASE.json:

    versions    of what made it
    hub         {name: shape} in the order in which the numbers were given
    megatron    {name in the state dict of megatron-core: [shape, runs]}; runs: [first value, length, step], ... in
                row-major order. An odd value is an even one of the hub less one: the bridge computes there; zeros
                are its own
    untouched   names of the state dict that the bridge does not load (still NaN)
    unused      hub tensors that no element comes from
    torch_dist  {key of a distributed checkpoint: its tensor's shape}, by `sharded_state_dict`
    unsaved     why `dist_checkpointing.save` refuses that state dict ("" where it doesn't); `torch_dist` is that of a
                job with `hetereogenous_dist_checkpoint`, core's own switch for layers that differ
    tp2         as `megatron`, of each of two tensor-parallel ranks (gloo), without the tensors that are whole on both
"""

from __future__ import annotations

import bridge_on_cpu  # isort: skip  # before megatron

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bridge_cases import CASES, Case
from safetensors import safe_open
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]


def saved_shapes(case: Case, config: dict[str, Any], folder: Path) -> Shapes:
    """Saves the real class's model, gives names and shapes of its files."""
    import transformers  # as it is now: the bridge makes the module anew

    own = transformers.AutoConfig.for_model(case.model_type, **config)
    own.architectures = [case.architecture]
    model = getattr(transformers, case.architecture)(own)
    model.save_pretrained(folder)
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            shapes |= {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}
        file.unlink()
    for index in folder.glob("*.index.json"):
        index.unlink()
    return shapes


def counted(shapes: Shapes) -> dict[str, np.ndarray]:
    """Every element another even number, exact in fp32."""
    arrays = {}
    start = 1
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        arrays[name] = 2 * np.arange(start, start + n, dtype=np.int64).reshape(shape)
        start += n
    assert 2 * start < 2**24, "values would be rounded in fp32"
    return arrays


def hub_model(case: Case, folder: Path) -> Shapes:
    """The model's folder as it lies on a hub; the shapes in the order of their numbers."""
    if case.before:
        case.before()
    shapes = saved_shapes(case, dict(case.config), folder)
    if case.more:
        with tempfile.TemporaryDirectory() as other:
            shapes = case.more(shapes, lambda **change: saved_shapes(case, {**case.config, **change}, Path(other)))
    shapes = dict(sorted(shapes.items()))
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in counted(shapes).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = changed(json.loads((folder / "config.json").read_text()), case.stated)
    (folder / "config.json").write_text(json.dumps(stated, indent=1, sort_keys=True) + "\n")
    return shapes


def changed(config: dict[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values, parts of it key by key."""
    parts = {key: {**(config.get(key) or {}), **new} for key, new in by.items() if isinstance(new, dict)}
    return config | {**by, **parts}


def nvidia(case: Case, folder: Path, tp: int) -> tuple[torch.nn.Module, Callable[[], object]]:
    """An empty model by Megatron-Bridge, and what loads it."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    # no use_cpu_initialization: it wants more of a layer than its sizes; the GPU's way is the CPU's here
    wanted = {"tensor_model_parallel_size": tp, "params_dtype": torch.float32, "fp16": False, "bf16": False,
              "perform_initialization": False, "gradient_accumulation_fusion": False, "make_vocab_size_divisible_by": 1,
              "should_pad_vocab": False, "sequence_parallel": tp > 1, **case.provider}  # fmt: skip
    for name, value in wanted.items():
        setattr(provider, name, value)
    if tp > 1:
        provider.expert_tensor_parallel_size = case.expert_tp
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False, mixed_precision_wrapper=None)
    assert len(model) == 1
    return model[0].float(), lambda: bridge.load_hf_weights(model)


def swift(case: Case, folder: Path, tp: int) -> tuple[torch.nn.Module, Callable[[], object]]:
    """The same by mcore-bridge of ms-swift."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    degrees = {"tensor_model_parallel_size": tp, "expert_tensor_parallel_size": case.expert_tp if tp > 1 else None}
    parallel_state.initialize_model_parallel(**degrees)
    model_parallel_cuda_manual_seed(1)
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config

    stated = hf_to_mcore_config(transformers.AutoConfig.from_pretrained(folder))
    wanted = {**degrees, "params_dtype": torch.float32, "sequence_parallel": tp > 1,
              "gradient_accumulation_fusion": False, **case.provider}  # fmt: skip
    config = ModelConfig(**{**stated, **wanted})
    (module,) = models = get_mcore_model(config)
    return module.float(), lambda: config.bridge.load_weights(models, str(folder))


def keys_of(module: torch.nn.Module) -> tuple[dict[str, list[int]], str]:
    """What a distributed checkpoint of the model has for tensors, and why core refuses to save it by the job's own
    arguments."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
    from megatron.core.extensions import transformer_engine

    transformer_engine.TEGroupedLinear._split_extra_state = lambda self, state: [state] * self.num_gemms

    def shards() -> list[Any]:
        state = module.sharded_state_dict()  # type: ignore[operator]
        apply_factories(state)
        return [each for each in nested_values(state) if isinstance(each, ShardedTensor)]

    found = shards()
    unsaved = ""
    try:
        validate_sharding_integrity(determine_global_metadata(dict(enumerate(found)))[1])
    except AssertionError as e:  # of two shapes under one key
        unsaved = f"AssertionError: {e}"[:120]
        for each in module.modules():
            if hasattr(getattr(each, "config", None), "hetereogenous_dist_checkpoint"):
                each.config.hetereogenous_dist_checkpoint = True
        found = shards()
    return dict(sorted((each.key, list(each.global_shape)) for each in found)), unsaved


def loaded(
    case: Case, folder: Path, tp: int
) -> tuple[dict[str, np.ndarray], list[str], tuple[dict[str, list[int]], str]]:
    """This rank's state dict after loading, the names that are still NaN, and `keys_of` a single rank's."""
    if case.before:
        case.before()
    module, load = (swift if case.swift else nvidia)(case, folder, tp)

    def state() -> dict[str, torch.Tensor]:
        found = module.state_dict(keep_vars=True)
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    with torch.no_grad():
        for value in state().values():
            value.fill_(float("nan") if value.is_floating_point() else -1)
    load()
    arrays = {}
    untouched = []
    for name, value in state().items():
        if not value.is_floating_point() and (value == -1).all():  # counts that no file has
            continue
        array = value.detach().to(torch.float64).numpy()
        if array.size and np.isnan(array).all():
            untouched.append(name)
            continue
        assert not np.isnan(array).any(), f"{name}: loaded in part"
        exact = np.rint(array)
        assert (array == exact).all(), f"{name}: values that no hub tensor has: {array.ravel()[:4]}"
        arrays[name] = exact.astype(np.int64)
    return arrays, untouched, keys_of(module) if tp == 1 else ({}, "")


def runs(array: np.ndarray) -> list[Any]:
    """[shape, [first, length, step]...] of the values in row-major order."""
    flat = array.ravel()
    found = []
    at = 0
    steps = np.diff(flat)
    while at < len(flat):
        step = int(steps[at]) if at < len(steps) else 2
        change = np.flatnonzero(steps[at:] != step)
        length = int(change[0]) + 1 if len(change) else len(flat) - at
        if length == 1 or (length == 2 and step != 2):
            length = 1
            step = 2
        found.append([int(flat[at]), length, step])
        at += length
    return [list(array.shape), found]


def _rank(case: Case, folder: Path, tp: int, rank: int, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp)}
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store{tp}", rank=rank, world_size=tp,
                                             timeout=timedelta(seconds=120))  # fmt: skip
        with bridge_on_cpu.OnCpu():
            arrays, untouched, (keys, unsaved) = loaded(case, folder, tp)
        found = {name: runs(array) for name, array in arrays.items()}
        whole = {"megatron": found, "untouched": untouched, "torch_dist": keys, "unsaved": unsaved}
        Path(f"{out}.{tp}.{rank}").write_text(json.dumps(whole))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ranks(case: Case, folder: Path, tp: int, out: Path) -> list[dict[str, Any]] | None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(case, folder, tp, rank, out)) for rank in range(tp)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(300)
    if any(each.exitcode != 0 for each in ranks):
        for each in ranks:
            each.kill()
        return None
    return [json.loads(Path(f"{out}.{tp}.{rank}").read_text()) for rank in range(tp)]


def _lines(name: str, value: Any) -> str:
    """One line a tensor."""
    if isinstance(value, list):
        return (
            f'"{name}": [\n'
            + ",\n".join(_object(each) if isinstance(each, dict) else json.dumps(each) for each in value)
            + "\n]"
        )
    return f'"{name}": ' + _object(value) if isinstance(value, dict) else f'"{name}": {json.dumps(value)}'


def _object(value: dict[str, Any]) -> str:
    return (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in value.items()) + "\n}"
    )


def golden(case: Case, out: Path) -> bool:
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "model"
        shapes = hub_model(case, folder)
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(json.dumps(changed(json.loads(config), case.posing)))
        one = _ranks(case, folder, 1, Path(temp) / "rank")
        if one is None:
            return False
        whole = one[0]
        seen = np.concatenate([_values(each) for each in whole["megatron"].values()])
        unused = [
            name
            for name, array in counted(shapes).items()
            if not (np.isin(array, seen) | np.isin(array - 1, seen)).any()
        ]
        document: dict[str, Any] = {"versions": case.versions, "hub": {name: list(n) for name, n in shapes.items()},
                    "megatron": whole["megatron"], "untouched": whole["untouched"], "unused": unused,
                    "torch_dist": whole["torch_dist"], "unsaved": whole["unsaved"]}  # fmt: skip
        two = _ranks(case, folder, 2, Path(temp) / "rank") if case.tp2 else None
        if case.tp2 and two is None:
            return False
        if two:
            document["tp2"] = [
                {name: value for name, value in rank["megatron"].items()
                 if any(other["megatron"].get(name) != whole["megatron"].get(name) for other in two)} for rank in two
            ]  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{case.name}.json").write_text("{\n" + ",\n".join(_lines(*each) for each in document.items()) + "\n}\n")
        (out / f"{case.name}.config.json").write_text(config)
    many = sum(len(v[1]) for v in document["megatron"].values())
    print(f"{case.name}: {len(shapes)} hub, {len(document['megatron'])} megatron, {many} runs, "
          f"untouched {document['untouched']}, unused {unused}, tp2 {len(two or ())}", flush=True)  # fmt: skip
    return True


def alike(case: Case, folder: Path) -> bool:
    """Says what mcore-bridge makes otherwise than the golden file of Megatron-Bridge. The answer stands in
    `bridge_open.ALIKE`."""
    with tempfile.TemporaryDirectory() as temp:
        mtp = {"mtp_num_layers": 1} if case.more else {}
        if not golden(replace(case, swift=True, provider=mtp, posing={}), Path(temp)):
            return False
        mine, theirs = (json.loads((at / f"{case.name}.json").read_text()) for at in (folder, Path(temp)))
    tensors = mine["megatron"]
    others = theirs["megatron"]
    differ = [name for name in sorted(tensors | others) if tensors.get(name) != others.get(name)]
    keys = [key for key in sorted(mine["torch_dist"] | theirs["torch_dist"]) if key not in theirs["torch_dist"]]
    print(f"{case.name}: {len(differ)} tensors otherwise {differ[:4]}, keys missing {keys[:4]}", flush=True)
    return True


def _values(tensor: list[Any]) -> np.ndarray:
    return np.concatenate([first + step * np.arange(length) for first, length, step in tensor[1]] or [np.zeros(0)])


def main(out: Path, names: list[str]) -> int:
    make = alike if "--alike" in names else golden
    names = [name for name in names if name != "--alike"]
    chosen = [case for case in CASES if not names or case.name in names]
    if not all(case.swift for case in chosen):
        import megatron.bridge.models  # noqa: F401  # once, before the ranks are forked

    failed = []
    for case in chosen:
        try:
            good = make(case, out)
        except Exception:
            traceback.print_exc()
            good = False
        if not good:
            failed.append(case.name)
    if failed:
        print("failed:", *failed)
    return bool(failed)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
