"""Vision-language demo checkpoints have the published form, and Transformers loads what was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PixtralImageProcessorPil,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
)

from megatune.demo.checkpoint import make_checkpoint, summarize_checkpoint
from megatune.demo.family import FAMILIES, demo_family
from megatune.demo.tokenizer import make_tokenizer
from megatune.errors import MegatuneError
from megatune.families import load_architecture

VISION = [name for name, family in FAMILIES.items() if family.vision is not None]
QWEN = [name for name in VISION if name.startswith("qwen")]
SMALL: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 300}
TOWER = {"vision_num_layers": 4, "vision_hidden_size": 24, "vision_num_heads": 3}


def tower_of(model: PreTrainedModel) -> Any:
    """The encoder, with what makes tokens of its patches."""
    if hasattr(model.model, "visual"):
        return model.model.visual
    projector = "embed_vision" if hasattr(model.model, "embed_vision") else "multi_modal_projector"
    return torch.nn.ModuleList([model.model.vision_tower, getattr(model.model, projector)])


def logits(model: PreTrainedModel, folder: Path, picture: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt with one image of 4 × 6 patches."""
    config = model.config
    ids = [config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id, 5, 6, 7]
    input_ids = torch.tensor([ids])
    with torch.inference_mode():
        return model(
            input_ids=input_ids,
            pixel_values=picture,
            image_grid_thw=torch.tensor([[1, 4, 6]]),
            mm_token_type_ids=(input_ids == config.image_token_id).int(),
        ).logits


@pytest.mark.parametrize("name", QWEN)
def test_the_numbers_asked_for_are_the_models(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path / "m", **SMALL, **TOWER)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    text = model.config.get_text_config()
    assert model.config.model_type == name
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size, text.vocab_size) == (3, 32, 48, 300)
    tower = tower_of(model)
    patch = 16 if name.startswith("qwen3") else 14
    assert tower.patch_embed.proj.weight.shape == (24, 3, 2, patch, patch)
    assert (len(tower.blocks), tower.blocks[0].attn.num_heads) == (4, 3)
    assert (tower.spatial_merge_size, model.model.language_model.embed_tokens.weight.shape[1]) == (2, 32)
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == (not name.endswith("_moe"))
    assert summarize_checkpoint(folder).num_parameters == model.num_parameters()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    config = model.config
    ids = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    assert tuple(tokenizer.convert_tokens_to_ids(list(tokens))) == ids


@pytest.mark.parametrize("name", VISION)
def test_our_declarations_count_what_is_written(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path / "m", **SMALL, **TOWER)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    vision = load_architecture(folder).vision
    assert vision is not None
    tower = sum(parameter.numel() for parameter in tower_of(model).parameters())
    assert vision.num_parameters + vision.num_projector_parameters == tower


def test_a_mistral3_is_a_ministral_with_pixtral(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral3", tmp_path / "m", **SMALL, **TOWER)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    text, tower = model.config.text_config, model.model.vision_tower
    assert (text.model_type, text.num_hidden_layers, text.vocab_size, text.head_dim) == ("ministral3", 3, 300, 8)
    assert (len(tower.transformer.layers), tower.config.num_attention_heads) == (4, 3)
    assert tower.patch_conv.weight.shape == (24, 3, 14, 14)
    assert not model.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("[IMG]") == model.config.image_token_index
    processor: Any = PixtralImageProcessorPil.from_pretrained(folder)
    assert (processor.size["longest_edge"], processor.image_mean) == (1540, (0.48145466, 0.4578275, 0.40821073))
    # Patches in other places are another picture.
    image = torch.randn(1, 3, 56, 84, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[*[model.config.image_token_index] * 6, 5, 6, 7]])
    with torch.inference_mode():
        seen, turned = (
            model(input_ids=ids, pixel_values=each, image_sizes=torch.tensor([[56, 84]])).logits
            for each in (image, image.roll(28, 3))
        )
    assert (seen - turned).abs().max() > 1e-2


def test_windows_and_deepstack_are_where_the_published_models_have_them(tmp_path: Path) -> None:
    def vision_of(name: str, **sizes: Any) -> dict[str, Any]:
        folder = make_checkpoint(name, tmp_path / "m", **{**SMALL, **sizes}, overwrite=True)
        vision: dict[str, Any] = json.loads((folder / "config.json").read_text())["vision_config"]
        return vision

    assert vision_of("qwen2_5_vl", vision_num_layers=32)["fullatt_block_indexes"] == [7, 15, 23, 31]
    assert vision_of("qwen3_vl", vision_num_layers=24)["deepstack_visual_indexes"] == [5, 11, 17]
    small = vision_of("qwen2_5_vl")
    assert (small["fullatt_block_indexes"], small["window_size"], small["tokens_per_second"]) == ([1, 3], 112, 2)
    assert vision_of("qwen3_vl")["deepstack_visual_indexes"] == [0, 1, 2]
    assert vision_of("qwen3_vl", num_layers=2)["deepstack_visual_indexes"] == [0, 1]  # no decoder layer for a third


@pytest.mark.parametrize("name", QWEN)
def test_pictures_and_their_places_show_in_the_logits(name: str, tmp_path: Path) -> None:
    """A tower, a norm, a bias or a row of positions that went unused must be told by the numbers."""
    folder = make_checkpoint(name, tmp_path / "m", **SMALL, **TOWER)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    rope = model.config.get_text_config().rope_parameters
    turned = model.model.language_model.layers[1].self_attn.head_dim * rope.get("partial_rotary_factor", 1)
    assert sum(rope["mrope_section"]) * 2 == turned
    assert min(rope["mrope_section"]) > 0
    patch = demo_family(name).vision.processor["patch_size"]  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    picture = torch.randn(24, 3 * 2 * patch**2, generator=generator)
    seen = logits(model, folder, picture)
    # Patches change places: only positions, windows and their order tell these pictures apart.
    turned = logits(model, folder, picture.flip(0))
    assert (seen - turned).abs().max() > 1e-2
    assert all(0.01 < each.std() < 0.3 for each in tower_of(model).parameters() if each.dim() == 1)


def test_experts_have_the_published_arrangement_and_load_as_they_were(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_vl_moe", tmp_path / "m", **SMALL, num_experts=4, max_shard_size="60KB")
    name = "model.language_model.layers.1.mlp.experts"
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert tensors[f"{name}.gate_up_proj"].shape == (4, 32, 2 * 24)
    assert tensors[f"{name}.down_proj"].shape == (4, 24, 32)
    assert json.loads((folder / "config.json").read_text())["transformers_version"].startswith("4.")

    model = AutoModelForImageTextToText.from_pretrained(folder)
    experts = model.model.language_model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj, tensors[f"{name}.gate_up_proj"].transpose(1, 2))
    assert torch.equal(experts.down_proj, tensors[f"{name}.down_proj"].transpose(1, 2))
    # Transformers writes its own arrangement again; the models are equal.
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "again").state_dict()
    assert load_file(tmp_path / "again" / "model.safetensors")[f"{name}.gate_up_proj"].shape == (4, 48, 32)
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", QWEN)
def test_the_image_processor_is_the_published_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path / "m", **SMALL)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
    area = (processor.size["shortest_edge"], processor.size["longest_edge"])
    if name.startswith("qwen3"):
        assert (processor.patch_size, area) == (16, (256**2, 4096**2))
        assert processor.image_mean == processor.image_std == (0.5, 0.5, 0.5)
        video = json.loads((folder / "video_preprocessor_config.json").read_text())
        assert video["size"] == {"longest_edge": 25165824, "shortest_edge": 4096}
        assert video["video_processor_type"] == "Qwen3VLVideoProcessor"
    else:
        assert (processor.patch_size, area) == (14, (56**2, 28**2 * 16384))
        assert processor.image_mean == (0.48145466, 0.4578275, 0.40821073)
        assert not (folder / "video_preprocessor_config.json").exists()
    assert (processor.merge_size, processor.temporal_patch_size) == (2, 2)


def test_numbers_that_make_no_vision_model_are_named(tmp_path: Path) -> None:
    def fixes(name: str, **sizes: Any) -> dict[str, str]:
        with pytest.raises(MegatuneError) as raised:
            make_checkpoint(name, tmp_path / "m", **sizes)
        return {finding.where: finding.fix for finding in raised.value.findings}

    assert fixes("qwen3", vision_num_layers=2, vision_hidden_size=8, vision_num_heads=1).keys() == {
        "--vision_layers",
        "--vision_hidden",
        "--vision_heads",
    }
    assert fixes("qwen3_vl", vision_num_layers=0, head_dim=4) == {
        "--vision_layers": "--vision_layers 1",
        "--head_dim": "--head_dim 8",
    }
    assert fixes("qwen2_vl", vision_hidden_size=50, vision_num_heads=3, head_dim=32) == {
        "--vision_hidden": "--vision_hidden 48",
        "--head_dim": "leave it out",
    }
    assert fixes("qwen3_vl_moe", moe_ffn_hidden_size=32) == {"--moe_ffn": "--moe_ffn 48"}
    assert fixes("qwen3_vl_moe", moe_ffn_hidden_size=64) == {"--moe_ffn": "--moe_ffn 48"}
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "internvl"])
def test_processors_find_their_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(name, tmp_path / "m", **SMALL, **TOWER))
    vision = demo_family(name).vision
    assert vision is not None
    assert vision.named_tokens
    assert len(tokenizer) == SMALL["vocab_size"]  # no token came above those of the model
    for key, token in vision.named_tokens.items():
        assert getattr(tokenizer, key) == token
        assert tokenizer.encode(token, add_special_tokens=False) == [getattr(tokenizer, f"{key}_id")]


def test_a_processor_reads_a_chat_with_a_picture(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma3", tmp_path / "m", **SMALL, **TOWER)
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    inputs = processor(text=text, images=[Image.new("RGB", (40, 30))], return_tensors="pt")
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == 1  # the mark in front of the picture
    assert int((inputs["input_ids"] == processor.tokenizer.image_token_id).sum()) == 16


def test_gemma4_shows_a_picture_in_its_turn() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    tokenizer = make_tokenizer(demo_family("gemma4"), 400)
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text == "<bos><|turn>user\n<|image|>What?<turn|>\n"
