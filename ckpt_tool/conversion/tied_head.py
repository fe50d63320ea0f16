"""`--tied-head keep|tie|untie`: an output layer that is the embedding, written once or twice, never guessed.

    untie    no lm_head.weight: the embedding's elements are written under that name too, in every state
    tie      lm_head.weight equal to the embedding, bit for bit: it is left out; one that differs is an error
    keep     as the source has it (default)

Where a config says that the two are tied and the source holds both, a target that keeps one of them would lose the
other: they are compared before a byte moves, and two that differ are an error whose hint gives the option. The output
layer that Paddle's ranks write in addition to a tied embedding is left out on the way to the hub, if it is a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.core.wrapper_words import WRAPPERS
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion, left_behind

if TYPE_CHECKING:
    from ckpt_tool.families.table import Table

TIED = "tie_word_embeddings"  # the key of Hugging Face's and Paddle's configs
HEAD_NAME = "lm_head.weight"  # the hub's
_ALWAYS_BOTH = ("meta",)  # Meta's `output.weight` is always there (Llama 3.2 1B too)
# What the MTP layers of DeepSeek-V3 and GLM-4.5 hold once more (their config and their authors' code share them)
_OF_MTP = {".embed_tokens.weight": "model.embed_tokens.weight", ".shared_head.head.weight": "lm_head.weight"}
# head -> the names that its embedding may have, in each dialect. Both may have the same prefix, that of a part of a
# larger model (`thinker.`) or of a wrapper (`module.`): a head is matched only with an embedding of the same prefix.
_PAIRS = {
    "lm_head.weight": (
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "transformer.word_embeddings.weight",
        "model.word_embeddings.weight",
        "model.language_model.embed_tokens.weight",
        "llama.embed_tokens.weight",
        "qwen2.embed_tokens.weight",
        "qwen2_moe.embed_tokens.weight",
        "mixtral.embed_tokens.weight",
        "deepseek_v3.embed_tokens.weight",
        "ernie.embed_tokens.weight",
        "backbone.embeddings.weight",
        "model.embeddings.weight",
        "wte.weight",
        "word_embeddings.weight",
        "embed_tokens.weight",
        "language_model.embed_tokens.weight",
    ),
    "language_model.lm_head.weight": ("language_model.model.embed_tokens.weight",),
    "output_layer.weight": ("embedding.word_embeddings.weight",),
    "output.weight": ("tok_embeddings.weight", "token_embd.weight"),
    "head.weight": ("embed.weight",),
    "lm_head.w_out.weight": ("embeddings.weight",),
}
_HEAD_OF = {embedding: head for head, embeddings in _PAIRS.items() for embedding in embeddings}
# The longest first: `transformer.wte.weight` is no `wte.weight` with a prefix.
_EMBEDDINGS = tuple(sorted(_HEAD_OF, key=lambda name: -name.count(".")))
_VAGUE = ("embed.weight", "embeddings.weight")
_HEAD_MODULES = frozenset(("lm_head", "embed_out", "output_layer"))


def with_head(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with the output layer that the policy wants; a target dialect that knows no tied ones wants it too.
    Raises UsageError E1480: no such pair, or `tie` where the two differ."""
    policy = job.writing.tied_head
    if policy is None and job.dialect in _ALWAYS_BOTH and not job.writing.aoa:
        policy = "untie"
        if pair_of(chosen.model) is None:
            return chosen

    if policy not in ("tie", "untie"):
        return chosen

    names = chosen.model
    pair = pair_of(names)
    if pair is None:
        raise UsageError(
            f"--tied-head {policy}: no embedding here has a known name",
            code="E1480",
            hint=f"such as {', '.join(each[0] for each in _PAIRS.values())}; leave the option off",
        )

    head, embedding = pair
    if policy == "untie" and head not in names:
        rows = [row for row in chosen.stored if row.tensor.key.name == embedding]
        states = ", ".join(row.tensor.key.state for row in rows)
        line = f"{head} is a copy of {embedding} ({states}): tied heads are written twice"
        chosen = _with_copies(chosen, [(row, head) for row in rows], line)
    elif policy == "untie":
        return chosen
    elif head in names:
        what = _difference(chosen, head, embedding)
        if what:
            raise UsageError(
                f"--tied-head tie: {head} is not {embedding}: {what}",
                code="E1480",
                key=head,
                hint="leave the option off: the two are no copies of each other",
            )
        chosen = _without(chosen, head, f"equal to {embedding}, with which it is tied")

    return chosen


def refuse_to_lose_copies(chosen: Chosen, left_out: Collection[str]) -> None:
    """Raise InconsistentCheckpoint E1481 where a mapping leaves out what should be a copy of another tensor, and its
    values differ: an output layer that the config says is tied, the embedding and output layer of an MTP layer."""
    names = chosen.model.keys()
    pair = pair_of(names)
    copies = [(name, of) for name in left_out for end, of in _OF_MTP.items() if name.endswith(end) and name != of]
    if pair is not None and pair[0] in left_out:
        copies.append(pair)
    unlike = []
    for copy, of in copies:
        what = _difference(chosen, copy, of) if {copy, of} <= names else ""
        if what:
            unlike.append(f"{copy} is not {of}: {what}")
    if unlike:
        raise InconsistentCheckpoint(
            f"the target keeps one of two tensors that should be copies, and {unlike[0]}",
            code="E1481",
            key=copies[0][0],
            faults=unlike[1:],
            hint="--tied-head untie keeps an output layer, --remove-keys leaves out what may go",
        )


def as_the_hub_has_it(
    chosen: Chosen, dialect: str, config: Mapping[str, Any] | None, policy: str | None, hub: Table
) -> Chosen:
    """`chosen`, in the hub's names, with exactly the copies that the hub's files have.

    Megatron stores once what the hub's MTP layers repeat; Paddle's ranks write a tied output layer in addition to the
    embedding. A tensor that is no copy, or has states of its own, is kept. hub: the family's table of hub names.
    """
    if dialect.startswith("megatron"):
        return with_copies_of_mtp(chosen, hub)
    pair = pair_of(chosen.model)
    if policy is not None or pair is None or (config or {}).get(TIED) is not True or not dialect.startswith("paddle"):
        return chosen
    head, embedding = pair
    held = [row.tensor.key.state for row in chosen.stored if row.tensor.key.name == head]
    if held != [MODEL] or _difference(chosen, head, embedding):
        return chosen
    return _without(chosen, head, f"equal to {embedding}, with which it is tied")


def with_copies_of_mtp(chosen: Chosen, hub: Table) -> Chosen:
    """`chosen`, in the hub's names, with the embedding and the output layer that its MTP layers hold once more, if they
    do: DeepSeek and GLM publish their weights so, Hy3 and Ling do not. Megatron, where they come from, has one of each
    for all layers."""
    model = chosen.model
    fronts = [name.removesuffix(".enorm.weight") for name in model if name.endswith(".enorm.weight")]
    wanted = [
        (front + end, of)
        for front in fronts
        for end, of in _OF_MTP.items()
        if of in model and front + end not in model and hub.knows(front + end)
    ]
    if not wanted:
        return chosen
    shown = ", ".join(f"{name} of {of}" for name, of in wanted[:4])
    copies = [(model[of], name) for name, of in wanted]
    return _with_copies(chosen, copies, f"MTP layers hold copies, as their authors publish them: {shown}")


def pair_of(names: Collection[str]) -> tuple[str, str] | None:
    """(output layer, embedding) under one prefix: of several the first whose output layer is there too, else the first
    whose embedding is.

    >>> pair_of(["model.embed_tokens.weight"]), pair_of(["module.lm_head.weight", "module.model.embed_tokens.weight"])
    (('lm_head.weight', 'model.embed_tokens.weight'), ('module.lm_head.weight', 'module.model.embed_tokens.weight'))
    """
    pairs = [(head, name) for name in names if name.endswith(_EMBEDDINGS) for head in _heads_of(name)]
    pairs.sort(key=lambda pair: pair[1].count("."))
    whole = [pair for pair in pairs if pair[0] in names]
    # Words that other models have too are an embedding only where its output layer is there.
    alone = [pair for pair in pairs if pair[1] not in _VAGUE]
    return next(iter((*whole, *alone)), None)


def has_head(names: Iterable[str]) -> bool:
    """Is there an output layer among the names, in floats or in codes, with any prefix?

    >>> has_head(["module.lm_head.weight"]), has_head(["lm_head.qweight"]), has_head(["model.norm.weight"])
    (True, True, False)
    """
    return any(not _HEAD_MODULES.isdisjoint(name.split(".")) for name in names)


def describe_own_head(chosen: Chosen, names: Collection[str]) -> str:
    """How the head among `names` is known to be no copy of its embedding; "" where it is one, or there is none.

    Computed values are not compared: what was folded or merged into one of the two is not in the other.
    """
    pair = pair_of(names)
    if pair is None or pair[0] not in names or not set(pair) <= chosen.model.keys():
        return ""
    head, embedding = pair
    rows = [chosen.model[name] for name in pair]
    if any(row.tensor.key in chosen.renewed for row in rows):
        is_copy = (
            rows[0].source == rows[1].source and rows[0].tensor.chunks == rows[1].tensor.chunks
        )  # the same bytes under two names
        return "" if is_copy else f"{head} has values of its own, apart from {embedding}"
    if rows[0].source != rows[1].source:
        return f"{head} has values of its own, apart from {embedding}"
    what = _difference(chosen, head, embedding)
    return f"{head} is not {embedding}: {what}" if what else ""


def _heads_of(embedding: str) -> Iterable[str]:
    """The possible names of the output layer for an embedding of that name; none if it is not an embedding's name."""
    for known in _EMBEDDINGS:
        prefix = embedding.removesuffix(known)
        if prefix == embedding or (prefix and not prefix.endswith(".")):
            continue
        # A name of one module may be anything's below another module; below a wrapper it is the model's own.
        alone = known.count(".") == 1
        if alone and not set(prefix.split(".")[:-1]) <= set(WRAPPERS):
            continue
        return (prefix + _HEAD_OF[known],)
    return ()


def _with_copies(chosen: Chosen, copies: Iterable[tuple[Stored, str]], line: str) -> Chosen:
    """`chosen` with some of its tensors repeated under another name. copies: (tensor, the other name)."""
    rows = {}
    casts = dict(chosen.casts)
    for row, name in copies:
        key = TensorKey(name, row.tensor.key.state)
        rows[key] = row._replace(tensor=row.tensor._replace(key=key, path=()))
        if row.tensor.key in casts:
            casts[key] = casts[row.tensor.key]
    return replace(
        chosen,
        stored=(*chosen.stored, *rows.values()),
        renewed=chosen.renewed | frozenset(rows),
        casts=casts,
        notes=(*chosen.notes, line),
    )


def _without(chosen: Chosen, head: str, reason: str) -> Chosen:
    gone = [row.tensor for row in chosen.stored if row.tensor.key.name == head]
    stored = tuple(row for row in chosen.stored if row.tensor.key.name != head)
    return replace(chosen, stored=stored, dropped=(*chosen.dropped, *left_behind(gone, reason)))


def _difference(chosen: Chosen, head: str, embedding: str) -> str:
    """A phrase on how the model's two tensors differ, "" if they are equal bit for bit."""
    from ckpt_tool.run.compare import compare

    rows = chosen.model
    one, a = rows[head]
    other, b = rows[embedding]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{_described(a)} and {_described(b)}"
    (found,) = compare([(a, b)], chosen.sources[one].tree, chosen.sources[other].tree)
    return f"they differ at {found['first_index']}" if found else ""


def _described(tensor: LogicalTensor) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"
