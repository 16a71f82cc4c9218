"""Truncation: cut a sample that is longer than cutoff_len, or drop it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from megatune.data.bad_rows import TOO_LONG, LengthError

Strategy = Literal["budget", "drop", "left", "right", "error"]
# Tokens, and whether they are trained.
Stretch = tuple[list[int], bool]


def share_budget(prompt_length: int, completion_length: int, budget: int) -> tuple[int, int]:
    """Return how many tokens of a prompt and of its completion fit a budget (LLaMA-Factory's rule).

    A completion shorter than half the budget is kept whole; else a prompt shorter than half is; else both are cut in
    proportion.
    """
    if 2 * completion_length < budget:
        room = budget
    elif 2 * prompt_length < budget:
        room = budget - prompt_length
    else:
        room = budget * completion_length // (prompt_length + completion_length)
    completion_length = min(completion_length, room)
    return min(prompt_length, budget - completion_length), completion_length


def cut_turns(
    turns: Sequence[tuple[Stretch, Stretch]], cutoff_len: int, strategy: Strategy, *, last_first: bool, keep_first: bool
) -> list[Stretch]:
    """Cut the turns of a conversation to cutoff_len tokens.

    Args:
        turns: prompts and completions; together longer than cutoff_len.
        last_first: with "budget", turns are kept from the last one, not from the first.
        keep_first: with "left", the first token stays.

    Raises:
        LengthError: the strategy is "drop" or "error".
    """
    stretches = [stretch for turn in turns for stretch in turn]
    if strategy == "budget":
        return _in_budget(turns, cutoff_len, last_first)
    if strategy == "right":
        starts = accumulate((len(tokens) for tokens, _ in stretches), initial=0)
        rooms = (max(0, cutoff_len - start) for start in starts)
        return [(tokens[:room], trained) for (tokens, trained), room in zip(stretches, rooms, strict=False)]
    if strategy == "left":
        kept: list[Stretch] = []
        head = [(tokens[:1], trained) for tokens, trained in stretches if tokens][: int(keep_first)]
        room = cutoff_len - len(head)
        for tokens, trained in reversed(stretches):
            kept.append((tokens[max(0, len(tokens) - room) :], trained))
            room -= len(kept[-1][0])
        return head + kept[::-1]
    length = sum(len(tokens) for tokens, _ in stretches)
    raise LengthError(TOO_LONG, "longer than cutoff_len", f"{length} tokens, cutoff_len is {cutoff_len}", length)


def cut_pair(
    prompt: list[int], completions: Sequence[list[int]], cutoff_len: int, strategy: Strategy, *, keep_first: bool
) -> tuple[list[int], list[list[int]]]:
    """Cut a prompt and its two completions, each with the prompt to cutoff_len tokens; the prompt stays shared.

    With "budget" the longer completion counts in LLaMA-Factory's rule, and both are cut to what it gets. With "right"
    the prompt keeps its start, and the completions get what it leaves; with "left" completions keep their ends, and the
    prompt the end of what the longer one leaves.

    Args:
        prompt, completions: with the longer completion, longer than cutoff_len.
        keep_first: with "left", the first token stays.

    Raises:
        LengthError: the strategy is "drop" or "error".
    """
    longest = max(completions, key=len)
    turn = ((prompt, False), (longest, True))
    *kept, (cut, _) = cut_turns([turn], cutoff_len, strategy, last_first=False, keep_first=keep_first)
    size = len(cut)
    short = [ids[max(0, len(ids) - size) :] if strategy == "left" else ids[:size] for ids in completions]
    return [token for tokens, _ in kept for token in tokens], short


def _in_budget(turns: Sequence[tuple[Stretch, Stretch]], budget: int, last_first: bool) -> list[Stretch]:
    """Fill the budget turn by turn; the turn that uses it up is the last."""
    kept: list[tuple[Stretch, Stretch]] = []
    for (prompt, prompt_trained), (completion, completion_trained) in reversed(turns) if last_first else turns:
        if budget <= 0:
            break
        prompt_length, completion_length = share_budget(len(prompt), len(completion), budget)
        kept.append(((prompt[:prompt_length], prompt_trained), (completion[:completion_length], completion_trained)))
        budget -= prompt_length + completion_length
    return [stretch for turn in (reversed(kept) if last_first else kept) for stretch in turn]
