"""verl's adapters of Megatron models: a file for each rank, with only the adapter, under the rank's own names.

    actor/adapter_checkpoint/mp_rank_TT[_PPP][_EEE]_adapter.pt   {"adapter_state_dict": {name: tensor}}
          transformer_config.json     the model's config and the job's degrees, as data (with `extra` in save_contents)
          dist_ckpt/                  the optimizer of the adapter, scheduler and RNG states (`legacy.adapter_states`)
          huggingface/                config.json of the base, tokenizer

A file holds the tensors of the rank's first model chunk with `.adapter.` in their names: layers and experts under local
numbers. So the boxes are those of a rank folder (`megatron.job`), once it is known which number of a file's name is the
stage and which the expert rank: transformer_config.json states that. A grouped linear of experts has one adapter (r,
in) for all experts of the rank, which becomes the adapter of each of them, or one for each (experts, r, in).

Nothing that verl writes states alpha: `--lora-alpha` does (`actor_rollout_ref.model.lora.alpha` of the run).

Source: volcengine/verl b178a3cd, `utils/megatron_peft_utils.py` (`save_adapter_checkpoint`: `models[0]` alone, so the
further chunks of a virtual pipeline are in `dist_ckpt/` alone), `utils/checkpoint/megatron_checkpoint_manager.py`;
megatron-bridge 0.6.2 `peft/{lora,utils}.py`. Cost: a pickle a rank. What it does not do: write such files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.hints import Degrees, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.tensor import MODEL, StoredArray
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError, Unexplained
from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.adapter import is_adapter, is_gated, with_alpha
from ckpt_tool.systems.megatron.args import MegatronFacts, facts_of
from ckpt_tool.systems.megatron.job import CONTRADICTION, MegatronJob, MegatronRank, RankArray
from ckpt_tool.systems.megatron.legacy.folders import MISSING, coordinates
from ckpt_tool.systems.megatron.legacy.read import Gathering
from ckpt_tool.systems.megatron.legacy.verl_files import ADAPTERS, STATES, adapter_files, states_beside
from ckpt_tool.systems.megatron.stages import Stages, from_counts

ROOT_KEY = "adapter_state_dict"
CONFIG = "transformer_config.json"
NUMBERS = "E2790"
NO_DEGREES = "E3030"
_LIMIT = 1 << 20  # bytes
_MOST = 1 << 20  # ranks of a job, and adapters of experts: beyond is a damaged config
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.adapter\..+)", re.DOTALL)
_EXPERTS_ARRAY = 3  # dims of an array with one adapter for each expert


def read_files(tree: Tree, alpha: float | None = None) -> Catalog:
    """Return the catalog of a folder that has such files. alpha: the user's alpha (`--lora-alpha`).

    Raises Incomplete E0302 (ranks, layers), InconsistentCheckpoint E0305, InputError E2790 (names whose numbers nothing
    explains, files of another content), UnmappedTensor E2003, and what the containers raise.
    """
    files = adapter_files(tree)
    contents = read_by_file(files, lambda file: read_content(tree, file))
    ranks = {file: list(_arrays(tree, file, content)) for file, content in contents.items()}
    local = [name for arrays in ranks.values() for name, _ in arrays]
    if not is_adapter(_plain(name) for name in local):
        odd = next((name for name in local if not is_adapter([_plain(name)])), "nothing")
        raise InputError(
            f"no adapter of Megatron-Bridge: it holds {odd[:120]}",
            code=NUMBERS,
            path=tree.display(next(iter(files))),
            hint="fetch the files again, or name what they are with --from",
        )

    hints = LoraHints({}, _config(tree))
    facts = facts_of(hints.arguments)
    degrees = _degrees(tree, files, facts, known=bool(hints.model))
    _check_sizes(tree, degrees, (facts.experts or 0) * len(local))
    where = coordinates(files, degrees, {}, experts=any(".experts." in name for name in local), file="_adapter.pt")
    held = [(rank, ranks[rank.path]) for rank in where]
    job = _job(tree, held, facts, degrees, hints)
    out = Gathering()

    for rank, arrays in held:
        for name, array in arrays:
            for own, part in _members(job, name, array, rank):
                out.add(MODEL, own, part)

    tensors = out.tensors()
    hints = with_alpha(hints, {key.name: tensor.shape for key, tensor in tensors.items()}, alpha, tree.display())
    notes = list(_notes(tree, hints, known=bool(hints.model)))
    catalog = Catalog(
        "megatron",
        tensors=tensors,
        extras={},
        mesh=Mesh.of_degrees(degrees),
        files=tuple(files),
        sidefiles=hf_files.of_a_job(tree),
        notes=tuple(notes),
        unsafe=tuple(dict.fromkeys(line for content in contents.values() for line in content.unsafe)),
        hints=Hints.of(Degrees(**degrees), Globals.each(*(content.globals for content in contents.values())), hints),
    )
    catalog.check()
    return catalog


def _check_sizes(tree: Tree, degrees: Mapping[str, int], adapters: int) -> None:
    """Raise InputError E2790 for degrees or numbers of experts that no job has, and that would take forever to list."""
    if prod(degrees[dim] for dim in ("tp", "pp", "ep", "etp")) > _MOST or adapters > _MOST:
        raise InputError(
            f"{CONFIG} says degrees or experts that no job has: {', '.join(f'{k} {v}' for k, v in degrees.items())}",
            code=NUMBERS,
            path=tree.display(CONFIG),
            hint="fetch it again from where the job wrote it",
        )


def _arrays(tree: Tree, file: str, content: TorchContent) -> Iterator[tuple[str, StoredArray]]:
    """Yield (the rank's own name, array) of each tensor of a file. Raises InputError E2790 for other content."""
    for path, array in content.leaves:
        match path:
            case (str(root), str(name)) if root == ROOT_KEY:
                yield name, array
            case _:
                raise InputError(
                    f"the file holds {'.'.join(map(str, path))[:120]}, want {ROOT_KEY} and names in it",
                    code=NUMBERS,
                    path=tree.display(file),
                    hint="it was not written by verl's save_adapter_checkpoint: --from torch opens it alone",
                )


def _plain(name: str) -> str:
    """Return a name without the wrapper's prefix."""
    return name.removeprefix("module.")


def _config(tree: Tree) -> Mapping[str, Any]:
    """Return the plain fields of transformer_config.json, {} if there is no such file."""
    if not tree.exists(CONFIG):
        return {}
    found = strict_json.parse(tree.read_whole(CONFIG, limit=_LIMIT), path=tree.display(CONFIG))
    plain = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in plain if isinstance(value, int | float | str | bool)}


def _degrees(tree: Tree, files: Mapping[str, tuple[int, ...]], facts: MegatronFacts, *, known: bool) -> dict[str, int]:
    """Return the job's degrees: those that its config states, else those that the names show.

    Raises Unexplained E3030 if names have two numbers and nothing states what the second one means.
    """
    if known:
        degrees = dict(facts.degrees)
        # Expert ranks are carved out of the data ranks; the files have only the first chunk of a virtual pipeline.
        return degrees | {"dp": max(degrees["dp"], degrees["ep"]), "vpp": 1}
    numbers = list(files.values())
    several = any(len(found) > 2 and found[1] for found in numbers)
    if several or any(len(found) == 2 for found in numbers):
        raise Unexplained(
            f"nothing says whether the second number of {next(iter(files))} is the stage's or the experts'"
            if not several
            else f"they are from several pipeline stages ({list(files)[-1]}), and nothing says how many layers the "
            "model has, or whether the stages have more chunks than the first, which verl saves alone",
            code=NO_DEGREES,
            path=tree.display(next(iter(files))),
            hint=f"pass the folder that holds {ADAPTERS} and {CONFIG}, which says the job's degrees",
        )
    out = dict.fromkeys(("pp", "vpp", "ep", "dp", "cp"), 1)
    out["tp"] = out["etp"] = 1 + max(found[0] for found in numbers)
    out["pp"] = 1 + max((found[1] for found in numbers if len(found) > 2), default=0)
    out["ep"] = out["dp"] = 1 + max((found[2] for found in numbers if len(found) > 2), default=0)
    return out


Held = list[tuple[MegatronRank, list[tuple[str, StoredArray]]]]


def _job(tree: Tree, held: Held, facts: MegatronFacts, degrees: dict[str, int], hints: LoraHints) -> MegatronJob:
    local = [name for _, arrays in held for name, _ in arrays]
    stages = _stages(tree, held, facts, degrees, local)
    shapes = {name: array.shape for _, arrays in held for name, array in arrays}
    grouped = [array.shape[0] for _, arrays in held for name, array in arrays if _is_stack(name, array)]
    own = max([names.experts_count(local), *grouped]) or (facts.experts or 0) // degrees["ep"]
    if facts.experts and own and own * degrees["ep"] != facts.experts:
        raise Incomplete(
            f"{degrees['ep']} expert ranks hold adapters of {own} experts each, {CONFIG} says {facts.experts} in all",
            code=MISSING,
            path=tree.display(CONFIG),
            hint="the files belong to another model than the config: fetch both from one save",
        )
    gated = is_gated(hints, shapes)
    return MegatronJob(facts, degrees, stages, own * degrees["ep"], gated=gated is not False, down_shared=False)


def _stages(tree: Tree, held: Held, facts: MegatronFacts, degrees: Mapping[str, int], local: Iterable[str]) -> Stages:
    """Return the layers of each stage, as the files show them.

    Raises Incomplete E0302 if layers are missing; for a virtual pipeline they always are.
    """
    if facts.vpp > 1:
        raise _first_chunks(tree, facts, local)
    counts = [0] * degrees["pp"]
    for rank, arrays in held:
        counts[rank.pp] = max(counts[rank.pp], names.layers_count(name for name, _ in arrays))
    if degrees["pp"] > 1 and facts.layers and sum(counts) != facts.layers:
        raise Incomplete(
            f"the files hold adapters of {sum(counts)} layers, {CONFIG} says {facts.layers}",
            code=MISSING,
            path=tree.display(next(rank.path for rank, _ in held)),
            faults=[f"stage {stage}: {count} layers" for stage, count in enumerate(counts)],
            hint="where some layers have no adapter their numbers can't be known: export the adapter from the job",
        )
    return from_counts(counts, degrees["pp"])


def _first_chunks(tree: Tree, facts: MegatronFacts, local: Iterable[str]) -> Incomplete:
    """Return the error (E0302) for the adapter of a virtual pipeline, of which the files have only the first chunk.

    verl's `save_adapter_checkpoint` saves `models[0]`. All chunks (`model0`, `model1`, ...) are in the optimizer's
    folder, because `generate_state_dict` removes only `model` from it; the hint says how to convert that folder. local:
    names in the files. That hint is not given if they show rows in an order of the tensor ranks, which are not put in
    order in a folder that has the base, too.
    """
    ordered = facts.degrees["tp"] > 1 and any(".adapter.adapter_" in n or n.endswith("_magnitude") for n in local)
    hint = "export the adapter from the job, or train on without a virtual pipeline and save again"
    if states_beside(tree) and not ordered:
        hint = (
            f"verl leaves all chunks in {STATES}: ckpt convert {tree.display()} OUT --from megatron-dist "
            "--keep-keys '*.adapter.*' --to megatron-dist makes the whole adapter of them, with its optimizer"
        )
    return Incomplete(
        f"verl has saved the adapters of the first of {facts.vpp} model chunks of each stage alone ({CONFIG} says "
        f"virtual_pipeline_model_parallel_size {facts.vpp}): those of the other layers are in no file of it",
        code=MISSING,
        path=tree.display(CONFIG),
        hint=hint,
    )


def _is_stack(name: str, array: StoredArray) -> bool:
    return _GROUPED.fullmatch(name) is not None and len(array.shape) == _EXPERTS_ARRAY


def _members(
    job: MegatronJob, name: str, array: StoredArray, rank: MegatronRank
) -> Iterator[tuple[RankArray, StoredArray]]:
    """Yield the logical tensors in a rank's array: one, or one for each expert of a grouped linear."""
    name = _plain(name)
    found = _GROUPED.fullmatch(name)
    if found is None:
        yield job.describe_array(name, array.shape, array.dtype, rank, 0), array
        return
    count = job.experts // job.degrees["ep"]
    apart = len(array.shape) == _EXPERTS_ARRAY
    if not count or (apart and array.shape[0] != count):
        raise InconsistentCheckpoint(
            f"adapters of {array.shape[0] if apart else 'unknown numbers of'} experts, the rank has {count}",
            code=CONTRADICTION,
            path=array.path,
            key=name,
            hint=f"pass the folder with {CONFIG}, which says how many experts there are",
        )
    shape = array.shape[1:] if apart else array.shape
    for expert in range(count):
        part = array.view(expert * (array.numel // count), shape) if apart else array
        yield job.describe_array(f"{found[1]}local_experts.{expert}.{found[2]}", shape, array.dtype, rank, 0), part


def _notes(tree: Tree, hints: LoraHints, *, known: bool) -> Iterator[Note]:
    alpha = hints.peft.get("alpha")
    line = f"alpha {alpha} by --lora-alpha" if alpha else "nothing in the files says its scaling (--lora-alpha)"
    yield Note("N-adapter", f"an adapter of Megatron-Bridge, a file a rank, as verl saves it: {line}")
    if not known:
        yield Note("N-adapter", f"there is no {CONFIG} next to it: the degrees are those in the files' names")
