"""Demo checkpoints are what was asked for, load through Transformers, and appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatune.bridge.auto import register_types
from megatune.cli import demo_model
from megatune.demo.checkpoint import make_checkpoint, summarize_checkpoint
from megatune.demo.family import FAMILIES, demo_family
from megatune.demo.sizes import ModelSizes
from megatune.demo.tokenizer import make_tokenizer
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 300}


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.vision is None])
def test_the_numbers_asked_for_are_the_models(name: str, tmp_path: Path) -> None:
    family = demo_family(name)
    kv_heads = 8 if family.has_latent_attention else 4
    folder = make_checkpoint(
        name, tmp_path / "model", **SMALL, num_attention_heads=8, num_query_groups=kv_heads, max_position_embeddings=512
    )
    assert json.loads((folder / "config.json").read_text())["model_type"] == family.model_type
    register_types()
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 32, 48)
    # Transformers asks which layer is meant where they differ.
    of_layer = config.per_layer_config[0] if family.model_type == "gemma4_text" else config
    assert (config.num_attention_heads, of_layer.num_key_value_heads) == (8, kv_heads)
    assert (config.vocab_size, config.max_position_embeddings) == (300, 512)
    assert config.tie_word_embeddings == family.tie_word_embeddings
    head_dim = 8 if family.wide_heads else 4
    # The last of Gemma 4's has heads of another size.
    attention = model.model.layers[0 if family.model_type == "gemma4_text" else 1].self_attn
    if family.has_latent_attention:
        assert attention.kv_b_proj.weight.shape == (8 * (head_dim + head_dim), 16)
    elif family.model_type == "phi3":
        assert attention.qkv_proj.weight.shape == ((8 + 4 + 4) * head_dim, 32)
    else:
        # Gated attention has a gate behind each query.
        assert attention.q_proj.weight.shape == (8 * head_dim * (1 + family.has_delta_nets), 32)
        assert attention.k_proj.weight.shape == (4 * head_dim, 32)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = make_tokenizer(family, 300)
    assert tokenizer.get_vocab() == trained.get_vocab()
    text = "It's 12:45 in 北京. <|im_start|><think>"
    assert tokenizer(text)["input_ids"] == trained(text)["input_ids"]
    assert tokenizer.chat_template == trained.chat_template
    stops = GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(stops) == list(family.stop_tokens)


def test_what_starts_constant_elsewhere_is_random_here(tmp_path: Path) -> None:
    qwen2 = AutoModelForCausalLM.from_pretrained(make_checkpoint("qwen2", tmp_path / "qwen2", **SMALL))
    qwen3 = AutoModelForCausalLM.from_pretrained(make_checkpoint("qwen3", tmp_path / "qwen3", **SMALL))
    one_dimensional = [p for model in (qwen2, qwen3) for p in model.parameters() if p.dim() == 1]
    assert any(name.endswith("q_proj.bias") for name, _ in qwen2.named_parameters())
    assert any(name.endswith("q_norm.weight") for name, _ in qwen3.named_parameters())
    assert all(0.01 < parameter.std() < 0.3 for parameter in one_dimensional)


def test_llama_stretches_its_rotary_embedding(tmp_path: Path) -> None:
    config = json.loads((make_checkpoint("llama", tmp_path / "m", **SMALL) / "config.json").read_text())
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 8.0)
    assert rope["original_max_position_embeddings"] == config["max_position_embeddings"] / 8


def test_deepseek_v3_stretches_its_rotary_embedding_and_its_scores(tmp_path: Path) -> None:
    config = json.loads((make_checkpoint("deepseek_v3", tmp_path / "m", **SMALL) / "config.json").read_text())
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["mscale_all_dim"]) == ("yarn", 8.0, 1.0)
    assert rope["original_max_position_embeddings"] == config["max_position_embeddings"] / 8


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_as_many_and_as_wide_as_asked_for(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(
        name, tmp_path / "m", **SMALL, num_experts=12, router_topk=3, moe_ffn_hidden_size=20, seed=1
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    sparse = model.model.layers[1].mlp
    assert sparse.experts.down_proj.shape == (12, 32, 20)
    assert model.config.num_experts_per_tok == 3
    assert all(parameter.std() > 0 for parameter in sparse.parameters())
    if name == "deepseek_v3":
        assert sparse.gate.e_score_correction_bias.std() > 0
        assert (model.config.n_group, model.config.topk_group) == (4, 2)
    moe = load_architecture(folder).moe
    assert moe is not None
    assert (moe.num_experts, moe.router_topk, moe.moe_ffn_hidden_size) == (12, 3, 20)


@pytest.mark.parametrize("num_experts", [2, 6])
def test_few_experts_form_no_groups(num_experts: int, tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path / "m", **SMALL, num_experts=num_experts)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model(input_ids=torch.arange(5)[None]).logits.isfinite().all()


def test_numbers_of_experts_that_make_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError) as raised:
        make_checkpoint("qwen3", tmp_path / "m", num_experts=8, router_topk=2, moe_ffn_hidden_size=8)
    assert {finding.where for finding in raised.value.findings} == {"--experts", "--topk", "--moe_ffn"}
    with pytest.raises(MegatuneError) as raised:
        make_checkpoint("deepseek_v3", tmp_path / "m", num_experts=4, router_topk=5, num_query_groups=2)
    assert {finding.where: finding.fix for finding in raised.value.findings} == {
        "--topk": "--topk 4",
        "--kv_heads": "leave it out",
    }
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(tied: bool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        make_checkpoint("qwen3", tmp_path / "m", **SMALL, tie_word_embeddings=tied)
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_dtype_and_head_dim_on_request(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "m", **SMALL, head_dim=16, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[1].self_attn.q_proj.weight.shape == (4 * 16, 32)


def test_a_model_with_any_switch_can_be_trained(tmp_path: Path) -> None:
    for name, field in ModelSizes.model_fields.items():
        if field.annotation in (bool, bool | None):
            load_architecture(make_checkpoint("llama", tmp_path / name, **SMALL, **{name: True}))


@pytest.mark.parametrize("name", ["qwen2", "qwen3_vl_moe"])
def test_the_seed_decides_the_bytes(name: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, same, other = (
        digests(make_checkpoint(name, tmp_path / folder, **SMALL, seed=seed))
        for folder, seed in (("first", 1), ("same", 1), ("other", 2))
    )
    assert first == same
    assert first["model.safetensors"] != other["model.safetensors"]
    assert torch.equal(torch.get_rng_state(), state)


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    whole = make_checkpoint("qwen3", tmp_path / "whole", **SMALL)
    sharded = make_checkpoint("qwen3", tmp_path / "sharded", **SMALL, max_shard_size="20KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    expected = AutoModelForCausalLM.from_pretrained(whole).state_dict()
    found = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_summary_counts_what_transformers_counts(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "m", **SMALL, max_shard_size="20KB")
    summary = summarize_checkpoint(folder)
    assert summary.num_parameters == AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert summary.vocab_size == 300
    assert summary.num_bytes >= 4 * summary.num_parameters


def test_every_bad_number_is_named_with_a_valid_one(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError) as raised:
        make_checkpoint(
            "qwen2",
            tmp_path / "m",
            num_layers=0,
            hidden_size=66,
            num_query_groups=3,
            vocab_size=100,
            dtype="bf16",
            max_shard_size="big",
        )
    assert raised.value.exit_code == ExitCode.SETTINGS
    assert {finding.where: finding.fix for finding in raised.value.findings} == {
        "--layers": "--layers 1",
        "--hidden": "--hidden 64",
        "--kv_heads": "--kv_heads 2",
        "--vocab": "--vocab 278",
        "--dtype": "--dtype bfloat16",
        "--max_shard_size": "--max_shard_size 5GB",
    }
    assert not any(tmp_path.iterdir())


def test_what_is_there_is_not_written_over_unasked(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "m", **SMALL)
    before = digests(folder)
    with pytest.raises(MegatuneError) as raised:
        make_checkpoint("qwen3", folder, **SMALL, seed=1)
    assert raised.value.exit_code == ExitCode.CANNOT_WRITE
    assert digests(folder) == before

    make_checkpoint("qwen3", folder, **SMALL, seed=1, overwrite=True)
    assert digests(folder)["model.safetensors"] != before["model.safetensors"]
    assert [child.name for child in tmp_path.iterdir()] == ["m"]


def test_overwrite_removes_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(MegatuneError) as raised:
        make_checkpoint("qwen3", tmp_path, **SMALL, overwrite=True)
    assert raised.value.exit_code == ExitCode.CANNOT_WRITE
    with pytest.raises(MegatuneError):
        make_checkpoint("qwen3", tmp_path / "notes.txt", **SMALL, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatune.demo.checkpoint.publish_tokenizer_config", disk_full)
    with pytest.raises(MegatuneError, match="No space left") as raised:
        make_checkpoint("qwen3", tmp_path / "m", **SMALL)
    assert raised.value.exit_code == ExitCode.CANNOT_WRITE
    assert not any(tmp_path.iterdir())


def test_the_verb_takes_both_spellings_and_prints_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    words = (
        f"--family qwen3 --output {folder} --layers 1 --hidden 32 --ffn 40 --heads 4 --kv_heads 1 "
        "--head-dim 16 --vocab 300 --untied --dtype float16 --seed 3".split()
    )
    assert demo_model.run("demo-model", words) == ExitCode.DONE
    printed = capsys.readouterr()
    assert f"{folder}: qwen3, " in printed.out
    assert f"megatune infer {folder}" in printed.out
    assert "Writing" not in printed.err  # no progress bar
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["dtype"]) == (1, 16, "float16")
    assert config["tie_word_embeddings"] is False


def test_the_verb_takes_numbers_of_experts(tmp_path: Path) -> None:
    words = (
        f"--family mixtral --output {tmp_path / 'm'} --layers 1 --hidden 32 --vocab 300 --experts 6 "
        "--topk 3 --moe-ffn 24".split()
    )
    assert demo_model.run("demo-model", words) == ExitCode.DONE
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (6, 3, 24)
