"""What settings of a role and of its algorithm change in its updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS
from worker_kit import PROMPTS, RESPONSES, TEMPERATURE, rollouts, settings_of, started, whole

from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RouterReplay, SequencePacking
from megatune.config.rl.settings import RLSettings
from megatune.objectives.policy.losses import Terms, token_losses
from megatune.rl.samples import Rollouts
from megatune.rl.worker.policy import PolicyWorker
from megatune.rl.worker.training import TrainResult

ALL = {**EXPERT_LAYOUTS, **SEQUENCE_LAYOUTS, **LAYOUTS}
TOKENS = sum(PROMPTS) + sum(RESPONSES)
ALGORITHM = {"adv_estimator": "grpo", "enable_old_logprobs_recompute": True, "loss_agg_mode": "token-mean"}
SCORES = np.array([1, 0, 0, 1, 0, 1, 0], np.float32)


class Counting(PolicyWorker):
    """Notes how many micro-batches each pass has."""

    def _batches(self, *args: Any) -> list[Any]:
        found = super()._batches(*args)
        self.counts = [*getattr(self, "counts", []), len(found)]
        return found


def samples_of() -> Rollouts:
    made = rollouts(301, advantages=1.0, old_log_probs=0.1)
    near = [np.full(len(each), -np.log(301), np.float32) + each for each in made.per_token["old_log_probs"]]
    ones = [np.ones(len(each), np.float32) for each in near]
    values = {**made.per_token, "old_log_probs": near, "rollout_log_probs": near, "mask": ones, "weights": ones}
    return Rollouts(made.tokens, made.prompt_lengths, values, {"scores": SCORES})


def tried(settings: RLSettings) -> tuple[np.ndarray, TrainResult, list[int], int]:
    """On one rank: log-probabilities before an update, the update, micro-batches of both, and all updates."""
    worker = started(Counting, settings)
    before = whole([worker.log_probs(samples_of())], samples_of())
    trained = worker.train(samples_of(), 0)
    return before, trained, worker.counts, worker.state.updates


def expected(variant: Any, log_probs: np.ndarray, negative: float = 1.0) -> float:
    """Return the mean over tokens of the losses that pg_variant names, as pure functions have them."""
    samples = samples_of()
    old, advantages = (np.concatenate(samples.per_token[name]) for name in ("old_log_probs", "advantages"))
    positive = np.repeat(SCORES > 0, RESPONSES)
    terms = Terms(*map(torch.from_numpy, (log_probs, log_probs - old, advantages, positive)))
    return float(token_losses(variant, terms, AlgorithmSettings(**ALGORITHM), 1.0, negative).mean())


def test_what_settings_change(pool, model_dir):
    model, whole_batch = model_dir("qwen3"), {"batch": (7, 1), "optimizer": {"optimizer": "sgd", "learning_rate": 0.1}}

    def of(algorithm: dict[str, Any] | None = None, **role: Any) -> RLSettings:
        return settings_of(model, ALL["1"], algorithm={**ALGORITHM, **(algorithm or {})}, **whole_batch, **role)

    fewest = SequencePacking(min_num_micro_batches_train=5, min_num_micro_batches_forward=6)
    asked = {
        "plain": of(),
        "twice": of({"ppo_epochs": 2}),
        "louder": of({"rl_loss_coef": 2.0}),
        "tis": of(pg_variant="tis"),
        "topr": of(pg_variant="topr", topr_negative_weight=0.25),
        "by tokens": of(dynamic_tokens_train=40, dynamic_tokens_forward=30),
        "many": of(packed_tokens=100, sequence_packing_args=fewest),
    }
    found = {name: pool.run(1, tried, settings)[0] for name, settings in asked.items()}
    log_probs, plain, counts, _ = found["plain"]
    assert counts == [4, 1]  # rows of two, and of seven
    _, twice, _, updates = found["twice"]
    assert (twice.updates, updates, twice.num_tokens) == (2, 2, 2 * plain.num_tokens)
    louder = found["louder"][1]
    assert (louder.loss, louder.grad_norm) == pytest.approx((2 * plain.loss, 2 * plain.grad_norm), rel=1e-5)
    for name, variant, negative in (("plain", None, 1.0), ("tis", "tis", 1.0), ("topr", "topr", 0.25)):
        loss = expected(variant, log_probs, negative)
        assert found[name][1].metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4), name
    assert len({round(found[name][1].loss, 4) for name in ("plain", "tis", "topr")}) == 3
    # However samples lie together, they are computed alike.
    for name, least in (("by tokens", (-(-TOKENS // 30), -(-TOKENS // 40))), ("many", (6, 5))):
        others, trained, counts, _ = found[name]
        assert all(count >= low for count, low in zip(counts, least, strict=True)), (name, counts)
        np.testing.assert_allclose(others, log_probs, atol=2e-5)
        assert (trained.loss, trained.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=1e-4)


def experts_of(samples: Rollouts, layers: int, experts: int, k: int) -> list[np.ndarray]:
    """Choose experts at random: int16 [tokens - 1, layers, k]."""
    random = np.random.default_rng(5)
    return [
        np.argsort(random.random((len(tokens) - 1, layers, experts)))[..., :k].astype(np.int16)
        for tokens in samples.tokens
    ]


def replayed(settings: RLSettings, sizes: tuple[int, int, int]) -> tuple[dict[int, np.ndarray], TrainResult]:
    """On every rank."""
    worker, samples = started(PolicyWorker, settings), samples_of()
    with pytest.raises(ValueError, match="returned no routing"):
        worker.log_probs(samples)
    samples = Rollouts(
        samples.tokens, samples.prompt_lengths, samples.per_token, samples.per_sample, experts_of(samples, *sizes)
    )
    return worker.log_probs(samples), worker.train(samples, 0)


def of_transformers(model: Path, sizes: tuple[int, int, int]) -> np.ndarray:
    """Compute log-probabilities with the experts that are replayed; the last token, which is computed by no engine,
    has none of a response's."""
    from transformers import AutoModelForCausalLM

    samples, found = samples_of(), []
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chosen: list[torch.Tensor] = [torch.zeros(0)]

    def replaced(layer: int, block: Any) -> Any:
        def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, experts = arguments[0], chosen[0][:, layer]
            weights = (hidden @ block.gate.weight.T).float().softmax(-1).gather(1, experts)
            if reference.config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return hidden, experts, weights

        return hook

    for layer, each in enumerate(reference.model.layers):
        if hasattr(each.mlp, "experts"):  # others are dense
            each.mlp.experts.register_forward_pre_hook(replaced(layer, each.mlp))
    for tokens, prompt, experts in zip(
        samples.tokens, samples.prompt_lengths, experts_of(samples, *sizes), strict=True
    ):
        chosen[0] = torch.from_numpy(experts.astype(np.int64))
        with torch.no_grad():
            logits = reference(torch.tensor(tokens[:-1])[None]).logits[0] / TEMPERATURE
        labels = torch.tensor(tokens[prompt:])[:, None]
        found.append(logits[prompt - 1 :].log_softmax(-1).gather(1, labels)[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.extended("pp2 vpp2")
@pytest.mark.parametrize("layout", ["ep2", "pp2 vpp2"])
def test_experts_are_replayed_layer_by_layer(pool, model_dir, layout):
    from transformers import AutoConfig

    model = model_dir("qwen3_moe")
    config = AutoConfig.from_pretrained(model)
    sizes = (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
    settings = settings_of(
        model, ALL[layout], algorithm=ALGORITHM, batch=(7, 1), packed_tokens=60, router_replay=RouterReplay(mode="R3")
    )
    answers = pool.run(ALL[layout].world_size, replayed, settings, sizes)
    before, trained = whole([each for each, _ in answers], samples_of()), answers[0][1]
    reference = of_transformers(model, sizes)
    np.testing.assert_allclose(before, reference, atol=2e-5)
    # Training takes the same experts: its ratios are those of the log-probabilities above.
    ratios = np.exp(reference - np.concatenate(samples_of().per_token["old_log_probs"]))
    assert trained.metrics["actor/ratio_mean"] == pytest.approx(float(ratios.mean()), rel=1e-4)
