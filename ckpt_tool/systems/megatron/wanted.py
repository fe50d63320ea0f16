"""Decides what a legacy Megatron checkpoint will be: the model's sizes, the degrees, the stages, the rows of
vocabularies.

The one idea: every impossible request is refused here, before a file is planned: a degree that does not divide the
heads, layers that can't be distributed over the stages, experts that can't be divided, a vocabulary whose padding is
not known.

    112 rows for a vocabulary of 100 (multiple 16), --tp 2   ->   128 rows, 16 more than there are: zeros

Megatron loads exactly ceil(V / (multiple * TP)) * multiple * TP rows. Missing rows are filled with zeros, and their
number is recorded (`ckpt.vocab_rows`); surplus rows are stored separately, under our own key (`ckpt.vocab_tail`). Our
reader undoes both, so that the logical tensor never changes and a conversion back is exact. If V is not known, the rows
stay if Megatron could have padded to them, else `--vocab-size` is required.

Sources (NVIDIA/Megatron-LM core 0.16.1): `training/tokenizer/tokenizer.py` (`_vocab_size_with_padding`), the modules
named below. Cost: a pass over names. What it does not do: boxes and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import check_count
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import MegatronFacts, arguments, facts_of, with_spec
from ckpt_tool.systems.megatron.hints import MegatronHints
from ckpt_tool.systems.megatron.job import MegatronJob
from ckpt_tool.systems.megatron.legacy.folders import fit
from ckpt_tool.systems.megatron.options import MegatronOptions
from ckpt_tool.systems.megatron.rules import gated, is_vocabulary
from ckpt_tool.systems.megatron.stages import NO_SPLIT, Stages, chosen_stages, from_counts
from ckpt_tool.systems.megatron.stored_names import EMBEDDING, TIED_HEAD

VOCAB = "E0276"
NO_RULE = "E0275"
UNHELD = "E2001"


class Decided(NamedTuple):
    """The decisions for one legacy checkpoint."""

    wanted: Wanted
    model: Mapping[str, int]  # logical name -> number of the wanted tensor
    args: Mapping[str, Any]  # the source's, {} without
    job: MegatronJob  # how ranks share it
    all_rows: int | None  # rows of the source's vocabularies
    notes: tuple[str, ...]
    extra_states: frozenset[str] | None  # templates of the modules that have an extra state, None if unknown
    release: bool  # the source is a folder `release`
    distributed: bool | None  # the source has a distributed optimizer, None if unknown

    def tensor(self, number: int) -> WantedTensor:
        """Return wanted tensor number `number`."""
        return self.wanted.tensors[number]

    @property
    def same_ranks(self) -> bool:
        """Whether all degrees but the number of data ranks equal the source's."""
        own = facts_of(self.args).degrees
        return bool(self.args) and all(own[dim] == n for dim, n in self.job.degrees.items() if dim != "dp")

    @property
    def same_layout(self) -> bool:
        """Whether all degrees equal the source's."""
        return bool(self.args) and facts_of(self.args).degrees == dict(self.job.degrees)


def decide(wanted: Wanted) -> Decided:
    """Return the decisions for `wanted`.

    Raises:
        UsageError: E0272 stages, E0273 degrees, E0274 experts, E0275 no rule, E0276 the vocabulary.
    """
    model = {t.key.name: i for i, t in enumerate(wanted.tensors) if t.key.state == MODEL}
    shapes = {name: wanted.tensors[i].shape for name, i in model.items()}
    spec = wanted.wish.of(MegatronOptions).spec
    args = with_spec(arguments(wanted.extras), spec)
    stated = facts_of(args, spec)
    own = wanted.hints.get(MegatronHints) if wanted.source_format == "megatron" else None
    alike = own if spec is None else None  # without --spec the source's names are kept
    experts = names.experts_count(model)
    facts = _complete_facts(stated, model, experts)
    degrees, notes = fit(wanted.wish.degrees.stated(), experts)
    te = alike.te if alike else stated.te

    job = MegatronJob(
        facts,
        degrees,
        _stages(wanted, own, args, facts, degrees),
        experts,
        gated(shapes, facts),
        not te,
        te,
        alike.container or stated.container if alike else stated.container,
        own.mtp_inner or "transformer_layer" if own else "transformer_layer",
        own.convolution if own else "_",
    ).of_shapes(shapes, 1)
    notes += _check(job, shapes)
    rows, kept, more = vocabulary_rows(wanted, model, facts, degrees["tp"])
    every = next((shapes[name][0] for name in model if is_vocabulary(name)), None) if rows else None
    if args and facts.layers != stated.layers and facts.layers:
        notes.append(f"args.num_layers becomes {facts.layers}: so many layers are written")

    return Decided(
        wanted,
        model,
        args,
        job._replace(rows=rows, kept=kept),
        every,
        (*notes, *more),
        frozenset(alike.extra_states) or None if alike else None,
        own is not None and own.release,
        own.distributed or stated.distributed if own else stated.distributed,
    )


def _complete_facts(facts: MegatronFacts, model: Mapping[str, int], experts: int) -> MegatronFacts:
    """Return the facts, completed from the tensors' names."""
    own = {names.stem(name) for name in model}
    tied = EMBEDDING in own and TIED_HEAD not in own and (facts.tied or not facts.stated)
    return facts._replace(
        layers=names.layers_count(model),
        mtp=names.mtp_count(model),
        experts=experts or None,
        tied=tied,
        mla=facts.mla or any(".linear_kv_down_proj." in name for name in model),
    )


def _stages(
    wanted: Wanted, own: MegatronHints | None, args: Mapping[str, Any], facts: MegatronFacts, degrees: Mapping[str, int]
) -> Stages:
    pp = degrees["pp"]
    vpp = degrees["vpp"]
    layers = facts.layers or 0
    if vpp > 1 and pp == 1:
        raise UsageError(
            f"--vpp {vpp} without pipeline stages", code=NO_SPLIT, hint="give --pp of at least 2, or leave --vpp off"
        )
    split = wanted.wish.pp_split
    # The source's split is kept if the pipeline is the same; arguments may describe the split of another pipeline.
    if not split and own is not None and _counts_fit(own.counts, wanted.hints.get(Degrees), pp, vpp, layers):
        return from_counts(own.counts, pp, vpp, mtp=facts.mtp, mtp_at=own.mtp[0] if own.mtp else None)
    before = facts_of(args)
    kept = dict(args) if (before.pp, before.vpp) == (pp, vpp) else _even_only(args)
    return chosen_stages(split, kept, pp, vpp, layers, mtp=facts.mtp)


def _even_only(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that describe an uneven split, which other stages can't use."""
    own = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    return {name: value for name, value in args.items() if name not in own}


def _counts_fit(counts: Sequence[int], before: Degrees | None, pp: int, vpp: int, layers: int) -> bool:
    same = before is not None and (before.pp, before.vpp) == (pp, vpp)
    return same and len(counts) == pp * vpp and sum(counts) == layers


def _check(job: MegatronJob, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return notes. Raises UsageError if tensor ranks can't share a parameter (E0275 if no rule is known for it)."""
    by_head = [name for name in shapes if name.endswith(names.BY_HEAD)]
    if by_head and names.BY_HEAD not in job.sections:
        raise UsageError(
            f"{by_head[0]}: its rows are stored by key head, as mcore-bridge has them, and rank files do not show that",
            code=NO_RULE,
            key=by_head[0],
            faults=by_head[1:50],
            hint="write --to megatron-dist, whose keys do",
        )
    rules = {name: job.rule(name, len(shape)) for name, shape in shapes.items()}
    unknown = [name for name, rule in rules.items() if not rule.known and job.degrees[rule.axis] > 1]
    if unknown:
        lacks = rules[unknown[0]].lacks
        hint = "bring the names into Megatron's (--dialect megatron), or write with --tp 1"
        if lacks:
            hint = f"its sections follow from {lacks}: keep the module's other tensors, or write with --tp 1"
        raise UsageError(
            f"--tp {job.degrees['tp']}: no rule says how tensor ranks share {unknown[0]}",
            code=NO_RULE,
            key=unknown[0],
            faults=unknown[1:50],
            hint=hint,
        )
    return job.check(shapes.items())


# -- vocabulary --------------------------------------------------------------------------------------------------------


def vocabulary_rows(
    wanted: Wanted, model: Mapping[str, int], facts: MegatronFacts, tp: int
) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Return (rows to store, rows of the source to keep, notes) for the vocabulary tensors.

    (None, None, ()) if there are none, or if the rows of embedding and output layer differ and need not be split.
    """
    found = {
        wanted.tensors[number].shape[0]
        for name, number in model.items()
        if is_vocabulary(name) and wanted.tensors[number].shape
    }
    if not found:
        return None, None, ()

    if len(found) > 1:
        if tp == 1:
            return None, None, ()
        raise UsageError(
            f"embedding and output layer have {' and '.join(map(str, sorted(found)))} rows",
            code=VOCAB,
            hint="cut both to the vocabulary's size with --vocab-size N",
        )

    (have,) = found
    # 128 is Megatron's default of make_vocab_size_divisible_by.
    multiple = check_count(facts.vocab_multiple or 128, have, "rows by make_vocab_size_divisible_by in the arguments")
    real = wanted.wish.vocab_size or check_count(facts.vocab or 0, 16 * have, "rows by vocab_size in the arguments")
    unit = multiple * tp

    if isinstance(real, int) and 0 < real:
        need = ceil_div(real, unit) * unit
        rows = max(need, ceil_div(have, unit) * unit) if have < real else need
    elif have % unit == 0 or (not facts.stated and have % tp == 0) or (tp == facts.tp and have % tp == 0):
        rows = have
    else:
        # The real size is unknown: at most one unit of the old layout below the stored rows. If all such sizes would be
        # padded to the same number of rows, that number is right.
        old = multiple * facts.tp
        low = ceil_div(max(have - old, 0) + 1, unit) * unit
        high = ceil_div(have, unit) * unit
        if low != high or not facts.stated:
            raise UsageError(
                f"--tp {tp}: {have} rows of the vocabulary do not show its real size: Megatron would pad it to"
                f" {low} or {high} rows",
                code=VOCAB,
                key=EMBEDDING,
                hint="say the tokenizer's size with --vocab-size N",
            )
        rows = high

    if rows == have:
        return have, have, ()

    if rows < have:
        return (
            rows,
            rows,
            (
                f"vocabulary of {real} in {rows} rows, as Megatron pads it for {tp} tensor ranks; the {have - rows} "
                "rows of padding beyond are kept next to it, for the way back",
            ),
        )

    return rows, have, (f"vocabulary padded with zeros from {have} to {rows} rows for {tp} tensor ranks",)


def unheld(whose: str, tensor: WantedTensor, tensors: Sequence[WantedTensor]) -> UsageError:
    """Return the error (E2001) for a tensor that would be read back under another name or as another state.

    That happens in formats whose keys are names and states joined by dots, for example if a state contains a dot.

    Args:
        whose: the format, for the message.
        tensor: the tensor.
        tensors: all tensors, of which the message names the other states with dots.
    """
    dotted = dict.fromkeys(each.key.state for each in tensors if "." in each.key.state)
    if tensor.key.state in dotted:
        what = f"has no key for the state {tensor.key.state}: in its keys a state is one word, without a dot"
        hint = f"leave out what has no place with --drop {','.join(dotted)}"
    else:
        what = f"would read {tensor.key.name!r} back under another name"
        hint = "rename or remove it (--remove-keys)"
    return UsageError(f"{whose} {what}", code=UNHELD, key=str(tensor.key), hint=f"{hint}, or choose another format")
