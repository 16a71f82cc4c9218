"""Values as users write them: YAML with its source text, its conversion to a setting's type, and its formatting."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from megatune.config.setting import SettingInfo
from megatune.errors import ExitCode, Finding, MegatuneError, closest

_MAX_DEPTH = 8  # an alias inside its own anchor nests infinitely

_NO_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # \udc80 to \udcff are bytes of a path that are no UTF-8
_MOST_SHOWN, _LONGEST_SHOWN, _LONGEST_NAME, _LONGEST_PATH, _MOST_DIGITS = 100, 1000, 255, 4095, 300
# Booleans of YAML and of other systems' command lines.
TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "t", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "f", "off", "0"), False),
}
_MOST_BYTES, _MOST_NESTED, _MOST_VALUES = 2**20, 64, 100_000


@dataclass(frozen=True, slots=True)
class Value:
    """One value.

    Attributes:
        data: the value that YAML reads.
        text: the source text of a scalar, None for a list or a mapping. `eval_strategy: no` is text for a setting of
            type text, though YAML reads false.
        items: the values of a list.
    """

    data: Any
    text: str | None = None
    items: tuple[Value, ...] = ()


def to_value(data: Any) -> Value:
    """Return data as a value, as if it had been written in a file."""
    if isinstance(data, list):
        return Value(data, items=tuple(map(to_value, data)))
    return Value(
        data, None if data is None or isinstance(data, dict) else data if isinstance(data, str) else shown(data)
    )


class TooLarge(yaml.MarkedYAMLError):
    """Text that cannot be a settings file: it is too long, nests too deeply, or expands too many aliases."""


class _Bounded(yaml.SafeLoader):
    """A loader that refuses deep nesting."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node."""
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise TooLarge(problem=f"nested deeper than {_MOST_NESTED}", problem_mark=self.peek_event().start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class Loader(_Bounded):
    """A loader that reads 1e-5 as a number, and dates and 1:30 as text."""


Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
for _tag, _pattern, _first in (
    (_NULL, r"~|null|Null|NULL|", [*"~nN", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", list("tTfFyYnNoO")),
    (_INT, r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


def read_text(path: Path) -> str:
    """Read a settings file, or a text file that a setting names.

    Raises:
        OSError, UnicodeDecodeError: as `Path.read_text`.
        TooLarge: it is longer than any settings file.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise TooLarge(problem=f"longer than {_MOST_BYTES >> 20} MiB")
    return content.decode("utf-8-sig")


def compose(text: str, loader: type[_Bounded] = Loader) -> yaml.Node | None:
    """Return the node of a YAML document, None for an empty one.

    Raises:
        yaml.YAMLError: the text is not one YAML document.
        TooLarge: it nests too deeply, or has too many values after its aliases are expanded.
    """
    reader = loader(text)
    try:
        node: yaml.Node | None = reader.get_single_node()
    finally:
        reader.dispose()
    if node is None:
        return None
    _Merge().into(node)
    if (count := _count(node, {})) > _MOST_VALUES:
        raise TooLarge(problem=f"{count:,} values after its aliases are expanded", problem_mark=node.start_mark)
    return node


def construct(text: str) -> Any:
    """Return a foreign document, such as the header of a model card, as YAML 1.1 reads it.

    Raises:
        yaml.YAMLError: as `compose`, or a value is invalid for its type, such as 2026-02-30.
    """
    node = compose(text, _Bounded)
    try:
        return None if node is None else yaml.SafeLoader("").construct_document(node)
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from error


class _Merge:
    """Merges the mappings of `<<: *ANCHOR` into theirs; keys of the mapping, or merged earlier, take precedence
    (yaml.org/type/merge.html)."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._pairs = 0

    def into(self, node: yaml.Node) -> None:
        """Merge below a node.

        Raises:
            TooLarge: there are too many values to merge.
        """
        if id(node) in self._seen or isinstance(node, yaml.ScalarNode):
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for each in node.value:
                self.into(each)
            return
        pairs, merged = [], []
        for key, value in node.value:
            self.into(key)
            self.into(value)
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            is_merge = isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None
            if is_merge and all(isinstance(each, yaml.MappingNode) for each in sources):
                self._pairs += sum(len(each.value) for each in sources)
                if self._pairs > _MOST_VALUES:
                    raise TooLarge(problem=f"over {_MOST_VALUES:,} values to merge", problem_mark=key.start_mark)
                merged += [pair for each in sources for pair in each.value]
            else:
                pairs.append((key, value))
        named = {key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)}
        for key, value in merged:
            if isinstance(key, yaml.ScalarNode) and key.value not in named:
                named.add(key.value)
                pairs.append((key, value))
        node.value = pairs


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a node, with its aliases expanded; `value_of` refuses an alias inside its own anchor."""
    if id(node) in known or isinstance(node, yaml.ScalarNode):
        return known.get(id(node), 1)
    known[id(node)] = 1
    inside = (part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,)))
    known[id(node)] = 1 + sum(_count(part, known) for part in inside)
    return known[id(node)]


def value_of(node: yaml.Node, depth: int = 0) -> Value:
    """Return the value of a node.

    Raises:
        yaml.YAMLError: a mapping has a key twice, an unknown tag, or too deep nesting.
    """
    if depth > _MAX_DEPTH:
        raise _refused("values are nested too deeply", node, "remove the alias inside its own anchor, or some levels")
    if isinstance(node, yaml.ScalarNode):
        return Value(_scalar(node), _text(node))
    if isinstance(node, yaml.SequenceNode):
        items = tuple(value_of(item, depth + 1) for item in node.value)
        return Value([item.data for item in items], items=items)
    assert isinstance(node, yaml.MappingNode)
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refused("a key must be text", key_node, "write `key: value`")
        if (key := _text(key_node)) in data:
            raise _refused(f"{key!r} is written twice", key_node, "keep one of the two")
        data[key] = value_of(value_node, depth + 1).data
    return Value(data)


def parse(text: str) -> Value:
    """Read text from a command line: as YAML if it is valid YAML, otherwise as plain text."""
    try:
        node = compose(text)
        value = Value(None, "") if node is None else value_of(node)
    except yaml.YAMLError:
        return Value(text, text)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:
        return value  # quoted: the quotes are not part of it
    return Value(value.data, text.strip(), value.items)


def has_undecoded_bytes(value: Any) -> bool:
    """Return whether a text, or one of a list, has bytes that are not UTF-8, as Python reads them from a command
    line."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and re.search("[\udc80-\udcff]", text) for text in texts)


def is_long_name(value: Any) -> bool:
    """Return whether a value, or an item of a list, is longer than file systems allow for a name or a path."""
    if isinstance(value, list | tuple):
        return any(map(is_long_name, value))
    if not isinstance(value, str):
        return False
    name = value.encode("utf-8", "surrogatepass")
    return len(name) > _LONGEST_PATH or max(map(len, name.split(b"/"))) > _LONGEST_NAME


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: "1 row", "1,200 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers, consecutive ones as a range: "0-15, 24"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}" for each in found)


def is_variable(name: str) -> bool:
    """Return whether an environment variable can have this name."""
    return bool(name) and "=" not in name


def import_object(path: str, what: str, where: str = "") -> Any:
    """Import an object by its path, "module:name" or "package.module.name", from the working directory or PYTHONPATH.

    Args:
        what, where: the kind of object, and the place of its path, for messages.

    Raises:
        MegatuneError: SETTINGS, if it cannot be imported.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if os.getcwd() not in sys.path:  # a console script does not have it
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        fix = "write it as package.module.name, with the package's folder as the working folder or in PYTHONPATH"
        raise MegatuneError(Finding(f"{what} {path!r}: {said}", where, fix=fix), ExitCode.SETTINGS) from error
    return found


def _refused(problem: str, node: yaml.Node, fix: str) -> yaml.MarkedYAMLError:
    """Return an error with its fix, as its note."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark, note=fix)


def _text(node: yaml.ScalarNode) -> str:
    """Return the text of a node; refuse characters that paths, variables or files cannot have."""
    if found := _NO_TEXT.search(node.value):
        raise _refused(f"{found[0]!r} is in a text", node, f"remove {found[0]!r}")
    return str(node.value)


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    match node.tag:
        case tag if tag == _STR:
            return text
        case tag if tag == _NULL:
            return None
        case tag if tag == _BOOL and text.lower() in TRUTH:
            return TRUTH[text.lower()]
        case tag if tag in (_INT, _FLOAT) and len(text) <= _MOST_DIGITS:
            try:
                return int(text) if tag == _INT else float(text.replace(".inf", "inf").replace(".nan", "nan"))
            except ValueError:
                pass  # a wrong explicit tag: !!int abc
    problem = f"cannot read {short(text)} as {node.tag.removeprefix('tag:yaml.org,2002:')}"
    raise _refused(problem, node, "write a shorter number, or quote it as text" if text.isdigit() else "remove the tag")


def coerce(value: Value, info: SettingInfo) -> Any:
    """Convert a value to the type of the setting if that is unambiguous; otherwise return it as it is, to be refused.

    null is the default of a setting that is not optional.
    """
    data = value.data
    if data is None:
        return None if info.optional else info.default
    if bool in info.kinds and isinstance(data, bool):
        return data
    if list in info.kinds and (isinstance(data, list) or str not in info.kinds):
        items = list(_texts(value))
        if info.items is str:
            return items
        # A word of a command-line list may have several items.
        parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
        return [_number(part, info.items) for part in parts]
    if dict in info.kinds and isinstance(data, str | dict):
        return parse(data).data if isinstance(data, str) else data  # quoted by shells: '{"min_lr": 1e-6}'
    if float in info.kinds and int not in info.kinds and type(data) is int and abs(data) < 2**1000:
        return float(data)
    if int in info.kinds and isinstance(data, float) and data.is_integer():
        return int(data)
    if str in info.kinds:
        return data if value.text is None else value.text
    return _unquoted(data) if isinstance(data, str) else data


def _number(item: Any, kind: type) -> Any:
    """Convert an item of a list of numbers, if it is a number."""
    data = _unquoted(item) if isinstance(item, str) else item
    return float(data) if kind is float and type(data) is int and abs(data) < 2**1000 else data


def _unquoted(text: str) -> Any:
    """Read a needlessly quoted value ("1e-5", "true") as if it were not quoted."""
    data = parse(text.strip()).data
    return data if isinstance(data, bool | int | float) else text


def _texts(value: Value) -> Iterator[Any]:
    """Yield list items as texts: "a,b" and [a, b] are the same."""
    if isinstance(value.data, list):
        yield from (item.data if item.text is None else item.text for item in value.items)
    elif value.text is not None:
        yield from (part for part in (piece.strip() for piece in value.text.split(",")) if part)
    else:
        yield value.data


def nearest_valid(value: Any, info: SettingInfo) -> Any:
    """Return the valid value nearest to an invalid one, or None if none is near."""
    if info.choices and isinstance(value, str):
        return closest(value.lower(), map(str, info.choices), cutoff=0.5)
    if not is_number(value) or not info.kinds & {int, float}:
        return None
    if numbers := [choice for choice in info.choices or () if isinstance(choice, int | float)]:
        return min(numbers, key=lambda choice: abs(choice - value))
    whole = int in info.kinds
    lowest, highest = info.bounds.get("ge"), info.bounds.get("le")
    if whole and "gt" in info.bounds:
        lowest = info.bounds["gt"] + 1
    if whole and "lt" in info.bounds:
        highest = info.bounds["lt"] - 1
    if lowest is not None and value < lowest:
        # A lower bound of 1 is a useful value; a learning rate of 0, or rows of 2 tokens, are not.
        return lowest if lowest == 1 or info.default is None else info.default
    if highest is not None and value > highest:
        return highest
    return round(value) if whole and value == value and abs(value) != float("inf") else None


def quoted(value: Any) -> str:
    """Format an unexpected value: text in quotes, anything else as YAML writes it."""
    if isinstance(value, str):
        return short(value)
    return text if len(text := shown(value)) < _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def short(text: str) -> str:
    """Quote an unexpected text, truncated if it is long."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def shown(value: Any, *, quoted: bool = False) -> str:
    """Format a value in one line of YAML.

    Args:
        quoted: quote text that YAML would read as another type, so that `parse` returns the same value.
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return f"[{', '.join(shown(item, quoted=quoted) for item in value)}]"
        case dict():
            pairs = (f"{shown(str(key), quoted=quoted)}: {shown(item, quoted=quoted)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case str() if quoted and not (re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and parse(value).data == value):
            return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).rstrip("\n")
        case str():
            return value or '""'
        case float() if quoted:
            return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    return str(value)
