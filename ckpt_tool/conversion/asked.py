"""When a pass of a conversion has anything to do: one question each, answered by options, by the source or by names.

    has_rename_rules       is there a --rename?
    may_hold_adapter       does any name have `.lora_` in it, or does the target hold adapters alone?

A question may be answered with True too often, never too seldom: what it is asked for is whether the pass is imported
and called at all (`conversion.passes`). So it is cheap and imports no pass, no family and no format. Cost: options
nothing; names one search in their joined text, 10 ms for 90,000 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import MODEL, LogicalTensor
from ckpt_tool.core.wrapper_words import INSIDE_NAMES, shared_wrappers
from ckpt_tool.formats.base import Fitting
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.weight_schemes.quantised_weights import DTYPES

# What only the names of an adapter have: PEFT's, and Megatron-Bridge's (`.adapter.`)
ADAPTER_WORDS = (".base_layer.", ".lora_", ".modules_to_save.", ".original_module.", "prompt_encoder.", ".adaption_")
_BRIDGE_WORD = ".adapter."
_TORCHAO_WORD = "_qdata"  # the codes of torchao's tensors, as `weight_schemes.quantised_weights` reads them
_FILE_HEADERS = frozenset(("metadata", "metadata_by_file"))  # extras that hold what safetensors files state


def contain_any(names: Iterable[str], words: Iterable[str]) -> bool:
    """Does any of the names contain any of the words?"""
    text = "\n".join(names)
    return any(word in text for word in words)


def _names_of(chosen: Chosen) -> list[str]:
    return [row.tensor.key.name for row in chosen.stored]


def may_hold_codes(tensors: Iterable[LogicalTensor | WantedTensor]) -> bool:
    """Has any tensor of the model a dtype in which the codes of quantised weights are stored?"""
    dtypes = {each.dtype for each in tensors if each.key.state == MODEL}
    return any(dtype.name in DTYPES for dtype in dtypes)


def always(chosen: Chosen, job: Conversion) -> bool:
    """For passes of every conversion."""
    return True


# -- which tensors, as which values ------------------------------------------------------------------------------------


def has_rename_rules(chosen: Chosen, job: Conversion) -> bool:
    """--rename"""
    return bool(job.writing.rename)


def changes_the_format(chosen: Chosen, job: Conversion) -> bool:
    """Does the source become another format, which may have other states?"""
    return job.fmt.name != chosen.sources[0].catalog.format


def takes_another_state(chosen: Chosen, job: Conversion) -> bool:
    """--as-model"""
    return bool(job.writing.as_model)


def resizes_vocabulary(chosen: Chosen, job: Conversion) -> bool:
    """--vocab-size"""
    return job.writing.vocab_size is not None


def has_codes(chosen: Chosen, job: Conversion) -> bool:
    """--dequantize, or codes that the target may not hold: parts of states (`exp_avg@codes`), GGUF's blocks."""
    if job.writing.dequantize:
        return True
    states = {row.tensor.key.state for row in chosen.stored}
    dtypes = {row.tensor.dtype for row in chosen.stored}
    return any("@" in state for state in states) or any(dtype.coded for dtype in dtypes)


# -- under which names -------------------------------------------------------------------------------------------------


def may_hold_adapter(chosen: Chosen, job: Conversion) -> bool:
    """Names of an adapter inside a model, or a target of adapters alone."""
    return job.fmt.holds.adapter or contain_any(_names_of(chosen), ADAPTER_WORDS)


def has_wrapper_words(chosen: Chosen, job: Conversion) -> bool:
    """Words of wrappers in front of all names, or inside a name or a path, where names may change."""
    if job.writing.dialect == "keep" or job.writing.aoa:
        return False
    names = _names_of(chosen)
    if contain_any(names, INSIDE_NAMES) or shared_wrappers(names):
        return True
    return any(word in str(step) for row in chosen.stored for step in row.tensor.path for word in INSIDE_NAMES)


def has_head_policy(chosen: Chosen, job: Conversion) -> bool:
    """--tied-head, or a dialect that always has both (Meta's)."""
    return job.writing.tied_head is not None or job.dialect == "meta"


def may_be_adapter(chosen: Chosen, job: Conversion) -> bool:
    """Names of an adapter, PEFT's or Megatron's, or a source of adapters alone."""
    if job.writing.aoa:
        return False
    if any(opened.format.holds.adapter for opened in chosen.sources) or "peft" in chosen.all_hints.plain:
        return True
    return contain_any(_names_of(chosen), (*ADAPTER_WORDS, _BRIDGE_WORD))


def changes_names(chosen: Chosen, job: Conversion) -> bool:
    """A dialect of the target's, options that say how names change, or names of a tool that are kept."""
    asked = job.writing.experts or job.writing.aoa or job.reading.family
    return job.dialect != "keep" or bool(asked) or "saved_by" in chosen.all_hints.plain


# -- as the format keeps them ------------------------------------------------------------------------------------------


def repacks(chosen: Chosen, job: Conversion) -> bool:
    """--repack"""
    return job.writing.repack is not None


def casts_model(chosen: Chosen, job: Conversion) -> bool:
    """--dtype, for the model"""
    return bool(job.writing.dtypes)


def has_one_step_count(chosen: Chosen, job: Conversion) -> bool:
    """One count of steps for all parameters, as optax keeps it."""
    return chosen.sources[0].catalog.count is not None


def may_hold_torchao(chosen: Chosen, job: Conversion) -> bool:
    """Codes under torchao's names, or headers of files that may state some."""
    return not _FILE_HEADERS.isdisjoint(chosen.sources[0].catalog.extras) or contain_any(
        _names_of(chosen), (_TORCHAO_WORD,)
    )


def fits_tensors(chosen: Chosen, job: Conversion) -> bool:
    """A format that keeps some states as other tensors."""
    return isinstance(job.fmt, Fitting)


def quantizes(chosen: Chosen, job: Conversion) -> bool:
    """--quantize, or the patterns that belong to it"""
    return bool(job.writing.quantize is not None or job.writing.quantize_skip or job.writing.quantize_only)
