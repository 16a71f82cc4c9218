"""Reward models that score responses: their scores are Transformers', in every layout, and in whole runs with PPO."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from layouts import EXPERT_LAYOUTS, LAYOUTS
from local_roles import read, run_file
from pool_launch import CommandLine
from safetensors.torch import load_file, save_file
from script_kit import run_script
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast
from worker_kit import settings_of, started

from megatune.config.dialects.roll import read_roll
from megatune.config.rl.settings import RLSettings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError
from megatune.rl.cluster import session
from megatune.rl.pipeline.scores import check_scored
from megatune.rl.reading import read_file
from megatune.rl.samples import Rollouts
from megatune.rl.worker.batching import merge_ranks
from megatune.rl.worker.model import ReferenceWorker

LIMIT = 120.0
EXAMPLE = Path(__file__).parents[2] / "examples/rl/ppo.yaml"
ALL = {**EXPERT_LAYOUTS, **LAYOUTS}
QUESTIONS = [f"{first}+{first + 1}=" for first in range(10)]
# Of the policy, and of the reward model, whose tokenizer has other numbers and marks who speaks.
CHARACTERS, OTHERS = "0123456789+=#", "ua:#=+9876543210"
PLAIN = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}#{% endif %}{% endfor %}"
MARKED = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}#{% endfor %}"


def make_language_model(folder: Path, characters: str = CHARACTERS, template: str | None = PLAIN) -> Path:
    """Write a Llama of single characters. No id pads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.WordLevel({each: number for number, each in enumerate(characters)}, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="#", eos_token="#")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    torch.manual_seed(len(characters))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ids = {"bos_token_id": None, "eos_token_id": characters.index("#"), "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(characters), **sizes, **heads, **ids)).save_pretrained(folder)
    return folder


def with_score(folder: Path, **config: Any) -> Path:
    """Make a reward model of a language model: Transformers', with a random score."""
    torch.manual_seed(7)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **config)
    model.score.weight.data.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, two reward models of other tokenizers, of which one pads with what ends a turn, and problems."""
    found = tmp_path_factory.mktemp("models")
    make_language_model(found / "model")
    with_score(make_language_model(found / "reward", OTHERS, MARKED), pad_token_id=OTHERS.index("#"))
    with_score(make_language_model(found / "own", template=None))
    rows = [
        {"id": each, "tag": "sums", "messages": [{"role": "user", "content": each}], "prompt": each}
        for each in QUESTIONS
    ]
    (found / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def of_transformers(folder: Path, questions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Score conversations as the page of a published reward model says."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    found = []
    for question, answer in zip(questions, answers, strict=True):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(said, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, 0].item())
    return found


# --- the worker, in layouts -------------------------------------------------------------------------------------------


def values(settings: RLSettings, texts: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """On every rank: the scores of texts, behind their last tokens."""
    rollouts = Rollouts([np.append(ids, 0) for ids in texts], [len(ids) for ids in texts])
    return started(ReferenceWorker, settings).values(rollouts)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout", "packed"),
    [
        ("qwen3", "1", None),
        ("qwen3", "tp2 sp", None),
        ("qwen3", "pp2 vpp2", None),
        ("qwen3", "dp2", 90),
        ("qwen3_moe", "ep2", None),
    ],
)
def test_scores_are_those_of_transformers(pool, tmp_path, family, layout, packed):
    model = with_score(make_checkpoint(family, tmp_path / "model", num_layers=4, hidden_size=64, vocab_size=600))
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = ["yes", "I do not know.", "42", "a " * 9, "no", "It is 3, because 1 and 2 are 3."]
    questions = [f"Is it {number}?" for number in range(len(answers))]
    texts = [
        np.array(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": one}, {"role": "assistant", "content": other}],
            )["input_ids"]
        )
        for one, other in zip(questions, answers, strict=True)
    ]
    expected = of_transformers(model, questions, answers)
    settings = settings_of(model, ALL[layout], "rewards.x", stage="rm", packed_tokens=packed)
    found = pool.run(ALL[layout].world_size, values, settings, texts)
    scores = merge_ranks(found, Rollouts([np.append(ids, 0) for ids in texts], [len(ids) for ids in texts]))
    np.testing.assert_allclose(np.concatenate(scores), expected, rtol=1e-5)
    assert np.std(expected) > 0.01


# --- runs -------------------------------------------------------------------------------------------------------------


def ppo(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return a file of classical RLHF: PPO with a critic, a reward model, and a divergence in the rewards."""

    def role(strategy: str, **more: Any) -> dict[str, Any]:
        parts = {"device_mapping": [0], "strategy_args": {"strategy_name": strategy}, "model_args": {"dtype": "fp32"}}
        return {**parts, **more}

    def reward(name: str, **more: Any) -> dict[str, Any]:
        own = {"dtype": "fp32", "model_name_or_path": str(folder / name), "model_type": "auto_sequence_classification"}
        return {"tag_included": ["sums"], "infer_batch_size": 3, **role("hf_infer", model_args=own), **more}

    training = {"learning_rate": 1e-3, "per_device_train_batch_size": 8}
    data = {"template": "native", "messages": "messages", "file_name": [str(folder / "rows.jsonl")]}
    sampling = {"top_p": 1.0, "top_k": 0, "temperature": 1.0}
    file = {
        "pretrain": str(folder / "model"), "output_dir": str(output), "max_steps": 3, "save_steps": 9,
        "logging_steps": 1, "rollout_batch_size": 8, "prompt_length": 8, "response_length": 6, "adv_estimator": "gae",
        "add_token_level_kl": True, "init_kl_coef": 0.05, "rollout_dump_dir": str(output / "dump"),
        "system_envs": {"OMP_NUM_THREADS": "1"},
        "actor_train": role("megatron_train", training_args=training, data_args=data),
        "actor_infer": role("builtin", generating_args=sampling),
        "reference": role("megatron_infer"),
        "critic": role("megatron_train", training_args=training, model_args={
            "dtype": "fp32", "model_name_or_path": str(folder / "model")}),
        "validation": {"data_args": data, "generating_args": sampling},
        "rewards": {"sums": reward("reward", worker_cls="roll.pipeline.base_worker.RewardWorker")},
    }  # fmt: skip
    for dotted, value in changes.items():
        *above, name = dotted.split("__")
        inside = file
        for each in above:
            inside = inside[each]
        inside[name] = value
    return file


def settings_from(file: dict[str, Any], path: Path) -> RLSettings:
    path.write_text(yaml.safe_dump(file))
    return read_file(str(path), ()).require_valid()


def dumped(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(output.glob("dump/*")) for line in path.read_text().splitlines()]


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_classical_rlhf_resumes_to_the_same_bits(pool, folder, tmp_path):
    """All roles by turns on one device, which the engines have again after each validation."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"rewards__sums__score_weight": 0.5, "eval_steps": 1, "rewards__sums__truncated_score": -2.0}
    more = {"resume_from_checkpoint": True}
    for output, steps, add in ((whole, 4, {}), (parts, 1, {}), (parts, 4, more)):
        file = ppo(folder, output, **changes, max_steps=steps, **add)
        pool.run(1, run_file, settings_from(file, tmp_path / "run.yaml"), limit=LIMIT)
    lines = dumped(whole)
    assert len(lines) == 32
    finished = [line for line in lines if line["finish"] == "stop"]
    assert 0 < len(finished) < len(lines)
    assert {line["score"] for line in lines if line["finish"] == "length"} == {-1.0}
    expected = of_transformers(
        folder / "reward", [line["prompt"] for line in finished], [line["response"] for line in finished]
    )
    assert [2 * line["score"] for line in finished] == pytest.approx(expected, rel=1e-5)
    names = ("step", "reward", "loss", "grad_norm", "critic/grad_norm", "critic/kl", "eval_reward")
    curves = [
        [tuple(each.get(name) for name in names) for each in records(output) if each["step"] > 1]
        for output in (whole, parts)
    ]
    assert curves[0] == curves[1]
    assert [step for step, reward, *_ in curves[0] if reward is not None] == [2, 3, 4]
    for name in ("model.safetensors", "critic/checkpoint-4/model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_a_reward_model_without_a_template_reads_the_policy_s_tokens(pool, folder, tmp_path):
    """And its score is added to those of functions, in a run ahead of its training, beside which it scores."""
    (tmp_path / "plugin.py").write_text(
        "from swift.rewards import ORM, orms\n"
        "class Short(ORM):\n"
        "    def __call__(self, completions, **kwargs):\n"
        "        return [float(-len(each)) for each in completions]\n"
        "orms['short'] = Short\n"
    )
    arguments = {"reward_funcs": ["short"], "reward_weights": [2.0], "external_plugins": [str(tmp_path / "plugin.py")]}
    changes = {
        "rewards__sums__worker_cls": "swift",
        "rewards__sums__arguments": arguments,
        "rewards__sums__score_weight": 3.0,
        "rewards__sums__model_args": {"dtype": "fp32", "model_name_or_path": str(folder / "own")},
        "actor_train__data_args": {"prompt": "prompt", "file_name": [str(folder / "rows.jsonl")]},
        "validation__data_args": {"prompt": "prompt", "file_name": [str(folder / "rows.jsonl")]},
        "actor_infer__device_mapping": [1],
        "async_generation_ratio": 1,
        "max_steps": 2,
    }
    pool.run(1, run_file, settings_from(ppo(folder, tmp_path / "out", **changes), tmp_path / "run.yaml"), limit=LIMIT)
    tokenizer = AutoTokenizer.from_pretrained(folder / "own")
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "own", dtype=torch.float32)
    lines = dumped(tmp_path / "out")
    assert len(lines) == 16
    for line in lines:
        text = line["prompt"] + line["response"] + "#" * (line["finish"] == "stop")
        with torch.no_grad():
            score = model(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        assert line["score"] == pytest.approx(3 * score - 2 * len(line["response"]), rel=1e-5)
        assert line["reward/model_score"] == pytest.approx(score, rel=1e-5)


def test_a_reward_model_in_two_processes_shares_the_engine_s_device(folder, command_line: CommandLine, tmp_path):
    """On Ray, in a run and where one of its checkpoints is evaluated."""
    layout = {"strategy_name": "megatron_infer", "strategy_config": {"tensor_model_parallel_size": 2}}
    changes = {"rewards__sums__strategy_args": layout, "rewards__sums__device_mapping": "list(range(1,3))"}
    changes |= {"adv_estimator": "reinforce", "init_kl_coef": 0.0, "add_token_level_kl": False, "max_steps": 2}
    file = ppo(folder, tmp_path / "out", **changes, actor_infer__device_mapping=[1], eval_steps=1)
    del file["reference"], file["critic"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    with session.ray_session(4, 0, 256 * 2**20, tmp_path):
        done = command_line("rl", tmp_path / "run.yaml")
        assert done.returncode == 0, done
        assert "role       rewards.sums: megatron, tp 2, pp 1, on devices 1-2" in done.stdout
        lines, evaluated = (
            dumped(tmp_path / "out"),
            [each for each in records(tmp_path / "out") if "eval_reward" in each],
        )
        done = command_line("rl", tmp_path / "run.yaml", "--evaluate", tmp_path / "out/checkpoint-2")
        assert done.returncode == 0, done
    assert len(lines) == 16
    for own in (lines, _lines(tmp_path / "out/evaluation/checkpoint-2/greedy.jsonl")):
        expected = of_transformers(folder / "reward", *([each[key] for each in own] for key in ("prompt", "response")))
        assert [each["score"] for each in own] == pytest.approx(expected, rel=1e-5)
    found = json.loads((tmp_path / "out/evaluation/checkpoint-2/metrics.json").read_text())
    evaluated = [each["eval_reward"] for each in records(tmp_path / "out") if "eval_reward" in each]
    assert found["sampled"]["reward"] == pytest.approx(evaluated[-1], rel=1e-9)


def test_the_example_of_ppo_runs(pool, tmp_path, monkeypatch):
    """In one process. Its validation says whether sums are right, which the reward model only guesses."""
    run_script(EXAMPLE.with_name("make.py"), tmp_path)
    reward = with_score(Path(shutil.copytree(tmp_path / "model", tmp_path / "reward")))
    alone = dict.fromkeys(("actor_train", "critic", "reference", "rewards.addition"), "[0]")
    changed = {
        "pretrain": tmp_path / "model",
        "reward_pretrain": reward,
        "output_dir": tmp_path / "out",
        "rollout_dump_dir": tmp_path / "out/dump",
        "actor_train.data_args.file_name": f"[{tmp_path}/train.jsonl]",
        "validation.data_args.file_name": f"[{tmp_path}/test.jsonl]",
        **{f"{role}.device_mapping": devices for role, devices in alone.items()},
        "rewards.addition.strategy_args.strategy_config.tensor_model_parallel_size": 1,
        "max_steps": 1,
        "logging_steps": 1,
    }
    monkeypatch.chdir(EXAMPLE.parents[2])
    asked = read_roll(EXAMPLE, [f"{key}={value}" for key, value in changed.items()]).require_valid()
    pool.run(1, run_file, asked, limit=LIMIT)
    lines = dumped(tmp_path / "out")
    assert len(lines) == 256
    whole = [line for line in lines if line["finish"] == "stop"]
    expected = of_transformers(reward, *([each[key] for each in whole] for key in ("prompt", "response")))
    assert [each["score"] for each in whole] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert {line["score"] for line in lines if line["finish"] == "length"} == {-3.0}
    assert {each["eval_reward"] for each in records(tmp_path / "out") if "eval_reward" in each} <= {0.0, 0.001, 0.002}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rewards__sums__model_args": {"model_name_or_path": "{folder}/model"}}, "json: it is a language model"),
        ({"rewards__sums__model_args": {"model_name_or_path": "{folder}/labels"}}, "it has 3 scores"),
        ({"rewards__sums__model_args": {}}, "rewards.sums has no model"),
        ({"response_length": 60}, "sequence_length 68 is more than the 64 positions of the model"),
        ({"rewards__sums__environment": "python"}, "rewards.sums has an environment and a reward model"),
        (
            {"rewards__sums__query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0}}},
            "rewards.sums has a reward model and query_filter_config",
        ),
        (
            {"rewards__sums__strategy_args": {"strategy_name": "vllm"}},
            "rewards.sums.strategy_args.strategy_name is vllm",
        ),
        (
            {"async_generation_ratio": 1, "actor_infer__device_mapping": [1], "rewards__sums__device_mapping": [1]},
            "async_generation_ratio above 0, and actor_infer shares devices with rewards.sums",
        ),
    ],
)  # fmt: skip
def test_what_cannot_score_is_refused(folder, tmp_path, changes, said):
    labels = with_score(make_language_model(tmp_path / "labels"))
    config = json.loads((labels / "config.json").read_text())
    config |= {"id2label": {str(each): f"L{each}" for each in range(3)}}
    (labels / "config.json").write_text(json.dumps(config))
    for model in ("model", "reward"):
        (tmp_path / model).symlink_to(folder / model)
    file = ppo(folder, tmp_path / "out", **json.loads(json.dumps(changes).replace("{folder}", str(tmp_path))))
    with pytest.raises(MegatuneError) as caught:
        settings_from(file, tmp_path / "run.yaml")
    assert said in str(caught.value)


def test_files_without_the_score_are_refused(pool, folder, tmp_path):
    broken = with_score(make_language_model(tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    file = ppo(folder, tmp_path / "out")
    file["rewards"]["sums"]["model_args"]["model_name_or_path"] = str(broken)
    settings = settings_from(file, tmp_path / "run.yaml")
    with pytest.raises(AssertionError, match=r"score\.weight"):
        pool.run(1, run_file, settings, limit=LIMIT)


def test_a_tokenizer_that_cannot_write_what_it_reads_is_refused(folder, tmp_path):
    """Other numbers, and no template."""
    other = with_score(make_language_model(tmp_path / "other", OTHERS, template=None))
    file = ppo(folder, tmp_path / "out")
    file["rewards"]["sums"]["model_args"]["model_name_or_path"] = str(other)
    settings = settings_from(file, tmp_path / "run.yaml")
    with pytest.raises(MegatuneError, match=r"rewards\.sums: the tokenizer has no chat template, and differs"):
        read(settings, folder / "model")


def test_prompts_with_images_are_refused(folder, tmp_path):
    settings = settings_from(ppo(folder, tmp_path / "out"), tmp_path / "run.yaml")
    seen: Any = [SimpleNamespace(domain="sums", images=object())]
    with pytest.raises(MegatuneError, match=r"rewards\.sums has a reward model, and prompts have images"):
        check_scored(settings, seen, AutoTokenizer.from_pretrained(folder / "model"))


def test_a_response_beyond_its_context_has_no_score(pool, folder, tmp_path):
    """The template of the reward model adds eight tokens to prompt and response."""
    short = with_score(make_language_model(tmp_path / "short", OTHERS, MARKED), max_position_embeddings=14)
    file = ppo(folder, tmp_path / "out", max_steps=1)
    file["rewards"]["sums"]["model_args"]["model_name_or_path"] = str(short)
    pool.run(1, run_file, settings_from(file, tmp_path / "run.yaml"), limit=LIMIT)
    lines = dumped(tmp_path / "out")
    errors = [line for line in lines if "reward/error" in line]
    assert 0 < len(errors) < len(lines)
    assert all("reads 13" in line["reward/error"] and len(line["response"]) > 3 for line in errors)
