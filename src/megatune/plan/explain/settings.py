"""The output of `megatune explain`: for a setting, a settings file, or the folder of a run; and the references of all
settings and of all keys of reinforcement learning in Markdown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatune.architecture import Architecture
from megatune.config.derived import with_model_defaults
from megatune.config.dialects.dialect import LLAMAFACTORY, Row, read_part, table
from megatune.config.dialects.roll import ReadRL, read_roll
from megatune.config.dialects.roll_roles import engine_sections
from megatune.config.entry import is_rl_file
from megatune.config.load import Loaded, load
from megatune.config.rl.settings import find_key, rl_pages
from megatune.config.rules.rule import is_met
from megatune.config.setting import Needs, SettingInfo
from megatune.config.settings import GROUPS, all_settings, setting_value, with_settings
from megatune.config.values import shown
from megatune.errors import NO_LINE, ExitCode, Finding, MegatuneError, line_of, nearest_names
from megatune.plan.catalogue import find_machine
from megatune.plan.estimate import estimate
from megatune.plan.explain.cost import DEFAULT_GPU, BaseCase, case_of_file, compare_with, default_cases, impact_of
from megatune.plan.explain.words import (
    Language,
    Words,
    all_needs,
    case_line,
    cost_lines,
    describe_comparison,
    fullest,
    needs_text,
    phrase_of,
    rows,
    section,
    texts_of,
    what_it_does,
    words_of,
    wrapped,
    written,
)
from megatune.plan.machine import Machine
from megatune.plan.pages.words import percent, seconds
from megatune.plan.run.record import PLAN_NAME

_ROWS = LLAMAFACTORY.rows
_REFUSED = {key: row for key, row in _ROWS.items() if row.unsupported}
_FILES = (".yaml", ".yml")


def explain_key(key: str, cases: Sequence[BaseCase], language: Language = "en") -> str:
    """Explain what a key is, how it works, when to change it, and what it costs; for a terminal.

    Args:
        key: a key of the dialect, or "group.name"; dashes count as underscores.
        cases: candidates to compute the cost with: the first one in which the setting has an effect is used.

    Raises:
        MegatuneError: SETTINGS if the key is unknown, with the nearest names.
    """
    name = _name(key)
    infos, words = all_settings(), words_of(language)
    row = LLAMAFACTORY.row_of(name)
    path = row.paths[0] if row is not None and row.paths else name if name in infos else None
    refused = _REFUSED.get(name)
    if path is None and row is None:
        raise _unknown(key)
    lines: list[str] = []
    if path is not None:
        lines += _explained(infos[path], cases, language)
        refused = refused or _REFUSED.get(infos[path].name)
    if refused is not None:
        lines += ["" if lines else name, *_refusal(name, refused, words, language)]
    if row is not None and row.ignored and path is None:
        text = phrase_of(row.ignored, "accepted", language)
        lines += [name, wrapped(words.accepted + words.colon + text, indent="  ")]
    return "\n".join(lines)


def knows(key: str) -> bool:
    """Return whether `explain_key` knows this key."""
    return LLAMAFACTORY.knows(_name(key)) or _name(key) in all_settings()


def _name(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _unknown(key: str) -> MegatuneError:
    names, name = LLAMAFACTORY.names, _name(key.lower()).rpartition(".")[2]
    known = {key: meant for others in read_part("others", "names").values() for key, meant in others.items()}
    near = [known[name]] if name in known else nearest_names(name, names, cutoff=0.7)
    if name not in known:
        near += [each for each in names if name in each and each not in near][: 3 - len(near)]
    fix = f"did you mean {' or '.join(near)}?" if near else "`megatune explain --all` lists every setting"
    return MegatuneError(Finding(f"unknown setting {key!r}", fix=fix), ExitCode.SETTINGS)


def _explained(info: SettingInfo, cases: Sequence[BaseCase], language: Language) -> Iterator[str]:
    words, texts = words_of(language), texts_of(info, language)
    names = f"{LLAMAFACTORY.name}{words.colon}{words.comma.join(LLAMAFACTORY.names_of(info.path))}"
    yield wrapped(info.name + words.parentheses.format(f"{words.group}{words.colon}{info.group}"))
    yield from rows(words, (words.takes, [texts.type]), (words.default, [shown(info.default)]), (words.also, [names]))
    yield ""
    yield from what_it_does(texts, words)
    yield from rows(words, (words.needs, all_needs(info, words)))
    yield ""
    yield from rows(words, (words.cost, cost_lines(info, impact_of(info, cases), cases, words)), hang=2)


def _refusal(key: str, refused: Row, words: Words, language: Language) -> Iterator[str]:
    def line(text: str) -> str:
        return wrapped(text, indent="    ", first="  ")

    why, fix = phrase_of(refused.unsupported, "refusals", language), phrase_of(refused.fix, "fixes", language)
    values = ""
    if refused.refuses is not None:
        values = words.parentheses.format(f"{key}{words.colon}{words.comma.join(map(shown, refused.refuses))}")
    yield line((words.refused_values if values else words.refused) + values + words.colon + why)
    if refused.refuses is None:
        yield line(words.passes + words.colon + words.comma.join(map(shown, [*refused.passes, None])))
    if fix:
        yield line(words.instead + words.colon + fix.removeprefix("write ").removeprefix("写 "))


# --- a file ----------------------------------------------------------------------------------------------------------


def explain_file(name: str, loaded: Loaded, base: BaseCase, language: Language = "en") -> tuple[str, list[Finding]]:
    """Explain every setting in a file, for a terminal; return the text, and the findings about the file."""
    words, case = words_of(language), base.case
    if base.architecture is not None:
        loaded, _ = with_model_defaults(loaded, base.architecture)
    given = {path for path, origin in loaded.origins.items() if origin != "default"}
    findings = loaded.check(base.architecture, base.world_size)
    lines = [words.settings.format(file=name)]
    if case is None:
        lines.append(wrapped(f"{words.cost}{words.colon}{words.not_planned.format(why=base.why_not)}"))
    else:
        whole = estimate(case)
        text = words.whole.format(
            case=case_line(base, words),
            memory=fullest(whole, words),
            seconds=seconds(whole.time.total),
            rate=f"{whole.time.tokens_per_second_per_gpu:,.0f}",
        )
        uncertainty = words.uncertainty.format(percent=percent(whole.time.uncertainty))
        lines += [wrapped(text + words.stop), wrapped(uncertainty[:1].upper() + uncertainty[1:] + words.stop)]
    if not given and not loaded.findings:  # with findings it is unknown what the file sets
        lines += ["", words.none_set]
    for path in sorted(given - loaded.invalid, key=lambda path: _place(loaded.origins[path])):
        lines += ["", *_written(all_settings()[path], loaded, base, language)]
    remarks = [str(finding) for finding in findings]
    for path, need in _without_effect(loaded, base.architecture):
        key, origin = LLAMAFACTORY.key_of(path), loaded.origins[path]
        text = words.without_effect.format(key=key, needs=needs_text(need, words))
        remarks.append(f"{origin}: {text}" if _place(origin)[0] < NO_LINE else text)
    return "\n".join([*lines, "", words.remarks, *(remarks or [words.no_remarks])]), findings


def _without_effect(loaded: Loaded, architecture: Architecture | None) -> Iterator[tuple[str, Needs]]:
    """Yield settings that are set and have no effect because a need is not met, which is not an error."""
    for path, info in all_settings().items():
        value = setting_value(loaded.settings, path)
        noted = (need for need in info.needs if not need.why and (not need.of or value in need.of))
        missing = next((need for need in noted if not is_met(need, loaded.settings, architecture)), None)
        if path in loaded.written and missing is not None:
            yield path, missing


def _written(info: SettingInfo, loaded: Loaded, base: BaseCase, language: Language) -> Iterator[str]:
    words, value = words_of(language), setting_value(loaded.settings, info.path)
    number, origin = _place(loaded.origins[info.path])
    where = words.line.format(number=number) if number < NO_LINE else origin
    key, texts = LLAMAFACTORY.key_of(info.path), texts_of(info, language)
    yield from written(key, value, info.default, where, texts, words)
    if base.case is None or value == info.default:
        return
    effect = compare_with(base.case, info.path, info.default)
    if effect is not None and not effect.has_no_effect:
        compared = describe_comparison(effect, info.path, info.default, words)
        yield wrapped(words.cost + words.colon + compared, indent="    ")


def _place(origin: str) -> tuple[int, str]:
    """Return a sort key: the line of an origin in its file, with the command line after all lines; and the origin."""
    return line_of(origin), origin


# --- the reference ---------------------------------------------------------------------------------------------------


def settings_page(language: Language = "en") -> str:
    """Return the reference of all settings: the output of `explain --all`, and a page of the documentation."""
    words = words_of(language)
    parts = [f"# {words.title}\n\n{words.head}"]
    for group in GROUPS:
        infos = (info for info in all_settings().values() if info.group == group)
        parts += [f"\n## {group}\n", *(part for info in infos for part in _section(info, words, language))]
    rows = (*_refused_rows(words, language), words.accepted_head, *_accepted_rows(language))
    return "".join([*parts, "\n", words.refused_head, *rows])


def _section(info: SettingInfo, words: Words, language: Language) -> Iterator[str]:
    names = LLAMAFACTORY.names_of(info.path)
    also = names if names[1:] else ()
    yield from section(names[0], info.default, texts_of(info, language), words, also)
    if needs := all_needs(info, words):
        yield f"- **{words.needs.capitalize()}**{words.colon}{words.semicolon.join(needs)}\n"


def _refused_rows(words: Words, language: Language) -> Iterator[str]:
    for key, refused in sorted(_REFUSED.items(), key=lambda each: each[0]):
        every = refused.refuses is None
        values = words.every_other if every else ", ".join(f"`{shown(v)}`" for v in refused.refuses or ())
        passes = ", ".join(f"`{shown(v)}`" for v in refused.passes) or ("`null`" if every else words.the_rest)
        why = phrase_of(refused.unsupported, "refusals", language)
        yield f"| `{key}` | {values} | {passes} | {why.replace('|', chr(92) + '|')} |\n"


def _accepted_rows(language: Language) -> Iterator[str]:
    keys: dict[str, list[str]] = {}
    for key in sorted(key for key, row in _ROWS.items() if row.ignored):
        keys.setdefault(_ROWS[key].ignored, []).append(f"`{key}`")
    yield from (f"| {', '.join(names)} | {phrase_of(why, 'accepted', language)} |\n" for why, names in keys.items())


# --- keys of reinforcement learning -----------------------------------------------------------------------------------


def _explained_rl(dotted: str, info: SettingInfo, language: Language) -> str:
    """Explain one key, for a terminal."""
    words, texts = words_of(language), texts_of(info, language, is_rl=True)
    lines = [wrapped(dotted + words.parentheses.format("megatune rl"))]
    lines += rows(words, (words.takes, [texts.type]), (words.default, [shown(info.default)]))
    return "\n".join([*lines, "", *what_it_does(texts, words), *rows(words, (words.needs, all_needs(info, words)))])


def explain_rl_file(name: str, read: ReadRL, language: Language = "en") -> str:
    """Explain every key in a file, then list its findings, for a terminal."""
    words = words_of(language)
    lines = [words.settings.format(file=name)]
    for entry in read.reading.entries.values():
        found, value = find_key(entry.key), entry.value.data
        if found is not None and value is not None:
            texts = texts_of(found[1], language, is_rl=True)
            lines += ["", *written(entry.key, value, found[1].default, entry.origin, texts, words)]
    remarks = [*map(str, read.findings), *read.lines]
    return "\n".join([*lines, "", words.remarks, *(remarks or [words.no_remarks])])


def rl_page(language: Language = "en") -> str:
    """Return the reference of all keys of reinforcement learning, in Markdown."""
    words = words_of(language)
    parts = [words.rl_head]
    for heading, infos in rl_pages().items():
        parts.append(f"\n## {words.rl_groups[heading]}\n")
        for dotted, info in infos.items():
            parts += section(dotted, info.default, texts_of(info, language, is_rl=True), words)
    parts.append(words.rl_engine)
    for name, keys in engine_sections().items():
        parts.append(f"| `ROLE.{name}` | {', '.join(f'`{key}`' for key in keys.settings)} |\n")
    parts += [words.rl_refused_head, *_refused_rl_rows(words, language)]
    return "".join([*parts, words.rl_accepted_head, *_accepted_rl_rows(language)])


def _refused_rl_rows(words: Words, language: Language) -> Iterator[str]:
    for dotted, row in table("roll").items():
        if row.unsupported:
            values = ", ".join(f"`{shown(value)}`" for value in row.refuses or ()) or words.every_other
            yield f"| `{dotted}` | {values} | {phrase_of(row.unsupported, 'reasons', language)} |\n"


def _accepted_rl_rows(language: Language) -> Iterator[str]:
    """Yield a row for each reason and mapping, with its keys."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for dotted, row in table("roll").items():
        above, _, key = dotted.rpartition(".")
        if row.ignored:
            reasons.setdefault((above, row.ignored), []).append(f"`{key}`")
    for (above, why), names in reasons.items():
        why = phrase_of(why, "reasons", language)
        yield f"| {f'`{above}`' if above else ''} | {', '.join(names)} | {why} |\n"


# --- the command ------------------------------------------------------------------------------------------------------


def explain(
    name: str,
    changes: Sequence[str],
    language: Language,
    machine_here: Callable[[], Machine | None],
    *,
    model: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
) -> tuple[str, ExitCode]:
    """Return the explanation, and SETTINGS if a file would be refused.

    Args:
        name: a setting, a file or a folder.
        changes: for a setting, a file with it; then `key=value` overrides.
        machine_here: describes this machine; None if it has no GPUs, or unknown ones.
        model, gpus, gpu: the case to compute costs for, if given.

    Raises:
        MegatuneError: SETTINGS or INPUT if the name is unknown.
    """

    def base_case(loaded: Loaded) -> BaseCase:
        """Return the case of a file on the given machines, on this one, or on the default ones."""
        if model is not None:
            loaded = replace(loaded, settings=with_settings(loaded.settings, {"model.model_name_or_path": model}))
        machine = find_machine(gpu) if gpu else machine_here()
        return case_of_file(loaded, machine or find_machine(DEFAULT_GPU), gpus, is_assumed=machine is None)

    path = Path(name)
    if knows(name):
        cases = [base_case(load(changes[0], changes[1:]))] if changes else default_cases(model, gpus, gpu)
        return explain_key(name, cases, language), ExitCode.DONE
    if (key := find_key(name)) is not None:
        return _explained_rl(*key, language), ExitCode.DONE
    if path.is_dir() or path.name == PLAN_NAME:
        from megatune.plan.run.trouble import diagnose

        return "\n".join(diagnose(path if path.is_dir() else path.parent)), ExitCode.DONE
    if name.endswith(_FILES) or path.is_file():
        if is_rl_file(name):
            read = read_roll(name, changes)
            text, findings = explain_rl_file(name, read, language), list(read.findings)
        else:
            loaded = load(name, changes)
            text, findings = explain_file(name, loaded, base_case(loaded), language)
        return text, ExitCode.SETTINGS if findings else ExitCode.DONE
    if os.sep in name:  # not the name of a setting
        finding = Finding(f"there is no folder or file {path}", fix="name the output_dir of a run, or a file")
        raise MegatuneError(finding, ExitCode.INPUT)
    return explain_key(name, [], language), ExitCode.DONE
