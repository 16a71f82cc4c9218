"""Rendering chat templates, which come with models, within limits of time and memory.

Transformers' sandbox keeps a template from Python's objects; it does not keep it from nested loops, or from texts as
large as the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from megatune.data.bad_rows import RowError
from megatune.data.templates import watch
from megatune.data.templates.sizes import FILTERS, METHODS, OPERATORS, REFUSED_METHODS, size_of

MOST_SIZE = 2**26  # characters and items of one value, and of what is rendered
MOST_SOURCE = 2**20  # characters of a template; the longest published ones have 20,000

Chat = Sequence[Mapping[str, Any]]


class RenderLimitError(TemplateError):
    """A rendering that would take more time or memory than any conversation needs."""


def _check(size: int) -> None:
    if size > MOST_SIZE:
        raise RenderLimitError(f"it makes a value of more than {MOST_SIZE:,} characters or items, or could")


def _made(value: Any) -> Any:
    """Return a value that the template put together, if it is no larger than allowed."""
    kind = type(value)
    if kind is str:
        _check(len(value))
    elif kind in (list, tuple, dict):
        _check(size_of(value, MOST_SIZE))
    return value


class _Measured(NodeTransformer):
    """Makes a template measure what it puts together, where that can be put together again: x ~ x, of that y ~ y."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802 - Jinja's name, as below
        """Leave sums that are written at once, and measured then."""
        for index, child in enumerate(node.nodes):
            if isinstance(child, nodes.Add) and _is_text(child):
                while isinstance(child, nodes.Add):
                    child.right = self.visit(child.right)
                    if not isinstance(child.left, nodes.Add):
                        child.left = self.visit(child.left)
                    child = child.left
            else:
                node.nodes[index] = self.visit(child)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.node, nodes.Const):
            node.node = _measured(node.node)
        return node

    def _visit_value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        is_constant = not any(map(node.find, (nodes.Name, nodes.Filter, nodes.Call)))
        return node if is_target or is_constant else _measured(node)

    visit_Add = visit_Concat = visit_List = visit_Tuple = visit_Dict = _visit_value  # noqa: N815


def _is_text(node: nodes.Node) -> bool:
    """Tell whether a sum can only be a text, and no list that holds another."""
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, nodes.Concat) or (isinstance(node, nodes.Const) and isinstance(node.value, str))


def _measured(node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, "megatune_made", [], [], None, None, lineno=node.lineno)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # not what is in it, which may be itself


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Measures what a template makes. Transformers' own environment is made one of these."""

    intercepted_binops = frozenset(OPERATORS)

    def limit(self) -> None:
        """Replace what is not a method of this class."""
        for name, size in FILTERS.items():
            self.filters[name] = _limited(size, self.filters[name])
        self.filters["megatune_made"] = _made
        self.globals["namespace"] = _Namespace
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
        return self.binop_table[operator](left, right)


_OF_DICTS = frozenset(dir(dict))


def _limited(size: Callable[..., int], function: Callable[..., Any], *owner: Any) -> Callable[..., Any]:
    """Return a filter, or a method of `owner`, that is called only where `size` of what it is given is allowed."""
    given = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context or an environment comes before the value

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check(size(*owner, *args[given:], **kwargs))
        return function(*args, **kwargs)

    return limited


def _concat(pieces: Iterable[str]) -> str:
    """Join what a macro or a block writes."""
    pieces = list(pieces)
    _check(sum(map(len, pieces)))
    return "".join(pieces)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # A new environment with Transformers' filters, globals and {% generation %}, not the one that it keeps.
    environment: Any = _compile_jinja_template.__wrapped__("").environment
    environment.__class__ = _LimitedEnvironment
    environment.limit()
    template: Template = environment.from_string(source)
    return template


def render(source: str, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None, **given: Any) -> str:
    """Render a chat template as Transformers' apply_chat_template does.

    Args:
        given: what else the template may read, such as special tokens and add_generation_prompt.

    Raises:
        RenderLimitError: it takes too much time or memory.
        Exception: what the template raises; see `template_errors`.
    """
    return _rendered(None, source, chat, tools, given)[0]


def render_marked(
    source: str, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None, **given: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat template, and return the spans between {% generation %} and its end, too."""
    return _rendered([], source, chat, tools, given)


def _rendered(
    spans: list[tuple[int, int]] | None, source: str, chat: Chat, tools: Any, given: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    options = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": False, **given}

    def write() -> str:
        template = _compiled(source)
        if spans is None:
            return template.render(options)
        pieces: list[str] = []  # what notes the spans reads it as it grows
        with template.environment.activate_tracker(pieces, spans):  # type: ignore[attr-defined]
            pieces.extend(template.generate(options))
        return _concat(pieces)

    try:
        return watch.within_time(write), spans or []
    except watch.OvertimeError:
        raise RenderLimitError(f"it takes more than {watch.MOST_SECONDS:g} seconds to render") from None
    except MemoryError:
        raise RenderLimitError("it takes more memory to render than there is") from None


def template_errors() -> tuple[type[Exception], ...]:
    """Return what rendering a chat template can raise: its own refusal, or a fault in it."""
    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def beyond_limits(error: RenderLimitError) -> RowError:
    """Return what to say of the row."""
    return RowError("template-limit", "the chat template cannot be rendered within its limits", str(error))
