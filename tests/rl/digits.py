"""A model of digits, and "repeat the digit": the least that a policy can learn from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from megatune.config.groups.optimizer import BatchSettings, OptimizerSettings, PrecisionSettings
from megatune.config.groups.output import LoggingSettings
from megatune.config.groups.run import ModelSettings, RunSettings
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.rollout import Generating, PromptData, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rl.settings import (
    InferRole,
    ModelRole,
    RewardRole,
    RLSettings,
)
from megatune.config.settings import Settings
from megatune.rl.pipeline.groups import Group
from megatune.rl.samples import Problem, Sample

CHARACTERS = "0123456789+=#"
PROMPT, RESPONSE = 2, 8


def make_model(
    folder: Path, seed: int = 0, *, num_layers: int = 2, head_dim: int = 16, has_experts: bool = False
) -> Path:
    """Write a Llama of 100,000 parameters, or a Mixtral, with a tokenizer of single characters. No id pads: the
    embedding of padding is zero, and a random model samples it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="#", eos_token="#").save_pretrained(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2} if has_experts else {}
    config = (MixtralConfig if has_experts else LlamaConfig)(
        **sizes,
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["#"],
        pad_token_id=None,
    )
    (MixtralForCausalLM if has_experts else LlamaForCausalLM)(config).save_pretrained(folder)
    return folder


def problems() -> dict[str, list[Problem]]:
    """Return "d=" for each digit."""
    rows = [{"id": str(digit), "prompt": f"{digit}=", "digit": str(digit)} for digit in range(10)]
    ids = [np.array([CHARACTERS.index(character) for character in row["prompt"]], np.int64) for row in rows]
    return {
        "digits": [
            Problem(row["id"], "digits", "digits", [], own, row, row["prompt"])
            for row, own in zip(rows, ids, strict=True)
        ]
    }


def with_samples(group: Group, texts: Sequence[str]) -> Group:
    """Make samples of a finished group's responses."""
    group.samples = [
        Sample(group.problem, group.number, group.responses[place], text) for place, text in enumerate(texts)
    ]
    return group


def settings(
    model: Path, output: Path, *, steps: int = 120, devices: tuple[int, ...] = (0,), **changes: Any
) -> RLSettings:
    """Return a run of 10 prompts with 8 responses each."""
    engine = Settings(
        run=RunSettings(output_dir=str(output), stage="sft"),
        model=ModelSettings(model_name_or_path=str(model)),
        optimizer=OptimizerSettings(
            learning_rate=2e-3, adam_beta2=0.95, lr_scheduler_type="constant_with_warmup", warmup_steps=10
        ),
        batch=BatchSettings(per_device_train_batch_size=20, gradient_accumulation_steps=max(1, 4 // len(devices))),
        precision=PrecisionSettings(bf16=False),
        logging=LoggingSettings(report_to=["none"]),
    )
    parts: dict[str, Any] = {
        "run": RLRunSettings(
            exp_name="digits",
            output_dir=str(output),
            max_steps=steps,
            save_steps=steps,
            logging_steps=10,
            system_envs={"OMP_NUM_THREADS": "1"},
        ),
        "rollout": RolloutSettings(
            rollout_batch_size=10,
            num_return_sequences_in_group=8,
            prompt_length=PROMPT,
            sequence_length=PROMPT + RESPONSE,
        ),
        "algorithm": AlgorithmSettings(
            adv_estimator="grpo",
            norm_mean_type="group",
            norm_std_type="group",
            loss_agg_mode="token-mean",
            init_kl_coef=0.0,
        ),
        "data": PromptData(domain_interleave_probs={"digits": 1.0}),
        "actor_train": ModelRole(
            name="actor_train", device_mapping=[*devices], settings=engine, training=True, infer_batch_size=80
        ),
        "actor_infer": InferRole(
            device_mapping=[0],
            model_name_or_path=str(model),
            dtype="fp32",
            generating_args=Generating(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=RESPONSE),
        ),
        "rewards": {
            "digits": RewardRole("digits", "python", ("digits",), function="tests.rl.digits_reward:repeats"),
        },
    }
    return RLSettings(**{**parts, **changes})
