"""From a command line to a Job: the verbs' table, typer's objects made on demand, and its faults in our words.

Only the verb that was typed is built, and values stay text (typer would load pydantic, 70 ms and 15 MB, to tell that
a text is a text). Help is plain text in sections, so rich is not loaded for it either. What typer finds wrong becomes
a UsageError with near misses, in the same three lines as every other error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt_tool.errors import UsageError, near_misses

if TYPE_CHECKING:
    from ckpt_tool.cli_job import Job

# verb -> what the list of verbs says of it
VERBS = {
    "inspect": "what is in a checkpoint, from its headers alone",
    "reshard": "the same checkpoint for other parallel degrees",
    "convert": "another format, another dialect, other degrees",
    "merge": "join shards, strip keys, fold LoRA adapters, merge models",
    "diff": "are two checkpoints equal in value?",
    "verify": "is a checkpoint complete and sound?",
    "apply": "run a saved plan, or one share of it",
    "validate": "train, save, kill, reshard, resume, compare",
    "kernels": "the CUDA reshard kernels: build, info, check, bench",
    "doctor": "what this machine offers, and a self-test",
    "help": "the pages of the guide",
    "clean": "what interrupted runs left behind",
    "explain": "what an error code means, why it comes, what to do",
}
EXAMPLES = {
    "inspect": ("ckpt inspect runs/7", "ckpt inspect model.safetensors --match '*.q_proj.*' --stats"),
    "reshard": ("ckpt reshard runs/7/iter_0000100 out --tp 8 --pp 2", "ckpt reshard in out --dp 3 --zero 3 --dry-run"),
    "convert": (
        "ckpt convert runs/7 out --to safetensors --dtype bf16",
        "ckpt convert hf out --to megatron-dist --tp 4 --pp 2",
    ),
    "merge": (
        "ckpt merge shards one --remove-keys 'lm_head.*'",
        "ckpt merge base adapter out --method lora",
        "ckpt merge a b out --method slerp --t 0.3",
    ),
    "diff": ("ckpt diff hf megatron", "ckpt diff a b --atol 1e-6 --state model"),
    "verify": ("ckpt verify out", "ckpt verify out --mode quick --json"),
    "apply": ("ckpt convert in out --to dcp --plan p.json && ckpt apply p.json", "ckpt apply p.json --part 3/8"),
    "kernels": ("ckpt kernels info", "ckpt kernels build --arch native", "ckpt kernels check --cases 1000"),
    "validate": (
        "ckpt validate --report proof.html",
        "ckpt validate --from-layout tp2,pp2,dp2,ep2 --to-layout dp4,ep2",
    ),
    "doctor": ("ckpt doctor",),
    "help": ("ckpt help", "ckpt help pretrained", "ckpt help paddle --lang zh"),
    "clean": ("ckpt clean .", "ckpt clean . --remove"),
    "explain": ("ckpt explain E0301", "ckpt explain"),
}
_ABOUT = """Read sharded training checkpoints of any format, lay them out anew, prove every value.
Nothing in a checkpoint is ever run."""
_CLOSING = """ckpt VERB --help shows a verb's options. Exit codes: 0 done, 1 findings, 2 usage, 3 malformed input,
4 refused for safety, 5 output exists, 6 source changed, 7 I/O, 70 our bug, 130/143 interrupted."""
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# Reporting options may stand before the verb too; those with a value take the next word.
_FLAGS_BEFORE = ("--json", "-q", "--quiet", "-v", "-vv", "--verbose")
_VALUED_BEFORE = ("--progress", "--report", "--color")


class _AsText:
    """Stands in for typer's run-time coercion: every value of ours is text, a list of texts, a flag or a count."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return () if value is None and (param.multiple or param.nargs == -1) else value


class VerbCommand(TyperCommand):
    """A verb whose help comes in sections and whose values stay text."""

    def get_params(self, ctx: Any) -> Any:
        return _as_text(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(param.metavar) for param in self.params if param.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = "Arguments" if param.param_type_name == "argument" else _panel(param)
            sections.setdefault(title, []).append((_names(param), param.help or ""))
        order = ("Arguments", "Options", "Layout", "What travels", "Keys", "Reading", "Writing", "Reporting")
        for title in sorted(sections, key=order.index):
            with formatter.section(title):
                formatter.write_dl(sections[title], col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            with formatter.section("Examples"):
                for example in examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def _as_text(params: list[Any]) -> list[Any]:
    """The parameters, told to leave their values text."""
    for param in params:
        if getattr(param, "_runtime_param", ...) is None:  # typer >= 0.29; elsewhere there is nothing to spare
            param._runtime_param = _AsText()
    return params


def _names(param: Any) -> str:
    """`-q, --quiet`, `--tp N`, `SRC`."""
    if param.param_type_name == "argument":
        return str(param.metavar)
    names = ", ".join(sorted(param.opts, key=len))
    names += "".join(f" / {name}" for name in param.secondary_opts)
    return f"{names} {param.metavar}" if param.metavar else names


def _panel(param: Any) -> str:
    return getattr(param, "rich_help_panel", None) or "Reporting"


class VerbGroup(TyperGroup):
    """The root: knows the verbs by name and builds one only when it is asked for."""

    def get_params(self, ctx: Any) -> Any:
        return _as_text(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return build(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS:
            raise unknown_verb(args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text(_CLOSING)


def build(verb: str) -> Any:
    """The typer command of one verb."""
    from ckpt_tool import cli_verbs
    from ckpt_tool.cli_options import flat

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    function = {
        "inspect": cli_verbs.inspect,
        "reshard": cli_verbs.reshard,
        "convert": cli_verbs.convert,
        "merge": cli_verbs.merge,
        "diff": cli_verbs.diff,
        "verify": cli_verbs.verify,
        "apply": cli_verbs.apply,
        "validate": cli_verbs.validate,
        "kernels": cli_verbs.kernels,
        "doctor": cli_verbs.doctor,
        "help": cli_verbs.help,
        "clean": cli_verbs.clean,
        "explain": cli_verbs.explain,
    }[verb]
    app.command(verb, cls=VerbCommand, context_settings=_SETTINGS)(flat(function))
    return typer.main.get_command(app)


def _show_version(value: bool) -> None:
    if value:
        from ckpt_tool import __version__

        print(f"ckpt {__version__}")
        raise typer.Exit()


def _root() -> Any:
    app = typer.Typer(
        cls=VerbGroup, rich_markup_mode=None, context_settings=_SETTINGS, help=_ABOUT, subcommand_metavar="VERB ..."
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", "-V", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ) -> None:
        pass

    return typer.main.get_command(app)


def parse(arguments: Sequence[str]) -> Job | int:
    """The job that the command line asks for, or the exit code where typer has done all (help, completion).

    Raises UsageError.
    """
    ordered = _verb_first(list(arguments))
    verb = f"ckpt {ordered[0]}" if ordered and ordered[0] in VERBS else "ckpt"
    try:
        result = _root().main(ordered, prog_name="ckpt", standalone_mode=False)
    except SystemExit as end:  # completion ends so
        return int(end.code or 0)
    except UsageError as fault:
        if not fault.where():
            fault.place = verb
        raise
    except Exception as fault:
        if not hasattr(fault, "format_message"):  # typer's and click's own faults have it, in every version
            raise
        raise usage_error(fault, verb) from fault
    return result if result is not None else 0


def help_text() -> str:
    """The root's help, for a call without a verb."""
    root = _root()
    context = root.make_context("ckpt", [], resilient_parsing=True)
    return f"{root.get_help(context)}\n"


def _verb_first(arguments: list[str]) -> list[str]:
    """Reporting options from before the verb moved behind it: `--json inspect x` -> `inspect --json x`."""
    moved, rest = [], arguments
    while rest:
        name = rest[0].partition("=")[0]
        if rest[0] in _FLAGS_BEFORE or (name in _VALUED_BEFORE and "=" in rest[0]):
            taken = 1
        elif name in _VALUED_BEFORE:
            taken = 2
        else:
            break
        moved += rest[:taken]
        rest = rest[taken:]
    return [rest[0], *moved, *rest[1:]] if rest and rest[0] in VERBS else arguments


def unknown_verb(word: str) -> UsageError:
    """No such verb: a near miss, or the path of a checkpoint without a verb before it."""
    import os

    if os.path.exists(word):
        hint = f"say what to do with it: ckpt inspect {word}"
    else:
        hint = near_misses(word, VERBS) or f"the verbs are {', '.join(VERBS)}"
    return UsageError(f"{word!r} is no verb of ckpt", code="E0281", place="ckpt", hint=hint)


def usage_error(fault: Any, verb: str) -> UsageError:
    """typer's fault in our words, with near misses. verb: `ckpt convert`."""
    context = getattr(fault, "ctx", None)
    where = context.command_path if context is not None else verb
    lists = f"{where} --help lists what it takes"
    kind = type(fault).__name__
    if kind == "NoSuchOption":
        return UsageError(
            f"there is no option {fault.option_name}",
            code="E0284",
            place=where,
            hint=_near_option(fault.option_name, context) or lists,
        )
    if kind == "MissingParameter" and fault.param is not None:
        name = fault.param.metavar or fault.param.name.upper()
        usage = " ".join(context.command.collect_usage_pieces(context)) if context is not None else ""
        return UsageError(f"{name} is missing", code="E0282", place=where, hint=f"{where} {usage}".strip())
    message = fault.format_message().strip().rstrip(".")
    return UsageError(message[:1].lower() + message[1:], code="E0283", place=where, hint=lists)


def _near_option(name: str, context: Any) -> str:
    """What may have been meant: an option of this verb, or of another one."""
    known = [option for param in context.command.params for option in (*param.opts, *param.secondary_opts)]
    verb = context.command.name
    others = [other for other in VERBS if other != verb and name in _options_of(other)]
    if others:
        return f"{name} belongs to ckpt {', ckpt '.join(others)}"
    return near_misses(name, [option for option in known if option.startswith("--")])


def _options_of(verb: str) -> list[str]:
    return [option for param in build(verb).params for option in param.opts]
