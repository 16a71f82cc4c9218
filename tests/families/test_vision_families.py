"""Vision-language families: config.json, the weight map against Transformers' modules, and forms of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import VISION_SIZES, model_class, tiny_config

from megatune.architecture import Architecture
from megatune.encoders import VisionLayers
from megatune.errors import MegatuneError
from megatune.families import FAMILIES, load_architecture, read_architecture
from megatune.families.forms import CheckpointForm, FileTensor, find_form
from megatune.families.weights import Stack, Weight, hf_shapes, layers_of
from megatune.rope_scaling import MultimodalRope, QueryScaling, YarnRopeScaling

EVERY_FAMILY = pytest.mark.parametrize("family", VISION_SIZES)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = "model.language_model.layers.1.mlp.experts"


def built(family: str, **sizes: Any) -> tuple[Any, Architecture, tuple[Weight, ...]]:
    """Transformers' model without memory for it, its architecture and its weight map."""
    config = tiny_config(family, **sizes)
    with torch.device("meta"):
        model = model_class(family).from_config(config)
    architecture = read_architecture(config.to_dict(), "config.json")
    return model, architecture, FAMILIES[family].weight_map(architecture)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


@EVERY_FAMILY
def test_every_parameter_of_transformers_modules_is_declared(family):
    """Under the modules' own names; the modules of Qwen3-VL-MoE hold all experts' matrices in one."""
    model, architecture, weights = built(family)
    fused = next((form.fused for form in FAMILIES[family].forms if form.fused), ())
    trained = [weight for weight in weights if not weight.is_buffer]
    assert CheckpointForm(fused=fused).all_shapes(trained, architecture) == shapes_of(model)


@EVERY_FAMILY
def test_stacks_are_parts_of_the_encoder(family):
    model, architecture, weights = built(family)
    names = {
        stack: {
            name
            for weight in weights
            if weight.stack is stack and not weight.is_buffer
            for layer in layers_of(weight, architecture)
            for name in hf_shapes(weight, architecture, layer)
        }
        for stack in Stack
    }
    visual = {
        name for name, _ in model.named_parameters() if not name.startswith(("model.language_model.", "lm_head."))
    }
    assert names[Stack.VISION] | names[Stack.PROJECTOR] | names[Stack.DEEPSTACK] == visual
    projectors = ("model.visual.merger.", "model.multi_modal_projector.", "model.embed_vision.")
    assert names[Stack.PROJECTOR] == {name for name in visual if name.startswith(projectors)}
    assert names[Stack.DEEPSTACK] == {name for name in visual if name.startswith("model.visual.deepstack_merger_list.")}


def found_form(family: str, names: Mapping[str, tuple[int, ...]], version: str = "5.17.0", **sizes: Any) -> Any:
    _, architecture, weights = built(family, **sizes)
    return find_form(FAMILIES[family].forms, weights, architecture, names, names.__getitem__, version)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("version", ["4.45.0", "5.17.0", ""])
def test_both_generations_of_names_are_read(family, version):
    modules = shapes_of(built(family)[0])
    old = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): shape
        for name, shape in modules.items()
    }
    assert found_form(family, old, version).file_name("model.visual.merger.mlp.0.bias") == "visual.merger.mlp.0.bias"
    form = found_form(family, modules, version)
    assert form == CheckpointForm()
    assert found_form(family, old, version).file_name("lm_head.weight") == "lm_head.weight"


@EVERY_FAMILY
def test_of_an_incomplete_checkpoint_the_form_is_still_known(family):
    """What is missing is then named as the other files have it."""
    modules = shapes_of(built(family)[0])
    some = {name: shape for name, shape in modules.items() if not name.startswith("model.visual.blocks.1.")}
    assert found_form(family, some) == found_form(family, modules)


def transposed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: (shape[0], shape[2], shape[1]) if ".experts." in name else shape for name, shape in shapes.items()}


@pytest.mark.parametrize("version", ["4.57.0", "5.17.0", ""])
def test_arrangement_of_fused_experts_is_told_by_shape(version):
    modules = shapes_of(built("qwen3_vl_moe")[0])
    assert not found_form("qwen3_vl_moe", modules, version).transposed
    assert found_form("qwen3_vl_moe", transposed(modules), version).transposed


# Gate and up together are a square matrix, and down is one.
@pytest.mark.parametrize("channels", [32, 64])
@pytest.mark.parametrize(
    ("version", "is_transposed"), [("4.57.0", True), ("5.17.0", False), ("10.0", False), ("", True)]
)
def test_square_experts_are_arranged_as_the_version_does(channels, version, is_transposed):
    sizes = {"moe_intermediate_size": channels}
    modules = shapes_of(built("qwen3_vl_moe", **sizes)[0])
    files = transposed(modules) if is_transposed else modules
    assert found_form("qwen3_vl_moe", files, version, **sizes).transposed == is_transposed


def test_experts_one_by_one_are_read_too():
    _, architecture, weights = built("qwen3_vl_moe")
    apart = CheckpointForm().all_shapes(weights, architecture)
    assert apart[f"{_EXPERTS}.7.up_proj.weight"] == (40, 64)
    assert found_form("qwen3_vl_moe", apart) == CheckpointForm()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_places_in_a_fused_tensor_are_its_experts(is_transposed):
    """Gate's rows before up's; matrices cut out at these places are those that went in."""
    _, architecture, weights = built("qwen3_vl_moe")
    form = next(each for each in FAMILIES["qwen3_vl_moe"].forms if each.fused and each.transposed == is_transposed)
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.rand(2, 8, 40, 64, generator=generator)
    file = torch.cat((gate, up), 1)
    file = file.transpose(1, 2) if is_transposed else file
    places = form.locate_all(weights, architecture)
    assert form.all_shapes(weights, architecture)[f"{_EXPERTS}.gate_up_proj"] == tuple(file.shape)
    for expert in range(8):
        for name, expected in (("gate_proj", gate), ("up_proj", up)):
            place = places[f"{_EXPERTS}.{expert}.{name}.weight"]
            assert (place.name, place.expert) == (f"{_EXPERTS}.gate_up_proj", expert)
            matrix = file[expert].t() if place.transposed else file[expert]
            assert torch.equal(matrix[place.first_row : place.first_row + place.rows], expected[expert])
    down = places[f"{_EXPERTS}.3.down_proj.weight"]
    stack = (8, 40, 64) if is_transposed else (8, 64, 40)
    assert down == FileTensor(f"{_EXPERTS}.down_proj", 3, 0, 64, is_transposed, stack)
    head = places["lm_head.weight"]
    assert head == FileTensor("lm_head.weight", shape=head.shape)


# --- config.json -----------------------------------------------------------------------------------------------------


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@EVERY_FAMILY
def test_what_is_read_is_what_transformers_builds(family, tmp_path):
    """The encoder's own configuration builds it again, and ids of tokens are those of the file."""
    from transformers import AutoConfig

    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    architecture = load_architecture(tmp_path)
    vision = architecture.vision
    assert vision is not None
    again = AutoConfig.for_model(family, vision_config=json.loads(vision.config)).vision_config
    assert again.to_dict() == config.vision_config.to_dict()
    width = VISION_SIZES[family].get("embed_dim", VISION_SIZES[family]["hidden_size"])
    assert (vision.depth, vision.hidden_size, vision.out_hidden_size, vision.patch_size) == (4, width, 64, 4)
    if family == "mistral3":
        assert (vision.image_token_id, vision.has_videos, vision.num_heads) == (297, False, 2)
        assert (architecture.mrope, vision.spatial_merge_size, vision.in_channels) == (None, 2, 3)
        assert vision.layers == VisionLayers(
            norm_epsilon=1e-5, rotary_base=1e4, projector_norm_epsilon=1e-5, pre_norm=True
        )
        return
    if vision.tokens_of_image:
        assert (vision.image_token_id, vision.has_videos, vision.num_heads) == (297, False, 2)
        assert (vision.tokens_of_image, vision.spatial_merge_size) == (280, 3)
        assert (vision.whole, vision.whole_in_windows) == (True, True)
        assert vision.layers is not None
        assert (vision.layers.num_positions, vision.layers.rotary_base, vision.layers.standardized) == (64, 100, True)
        return
    if vision.square:
        assert (vision.image_token_id, vision.has_videos, vision.num_heads, vision.square) == (297, False, 2, 24)
        assert (architecture.mrope, vision.spatial_merge_size, vision.whole) == (None, 2, family == "gemma3")
        assert vision.layers is not None
        assert vision.layers.num_positions == 36 + (family == "internvl")
        return
    assert (vision.image_token_id, vision.video_token_id) == (297, 298)
    assert (vision.vision_start_token_id, vision.vision_end_token_id) == (299, 300)
    assert vision.timestamps == family.startswith("qwen3")
    assert vision.tokens_per_second == (2 if family == "qwen2_5_vl" else None)
    interleaved = family.startswith("qwen3")
    section = (2, 2, 2) if architecture.delta else (6, 3, 3) if interleaved else (2, 3, 3)
    assert architecture.mrope == MultimodalRope(section=section, interleaved=interleaved)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_files_of_old_are_the_same_model(family, tmp_path):
    """Beside vision_config, with rotary settings of type mrope: as on the hub."""
    config = tiny_config(family).to_dict()
    text, rope = config.pop("text_config"), config["vision_config"].pop("rope_parameters")
    assert rope["rope_type"] == "axial"
    sections = text.pop("rope_parameters")["mrope_section"]
    scaling = {"type": "mrope", "mrope_section": sections}
    flat = {**text, **config, "model_type": family, "rope_theta": 1e4, "rope_scaling": scaling}
    flat["vision_config"]["in_chans"] = flat["vision_config"].pop("in_channels")
    new = read_architecture(tiny_config(family).to_dict(), "config.json")
    old = load_architecture(write(tmp_path, flat))
    assert new.vision is not None
    assert old.vision is not None
    for name in ("num_layers", "hidden_size", "kv_channels", "rotary_base", "rope_scaling", "mrope", "vocab_size"):
        assert getattr(old, name) == getattr(new, name)
    assert old.vision.num_parameters == new.vision.num_parameters
    assert old.vision.in_channels == 3


@pytest.mark.parametrize(
    ("family", "root", "text", "tied"),
    [
        ("qwen2_vl", True, False, True),
        ("qwen2_vl", False, True, True),  # files from before Transformers 5
        ("qwen3_vl", True, True, True),
        ("qwen3_vl_moe", False, True, False),  # text_config has a default of its own, which nothing reads
        ("qwen3_vl_moe", True, False, True),
        ("gemma3", None, None, True),  # as published, beside no output layer
        ("gemma3", False, True, False),  # the default of its decoder's part is True
        ("mistral3", None, None, False),  # as published, beside an output layer
        ("mistral3", None, True, True),
    ],
)
def test_where_it_is_said_that_embeddings_are_tied(family, root, text, tied):
    config = tiny_config(family).to_dict()
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = root, text
    assert read_architecture(config, "config.json").tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        (
            "text_config",
            {"rope_parameters": ROPE | {"mrope_section": [4, 4, 5]}},
            "mrope_section = [4, 4, 5] is impossible",
        ),
        ("text_config", {"rope_parameters": ROPE | {"mrope_section": 12}}, "mrope_section = 12 is impossible"),
        ("text_config", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("vision_config", {"out_hidden_size": 48}, "tokens of images and videos are 48 wide"),
        ("vision_config", {"num_heads": 3}, "num_heads = 3 is impossible"),
        ("vision_config", {"deepstack_visual_indexes": [0, 4]}, "deepstack_visual_indexes names layer 4"),
        ("vision_config", {"num_position_embeddings": 0}, "num_position_embeddings = 0 is not a whole number"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, part, changes, said):
    config = tiny_config("qwen3_vl").to_dict()
    config[part] |= changes
    with pytest.raises(MegatuneError) as caught:
        load_architecture(write(tmp_path, config))
    assert said in str(caught.value)


def mistral3(text: Mapping[str, Any], vision: Mapping[str, Any], **root: Any) -> dict[str, Any]:
    """A config.json as published: much is left to Transformers' defaults."""
    decoder = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 301}  # fmt: skip
    return {"model_type": "mistral3", "text_config": {**decoder, **text}, "vision_config": dict(vision), **root}


MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def test_the_decoder_of_mistral3_has_the_defaults_of_its_family():
    small = read_architecture(mistral3({"sliding_window": None}, {"patch_size": 14}, image_token_index=9), "")
    assert (small.norm_epsilon, small.kv_channels, small.windows, small.query_scaling) == (1e-6, 16, (), None)
    vision = small.vision
    assert vision is not None
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.image_token_id) == (24, 1024, 16, 9)
    assert (vision.hidden_act, vision.merged_size, vision.out_hidden_size) == ("gelu", 4096, 64)
    windowed = read_architecture(mistral3({"max_position_embeddings": 64}, {}), "")
    assert (windowed.windows, windowed.vision and windowed.vision.patch_size) == ((4096, 4096), 16)
    ministral = read_architecture(mistral3({"model_type": "ministral3", "rope_parameters": MINISTRAL_ROPE}, {}), "")
    assert (ministral.norm_epsilon, ministral.kv_channels, ministral.windows) == (1e-5, 128, ())
    assert ministral.query_scaling == QueryScaling(0.1, 16384)
    assert isinstance(ministral.rope_scaling, YarnRopeScaling)
    assert (ministral.max_position_embeddings, ministral.rope_scaling.attention_factor) == (262144, 1.0)


@pytest.mark.parametrize(
    ("text", "vision", "root", "what"),
    [
        ({"model_type": "llama"}, {}, {}, "text_config: model_type = 'llama' is not supported"),
        ({}, {"model_type": "siglip_vision_model"}, {}, "vision_config.model_type = 'siglip_vision_model' is not"),
        ({}, {"attention_dropout": 0.1}, {}, "vision_config.attention_dropout = 0.1 is not supported"),
        ({}, {"hidden_act": "relu"}, {}, "vision_config: hidden_act = 'relu' is not supported"),
        ({}, {"num_attention_heads": 3}, {}, "vision_config: num_heads = 3 is impossible"),
        ({}, {"num_attention_heads": 512}, {}, "vision_config: num_heads = 512 is impossible"),
        ({}, {}, {"vision_feature_layer": -2}, "vision_feature_layer = -2 is not supported"),
        ({}, {}, {"vision_feature_layer": [-1, 3]}, r"vision_feature_layer = \[-1, 3\] is not supported"),
        ({}, {}, {"projector_hidden_act": "silu"}, "projector_hidden_act = 'silu' is not supported"),
        (
            {"model_type": "ministral3", "rope_parameters": {**MINISTRAL_ROPE, "llama_4_scaling_beta": None}}, {}, {},
            "rope_parameters: llama_4_scaling_beta = None is not a number",
        ),
    ],
)  # fmt: skip
def test_what_of_mistral3_is_not_computed_is_refused(text, vision, root, what):
    with pytest.raises(MegatuneError, match=what):
        read_architecture(mistral3(text, vision, **root), "config.json")


def test_layers_of_which_the_file_states_only_the_kinds() -> None:
    """Their number is then the family's default."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "layer_types": ["sliding_attention", "full_attention"]}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    with pytest.raises(MegatuneError, match="layer_types has 2 entries, but num_hidden_layers is 26"):
        read_architecture(config, "config.json")
