"""What the fuzz tests share: how many examples, a limit of time and memory on each, and values that nobody expects."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

# The same examples every time; another number, other examples.
SEED = int(os.environ.get("MEGATUNE_FUZZ_SEED", "0"))
_SECONDS, _MIB = 20, 2048


class TookTooLongError(Exception):
    """An example is still busy when it should have been refused."""


def fuzz(values: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int) -> None:
    """Call `check` with many values, and fail with the smallest of them that fails."""
    print(f"{examples} examples of seed {SEED}: MEGATUNE_FUZZ_SEED chooses others")

    @seed(SEED)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(values)
    def example(value: Any) -> None:
        with limited():
            check(value)

    example()


@contextlib.contextmanager
def limited(seconds: int = _SECONDS, mib: int = _MIB) -> Iterator[None]:
    """End what takes longer than `seconds` of this process's own time, or more than `mib` beside what it has."""

    def ring(*_: object) -> None:
        raise TookTooLongError(f"still busy after {seconds} s")

    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, ring)
    resource.setrlimit(resource.RLIMIT_AS, (held + mib * 2**20, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and take them back."""
    before = dict(os.environ)
    try:
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e308, math.inf, math.nan]),
    st.floats(),
    st.integers(),
)
# Every plane, halves of surrogate pairs, controls, marks that turn writing round, and what looks like a path or a flag.
TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(codec=None, categories=["Cs", "Cc", "Cf", "Mn", "Zl", "Zp", "So"]), max_size=6),
    st.sampled_from(
        ["", " ", "\0", "..", "../..", "/", "~", "-1", "--x", "=", "null", "true", "1e-5", "０", "١", "名前", "𝒳",
         "\ufeff",
         "\ud800", "\u2028", "a" * 300, "9" * 5000, "${x}", "{{x}}", "<image>", "<|im_end|>", "%s", "\\", "'", '"']
    ),
)  # fmt: skip
# Whatever JSON can say, and the numbers beyond it that Python's reader takes.
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
