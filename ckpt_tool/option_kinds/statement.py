"""Options, each declared once: as a field of the dataclass that carries its value to the command.

    @dataclass(frozen=True, slots=True)
    class Reading:
        lenient: bool = READING.flag("Warn where a strict reader refuses and no value depends on it.")
        prefer: str | None = READING.option("Which of two sets of files in one folder.", text, "WHICH")

All else follows from the field: the option of the command line, its line in the help and its completion (`cli`), the
keyword of the Python functions and its type (`api`), its value and the message that names it when it is bad
(`values_of`).

    >>> values_of({"lenient": True, "prefer": None}, Reading)
    [Reading(lenient=True, prefer=None)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, Literal, NamedTuple, TypeVar, cast

from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.option_kinds.values import BadValue, one_of

Kind = Literal["value", "values", "pair", "flag", "switch", "count"]
G = TypeVar("G")


class Option(NamedTuple):
    """An option of the command line, which is a keyword of the Python functions too."""

    section: Section
    help: str
    parse: Callable[[Any], Any]  # the value of a text, or of a value given in Python; raises BadValue
    metavar: str = ""  # what the help calls the value
    # `values` may be repeated, a `pair` takes two words, a `switch` is on, off (its last name) or left alone, a `count`
    # counts how often it is given
    kind: Kind = "value"
    keyword: str = ""  # "": the name of the field
    names: tuple[str, ...] = ()  # spellings on the command line; (): `--` and the keyword
    default: bool | None = False  # of a flag or a switch
    choices: tuple[str, ...] = ()
    # The field of the group that receives the value: as it is; with `entry` under the option's keyword in a mapping;
    # with `constant` that constant, if the option is given.
    field: str = ""
    entry: bool = False
    constant: str | None = None
    system: str = ""  # the only system that it is for, which is its heading in the help
    by_format: bool = False  # only some formats can use it (`formats.base.Holds.uses_options`)
    renames: bool = False  # it changes names or structure, which some verbs keep

    def of(self, name: str) -> Option:
        """The option with the keyword and the spelling that follow from the field's name, unless they are given."""
        keyword = self.keyword or name
        names = self.names or ("--" + keyword.rstrip("_").replace("_", "-"),)
        if self.kind == "switch":
            names += (f"--no-{names[0][2:]}",)
        return self._replace(field=name, keyword=keyword, names=names)

    @property
    def heading(self) -> str:
        """The heading in the help under which the option is listed."""
        return self.system or self.section.title

    def usage(self) -> str:
        """The hint for a bad value: `--tp N: Write for N tensor parallel ranks: --tp 8.`"""
        return f"{self.names[0]} {self.metavar}".strip() + f": {self.help}"

    def accepts(self) -> str:
        """The Python type of the keyword, in words, from the annotation of the parser."""
        known = getattr(self.parse, "__annotations__", {"value": "bool"})["value"]
        return known if self.kind == "flag" else f"{known} | None"

    def fill(self, values: dict[str, Any], found: Any) -> None:
        """Put a parsed value into the fields of its group. Raises BadValue if another option gave a different value."""
        if self.entry:
            values.setdefault(self.field, {})[self.keyword] = found
        elif self.constant is None:
            values[self.field] = found
        elif found:
            if values.setdefault(self.field, self.constant) != self.constant:
                other = "--" + self.field.replace("_", "-")
                raise BadValue(
                    f"{self.names[0]} means {other} {self.constant}, but {other} is {values[self.field]}",
                    hint="give one of the two",
                )


class Section(NamedTuple):
    """A heading of the help. Its methods declare options under it: each returns what a field is set to.

    part: distinguishes two that share a heading. keyword, names: if they are not the field's own.
    """

    title: str
    part: str = ""

    def option(
        self,
        help: str,
        parse: Callable[[Any], Any],
        metavar: str,
        *,
        default: Any = None,
        kind: Kind = "value",
        keyword: str = "",
        names: tuple[str, ...] = (),
        choices: Iterable[str] = (),
        also: tuple[Option, ...] = (),
        system: str = "",
        by_format: bool = False,
        renames: bool = False,
    ) -> Any:
        """An option with a value; of kind `values` it may be repeated. also: further options that fill the field."""
        stated = Option(
            self,
            help,
            parse,
            metavar,
            kind,
            keyword,
            names,
            choices=tuple(choices),
            system=system,
            by_format=by_format,
            renames=renames,
        )
        return _field(default, stated, *also)

    def choice(
        self,
        help: str,
        choices: Sequence[str],
        metavar: str = "",
        *,
        meant: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Any:
        """An option whose value is one of `choices`. meant: other word -> the choice that the hint then names."""
        return self.option(help, one_of(choices, meant), metavar or "|".join(choices), choices=choices, **more)

    def flag(self, help: str, *, names: tuple[str, ...] = ()) -> Any:
        """An option without a value."""
        return _field(False, Option(self, help, bool, kind="flag", names=names))

    def switch(self, help: str, *, default: bool | None) -> Any:
        """A pair of flags, `--name` and `--no-name`; without either the value is `default`."""
        return _field(default, Option(self, help, bool, kind="switch", default=default))

    def counter(self, help: str, *, names: tuple[str, ...]) -> Any:
        """An option whose value is the number of times it is given, such as `-vv`."""
        return _field(0, Option(self, help, int, kind="count", names=names))

    def each(self, helps: Mapping[str, str], parse: Callable[[Any], Any], metavar: str) -> Any:
        """An option for each keyword; the field maps the keywords that were given to their values."""
        rows = (Option(self, help, parse, metavar, keyword=name, entry=True) for name, help in helps.items())
        return _field({}, *rows)

    def means(self, keyword: str, constant: str, help: str) -> Option:
        """A flag that is short for one value of another option: for `also` of that one."""
        return Option(self, help, bool, kind="flag", keyword=keyword, constant=constant)


# Sections in the order of the help. Two with the same title share a heading.
OPTIONS = Section("Options")  # options of a single verb
TO = Section("Options", "to")
LAYOUT = Section("Layout")
TRAVEL = Section("What is written")
KEYS = Section("Keys")
READING = Section("Reading")
RUN = Section("Writing")
PLAN = Section("Writing", "plan")
REPORTING = Section("Reporting")
SECTIONS = (OPTIONS, TO, LAYOUT, TRAVEL, KEYS, READING, RUN, PLAN, REPORTING)


def ordered_headings(headings: Iterable[str]) -> list[str]:
    """Headings in the order of the help: the sections, then the systems by name."""
    present = set(headings)
    titles = dict.fromkeys(section.title for section in SECTIONS)
    sections = [title for title in titles if title in present]
    return [*sections, *sorted(present.difference(sections))]


def carried(groups: Callable[[], tuple[type, ...]]) -> Any:
    """A field that holds a value of each of some other groups. Their options are added to those of the field's group.

    groups: called whenever the groups are needed, so that they can be imported late.
    """
    return field(
        default_factory=lambda: tuple(group() for group in groups()), metadata={"options": (), "groups": groups}
    )


def groups_within(group: Any) -> tuple[type, ...]:
    """The group itself and those that its fields carry, whose options belong to it too."""
    inside = [inner for each in fields(group) if "groups" in each.metadata for inner in each.metadata["groups"]()]
    return (group, *inside)


def _field(default: Any, *options: Option) -> Any:
    """A dataclass field with the options that fill it in its metadata."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"options": options})
    return field(default=default, metadata={"options": options})


def options_of(*groups: type) -> dict[str, Option]:
    """The options of some groups by keyword. If two groups have the same keyword, the later one wins."""
    return {option.keyword: option for group in groups for option in _of_group(group)}


def _of_group(group: Any) -> Iterable[Option]:
    """The options of a group, and those of the groups that it carries."""
    return (option for inner in groups_within(group) for option in own_options(inner))


def own_options(group: Any) -> Iterable[Option]:
    """The options of a group's own fields."""
    return (option.of(each.name) for each in fields(group) for option in each.metadata["options"])


def options_given(value: Any) -> Iterable[tuple[str, Option]]:
    """(field, its option) for each field that differs from its default, in a value and those that it carries."""
    for each in fields(value):
        found = getattr(value, each.name)
        if "groups" in each.metadata:
            for inner in found:
                yield from options_given(inner)
            continue
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        stated = each.metadata["options"]
        if stated and found != default:
            yield each.name, stated[0].of(each.name)


def words_of(value: Any, section: Section) -> list[str]:
    """The words of a command line that would give a group's value its present fields, for the options of one section.
    Fields with their defaults are left out."""
    words: list[str] = []
    for each in fields(value):
        found = getattr(value, each.name)
        if "groups" in each.metadata:
            words += [word for inner in found for word in words_of(inner, section)]
        for option in (option.of(each.name) for option in each.metadata["options"] if option.section is section):
            if found == each.default:
                continue
            if option.kind in ("flag", "switch"):
                words.append(option.names[0 if found else -1])
            else:
                parts = [part for part in found if part] if isinstance(found, tuple) else [found]  # 0: not given
                words += [option.names[0], ",".join(map(str, parts))]
    return words


def words_given(given: Mapping[str, Any], options: Mapping[str, Option]) -> list[str]:
    """The words of a command line for values given by keyword; keywords that are not among `options` are left out."""
    words: list[str] = []
    for keyword, value in given.items():
        option = options.get(keyword)
        if option is None or value is None or (option.kind in ("flag", "values", "pair", "count") and not value):
            continue
        if option.kind in ("flag", "switch"):
            words += [option.names[0 if value else -1]] if value != option.default else []
        elif option.kind == "count":
            words += [option.names[0]] * int(value)
        else:
            many = option.kind == "values" and isinstance(value, list | tuple)
            for each in value if many else [value]:
                words += [option.names[0], *(map(str, each) if option.kind == "pair" else [str(each)])]
    return words


def values_of(given: Mapping[str, Any], *groups: type[G]) -> list[G]:
    """A value of each group from keywords; a keyword that is missing or None leaves the default.

    Raises one UsageError (E0280) with every fault: unknown keywords, bad values, options that contradict each other.
    """
    # The option of each keyword, and the group whose value it is part of.
    owners: dict[str, tuple[Option, type]] = {
        option.keyword: (option, inner)
        for group in groups
        for inner in groups_within(group)
        for option in own_options(inner)
    }

    faults = [
        BadValue(
            f"unknown option {name!r}",
            hint=near_misses(name, owners) or f"the options are {', '.join(owners)}",
        )
        for name in given
        if name not in owners
    ]
    values: dict[type, dict[str, Any]] = {inner: {} for group in groups for inner in groups_within(group)}

    for keyword, (option, owner) in owners.items():
        if given.get(keyword) is None:
            continue
        try:
            found = option.parse(given[keyword])
        except BadValue as fault:
            faults.append(BadValue(f"{option.names[0]}: {fault}", hint=fault.hint or option.usage(), path=fault.path))
            continue
        try:
            option.fill(values[owner], found)
        except BadValue as fault:
            faults.append(fault)

    if faults:
        first, *others = faults
        lines = [f"{fault} ({fault.hint})" if fault.hint else str(fault) for fault in others]
        raise UsageError(str(first), code="E0280", path=first.path, hint=first.hint, faults=lines)

    return [_value(group, values) for group in groups]


def _value(group: type[G], values: Mapping[type, Mapping[str, Any]]) -> G:
    """A value of a group, with one of each group that it carries."""
    carried: dict[str, Any] = {}
    for group_field in fields(cast(Any, group)):
        if "groups" in group_field.metadata:
            inner_groups = group_field.metadata["groups"]()
            carried[group_field.name] = tuple(inner(**values[inner]) for inner in inner_groups)
    return group(**values[group], **carried)


def value_of(given: Mapping[str, Any], group: type[G]) -> G:
    """The value of one group from keywords. Raises UsageError as `values_of`."""
    return values_of(given, group)[0]
