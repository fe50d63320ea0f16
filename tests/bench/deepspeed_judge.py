"""What deepspeed_peers.py asks of DeepSpeed's own environment (torch, safetensors, deepspeed; never ckpt_tool).

python deepspeed_judge.py build OUT MILLIONS                a ZeRO-2 checkpoint of 4 ranks, saved by a real engine
python deepspeed_judge.py zero_to_fp32 OURS THEIRS          the same tensors, bit for bit; prints the bytes compared
python deepspeed_judge.py ds_to_universal OURS THEIRS
python deepspeed_judge.py against JOB OUT TRUTH             how much of the truth an output holds, in words
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def build(out: str, millions: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))
    from ranks import on_ranks

    on_ranks(4, _train, out, int(millions))


def _train(rank: int, world: int, out: str, millions: int) -> None:
    """One AdamW step of an embedding, wide layers and a head, `millions` of parameters together, about."""
    import deepspeed
    import deepspeed_zero as made

    made.environment(rank, world)
    width = 1024
    layers = max(1, (millions * 10**6 - 2 * 32000 * width) // (2 * width * 4 * width))
    torch.manual_seed(0)
    body = [
        torch.nn.Linear(*sizes, bias=False) for _ in range(layers) for sizes in ((width, 4 * width), (4 * width, width))
    ]
    model = torch.nn.Sequential(torch.nn.Embedding(32000, width), *body, torch.nn.Linear(width, 32000, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = made.BASE | made.BF16 | made.zero(2) | {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    logits = engine(torch.arange(4)[None] + rank)
    engine.backward(logits.float().square().mean())
    engine.step()
    engine.save_checkpoint(out)


def universal(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(STATE/NAME, values) of a universal checkpoint. `folder` is the tag's, or holds the only one."""
    zero = next(folder.rglob("zero"))
    for name in sorted(path for path in zero.iterdir() if path.is_dir()):
        for state in STATES:
            file = name / f"{state}.pt"
            if file.exists():
                held = torch.load(file, weights_only=False)
                yield f"{state}/{name.name}", held["param"] if isinstance(held, dict) else held


def model(folder: Path) -> Tensors:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def same(ours: Tensors, theirs: Tensors) -> None:
    wrong = sorted(ours.keys() ^ theirs.keys())
    compared = 0
    for name in ours.keys() & theirs.keys():
        compared += ours[name].nbytes
        if not torch.equal(ours[name].float(), theirs[name].float()):
            wrong.append(name)
    if wrong:
        raise SystemExit(f"{len(wrong)} tensors differ: {', '.join(wrong[:5])}")
    print(compared)


def against(job: str, out: Path, truth: Path) -> None:
    """Every tensor that the job is to give, against what it gave."""
    whole = load_file(truth)
    states = (
        {"fp32": "master"}
        if job == "zero_to_fp32"
        else {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    )
    wanted = {
        f"{mine}/{key.split('/', 1)[1]}": value
        for mine, state in states.items()
        for key, value in whole.items()
        if key.startswith(f"{state}/")
    }
    for key, value in whole.items():  # frozen parameters and buffers have no master: their weight is all there is
        name = key.removeprefix("model/")
        if key.startswith("model/") and f"fp32/{name}" not in wanted:
            wanted[f"fp32/{name}"] = value
    found = dict(universal(out)) if job == "ds_to_universal" else {f"fp32/{k}": v for k, v in model(out).items()}
    missing = sorted(wanted.keys() - found.keys())
    wrong = [
        k
        for k in sorted(wanted.keys() & found.keys())
        if not torch.equal(found[k].float().reshape(-1), wanted[k].float().reshape(-1))
    ]
    words = [f"{len(wanted) - len(missing) - len(wrong)} of {len(wanted)} right"]
    if missing:
        words.append(f"{len(missing)} missing ({missing[0]})")
    if wrong:
        words.append(f"{len(wrong)} WRONG ({wrong[0]})")
    print(", ".join(words))


def main() -> None:
    command, *args = sys.argv[1:]
    if command == "build":
        build(*args)
    elif command == "against":
        against(args[0], Path(args[1]), Path(args[2]))
    elif command == "zero_to_fp32":
        same(model(Path(args[0])), model(Path(args[1])))
    else:
        same(dict(universal(Path(args[0]))), dict(universal(Path(args[1]))))


if __name__ == "__main__":
    main()
