"""Rendering chat templates, which come with models, within limits of time and memory.

Jinja's sandbox keeps a template from Python's objects; it does not keep it from nested loops, or from texts as large as
the memory. So every loop, call, filter, comparison and value that is put together is counted as work, by its size, and
now and then the time of the thread is compared with the limit. The environment is that of Transformers in all that a
template can see.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from itertools import chain
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from megatune.data.bad_rows import RowError

MOST_SECONDS = 10.0  # of the thread's own time: a process that is stopped, or shares its cores, loses none
MOST_SIZE = 2**26  # characters and items of one value, and of what is rendered
MOST_SOURCE = 2**20  # characters of a template; the longest published ones have 20,000

_WORK = 512  # units between looks at the clock: a step is one, and so are these characters or items
_UNIT_SIZE = 2**13

TOO_LARGE = 2**62  # more than any limit
# Methods and filters that pad texts, which no conversation needs.
REFUSED_METHODS = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map", "to_bytes"))
REFUSED_FILTERS = ("center", "wordwrap", "batch", "slice")
_MOST_BITS = 2**14  # of a whole number: larger ones take hours to reckon with
_MOST_WIDTH = 1000  # of a place in "%10d" or "{:>10}", of an indentation, of digits
_WIDTH = re.compile(r"\d{4,}|\*|\{[^{}]*\{")  # the last two take the width from what fills the place

Chat = Sequence[Mapping[str, Any]]


class RenderLimitError(TemplateError):
    """A rendering that would take more time or memory than any conversation needs."""


class _Run(threading.local):
    """The rendering of this thread.

    Attributes:
        ends: when its time is over, on the thread's own clock; infinite until the first look at it, which takes as long
            as a third of a short rendering.
        pieces: what is written so far.
        spans: of what stands between {% generation %} and its end.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.ends = math.inf
        self.pieces: list[str] = []
        self.spans: list[tuple[int, int]] = []


_run = _Run()
_left = _WORK  # units of work before the next look at the clock, of all threads: a race only moves the look


def _step(value: Any = None, size: int = 0) -> Any:
    """Count a step that has made this value, of this size where it is not a text, and return it."""
    global _left
    _left -= 1 + (len(value) if type(value) is str else size) // _UNIT_SIZE
    if _left < 0:
        _left = _WORK
        now = time.thread_time()
        if now > _run.ends:
            raise RenderLimitError(f"it takes more than {MOST_SECONDS:g} seconds to render")
        _run.ends = min(_run.ends, now + MOST_SECONDS)
    return value


def _check(size: int) -> None:
    if size > MOST_SIZE:
        raise RenderLimitError(f"it makes a value of more than {MOST_SIZE:,} characters or items, or could")


def _made(value: Any) -> Any:
    """Return a value that the template put together, if it is no larger than allowed."""
    kind, size = type(value), 0
    if kind is str:
        _check(len(value))
    elif kind in (list, tuple, dict):
        _check(size := size_of(value, MOST_SIZE))
    return _step(value, 16 * size)  # a list is walked item by item


def _each(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what a loop runs over."""
    for value in values:
        _step()
        yield value


# How large what a template makes will be: of operators, methods and filters that make much of little.


def size_of(value: object, limit: int = TOO_LARGE) -> int:
    """Return the characters and items of a value, counted as often as they are written; stops beyond `limit`.

    A list can hold another one twice, which holds another one twice: few objects, and no end of them as text.
    """
    size, waiting = 0, [value]
    while waiting and size <= limit:
        one = waiting.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            waiting.extend(chain(one.keys(), one.values()))
        elif isinstance(one, list | tuple):
            waiting.extend(one)
        size += 1
    return size


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _number(bits: int) -> int:
    return 1 if bits <= _MOST_BITS else TOO_LARGE


def _times(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _number(_bits(left) + _bits(right))
    value, times = (right, left) if isinstance(left, int) else (left, right)
    return size_of(value) * max(times, 1) if isinstance(times, int) else 1


def _filled(text: Any, *given: Any, **named: Any) -> int:
    """Of a text with places, such as %s and {}, filled with what is given; or of the rest of a division."""
    if not isinstance(text, str):
        return _number(_bits(text))
    if any(not match.isdigit() or int(match[:9]) > _MOST_WIDTH for match in _WIDTH.findall(text)):
        return TOO_LARGE
    return len(text) + (text.count("{") + text.count("%")) * (_MOST_WIDTH + size_of([*given, *named.values()]))


OPERATORS: Mapping[str, Callable[[Any, Any], int]] = {
    "*": _times,
    "**": lambda left, right: _number(_bits(left) * max(right, 1) if isinstance(right, int) else 0),
    "%": _filled,
    "//": lambda left, right: _number(_bits(left)),
}


def _joined(glue: Any, items: Any = ()) -> int:
    count = len(items) if hasattr(items, "__len__") else 2**17  # an iterator has no more than a range
    return size_of(items) + size_of(glue) * count


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * len(new)


# By the name of the method; called with what it is a method of.
METHODS: Mapping[str, Callable[..., int]] = {"join": _joined, "replace": _replaced, "format": _filled}


def _narrow(_: Any, *widths: Any, **named: Any) -> int:
    """Of filters that are given the width of an indentation, or digits."""
    numbers = [width if isinstance(width, int) else size_of(width) for width in (*widths, *named.values())]
    return 1 if all(number <= _MOST_WIDTH for number in numbers) else TOO_LARGE


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return size_of(text) + str(text).count("\n") * (width if isinstance(width, int) else size_of(width))


# By the name of the filter; called with what is filtered.
FILTERS: Mapping[str, Callable[..., int]] = {
    "format": _filled,
    "replace": _replaced,
    "join": lambda items, glue="", *_, **__: _joined(glue, items),
    "indent": _indented,
    "tojson": _narrow,
    "round": _narrow,
    **dict.fromkeys(REFUSED_FILTERS, lambda *_, **__: TOO_LARGE),
}


class _Measured(NodeTransformer):
    """Makes a template measure what it puts together, where that can be put together again: x ~ x, of that y ~ y."""

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802 - Jinja's name, as below
        self.generic_visit(node)
        if not isinstance(node.node, nodes.Const):
            node.node = _filtered(node.node, "megatune_made")
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "megatune_each")
        return node

    def _visit_value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        is_constant = not any(map(node.find, (nodes.Name, nodes.Filter, nodes.Call)))
        return node if is_target or is_constant else _filtered(node, "megatune_made")

    visit_Add = visit_Concat = visit_Compare = visit_List = visit_Tuple = visit_Dict = _visit_value  # noqa: N815


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # not what is in it, which may be itself


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: notes where an answer is written."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text, start = caller(), sum(map(len, _run.pieces))
        _run.spans.append((start, start + len(text)))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of Transformers' chat templates, which measures what a template makes."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = _limited(FILTERS[name], function) if name in FILTERS else _counted(function)
        self.filters |= {"megatune_made": _made, "megatune_each": _each}
        self.globals |= {"namespace": _Namespace, "raise_exception": _refuse, "strftime_now": _now}
        del self.globals["lipsum"]
        self.concat = _concat  # type: ignore[method-assign]
        self._known: dict[tuple[type, str], bool] = {}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MOST_SOURCE:
            raise RenderLimitError(f"it has {len(source):,} characters, and at most {MOST_SOURCE:,} are read")
        tree: nodes.Template = _Measured().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item; at once where it can only be an item, as of messages."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item; a slice is a new value."""
        found = super().getitem(obj, argument)
        return _made(found) if isinstance(argument, slice) else found

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call a function, a method or a macro."""
        return _step(super().call(context, _step(function), *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        if key not in self._known:  # Jinja asks for nothing but the type, and takes long
            self._known[key] = attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)
        return self._known[key]

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        if type(value) is not BuiltinMethodType or (size := METHODS.get(value.__name__)) is None:
            return None
        return _limited(size, super().wrap_str_format(value) or value, value.__self__)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check(OPERATORS[operator](left, right))
        return _step(self.binop_table[operator](left, right))


_OF_DICTS = frozenset(dir(dict))


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON without HTML's escapes, which Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        return _step(function(*args, **kwargs))

    return counted


def _limited(size: Callable[..., int], function: Callable[..., Any], *owner: Any) -> Callable[..., Any]:
    """Return a filter, or a method of `owner`, that is called only where `size` of what it is given is allowed."""
    given = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context or an environment comes before the value

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check(size(*owner, *args[given:], **kwargs))
        return _step(function(*args, **kwargs))

    return limited


def _concat(pieces: Iterable[str]) -> str:
    """Join what a macro or a block writes."""
    pieces = list(pieces)
    _check(sum(map(len, pieces)))
    return "".join(pieces)


_environment = lru_cache(maxsize=1)(_Environment)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template


def render(source: str, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None, **given: Any) -> str:
    """Render a chat template as Transformers' apply_chat_template does.

    Args:
        given: what else the template may read, such as special tokens and add_generation_prompt.

    Raises:
        RenderLimitError: it takes too much time or memory.
        Exception: what the template raises; see `template_errors`.
    """
    return render_marked(source, chat, tools, **given)[0]


def render_marked(
    source: str, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None, **given: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat template, and return the spans between {% generation %} and its end, too."""
    _run.begin()
    options = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": False, **given}
    try:
        for piece in _compiled(source).generate(options):
            _run.pieces.append(piece)
        return _concat(_run.pieces), _run.spans
    except MemoryError:
        raise RenderLimitError("it takes more memory to render than there is") from None


def template_errors() -> tuple[type[Exception], ...]:
    """Return what rendering a chat template can raise: its own refusal, or a fault in it."""
    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def beyond_limits(error: RenderLimitError) -> RowError:
    """Return what to say of the row."""
    return RowError("template-limit", "the chat template cannot be rendered within its limits", str(error))
