"""A job's statement in both directions: what a rank must hold, read back from its own names and shapes, is the same,
and all ranks together hold every element of every tensor."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import MegatronFacts
from ckpt_tool.systems.megatron.job import EMBEDDING, JobRanks, MegatronJob, MegatronRank
from ckpt_tool.systems.megatron.stages import from_counts

EXPERTS = 4
LAYER = {
    "input_layernorm.weight": (8,),
    "self_attention.linear_proj.weight": (8, 8),
    "self_attention.linear_qkv.weight": (24, 8),
    "pre_mlp_layernorm.weight": (8,),
}
DENSE = {"mlp.linear_fc1.weight": (16, 8), "mlp.linear_fc2.weight": (8, 8)}
SPARSE = {"mlp.router.weight": (EXPERTS, 8)} | {
    f"mlp.experts.local_experts.{e}.linear_{name}.weight": shape
    for e in range(EXPERTS)
    for name, shape in (("fc1", (8, 8)), ("fc2", (8, 4)))
}
MODEL = (
    {EMBEDDING: (20, 8)}
    | {f"decoder.layers.{i}.{name}": shape for i in range(4) for name, shape in (LAYER | DENSE).items() if i % 2}
    | {f"decoder.layers.{i}.{name}": shape for i in range(4) for name, shape in (LAYER | SPARSE).items() if not i % 2}
    | {"decoder.final_layernorm.weight": (8,), "mtp.layers.0.eh_proj.weight": (8, 16)}
    | {f"mtp.layers.0.transformer_layer.{name}": shape for name, shape in (LAYER | DENSE).items()}
)


@pytest.mark.parametrize("rows", [None, 24], ids=["", "padded"])
@pytest.mark.parametrize("container", names.CONTAINERS)
@pytest.mark.parametrize(("tp", "pp", "vpp", "ep", "etp"), [(1, 1, 1, 1, 1), (2, 2, 1, 2, 1), (4, 2, 2, 4, 2)])
def test_what_a_rank_must_hold_is_what_its_arrays_are_read_as(tp, pp, vpp, ep, etp, container, rows):
    degrees = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "dp": ep, "cp": 1}
    stages = from_counts([4 // (pp * vpp)] * (pp * vpp), pp, vpp, mtp=1)
    te = container == names.TE_GROUPED
    kept = rows and 20
    job = MegatronJob(
        MegatronFacts(mtp=1, tied=True), degrees, stages, EXPERTS, True, not te, te, container, rows=rows, kept=kept
    )
    ranks = JobRanks(job, {name: (shape, DTYPES["BF16"]) for name, shape in MODEL.items()})
    held = {name: np.zeros(shape, int) for name, shape in MODEL.items()}
    for t, p, e, x in product(range(tp), range(pp), range(ep), range(etp)):
        rank = MegatronRank("", t, p, e, x)
        arrays = ranks.arrays(rank)
        assert len({(array.chunk, array.local) for array in arrays}) == len(arrays)
        for array in arrays:
            again = job.describe_array(array.local, array.shape, array.dtype, rank, array.chunk)
            assert again == array
            for name, box, start, strides in array.parts():
                held[name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
                steps = strides or [1]
                last = start + sum((n - 1) * s for n, s in zip(box.shape, steps, strict=False)) if strides else start
                assert 0 <= start <= last < array.numel
    assert all(count.min() > 0 for count in held.values())


def test_experts_of_a_grouped_weight_lie_transposed_in_it():
    """weight1 of rank 1 of 2: (h, E * own rows of gate and up), against the reshape of `GroupedMLP` itself."""
    degrees = {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 2, "dp": 1, "cp": 1}
    job = MegatronJob(MegatronFacts(), degrees, from_counts([1], 1), 2, True, False, container=names.GROUPED)
    whole = {
        f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc1.weight": np.arange(48).reshape(8, 6) + 100 * e
        for e in range(2)
    }
    (array,) = JobRanks(job, {name: (value.shape, DTYPES["F32"]) for name, value in whole.items()}).arrays(
        MegatronRank("", 1, 0, 0, 1)
    )
    assert (array.local, array.shape) == ("decoder.layers.0.mlp.experts.weight1", (6, 8))
    line = np.full(array.numel, -1)
    for name, box, start, strides in array.parts():
        own = whole[name][box.offset[0] : box.offset[0] + box.shape[0], box.offset[1] : box.offset[1] + box.shape[1]]
        for i, j in np.ndindex(*box.shape):
            line[start + i * strides[0] + j * strides[1]] = own[i, j]
    halves = [np.concatenate((value[2:4], value[6:8])) for value in whole.values()]
    np.testing.assert_array_equal(line.reshape(2, 6, 4), np.stack([half.T for half in halves]))
