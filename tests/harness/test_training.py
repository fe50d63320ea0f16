"""The trainer: the same bits in every layout, and gradients that are right.

Bits are compared with one rank's, whatever carries the ranks; that one rank is right is shown by a plain model that
shares no code with it. Arrays: a trained state, put together by slices.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import trained_states  # noqa: E402
from trained_states import Run, differing  # noqa: E402

from ckpt_tool.errors import Incomplete  # noqa: E402
from ckpt_tool.harness import optimizer  # noqa: E402
from ckpt_tool.harness.launch import run_ranks  # noqa: E402
from ckpt_tool.harness.layout import HarnessLayout  # noqa: E402
from ckpt_tool.harness.model import attention, compute_swiglu, norm  # noqa: E402
from ckpt_tool.harness.optimizer import AdamW, Muon, MuonSlices, Schedule, Slices  # noqa: E402
from ckpt_tool.harness.pieces import STATES  # noqa: E402
from ckpt_tool.harness.randomness import sample  # noqa: E402
from ckpt_tool.harness.schedule import schedule  # noqa: E402
from ckpt_tool.harness.shape import ModelShape  # noqa: E402
from ckpt_tool.harness.train import Trainer, TrainingJob  # noqa: E402

QUICK = ModelShape.quick()
SHAPES = {
    "quick": QUICK,
    "full": ModelShape(),
    "tied": QUICK.with_(tied=True, rows=104),
    "indivisible": ModelShape.indivisible(),
    "dense": QUICK.with_(experts=0),
}
STEPS = 2


def job(text: str, shape: str = "quick", *, canonical: bool = True, muon: bool = False) -> TrainingJob:
    return TrainingJob(SHAPES[shape], HarnessLayout.parse(text), canonical=canonical, muon=Muon() if muon else None)


@cache
def alone(shape: str, canonical: bool, steps: int, folder: Path, muon: bool = False) -> Run:
    """One rank's run."""
    return trained_states.run(job("tp1", shape, canonical=canonical, muon=muon), steps, folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def assert_same_bits(shape: str, text: str, backend: str, folder: Path, tmp_path: Path, *, muon: bool = False) -> None:
    want = alone(shape, True, STEPS, folder, muon)
    got = trained_states.run(job(text, shape, muon=muon), STEPS, tmp_path, backend=backend)
    assert got.steps == want.steps, "loss and gradient norm"
    assert got.scalars == want.scalars
    assert not differing(got.whole, want.whole)


# -- canonical: bitwise ------------------------------------------------------------------------------------------------


@pytest.mark.share(12)
@pytest.mark.parametrize(
    "text",
    [
        "tp2",
        "tp4",
        "pp2",
        "dp2",
        "dp2,ep2",
        "dp4,ep4,zero2",
        "dp2,zero3",
        "dp2,zero0",
        "tp2,pp2,dp2,ep2",
        "dp4,ep2,zero3",
    ],
)
def test_threads_give_the_bits_of_one_rank(text: str, folder: Path, tmp_path: Path) -> None:
    assert_same_bits("quick", text, "sim", folder, tmp_path)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("quick", "tp4"),
        ("quick", "dp4,ep4,zero2"),
        ("quick", "dp2,zero0"),
        ("quick", "tp2,pp2,dp2,ep2"),
        ("tied", "tp2,pp2,dp2"),
        ("indivisible", "tp2,dp4,ep2"),
    ],
)
def test_muon_gives_the_bits_of_one_rank(shape: str, text: str, folder: Path, tmp_path: Path) -> None:
    """Whole matrices on single data ranks, parts of them on tensor ranks: the same products everywhere."""
    assert_same_bits(shape, text, "sim", folder, tmp_path, muon=True)
    want = alone(shape, True, STEPS, folder, True).whole
    matrices = {name for name, state in want if state == "momentum_buffer"}
    assert matrices and not matrices & {name for name, state in want if state == "exp_avg"}
    assert "model.layers.0.self_attn.q_proj.weight" in matrices and "lm_head.weight" not in matrices


@pytest.mark.share(3)
@pytest.mark.parametrize("text", ["tp2", "tp2,pp2,dp2,ep2", "dp4,ep4,zero3"])
def test_processes_give_the_bits_of_one_rank(text: str, folder: Path, tmp_path: Path) -> None:
    """Simulation and gloo agree, then, for each agrees with one rank."""
    assert_same_bits("quick", text, "gloo", folder, tmp_path)


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("tied", "pp2"),
        ("tied", "tp2,dp2,zero3"),
        ("tied", "tp4,pp2"),
        ("indivisible", "tp2,dp2,ep2"),
        ("indivisible", "tp4,pp2"),
        ("dense", "tp2,pp2,dp2"),
        ("full", "pp2,vpp2"),
        ("full", "pp3,split=1-2-1"),
    ],
)
def test_odd_models_and_pipelines(shape: str, text: str, folder: Path, tmp_path: Path) -> None:
    assert_same_bits(shape, text, "sim", folder, tmp_path)


MATRIX = [
    "tp2",
    "tp4",
    "pp2",
    "pp4",
    "dp2",
    "dp4",
    "dp2,ep2",
    "dp4,ep4",
    "tp2,pp2,dp2,ep2",
    "tp2,dp4,ep2",
    "pp2,dp4,ep4",
    "tp4,pp2",
    "tp2,pp4",
    "pp3",
    "pp3,split=1-1-2",
    "pp2,vpp2",
    "tp2,pp2,vpp2,dp2,ep2",
    "dp8,ep4,zero2",
    "dp4,ep2,zero3",
    "dp4,zero0",
    "tp2,pp2,dp2,zero3",
    "tp4,dp4,ep4",
    "tp2,dp2,pp4",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", MATRIX)
def test_whole_matrix_on_gloo(text: str, folder: Path, tmp_path: Path) -> None:
    assert_same_bits("full", text, "gloo", folder, tmp_path)


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2,pp2,dp2,ep2", "dp4,ep2"),
        ("dp4,ep4,zero3", "tp2,pp2,dp2"),
        ("dp2,zero2", "tp4,pp2"),
    ],
)
def test_a_run_goes_on_in_another_layout(first: str, second: str, folder: Path, tmp_path: Path) -> None:
    want = alone("quick", True, 4, folder)
    before = trained_states.run(job(first), 2, tmp_path)
    after = trained_states.run(replace(job(second), seed=99), 2, tmp_path, start=before)  # the seed is the checkpoint's
    assert before.steps + after.steps == want.steps
    assert not differing(after.whole, want.whole) and after.scalars == want.scalars


@pytest.mark.share(3)
@pytest.mark.parametrize("text", ["dp3,zero1", "dp3,zero3", "tp2,dp3,zero2"])
def test_a_layout_that_cannot_train_still_holds_the_state(text: str, folder: Path, tmp_path: Path) -> None:
    """Three data ranks pad the lines; back on one rank nothing has changed."""
    want = alone("quick", True, STEPS, folder)
    held = trained_states.run(job(text), 0, tmp_path, start=want)
    assert not differing(held.whole, want.whole) and held.scalars == want.scalars


@pytest.mark.slow
def test_each_scalar_and_state_matters(folder: Path, tmp_path: Path) -> None:
    """What a checkpoint says is used: another value of it, another run."""
    start = alone("quick", True, STEPS, folder)
    want = trained_states.run(job("tp1"), 2, tmp_path, start=start)
    for name in ("step", "consumed", "seed"):
        other = start._replace(scalars={**start.scalars, name: start.scalars[name] + 4})
        assert trained_states.run(job("tp1"), 2, tmp_path, start=other).steps != want.steps, name
    for state in STATES:
        key = ("model.layers.1.mlp.experts.2.up_proj.weight", state)
        other = start._replace(whole={**start.whole, key: start.whole[key] * 1.5 + 1e-3})
        assert differing(trained_states.run(job("tp1"), 2, tmp_path, start=other).whole, want.whole), state


def test_a_checkpoint_without_its_counters_is_refused() -> None:
    def entry(comm: object) -> None:
        Trainer(job("tp1"), comm).load(lambda *_: None, {"step": 3})  # type: ignore[arg-type]

    with pytest.raises(Incomplete, match="consumed, seed") as e:
        run_ranks(1, entry, backend="sim")
    assert e.value.code == "E1503"


# -- native: a tolerance -----------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("text", ["tp2,pp2,dp2,ep2", "tp4,dp2,zero3"])
def test_native_mode_is_near(text: str, folder: Path, tmp_path: Path) -> None:
    want = alone("quick", False, 4, folder)
    got = trained_states.run(job(text, canonical=False), 4, tmp_path)
    for mine, theirs in zip(got.steps, want.steps, strict=True):
        assert mine[1] == pytest.approx(theirs[1], rel=2e-3) and mine[2] == pytest.approx(theirs[2], rel=2e-2)
    assert differing(got.whole, want.whole), "native sums are not in canonical order: some bits differ"


# -- one rank is right -------------------------------------------------------------------------------------------------


def plain_loss(shape: ModelShape, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The model by heart, fp32: every expert sees every token, the shares of those not chosen are 0."""

    def scaled(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + shape.epsilon).sqrt() * weights[name]

    def mlp(x: torch.Tensor, root: str) -> torch.Tensor:
        gate, up, down = (weights[f"{root}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        inner = torch.einsum("th,fh->tf", x, gate)
        return torch.einsum("tf,hf->th", inner * inner.sigmoid() * torch.einsum("th,fh->tf", x, up), down)

    def turn(x: torch.Tensor) -> torch.Tensor:  # (tokens, heads, head_dim), as complex numbers
        half = shape.head_dim // 2
        angle = torch.arange(len(x))[:, None] * shape.theta ** (-torch.arange(half) / half)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    x = weights["model.embed_tokens.weight"][tokens[:-1]]
    for layer in range(shape.layers):
        root = f"model.layers.{layer}"
        a = None
        a = scaled(x, f"{root}.input_layernorm.weight")
        q, k, v = (
            (a @ weights[f"{root}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, shape.head_dim))
            for part in "qkv"
        )
        q = turn(q)
        k = turn(k)
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (k, v))
        seen = torch.nn.functional.scaled_dot_product_attention(*(p.transpose(0, 1) for p in (q, k, v)), is_causal=True)
        x = x + seen.transpose(0, 1).flatten(1) @ weights[f"{root}.self_attn.o_proj.weight"].T
        b = scaled(x, f"{root}.post_attention_layernorm.weight")
        if not shape.is_sparse(layer):
            x = x + mlp(b, f"{root}.mlp")
            continue
        chances = (b @ weights[f"{root}.mlp.gate.weight"].T).softmax(-1)
        least = chances.topk(shape.top, -1).values[:, -1:]
        shares = torch.where(chances >= least, chances, 0)
        shares = shares / shares.sum(-1, keepdim=True)
        every = torch.stack([mlp(b, f"{root}.mlp.experts.{e}") for e in range(shape.experts)], 1)
        x = x + (every * shares[..., None]).sum(1) + mlp(b, f"{root}.mlp.shared_experts")
    head = weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    logits = scaled(x, "model.norm.weight") @ head[: shape.vocab].T
    return torch.nn.functional.cross_entropy(logits, tokens[1:])


@pytest.mark.share(3)
@pytest.mark.parametrize("shape", ["quick", "tied", "dense"])
def test_the_model_is_transformers_ernie(shape: str, tmp_path: Path) -> None:
    """The loss of transformers' own model with the trained weights, fp32."""
    transformers = pytest.importorskip("transformers")
    sizes = SHAPES[shape].with_(dropout=0.0)
    made = TrainingJob(sizes, HarnessLayout.parse("tp2,pp2"))
    trained = trained_states.run(made, 2, tmp_path)
    said = {
        key: value for key, value in sizes.config().items() if key not in ("architectures", "model_type", "torch_dtype")
    }
    kind = "Ernie4_5_Moe" if sizes.experts else "Ernie4_5"
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**said)).float().eval()
    weights = {name: whole.float() for (name, state), whole in trained.whole.items() if state == "model"}
    for layer in filter(sizes.is_sparse, range(sizes.layers)):
        root = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [weights.pop(f"{root}.{e}.{part}_proj.weight") for e in range(sizes.experts)]
            for part in ("gate", "up", "down")
        )
        weights[f"{root}.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        weights[f"{root}.down_proj"] = torch.stack(down)
    if sizes.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and all("e_score_correction_bias" in name for name in missing)
    losses = []
    for number in range(sizes.batch):
        tokens = sample(sizes, made.seed, trained.scalars["consumed"] + number)
        logits = theirs(tokens[None, :-1]).logits[0, :, : sizes.vocab]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:]).item())
    ours = trained_states.run(made, 1, tmp_path, start=trained).steps[0][1]
    assert ours == pytest.approx(sum(losses) / len(losses), rel=1e-3)


@pytest.mark.share(3)
@pytest.mark.parametrize("shape", ["quick", "tied", "indivisible"])
def test_gradients_are_those_of_a_plain_model(shape: str, tmp_path: Path) -> None:
    """Clipping off: the first moment after one step is a tenth of the gradient. The indivisible model has a token whose
    second and third expert are as good as equal, so that rounding to bf16 decides: there all four are taken."""
    sizes = SHAPES[shape].with_(dropout=0.0, top=4 if shape == "indivisible" else 2)
    made = TrainingJob(sizes, HarnessLayout(), adam=AdamW(clip=1e9))
    before = trained_states.run(made, 0, tmp_path)
    after = trained_states.run(made, 1, tmp_path)
    leaves = {name: whole.float().requires_grad_() for (name, state), whole in before.whole.items() if state == "model"}
    losses = [plain_loss(sizes, leaves, sample(sizes, made.seed, number)) for number in range(sizes.batch)]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert after.steps[0][1] == pytest.approx(loss.item(), rel=1e-3)
    norm_of_all = torch.stack([leaf.grad.square().sum() for leaf in leaves.values()]).sum().sqrt().item()
    assert after.steps[0][2] == pytest.approx(norm_of_all, rel=1e-2)
    for name, leaf in leaves.items():
        error = (after.whole[name, "exp_avg"] * 10 - leaf.grad).norm() / leaf.grad.norm()
        assert error < 3e-2, (name, error)


def test_padding_of_the_vocabulary_gets_no_gradient(folder: Path) -> None:
    whole = alone("quick", True, STEPS, folder).whole
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert not whole[name, "exp_avg"][QUICK.vocab :].any() and whole[name, "exp_avg"][: QUICK.vocab].any()


def test_the_model_learns(tmp_path: Path) -> None:
    steps = trained_states.run(job("tp1", canonical=False), 30, tmp_path).steps
    assert steps[-1][1] < steps[0][1] - 0.8


def test_blocks_of_a_shard_add_up() -> None:
    """Heads and feed-forward columns in two halves give the whole."""
    x, (q, k, v), o = torch.randn(8, 16), torch.randn(3, 16, 16) / 4, torch.randn(16, 16) / 4
    angles = torch.arange(8)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    turned = {"cos": angles.cos(), "sin": angles.sin()}
    whole = attention(x, q, k, v, o, **turned)
    parts = [attention(x, q[h], k[h], v[h], o[:, h], **turned) for h in (slice(0, 8), slice(8, 16))]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(
        sum(compute_swiglu(x, q[h], k[h], o[:, h]) for h in (slice(0, 8), slice(8, 16))), compute_swiglu(x, q, k, o)
    )
    assert norm(x, torch.full((16,), 2.0), epsilon=0.0).square().mean(-1).allclose(torch.tensor(4.0))


def test_the_update_is_torchs(tmp_path: Path) -> None:
    """AdamW against torch.optim.AdamW; any cut of the line gives the same bits."""
    start = torch.randn(101)
    gradients = torch.randn(5, 101)
    adam = AdamW()
    leaf = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([leaf], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    whole = Slices.fresh(start)
    halves = [Slices.fresh(start[:37]), Slices.fresh(start[37:])]
    for step, gradient in enumerate(gradients, 1):
        leaf.grad = gradient.clone()
        theirs.step()
        adam.update(whole, gradient, step=step, rate=1e-2, decays=True)
        for half, part in zip(halves, (gradient[:37], gradient[37:]), strict=True):
            adam.update(half, part, step=step, rate=1e-2, decays=True)
    torch.testing.assert_close(whole.master, leaf.data)
    for state in STATES[1:]:
        assert torch.equal(torch.cat([getattr(half, state) for half in halves]), getattr(whole, state))


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (8, 64)])
def test_muon_steps_along_the_nearest_orthogonal_matrix(shape: tuple[int, int]) -> None:
    """Against the singular value decomposition, and the momentum against torch's SGD; a part of the line has the same
    bits."""
    muon = Muon()
    adam = AdamW(weight_decay=0.0)
    gradients = torch.randn(4, *shape)
    slices = MuonSlices.fresh(torch.zeros(gradients[0].numel()))
    half = MuonSlices.fresh(torch.zeros(gradients[0].numel() // 2))
    want = torch.zeros(shape)
    for gradient in gradients:
        want = 0.95 * want + 0.05 * gradient
        ahead = muon.ahead(slices, gradient.reshape(-1))
        torch.testing.assert_close(ahead.view(shape), 0.95 * want + 0.05 * gradient)
        part = muon.ahead(half, gradient.reshape(-1)[: half.master.numel()])
        assert torch.equal(part, ahead[: part.numel()])
    torch.testing.assert_close(slices.momentum_buffer.view(shape), want)
    step = muon.orthogonal(ahead.view(shape))
    left, _, right = torch.linalg.svd(ahead.view(shape), full_matrices=False)
    near = left.mT @ (step / (max(shape) ** 0.5 * muon.scale)) @ right.mT
    values = near.diagonal()
    off = near - near.diagonal().diag()
    assert off.abs().max() < 1e-2 and values[:-2].sub(1).abs().max() < 0.3, "the smallest values converge last"
    muon.update(slices, step.reshape(-1), adam, rate=0.5)
    assert torch.equal(slices.master, -step.reshape(-1) * 0.5)


def test_a_cpu_has_the_kernels_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they give the same bits is tested where their library is: tests/kernels/test_device_adamw.py."""
    monkeypatch.setattr(optimizer.choose, "open_device", lambda number: f"device {number}")
    monkeypatch.delenv("CKPT_KERNELS", raising=False)
    assert optimizer.kernels_for(torch.device("cpu")) is None
    monkeypatch.setenv("CKPT_KERNELS", "host")
    assert optimizer.kernels_for(torch.device("cpu")) == "device 0"


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [Schedule(warmup=2, total=6, peak=1.0, floor=0.1).rate(step) for step in range(1, 9)]
    assert (
        rates[:2] == [0.5, 1.0]
        and rates[5:] == [pytest.approx(0.1)] * 3
        and rates[1:6] == sorted(rates[1:6], reverse=True)
    )


# -- what is freed -----------------------------------------------------------------------------------------------------


def test_a_stage_frees_what_it_used() -> None:
    """One microbatch's tapes are gone after its backward; at most as many are in flight as the pipeline is long."""

    def entry(comm: object) -> int:
        trainer = Trainer(TrainingJob(ModelShape(), HarnessLayout.parse("pp2")), comm)  # type: ignore[arg-type]
        forward = trainer._forward
        flying = []

        def counted(*arguments: object) -> None:
            forward(*arguments)  # type: ignore[arg-type]
            flying.append(len(trainer._flights))

        trainer._forward = counted  # type: ignore[method-assign]
        list(trainer.train(1))
        assert not trainer._flights and not trainer._sums._trees
        return max(flying)

    assert run_ranks(2, entry, backend="sim") == [2, 1], "of eight microbatches"


def test_zero_3_keeps_no_whole_weights() -> None:
    def entry(comm: object) -> list[int]:
        trainer = Trainer(job("dp4,zero3"), comm)  # type: ignore[arg-type]
        gather = trainer.weights.gather
        most = [0]

        def counted(room: str) -> None:
            gather(room)
            most.append(sum(value.numel() for value in trainer.weights._values.values()))

        trainer.weights.gather = counted  # type: ignore[method-assign]
        list(trainer.train(1))
        assert not trainer.weights._values
        return [max(most), sum(item.numel for item in trainer.weights.params.values())]

    most, whole = run_ranks(4, entry, backend="sim")[0]
    assert most < 0.6 * whole, "one layer at a time, of two"


# -- the pipeline's order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(1, 1, 3), (2, 1, 8), (4, 1, 8), (3, 1, 2), (2, 2, 8), (2, 2, 1), (4, 2, 4)]
)
def test_the_schedule_runs_through(pp: int, vpp: int, count: int) -> None:
    """Played with sends that don't block, every order comes to its end, and few microbatches are in flight."""
    orders = [list(order) for order in schedule(pp, vpp, count)]
    assert all(len(order) == len(set(order)) == 2 * vpp * count for order in orders)
    done: set[tuple[bool, int, int]] = set()
    flying = [0] * pp
    while any(orders):
        moved = False
        for rank, order in enumerate(orders):
            while order:
                op = order[0]
                stage = op.chunk * pp + rank
                needs = (True, op.microbatch, stage - 1) if op.forward else (False, op.microbatch, stage + 1)
                if (needs[2] not in (-1, pp * vpp) and needs not in done) or (
                    not op.forward and (True, op.microbatch, stage) not in done
                ):
                    break
                done.add((op.forward, op.microbatch, stage))
                flying[rank] += 1 if op.forward else -1
                if vpp == 1:
                    assert flying[rank] <= pp - rank
                order.pop(0)
                moved = True
        assert moved, "a deadlock"
