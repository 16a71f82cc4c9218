"""Costs in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatune.config.setting import SettingInfo
from megatune.config.values import shown
from megatune.plan.changes.variation import written
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.explain.cost import Effect, Weighed
from megatune.plan.explain.ground import Ground
from megatune.plan.explain.words import Words
from megatune.plan.pages.words import bytes_unit, layout_words, percent, seconds

_HARDLY_BYTES, _HARDLY_TIME = 2**20, 0.0005


def ground_line(ground: Ground, words: Words) -> str:
    """Name the case: model, machines, layout, and the rows of a step."""
    assert ground.case is not None
    case = ground.case
    text = words.ground.format(
        model=case.model.name, gpus=case.world_size, gpu=case.machine.device.name, layout=layout_words(case)
    )
    text += words.comma + words.tokens.format(rows=f"{case.global_batch_size:,}", tokens=f"{case.sequence_length:,}")
    return text + (words.parentheses.format(words.assumed[ground.assumed]) if ground.assumed else "")


def cost_lines(info: SettingInfo, weighed: Weighed | None, grounds: list[Ground], words: Words) -> Iterator[str]:
    """Say what the setting costs: the case, the value now, and other values against it."""
    if weighed is None:
        yield words.not_planned.format(why=grounds[0].why_not)
        return
    if weighed.refused:
        yield ground_line(weighed.ground, words) + words.colon.rstrip()
        yield words.not_compared if weighed.refused == info.expected else words.not_here.format(why=weighed.refused)
        return
    if not weighed.effects and info.path != "model.model_name_or_path":
        yield words.none
        return
    line = ground_line(weighed.ground, words)
    if weighed.companions:
        line += words.comma + words.beside.format(changes=written(weighed.companions))
    yield line + words.colon.rstrip()
    case = weighed.ground.case
    assert case is not None
    before = weighed.effects[0].before if weighed.effects else estimate(case)
    value = shown(weighed.now) if weighed.effects else case.model.name
    yield words.now.format(value=value, memory=fullest(before, words), seconds=seconds(before.time.total))
    for effect in weighed.effects:
        yield shown(effect.value) + words.colon + effect_words(effect, words)
    yield words.uncertainty.format(percent=percent(before.time.uncertainty))


def against_words(effect: Effect, value: Any, words: Words) -> str:
    """Put an effect against what else the setting could be."""
    other = shown(value)
    if effect.beside:
        other += words.parentheses.format(words.beside.format(changes=written(effect.beside)))
    text = words.against.format(value=other, effect=effect_words(replace(effect, beside={}), words))
    return text.replace("） ", "）")


def effect_words(effect: Effect, words: Words) -> str:
    """Put an effect in a line: memory, time, what else had to change, and whether it fits."""
    memory = words.no_memory
    if abs(effect.memory) >= _HARDLY_BYTES:
        memory = words.memory.format(change=signed_bytes(effect.memory))
        part, change = effect.part
        if abs(change) >= _HARDLY_BYTES and effect.after.fullest.stage == effect.before.fullest.stage:
            memory += words.parentheses.format(f"{words.parts[part]} {signed_bytes(change)}")
    time = words.no_time
    if abs(effect.time) >= _HARDLY_TIME:
        phrase = words.step_time if effect.same_rows else words.token_time
        time = phrase.format(change=signed_share(effect.time))
    parts = [memory, time]
    if effect.beside:
        parts.append(words.beside.format(changes=written(effect.beside)))
    if not effect.after.fits:
        parts.append(words.does_not_fit)
    return words.comma.join(parts)


def fullest(answer: Estimate, words: Words) -> str:
    """`58.2 of 79.2 GiB on the fullest stage`."""
    total, memory = answer.fullest.total, answer.case.machine.device.memory
    unit = bytes_unit(total)
    text = words.fullest.format(size=unit.of(total), device=unit.with_name(memory))
    return text if answer.fits else text + words.comma + words.does_not_fit


def signed_bytes(number: int) -> str:
    """+3.1 GiB."""
    return ("+" if number > 0 else "−") + bytes_unit(abs(number)).with_name(abs(number))


def signed_share(share: float) -> str:
    """−12 %, or ×2.4 from the double on."""
    if share >= 1:
        return f"×{1 + share:.1f}"
    return ("+" if share > 0 else "−") + percent(abs(share))
