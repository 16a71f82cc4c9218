"""What `explain` says of settings: complete in both languages, and each translation of the very text it stands for."""

import importlib
import re
import subprocess
import sys

import pytest

from megatune.config.chinese import phrases, translations
from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.rl.settings import rl_keys
from megatune.config.setting import describe
from megatune.config.settings import all_settings

INFOS = list(all_settings().values())


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.path)
def test_english_is_complete(info):
    for text in info.texts[:3]:
        assert text.endswith(".")
        assert text[0].isupper() or text[0].isdigit() or re.match(r"[a-z0-9_]+\b", text), text
        assert 1 <= text.count(". ") + 1 <= 3, text
    if info.choices and bool not in info.kinds:
        assert list(info.texts.values) == [str(choice) for choice in info.choices]
    assert not any(text.endswith(".") for text in info.texts.values.values())


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.path)
def test_chinese_is_of_this_english(info):
    """Where this fails, the English changed: look at the Chinese, and write the new digest beside it."""
    text = translations()[info.path]
    assert text.english == info.digest
    assert list(text.values) == list(info.texts.values)
    for each in (text.what, text.how, text.when, *text.values.values()):
        assert re.search(r"[\u4e00-\u9fff]", each) or each.isascii()
    for each in (text.what, text.how, text.when):
        assert each.endswith("。"), each
        assert not re.search(r"[\u4e00-\u9fff][,;:]|[,;:][\u4e00-\u9fff]", each), each
    assert info.unit == "" or info.unit in phrases("units")
    assert re.search(r"[\u4e00-\u9fff]", info.expected_in(phrases("types")))


def test_nothing_else_is_translated():
    assert list(translations().keys() - all_settings().keys()) == []


def test_keys_and_numbers_survive_translation():
    """A key that the English names is named in Chinese, too, and the other way round no key is made up."""
    keys = {info.name for info in INFOS if "_" in info.name}
    for info in INFOS:
        text = translations()[info.path]
        named = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", f"{text.what} {text.how} {text.when}")) & keys
        english = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", " ".join(info.texts[:3]))) & keys
        assert named - english == set(), info.path
        assert english - named == set(), info.path


def test_digest_sees_every_text(tmp_path, monkeypatch):
    def digest(**changes):
        texts = {"what": "A.", "how": "B.", "when": "C.", "values": "- x: d", **changes}
        path = tmp_path / f"group_{len(list(tmp_path.iterdir()))}.py"
        doc = "    {what}\n    How: {how}\n    When: {when}\n    {values}\n".format(**texts)
        head = "from megatune.config.setting import Group\nclass Some(Group):\n    a: str = ''\n"
        path.write_text(f'{head}    """{doc.strip()}"""\n')
        monkeypatch.syspath_prepend(tmp_path)
        return next(describe("some", importlib.import_module(path.stem).Some)).digest

    changed = ({"what": "Z."}, {"how": "Z."}, {"when": "Z."}, {"values": "- x: z"}, {"values": "- z: d"})
    assert len({digest(), *(digest(**each) for each in changed)}) == 6


def test_refusals_are_translated():
    known = {key: row for key, row in LLAMAFACTORY.rows.items() if row.unsupported}
    for key, refused in known.items():
        assert refused.unsupported in phrases("refusals"), key
        assert not refused.fix or refused.fix in phrases("fixes"), key
    assert set(phrases("refusals")) == {refused.unsupported for refused in known.values()}
    assert set(phrases("accepted")) == {row.ignored for row in LLAMAFACTORY.rows.values() if row.ignored}


def test_chinese_is_imported_only_when_asked_for():
    script = (
        "import sys\n"
        "from megatune.plan.explain.settings import explain_key\n"
        "from megatune.plan.explain.cost import default_cases\n"
        "explain_key('cutoff_len', default_cases())\n"
        "print([name for name in sys.modules if 'chinese' in name or name in ('torch', 'numpy', 'matplotlib')])\n"
        "explain_key('cutoff_len', default_cases(), 'zh')\n"
        "print('megatune.config.chinese' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]


@pytest.mark.parametrize("info", rl_keys().values(), ids=lambda info: info.path)
def test_keys_of_reinforcement_learning_are_complete_in_both_languages(info):
    test_english_is_complete(info)
    text = translations("rl")[info.path]
    assert text.english == info.digest
    assert list(text.values) == list(info.texts.values)
    for each in (text.what, text.how, text.when):
        assert each.endswith("。"), each
        assert not re.search(r"[\u4e00-\u9fff][,;:]|[,;:][\u4e00-\u9fff]", each), each


def test_no_key_of_reinforcement_learning_is_made_up():
    assert translations("rl").keys() == {info.path for info in rl_keys().values()}
