"""A run with a named template says what its model will be asked with, and saves a chat template where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pool import RankPool
from runs import settings_of, train

from megatune.data.cache.key import prepared_key
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.model_files import CHAT_TEMPLATE, chat_template_notes


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model without a chat template."""
    model = make_checkpoint("qwen2", tmp_path_factory.mktemp("models") / "bare")
    (model / CHAT_TEMPLATE).unlink()
    return model


def test_checkpoints_get_the_chat_template_that_is_missing(pool: RankPool, bare: Path, tmp_path: Path) -> None:
    lora = {"finetuning_type": "lora", "lora_rank": 2, "merge_lora": True}
    settings = settings_of(bare, tmp_path / "out", template="chatml", max_steps=1, **lora)
    assert pool.run(1, train, settings, tmp_path) == [0]
    chat = [{"role": "user", "content": "Hello"}]
    for folder in (tmp_path / "out", tmp_path / "out/checkpoint-1", tmp_path / "out/merged"):
        prompt = load_tokenizer(folder).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    # A run that resumes from it, without the model's own folder, finds its rows; one with template: null, others.
    saved, own = load_tokenizer(tmp_path / "out"), load_tokenizer(bare)
    assert prepared_key(settings, saved) == prepared_key(settings, own)
    other = settings.model_copy(update={"data": settings.data.model_copy(update={"template": None})})
    assert prepared_key(other, saved) != prepared_key(other, own)


@pytest.mark.parametrize(
    ("template", "said", "warned"),
    [
        ("chatml", "with the text of chatml is saved", ""),
        ("qwen3", "", "template qwen3 cannot be saved as one: it writes reasoning"),
    ],
)
def test_a_missing_chat_template_is_said(template: str, said: str, warned: str, bare: Path, tmp_path: Path) -> None:
    lines, warnings = chat_template_notes(settings_of(bare, tmp_path, template=template), load_tokenizer(bare))
    for texts, part in ((lines, said), (warnings, warned)):
        assert len(texts) == bool(part)
        assert part in "".join(texts)


def test_another_chat_template_is_warned_of(bare: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(bare, model)
    source = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    tokenizer = load_tokenizer(model)
    lines, (warning,) = chat_template_notes(settings_of(model, tmp_path, template="chatml"), tokenizer)
    assert not lines
    assert "vLLM and others will prompt it with" in warning
    assert "user: Hello<|im_end|>" in warning
    assert "remove template to train with the tokenizer's" in warning
    assert chat_template_notes(settings_of(model, tmp_path, template="chatml", stage="pt"), tokenizer) == ([], [])
