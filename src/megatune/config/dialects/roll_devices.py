"""Device mappings as ROLL's users write them, in Python: read, never run."""

from __future__ import annotations

import ast
from typing import Any

_MOST = 1_000_000  # devices


def read_devices(data: Any) -> tuple[int, ...]:
    """Return the numbers of `[6, 7]`, `list(range(0,8))`, or a sum of such, as a list or as text.

    Raises:
        ValueError: it is something else; the message says what is expected.
    """
    if isinstance(data, int) and not isinstance(data, bool):
        data = [data]
    try:
        found = [*data] if isinstance(data, list) else _listed(ast.parse(str(data).strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("a list of whole numbers, such as list(range(0,8)) or [6, 7]") from None
    if not all(type(each) is int for each in found):
        raise ValueError("a list of whole numbers, such as list(range(0,8)) or [6, 7]")
    if any(each < 0 for each in found):
        raise ValueError("numbers of devices, from 0")
    if len(set(found)) != len(found):
        raise ValueError("each device once")
    return tuple(found)


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_number(part) for part in parts]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _listed(inner)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 1 <= len(args) <= 3:
            numbers = range(*(_number(arg) for arg in args))
            if len(numbers) <= _MOST:
                return list(numbers)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_listed(left), *_listed(right)]
    raise ValueError("a list of whole numbers, such as list(range(0,8)) or [6, 7]")


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() as op, right=right):
            a, b = _number(left), _number(right)
            if isinstance(op, ast.FloorDiv):
                if b == 0:
                    raise ValueError("whole numbers; a division by 0 is none")
                return a // b
            return a + b if isinstance(op, ast.Add) else a - b if isinstance(op, ast.Sub) else a * b
    raise ValueError("a list of whole numbers, such as list(range(0,8)) or [6, 7]")
