"""The decoder: what a rank computes for one microbatch in one of its layers.

    embed -> layers (norm, attention, residual, norm, feed-forward or experts, residual) -> norm, head, loss

Everything that is cut by tensor parallelism runs shard by shard (`_run_sharded`), in fp32 on bf16 values, and is
rounded to bf16 at the end of a block. Experts: the rank that has the tokens asks the router, sends rows to the ranks
that own the experts, which call an expert once for each source; rows come back and are added in the order of expert
numbers.
Replicated parts (norms, router, a dim that 4 doesn't divide) are computed alike on every TP rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.pieces import Coordinates
from ckpt_tool.harness.randomness import dropout_mask
from ckpt_tool.harness.shape import VIRTUAL, ModelShape
from ckpt_tool.harness.tape import Node, Ref, Tape

Tensor = torch.Tensor

# -- blocks: plain functions of one shard; inputs bf16, weights fp32 ---------------------------------------------------


def norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Root mean square norm. x (tokens, hidden), weight (hidden)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def compute_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU: a partial sum where `gate`, `up` (rows) and `down` (columns) are shards."""
    wide = x.float()
    inner = (functional.silu(wide @ gate.t()) * (wide @ up.t())).to(x.dtype)
    return (inner.float() @ down.t()).to(x.dtype)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention of the shard's heads over one sequence. q (heads d, hidden), k and v (groups d, hidden)."""
    wide, (tokens, depth) = x.float(), cos.shape

    def heads(weight: Tensor) -> Tensor:
        return (wide @ weight.t()).view(tokens, -1, depth).transpose(0, 1)

    def rotate(states: Tensor) -> Tensor:
        even = states[..., ::2]
        odd_states = states[..., 1::2]
        return states * cos + torch.stack([-odd_states, even], -1).flatten(-2) * sin

    queries = rotate(heads(q))
    keys = rotate(heads(k))
    values = heads(v)
    shared = queries.shape[0] // keys.shape[0]
    keys = keys.repeat_interleave(shared, 0)
    values = values.repeat_interleave(shared, 0)
    scores = queries @ keys.transpose(1, 2) / math.sqrt(depth)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    attended = scores.masked_fill(future, -math.inf).softmax(-1) @ values
    return (attended.transpose(0, 1).reshape(tokens, -1).to(x.dtype).float() @ o.t()).to(x.dtype)


def lookup(weight: Tensor, *, tokens: Tensor, first: int) -> Tensor:
    """Rows of the shard that begins at row `first`, zeros for tokens of other shards."""
    row = tokens - first
    is_own = (row >= 0) & (row < weight.shape[0])
    embedded = functional.embedding(row.clamp(0, weight.shape[0] - 1), weight)
    return (embedded * is_own.unsqueeze(-1)).bfloat16()


def compute_routing(x: Tensor, weight: Tensor, *, top: int) -> Tensor:
    """How much of each expert a token gets: (tokens, experts) fp32, `top` of them not 0 and adding up to 1."""
    chances = (x.float() @ weight.t()).softmax(-1)
    best, which = chances.topk(top, -1)
    return torch.zeros_like(chances).scatter(1, which, best / best.sum(-1, keepdim=True))


def loss_of(logits: Tensor, *, targets: Tensor, vocab: int) -> Tensor:
    """Mean cross entropy over the true vocabulary; padded columns count for nothing."""
    return functional.cross_entropy(logits[:, :vocab], targets)


# -- one rank's share -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepMoment:
    """What is being computed: the step, the global microbatch, and its place among the rank's own."""

    step: int
    microbatch: int
    local: int


class Model:
    """Forward functions of a rank. They write on the tape they are given; backward is the tape's."""

    def __init__(
        self, shape: ModelShape, layout: HarnessLayout, at: Coordinates, comm: Comm, seed: int, *, canonical: bool
    ) -> None:
        self._shape = shape
        self._layout = layout
        self._at = at
        self._comm = comm
        self._seed = seed
        self.shards = (VIRTUAL if canonical else layout.tp) // layout.tp  # own virtual shards
        self._ep = layout.ep_group(at)
        angles = torch.outer(
            torch.arange(shape.sequence).float(), shape.theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        )
        self._cos = angles.repeat_interleave(2, -1).cos().to(comm.device)  # ERNIE turns neighbours, not halves
        self._sin = angles.repeat_interleave(2, -1).sin().to(comm.device)

    def embed(self, tape: Tape, tokens: Tensor, moment: StepMoment) -> Node:
        """The embeddings of (sequence,) token ids, (sequence, hidden) bf16."""
        name = "model.embed_tokens.weight"
        shape = self._shape
        rows = shape.rows // (self.shards * self._layout.tp)

        def found(shard: int) -> Node:
            first = shard * rows
            return tape.block(
                lambda weight: lookup(weight, tokens=tokens, first=first), (), [Ref(name, shard)], moment.microbatch
            )

        x = tape.join([found(shard) for shard in self._own()]) if shape.splits(shape.rows) else found(0)
        mask = self._mask(moment, -1, 0)
        return tape.block(lambda x: (x.float() * mask).to(x.dtype), [x])

    def layer(self, tape: Tape, x: Node, layer: int, moment: StepMoment) -> Node:
        """One decoder layer, `layer` its global number: x in, x out, (sequence, hidden) bf16."""
        root = f"model.layers.{layer}"
        m = moment.microbatch
        a = self._norm(tape, x, f"{root}.input_layernorm.weight", m)
        names = [f"{root}.self_attn.{part}_proj.weight" for part in "qkvo"]
        a = self._run_sharded(
            tape, a, True, lambda x, shard: tape.block(self._attend, [x], [Ref(n, shard) for n in names], m)
        )
        x = self._residual(tape, x, a, self._mask(moment, layer, 0))
        b = self._norm(tape, x, f"{root}.post_attention_layernorm.weight", m)
        b = self._experts(tape, b, layer, moment) if self._shape.is_sparse(layer) else self._dense(tape, b, layer, m)
        return self._residual(tape, x, b, self._mask(moment, layer, 1))

    def loss(self, tape: Tape, x: Node, targets: Tensor, moment: StepMoment) -> Node:
        """The mean loss of the microbatch, a 0-d fp32 node."""
        shape = self._shape
        m = moment.microbatch
        x = self._norm(tape, x, "model.norm.weight", m)

        def logits(x: Node, shard: int) -> Node:
            return tape.block(lambda x, weight: x.float() @ weight.t(), [x], [Ref("lm_head.weight", shard)], m)

        if shape.splits(shape.rows):
            shards = tape.spread(x, self.shards)
            all_logits = tape.columns([logits(x, shard) for x, shard in zip(shards, self._own(), strict=True)])
        else:
            all_logits = logits(x, 0)
        return tape.block(lambda logits: loss_of(logits, targets=targets, vocab=shape.vocab), [all_logits])

    # -- parts of a layer ---------------------------------------------------------------------------------------------

    def _own(self) -> range:
        """The global numbers of this rank's virtual shards."""
        return range(self._at.tp * self.shards, (self._at.tp + 1) * self.shards)

    def _run_sharded(self, tape: Tape, x: Node, split: bool, body: Callable[[Node, int], Node]) -> Node:
        """`body` on every own shard, summed over all; or once, whole, where the dim is not split."""
        if not split:
            return body(x, 0)
        shards = tape.spread(x, self.shards)
        return tape.join([body(x, shard) for x, shard in zip(shards, self._own(), strict=True)])

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        return attention(x, q, k, v, o, cos=self._cos, sin=self._sin)

    def _norm(self, tape: Tape, x: Node, name: str, microbatch: int) -> Node:
        return tape.block(lambda x, w: norm(x, w, epsilon=self._shape.epsilon), [x], [Ref(name, 0)], microbatch)

    def _residual(self, tape: Tape, x: Node, more: Node, mask: Tensor) -> Node:
        return tape.block(lambda x, more: (x.float() + more.float() * mask).to(x.dtype), [x, more])

    def _mask(self, moment: StepMoment, layer: int, site: int) -> Tensor:
        size = (self._shape.sequence, self._shape.hidden)
        mask = dropout_mask(size, self._shape.dropout, self._seed, moment.step, moment.microbatch, layer + 1, site)
        return mask.to(self._comm.device)

    def _dense(self, tape: Tape, x: Node, layer: int, microbatch: int) -> Node:
        return self._run_gated(tape, x, f"model.layers.{layer}.mlp", self._shape.dense_ffn, microbatch)

    def _run_gated(self, tape: Tape, x: Node, root: str, ffn: int, microbatch: int) -> Node:
        def body(x: Node, shard: int) -> Node:
            return tape.block(compute_swiglu, [x], self._matrices(root, shard), microbatch)

        return self._run_sharded(tape, x, self._shape.splits(ffn), body)

    @staticmethod
    def _matrices(root: str, shard: int) -> list[Ref]:
        return [Ref(f"{root}.{part}_proj.weight", shard) for part in ("gate", "up", "down")]

    # -- experts ------------------------------------------------------------------------------------------------------

    def _experts(self, tape: Tape, x: Node, layer: int, moment: StepMoment) -> Node:
        shape = self._shape
        root = f"model.layers.{layer}.mlp"
        m = moment.microbatch
        shares = tape.block(lambda x, w: compute_routing(x, w, top=shape.top), [x], [Ref(f"{root}.gate.weight", 0)], m)
        chosen = [column.nonzero().flatten() for column in (shares.value != 0).unbind(1)]  # tokens of each expert
        order = torch.cat(chosen)
        rows = tape.block(lambda x: x.index_select(0, order), [x])
        counts = torch.tensor([len(tokens) for tokens in chosen])
        table = [
            row.tolist() for row in self._comm.all_gather(self._ep, counts.to(self._comm.device))
        ]  # [source][expert]
        per = shape.experts // self._layout.ep
        owned = range(self._at.ep * per, (self._at.ep + 1) * per)
        away = [int(counts[first_expert : first_expert + per].sum()) for first_expert in range(0, shape.experts, per)]
        rows_in = [sum(line[expert] for expert in owned) for line in table]
        rows = tape.exchange(rows, self._ep, away, rows_in)
        calls = [
            (moment.microbatch + (source - self._at.ep) * self._stride, expert, line[expert])
            for source, line in enumerate(table)
            for expert in owned
        ]

        def body(x: Node, shard: int) -> Node:
            parts = tape.split(x, [count for _, _, count in calls])
            return tape.cat(
                [
                    tape.block(compute_swiglu, [part], self._matrices(f"{root}.experts.{expert}", shard), source)
                    for part, (source, expert, _) in zip(parts, calls, strict=True)
                ]
            )

        rows = self._run_sharded(tape, rows, shape.splits(shape.expert_ffn), body)
        rows = tape.exchange(rows, self._ep, rows_in, away)
        sizes = counts.tolist()
        mixed = tape.block(lambda rows, shares: _mix_experts(rows, shares, chosen, sizes), [rows, shares])
        if not shape.shared_experts:
            return mixed
        shared = self._run_gated(tape, x, f"{root}.shared_experts", shape.expert_ffn * shape.shared_experts, m)
        return tape.block(lambda a, b: (a.float() + b.float()).to(a.dtype), [mixed, shared])

    @property
    def _stride(self) -> int:
        """How far apart the microbatches are that neighbouring data ranks work on at one time."""
        return self._shape.batch // self._layout.dp


def _mix_experts(rows: Tensor, shares: Tensor, chosen: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Expert outputs times their shares, added for each token in the order of expert numbers."""
    total = torch.zeros(shares.shape[0], rows.shape[1], device=rows.device)
    for expert, (part, tokens) in enumerate(zip(torch.split(rows.float(), list(sizes)), chosen, strict=True)):
        total = total.index_add(0, tokens, part * shares[tokens, expert].unsqueeze(1))
    return total.to(rows.dtype)
