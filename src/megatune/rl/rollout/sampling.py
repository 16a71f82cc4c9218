"""One token for each of many responses, each by a random number of its own.

A response's random numbers are a function of its seed and of the token's index, so that it is the same whatever is
sampled beside it, and goes on as it would have where it was stopped.

Legend: n rows, v vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BLOCK = 128  # of the vocabulary: sums of blocks find the block, and the block the token
_BELOW_ONE = 1 - 1e-12


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return fp64 [count] in [0, 1): the random numbers of a response's tokens."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


@dataclass(frozen=True, slots=True)
class Draw:
    """How the next token of a row is chosen.

    Attributes:
        uniform: in [0, 1).
        temperature: 0 takes the likeliest token.
        top_k: 0: off.
        penalized: ids of the row so far, where it has a repetition penalty.
    """

    uniform: float
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    penalized: Sequence[int] = ()

    @property
    def is_cut(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def sample(logits: Tensor, draws: Sequence[Draw], never: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a token of each row.

    Args:
        logits: [n, v].
        never: int64, ids that are not chosen.

    Returns:
        The tokens, int64 [n], and their log-probabilities, fp32 [n]: at the temperature of the row, of all tokens:
        before repetition penalty, top_k and top_p.
    """
    device = logits.device
    temperatures = torch.tensor([draw.temperature or 1.0 for draw in draws], device=device)
    scaled = logits.float() / temperatures[:, None]
    allowed = scaled
    if len(never) or any(draw.repetition_penalty != 1 for draw in draws):
        allowed = _penalized(scaled.clone(), draws)
        allowed[:, never] = -torch.inf
    targets = torch.tensor([draw.uniform * _BELOW_ONE for draw in draws], dtype=torch.float64, device=device)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    log_sums: Tensor | None = None
    kinds = [0 if draw.temperature == 0 else 2 if draw.is_cut else 1 for draw in draws]
    for kind in set(kinds):
        rows = torch.tensor([row for row, each in enumerate(kinds) if each == kind], device=device)
        everything = len(rows) == len(draws)
        chosen = allowed if everything else allowed[rows]
        if kind == 0:
            tokens[rows] = chosen.argmax(-1)
        elif kind == 1:
            picked, sums = _from_all(chosen, targets[rows])
            tokens[rows] = picked
            log_sums = sums if everything and allowed is scaled else None
        else:
            tokens[rows] = _from_cut(chosen, targets[rows], [draws[row] for row in rows.tolist()])
    if log_sums is None:
        log_sums = scaled.logsumexp(-1)
    return tokens, scaled.gather(1, tokens[:, None])[:, 0] - log_sums


def _penalized(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Divide positive logits of tokens that have occurred, and multiply negative ones, as Transformers does."""
    for row, draw in enumerate(draws):
        if draw.repetition_penalty != 1 and len(draw.penalized):
            ids = torch.as_tensor(draw.penalized, device=logits.device).unique()
            held = logits[row, ids]
            logits[row, ids] = torch.where(held > 0, held / draw.repetition_penalty, held * draw.repetition_penalty)
    return logits


def _from_all(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens at which the distribution function passes the targets, and log(sum(exp(logits))) in fp32."""
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    count, size = weights.shape
    if size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % _BLOCK))
    blocks = weights.view(count, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = sums[:, -1]
    wanted = targets * total
    block = _first_above(sums, wanted)
    rows = torch.arange(count, device=logits.device)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[rows, block].double().cumsum(-1)
    token = _first_above(inside, torch.minimum(wanted - before, inside[:, -1] * _BELOW_ONE))
    return block * _BLOCK + token, (total.log() + highest[:, 0]).float()


def _from_cut(logits: Tensor, targets: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return tokens of the top_k likeliest, of which the likeliest that reach top_p together are left."""
    size = logits.shape[1]
    counts = torch.tensor([min(draw.top_k or size, size) for draw in draws], device=logits.device)
    held, ids = logits.topk(int(counts.max()), dim=-1)  # in order
    places = torch.arange(held.shape[1], device=logits.device)
    weights = (held - held[:, :1]).double().exp().masked_fill_(places >= counts[:, None], 0.0)
    cumulated = weights.cumsum(-1)
    limits = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=logits.device)
    dropped = cumulated - weights >= limits[:, None] * cumulated[:, -1:]
    dropped[:, 0] = False
    cumulated = weights.masked_fill_(dropped, 0.0).cumsum(-1)
    return ids.gather(1, _first_above(cumulated, targets * cumulated[:, -1])[:, None])[:, 0]


def _first_above(cumulated: Tensor, wanted: Tensor) -> Tensor:
    """Return the first index of each row [n, k] whose value is above the row's wanted one: its weight is not 0."""
    return torch.searchsorted(cumulated, wanted[:, None], right=True)[:, 0].clamp_(max=cumulated.shape[1] - 1)
