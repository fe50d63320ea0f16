"""The passes of a conversion, in their order: what becomes of the tensors of a source before a plan is made of them.

    opened -> SELECTION -> NAMES -> FITTING -> planned (`planning`) -> carried out (`writing`)

A pass takes what is chosen so far and what the conversion is to do, and gives what is chosen after it. It moves no
tensor: it changes where tensors are read from, their keys, dtypes and shapes, and it adds to the report. `convert`
takes all passes in this order, `reshard` and `merge` of one source all but NAMES. `merging` and `adapters` select each
source, name it as the hub or the adapter does, compute, and name the result as the output wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from ckpt_tool.conversion.adapter_inside import without_adapter_inside
from ckpt_tool.conversion.adapter_names import adapters_named
from ckpt_tool.conversion.fitting import fitted, held
from ckpt_tool.conversion.hybrid_layers import as_gpt, as_hybrid
from ckpt_tool.conversion.naming import named
from ckpt_tool.conversion.own_header import with_header
from ckpt_tool.conversion.renaming import rename_tensors
from ckpt_tool.conversion.selection import as_model, sound, wanted_tensors
from ckpt_tool.conversion.step_count import steps_of_count
from ckpt_tool.conversion.tied_head import with_head
from ckpt_tool.conversion.vocabulary import resized_vocabulary
from ckpt_tool.conversion.wrapper_prefix import unwrapped
from ckpt_tool.quantised.as_blocks import as_blocks
from ckpt_tool.quantised.dequantize import dequantized
from ckpt_tool.quantised.kept_whole import as_they_are
from ckpt_tool.quantised.quantize import quantized
from ckpt_tool.quantised.repack import repacked
from ckpt_tool.quantised.subclasses import with_stated
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.config import read_config
from ckpt_tool.sources.opening import Opened


class Pass(NamedTuple):
    """One step. purpose: in words, with the options that it carries out."""

    name: str
    purpose: str
    run: Callable[[Chosen, Conversion], Chosen]


# Which tensors of one source, as which values
SELECTION = (
    Pass("sound", "headers that contradict themselves are refused, and optimizers that can't be read", sound),
    Pass("wanted", "--state, --drop, --keep-keys, --remove-keys; scales share the lot of their weight", wanted_tensors),
    Pass("renamed", "--rename: names that the user gives, with all their states", rename_tensors),
    Pass("model", "--as-model: the moving average or the masters in place of the model", as_model),
    Pass("vocabulary", "--vocab-size: rows cut off, or added as zeros", resized_vocabulary),
    Pass("floats", "--dequantize: quantised weights and states as the floats that they represent", dequantized),
)
# Under which names
INSIDE = Pass(
    "inside",
    "an adapter inside a whole model: alone to peft, refused by what has no such names",
    without_adapter_inside,
)
NAMES = (
    INSIDE,
    Pass("unwrapped", "what a trainer's wrappers put in front of every name, or inside names, is taken off", unwrapped),
    Pass("head", "--tied-head: an output layer that is the embedding, once or twice", with_head),
    Pass("adapters", "a LoRA of Megatron's as PEFT's, and back; its config too", adapters_named),
    Pass("layers", "--hybrid-layer-pattern none: a HybridModel of Megatron's as a GPTModel", as_gpt),
    Pass("names", "--aoa, --dialect, --family: names and structure, as strided pieces of the source", named),
    Pass("pattern", "--hybrid-layer-pattern: a GPTModel as a HybridModel, by the letters of its layers", as_hybrid),
)
# As the format keeps them
FITTING = (
    INSIDE,
    Pass("repacked", "--repack: weights of GPTQ and AWQ as compressed-tensors stores them", repacked),
    Pass("codes", "--dtype leaves codes and scales as they are", as_they_are),
    Pass(
        "counted",
        "one count of an optimizer's steps is each parameter's step in a format that keeps it so",
        steps_of_count,
    ),
    Pass("stated", "what headers state of torchao's tensors stays with them", with_stated),
    Pass("held", "what the format has no place for stays behind, by name", held),
    Pass("fitted", "states that the format keeps as other tensors (DeepSpeed's ZeRO stages)", fitted),
    Pass("blocks", "--gguf-type: values as blocks of a quantised type", as_blocks),
    Pass("quantised", "--quantize: weights as codes and scales", quantized),
    Pass("header", "what the format's files state of the model in their own words (GGUF's metadata)", with_header),
)
PASSES = (*SELECTION, *NAMES, *FITTING)


def passed(chosen: Chosen, job: Conversion, passes: Iterable[Pass]) -> Chosen:
    """`chosen` after each of the passes."""
    for each in passes:
        chosen = each.run(chosen, job)
    return chosen


def selected(opened: Opened, job: Conversion, passes: Iterable[Pass] = SELECTION) -> Chosen:
    """The tensors of one source after each of the passes, of which the first are those of SELECTION."""
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
    """`chosen`, of tensors under the hub's names, under those that the output wants; under those that its source
    `opened` came with where it keeps names."""
    writing = job.writing
    home = opened.catalog.hints.dialect or opened.format.holds.dialect
    renamed = chosen.all_hints.dialect != opened.catalog.hints.dialect
    if renamed and writing.dialect in (None, "keep") and not writing.aoa and job.fmt.holds.dialect in ("keep", home):
        writing = replace(writing, dialect=home if home != "keep" else None)
    return passed(chosen, job._replace(writing=writing), NAMES)
