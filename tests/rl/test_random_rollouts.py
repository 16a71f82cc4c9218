"""Rollouts of runs whose settings are drawn at random: every token has the log-probability, by Transformers, of the
checkpoint whose weights its version names; no group is trained twice; and a resumed run goes on with the same ones."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from digits import make_model
from local_roles import run_file
from peft import PeftModel
from pool import RankPool
from test_random_rl_runs import Draw
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatune.rl.reading import read_file

STEPS = 6
TOLERANCE = 1e-5  # of log-probabilities in fp32


def draw(chance: Draw, folder: Path) -> dict[str, Any]:
    """A file of a policy that learns so fast that weights of two steps are far apart."""
    model = make_model(folder / "model", chance.randrange(100), has_experts=chance.random() < 0.3)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    texts = ["".join(chance.choices("0123456789", k=chance.randint(1, 5))) for _ in range(chance.choice((10, 23)))]
    rows = [{"id": str(n), "prompt": f"{text}=", "digit": text[0], "tag": "ab"[n % 2]} for n, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tags = chance.choice(([["a", "b"]], [["a"], ["b"]]))
    rewards = {own[0]: {"worker_cls": "tests.rl.digits_reward.fifths", "tag_included": own} for own in tags}
    rewards["a"] |= chance.perhaps(0.4, environment=["tests.rl.digits_reward.Countdown"], max_turns=[2, 3])
    own = {"model_args": {"dtype": "fp32"}}
    actor = own | chance.perhaps(0.3, model_update_frequency=[2])
    actor["model_args"] = own["model_args"] | chance.perhaps(0.3, lora_target=["all-linear"], lora_rank=[4])
    generating = {"temperature": chance.choice((0.7, 1.0, 1.3)), "top_p": chance.choice((1.0, 0.8)),
                  "top_k": chance.choice((0, 5)), "stop_strings": chance.choice(([], ["77", "9"]))}  # fmt: skip
    devices = chance.choice(([0], [1], [1, 2]))
    tree = {
        "pretrain": str(model), "prompt_length": 16, "response_length": chance.choice((6, 20, 40)),
        "rollout_batch_size": 4, "num_return_sequences_in_group": chance.choice((1, 2, 4)), "exp_name": "drawn",
        "max_running_requests": chance.choice((3, 8, 64)), "adv_estimator": "reinforce", "init_kl_coef": 0.0,
        "seed": chance.randrange(1000), "save_steps": chance.choice((1, 1, 2, 3)), "max_steps": STEPS,
        "track_with": ["stdout"], "max_log_prob_gap": 1e-4, "rewards": rewards,
        "actor_train": actor | {
            "device_mapping": [0], "strategy_args": {"strategy_name": "megatron_train"},
            "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 2,
                              "gradient_accumulation_steps": 2},
            "data_args": {"prompt": "prompt", "file_name": [str(folder / "rows.jsonl")], "id": "id",
                          "domain_interleave_probs": dict.fromkeys(rewards, 1 / len(rewards))},
        },
        "actor_infer": own | {"device_mapping": devices, "strategy_args": {"strategy_name": "builtin"},
                              "generating_args": generating},
    }  # fmt: skip
    mode, spare = chance.choice(("in turn", "ahead", "partial")), {"is_use_additional_prompts": True}
    if mode == "ahead" and devices != [0]:
        tree["async_generation_ratio"] = chance.choice((1, 2))
    if mode == "partial":
        tree |= {**spare, "partial_rollout_steps": chance.choice((1, 2)), "max_additional_running_prompts": 3}
    elif chance.random() < 0.4:
        tree |= {**spare, "max_additional_running_prompts": chance.choice((1, 5))}
    if tree["num_return_sequences_in_group"] > 1 and chance.random() < 0.5:
        for role in rewards.values():
            role["query_filter_config"] = {"type": "std_filter", "filter_args": {"std_threshold": 0}}
    return tree | chance.perhaps(0.3, enable_old_logprobs_recompute=[True])


class Models:
    """The policy by the number of steps that it has taken; None if that was not saved."""

    def __init__(self, first: Path, output: Path) -> None:
        self._first, self._output, self._known = first, output, dict[int, Any]()

    def __call__(self, steps: int) -> Any:
        if steps not in self._known:
            path = self._output / f"checkpoint-{steps}" if steps else self._first
            is_adapter = (path / "adapter_config.json").exists()
            found = None
            if path.exists():
                found = AutoModelForCausalLM.from_pretrained(self._first if is_adapter else path, dtype=torch.float32)
                found = PeftModel.from_pretrained(found, path) if is_adapter else found
            self._known[steps] = found
        return self._known[steps]


class Token(NamedTuple):
    """A sampled token: how many steps old its weights are, and how far its log-probability is off; None if they were
    not saved."""

    age: int
    error: float | None


def tokens(folder: Path, tree: dict[str, Any], dumped: Path) -> Iterator[Token]:
    models, tokenizer = Models(folder / "model", folder / "out"), AutoTokenizer.from_pretrained(folder / "model")
    prompts = [json.loads(line)["prompt"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    temperature, seen = tree["actor_infer"]["generating_args"]["temperature"], set[int]()
    for step, path in enumerate(sorted(dumped.glob("*.jsonl")), 1):
        for group in map(json.loads, path.read_text().splitlines()):
            assert group["number"] not in seen
            seen.add(group["number"])
            prompt = tokenizer(prompts[int(group["problem"])])["input_ids"]
            for _, response in group["responses"]:
                ids, observed = torch.tensor([prompt + response["response_ids"]]), set[int]()
                for start, stop in response.get("observed", ()):
                    observed |= {*range(start, stop)}
                stops = [*(first for first, _ in response["versions"][1:]), len(response["response_ids"])]
                for (first, version), stop in zip(response["versions"], stops, strict=True):
                    if (model := models(version - 1)) is not None:
                        with torch.no_grad():
                            expected = (model(ids).logits[0] / temperature).log_softmax(-1)
                    for place in {*range(first, stop)} - observed:
                        where = len(prompt) + place
                        own = None if model is None else float(expected[where - 1, ids[0, where]])
                        error = None if own is None else abs(response["log_probs"][place] - own)
                        yield Token(step - version, error)


def said(dumped: Path) -> list[Any]:
    """What was sampled, by step."""
    found = [map(json.loads, path.read_text().splitlines()) for path in sorted(dumped.glob("*.jsonl"))]
    return [
        [sorted((place, each["response_ids"]) for place, each in group["responses"]) for group in groups]
        for groups in found
    ]


@pytest.mark.extended(*({*range(30)} - {0, 7}))
@pytest.mark.parametrize("seed", range(30))
def test_tokens_are_those_of_their_versions(seed: int, pool: RankPool, tmp_path: Path) -> None:
    chance, output, dumped = Draw(seed), tmp_path / "out", tmp_path / "rollouts"
    tree = draw(chance, tmp_path)

    def run(**more: Any) -> None:
        more |= {"output_dir": str(output), "rollout_mock": {"enable": True, "mode": "dump", "dump_dir": str(dumped)}}
        (tmp_path / "run.yaml").write_text(json.dumps(tree | more))
        pool.run(1, run_file, read_file(str(tmp_path / "run.yaml"), []).require_valid(), limit=120)

    ahead = max(math.ceil(tree.get("async_generation_ratio", 0)), tree.get("partial_rollout_steps", 0))
    oldest = ahead + tree["actor_train"].get("model_update_frequency", 1) - 1

    def check() -> None:
        found = [*tokens(tmp_path, tree, dumped)]
        errors = [each.error for each in found if each.error is not None]
        assert errors
        assert max(errors) < TOLERANCE
        assert 0 <= min(each.age for each in found) <= max(each.age for each in found) <= oldest

    run()
    check()
    whole, saved = said(dumped), sorted(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*"))
    for step in saved[len(saved) // 2 :]:
        shutil.rmtree(output / f"checkpoint-{step}")
    run(resume_from_checkpoint=True)
    check()
    assert ahead or said(dumped) == whole
