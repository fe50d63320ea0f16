"""Writes job files, with which a cluster's scheduler runs a saved plan on many workers.

    slurm   a batch script with an array of jobs, for `sbatch FILE`
    k8s     an indexed Job, for `kubectl apply -f FILE`
    ray     a program that submits the job, for `python FILE`; Ray's workers claim

Each runs `ckpt apply PLAN` with the options that were given with `--emit`. Names come from a checkpoint's paths and may
contain anything, so each is written only as a quoted shell word, YAML string or Python literal. Relative paths of
sources in the plan refer to the folder in which the job file was written: the job changes to it first.

Sources: sbatch (directives end at the first command; `--requeue`), Kubernetes ("Indexed completion mode",
`JOB_COMPLETION_INDEX`; in `command` `$(NAME)` is a variable and `$$` a dollar), Ray (Python SDK for jobs,
`JobSubmissionClient.submit_job`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tool.conversion.carry_out import refuse_in_store
from ckpt_tool.conversion.plan_file import write_new
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import UsageError
from ckpt_tool.option_kinds.statement import RUN, words_of
from ckpt_tool.option_kinds.values import AUTO
from ckpt_tool.options.verbs import Share
from ckpt_tool.options.writing import ENGINES, Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.storage.opening import scheme_of
from ckpt_tool.storage.output.destination import check_beside

# to begin with: the file says what to change
WORKERS = 8
THREADS = 4
_READ = 8  # times the bytes of a plan file that a worker takes for it: 6.6 measured at 21 MiB


class _Work(NamedTuple):
    """What every engine is to run."""

    words: list[str]  # of the command
    name: str
    threads: int
    memory: int  # GiB a worker
    gpu: bool
    folders: list[str]  # of this machine, that each node has to see under the same paths
    stores: bool  # does it need a store's credentials?
    at: str  # where to run it, "" where the plan names no relative path

    @property
    def plan_file(self) -> str:
        return self.words[2]  # ckpt apply PLAN


def write_job(plan: Plan, plan_file: str, share: Share, writing: Writing, emit: tuple[str, str]) -> str:
    """Write the file of `emit`, whose path is returned; nothing else is looked at or written.

    Raises UsageError: E0266 where other options share the work out otherwise, E0278 for paths that the engine can't be
    given, E2510 for a device and an output in a store;
    OutputExists: E0510 for a path in a source or the output, E0513 for a file that is there; StorageError.
    """
    engine, path = emit
    if scheme_of(plan.destination) is not None:
        refuse_in_store(writing)
    check_beside(path, "--emit", dict.fromkeys(file.root for file in plan.sources), [plan.destination])
    text = _TEXTS[engine](_work_of(plan, os.path.abspath(plan_file), _way(engine, share, writing), writing), path)
    write_new(path, text, "the job file", "E0513")
    return path


def _way(engine: str, share: Share, writing: Writing) -> list[str]:
    """How the workers share the plan out."""
    other = f"--part {'/'.join(map(str, share.part))}" if isinstance(share.part, tuple) else ""
    if engine == "ray":
        other = other or f"--part {AUTO}" * (share.part == AUTO) or "--claim" * share.claim
    other = "--ray" if writing.ray else other
    if other:
        raise UsageError(
            f"{other} and --emit {engine} both say how the work is shared out",
            code="E0266",
            hint="leave it off: workers claim what none has taken; slurm and k8s take --claim and --part auto too",
        )
    if engine == "ray":
        return ["--ray", AUTO]
    return ["--part", AUTO] if share.part == AUTO else ["--claim"]


def _work_of(plan: Plan, plan_file: str, way: Sequence[str], writing: Writing) -> _Work:
    threads = writing.threads or THREADS
    words = words_of(replace(writing, threads=threads, dry_run=False, ray=None, emit=None, plan_file=None), RUN)
    roots = dict.fromkeys([*(file.root for file in plan.sources), plan.destination])
    here = [root for root in roots if scheme_of(root) is None]
    buffers = min(plan.report["plan"]["peak_memory"] * threads, writing.memory) + sum(writing.pinned)
    return _Work(
        ["ckpt", "apply", plan_file, *way, *words],
        f"ckpt-{plan.identifier()[:8]}",
        threads,
        1 + ceil_div(buffers + _READ * os.path.getsize(plan_file), 1 << 30),
        writing.device not in ("", "cpu"),
        _above([plan_file, *here]),
        len(here) < len(roots),
        "" if all(map(os.path.isabs, here)) else os.getcwd(),
    )


def _above(paths: Sequence[str]) -> list[str]:
    """The folders that hold the paths, none inside another: one where they have one below the root in common."""
    folders = sorted({os.path.dirname(os.path.abspath(path)) for path in paths})
    common = os.path.commonpath(folders)
    if common != os.sep:
        return [common]
    above = tuple(f"{folder}{os.sep}" for folder in folders)
    return [folder for folder in folders if not folder.startswith(above)]


def _head(start: str, path: str, plan_file: str) -> str:
    return f"""# Written by ckpt. Start it with: {start} {_in_comment(path, "THIS-FILE")}
# See how far it is with: ckpt status {_in_comment(plan_file, "THE-PLAN-FILE")} --watch
# Every node has to see the plan, the sources and the output's folder under the same paths.
"""


def _in_comment(path: str, instead: str) -> str:
    """A path as a shell takes it, on one line of a comment; `instead` where it has characters that end the line."""
    return shlex.quote(path) if path.isprintable() else instead


def _slurm(work: _Work, path: str) -> str:
    stores = "# Credentials of the store come from the environment in which sbatch is called (--export=ALL).\n"
    gpu = "#SBATCH --gres=gpu:1\n"
    many = (
        "before the first begins: all of one number have to run" if "--part" in work.words else "others may come later"
    )
    return f"""#!/bin/bash
{_head("sbatch", path, work.plan_file) + stores * work.stores}\
# Change: how many workers ({many}), and what each gets.
#SBATCH --job-name={work.name}
#SBATCH --array=1-{WORKERS}
#SBATCH --cpus-per-task={work.threads}
#SBATCH --mem={work.memory}G
{gpu * work.gpu}# A worker whose node is lost is sent again: what it had done counts.
#SBATCH --requeue
# Set these where your cluster wants them: take one # away.
##SBATCH --partition=YOUR-PARTITION
##SBATCH --account=YOUR-ACCOUNT
##SBATCH --time=12:00:00
set -eu
# source YOUR-ENVIRONMENT/bin/activate
{f"cd {shlex.quote(work.at)}{chr(10)}" * bool(work.at)}exec {shlex.join(work.words)}
"""


def _k8s(work: _Work, path: str) -> str:
    secret = """          # a Secret whose keys are the variables of the store's credentials (ckpt help stores)
          envFrom: [{secretRef: {name: YOUR-SECRET}}]
"""
    gpu = ', "nvidia.com/gpu": 1' * work.gpu
    at = f"          workingDir: {_yaml(work.at)}\n"

    mounts = ""
    volumes = ""
    for number, folder in enumerate(work.folders):
        mounts += f"            - {{name: data-{number}, mountPath: {_yaml(folder)}}}\n"
        volumes += f"        - {{name: data-{number}, persistentVolumeClaim: {{claimName: YOUR-CLAIM}}}}\n"

    return f"""{_head("kubectl apply -f", path, work.plan_file)}\
# Change: YOUR-IMAGE, in which `ckpt` is installed; YOUR-CLAIM, a volume that many nodes may write
# (ReadWriteMany); and how many workers there are, in three places.
apiVersion: batch/v1
kind: Job
metadata:
  name: {work.name}
spec:
  completions: {WORKERS}
  parallelism: {WORKERS}
  completionMode: Indexed
  backoffLimit: {4 * WORKERS}  # a worker that died is started again: what it had done counts
  template:
    spec:
      restartPolicy: OnFailure
      containers:
        - name: ckpt
          image: YOUR-IMAGE
          command: [{", ".join(_yaml(word.replace("$", "$$")) for word in work.words)}]
{at * bool(work.at)}          env: [{{name: JOB_COMPLETIONS, value: "{WORKERS}"}}]  # for --part auto
{secret * work.stores}          resources:
            requests: {{cpu: {work.threads}, memory: {work.memory}Gi}}
            limits: {{memory: {work.memory}Gi{gpu}}}
          volumeMounts:
{mounts}      volumes:
{volumes}"""


def _yaml(text: str) -> str:
    """A string in YAML's words, ASCII alone. Raises UsageError E0278: YAML has no bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(
            "Kubernetes takes no path that is not UTF-8", code="E0278", path=text, hint="rename it and plan again"
        ) from e
    plain = (each if " " <= each <= "~" and each not in '"\\' else f"\\U{ord(each):08x}" for each in text)
    return f'"{"".join(plain)}"'


def _ray(work: _Work, path: str) -> str:
    if work.at:
        raise UsageError(
            "the plan names its source by a relative path, and Ray's workers run in folders of their own",
            code="E0278",
            hint="plan again with an absolute path",
        )
    stores = """# Credentials of the store: the nodes' own, or runtime_env={"env_vars": {...}} of submit_job.
"""
    return f"""{_head("python", path, work.plan_file) + stores * work.stores}\
# Change: ADDRESS, the cluster's dashboard. ckpt with its extra `ray` has to be installed on the nodes.
# A node may be lost: its work is taken over.
import os
import shlex

from ray.job_submission import JobSubmissionClient

ADDRESS = os.environ.get("RAY_DASHBOARD", "http://YOUR-HEAD:8265")
COMMAND = {_literal(work.words)}

client = JobSubmissionClient(ADDRESS)
job = client.submit_job(entrypoint=shlex.join(COMMAND), metadata={{"name": {_literal(work.name)}}})
print(f"{{job}}; follow it with: ray job logs --address {{ADDRESS}} --follow {{job}}")
"""


def _literal(value: object) -> str:
    """A value in Python's words, ASCII alone."""
    return ascii(value)


_TEXTS = dict(zip(ENGINES, (_slurm, _k8s, _ray), strict=True))
