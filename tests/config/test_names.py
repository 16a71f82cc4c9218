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
from megatune.config.rules import RULES
from megatune.config.rules.rule import Context
from megatune.config.setting import EXPERTS, Needs, SettingInfo
from megatune.config.settings import all_settings, setting_paths
from megatune.config.values import shown
from megatune.errors import MegatuneError
from megatune.families import as_trained
from megatune.references import ref, remove, spell, write

INFOS = all_settings()
NEEDS = [(info, need) for info in INFOS.values() for need in info.needs]


def test_model_types_have_their_article():
    with pytest.raises(MegatuneError, match="mtp_num_layers 1 with an olmo2"):
        as_trained(replace(QWEN, model_type="olmo2"), "config.json", "sft", mtp_num_layers=1)


def test_names_are_written_by_who_prints():
    text = (
        f"{write('max_steps', 5)} or {remove('stage')}, {ref('recompute_granularity', 1)}; `stage` and max_steps stay"
    )
    assert spell(text) == "write max_steps: 5 or remove stage, recompute_granularity 1; `stage` and max_steps stay"
    assert dialect_of(3).translate(text) == (
        "write --train_iters 5 or remove --rlhf_type, --recompute_granularity 1; `stage` and max_steps stay"
    )
    assert LLAMAFACTORY.translate(text) == spell(text)
    alternatives = write("truncation_strategy", "drop", "left", "right")
    assert dialect_of(4).translate(alternatives) == "write --truncation_strategy delete, left or right"


def test_texts_of_users_are_not_names():
    loaded = load(overrides=[*BASE, "output_dir=a`stage`b max_steps", "model_name_or_path=a`stage`b max_steps"])
    (finding,) = loaded.check()
    assert finding.what == "output_dir is model_name_or_path, 'a`stage`b max_steps'"


def test_every_reference_is_a_setting():
    """Texts of settings are formatted with their own names; those of rules fail where they are spelled."""
    for info, need in NEEDS:
        for text in (need.why, need.fix):
            spell(text.format(name=info.name), lambda found: setting_paths()[found.name])


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
def test_rules_name_settings_by_references_only(written, dialect):
    """A setting that a text names in plain words has our name in every dialect."""
    loaded = load(overrides=[*BASE, *written], dialect=dialect).for_world(8)
    for problem in (problem for rule in RULES for problem in rule(Context(loaded.settings, QWEN, 8, loaded.written))):
        for text in (problem.what, problem.why, problem.fix):
            plain = spell(text, lambda found: "")
            assert not {word for word in re.findall(r"\w+", plain) if "_" in word} & setting_paths().keys(), plain
    for finding in loaded.check(QWEN, 8):
        assert "\0" not in finding.what + finding.why + finding.fix
