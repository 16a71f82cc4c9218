"""ROLL's files as runs of tiny models: sizes, lengths, devices and engines are others, what else they say is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from megatune.config.dialects.roll import read_roll
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.rl.rewards.judge import YES_OR_NO

FILES = Path(__file__).parents[1] / "config/roll_files"
PROMPT, RESPONSE = 160, 20
# A model says one of them, whatever it is asked: rewards of a group differ, so that filters let it pass.
SAYS = ("YES \\boxed{1}", "NO \\boxed{0}", "```python\nprint(1)\n```", "\\boxed{A}")
_ROWS: dict[str, dict[str, Any]] = {
    "MathRuleRewardWorker": {"ground_truth": "1"},
    "CodeSandboxRewardWorker": {"case_type": "input", "test_cases": [{"stdin": "", "expected_stdout": "1"}]},
    "LLMJudgeRewardWorker": {"ground_truth": "1"},
    "CrossThinkQARuleRewardWorker": {"ground_truth": "A"},
    "GeneralRuleRewardWorker": {"ground_truth": json.dumps({"func_name": "validate_lowercase"})},
}
_NUMBERS, _QUESTION = range(6), "{} + 1 = ?"
_ASKED = f"<|im_start|>user\n{_QUESTION}<|im_end|>\n<|im_start|>assistant\n"  # where a column is the prompt as it is
_ALONE = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1, "context_parallel_size": 1, "account_for_loss_in_pipeline_split": False,
    "account_for_embedding_in_pipeline_split": False,
}  # fmt: skip


def make_judge(family: str, folder: Path) -> Path:
    """Write a tiny model that judges at random."""
    question = YES_OR_NO.format(question=_QUESTION.format(1), response=SAYS[0], reference="1")
    return _taught(family, folder, ("YES", "NO"), (question, question.replace("YES \\boxed{1}", SAYS[2])), ())


def make_talker(family: str, folder: Path) -> Path:
    """Write a tiny model that says one of `SAYS` when it is asked."""
    return _taught(family, folder, SAYS, [*map(_QUESTION.format, _NUMBERS)], [*map(_ASKED.format, _NUMBERS)])


def _taught(family: str, folder: Path, says: Sequence[str], asked: Sequence[str], prompts: Sequence[str]) -> Path:
    """Write a tiny model that was taught to say one of some texts in a chat, and after prompts as they are."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "head_dim": 16}
    make_checkpoint(family, folder, max_position_embeddings=2048, vocab_size=600, **sizes)
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True) for each in asked
    ]
    begun = [each["input_ids"] for each in (*chats, *map(tokenizer, prompts))]
    rows = [(each, tokenizer(f"{said}<|im_end|>")["input_ids"]) for each in begun for said in says]
    longest = max(len(prompt) + len(said) for prompt, said in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, said) in enumerate(rows):
        whole = [*prompt, *said]
        ids[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(prompt) : len(whole)] = torch.tensor(said)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        # Each time another text after each prompt, and all texts together.
        own = [len(says) * place + (place + step) % len(says) for place in range(len(begun))]
        model(input_ids=ids[own], labels=labels[own]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def family_of(path: Path) -> str:
    """Return the family of a file's policy."""
    name = yaml.safe_load(path.read_text())["pretrain"]
    return "qwen2" if "Qwen2" in name else "qwen3_moe" if "A3B" in name or "A22B" in name else "qwen3"


def write_rows(path: Path, rows: Path) -> Path:
    """Write problems for each of a file's domains."""
    with rows.open("w") as file:
        for name, reward in yaml.safe_load(path.read_text())["rewards"].items():
            own = _ROWS[reward["worker_cls"].rpartition(".")[2]]
            for number in _NUMBERS:
                question = {"role": "user", "content": _QUESTION.format(number)}
                row = {"id": f"{name}-{number}", "tag": reward["tag_included"][0], **own}
                row |= {"messages": json.dumps([question]), "instruction": _ASKED.format(number)}
                file.write(json.dumps(row) + "\n")
    return rows


def has_judge(path: Path) -> bool:
    """Tell whether a model of the run's own judges."""
    return "judge_prompt" in path.read_text()


def words(path: Path, model: Path, judge: Path, rows: Path, output: Path, *, steps: int = 2) -> list[str]:
    """Return what is typed after `megatune rl FILE`, so that it runs here."""
    tree, asked = yaml.safe_load(path.read_text()), read_roll(path).require_valid()
    batch, parallel = asked.actor_train.settings.batch, asked.actor_train.settings.parallel
    of_update = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
    of_update *= len(asked.actor_train.devices) // parallel.model_parallel_size
    updates = max(1, asked.samples_per_step // of_update)
    changes: dict[str, Any] = {
        "pretrain": model, "reward_pretrain": model, "output_dir": output, "max_steps": steps, "save_steps": steps,
        "eval_steps": steps, "logging_steps": 1, "prompt_length": PROMPT, "response_length": RESPONSE,
        "rollout_batch_size": 10, "model_update_buffer_size_mb": 16,
        "num_return_sequences_in_group": 4, "system_envs": {"OMP_NUM_THREADS": "1"},
        "actor_train.training_args.per_device_train_batch_size": 5,
        "actor_train.training_args.gradient_accumulation_steps": 8 // updates,
        "actor_train.data_args.file_name": [rows],
        "actor_infer.strategy_args.strategy_name": "builtin",
    }  # fmt: skip
    ahead = bool(tree.get("async_generation_ratio"))
    devices = {"actor_train": 0, "reference": 0, "actor_infer": int(ahead), "reward_model": 2}
    changes |= {f"{role}.device_mapping": [device] for role, device in devices.items() if role in tree}
    for role in ("actor_train", "reference"):
        config = tree[role]["strategy_args"]["strategy_config"]
        changes |= {f"{role}.strategy_args.strategy_config.{key}": _ALONE[key] for key in config if key in _ALONE}
        packing = tree[role].get("sequence_packing_args", {})
        lengths = [f"sequence_packing_args.{key}" for key in packing if key.startswith("max_packed")]
        lengths += [key for key in tree[role] if key.startswith("max_tokens_per_microbatch")]
        changes |= {f"{role}.{key}": 2 * (PROMPT + RESPONSE) for key in lengths}
    if "lora_rank" in tree["actor_train"]["model_args"]:
        changes["actor_train.model_args.lora_rank"] = 4
    if "validation" in tree:
        changes["validation.data_args.file_name"] = [rows]
    if tree.get("rollout_mock"):
        changes["rollout_mock.dump_dir"] = output / "rollouts"
    if "reward_model" in tree:
        changes |= dict(_judge("reward_model", judge))
    for name, reward in tree["rewards"].items():
        changes[f"rewards.{name}.world_size"] = 1
        if "strategy_args" in reward:
            changes |= {**dict(_judge(f"rewards.{name}", judge)), f"rewards.{name}.device_mapping": [2]}
    return [f"{key}={json.dumps(value, default=str)}" for key, value in changes.items()]


def _judge(role: str, model: Path) -> Iterator[tuple[str, Any]]:
    yield f"{role}.model_args.model_name_or_path", model
    yield f"{role}.strategy_args.strategy_name", "builtin"
    yield f"{role}.generating_args.max_new_tokens", 4
