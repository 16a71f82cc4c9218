"""Tokens that a run adds to its model: what is trained, saved and resumed, and what other programs read of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_kit import add_layer
from pool import RankPool
from runs import leave_as_crashed, metrics, run, settings_of, tensors

from megatune.config.dialects.swift import read_swift
from megatune.config.load import Loaded
from megatune.config.model import open_changed
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError
from megatune.families import load_architecture
from megatune.hub.models import Model
from megatune.hub.vocabulary import as_adapted
from megatune.plan.catalogue.models import find_model
from megatune.training.source import RunModel
from megatune.training.train_state import check_rerun

NEW = ["<fish>", "Tuna"]  # the second is in the rows
ADDED = {"add_tokens": NEW, "add_special_tokens": ["<sea>"], "max_steps": 4, "save_steps": 1}
LORA = {"finetuning_type": "lora", "lora_rank": 4}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
DP2 = {"per_device_train_batch_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder, sizes = tmp_path_factory.mktemp("models"), {"num_layers": 2, "vocab_size": 1001}
    kinds = {False: folder / "untied", True: folder / "tied"}
    return {tied: make_checkpoint("qwen3", path, tie_word_embeddings=tied, **sizes) for tied, path in kinds.items()}


def losses(folder: Path) -> list[float]:
    return [float(record["loss"]) for _, record in sorted(metrics(folder).items())]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_all_layouts_begin_with_the_same_bits(
    tied: bool, pool: RankPool, models: dict[bool, Path], tmp_path: Path
) -> None:
    """A learning rate that changes nothing but zeros leaves the rows as they were loaded."""
    still: dict[str, Any] = {**ADDED, "max_steps": 1, "learning_rate": 1e-30}
    begun = tensors(open_changed(settings_of(models[tied], tmp_path, **ADDED), str(models[tied])).fetch())
    for number, layout in enumerate((TP2, PP2, DP2)):
        out = tmp_path / str(number)
        run(pool, 2, settings_of(models[tied], out, **still, **layout), tmp_path / "runs")
        saved = tensors(out)
        assert len(saved["model.embed_tokens.weight"]) == load_architecture(out).vocab_size == 1024
        for name, tensor in saved.items():
            torch.testing.assert_close(tensor, begun[name], atol=1e-29, rtol=0)


@pytest.mark.parametrize("mtp_num_layers", [0, 1])
def test_a_layer_that_predicts_a_further_token_repeats_the_rows(
    mtp_num_layers: int, pool: RankPool, tmp_path: Path
) -> None:
    model = add_layer(make_checkpoint("glm4_moe", tmp_path / "model", num_layers=2, vocab_size=1001))
    few = {**ADDED, "template": "default", "max_steps": 1, "mtp_num_layers": mtp_num_layers}
    run(pool, 2, settings_of(model, tmp_path / "out", **few, **PP2), tmp_path / "runs")
    saved = tensors(tmp_path / "out")
    for name, copy in (("model.embed_tokens", "embed_tokens"), ("lm_head", "shared_head.head")):
        own, repeated = (saved[f"{each}.weight"] for each in (name, f"model.layers.2.{copy}"))
        assert repeated.shape == own.shape == (1024, 64)
        assert torch.equal(repeated, own) == bool(mtp_num_layers)


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "lora"])
def test_a_resume_goes_on_with_the_same_bits(
    adapters: dict[str, Any], pool: RankPool, models: dict[bool, Path], tmp_path: Path
) -> None:
    """And other tokens are refused before anything starts."""
    few = {**ADDED, **adapters, **PP2}
    whole, again = (settings_of(models[True], tmp_path / each, **few) for each in ("whole", "again"))
    run(pool, 2, whole, tmp_path / "runs")
    leave_as_crashed(tmp_path / "whole", 1, tmp_path / "again")
    run(pool, 2, again, tmp_path / "other")
    ours, expected = tensors(tmp_path / "again"), tensors(tmp_path / "whole")
    assert all(torch.equal(ours[name], expected[name]) for name in expected)

    check_rerun(whole, 2)
    others = settings_of(models[True], tmp_path / "whole", **few | {"add_tokens": NEW[:1]})
    with pytest.raises(MegatuneError, match=r"were \[<fish>, Tuna, <sea>\], and are \[<fish>, <sea>\] in this run"):
        check_rerun(others, 2)


def test_what_comes_out_has_the_tokens_and_gets_them_no_second_time(
    pool: RankPool, models: dict[bool, Path], tmp_path: Path
) -> None:
    run(pool, 2, settings_of(models[False], tmp_path / "first", **ADDED, **TP2), tmp_path / "runs")
    tokenizer = load_tokenizer(tmp_path / "first")
    assert tokenizer("I am Tuna").input_ids[-1] == tokenizer.convert_tokens_to_ids("Tuna") >= 1000
    settings = settings_of(tmp_path / "first", tmp_path / "second", **ADDED, **DP2)
    found = RunModel(settings, asks=True)
    assert found.config_dir(str(tmp_path / "first")) == (tmp_path / "first").absolute()
    assert found.lines == ["accepted   the tokenizer already has all added tokens"]
    run(pool, 2, settings, tmp_path / "runs")
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0]
    assert load_architecture(tmp_path / "second").vocab_size == 1024
    assert len(load_tokenizer(tmp_path / "second")) == len(tokenizer)


@pytest.mark.parametrize(("tied", "layout"), [(False, TP2), (True, PP2)], ids=["untied, tp2", "tied, pp2"])
def test_adapters_have_the_embeddings(
    tied: bool, layout: dict[str, Any], pool: RankPool, models: dict[bool, Path], tmp_path: Path
) -> None:
    """peft loads them beside the base with as many rows, and computes what the merged model does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = settings_of(models[tied], tmp_path / "out", **ADDED, **LORA, **layout, merge_lora=True)
    assert settings.finetuning.additional_target == ["embed_tokens", "lm_head"]
    classes = settings_of(models[True], tmp_path / "cls", **ADDED, **LORA, stage="cls", num_labels=2)
    assert classes.finetuning.additional_target == ["embed_tokens"]
    run(pool, 2, settings, tmp_path / "runs")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["modules_to_save"] == (["embed_tokens"] if tied else ["embed_tokens", "lm_head"])
    assert config["ensure_weight_tying"] is tied

    base = AutoModelForCausalLM.from_pretrained(models[tied])
    base.resize_token_embeddings(1024, mean_resizing=False)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out/merged").eval()
    ids = load_tokenizer(tmp_path / "out")("Hello, who are you? Tuna<fish><sea>", return_tensors="pt").input_ids
    with torch.no_grad():
        expected, found = adapted(ids).logits, merged(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    begun = tensors(open_changed(settings, str(models[tied])).fetch())
    saved = tensors(tmp_path / "out/merged")
    assert not torch.equal(saved["model.embed_tokens.weight"][1001:1004], begun["model.embed_tokens.weight"][1001:1004])

    again = as_adapted(Model(models[tied]), [tmp_path / "out"])
    assert load_architecture(again.config_dir()).vocab_size == 1024
    assert len(load_tokenizer(again.tokenizer_dir())) == len(load_tokenizer(tmp_path / "out"))


def test_rows_are_added_for_tokens_of_a_larger_tokenizer(models: dict[bool, Path], tmp_path: Path) -> None:
    """Where that is asked for; other tokens join them."""
    model = tmp_path / "model"
    shutil.copytree(models[False], model)
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens([f"<{number}>" for number in range(30)])
    tokenizer.save_pretrained(model)
    with pytest.raises(MegatuneError, match=r"or write resize_vocab: true"):
        load_tokenizer(model)
    settings = settings_of(model, tmp_path / "out", resize_vocab=True, add_tokens=NEW)
    view = open_changed(settings, str(model)).fetch()
    size = len(tokenizer) + len(NEW)
    assert load_architecture(view).vocab_size == -(-size // 64) * 64
    assert load_tokenizer(view).convert_tokens_to_ids(["<29>", *NEW]) == [size - 3, size - 2, size - 1]
    rows = tensors(view)["model.embed_tokens.weight"]
    old = len(tensors(models[False])["model.embed_tokens.weight"])
    assert len(torch.unique(rows[old:size], dim=0)) == size - old
    assert len(torch.unique(rows[size:], dim=0)) == 1
    planned = find_model(str(model), settings).architecture
    assert planned.vocab_size == load_architecture(view).vocab_size


def test_what_cannot_be_extended_is_named(models: dict[bool, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models[False], model)
    (tmp_path / "tokens.yaml").write_text("- <fish>\n")
    described = settings_of(model, tmp_path / "out", new_special_tokens_config=tmp_path / "tokens.yaml")
    with pytest.raises(MegatuneError, match="it is not a mapping of tokens to texts"):
        open_changed(described, str(model))
    settings = settings_of(model, tmp_path / "out", **ADDED)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 1005}))
    with pytest.raises(MegatuneError, match=r"weight is F32 \[1001, 64\], and config.json has 1005 tokens"):
        open_changed(settings, str(model)).fetch()
    (model / "tokenizer.json").unlink()
    with pytest.raises(MegatuneError, match=r"there is no tokenizer.json"):
        open_changed(settings, str(model)).tokenizer_dir()


def test_files_of_tokens_are_read(tmp_path: Path) -> None:
    """By Megatron-SWIFT's flag; spaces and lines are between their tokens."""

    def read(*words: str) -> Loaded:
        return read_swift(
            "sft", ["--model", "m", "--dataset", "d", "--train_iters", "5", *words], env={}, config={}
        ).loaded

    (tmp_path / "tokens.txt").write_text("<a> <b>\n<c>")
    found = read("--new_special_tokens", "<d>", str(tmp_path / "tokens.txt"), "<e>")
    assert found.findings == []
    assert found.settings.model.add_special_tokens == ["<d>", "<a>", "<b>", "<c>", "<e>"]
    assert found.settings.finetuning.additional_target == []
    found = read("--tuner_type", "lora", "--new_special_tokens", "<d>")
    assert found.settings.finetuning.additional_target == ["embed_tokens", "lm_head"]
    assert "none.txt cannot be read" in str(read("--new_special_tokens", "none.txt").findings[0])
