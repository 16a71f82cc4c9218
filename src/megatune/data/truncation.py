"""Truncate samples longer than cutoff_len, or drop them.

An image or video is kept or removed as a whole. Its tokens carry its index, so that a cut sees where it begins and
ends, and so that it is known which ones remain. A cut inside an image or video removes it, together with what is beyond
the cut. With "budget" an answer is never trained without the images and videos of its prompt: a turn keeps all of them
or is removed; if that is the first turn, the sample is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np

from megatune.data.bad_rows import TOO_LONG, LengthError

Strategy = Literal["budget", "drop", "left", "right", "split", "error"]
Segment = tuple[list[int], bool]  # tokens, and whether they are trained

_SHIFT = 32  # bits of a token id


def numbered(token: int, item: int) -> int:
    """Encode a token and the index of its image or video as one negative number, used during truncation."""
    return -1 - (item << _SHIFT | token)


def unnumbered(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode `numbered`: return token ids, int64 [T], and the index of each token's image or video, -1 for text."""
    held = np.where(tokens < 0, -1 - tokens, tokens)
    return held & ((1 << _SHIFT) - 1), np.where(tokens < 0, held >> _SHIFT, -1)


def share_budget(prompt_length: int, completion_length: int, budget: int) -> tuple[int, int]:
    """Return how many tokens of a prompt and of its completion fit into a budget (LLaMA-Factory's rule).

    A completion shorter than half the budget is kept whole; otherwise a prompt shorter than half is; otherwise both
    are cut proportionally.
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
    turns: Sequence[tuple[Segment, Segment]], cutoff_len: int, strategy: Strategy, *, last_first: bool, keep_first: bool
) -> list[Segment]:
    """Cut the turns of a conversation to cutoff_len tokens.

    Args:
        turns: prompts and completions; together longer than cutoff_len.
        last_first: with "budget", keep turns from the last one backwards instead of from the first one.
        keep_first: with "left", keep the first token.

    Raises:
        LengthError: the strategy is "drop" or "error", or there is no room for images and videos.
    """
    segments = [segment for turn in turns for segment in turn]
    if strategy == "budget":
        return _in_budget(turns, cutoff_len, last_first)
    if strategy == "right":
        starts = accumulate((len(tokens) for tokens, _ in segments), initial=0)
        rooms = (max(0, cutoff_len - start) for start in starts)
        return [(_start(tokens, room), trained) for (tokens, trained), room in zip(segments, rooms, strict=False)]
    if strategy == "left":
        kept: list[Segment] = []
        head = [(tokens[:1], trained) for tokens, trained in segments if tokens][: int(keep_first)]
        room = cutoff_len - len(head)
        for tokens, trained in reversed(segments):
            kept.append((_end(tokens, room), trained))
            room = room - len(tokens) if len(kept[-1][0]) == len(tokens) else 0
        return head + kept[::-1]
    raise _too_long(sum(len(tokens) for tokens, _ in segments), cutoff_len)


def cut_around_media(
    segments: list[Segment], cutoff_len: int, strategy: Strategy, pads: Collection[int]
) -> list[Segment]:
    """Cut a document to cutoff_len tokens, and keep the placeholders of all images and videos: ms-swift's rule.

    Args:
        strategy: "left" keeps the end, "right" the start; "split" returns the whole document, which is split later.
        pads: ids of the placeholders.

    Raises:
        LengthError: it is longer and the strategy is another one, or the placeholders alone are longer.
    """
    length = sum(len(tokens) for tokens, _ in segments)
    if length <= cutoff_len or strategy == "split":
        return segments
    ids = np.array([token for tokens, _ in segments for token in tokens], dtype=np.int64)
    kept = np.isin(unnumbered(ids)[0], list(pads)) & (ids < 0)
    room = cutoff_len - int(kept.sum())
    if strategy not in ("left", "right") or room <= 0:
        raise _too_long(length, cutoff_len)
    others = np.flatnonzero(~kept)
    kept[others[-room:] if strategy == "left" else others[:room]] = True
    borders = np.cumsum([0, *(len(tokens) for tokens, _ in segments)])
    spans = zip(borders[:-1], borders[1:], segments, strict=True)
    return [(ids[start:stop][kept[start:stop]].tolist(), trained) for start, stop, (_, trained) in spans]


def has_trained(segments: Iterable[Segment]) -> bool:
    """Return whether a document has a trained token except its first, which is never predicted."""
    first = True
    for tokens, trained in segments:
        if trained and len(tokens) > first:
            return True
        first = first and not tokens
    return False


def cut_pair(
    prompt: list[int], completions: Sequence[list[int]], cutoff_len: int, strategy: Strategy, *, keep_first: bool
) -> tuple[list[int], list[list[int]]]:
    """Cut a shared prompt and its two completions, each to cutoff_len tokens together with the prompt.

    With "budget" the longer completion determines the budget of both. With "right" the prompt is kept first, and the
    starts of completions fill the remaining room; with "left" the ends of completions are kept first, and the end of
    the prompt fills the room that the longer one leaves.

    Args:
        prompt, completions: together with the longer completion, longer than cutoff_len.
        keep_first: with "left", keep the first token.

    Raises:
        LengthError: as `cut_turns`.
    """
    longest = max(completions, key=len)
    turn = ((prompt, False), (longest, True))
    *kept, (cut, _) = cut_turns([turn], cutoff_len, strategy, last_first=False, keep_first=keep_first)
    size = len(cut)
    short = [(_end if strategy == "left" else _start)(ids, size) for ids in completions]
    return [token for tokens, _ in kept for token in tokens], short


def _in_budget(turns: Sequence[tuple[Segment, Segment]], budget: int, last_first: bool) -> list[Segment]:
    """Fill the budget turn by turn, until it is used up."""
    kept: list[tuple[Segment, Segment]] = []
    for (prompt, prompt_trained), (completion, completion_trained) in reversed(turns) if last_first else turns:
        if budget <= 0:
            break
        prompt_length, completion_length = share_budget(len(prompt), len(completion), budget)
        with_media = _media_end(prompt)
        if with_media > prompt_length:
            if with_media >= budget:
                break
            prompt_length = with_media
            completion_length = min(completion_length, budget - prompt_length)
        completion = _start(completion, completion_length)
        kept.append(((prompt[:prompt_length], prompt_trained), (completion, completion_trained)))
        budget -= prompt_length + completion_length
    if not kept:
        length = sum(len(tokens) for turn in turns for tokens, _ in turn)
        detail = f"{length} tokens, cutoff_len is {budget}"
        raise LengthError(
            "picture-too-long", "cutoff_len has no room for the images or videos of a turn", detail, length
        )
    return [segment for turn in (reversed(kept) if last_first else kept) for segment in turn]


def _too_long(length: int, cutoff_len: int) -> LengthError:
    return LengthError(TOO_LONG, "longer than cutoff_len", f"{length} tokens, cutoff_len is {cutoff_len}", length)


def _start(tokens: list[int], size: int) -> list[int]:
    """Return at most `size` tokens from the start, without partial images or videos."""
    stop = min(size, len(tokens))
    while _is_in_media(tokens, stop):
        stop -= 1
    return tokens[:stop]


def _end(tokens: list[int], size: int) -> list[int]:
    """Return at most `size` tokens from the end, without partial images or videos."""
    start = max(0, len(tokens) - size)
    while _is_in_media(tokens, start):
        start += 1
    return tokens[start:]


def _media_end(tokens: list[int]) -> int:
    """Return the number of tokens up to the end of the last image or video."""
    if min(tokens, default=0) >= 0:
        return 0
    return next(size for size in range(len(tokens), 0, -1) if tokens[size - 1] < 0)


def _is_in_media(tokens: list[int], place: int) -> bool:
    """Return whether the tokens before and at an index belong to the same image or video."""
    if not 0 < place < len(tokens) or max(tokens[place - 1], tokens[place]) >= 0:
        return False
    return (-1 - tokens[place - 1]) >> _SHIFT == (-1 - tokens[place]) >> _SHIFT
