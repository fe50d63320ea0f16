"""Exporters that are known to have broken checkpoints in silence, recognised by what they leave.

Megatron-Bridge and mbridge write a file of the reference model once every tensor of it has come. A file of which one
tensor never comes is left out whole, with all that has come, and the index is made of the files that were written: it
agrees with itself. What is seen then is a gap in the numbers of the files where tensors are missing too:

    num_nextn_predict_layers 1, no MTP tensor, gap     MTP under `mtp.`: AReaL #1403, verl #4227
                                                        MTP as `model.layers.N`: Megatron-Bridge #4188
    gap, and no MTP in it; or no weights at all         a model of other sizes than the reference: Megatron-Bridge #1883
    the index names tensors that their files lack       Relax #148, which also gives the cause
    files hold tensors that the index lacks             Megatron-Bridge #4083
    a file that ends early                              a killed save that resuming takes: speculators #739

The threads were read on GitHub. What this does not do: prove who wrote the files; it names the tools with such a fault.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ckpt_tool.auditing.findings import EXPORTER, MISSING, NOTHING, FoundFault
from ckpt_tool.auditing.names import count_mtp_layers, gaps
from ckpt_tool.auditing.subject import Subject
from ckpt_tool.families.table import form_of
from ckpt_tool.sources.steps import step_of

_GITHUB = "https://github.com/"


class Report(NamedTuple):
    """A thread: how it is called, where it is, what it says in a few words."""

    name: str
    path: str
    what: str

    @property
    def link(self) -> tuple[str, str]:
        """The report's name and its URL."""
        return self.name, _GITHUB + self.path


AREAL = Report(
    "AReaL #1403",
    "areal-project/AReaL/pull/1403",
    "files with a tensor of the MTP head, which was not exported, are left out whole",
)
BRIDGE_AHEAD = Report(
    "Megatron-Bridge #4188",
    "NVIDIA-NeMo/Megatron-Bridge/issues/4188",
    "files with a tensor of the MTP layer, which was not exported, are left out whole",
)
BRIDGE_SIZES = Report(
    "Megatron-Bridge #1883",
    "NVIDIA-NeMo/Megatron-Bridge/issues/1883",
    "files of the reference model of which a tensor has no counterpart are left out whole",
)
RELAX = Report(
    "Relax #148",
    "redai-studio/Relax/pull/148",
    "an incomplete file is written, and the index lists what it should have held",
)
BRIDGE_INDEX = Report(
    "Megatron-Bridge #4083",
    "NVIDIA-NeMo/Megatron-Bridge/issues/4083",
    "the index is made of what ranks were to write, not of what they wrote",
)
SPECULATORS = Report(
    "speculators #739",
    "vllm-project/speculators/pull/739",
    "a save that is killed leaves a folder that resuming takes for the newest step",
)
# weights that end early; files of a training state
_SHORT = ("E0315", "E0317", "E0334")
_BESIDE = "E1671"


def signatures(subject: Subject | None, found: Sequence[FoundFault], path: str) -> list[FoundFault]:
    """The known faults that the findings look like, with the evidence. subject: None where nothing could be opened.
    path: of the checkpoint; a step's name says that it was being saved, and not fetched."""
    codes = {fault.code for fault in found}
    reports = []
    left_out = gaps(subject) if subject is not None and MISSING in codes else {}
    if subject is not None and left_out:
        stem, numbers = next(iter(left_out.items()))
        nearest = _judge_gap(subject)
        others = [report for report in (AREAL, BRIDGE_AHEAD, BRIDGE_SIZES) if report is not nearest]
        file_count = f"{len(numbers)} files" if len(numbers) > 1 else "1 file"
        evidence = f"of {stem}N {file_count} left out, and what names the files agrees with those that are there"
        do = "export again with a release of the exporter that has the fix, or with MTP"
        reports.append(_seen(nearest, evidence, do, others))
    if NOTHING in codes:
        reports.append(_seen(BRIDGE_SIZES, "there is a config and no weights", "export with a model of these sizes"))
    if "E0381" in codes:
        reports.append(_seen(RELAX, "the index names tensors that their files lack", "make the index from the files"))
    if "E0382" in codes:
        reports.append(_seen(BRIDGE_INDEX, "files hold tensors that the index lacks", "make the index from the files"))
    step = step_of(path.rstrip("/").rpartition("/")[2], numbers=True)
    beside = any(fault.code == _BESIDE and not (fault.file or "").endswith(".json") for fault in found)
    if beside or (step is not None and codes.intersection(_SHORT)):
        reports.append(_seen(SPECULATORS, "a file ends early", "resume from what ckpt latest names, and save again"))
    return reports


def _judge_gap(subject: Subject) -> Report:
    promised, present = count_mtp_layers(subject)
    if not promised or present:
        return BRIDGE_SIZES
    return BRIDGE_AHEAD if _as_layers(subject) else AREAL


def _as_layers(subject: Subject) -> bool:
    """Are the family's MTP layers numbered on from those of the decoder?"""
    if subject.found is None:
        return True
    forms: Collection[str] = subject.found.family.table("hf").left
    return not any("mtp" in form_of(form)[0].split(".") for form in forms)


def _seen(report: Report, evidence: str, do: str, others: Sequence[Report] = ()) -> FoundFault:
    """others: reports of the same cause."""
    links = (report.link, *(other_report.link for other_report in others))
    return FoundFault(EXPORTER, f"{evidence}: as in {report.name}, where {report.what}", do=do, seen=links)
