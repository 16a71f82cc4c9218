"""Log-probabilities and values of workers in several layouts, against Transformers on the same samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS
from worker_kit import RESPONSES, rollouts, settings_of, started, whole

from megatune.config.rl.settings import RLSettings
from megatune.engine import groups
from megatune.families.dense import SCORE
from megatune.rl.samples import Rollouts
from megatune.rl.worker.batching import merge_ranks
from megatune.rl.worker.model import ReferenceWorker
from megatune.rl.worker.policy import PolicyWorker
from megatune.rl.worker.training import ValueWorker

ALL = {**EXPERT_LAYOUTS, **LAYOUTS, **SEQUENCE_LAYOUTS}


def log_probs(kind: type, settings: RLSettings) -> dict[int, np.ndarray]:
    return started(kind, settings).log_probs(rollouts(301))


def of_transformers(model: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    samples, found = rollouts(301), []
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for tokens, prompt in zip(samples.tokens, samples.prompt_lengths, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor(tokens)[None]).logits[0] / 0.7
        labels = torch.tensor(tokens[prompt:])[:, None]
        found.append(logits[prompt - 1 : -1].log_softmax(-1).gather(1, labels)[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("kind", "family", "layout", "tokens"),
    [
        (ReferenceWorker, "qwen3", "tp2 sp", None),
        (ReferenceWorker, "qwen3", "pp2 vpp2", None),
        (PolicyWorker, "qwen3", "cp2, packed", 40),
        (ReferenceWorker, "qwen3_moe", "ep2", 30),
        (ReferenceWorker, "qwen3", "dp2", None),
    ],
)
def test_log_probs_are_those_of_transformers(pool, model_dir, kind, family, layout, tokens):
    model = model_dir(family)
    settings = settings_of(model, ALL[layout], packed_tokens=tokens)
    answers = pool.run(ALL[layout].world_size, log_probs, kind, settings)
    np.testing.assert_allclose(whole(answers, rollouts(301)), of_transformers(model), atol=2e-5)


def values(settings: RLSettings) -> tuple[dict[int, np.ndarray], torch.Tensor, list[float]]:
    """On every rank: values, the score that they are made with, and losses of updates that follow."""
    worker, samples = started(ValueWorker, settings), rollouts(301, returns=1.0)
    (score,) = (one.parameter.data.clone() for one in worker.loaded.parameters if one.weight.engine == SCORE.engine)
    found = worker.values(samples)
    samples.per_token["mask"] = [np.ones(each, np.float32) for each in RESPONSES]
    samples.per_token["values"] = merge_ranks(groups.all_gather_object(found), samples)
    return found, score, [worker.train(samples, step).loss for step in range(4)]


def test_a_value_is_that_of_the_state_before_the_token(pool, model_dir):
    """The score of the critic, which begins at random, read where the token is predicted."""
    from transformers import AutoModelForCausalLM

    model, layout = model_dir("qwen3"), ALL["tp2 sp"]
    settings = settings_of(model, layout, "critic", stage="rm", batch=(7, 1), optimizer={"learning_rate": 3e-4})
    answers = pool.run(2, values, settings)
    samples, (_, score, losses) = rollouts(301), answers[0]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = []
    for tokens, prompt in zip(samples.tokens, samples.prompt_lengths, strict=True):
        with torch.no_grad():
            hidden = reference.model(torch.tensor(tokens)[None]).last_hidden_state[0]
        expected.append((hidden[prompt - 1 : -1] @ score[0]).numpy())
    found = whole([answer for answer, *_ in answers], samples)
    np.testing.assert_allclose(found, np.concatenate(expected), atol=2e-5)
    assert np.abs(found).max() > 1e-3
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0], losses


def around_an_update(settings: RLSettings) -> tuple[dict[str, float], list[dict[int, np.ndarray]]]:
    """On every rank: metrics of an update whose old log-probabilities are the worker's own, and those of the model
    before, of the model below the adapters, and of both after it."""
    worker, samples = started(PolicyWorker, settings), rollouts(301, advantages=1.0)
    before = [worker.log_probs(samples), worker.reference_log_probs(samples)]
    ones = [np.ones(each, np.float32) for each in RESPONSES]
    old = merge_ranks(groups.all_gather_object(before[0]), samples)
    samples.per_token.update(mask=ones, weights=ones, old_log_probs=old)
    metrics = dict(worker.train(samples, 0).metrics)
    return metrics, [*before, worker.log_probs(samples), worker.reference_log_probs(samples)]


def test_the_reference_of_adapters_is_the_model_below_them(pool, model_dir):
    """And the first update of a step has a ratio of 1: values lie at the tokens that they were computed of."""
    model, layout, algorithm = model_dir("qwen3"), ALL["tp2 sp, packed"], {"enable_old_logprobs_recompute": True}
    settings = settings_of(model, layout, lora={}, batch=(7, 1), packed_tokens=60, algorithm=algorithm)
    found = pool.run(2, around_an_update, settings)
    metrics = found[0][0]
    assert metrics["actor/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["actor/approxkl"] == pytest.approx(0, abs=1e-6)
    before, base_before, after, base_after = (
        whole(each, rollouts(301)) for each in zip(*(one for _, one in found), strict=True)
    )
    assert np.abs(after - base_after).max() > 1e-3
    for values in (before, base_before, base_after):
        np.testing.assert_allclose(values, of_transformers(model), atol=2e-5)


def streamed(settings: RLSettings) -> tuple[dict[int, np.ndarray], dict[str, torch.Tensor]]:
    """On every rank, after an update: log-probabilities, and what engines get."""
    worker, samples = started(PolicyWorker, settings), rollouts(301, advantages=1.0, rollout_log_probs=1.0)
    ones = [np.ones(each, np.float32) for each in RESPONSES]
    samples.per_token.update(mask=ones, weights=ones)
    worker.train(samples, 0)
    buckets = [{name: tensor.clone() for name, tensor in bucket.items()} for bucket in worker.weights()]
    return worker.log_probs(samples), {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def test_engines_get_the_quantized_base_that_is_trained(pool, model_dir, tmp_path):
    """QLoRA: values of 4 bits with the adapters merged into them, and not the model's own."""
    from transformers import AutoModelForCausalLM

    model = model_dir("qwen3")
    found = pool.run(2, streamed, settings_of(model, ALL["tp2 sp"], lora={"quantization_bit": 4}, batch=(7, 1)))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert not reference.load_state_dict(found[0][1], strict=False).unexpected_keys
    reference.save_pretrained(tmp_path)
    expected = of_transformers(tmp_path)
    np.testing.assert_allclose(whole([own for own, _ in found], rollouts(301)), expected, atol=2e-5)
    assert np.abs(expected - of_transformers(model)).max() > 1e-2


def of_turns() -> Rollouts:
    """Samples whose responses have an observation in them, but the short ones; old log-probabilities come later."""
    made = rollouts(301)
    observed = [((length // 3, length // 2),) if length > 3 else () for length in RESPONSES]
    spans = zip(RESPONSES, observed, strict=True)
    sizes = [length - sum(stop - start for start, stop in own) for length, own in spans]
    random = np.random.default_rng(1)
    ones = [np.ones(size, np.float32) for size in sizes]
    advantages, rollout = (
        [random.normal(mean, width, size).astype(np.float32) for size in sizes] for mean, width in ((0, 1), (-6, 0.5))
    )
    return Rollouts(
        made.tokens,
        made.prompt_lengths,
        {"mask": ones, "weights": ones, "advantages": advantages, "rollout_log_probs": rollout},
        observed=observed,
    )


def an_update_of_turns(settings: RLSettings) -> tuple[dict[int, np.ndarray], float]:
    """On every rank: log-probabilities of what was sampled, and the norm of a gradient."""
    worker, samples = started(PolicyWorker, settings), of_turns()
    found = worker.log_probs(samples)
    samples.per_token["old_log_probs"] = merge_ranks(groups.all_gather_object(found), samples)
    return found, worker.train(samples, 0).grad_norm


@pytest.mark.parametrize(
    ("layout", "tokens", "weight_type"),
    [("cp2, packed", 60, None), ("tp2 sp", None, None), ("cp2, packed", 60, "segment"), ("tp2 sp", None, "segment")],
)
def test_turns_are_trained_as_transformers_trains_them(pool, model_dir, layout, tokens, weight_type):
    """The ratio is 1, so that the gradient is that of -Σ weight · advantage · log-probability / tokens. Observations
    are read, and have no part in the sum; the weight is of a turn."""
    from transformers import AutoModelForCausalLM

    model, samples = model_dir("qwen3"), of_turns()
    algorithm = {"enable_old_logprobs_recompute": weight_type is None, "loss_agg_mode": "token-mean"}
    if weight_type is not None:
        weights = {"enabled": True, "weight_type": weight_type, "upper_bound": None}
        algorithm["train_infer_correction"] = {"is_weight": weights}
    settings = settings_of(model, ALL[layout], batch=(7, 1), packed_tokens=tokens, algorithm=algorithm)
    found = pool.run(2, an_update_of_turns, settings)
    reference, loss, expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), torch.zeros(()), []
    for place, text in enumerate(samples.tokens):
        at = torch.from_numpy(samples.sampled(place))
        logits = reference(torch.tensor(text)[None]).logits[0] / 0.7
        own = logits[at - 1].log_softmax(-1).gather(1, torch.tensor(text)[at][:, None])[:, 0]
        expected.append(own.detach().numpy())
        weights = torch.ones(len(own))
        if weight_type is not None:
            log_ratio = own.detach() - torch.from_numpy(samples.per_token["rollout_log_probs"][place])
            turns = log_ratio.tensor_split((at.diff() > 1).nonzero()[:, 0] + 1)
            weights = torch.cat([turn.mean().exp().expand_as(turn) for turn in turns])
        loss = loss - (weights * own * torch.from_numpy(samples.per_token["advantages"][place])).sum()
    (loss / sum(map(len, expected))).backward()
    norm = torch.stack([each.grad.norm() for each in reference.parameters() if each.grad is not None]).norm()
    np.testing.assert_allclose(whole([own for own, _ in found], samples), np.concatenate(expected), atol=2e-5)
    assert found[0][1] == pytest.approx(float(norm), rel=1e-5)
