"""The built-in rollout engine: its samples, its log-probabilities, its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import InferRole
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.rl.rollout.builtin import BuiltinEngine
from megatune.rl.rollout.checks import INSTRUCTION_TOKENS
from megatune.rl.rollout.mismatch import Mismatch, check_mismatch, is_inlier, mismatch_of
from megatune.rl.rollout.sampling import sample
from megatune.rl.samples import Request, Response
from megatune.rl.transport import Route, Sender

CONTEXT = 64


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return make_checkpoint("qwen3", folder, num_layers=2, hidden_size=32, tie_word_embeddings=True, seed=1)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    return make_checkpoint("mixtral", folder, num_layers=2, hidden_size=32, seed=1)


def load(folder: Path, max_running: int = 4, *, return_routing: bool = False) -> BuiltinEngine:
    role = InferRole(device_mapping=[0], model_name_or_path=str(folder), dtype="fp32", return_routing=return_routing)
    return BuiltinEngine(role, max_running=max_running, context=CONTEXT)


def drained(engine: BuiltinEngine, requests: Sequence[Request]) -> dict[str, Response]:
    engine.submit(requests)
    found: dict[str, Response] = {}
    while len(found) < len(requests):
        found |= {response.id: response for response in engine.step()}
    return found


def give(engine: BuiltinEngine, *buckets: dict[str, torch.Tensor]) -> None:
    sender = Sender(Route("file"), torch.device("cpu"))
    for bucket in buckets:
        engine.update(sender.pack(bucket))


def some_requests(count: int = 9) -> list[Request]:
    """Of several lengths, two of a prompt each, sampled in all ways."""
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(5, 200, size) for size in (1, 7, 12, 3, 20)]
    ways = [{}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.0}, {"repetition_penalty": 1.3}]
    return [
        Request(str(each), prompts[each // 2], seed=each, max_new_tokens=4 + 2 * each, **ways[each % len(ways)])
        for each in range(count)
    ]


def reference(folder: Path, request: Request, response: Response) -> np.ndarray:
    """Log-probabilities [r] by a plain forward pass of Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(np.concatenate([request.prompt_ids, response.response_ids]))
    with torch.no_grad():
        logits = model(ids[None]).logits[0] / (request.temperature or 1.0)
    start = len(request.prompt_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0].numpy()


def measured(trainer: list[np.ndarray], rollout: list[np.ndarray], dtype: str) -> Mismatch:
    found = mismatch_of(trainer, rollout, dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_log_probs_and_independence(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    requests = some_requests()
    together, alone = drained(load(folder), requests), drained(load(folder, max_running=1), requests[::-1])
    for each in requests:
        response = together[each.id]
        np.testing.assert_array_equal(response.response_ids, alone[each.id].response_ids)
        found = measured([reference(folder, each, response)], [response.log_probs], "fp32")
        check_mismatch(found, "fp32", 0)
        assert (found.tokens, found.outliers) == (len(response.response_ids), 0)


def test_it_says_which_experts_it_took(dense: Path, experts: Path) -> None:
    requests = some_requests()
    found = drained(load(experts, return_routing=True), requests)
    model = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32).eval()
    for each in requests:
        ids = torch.tensor(np.concatenate([each.prompt_ids, found[each.id].response_ids]))[None, :-1]
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        chosen = torch.stack([of_layer.topk(model.config.num_experts_per_tok, -1).indices for of_layer in logits], 1)
        np.testing.assert_array_equal(found[each.id].routing, chosen.numpy())
    with pytest.raises(MegatuneError, match="no experts"):
        load(dense, return_routing=True)


def test_ends_and_partial_rollouts(dense: Path) -> None:
    whole = Request("a", np.arange(5, 12), seed=3, max_new_tokens=24)
    engine = load(dense)
    expected = drained(engine, [whole])["a"]
    third = int(expected.response_ids[2])
    stopped = drained(engine, [replace(whole, stop_token_ids=(third,))])["a"]
    assert stopped.finish == "stop"
    assert (
        stopped.response_ids.tolist()
        == expected.response_ids[: expected.response_ids.tolist().index(third) + 1].tolist()
    )
    # Aborted somewhere, the rest goes on as it would have, and says which version of the weights sampled it.
    engine.submit([whole, replace(whole, id="b", seed=4)])
    for _ in range(5):
        assert not engine.step()
    parts = {part.id: part for part in engine.abort()}
    part = parts["a"]
    assert part.finish == "abort"
    assert part.response_ids.tolist() == expected.response_ids[:5].tolist()
    engine.begin_update(7, len(load_file(dense / "model.safetensors")))
    give(engine, load_file(dense / "model.safetensors"))
    engine.commit_update(7)
    rest = replace(whole, response_ids=part.response_ids, log_probs=part.log_probs, versions=part.versions)
    response = drained(engine, [rest])["a"]
    np.testing.assert_array_equal(response.response_ids, expected.response_ids)
    np.testing.assert_allclose(response.log_probs, expected.log_probs, atol=1e-5)
    assert response.versions == ((0, 0), (5, 7))


def test_stop_strings(dense: Path) -> None:
    engine = load(dense)
    request = Request("a", np.arange(5, 12), seed=3, max_new_tokens=24)
    ids = drained(engine, [request])["a"].response_ids
    tokenizer = engine._tokenizer
    assert tokenizer is not None
    word = next(text for each in ids[2:] if (text := tokenizer.decode([each])).isascii() and len(text) > 1)
    stopped = drained(engine, [replace(request, stop_strings=(word,))])["a"]
    assert stopped.finish == "stop"
    assert tokenizer.decode(stopped.response_ids).count(word) == 1
    assert tokenizer.decode(stopped.response_ids[:-1]).count(word) == 0


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_updates(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(kind)
    family = "qwen3" if kind == "dense" else "mixtral"
    other = make_checkpoint(
        family, tmp_path / "other", num_layers=2, hidden_size=32, seed=2, tie_word_embeddings=kind == "dense"
    )
    weights = load_file(other / "model.safetensors")
    engine, requests = load(folder), some_requests(3)
    with mock.patch("torch.cuda.empty_cache") as given_back:
        engine.sleep(2)
    given_back.assert_called_once()  # a GPU's memory, to the trainer's processes
    with pytest.raises(MegatuneError, match="it sleeps"):
        engine.submit(requests)
    engine.wake("weights")
    with pytest.raises(MegatuneError, match="it sleeps"):
        engine.submit(requests)
    engine.begin_update(1, len(weights))
    give(engine, *({name: tensor} for name, tensor in weights.items()))
    engine.wake("cache")
    with pytest.raises(MegatuneError, match="no complete update has arrived"):
        engine.submit(requests)
    engine.commit_update(1)
    assert engine.version == 1
    expected = drained(load(other), requests)
    for id_, response in drained(engine, requests).items():
        np.testing.assert_array_equal(response.response_ids, expected[id_].response_ids)
        np.testing.assert_allclose(response.log_probs, expected[id_].log_probs, atol=1e-5)


def test_broken_updates_are_named(dense: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = [
        (
            {key: value for key, value in weights.items() if key != name},
            f"1 of {len(weights)} tensors did not arrive: {name}",
        ),
        (weights | {name: weights[name].T.contiguous()}, f"{name} has shape "),
        (weights | {"lm_head.bias": torch.zeros(1)}, "lm_head.bias is not a tensor of this model"),
    ]
    engine = load(dense)
    for bucket, problem in cases:
        engine.begin_update(1, len(weights))
        give(engine, bucket)
        with pytest.raises(MegatuneError, match=problem) as raised:
            engine.commit_update(1)
        assert raised.value.exit_code == ExitCode.INTERNAL
        assert engine.version == -1


def test_a_stale_engine_is_caught(dense: Path) -> None:
    request = Request("a", np.arange(5, 12), seed=3, max_new_tokens=24)
    response = drained(load(dense), [request])["a"]
    stale = reference(dense, request, response)
    stale[4] += 0.3
    with pytest.raises(MegatuneError, match=r"differ by 0\.00625 on average over 48 tokens") as raised:
        check_mismatch(measured([response.log_probs, stale], [response.log_probs] * 2, "fp32"), "fp32", 3)
    assert raised.value.exit_code == ExitCode.NOT_FINITE
    with pytest.raises(MegatuneError, match="differ by inf"):
        check_mismatch(measured([stale * np.nan], [response.log_probs], "bf16"), "bf16", 3)


def test_one_token_that_is_far_off_ends_no_run() -> None:
    rollout = np.full(10_000, -1.0, np.float32)
    trainer = rollout + np.float32(0.01)
    trainer[7] = -9.0
    found = measured([trainer], [rollout], "bf16")
    check_mismatch(found, "bf16", 3)
    assert (found.outliers, found.max) == (1, 8.0)
    assert found.metrics["log_prob_gap_outliers"] == 1e-4
    assert found.median == found.p99 == pytest.approx(0.01, rel=1e-4)
    # The estimate of the divergence: one token of exp(-8) - 1 + 8, all others of 0.01 squared over 2.
    assert found.k3 == pytest.approx((7.000335 + 9999 * 5.0167e-5) / 10_000, rel=1e-3)
    with pytest.raises(MegatuneError, match=r"max_log_prob_gap is 0\.005"):
        check_mismatch(found, "bf16", 3, bound=0.005)
    kept = is_inlier(trainer, rollout, "bf16")
    assert not kept[7]
    assert kept.sum() == 9_999
    assert is_inlier(trainer, np.full_like(rollout, np.nan), "bf16").all(), "of other weights nothing is known"


def test_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.5, -1.0, 0.5]])
    never, draws = torch.tensor([3]), 4000
    grid = (np.arange(draws) + 0.5) / draws  # every quantile once
    for cut, kept in (({}, [0, 1, 2, 4, 5]), ({"top_k": 2}, [1, 2]), ({"top_p": 0.9}, [1, 2, 5]), ({"top_k": 1}, [2])):
        rows = [Request("a", np.arange(3), 0, 1, 0.7, **cut)] * draws
        tokens, log_probs = sample(logits.expand(draws, -1), rows, grid.tolist(), [()] * draws, never)
        shares = torch.bincount(tokens, minlength=6) / draws
        expected = torch.zeros(6)
        expected[kept] = (logits[0, kept] / 0.7).softmax(0)
        torch.testing.assert_close(shares, expected, atol=1e-3, rtol=0)
        torch.testing.assert_close(log_probs, (logits[0] / 0.7).log_softmax(0)[tokens])


def test_a_judge_that_is_too_short_is_told_what_fits(dense: Path) -> None:
    """Its context also has its instructions and its answer: what is advised is not refused again."""
    judge = InferRole(device_mapping=[0], model_name_or_path=str(dense), dtype="fp32", name="reward_model",
                      generating_args=Generating(max_new_tokens=8))  # fmt: skip
    longest = load_architecture(dense).max_position_embeddings
    with pytest.raises(MegatuneError) as raised:
        BuiltinEngine(judge, max_running=1, context=longest + 1)
    (finding,) = raised.value.findings
    advised = longest - INSTRUCTION_TOKENS - 8
    assert (f"response_length of {advised} together" in finding.fix) == (advised > 0)
    assert "a smaller max_new_tokens of reward_model" in finding.fix


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_sinks_and_windows(family: str, tmp_path: Path) -> None:
    """Windows are shorter than the rows, whose padding differs."""
    folder = make_checkpoint(family, tmp_path / "model", num_layers=2, hidden_size=32)
    requests = some_requests()
    for id_, response in drained(load(folder), requests).items():
        expected = reference(folder, requests[int(id_)], response)
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-5)


def test_layers_without_keys_and_values_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_next", tmp_path / "model", num_layers=4)
    with pytest.raises(MegatuneError, match="qwen3_next has layers without keys and values"):
        load(folder)
