"""Faults of meaning, table E of the threat list, in the formats of several files: every file is sound by itself.

`CASES` lists `(row, make(folder) -> path, exit code, words of the message)`; the exit code may be a dict by verb, `"*"`
for the others. Each row copies a fixture and changes one thing: a file lost, swapped with another rank's, taken from
another step, one tensor or number edited. Files are edited with torch, whose classes of other frameworks are stood in
for; the rest of each file stays as it was.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import shutil
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOUND = {"inspect": 0, "verify": 1, "*": 3}  # inspect shows it, verify reports it, writers refuse
WARNED = {"verify": 1, "*": 0}  # the values are told as they are; verify says that they do not fit together

STAGE1 = "deepspeed/z1_bf16_dp4"
STAGE3 = "deepspeed/z3_bf16_dp4"
ALIGNED = "deepspeed/z2_align_dp4"
PIPE = "deepspeed/pipe_pp2_dp2_z1"
EXPERTS = "deepspeed/moe_z2_ep2_dp4"
OFF = "deepspeed/z0_bf16_dp2"
UNI, UNI3, UNI_PIPE = (f"deepspeed-universal/{name}" for name in ("z1_bf16_dp2", "z3_bf16_dp2", "pipe_pp2_dp2"))
DIST, DIST_EXPERTS, DIST_INTEGRITY = (f"megatron-dist/{name}" for name in ("dp2_model_space", "moe_ep2_flat", "core19"))
MEGATRON = "megatron/moe_tp2ep2etp1"
MEGATRON_PIPE = "megatron/gpt2_tied_pp2_adamw"
RANKS = "torch/ranks_fsdp2_dp4"
RANKS_2D = "torch/ranks_tp2_dp2"
MODULE = "mp_rank_00_model_states.pt"


# -- editing a file of torch -------------------------------------------------------------------------------------------


class _Stand:
    """An object of a class that is not here, that pickles as it came."""

    def __new__(cls, *args):
        self = object.__new__(cls)
        self.__dict__["_args"] = args
        return self

    def __init__(self, *args):
        pass

    def __reduce__(self):
        state = {key: value for key, value in self.__dict__.items() if key != "_args"}
        return type(self), self._args, state or None


class _Frameworks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of `deepspeed` and `megatron` whose every attribute is a class."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in ("deepspeed", "megatron"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            made = type(name, (_Stand,), {"__module__": module.__name__})
            setattr(module, name, made)
            return made

        module.__getattr__ = attribute


@contextlib.contextmanager
def stand_ins():
    """Within, frameworks that are not installed can be named by a pickle of our own fixtures."""
    finder = _Frameworks()
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("deepspeed", "megatron"):
                del sys.modules[name]


def edit(path, change):
    """Load, change in place (or take what `change` returns), save."""
    torch = pytest.importorskip("torch")
    with stand_ins():
        value = torch.load(path, weights_only=False, map_location="cpu")
        changed = change(value)
        torch.save(value if changed is None else changed, path)


# -- faults ------------------------------------------------------------------------------------------------------------


def case(fixture, *changes):
    """A copy of the fixture with these changes, each a function of the copy's folder."""

    def make(folder):
        root = folder / "checkpoint"
        shutil.copytree(FIXTURES / fixture, root)
        for change in changes:
            change(root)
        return root

    return make


def lost(*names):
    return lambda root: [
        shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink() for name in names
    ]


def swapped(one, other):
    def change(root):
        (root / one).rename(root / "kept")
        (root / other).rename(root / one)
        (root / "kept").rename(root / other)

    return change


def copied(one, other):
    return lambda root: shutil.copyfile(root / one, root / other)


def edited(name, change):
    return lambda root: edit(root / name, change)


def optim(dp, mp=0):
    return f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def module3(dp):
    return f"zero_pp_rank_{dp}_mp_rank_00_model_states.pt"


def expert(layer, number):
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def states(value):
    """The per-parameter states in a DeepSpeed optimizer file, as a list of dicts."""
    state = value["optimizer_state_dict"]
    return list(state.get("base_optimizer_state", state.get("optimizer_state_dict"))["state"].values())


def next_step(value):
    for state in states(value):
        state["step"] = state["step"] + 1


def next_global_step(value):
    value["global_steps"] += 1


def short_moment(value):
    state = states(value)[0]
    state["exp_avg"] = state["exp_avg"][:-3].clone()


def no_moment(value):
    del states(value)[0]["exp_avg_sq"]


def other_master(value):
    value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[5] += 1


def turned(name):
    def change(value):
        value["module"][name] = value["module"][name].T.clone()

    return change


def without(name):
    def change(value):
        del value["module"][name]

    return change


def reordered(value):
    group = value["param_shapes"][0]
    items = list(group.items())
    group.clear()
    group.update(reversed(items))


def of_dict(change):
    """The tensor of a universal file: it lies in a dict (ZeRO 1, 2) or alone (ZeRO 3)."""

    def changed(value):
        if not isinstance(value, dict):
            return change(value)
        value["param"] = change(value["param"])
        return None

    return changed


def step_of_group(number):
    """Another step in one parameter group of a torch_dist checkpoint."""

    def change(value):
        value["optimizer"]["optimizer"]["param_groups"][number]["step"] += 1

    return change


def flipped(name, at):
    def change(root):
        data = bytearray((root / name).read_bytes())
        data[at] ^= 1
        (root / name).write_bytes(data)

    return change


def told(fixture, name, words=None, code=3, files=None):
    """A row for a file that is lost."""
    return (
        f"E1-lost-{fixture.partition('/')[2]}-{name}",
        case(fixture, lost(name)),
        code,
        words or (name.rpartition("/")[2],),
    )


def next_iteration(value):
    value["iteration"] += 1


def step_of_a_rank(value):
    for optimizer in value["optimizer"]:
        for group in optimizer["optimizer"]["param_groups"]:
            group["step"] += 1


def other_bit(name):
    """One bit of a replicated tensor."""

    def change(value):
        import torch

        value["model"][name].data.view(-1).view(torch.int16)[0] ^= 1

    return change


def without_a_moment(value):
    states = value["optimizer"]["optimizer"]["state"]
    del states[next(iter(states))]["exp_avg"]


def without_an_expert(value):
    for name in [name for name in value["model"] if "local_experts.1." in name]:
        del value["model"][name]


def other_degrees(value):
    value["args"].tensor_model_parallel_size = 4


M0 = "iter_0000002/mp_rank_00_000"
M1 = "iter_0000002/mp_rank_01_001"
P0 = "iter_0000002/mp_rank_00_000"
P1 = "iter_0000002/mp_rank_00_001"
I2 = "iter_0000002"
I5 = "iter_0000005"
SAVED_WHOLE = "fetch one save whole"
CASES = [
    # a rank's file is missing: the message names it
    *(told(STAGE1, name) for name in (MODULE, optim(0), optim(3))),
    *(told(STAGE3, name) for name in (module3(0), module3(2), optim(0), optim(3))),
    *(
        told(PIPE, name)
        for name in (
            "mp_rank_00_model_states.pt",
            "mp_rank_01_model_states.pt",
            optim(1, 1),
            "layer_02-model_states.pt",
        )
    ),
    told(PIPE, "layer_00-model_states.pt", ("tied_modules.embed.weight", "layer_")),
    *(told(EXPERTS, name) for name in (expert(0, 0), expert(1, 3), optim(2))),
    ("E7-lost-last-experts", case(EXPERTS, lost(expert(0, 3), expert(1, 3))), 3, (expert(0, 3), expert(1, 3))),
    ("E7-lost-layer-of-experts", case(EXPERTS, lost(*(expert(1, i) for i in range(4)))), 3, ("4 experts",)),
    told(UNI, MODULE, ("model_states.pt",)),
    *(
        told(UNI, f"zero/embed.weight/{name}.pt", ("embed.weight", f"{name}.pt"))
        for name in ("fp32", "exp_avg", "step")
    ),
    told(UNI, "zero/embed.weight"),
    told(UNI, "zero/optimizer_state.pt"),
    told(UNI3, "zero/layers.0.norm.weight"),
    told(UNI3, module3(1)),
    told(UNI_PIPE, "zero/tied_modules.embed.weight"),
    *(
        told(DIST, f"{I2}/{name}")
        for name in ("__0_0.distcp", "__1_1.distcp", ".metadata", "common.pt", "metadata.json")
    ),
    told(DIST_INTEGRITY, f"{I5}/__0_0.distcp"),
    *(
        told(RANKS, f"{kind}_world_size_4_rank_{rank}.pt", (f"rank {rank}", kind))
        for kind, rank in (("model", 0), ("optim", 3), ("extra_state", 1))
    ),
    *(told(MEGATRON, name) for name in (M0, M1)),
    told(MEGATRON, f"{M1}/model_optim_rng.pt", ("mp_rank_01_001",)),
    told(MEGATRON, f"{M0}/distrib_optim.pt", ("mp_rank_00_000/distrib_optim.pt", "--state model")),
    *(told(MEGATRON_PIPE, name) for name in (P0, P1)),
    # two ranks' files under each other's names
    ("E1-swapped-partitions", case(STAGE1, swapped(optim(1), optim(2))), 3, (optim(1), "layers.0.up.weight")),
    ("E1-swapped-partitions-of-a-size", case(ALIGNED, swapped(optim(0), optim(1))), 3, (optim(0),)),
    ("E1-swapped-stages", case(PIPE, swapped(optim(0, 0), optim(0, 1))), 3, (optim(0, 0),)),
    ("E1-swapped-stage-modules", case(PIPE, swapped(MODULE, "mp_rank_01_model_states.pt")), 3, ("mp_rank_00",)),
    ("E1-swapped-layers", case(PIPE, swapped("layer_01-model_states.pt", "layer_02-model_states.pt")), WARNED, ()),
    (
        "E1-swapped-kinds-of-layers",
        case(PIPE, swapped("layer_01-model_states.pt", "layer_04-model_states.pt")),
        3,
        ("1.",),
    ),
    (
        "E7-swapped-experts",
        case(EXPERTS, swapped(expert(0, 0), expert(0, 1))),
        3,
        (expert(0, 0), "deepspeed_experts.1"),
    ),
    ("E7-swapped-layers-of-experts", case(EXPERTS, swapped(expert(0, 0), expert(1, 0))), 3, ("two moe layers",)),
    ("E7-expert-twice", case(EXPERTS, copied(expert(0, 0), expert(0, 1))), 3, (expert(0, 1),)),
    ("E7-expert-too-many", case(EXPERTS, copied(expert(0, 0), expert(0, 4))), 3, (expert(0, 4),)),
    (
        "E1-swapped-parameters",
        case(UNI, swapped("zero/layers.0.w1.weight", "zero/layers.0.w2.weight")),
        3,
        ("layers.0.w1.weight",),
    ),
    (
        "E1-swapped-dist-files",
        case(DIST, swapped(f"{I2}/__0_0.distcp", f"{I2}/__1_0.distcp")),
        {"*": 3, "verify": 1},
        ("__", ".distcp"),
    ),
    (
        "E1-swapped-ranks",
        case(RANKS, swapped(*(f"model_world_size_4_rank_{i}.pt" for i in (0, 1)))),
        3,
        ("rank 0", "rank 1"),
    ),
    (
        "E1-swapped-ranks-2d",
        case(RANKS_2D, swapped(*(f"optim_world_size_4_rank_{i}.pt" for i in (2, 3)))),
        3,
        ("rank 2", "rank 3"),
    ),
    ("E1-swapped-tensor-ranks", case(MEGATRON, swapped(M0, M1)), 3, ("mp_rank_00_000", "tensor rank 1")),
    ("E1-swapped-pipeline-stages", case(MEGATRON_PIPE, swapped(P0, P1)), 3, ("mp_rank_00_000", "stage 1")),
    # files of two steps, step counters
    (
        "E1-iteration-of-a-rank",
        case(MEGATRON, edited(f"{M1}/model_optim_rng.pt", next_iteration)),
        3,
        ("mp_rank_01_001", "iteration 3"),
    ),
    (
        "E10-step-of-a-rank",
        case(MEGATRON, edited(f"{M1}/model_optim_rng.pt", step_of_a_rank)),
        3,
        ("step", "mp_rank_01_001"),
    ),
    (
        "E1-degrees-of-a-rank",
        case(MEGATRON, edited(f"{M1}/model_optim_rng.pt", other_degrees)),
        3,
        ("mp_rank_01_001", "tensor_model_parallel_size 4"),
    ),
    # replicas that are no replicas
    (
        "E2-bit",
        case(MEGATRON, edited(f"{M1}/model_optim_rng.pt", other_bit("decoder.layers.0.input_layernorm.weight"))),
        FOUND,
        ("replicas differ", "mp_rank_01_001", "decoder.layers.0.input_layernorm.weight", "--replica-policy"),
    ),
    (
        "E9-tied-bit",
        case(MEGATRON_PIPE, edited(f"{P1}/model_optim_rng.pt", other_bit("output_layer.weight"))),
        FOUND,
        ("replicas differ", "mp_rank_00_001", "embedding.word_embeddings.weight"),
    ),
    (
        "E5-moment-lost",
        case(MEGATRON_PIPE, edited(f"{P1}/model_optim_rng.pt", without_a_moment)),
        FOUND,
        ("exp_avg", "mp_rank_00_001"),
    ),
    (
        "E7-expert-lost-on-a-rank",
        case(MEGATRON, edited(f"{M1}/model_optim_rng.pt", without_an_expert)),
        3,
        ("mp_rank_01_001",),
    ),
    ("E1-step-of-a-partition", case(STAGE1, edited(optim(1), next_step)), 3, (optim(1), "step 4", SAVED_WHOLE)),
    ("E1-step-of-a-partition-3", case(STAGE3, edited(optim(2), next_step)), 3, (optim(2), "step 4")),
    ("E1-step-of-a-module-3", case(STAGE3, edited(module3(1), next_global_step)), 3, (module3(1), "global_steps is 4")),
    (
        "E1-step-of-a-stage",
        case(PIPE, edited("mp_rank_01_model_states.pt", next_global_step)),
        3,
        ("mp_rank_01", "global_steps"),
    ),
    (
        "E10-step-of-a-parameter",
        case(UNI, edited("zero/embed.weight/step.pt", lambda step: step + 1)),
        3,
        ("step.pt", "embed.weight"),
    ),
    ("E10-step-of-a-group", case(DIST, edited(f"{I2}/common.pt", step_of_group(0))), FOUND, ("param_groups", "step")),
    # moments, masters and weights that do not fit each other
    ("E5-moment-too-short", case(STAGE1, edited(optim(1), short_moment)), 3, (optim(1), "exp_avg")),
    ("E5-moment-too-short-3", case(STAGE3, edited(optim(1), short_moment)), 3, (optim(1), "exp_avg")),
    ("E5-moment-lost-on-a-rank", case(STAGE1, edited(optim(1), no_moment)), FOUND, ("exp_avg_sq", "in no file")),
    (
        "E5-moment-of-another-shape",
        case(UNI, edited("zero/embed.weight/exp_avg.pt", of_dict(lambda t: t[:-1].clone()))),
        3,
        ("embed.weight", "[32, 10]"),
    ),
    (
        "E5-moment-turned",
        case(UNI, edited("zero/layers.0.w1.weight/exp_avg.pt", of_dict(lambda t: t.T.clone()))),
        3,
        ("[10, 23]",),
    ),
    (
        "E5-moment-too-short-flat",
        case(UNI3, edited("zero/embed.weight/exp_avg.pt", of_dict(lambda t: t[:-1].clone()))),
        3,
        ("embed.weight", "329"),
    ),
    (
        "E5-weight-turned",
        case(STAGE1, edited(MODULE, turned("layers.0.up.weight"))),
        3,
        ("layers.0.up.weight", "[10, 23]"),
    ),
    ("E5-weight-lost", case(STAGE1, edited(MODULE, without("layers.0.up.weight"))), 3, ("layers.0.up.weight", MODULE)),
    ("E5-shapes-in-another-order", case(STAGE1, edited(MODULE, reordered)), 3, ("param_slice_mappings",)),
    ("E6-master", case(STAGE1, edited(optim(1), other_master)), WARNED, ()),
    ("E6-master-universal", case(UNI, edited("zero/embed.weight/fp32.pt", of_dict(lambda t: t + 1))), WARNED, ()),
    # bytes that changed after the save
    (
        "B16-integrity",
        case(DIST_INTEGRITY, flipped(f"{I5}/__0_0.distcp", 5000)),
        {"*": 3, "verify": 1},
        ("__0_0.distcp", "sha-256"),
    ),
]
