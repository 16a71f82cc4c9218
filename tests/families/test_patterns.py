"""Regular expressions of users match as Python's, and end."""

from __future__ import annotations

import re

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.families.selection import is_whole_match

MODULE = "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", r".*q_proj", r"model\.layers\.(\d|1\d)\..*_proj", r"(.*\.)?(self_attn\.q_proj)", r".*\.[qkv]_proj", ""],
)
def test_as_python(pattern: str) -> None:
    assert is_whole_match(pattern, MODULE) == (re.fullmatch(pattern, MODULE) is not None)


def test_one_that_does_not_end() -> None:
    with pytest.raises(MegatuneError, match=r"does not finish on 'model.layers.10") as refused:
        is_whole_match(r"((\w|[a-z]|.)*)*0", MODULE)
    assert refused.value.exit_code == ExitCode.SETTINGS
