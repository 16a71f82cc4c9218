"""Reinforcement learning whose settings are drawn at random: a layout trains on the rollouts of one process as that
does, and another one goes on from its checkpoint."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_roles import run_file
from pool import RankPool

from megatune.demo.checkpoint import make_checkpoint
from megatune.rl.reading import read_file

DENSE = ("qwen2", "qwen3", "llama", "gemma3_text", "phi3", "granite", "olmo3", "mistral", "seed_oss", "gemma4_text")
SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "glm4_moe", "minimax_m2")
CRITICS = ("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text", "seed_oss", "mixtral", "qwen3_moe")
TEACHER, CRITIC = 1, 2  # seeds of other models of a family
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "nobody", "had", "been", "there", "before")
SAMPLES, STEPS = 8, 4
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # of losses, norms and metrics
COMPARED = ("loss", "grad_norm", "teacher_kl", "actor/", "critic/")

MakeModel = Callable[..., str]


class Draw(random.Random):
    """Draws settings."""

    def perhaps(self, share: float, **settings: Any) -> dict[str, Any]:
        """Return settings, each a list of values to draw from, or nothing."""
        return {name: self.choice(values) for name, values in settings.items()} if self.random() < share else {}


def draw(chance: Draw, models: MakeModel, rows: Path) -> tuple[str, dict[str, Any]]:
    """A family, and a file's settings that do not depend on the layout."""
    tree = draw_algorithm(chance)
    is_pure = tree["adv_estimator"] == "reinforce" and chance.random() < 0.3
    family = chance.choice(CRITICS if tree["adv_estimator"] == "gae" else (*DENSE, *SPARSE))
    said = chance.choice(({"prompt": "prompt"}, {"messages": "messages", "template": "chatml"}))
    actor = draw_actor(chance) | {"data_args": {"file_name": [str(rows)], **said}}
    stops = chance.choice((["e"], ["s", "a"]))
    sampler = {
        "device_mapping": [0], "strategy_args": {"strategy_name": "builtin"}, "model_args": {"dtype": "fp32"},
        "generating_args": {"temperature": chance.choice((0.7, 1.0, 1.3)), "top_p": 1.0, "top_k": 0,
                            "stop_strings": stops},
    }  # fmt: skip
    tree |= {"pretrain": models(family), "reference": forward(), "reward_pretrain": models(family, CRITIC)}
    if tree.get("kl_loss_type") == "abs":  # of the same model rounding would decide about the gradient's sign
        tree["reference"] = forward(models(family, TEACHER))
        actor["model_args"].pop("lora_target", None)
    if tree["adv_estimator"] == "gae":
        tree["critic"] = trained(learning_rate=1e-3)
    if is_pure or ("force_disable_old_logprobs_recompute" not in tree and chance.random() < 0.2):
        tree["teacher"] = forward(models(family, TEACHER)) | {"opd_kl_coef": 0.3}
        tree["is_pure_opd" if is_pure else "use_opd"] = True
    if is_pure:
        left_out = ("force_disable_old_logprobs_recompute", "add_token_level_kl")
        tree = {name: value for name, value in tree.items() if name not in left_out}
    else:
        tree["rewards"] = draw_rewards(chance)
        actor["data_args"]["domain_interleave_probs"] = dict.fromkeys(tree["rewards"], 0.5)
    who = "student" if is_pure else "actor"
    return family, tree | {f"{who}_train": actor, f"{who}_infer": sampler}


def draw_algorithm(chance: Draw) -> dict[str, Any]:
    tree = {
        "adv_estimator": chance.choice(("grpo", "grpo", "gae", "reinforce", "rloo", "reinforce_plus_plus")),
        "loss_agg_mode": chance.choice(
            ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
        ),
        "seed": chance.randrange(1000), "max_grad_norm": chance.choice((0.0, 0.5)), "init_kl_coef": 0.2,
        "rollout_batch_size": 4, "num_return_sequences_in_group": 2, "prompt_length": 64, "response_length": 12,
    }  # fmt: skip
    norms, some = ("batch", "group", "running"), chance.perhaps
    tree |= some(0.5, norm_mean_type=norms, norm_std_type=(None, *norms)) | some(0.3, ppo_epochs=[2])
    tree |= some(0.2, whiten_rewards=[True]) | some(0.3, whiten_advantages=[True], advantage_clip=[0.5, 2.0])
    tree |= some(0.3, reward_clip=[0.4, 10]) | some(0.3, gamma=[0.9], lambd=[0.0, 0.5]) | some(0.2, value_clip=[0.1])
    tree |= some(0.3, use_pg_clip_range=[True], pg_clip_low=[0.05], pg_clip_high=[0.28]) | some(0.2, pg_clip=[0.05])
    tree |= some(0.3, dual_clip_loss=[True], dual_clip_bound=[None, 3.0])
    tree |= some(0.3, use_kl_loss=[True], kl_loss_coef=[0.01, 0.5], kl_loss_type=["k1", "k2", "k3", "abs"])
    tree |= some(0.2, entropy_loss_coef=[0.01, -0.01]) | some(0.25, importance_sampling=["seq"])
    tree |= some(0.1, max_len_mask=[True]) | some(0.1, difficulty_mask=[True]) | some(0.1, error_max_len_clip=[True])
    tree |= some(0.2, difficulty_loss_weight=[True]) | some(0.2, length_loss_weight=[True])
    if chance.random() < 0.3:
        tree |= {"add_token_level_kl": True} | some(0.5, target_kl=[0.001], kl_horizon=[50])
        tree |= some(0.5, kl_penalty=["mse", "k3"])
    else:
        tree |= some(0.3, force_disable_old_logprobs_recompute=[True])
    if chance.random() < 0.3:
        levels = ("token", "segment", "geometric", "sequence")
        weight = {"enabled": True, "weight_type": chance.choice(levels), "upper_bound": chance.choice((None, 1.1))}
        filters = [{"enabled": True, "agg_type": chance.choice(levels), "diff_enabled": True}]
        tree["train_infer_correction"] = {"is_weight": weight, "filters": filters[: chance.randrange(2)]}
    return tree


def trained(**training_args: Any) -> dict[str, Any]:
    """A role that is trained. Adam with its usual epsilon makes whole steps of gradients that are rounding."""
    config = {"strategy_name": "megatron_train", "strategy_config": {"adam_epsilon": 1e-4}}
    return {"strategy_args": config, "model_args": {"dtype": "fp32"}, "training_args": training_args}


def forward(model: str | None = None) -> dict[str, Any]:
    model_args = {"dtype": "fp32", **({} if model is None else {"model_name_or_path": model})}
    return {"strategy_args": {"strategy_name": "megatron_infer", "strategy_config": {}}, "model_args": model_args}


def draw_actor(chance: Draw) -> dict[str, Any]:
    actor = trained(learning_rate=1e-3, lr_scheduler_type=chance.choice(("cosine", "constant")))
    if chance.random() < 0.3:
        actor["model_args"] |= {"lora_target": "all-linear", "lora_rank": 4}
    actor |= chance.perhaps(0.3, worker_cls=["ActorPGWorker"], pg_variant=["vanilla", "tis", "topr", "cispo", "kimi15"])
    return actor | chance.perhaps(0.3, model_update_frequency=[2])


def draw_rewards(chance: Draw) -> dict[str, Any]:
    tags = chance.choice(([["a", "b"]], [["a"], ["b"]]))
    rewards = {own[0]: {"worker_cls": "tests.rl.digits_reward.fifths", "tag_included": own} for own in tags}
    if chance.random() < 0.2:
        rewards["a"] |= {"environment": "tests.rl.digits_reward.Countdown", "max_turns": 2}
    return rewards


def draw_layout(chance: Draw, family: str, update: int) -> dict[str, Any]:
    """A strategy_config, training_args, and keys of a role with so many samples in an update; and processes."""
    size = rest = chance.choice((2, 4))
    config: dict[str, Any] = {}
    for name in chance.sample(("tensor", "pipeline", "context"), 3):
        if rest > 1 and chance.random() < 0.4:
            key = f"{name}_model_parallel_size" if name != "context" else "context_parallel_size"
            config[key], rest = 2, rest // 2
    pipeline = config.get("pipeline_model_parallel_size", 1)
    config["sequence_parallel"] = "tensor_model_parallel_size" in config
    if family in SPARSE and size // pipeline > 1:
        config |= chance.perhaps(0.6, expert_model_parallel_size=[2])
    micro = chance.choice([1, 2] if update // rest > 1 else [1])
    if pipeline == 2 and update // rest // micro % 2 == 0:
        config |= chance.perhaps(0.5, virtual_pipeline_model_parallel_size=[2])
    role: dict[str, Any] = {"infer_batch_size": chance.choice((1, 4))}
    longest = {f"max_packed_sequence_length_{phase}": 160 for phase in ("train", "forward")}
    dynamic = {f"use_dynamic_batching_in_{phase}": True for phase in ("train", "infer")}
    dynamic |= {f"max_tokens_per_microbatch_in_{phase}": 160 for phase in ("train", "infer")}
    packed = {"use_sequence_packing": True, "sequence_packing_args": {"algorithm": "load_balance", **longest}}
    role |= chance.choice(({}, dynamic, packed))
    batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": update // rest // micro}
    return {"size": size, "config": config, "batch": batch, "role": role}


def placed(tree: dict[str, Any], layout: dict[str, Any], **top: Any) -> dict[str, Any]:
    """The file with a layout for all roles that our engine computes."""
    found = json.loads(json.dumps(tree)) | top
    for name in {"actor_train", "student_train", "critic", "reference", "teacher"} & found.keys():
        role, is_trained = found[name], name.endswith(("_train", "critic"))
        role |= {"device_mapping": [*range(layout["size"])], **layout["role"]}
        role["strategy_args"]["strategy_config"] |= layout["config"]
        role |= {"training_args": role["training_args"] | layout["batch"]} if is_trained else {}
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance, path = random.Random(0), tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w") as file:
        for number in range(24):
            text = " ".join(chance.choices(WORDS, k=chance.randint(4, 9)))
            row = {"prompt": text, "messages": [{"role": "user", "content": text}], "tag": "ab"[number % 2]}
            file.write(json.dumps(row | {"difficulty": round(chance.random(), 2), "digit": "t"}) + "\n")
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Models by family and seed. Every token goes to all experts: rounding decides about none."""
    folder = tmp_path_factory.mktemp("models")

    def make(family: str, seed: int = 0) -> str:
        path = folder / f"{family}-{seed}"
        if not path.exists():
            experts = {"num_experts": 4, "router_topk": 4} if family in SPARSE else {}
            sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 400}
            make_checkpoint(family, path, seed=seed, **sizes, **experts)
        return str(path)

    return make


@pytest.mark.extended(*({*range(20)} - {9, 14}))
@pytest.mark.parametrize("seed", range(20))
def test_layouts_agree(seed: int, pool: RankPool, models: MakeModel, rows: Path, tmp_path: Path) -> None:
    chance = Draw(seed)
    family, tree = draw(chance, models, rows)
    update = chance.choice((SAMPLES, SAMPLES // 2))
    alone = {"size": 1, "config": {}, "role": {},
             "batch": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": update // 2}}  # fmt: skip
    one, other = (draw_layout(chance, family, update) for _ in range(2))

    def steps(name: str, layout: dict[str, Any], mode: str, **top: Any) -> dict[int, dict[str, Any]]:
        top |= {"rollout_mock": {"enable": True, "mode": mode, "dump_dir": str(tmp_path / "rollouts")}}
        top |= {"output_dir": str(tmp_path / name), "max_steps": STEPS, "save_steps": 1, "logging_steps": 1}
        top |= {"track_with": ["stdout"], "max_log_prob_gap": 1e-3, "exp_name": name}
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(placed(tree, layout, **top)))
        pool.run(layout["size"], run_file, read_file(str(path), []).require_valid(), limit=60)
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: record for record in records}

    expected, found = steps("whole", alone, "dump"), steps("one", one, "mock")
    for folder in ("", "critic")[: 1 + ("critic" in tree)]:
        shutil.copytree(tmp_path / "one" / folder / "checkpoint-1", tmp_path / "other" / folder / "checkpoint-1")
    resumed = steps("other", other, "mock", resume_from_checkpoint=True)
    assert (list(found), list(resumed)) == ([1, 2, 3, 4], [2, 3, 4])
    for step, logged in (*found.items(), *resumed.items()):
        for name in (name for name in expected[step] if name.startswith(COMPARED)):
            close = pytest.approx(expected[step][name], rel=RELATIVE, abs=ABSOLUTE)
            assert logged[name] == close, (name, step, one, other)
