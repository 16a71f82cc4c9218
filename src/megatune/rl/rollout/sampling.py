"""Sampling in the built-in engine: the next tokens and their log-probabilities, excluded tokens, and recorded experts.

A response's random numbers are a function of its seed and the token's index, so that it does not depend on what else is
sampled, and a stopped response continues as it would have.

Legend: n rows, v vocabulary, c rows with top_k or top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.stopping import stop_ids
from megatune.rl.samples import Request

_BELOW_ONE = 1 - 1e-12


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return the random numbers of a response's tokens: fp64 [count] in [0, 1)."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


def sample(
    logits: Tensor, requests: Sequence[Request], drawn: Sequence[float], seen: Sequence[Sequence[int]], never: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row.

    Args:
        logits: [n, v].
        drawn: a random number in [0, 1) per row.
        seen: the tokens of each row so far, for its repetition penalty.
        never: ids of excluded tokens, int64.

    Returns:
        The tokens, int64 [n], and their log-probabilities, fp32 [n]: at the row's temperature, over all tokens, before
        repetition penalty, top_k and top_p.
    """
    device = logits.device
    temperatures = torch.tensor([each.temperature or 1.0 for each in requests], device=device)
    scaled = logits.float() / temperatures[:, None]
    allowed = _apply_repetition_penalty(scaled, requests, seen)
    allowed[:, never] = -torch.inf
    if cut := [row for row, each in enumerate(requests) if each.temperature > 0 and (each.top_k or each.top_p < 1)]:
        allowed[cut] = _apply_top_k_top_p(allowed[cut], [requests[row] for row in cut])
    cumulated = (allowed - allowed.amax(-1, keepdim=True)).exp_().cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(drawn, dtype=torch.float64, device=device)[:, None] * _BELOW_ONE * cumulated[:, -1:]
    # The first token at which the cumulative distribution exceeds the target; its weight is not 0.
    tokens = torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    greedy = torch.tensor([each.temperature == 0 for each in requests], device=device)
    tokens = torch.where(greedy, allowed.argmax(-1), tokens)
    return tokens, scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)


def _apply_repetition_penalty(logits: Tensor, requests: Sequence[Request], seen: Sequence[Sequence[int]]) -> Tensor:
    """Return a copy in which positive logits of seen tokens are divided by the penalty and negative ones multiplied by
    it, as in Transformers."""
    logits = logits.clone()
    for row, request in enumerate(requests):
        if request.repetition_penalty != 1:
            ids = torch.tensor(sorted(set(seen[row])), device=logits.device)
            held, penalty = logits[row, ids], request.repetition_penalty
            logits[row, ids] = torch.where(held > 0, held / penalty, held * penalty)
    return logits


def _apply_top_k_top_p(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Keep the top_k most likely tokens of rows [c, v], and of these the most likely that reach top_p together."""
    size = logits.shape[1]
    counts = torch.tensor([each.top_k or size for each in requests], device=logits.device)
    limits = torch.tensor([each.top_p for each in requests], device=logits.device)
    ranked, ids = logits.sort(-1, descending=True)
    ranked = ranked.masked_fill(torch.arange(size, device=logits.device) >= counts[:, None], -torch.inf)
    shares = ranked.softmax(-1)
    ranked[:, 1:].masked_fill_((shares.cumsum(-1) - shares >= limits[:, None])[:, 1:], -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ranked)


def never_sampled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Return the ids that are never sampled: padding, placeholders of images and videos, and rows of the embedding that
    the tokenizer does not have."""
    config = model.config.get_text_config()
    marks = {config.pad_token_id, *(getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video"))}
    unknown = range(0)
    if tokenizer is not None:
        marks.add(tokenizer.pad_token_id)
        unknown = range(len(tokenizer), config.vocab_size)
    marks -= {None, *stop_ids(model.generation_config)}
    ids = {*unknown, *(each for each in marks if 0 <= each < config.vocab_size)}
    return torch.tensor(sorted(ids), dtype=torch.int64)


class RoutingRecorder:
    """Records the experts that each layer chose in the last forward pass.

    Raises:
        MegatuneError: INPUT, if the model has no experts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers: Any = model.get_decoder().layers
        self._num_layers, self._chosen = len(layers), dict[int, Tensor]()
        found = False
        for number, layer in enumerate(layers):
            for module in layer.modules():
                # In every family, this module has the matrices of all experts in one parameter.
                if getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3:
                    module.register_forward_pre_hook(partial(self._keep, number))
                    found = True
        if not found:
            why = f"{model.config.model_type} has no experts"
            finding = Finding("router_replay has nothing to replay", "actor_train", why, "remove router_replay")
            raise MegatuneError(finding, ExitCode.INPUT)

    def _keep(self, layer: int, module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Store the second argument of an experts module, called with (tokens, experts [tokens, k], weights)."""
        self._chosen[layer] = arguments[1]

    def take(self, rows: int) -> np.ndarray:
        """Return the experts of each token: int16 [rows, tokens, layers, k], -1 in layers without experts."""
        some = next(iter(self._chosen.values()))
        nowhere = torch.full_like(some, -1)
        found = torch.stack([self._chosen.get(layer, nowhere) for layer in range(self._num_layers)], 1)
        return found.view(rows, -1, *found.shape[1:]).to(torch.int16).cpu().numpy()
