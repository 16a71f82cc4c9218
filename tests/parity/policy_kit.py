"""Responses with random advantages and log-probabilities, what the engine makes of them in a layout, and what plain
Transformers does. Values of tokens are of the response, [r]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs_kit import gradients_of
from torch import Tensor

from megatune.bridge.assemble import Assembly, assemble
from megatune.bridge.shard_files import save_gradients
from megatune.config.settings import Settings
from megatune.data.batches import Batch, Collator
from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn
from megatune.engine import groups, step
from megatune.engine.optimizer import main_shards
from megatune.engine.sequences import ROUTING
from megatune.objectives.policy.objective import PolicyObjective, ValueObjective

PROMPTS, RESPONSES = (7, 3, 12, 5, 9, 4, 6), (9, 14, 3, 8, 5, 17, 2)
PACKED_ROWS = ((0, 1, 2), (3,), (4, 5), (6,))


@dataclass(frozen=True)
class Response:
    """Tokens of prompt and response, and values of the response's tokens by name."""

    tokens: np.ndarray
    prompt: int
    values: dict[str, np.ndarray]
    score: float = 0.0
    routing: np.ndarray | None = None

    @property
    def trained(self) -> slice:
        """Where tokens of the response are predicted."""
        return slice(self.prompt - 1, len(self.tokens) - 1)

    def column(self, name: str) -> np.ndarray:
        values = np.zeros(len(self.tokens), np.float32)
        values[self.trained] = self.values[name]
        return values


@dataclass(frozen=True)
class Case:
    """What all ranks compute."""

    model: Path
    settings: Settings
    responses: Sequence[Response]
    objective: PolicyObjective | ValueObjective
    micro_batch_size: int = 1


def random_tokens(vocab_size: int) -> list[tuple[int, np.ndarray]]:
    generator = np.random.default_rng(5)
    return [(p, generator.integers(0, vocab_size, p + r)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def batches_of(case: Case, assembly: Assembly) -> list[Batch]:
    """This data-parallel rank's micro-batches, of one length; places beyond the rows hold padding."""
    coords, parallel = assembly.coords, case.settings.parallel
    packed, size = case.settings.packing, case.micro_batch_size
    rows = PACKED_ROWS if packed else [(number,) for number in range(len(case.responses))]
    collator = Collator(size, packed, parallel.sequence_multiple, parallel.document_multiple, 0)
    round_size = coords.dp_size * (parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1)
    num_batches = math.ceil(len(rows) / (size * round_size)) * round_size
    chosen = [
        [case.responses[number] for row in rows[index * size : (index + 1) * size] for number in row]
        for index in range(num_batches)
    ]
    length = max(collator.length([len(each.tokens) for each in of_batch]) for of_batch in chosen)
    batches = [_batch(collator, of_batch, length, case.objective) for of_batch in chosen]
    return batches[coords.dp_rank :: coords.dp_size]


def _batch(collator: Collator, responses: list[Response], length: int, objective: Any) -> Batch:
    documents = []
    for each in responses:
        labels = np.where(np.arange(len(each.tokens)) < each.prompt, IGNORE_INDEX, each.tokens)
        documents.append(Document(each.tokens.astype(np.int32), labels.astype(np.int32)))
    columns = {
        name: ExtraColumn(
            "token", np.concatenate([np.zeros(0, np.float32), *(each.column(name) for each in responses)])
        )
        for name in objective.token_extras
    }
    for name in getattr(objective, "document_extras", ()):
        columns[name] = ExtraColumn("document", np.array([each.score for each in responses], np.float32))
    if routing := [each.routing for each in responses if each.routing is not None]:
        columns[ROUTING] = ExtraColumn("token", np.concatenate(routing))
    return collator(documents, length, columns)


def compute(case: Case, folder: Path) -> tuple[float, dict[str, float]]:
    """On every rank: loss and metrics; gradients are written."""
    assembly = assemble(case.model, case.settings)
    totals = step.forward_backward(assembly.model, batches_of(case, assembly), case.objective)
    shards = main_shards(assembly.optimizer)
    save_gradients(folder, assembly.parameters, shards, assembly.architecture, assembly.coords)
    groups.barrier()
    return totals.loss, totals.metrics


def distributions(model: Any, response: Response, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the response's tokens and entropies, [r], with gradient."""
    if response.routing is not None:
        replay(model, torch.from_numpy(response.routing).long())
    logits = model(input_ids=torch.tensor(response.tokens)[None]).logits[0, response.trained] / temperature
    every = logits.log_softmax(-1)
    labels = torch.tensor(response.tokens[response.prompt :])
    return every.gather(-1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return gradients_of(model, None)


def choose_at_random(config: Any, responses: Sequence[Response]) -> list[Response]:
    """Add choices of experts that no router makes, of all tokens but every fifth, as ROUTING has them."""
    generator, found = np.random.default_rng(9), []
    num_experts = getattr(config, "num_experts", None) or config.n_routed_experts
    for each in responses:
        shape = len(each.tokens), config.num_hidden_layers, num_experts
        chosen = generator.random(shape).argsort(-1)[..., : config.num_experts_per_tok] + 1
        chosen[::5] = 0
        found.append(replace(each, routing=chosen.astype(np.int16)))
    return found


def replay(model: Any, chosen: Tensor) -> None:
    """Let the routers of Transformers' model take these experts of one response, [p + r, layers, k], where there are
    some."""
    config = model.config

    def forward(hidden_states: Tensor, gate: Any, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, own = type(gate).forward(gate, hidden_states)
        experts = torch.where(chosen[:, layer] > 0, chosen[:, layer] - 1, own)
        scores = logits.sigmoid() if config.model_type == "deepseek_v3" else logits.softmax(-1)
        weights = scores.gather(1, experts)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(config, "routed_scaling_factor", 1.0), experts

    for layer, each in enumerate(model.model.layers):
        if gate := getattr(each.mlp, "gate", None):
            gate.forward = partial(forward, gate=gate, layer=layer)
