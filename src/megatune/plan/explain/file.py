"""A whole settings file explained: what it sets, what that does and costs, and what is worth a remark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatune.architecture import Architecture
from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.load import Loaded
from megatune.config.setting import SettingInfo
from megatune.config.settings import Settings, all_settings
from megatune.config.values import shown
from megatune.errors import Finding
from megatune.plan.changes.variation import setting_of
from megatune.plan.estimate import estimate
from megatune.plan.explain.cost import against
from megatune.plan.explain.ground import Ground
from megatune.plan.explain.language import Language, texts_of, wrapped
from megatune.plan.explain.sentences import against_words, fullest, ground_line
from megatune.plan.explain.words import words_of
from megatune.plan.pages.words import percent, seconds

EXPERTS = "moe"  # needed: a model with experts


Condition = Callable[[Settings, Architecture | None], bool]


def _has_experts(settings: Settings, architecture: Architecture | None) -> bool:
    return architecture is None or architecture.moe is not None


# A setting, what it needs as a user writes it, or EXPERTS, and whether that is there.
_NEEDS: tuple[tuple[str, str, Condition], ...] = (
    ("optimizer.sgd_momentum", "optimizer: sgd", lambda s, _: s.optimizer.optimizer == "sgd"),
    *(
        (f"optimizer.{name}", "optimizer: adam", lambda s, _: s.optimizer.optimizer == "adam")
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon")
    ),
    ("optimizer.num_train_epochs", "max_steps: -1", lambda s, _: s.optimizer.max_steps <= 0),
    ("parallel.overlap_p2p_comm", "virtual_pipeline_model_parallel_size: 2",
     lambda s, _: bool(s.parallel.virtual_stages)),
    ("parallel.cp_comm_type", "context_parallel_size: 2", lambda s, _: s.parallel.context_parallel_size > 1),
    ("recompute.recompute_modules", "recompute_granularity: selective",
     lambda s, _: s.recompute.recompute_granularity == "selective"),
    ("performance.manual_gc_interval", "manual_gc: true", lambda s, _: s.performance.manual_gc),
    ("checkpoint.save_steps", "save_strategy: steps", lambda s, _: s.checkpoint.save_strategy == "steps"),
    ("evaluation.eval_steps", "eval_strategy: steps", lambda s, _: s.evaluation.eval_strategy == "steps"),
    ("batch.per_device_eval_batch_size", "eval_strategy: steps", lambda s, _: s.evaluation.eval_strategy != "no"),
    ("experts.moe_aux_loss_coeff", "moe_router_load_balancing_type: aux_loss",
     lambda s, _: s.experts.moe_router_load_balancing_type in ("aux_loss", "seq_aux_loss")),
    ("experts.moe_router_load_balancing_type", "moe_aux_loss_coeff: 0.001",
     lambda s, _: s.experts.moe_aux_loss_coeff > 0
     or s.experts.moe_router_load_balancing_type in ("sinkhorn", "none")),
    *((path, EXPERTS, _has_experts) for path in all_settings() if path.startswith(("experts.", "parallel.expert_"))),
)  # fmt: skip


def without_effect(
    settings: Settings, written: set[str], architecture: Architecture | None
) -> Iterator[tuple[str, str]]:
    """Yield settings that were written and do nothing, each with what it needs.

    Args:
        written: "group.name" of what a user wrote.
        architecture: None where the model is not known.
    """
    for path, needs, are_met in _NEEDS:
        if path in written and setting_of(settings, path) is not None and not are_met(settings, architecture):
            yield path, needs


def explain_file(
    name: str, loaded: Loaded, ground: Ground, language: Language = "en", dialect: Dialect = LLAMAFACTORY
) -> tuple[str, list[Finding]]:
    """Explain every setting that is written, in the order of the groups, and remarks; for a terminal.

    Returns:
        The text, and what is wrong with the file.
    """
    words = words_of(language)
    written = {path for path, origin in loaded.origins.items() if origin != "default"}
    case = ground.case
    findings = loaded.check(ground.architecture, ground.world_size)
    lines = [words.settings.format(file=name)]
    if case is None:
        lines.append(wrapped(f"{words.cost}{words.colon}{words.not_planned.format(why=ground.why_not)}"))
    else:
        whole = estimate(case)
        text = words.whole.format(
            ground=ground_line(ground, words),
            memory=fullest(whole, words),
            seconds=seconds(whole.time.total),
            rate=f"{whole.time.tokens_per_second_per_gpu:,.0f}",
        )
        lines.append(wrapped(text + words.stop))
        uncertainty = words.uncertainty.format(percent=percent(whole.time.uncertainty))
        lines.append(wrapped(uncertainty[:1].upper() + uncertainty[1:] + words.stop))
    if not written and not loaded.findings:  # otherwise nobody knows what it would set
        lines += ["", words.none_set]
    for path in sorted(written - loaded.invalid, key=lambda path: _place(loaded.origins[path])):
        lines += ["", *_setting(all_settings()[path], loaded, ground, language, dialect)]
    lines += ["", words.remarks]
    remarks = [str(finding) for finding in findings]
    for path, needs in without_effect(loaded.settings, written, ground.architecture):
        text = words.without_effect.format(key=dialect.key_of(path), needs=words.experts if needs == EXPERTS else needs)
        remarks.append(f"{loaded.origins[path]}: {text}" if _place(loaded.origins[path])[0] < _NO_LINE else text)
    lines += remarks or [words.no_remarks]
    return "\n".join(lines), findings


def _setting(info: SettingInfo, loaded: Loaded, ground: Ground, language: Language, dialect: Dialect) -> Iterator[str]:
    words, texts = words_of(language), texts_of(info, language)
    value = setting_of(loaded.settings, info.path)
    default = words.is_default if value == info.default else f"{words.default} {shown(info.default)}"
    number, origin = _place(loaded.origins[info.path])
    where = words.line.format(number=number) if number < _NO_LINE else origin
    yield wrapped(
        f"{dialect.key_of(info.path)}: {shown(value)}" + words.parentheses.format(where + words.semicolon + default)
    )
    yield wrapped(words.off.format(what=texts.what) if value is False else texts.what, indent="    ")
    for each in value if isinstance(value, list) else [value]:
        said = texts.values.get(shown(each)) if not isinstance(each, dict) else None
        if said:
            yield wrapped(f"{shown(each)}{words.colon}{said}", indent="    ")
    if ground.case is None or value == info.default:
        return
    effect = against(ground.case, info.path, info.default)
    if effect is not None and not effect.is_none:
        yield wrapped(words.cost + words.colon + against_words(effect, info.default, words), indent="    ")


_NO_LINE = 10**9


def _place(origin: str) -> tuple[int, str]:
    """Return the line of an origin in its file, what came from the command line behind all of them; and the origin."""
    _, colon, line = origin.rpartition(":")
    return (int(line) if colon and line.isdigit() else _NO_LINE), origin
