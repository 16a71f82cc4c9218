"""Well-known models: names, published sizes, and the same models as Transformers builds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.plan.catalogue import MODELS, find_model
from megatune.plan.catalogue.models import _plain, _published, published_names
from megatune.plan.flops import num_parameters

# Of the model cards, or the checkpoints' own indices.
PUBLISHED = {
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Mixtral-8x7B": 46_702_792_704,
    "DeepSeek-V3": 671_026_419_200,  # without the layers that predict further tokens
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Qwen2-VL-7B": 8_291_375_616,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-VL-8B": 8_767_123_696,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    assert num_parameters(find_model(name).architecture) == PUBLISHED[name]


def test_every_model_has_a_published_size() -> None:
    assert {_plain(name) for name in MODELS} <= {_plain(name) for name in PUBLISHED}


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3-8b", "Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("llama3-70b", "Llama-3-70B"),
        ("llama-3.1-8b-instruct", "Llama-3.1-8B"),
        ("Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("mixtral_8x7b", "Mixtral-8x7B"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("DeepSeek-V3-0324", "DeepSeek-V3"),
        ("Qwen/Qwen3-VL-8B-Thinking", "Qwen3-VL-8B"),
        ("Qwen1.5-MoE-A2.7B-Chat", "Qwen1.5-MoE-A2.7B"),
    ],
)
def test_names(typed: str, name: str) -> None:
    found = find_model(typed)
    assert found.name == typed
    assert found.architecture == find_model(name).architecture


def test_names_are_of_one_model_each() -> None:
    names = [
        (name, repository)
        for repository, aliases in published_names()
        for name in {_plain(each) for each in (repository, *aliases)}
    ]
    assert len(dict(names)) == len(names)


def test_unknown_name() -> None:
    with pytest.raises(MegatuneError) as caught:
        find_model("Qwen3-9B")
    assert caught.value.exit_code is ExitCode.INPUT
    assert "Qwen3-8B" in caught.value.findings[0].why


def test_folder_and_file(tmp_path: Path) -> None:
    """A checkpoint's folder, its config.json, and a copy under another name are one model."""
    for repository, (_, config) in _published().items():
        folder = tmp_path / repository
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "numbers.json").write_text(json.dumps(config))
        known = find_model(repository)
        for path in (folder, folder / "config.json", folder / "numbers.json"):
            found = find_model(path)
            assert found.architecture == known.architecture


def test_nested_and_flat_settings_are_one_model(tmp_path: Path) -> None:
    flat = dict(_published()["Qwen/Qwen2-VL-7B"][1])
    vision = flat.pop("vision_config")
    nested = {
        "model_type": "qwen2_vl",
        "vision_config": vision,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "text_config": {**flat, "model_type": "qwen2_vl_text"},
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    found, known = find_model(tmp_path), find_model("Qwen2-VL-7B")
    assert found.architecture == known.architecture


def _refused(folder: Path) -> list[str]:
    with pytest.raises(MegatuneError) as caught:
        find_model(folder)
    return [each.what for each in caught.value.findings]


def test_everything_wrong_with_a_vision_model(tmp_path: Path) -> None:
    config = json.loads(json.dumps(_published()["Qwen/Qwen3-VL-8B"][1]))
    del config["vision_config"]["depth"]
    config["vision_config"]["patch_size"] = "16"
    config["text_config"]["attention_bias"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Types come first: what else is wrong is read from values of the right ones.
    assert _refused(tmp_path) == ["vision_config: patch_size = '16' is not a whole number above 0"]
    config["vision_config"]["patch_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _refused(tmp_path) == [
        "vision_config: depth = None is not a whole number above 0",
        "attention_bias = True is not supported",
    ]
    config.pop("vision_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MegatuneError, match="'vision_config' is missing"):
        find_model(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", '{"model_type": "bert"}'])
def test_what_is_no_model(text: str, tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text(text)
    with pytest.raises(MegatuneError) as caught:
        find_model(file)
    assert caught.value.exit_code is ExitCode.INPUT
    with pytest.raises(MegatuneError, match="there is no config"):
        find_model(tmp_path)


def built(config: dict[str, Any]) -> Any:
    """The model as Transformers builds it from this config.json, without memory for it."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(settings)


def count(module: Any) -> int:
    """Elements that its checkpoint holds: tied ones once, and buffers that are saved (DeepSeek-V3's expert bias)."""
    saved = module.state_dict().keys()
    buffers = (buffer for name, buffer in module.named_buffers() if name in saved)
    return sum(tensor.numel() for tensor in (*module.parameters(), *buffers))


VISION = ["Qwen/Qwen2-VL-7B", "Qwen/Qwen2.5-VL-7B", "Qwen/Qwen3-VL-8B"]


@pytest.mark.parametrize("repository", VISION)
def test_parts_of_vision_models(repository: str) -> None:
    """The encoder without its mergers, and these."""
    vision, visual = find_model(repository).architecture.vision, built(_published()[repository][1]).model.visual
    assert vision is not None
    mergers = [visual.merger, *getattr(visual, "deepstack_merger_list", ())]
    assert vision.num_projector_parameters == sum(map(count, mergers))
    assert vision.num_parameters == count(visual) - vision.num_projector_parameters
    assert vision.num_mergers == len(mergers)


def test_windows_of_attention() -> None:
    vision = find_model("Qwen2.5-VL-7B").architecture.vision
    assert vision is not None
    assert (vision.window_size, vision.fullatt_block_indexes, vision.gated) == (112, (7, 15, 23, 31), True)
    plain = find_model("Qwen2-VL-7B").architecture.vision
    assert plain is not None
    assert (plain.hidden_size, plain.out_hidden_size, plain.window_size, plain.gated) == (1280, 3584, None, False)


@pytest.mark.parametrize(
    "repository",
    [
        "meta-llama/Llama-3.2-3B",
        "Qwen/Qwen2.5-1.5B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen1.5-MoE-A2.7B",
        "deepseek-ai/DeepSeek-V3",
        *VISION,
    ],
)
def test_sizes_of_models_built(repository: str) -> None:
    config = _published()[repository][1]
    assert count(built(config)) == num_parameters(find_model(repository).architecture)
