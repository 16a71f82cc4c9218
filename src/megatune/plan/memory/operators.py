"""How bytes of operators add up: what a pass keeps, and what it holds at its fullest moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Operator(NamedTuple):
    """Bytes of an operator, or of a chain of them, for one micro-batch.

    Attributes:
        kept: of what is saved for its own backward pass, from its forward pass until then. A tensor that several
            operators save counts in the first of them, whose backward pass is the last.
        forward: beyond `kept` at the fullest moment of its forward pass: its output, where another operator saves it,
            and what is gone soon.
        backward: beyond `kept` at the fullest moment of its backward pass: gradients of its output, of its input and
            of its weight, and what is gone soon.
    """

    kept: int
    forward: int = 0
    backward: int = 0


def chain(operators: Iterable[Operator], hold: int = 0) -> Operator:
    """Operators one after the other: forward in this order, backward in the opposite one.

    At operator i either pass holds what operators 1 to i saved.

    Args:
        hold: bytes of the gradient that waits at the other end of a residual connection meanwhile.
    """
    kept = forward = backward = 0
    for operator in operators:
        kept += operator.kept
        forward = max(forward, kept + operator.forward)
        backward = max(backward, kept + operator.backward + hold)
    return Operator(kept, forward - kept, backward - kept)


def repeat(operator: Operator, times: int) -> Operator:
    """So many of one operator: the fullest moment is at the last of them."""
    return operator if times == 1 else operator._replace(kept=operator.kept * times)


def recomputed(operator: Operator, saved: int, output: int = 0) -> Operator:
    """The same, whose backward pass computes the forward pass again.

    Args:
        saved: bytes of the input, which is all that is kept.
        output: bytes of the output, which is made again, too, and held meanwhile.
    """
    # Its first operator saves the input, too: that is the same tensor.
    again = operator.kept - min(saved, operator.kept)
    return Operator(saved, operator.forward, again + max(operator.backward, operator.forward) + output)
