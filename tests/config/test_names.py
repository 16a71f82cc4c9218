"""Names of settings in messages, and what settings declare that they need."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_rules import BASE, QWEN

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.dialects.swift import dialect_of
from megatune.config.load import load
from megatune.config.setting import EXPERTS, Needs, SettingInfo
from megatune.config.settings import all_settings, plain, setting_paths
from megatune.config.values import shown
from megatune.errors import MegatuneError
from megatune.families import as_trained

INFOS = all_settings()
NEEDS = [(info, need) for info in INFOS.values() for need in info.needs]


def test_model_types_have_their_article():
    with pytest.raises(MegatuneError, match="mtp_num_layers 1 with an olmo2"):
        as_trained(replace(QWEN, model_type="olmo2"), "config.json", "sft", mtp_num_layers=1)


def test_names_are_written_by_who_prints():
    text = "write `max_steps: 5` or remove `stage`, `recompute_granularity 1`; `megatune plan` and `x` stay"
    assert plain(text) == "write max_steps: 5 or remove stage, recompute_granularity 1; `megatune plan` and `x` stay"
    assert dialect_of(3).translate(text).startswith("write --train_iters 5 or remove --rlhf_type, ")
    assert LLAMAFACTORY.translate(text) == plain(text)


def chain(need: Needs | None) -> Iterator[Needs]:
    while need is not None:
        yield need
        need = need.otherwise


@pytest.mark.parametrize(("info", "need"), NEEDS, ids=lambda each: getattr(each, "path", ""))
def test_what_is_needed_is_there(info: SettingInfo, need: Needs) -> None:
    for each in chain(need):
        if each.path != EXPERTS:
            choices = INFOS[each.path].choices
            assert not choices or {*each.values} <= {*choices, None}, each
    assert not info.choices or {*need.of} <= {*info.choices}
    for named in re.findall(r"`(\w+)", need.why + need.fix.format(name=info.name)):
        assert named in setting_paths()


def values(info: SettingInfo) -> list[Any]:
    """Values that people write, and some that go too far."""
    numbers = [0, 1, 2, 3] if info.kinds & {int, float} else []
    texts = ["x"] if str in info.kinds and not info.choices else []
    found = [*info.choices, *([True, False] if bool in info.kinds else []), *numbers, *texts]
    return [[each] for each in found or ["a"]] if list in info.kinds else found or [info.default]


WORDS = [f"{info.name}={shown(value, quoted=True)}" for info in INFOS.values() for value in values(info)]


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=8),
    st.sampled_from([LLAMAFACTORY, dialect_of(3), dialect_of(4)]),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_no_mark_of_a_name_reaches_a_user(written, dialect):
    for finding in load(overrides=[*BASE, *written], dialect=dialect).check(QWEN, 8):
        assert not {*re.findall(r"`(\w+)", str(finding))} & setting_paths().keys(), finding
