"""Keys of reinforcement learning explained: one, those of a file, and all of them in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.dialects.roll import ReadRL
from megatune.config.dialects.roll_engine import section_names
from megatune.config.dialects.roll_tree import data_of, entries_of
from megatune.config.dialects.table import table
from megatune.config.rl.pages import find_key, rl_pages
from megatune.config.setting import SettingInfo
from megatune.config.values import shown
from megatune.plan.explain.words import Language, Texts, Words, columns_of, words_of, wrapped


def knows_rl(key: str) -> bool:
    """Return whether `explain_rl_key` has something to say of a key."""
    return find_key(key) is not None


def explain_rl_key(key: str, language: Language = "en") -> str:
    """Explain one key that `knows_rl`, for a terminal."""
    found = find_key(key)
    assert found is not None, key
    dotted, info = found
    words, texts = words_of(language), rl_texts(info, language)
    heads = (words.takes, words.default, words.what, words.how, words.when, words.values)
    width = max(map(columns_of, heads)) + 2

    def paragraph(heading: str, text: str, hang: int = 0) -> str:
        return wrapped(text, indent=" " * (width + 2 + hang), first=f"  {heading}{' ' * (width - columns_of(heading))}")

    lines = [wrapped(dotted + words.parentheses.format("megatune rl"))]
    lines += [paragraph(words.takes, texts.type), paragraph(words.default, shown(info.default)), ""]
    lines += [paragraph(words.what, texts.what), paragraph(words.how, texts.how), paragraph(words.when, texts.when)]
    for index, (value, text) in enumerate(texts.values.items()):
        lines.append(paragraph("" if index else words.values, f"{value}{words.colon}{text}", hang=2))
    return "\n".join(lines)


def explain_rl_file(name: str, read: ReadRL, language: Language = "en") -> str:
    """Explain every key that is written in a file, then say what is wrong with it, for a terminal."""
    words = words_of(language)
    lines = [words.settings.format(file=name)]
    for entry in entries_of(read.tree):
        found, value = find_key(entry.key), data_of(entry)
        if found is None or value is None:
            continue
        default = words.is_default if value == found[1].default else f"{words.default} {shown(found[1].default)}"
        beside = words.parentheses.format(entry.origin + words.semicolon + default)
        texts = rl_texts(found[1], language)
        lines += ["", wrapped(f"{entry.key}: {shown(value)}{beside}"), wrapped(texts.what, indent="    ")]
        if not isinstance(value, list | dict) and (said := texts.values.get(shown(value))):
            lines.append(wrapped(f"{shown(value)}{words.colon}{said}", indent="    "))
    remarks = [*map(str, read.findings), *read.lines]
    return "\n".join([*lines, "", words.remarks, *(remarks or [words.no_remarks])])


def rl_page(language: Language = "en") -> str:
    """Return the reference of all keys, in Markdown."""
    words = words_of(language)
    parts = [_HEAD[language]]
    for heading, infos in rl_pages().items():
        parts.append(f"\n## {_HEADINGS[language][heading]}\n")
        for dotted, info in infos.items():
            parts += _section(dotted, info, words, language)
    parts += [_ENGINE[language], *_engine_rows(), _REFUSED_HEAD[language], *_refused_rows(words, language)]
    return "".join([*parts, _IGNORED_HEAD[language], *_ignored_rows(language)])


def rl_texts(info: SettingInfo, language: Language) -> Texts:
    """Return a key's texts in a language."""
    if language == "en":
        unit = f" ({info.unit})" if info.unit else ""
        return Texts(*info.texts[:3], info.expected + unit, info.texts.values)
    from megatune.config.chinese import phrases, translations

    text, units = translations("rl")[info.path], {**phrases("units"), **phrases("units", "rl")}
    unit = f"（单位：{units[info.unit].removeprefix('个').strip()}）" if info.unit else ""
    return Texts(text.what, text.how, text.when, info.expected_in(phrases("types")) + unit, text.values)


def _section(dotted: str, info: SettingInfo, words: Words, language: Language) -> Iterator[str]:
    texts = rl_texts(info, language)
    yield f"\n### {dotted}\n\n{texts.type}{words.semicolon}{words.default} `{shown(info.default)}`"
    yield f"\n\n{texts.what}\n\n"
    yield f"- **{words.how.capitalize()}**{words.colon}{texts.how}\n"
    yield f"- **{words.when.capitalize()}**{words.colon}{texts.when}\n"
    yield from (f"- `{value}`{words.colon}{text}\n" for value, text in texts.values.items())


def _engine_rows() -> Iterator[str]:
    for section, names in section_names().items():
        yield f"| `ROLE.{section}` | {', '.join(f'`{name}`' for name in names)} |\n"


def _refused_rows(words: Words, language: Language) -> Iterator[str]:
    for dotted, row in table("roll").items():
        if row.unsupported:
            values = ", ".join(f"`{shown(value)}`" for value in row.refuses or ()) or words.every_other
            yield f"| `{dotted}` | {values} | {_reason(row.unsupported, language)} |\n"


def _ignored_rows(language: Language) -> Iterator[str]:
    """Give a row for each reason and mapping, with the keys that it is of."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for dotted, row in table("roll").items():
        above, _, key = dotted.rpartition(".")
        if row.ignored:
            reasons.setdefault((above, row.ignored), []).append(f"`{key}`")
    for (above, why), names in reasons.items():
        yield f"| {f'`{above}`' if above else ''} | {', '.join(names)} | {_reason(why, language)} |\n"


def _reason(why: str, language: Language) -> str:
    if language == "en":
        return why
    from megatune.config.chinese import phrases

    return phrases("reasons", "rl")[why]


_HEADINGS: dict[Language, dict[str, str]] = {
    "en": {
        "run": "The run",
        "rollouts": "Rollouts",
        "algorithm": "The algorithm",
        "roles": "Roles",
        "rewards": "Rewards",
    },
    "zh": {"run": "运行", "rollouts": "采样", "algorithm": "算法", "roles": "角色", "rewards": "奖励"},
}
_HEAD: dict[Language, str] = {
    "en": """# Settings of reinforcement learning

Every key of a file of `megatune rl`, by where it stands; the names are ROLL's. ROLE is `actor_train`, `actor_infer`,
`reference`, `critic`, `reward_model`, a teacher or a reward; DOMAIN is a name of your own below `rewards`. What is not
listed is refused, with the nearest name.

A file may name others in `defaults`, as Hydra does, and refer to keys with `${a.b}`, or to a variable of the
environment with `${oc.env:NAME}`. On a command line `a.b.c=value` comes after the file, and `~a.b.c` takes a key out of
it.

`megatune explain KEY` says the same of one key, `megatune explain FILE.yaml` goes through a file. This page is written
by `python docs/generate_settings.py`; [rl-settings.zh.md](rl-settings.zh.md) has it in Chinese.
""",
    "zh": """# 强化学习的设置

`megatune rl` 的文件里的全部键，按所在位置列出，名称与 ROLL 相同。ROLE 是 `actor_train`、`actor_infer`、
`reference`、`critic`、`reward_model`、教师或某个奖励；DOMAIN 是 `rewards` 下自取的名称。
没有列出的键会被拒绝，并给出最接近的名称。

文件可以像 Hydra 那样在 `defaults` 里引用其他文件，用 `${a.b}` 引用键，用 `${oc.env:NAME}` 引用环境变量。命令行上的
`a.b.c=value` 在文件之后生效，`~a.b.c` 去掉一个键。

`megatune explain KEY` 解释一个键，`megatune explain FILE.yaml` 解释整个文件。本页由 `python docs/generate_settings.py`
写出；英文版是 [rl-settings.md](rl-settings.md)。
""",
}
_ENGINE: dict[Language, str] = {
    "en": """
## Models and engines

Keys that say what a model is and how the engine computes it are those of every other run: [settings.md](settings.md)
explains them. `dtype` is bf16, fp16 or fp32; `lora_target` turns adapters on, and may be all-linear; later rows win.

| where | keys |
|---|---|
""",
    "zh": """
## 模型与引擎

说明模型是什么、引擎如何计算的键与其他运行相同，见 [settings.zh.md](settings.zh.md)。`dtype` 是 bf16、fp16 或 fp32；
写了 `lora_target` 就训练 LoRA，可以是 all-linear；后面的行优先。

| 位置 | 键 |
|---|---|
""",
}
_REFUSED_HEAD: dict[Language, str] = {
    "en": """
## What is refused

Keys of ROLL, and values of them, that are not supported.

| key | values | why |
|---|---|---|
""",
    "zh": """
## 被拒绝的键

ROLL 有而这里没有实现的键或取值。

| 键 | 取值 | 原因 |
|---|---|---|
""",
}
_IGNORED_HEAD: dict[Language, str] = {
    "en": """
## What does nothing

Keys that are accepted, and named before the run starts.

| where | keys | why |
|---|---|---|
""",
    "zh": """
## 不起作用的键

这些键可以写，运行开始前会列出。

| 位置 | 键 | 原因 |
|---|---|---|
""",
}
