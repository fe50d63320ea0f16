"""Lists the passes of a conversion in their order: the steps that transform a source's tensors before planning.

    opened -> SELECTION -> NAMES -> FITTING -> planned (`planning`) -> executed (`writing`)

A pass takes the tensors chosen so far and the requested conversion, and returns the tensors chosen after it. It moves
no data: it changes where tensors are read from, their keys, dtypes and shapes, and it adds to the report. `convert`
runs all passes in this order, `reshard` and `merge` of one source all but NAMES. `merging` and `adapters` select each
source, name it as the hub or the adapter does, compute, and then convert the result to the output's names.

A pass that only one system needs is registered by that system (`formats.entry.SystemPass`), and runs at one of four
points. Each pass is a row: its purpose, when it applies (`asked`, a cheap check of the options, the source or the
names), and its function. A pass that does not apply is neither called nor imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from ckpt_tool.conversion import asked
from ckpt_tool.formats.entry import Place, passes_at
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.config import read_config
from ckpt_tool.sources.opening import Opened


class Pass(NamedTuple):
    """One step of a conversion."""

    name: str
    purpose: str  # in words, with the options that it implements
    # Does the pass apply? False means that its result would equal its input.
    asked: Callable[[Chosen, Conversion], bool]
    function: str  # `module:function`, the module below this package

    def run(self, chosen: Chosen, job: Conversion) -> Chosen:
        """Apply the pass to `chosen`, if it applies. Raises what its function raises."""
        if not self.asked(chosen, job):
            return chosen
        module, _, name = self.function.partition(":")
        function: Callable[[Chosen, Conversion], Chosen] = getattr(import_module(f"ckpt_tool.{module}"), name)
        return function(chosen, job)


def _of_systems(place: Place) -> Iterator[Pass]:
    """The passes of all systems that run at this point (`formats.entry.SystemPass`)."""
    for package, row in passes_at(place):
        yield Pass(row.name, row.purpose, row.asked, f"{package}.{row.function}")


# Choose the tensors of one source and their values.
SELECTION = (
    Pass(
        "averages",
        "averages among the model's own names are the state ema, where the source's reader leaves them there",
        asked.changes_the_format,
        "conversion.averages_apart:sort_averages_apart",
    ),
    Pass(
        "sound",
        "headers that contradict themselves are refused, and optimizers that can't be read",
        asked.always,
        "conversion.selection:sound",
    ),
    Pass(
        "wanted",
        "--state, --drop, --keep-keys, --remove-keys; scales share the lot of their weight",
        asked.always,
        "conversion.selection:wanted_tensors",
    ),
    Pass(
        "renamed",
        "--rename: names that the user gives, with all their states",
        asked.has_rename_rules,
        "conversion.renaming:rename_tensors",
    ),
    Pass(
        "model",
        "--as-model: the moving average or the masters in place of the model",
        asked.takes_another_state,
        "conversion.selection:as_model",
    ),
    Pass(
        "vocabulary",
        "--vocab-size: rows cut off, or added as zeros",
        asked.resizes_vocabulary,
        "conversion.vocabulary:resized_vocabulary",
    ),
    Pass(
        "floats",
        "--dequantize: quantised weights and states as the floats that they represent",
        asked.has_codes,
        "quantised.dequantize:dequantize",
    ),
)
# Give them the output's names. INSIDE is part of FITTING too, so that it also runs in commands without NAMES.
INSIDE = Pass(
    "inside",
    "an adapter inside a whole model: alone to peft, refused by what has no such names",
    asked.may_hold_adapter,
    "conversion.adapter_inside:without_adapter_inside",
)
NAMES = (
    INSIDE,
    Pass(
        "unwrapped",
        "what a trainer's wrappers put in front of every name, or inside names, is taken off",
        asked.has_wrapper_words,
        "conversion.wrapper_prefix:unwrapped",
    ),
    Pass(
        "head",
        "--tied-head: an output layer that is the embedding, once or twice",
        asked.has_head_policy,
        "conversion.tied_head:with_head",
    ),
    Pass(
        "adapters",
        "a LoRA of Megatron's as PEFT's, and back; its config too",
        asked.may_be_adapter,
        "conversion.adapter_names:adapters_named",
    ),
    *_of_systems("before names"),
    Pass(
        "names",
        "--aoa, --dialect, --family: names and structure, as strided pieces of the source",
        asked.changes_names,
        "conversion.naming:named",
    ),
    *_of_systems("after names"),
)
# Bring them into the form that the output's format stores.
FITTING = (
    INSIDE,
    Pass(
        "repacked",
        "--repack: weights of GPTQ and AWQ as compressed-tensors stores them",
        asked.repacks,
        "quantised.repack:repack",
    ),
    Pass(
        "codes",
        "--dtype leaves codes and scales as they are",
        asked.casts_model,
        "quantised.keep_together:as_they_are",
    ),
    Pass(
        "counted",
        "one count of an optimizer's steps is each parameter's step in a format that keeps it so",
        asked.has_one_step_count,
        "conversion.step_count:steps_of_count",
    ),
    Pass(
        "stated",
        "what headers state of torchao's tensors stays with them",
        asked.may_hold_torchao,
        "quantised.torchao_headers:carry_headers",
    ),
    Pass(
        "held",
        "what the format has no place for is left out, by name",
        asked.always,
        "conversion.fitting:held",
    ),
    Pass(
        "fitted",
        "states that the format keeps as other tensors (DeepSpeed's ZeRO stages)",
        asked.fits_tensors,
        "conversion.fitting:fitted",
    ),
    *_of_systems("after fitting"),
    Pass(
        "quantised",
        "--quantize: weights as codes and scales",
        asked.quantizes,
        "quantised.quantize:quantize",
    ),
    *_of_systems("last"),
)
PASSES = (*SELECTION, *NAMES, *FITTING)


def passed(chosen: Chosen, job: Conversion, passes: Iterable[Pass]) -> Chosen:
    """Apply the passes to `chosen`, one after the other."""
    for each in passes:
        chosen = each.run(chosen, job)
    return chosen


def selected(opened: Opened, job: Conversion, passes: Iterable[Pass] = SELECTION) -> Chosen:
    """Select the tensors of one source with these passes, which begin with those of SELECTION."""
    nothing = Chosen(
        (opened,),
        stored=(),
        extras={},
        inherits=job.inherits,
        config=read_config(job.reading.config) if job.reading.config else None,
        config_path=job.reading.config,
        lenient=job.reading.lenient,
        first_replica=job.reading.replica_policy == "first",
    )
    return passed(nothing, job, passes)


def in_wanted_names(chosen: Chosen, opened: Opened, job: Conversion) -> Chosen:
    """Convert `chosen` from the hub's names to those of the output; if the output keeps names, to those that the source
    `opened` had."""
    writing = job.writing
    home = opened.catalog.hints.dialect or opened.format.holds.dialect
    renamed = chosen.all_hints.dialect != opened.catalog.hints.dialect
    if renamed and writing.dialect in (None, "keep") and not writing.aoa and job.fmt.holds.dialect in ("keep", home):
        writing = replace(writing, dialect=home if home != "keep" else None)
    return passed(chosen, job._replace(writing=writing), NAMES)
