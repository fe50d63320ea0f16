"""From a command line to a VerbJob by typer, for everything that `cli.plain` leaves to a full parser.

typer's commands are generated from the declarations in `cli.verbs`. Only the verb that was typed is built, and values
stay text: typer would load pydantic (70 ms, 15 MB) to find out that a str is a str. Help is plain text in sections, so
rich is not loaded for it either. Errors of typer become a UsageError with near misses, in the same three lines as every
other error.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt_tool.cli.repeated import refuse_two_values
from ckpt_tool.cli.verbs import VERBS, Argument, Verb, VerbJob
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.option_kinds.statement import OPTIONS, REPORTING, Option, options_of, ordered_headings

_ABOUT = """Read sharded training checkpoints of any format, convert and reshard them, and prove every value.
Nothing in a checkpoint is ever run."""
_CLOSING = """ckpt VERB -h shows a verb's everyday options, ckpt VERB --help all of them.
Exit codes: 0 done, 1 findings, 2 usage, 3 malformed input, 4 refused for safety,
5 output exists, 6 source changed, 7 I/O, 70 our bug, 130/143 interrupted."""
# Options that -h shows for every verb that has them, in addition to the verb's own (`Verb.everyday` adds more for one)
EVERYDAY = frozenset(("tp", "pp", "ep", "dp", "dtype", "drop", "remove_keys", "rename", "config", "dry_run", "json"))
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP_ABOUT = "Show the everyday options (-h) or all options (--help) and exit."
# Replaces hyphens while help is wrapped, since click breaks lines after a hyphen, also inside `--dry-run`
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class _AsText:
    """Replaces typer's run-time coercion: every value here is text, a list of texts, a flag or a count already."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """`value` unchanged; an empty tuple for a repeatable option or argument that was not given."""
        return () if value is None and (param.multiple or param.nargs == -1) else value


class VerbCommand(TyperCommand):
    """A verb whose help is in sections and whose values stay text."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters without coercion, --help with a text that explains the difference between -h and --help."""
        params = _as_text(super().get_params(ctx))
        for param in params:
            if "--help" in param.opts:
                param.help = _HELP_ABOUT
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after `ckpt VERB` in the usage line: [OPTIONS] and the arguments as they are declared."""
        return ["[OPTIONS]", *(str(param.metavar) for param in self.params if param.param_type_name == "argument")]

    is_short = False  # True if -h was typed: help then shows only the everyday options

    def get_help(self, ctx: Any) -> str:
        """The help text, with plain hyphens again (see `_HYPHEN`)."""
        return str(super().get_help(ctx)).replace(_HYPHEN, "-")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options under the headings of their sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            if self.is_short and not is_argument and not _is_everyday(param, VERBS[str(self.name)].everyday):
                continue
            title = "Arguments" if is_argument else _heading(param)
            sections.setdefault(title, []).append((_names(param), (param.help or "").replace("-", _HYPHEN)))

        for title in ("Arguments", *ordered_headings(sections.keys() - {"Arguments"})):
            if title in sections:
                with formatter.section(title):
                    formatter.write_dl(sections[title], col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples unwrapped, so that they can be copied, and in short help the way to the full help."""
        with formatter.section("Examples"):
            for example in VERBS[str(self.name)].examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
        if self.is_short:
            formatter.write_paragraph()
            formatter.write_text(f"All options: ckpt {self.name} --help")


def _as_text(params: list[Any]) -> list[Any]:
    """The parameters, changed in place so that typer leaves their values as text."""
    for param in params:
        if getattr(param, "_runtime_param", ...) is None:  # typer >= 0.29; elsewhere there is nothing to spare
            param._runtime_param = _AsText()
    return params


def _names(param: Any) -> str:
    """The left column of a parameter in the help: `-q, --quiet`, `--tp N`, `SRC`."""
    if param.param_type_name == "argument":
        return str(param.metavar)
    names = ", ".join(sorted(param.opts, key=len))
    names += "".join(f" / {name}" for name in param.secondary_opts)
    return f"{names} {param.metavar}" if param.metavar else names


def _heading(param: Any) -> str:
    return getattr(param, "rich_help_panel", None) or REPORTING.title


def _is_everyday(param: Any, of_verb: Sequence[str]) -> bool:
    """Does short help (-h) show it: a verb's own option, one of EVERYDAY, or one in `of_verb`?"""
    is_asked_for = param.name in EVERYDAY or param.name in of_verb or "--help" in param.opts
    return is_asked_for or _heading(param) == OPTIONS.title


class VerbGroup(TyperGroup):
    """The root command `ckpt`: knows the verbs by name and builds the typer command of one only on demand."""

    is_short = False

    def get_params(self, ctx: Any) -> Any:
        """The options of `ckpt` itself, without coercion."""
        return _as_text(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the verbs, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The typer command of one verb, None if there is no such verb."""
        return build(cmd_name, is_short=self.is_short) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click does, but with our error for an unknown verb."""
        if args[0] not in VERBS:
            raise unknown_verb(args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs from their summaries: click would build every command for it."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb.name, verb.summary) for verb in VERBS.values()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the closing lines: where more help is, and the exit codes."""
        formatter.write_paragraph()
        formatter.write_text(_CLOSING)


def build(name: str, *, is_short: bool = False) -> Any:
    """The typer command of one verb. is_short: its help lists only the everyday options."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=VerbCommand, context_settings=_SETTINGS)(_function(VERBS[name]))
    command = typer.main.get_command(app)
    command.is_short = is_short  # type: ignore[attr-defined]
    return command


def _function(verb: Verb) -> Callable[..., VerbJob]:
    """A verb as typer expects it: a function with the verb's name and a parameter for each argument and option.

    typer reads options from a function's signature and annotations, so these are generated from the declarations.
    """
    arguments = [_argument(f"argument_{number}", one) for number, one in enumerate(verb.arguments)]
    parameters = [*arguments, *map(_option, verb.options().values())]

    def call(**line: Any) -> VerbJob:
        return verb.job([line.pop(argument.name) for argument in arguments], line)

    call.__name__ = verb.name
    call.__doc__ = verb.about
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


_KINDS: dict[str, Any] = {
    "value": str | None,
    "values": list[str] | None,
    "pair": tuple[str, str] | None,
    "flag": bool,
    "switch": bool | None,
    "count": int,
}


def _parameter(name: str, kind: Any, about: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _argument(name: str, argument: Argument) -> inspect.Parameter:
    about = typer.Argument(metavar=argument.metavar, help=argument.help, show_default=False)
    default = "" if argument.kind == "optional" else inspect.Parameter.empty
    return _parameter(name, list[str] if argument.kind == "many" else str, about, default)


def _option(option: Option) -> inspect.Parameter:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in option.choices if choice.startswith(incomplete)]

    names = ("/".join(option.names),) if option.kind == "switch" else option.names
    about = typer.Option(
        *names,
        metavar=option.metavar or None,
        help=option.help,
        count=option.kind == "count",
        rich_help_panel=option.heading,
        show_default=False,
        autocompletion=complete if option.choices else None,
    )
    default = {"flag": False, "switch": option.default, "count": 0}.get(option.kind)
    return _parameter(option.keyword, _KINDS[option.kind], about, default)


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


def parse(arguments: Sequence[str]) -> VerbJob | int:
    """The job of a command line, or the exit code if typer has already answered it (--help, shell completion).

    Raises:
        UsageError: for an unknown verb or option, and for missing or superfluous arguments.
    """
    ordered = _verb_first(list(arguments))
    verb = f"ckpt {ordered[0]}" if ordered and ordered[0] in VERBS else "ckpt"
    try:
        if ordered and ordered[0] in VERBS and "_CKPT_COMPLETE" not in os.environ:
            refuse_two_values(ordered[1:], VERBS[ordered[0]].options(), verb)
        root = _root()
        root.is_short = "-h" in ordered
        result = root.main(ordered, prog_name="ckpt", standalone_mode=False)
    except SystemExit as end:  # shell completion ends this way, even with standalone_mode=False
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
    """The help of `ckpt` itself, which a call without a verb prints."""
    root = _root()
    context = root.make_context("ckpt", [], resilient_parsing=True)
    return f"{root.get_help(context)}\n"


def _verb_first(arguments: list[str]) -> list[str]:
    """The arguments with reporting options moved from before the verb to after it.

    `--json inspect x` becomes `inspect --json x`: these options belong to the verbs, and the root would refuse them.
    """
    if VERBS.keys().isdisjoint(arguments[1:]):
        return arguments
    from ckpt_tool.options.reading import Show

    options = {name: option for option in options_of(Show).values() for name in option.names}
    moved = []
    rest = arguments
    while rest:
        name, joined, _ = rest[0].partition("=")
        option = options.get(name if name.startswith("--") else name[:2])
        if option is None or (joined and not option.metavar):
            break
        taken = 2 if option.metavar and not joined else 1
        moved += rest[:taken]
        rest = rest[taken:]
    return [rest[0], *moved, *rest[1:]] if rest and rest[0] in VERBS else arguments


def unknown_verb(word: str) -> UsageError:
    """The error for an unknown verb. Its hint is a near miss, or `ckpt inspect PATH` for an existing path."""
    if os.path.exists(word):
        hint = f"say what to do with it: ckpt inspect {word}"
    else:
        from ckpt_tool.cli.typed_words import DELETING, VERBS_MEANT

        meant = VERBS_MEANT.get(word.lower().replace("_", "-"))
        near = near_misses(word, VERBS.keys() - DELETING if word not in DELETING else VERBS)
        hint = f"you may mean {meant}" if meant else near or f"the verbs are {', '.join(VERBS)}"
    return UsageError(f"{word!r} is no verb of ckpt", code="E0281", place="ckpt", hint=hint)


def usage_error(fault: Any, verb: str) -> UsageError:
    """An exception of typer or click as a UsageError with near misses. verb: such as `ckpt convert`."""
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
    if "extra argument" in message:
        lists = _hint_for_extra(where.rpartition(" ")[2]) or lists
    return UsageError(message[:1].lower() + message[1:], code="E0283", place=where, hint=lists)


def _hint_for_extra(verb: str) -> str:
    """The hint for one argument too many, "" if there is none for this verb."""
    if verb == "validate":
        return "it trains a model of its own; ckpt verify SRC checks a checkpoint"
    if verb in ("inspect", "verify", "audit"):
        return f"ckpt {verb} takes one checkpoint at a time; ckpt diff A B compares two"
    if verb in ("convert", "reshard"):
        return f"ckpt {verb} SRC DST takes one source; ckpt merge A B OUT puts several together"
    return ""


def _find_owners(name: str) -> list[str]:
    """The verbs that have an option of that name."""
    owners = []
    for verb in VERBS.values():
        if any(name in option.names for option in verb.options().values()):
            owners.append(verb.name)
    return owners


def _near_option(name: str, context: Any) -> str:
    """The hint for an unknown option: its name here, a near miss, or the verb that has it; "" if there is none."""
    from ckpt_tool.cli.typed_words import ARGUMENTS_MEANT, NEEDLESS, OF_VERB, OPTIONS_MEANT

    word = name.replace("_", "-")
    known = [option for param in context.command.params for option in (*param.opts, *param.secondary_opts)]
    if word in known:
        return f"it is spelled {word} here"
    sentence = OF_VERB.get((context.command.name, word)) or NEEDLESS.get(word)
    if sentence is not None:
        return sentence
    meant = OPTIONS_MEANT.get(word)
    if meant is not None:
        option = meant.split()[0]
        owners = _find_owners(option)
        return f"it is called {meant} here" if option in known else f"{meant} of ckpt {owners[0]} does that"
    arguments = [param.metavar for param in context.command.params if param.param_type_name == "argument"]
    if word in ARGUMENTS_MEANT and arguments:
        return f"paths are written without an option: {context.command_path} {' '.join(arguments)}"
    others = [verb for verb in _find_owners(name) if verb != context.command.name]
    if others:
        return f"{name} belongs to ckpt {', ckpt '.join(others)}"
    near = near_misses(name, [option for option in known if option.startswith("--")])
    return near_misses(name, ("--help",), cutoff=0.8) or near
