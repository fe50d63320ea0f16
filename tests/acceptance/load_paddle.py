"""A real PaddleFormers job resumes from a checkpoint and says what it holds: run by a Python with Paddle.

    python load_paddle.py CHECKPOINT CASE REPORT     # CASE: MODEL_DTYPE_FORMAT_LAYOUT of fixtures/make/paddle_hybrid.py

As many gloo ranks as the layout wants build the job with zeroed parameters, call the Trainer's own loaders on
CHECKPOINT, let the optimizer take its states up, and compare every parameter, master and moment with the planned value
of its name and place. REPORT (JSON): {"compared": n, "wrong": [words], "missing": [words]}. One process for `single`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

MAKERS = Path(__file__).resolve().parents[2] / "fixtures" / "make"
sys.path.insert(0, str(MAKERS))


def load(job: Any, checkpoint: str, written: str) -> None:
    """The order of Trainer.train(): flex at once; else the model and then its optimizer, the sharded way round."""
    if written == "flex":
        job._load_flex_checkpoint(checkpoint)
    elif written == "io":
        job._load_optimizer_and_scheduler(checkpoint)
        job._load_from_checkpoint(checkpoint)
    else:
        job._load_from_checkpoint(checkpoint)
        job._load_optimizer_and_scheduler(checkpoint)


def compare(live: Any) -> dict[str, Any]:
    import numpy as np
    from paddle_tiny import plain, rounded

    wrong = []
    compared = 0

    def check(state: str, static: str, tensor: Any, wanted: Any) -> None:
        nonlocal compared
        found = plain(tensor)
        wanted = rounded(wanted, found.dtype.name)
        compared += 1
        name = live.by_static[static][0]
        if found.shape != wanted.shape or not np.array_equal(
            found.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8)
        ):
            wrong.append(f"{state}/{name} {list(found.shape)}: {found.reshape(-1)[:3]} is not {wanted.reshape(-1)[:3]}")

    # without sharding_io the first data rank alone reads the model: wrapping, which comes later, broadcasts it
    reads = live.written in ("io", "flex") or live.job.args.dataset_rank == 0
    for static, (_, weight) in live.by_static.items() if reads else ():
        check("model", static, weight.local_tensor, live.planned("model", static))
    for state, plan, static, tensor in live.states():
        view = live.views.get(static)
        if view is not None and view._param_begin - view._index >= view._param.size and live.written == "flex":
            continue  # a share of padding alone is in no flex checkpoint, the job's own ones included
        check(state, static, tensor, live.stored(plan, static))
    return {"compared": compared, "wrong": wrong, "states": sorted({state for state, *_ in live.states()})}


def reduce_plainly(dist: Any) -> None:
    """Gloo has no calculation stream: the same reductions, waited for."""
    streamed = dist.stream.all_reduce

    def plain(tensor: Any, *arguments: Any, use_calc_stream: bool = False, **named: Any) -> Any:
        return streamed(tensor, *arguments, **named)

    dist.stream.all_reduce = plain


def rank_body(checkpoint: str, case: str, folder: str) -> None:
    import numpy as np
    import paddle
    from paddle_hybrid import Live
    from paddle_tiny import put

    # a CPU build has no device to move to; the loaders say cuda() and pin_memory() on their way
    paddle.Tensor.cuda = paddle.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    reduce_plainly(paddle.distributed)
    live = Live(case, folder)
    live.job.args.ignore_load_lr_and_optim = False
    for _, weight in live.by_static.values():
        put(weight.local_tensor, np.zeros(weight.local_tensor.shape, np.float32))
    if live.written == "flex":
        live.create_states()
        for *_, tensor in live.states():
            put(tensor, np.zeros(tensor.shape, np.float32))
    load(live.job, checkpoint, live.written)
    live.create_states()
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    (Path(folder) / f"report{rank}.json").write_text(json.dumps(compare(live)))
    if live.job.args.world_size > 1:
        paddle.distributed.barrier()


def main(checkpoint: str, case: str, report: str) -> None:
    from paddle_hybrid import LAYOUTS
    from paddle_ranks import run_ranks

    world = LAYOUTS[case.rpartition("_")[2]][0]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, __file__, "--rank", checkpoint, case, folder)
        found = [json.loads((Path(folder) / f"report{rank}.json").read_text()) for rank in range(world)]
    whole = {
        "compared": sum(one["compared"] for one in found),
        "wrong": [f"rank {rank}: {word}" for rank, one in enumerate(found) for word in one["wrong"]],
        "states": sorted({state for one in found for state in one["states"]}),
    }
    Path(report).write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_body(*sys.argv[2:])
        sys.stdout.flush()
        os._exit(0)
    main(*sys.argv[1:])
