"""Images of one size, in tiles, or of as many tokens as they may have: pixels and tokens of Transformers' processors of
Gemma 3, InternVL and Gemma 4."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_media import encoded, picture
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.conversation import Conversation, Message, RowMedia
from megatune.data.encode import Encoded, load_tokenizer, make_encoder
from megatune.data.media import MediaSource
from megatune.data.media.arguments import media_arguments
from megatune.data.media.load import load_processor
from megatune.data.vision import load_vision_input
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture

PROCESSORS = {"gemma3": Gemma3ImageProcessorPil, "internvl": GotOcr2ImageProcessorPil}
# LLaMA-Factory resizes nothing of this size first.
SETTINGS = {"image_min_pixels": 1, "image_max_pixels": 10**6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family, num_layers=1) for family in PROCESSORS}


def pixels_of(folder: Path, content: bytes, **settings: Any) -> tuple[np.ndarray, int]:
    """Pixels of an image as the model takes them, and its tokens."""
    vision = load_architecture(folder).vision
    assert vision is not None
    made = load_processor(folder, vision, DataSettings(**settings, **SETTINGS))
    source = MediaSource("image", data=content)
    measured = made.measure(source)
    (run,) = made.runs(measured)
    given = [("image", measured.grid, None, made.pixels(source, measured))]
    found = media_arguments(np.array([vision.image_token_id] * run), given, vision)
    return found["pixel_values"].numpy(), run


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("size", [(97, 61), (224, 224), (300, 500)])
def test_an_image_is_that_of_transformers(folders: dict[str, Path], family: str, size: tuple[int, int]) -> None:
    content = encoded(picture(*size), "PNG")
    found, run = pixels_of(folders[family], content)
    asked: Any = PROCESSORS[family].from_pretrained(folders[family])
    expected = asked([Image.open(io.BytesIO(content)).convert("RGB")], return_tensors="np")["pixel_values"]
    assert np.array_equal(found, np.stack(expected))
    assert run == 16


@pytest.mark.parametrize("size", [(97, 61), (224, 224), (400, 400), (300, 500), (90, 999), (640, 480), (700, 610)])
def test_tiles_are_those_of_transformers(folders: dict[str, Path], size: tuple[int, int]) -> None:
    content = encoded(picture(*size), "PNG")
    found, run = pixels_of(folders["internvl"], content, crop_to_patches=True)
    processor = GotOcr2ImageProcessorPil.from_pretrained(folders["internvl"])
    expected: Any = processor([Image.open(io.BytesIO(content))], crop_to_patches=True, return_tensors="np")
    assert np.array_equal(found, np.stack(expected["pixel_values"]))
    assert run == 16 * expected["num_patches"][0]
    assert expected["num_patches"][0] == processor.get_number_of_image_patches(*size[::-1], {"crop_to_patches": True})


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gemma4", tmp_path_factory.mktemp("models") / "gemma4", num_layers=2)


@pytest.mark.parametrize("size", [(97, 61), (224, 224), (300, 500), (1000, 30), (20, 900), (640, 480)])
def test_patches_are_those_of_gemma4s_processor(gemma4: Path, size: tuple[int, int]) -> None:
    vision = load_architecture(gemma4).vision
    assert vision is not None
    made = load_processor(gemma4, vision, DataSettings(**SETTINGS))
    content = encoded(picture(*size), "PNG")
    source = MediaSource("image", data=content)
    measured = made.measure(source)
    given = [("image", measured.grid, None, made.pixels(source, measured))]
    found = media_arguments(np.array([vision.image_token_id] * made.runs(measured)[0]), given, vision)
    expected: Any = Gemma4ImageProcessorPil.from_pretrained(gemma4)([Image.open(io.BytesIO(content))])
    patches = measured.num_patches
    for name in ("pixel_values", "image_position_ids"):
        theirs = np.stack(expected[name])
        assert np.array_equal(found[name].numpy(), theirs[:, :patches]), name
    assert (theirs[:, patches:] == -1).all()
    assert (
        made.placeholder(measured) == "<|image>" + "<|image|>" * expected["num_soft_tokens_per_image"][0] + "<image|>"
    )


def test_a_thin_image_is_one_row_of_tokens(gemma4: Path) -> None:
    vision = load_architecture(gemma4).vision
    assert vision is not None
    made = load_processor(gemma4, vision, DataSettings(**SETTINGS))
    measured = made.measure(MediaSource("image", data=encoded(picture(9000, 2), "PNG")))
    assert measured.grid == (1, 3, 3 * 70)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pooling_kernel_size": 2}, "pooling_kernel_size = 2, but the model has 3"),
        ({"do_normalize": True}, "do_normalize = True, but the model has False"),
        ({"max_soft_tokens": 0}, "max_soft_tokens = 0 is not valid"),
    ],
)
def test_what_gemma4s_processor_is_not_is_refused(gemma4: Path, tmp_path: Path, changes: Any, what: str) -> None:
    vision = load_architecture(gemma4).vision
    assert vision is not None
    said = json.loads((gemma4 / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | changes))
    with pytest.raises(MegatuneError, match=what):
        load_processor(tmp_path, vision, DataSettings())


def test_tokens_of_tiles_are_those_of_internvls_processor(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("wide", (300, 90)), ("square", (50, 50))):
        picture(*size).save(tmp_path / f"{name}.png")
    files = [str(tmp_path / f"{name}.png") for name in ("wide", "square")]
    folder = folders["internvl"]
    asked = "<image>What is\nthis? <image>"
    conversation = Conversation(
        (Message("user", asked), Message("assistant", "It.")),
        system="Be brief.",
        media=tuple(RowMedia("image", file) for file in files),
    )
    tokenizer, data = load_tokenizer(folder), DataSettings(template="intern_vl", crop_to_patches=True, **SETTINGS)
    encoder = make_encoder(
        Settings(run=RunSettings(), data=data), tokenizer, load_vision_input(folder, tokenizer, data)
    )
    (found,) = encoder.encode([conversation])
    assert isinstance(found, Encoded)
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    named: Any = AutoTokenizer.from_pretrained(folder, extra_special_tokens=names | {"video_token": "<video>"})
    # It asks for a processor of videos, which torchvision makes.
    monkeypatch.setattr(InternVLProcessor, "check_argument_for_proper_class", lambda *arguments: None)
    processor: Any = InternVLProcessor(GotOcr2ImageProcessorPil.from_pretrained(folder), named, image_seq_length=16)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": asked.replace("<image>", "<IMG_CONTEXT>")},
        {"role": "assistant", "content": "It."},
    ]
    text = named.apply_chat_template(chat, tokenize=False)
    images = [Image.open(file) for file in files]
    expected = processor(images=images, text=text)["input_ids"]
    assert found.documents[0].input_ids.tolist() == list(expected[0])


@pytest.mark.parametrize("template", ["gemma3", None])
def test_tokens_are_those_of_gemma3s_processor(folders: dict[str, Path], tmp_path: Path, template: str | None) -> None:
    """Line breaks around an image become one token with those of the template, which trims a message."""
    picture(60, 40).save(tmp_path / "a.png")
    folder = folders["gemma3"]
    asked = ["<image>What is\nthis? <image>", "<image>"]
    messages = [
        Message("user", asked[0]),
        Message("assistant", "It."),
        Message("user", asked[1]),
        Message("assistant", "So."),
    ]
    conversation = Conversation(
        tuple(messages), system="Be brief.", media=(RowMedia("image", str(tmp_path / "a.png")),) * 3
    )
    tokenizer = load_tokenizer(folder)
    data = DataSettings(template=template, **SETTINGS)
    encoder = make_encoder(
        Settings(run=RunSettings(), data=data), tokenizer, load_vision_input(folder, tokenizer, data)
    )
    (found,) = encoder.encode([conversation])
    assert isinstance(found, Encoded)
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    named: Any = AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    processor = Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(folder), named, image_seq_length=16)
    chat = [{"role": "system", "content": "Be brief."}]
    chat += [{"role": each.role, "content": each.content.replace("<image>", "<start_of_image>")} for each in messages]
    text = named.apply_chat_template(chat, tokenize=False)
    images = [Image.open(tmp_path / "a.png")] * 3
    expected = processor(images=images, text=text, add_special_tokens=False)["input_ids"]
    assert found.documents[0].input_ids.tolist() == list(expected[0])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"size": {"height": 112, "width": 224}}, "the model needs sides of 224 pixels"),
        ({"size": 112}, "size = 112, but the model needs sides of 224 pixels"),
        ({"size": {"height": 224, "width": [224]}}, "the model needs sides of 224 pixels"),
        ({"do_pan_and_scan": True}, "crops are not supported"),
        ({"do_resize": False}, "do_resize = False; only True is supported"),
    ],
)
def test_what_is_not_built_is_refused(folders: dict[str, Path], tmp_path: Path, changes: Any, what: str) -> None:
    vision = load_architecture(folders["gemma3"]).vision
    assert vision is not None
    said = json.loads((folders["gemma3"] / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | changes))
    with pytest.raises(MegatuneError, match=what) as caught:
        load_processor(tmp_path, vision, DataSettings())
    assert caught.value.exit_code == ExitCode.INPUT
