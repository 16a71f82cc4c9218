"""Connects a program and its test, which run in two processes: each sees objects of the other as `Remote`s, and values
as copies.

So a program can neither read its test nor the expected values, nor influence the verdict. A test that reads the source
of a function, or compares an object of the program with a plain value, does not work this way.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import json
import operator
import socket
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_SCALARS: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_MUTABLE = (list, dict, set, collections.deque)
_ITEMS: dict[str, Any] = {
    "deque": collections.deque,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": bytes,
}
_MAPPINGS: dict[str, Any] = {"Counter": collections.Counter, "OrderedDict": collections.OrderedDict, "dict": dict}
# name -> (type, to text, from text)
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "complex": (complex, str, complex),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: repr(value.total_seconds()),
        lambda text: datetime.timedelta(seconds=float(text)),
    ),
}
_BUILTIN: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__iter__": iter,
    "__contains__": operator.contains,
}


def _base(kind: type[BaseException]) -> str:
    """Return the name of the nearest built-in exception; one that would end the test's process becomes RuntimeError."""
    if not issubclass(kind, Exception):
        return "RuntimeError"
    return next(each.__name__ for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each)


def _error_type(name: str) -> type[Exception]:
    """Return the built-in exception of a name that a program has sent, RuntimeError for any other name."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _printed() -> dict[str, str]:
    """Return the output of a program since the last reply."""
    if not isinstance(sys.stdout, io.StringIO):
        return {}
    text = sys.stdout.getvalue()
    sys.stdout.seek(0)
    sys.stdout.truncate()
    return {"out": text}


def _write_back(mine: Any, changed: Any) -> None:
    """Copy the changes that a function made to an argument in place."""
    if isinstance(mine, list):
        mine[:] = changed
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(changed)
    elif isinstance(mine, collections.deque):
        mine.clear()
        mine.extend(changed)


class Remote:
    """A proxy of an object in the other process, where all operations are executed."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_remote", (peer, number))

    def __getattr__(self, name: str) -> Any:
        peer, number = self._remote
        return peer.ask("get", number, name)

    def __setattr__(self, name: str, value: object) -> None:
        peer, number = self._remote
        peer.ask("set", number, name, value)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        peer, number = self._remote
        return peer.ask("call", number, *args, **kwargs)

    def __eq__(self, other: object) -> Any:
        # An object whose __eq__ always returns True must not equal an expected value.
        return isinstance(other, Remote) and _operate(self, "__eq__", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(_operate(self, "__hash__"))

    def __instancecheck__(self, instance: object) -> bool:
        peer, number = self._remote
        return isinstance(instance, Remote) and bool(peer.ask("isinstance", number, instance))


def _operate(remote: Remote, name: str, *args: object) -> Any:
    peer, number = remote._remote
    return peer.ask("operate", number, name, *args)


_WORDS = """
    lt le gt ge len iter next getitem setitem delitem contains add radd sub rsub mul rmul truediv floordiv mod pow
    neg abs and or xor str repr bool int float index enter exit
"""
_OPERATORS = tuple(_WORDS.split())
for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", functools.partialmethod(_operate, f"__{_name}__"))
_ALLOWED = {f"__{name}__" for name in (*_OPERATORS, "eq", "hash")}


class Peer:
    """One end of the connection between a program and its test, with numbered objects and calls in both directions.

    Values are sent as JSON, so that decoding cannot execute code.

    Args:
        is_test: whether this is the end of the test. The program may only call objects that it was given, and read
            their public attributes.
    """

    def __init__(self, connection: socket.socket, *, is_test: bool) -> None:
        self._file, self._is_test = connection.makefile("rw", encoding="utf-8"), is_test
        self._objects: list[object] = []
        self._errors: dict[str, type[Exception]] = {}

    def ask(self, what: str, number: int, *args: Any, **kwargs: Any) -> Any:
        """Execute an operation on an object of the other end, and serve its requests meanwhile."""
        named = {name: self.encode(value) for name, value in kwargs.items()}
        self._send({"ask": what, "of": number, "args": [self.encode(each) for each in args], "named": named})
        while "ask" in (answer := self._receive()):
            self._serve(answer)
        if answer.get("out"):
            sys.stdout.write(answer["out"])
        if "error" in answer:
            raise self._error(*answer["error"])
        for mine, changed in zip(args, answer.get("args", ()), strict=False):
            _write_back(mine, self.decode(changed))
        return self.decode(answer["value"])

    def serve(self) -> None:
        """Serve requests of the other end until it closes the connection."""
        with suppress(EOFError):
            while True:
                self._serve(self._receive())

    def export(self, namespace: dict[str, Any]) -> None:
        """Send the public names of a program."""
        self._send({"value": self.encode({k: v for k, v in namespace.items() if not k.startswith("__")}), **_printed()})

    def fail(self, error: BaseException) -> None:
        """Send an exception instead of names or a value."""
        self._send({"error": self._described(error), **_printed()})

    def imported(self) -> dict[str, Any]:
        """Receive the names that `export` sends."""
        answer = self._receive()
        if "error" in answer:
            raise self._error(*answer["error"])
        found: dict[str, Any] = self.decode(answer["value"])
        return found

    def _serve(self, request: dict[str, Any]) -> None:
        args = [self.decode(each) for each in request["args"]]
        named = {name: self.decode(each) for name, each in request["named"].items()}
        try:
            value = self._done(request["ask"], request["of"], args, named)
            changed = [self.encode(each) if isinstance(each, _MUTABLE) else None for each in args]
            self._send({"value": self.encode(value), "args": changed, **_printed()})
        except BaseException as error:
            self.fail(error)

    def _done(self, what: str, number: int, args: list[Any], named: dict[str, Any]) -> Any:
        if what == "input":
            return input(*args)
        held: Any = self._objects[number]
        if what == "call":
            return held(*args, **named)
        if what == "await":
            import asyncio  # only if needed: it would take half of an interpreter's start-up time

            return asyncio.run(held)
        if what == "isinstance":
            return isinstance(args[0], held)
        name = str(args[0])
        if self._is_test and name not in _ALLOWED and (name.startswith("_") or what == "operate"):
            raise AttributeError(name)
        if what == "set":
            return setattr(held, name, args[1])
        if what == "operate" and name in ("__bool__", "__str__", "__repr__", "__contains__", "__iter__"):
            return _BUILTIN[name](held, *args[1:])
        if what == "get":
            return getattr(held, name)
        if (method := getattr(type(held), name, None)) is None:
            raise TypeError(f"{type(held).__name__} has no {name}")  # as Python's operators do
        return method(held, *args[1:])

    def encode(self, value: Any) -> Any:
        """Return a value in JSON form by its built-in type, or the number of an object."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Remote):
            return {"yours": value._remote[1]}
        if isinstance(value, type):
            return self._type(value)
        if type(value) in (int, float, str):
            return value
        for kind, plain in _SCALARS.items():
            if isinstance(value, kind) and not isinstance(value, enum.Enum):
                return plain(value)  # a subclass defined by the program
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": [type(value).__name__, list(value._fields), [self.encode(each) for each in value]]}
        for name, base in _ITEMS.items():
            if isinstance(value, base):
                return {name: [self.encode(each) for each in base.__iter__(value)]}
        for name, base in _MAPPINGS.items():
            if isinstance(value, base):
                return {name: [[self.encode(key), self.encode(each)] for key, each in base.items(value)]}
        for name, (base, write, _) in _TEXTS.items():
            if isinstance(value, base):
                return {name: write(value)}
        self._objects.append(value)
        return {"coroutine" if isinstance(value, types.CoroutineType) else "mine": len(self._objects) - 1}

    def _type(self, value: type) -> Any:
        if getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        if issubclass(value, Exception) and not self._is_test:
            return {"exception": [value.__name__, _base(value)]}
        self._objects.append(value)
        return {"mine": len(self._objects) - 1}

    def decode(self, value: Any) -> Any:
        """Return the value that was encoded, or a `Remote`."""
        if not isinstance(value, dict):
            return value
        ((name, content),) = value.items()
        if name in _ITEMS:
            return _ITEMS[name](map(self.decode, content))
        if name in _MAPPINGS:
            return _MAPPINGS[name]({self.decode(key): self.decode(each) for key, each in content})
        if name in _TEXTS:
            return _TEXTS[name][2](content)
        if name == "named":
            return collections.namedtuple(content[0], content[1])(*map(self.decode, content[2]))
        if name == "builtin":
            return getattr(builtins, content) if isinstance(getattr(builtins, content, None), type) else None
        if name == "exception":
            return self._errors.setdefault(content[0], type(content[0], (_error_type(content[1]),), {}))
        if name == "coroutine":
            return self._awaited(content)
        return self._objects[content] if name == "yours" else Remote(self, content)

    async def _awaited(self, number: int) -> Any:
        return self.ask("await", number)

    def _described(self, error: BaseException) -> list[Any]:
        with suppress(Exception):
            return [type(error).__name__, _base(type(error)), [self.encode(each) for each in error.args]]
        return [type(error).__name__, "Exception", [str(error)]]

    def _error(self, name: str, base: str, args: list[Any]) -> BaseException:
        kind, given = self._errors.get(name) or _error_type(base), [self.decode(each) for each in args]
        try:
            return kind(*given)
        except Exception:
            return RuntimeError(*given)

    def _send(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def _receive(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise EOFError("the program ended before its tests did")
        message: dict[str, Any] = json.loads(line)
        return message
