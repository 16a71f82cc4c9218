"""What is generated from pictures is what full forward passes with our positions say, and bad pictures are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from megatune.cli import infer
from megatune.config.groups.data import DataSettings
from megatune.data.media import MediaSource
from megatune.data.media.arguments import rotary_position_ids
from megatune.data.media.load import load_processor
from megatune.data.media.processor import pad_media
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.generation.answering import chat
from megatune.generation.generator import Generator
from megatune.generation.media import MediaItem, PromptMedia, generate_inputs, read_media
from megatune.generation.options import GenerationOptions, MediaFile

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3", "gemma3", "gemma4", "internvl")
OF_IMAGES = ("mistral3", "gemma3", "gemma4", "internvl")
Prompted = tuple[list[int], tuple[MediaItem, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp("models") / family, num_layers=3)
        return made[family]

    return folder_of


def noise(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    noise(112, 56, 0).save(folder / "wide.png")
    noise(56, 112, 1).save(folder / "tall.jpg")
    for number in range(5):
        noise(112, 56, 2 + number).save(folder / f"frame{number}.png")
    return folder


def image(path: Path) -> MediaFile:
    return MediaFile("image", str(path))


def prepared(folder: Path, files: Path, kinds: str) -> PromptMedia:
    """Images (i, of two sizes) and videos (v, of five frames) in this order."""
    vision = load_architecture(folder).vision
    assert vision is not None
    processor = load_processor(folder, vision, DataSettings())
    images = iter([MediaSource("image", str(files / name)) for name in ("wide.png", "tall.jpg")])
    video = MediaSource(
        "video", frames=tuple(MediaSource("image", str(files / f"frame{number}.png")) for number in range(5))
    )
    return PromptMedia(vision, tuple(read_media(processor, next(images) if k == "i" else video) for k in kinds))


def with_media(generator: Generator, media: PromptMedia, **changes: Any) -> Generator:
    options = generator.options.model_copy(update=changes)
    return Generator(generator.backend, generator.tokenizer, options, generator.source, media)


def prompted(generator: Generator, text: str) -> Prompted:
    assert generator.media is not None
    placed, shown = generator.media.placed(text)
    messages = [{"role": "user", "content": placed}]
    chat = generator.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    chat = pad_media(chat, generator.media.vision.text)
    return generator.tokenizer(chat, add_special_tokens=False)["input_ids"], shown


def greedy(generator: Generator, prompt: Prompted, steps: int) -> tuple[list[int], torch.Tensor]:
    """Tokens by full forward passes without a cache, and the last pass's position_ids, [4, 1, T], or [1, T] where a
    token has one position."""
    assert generator.media is not None
    vision, (ids, shown) = generator.media.vision, prompt
    ids = list(ids)
    config = generator.backend.model.generation_config
    for _ in range(steps):
        grids = [(each.measured.grid, each.measured.seconds_per_grid) for each in shown]
        rows = rotary_position_ids(np.array(ids), grids, vision)
        position_ids = torch.from_numpy(np.concatenate([np.arange(len(ids))[None], rows]))[:, None]
        position_ids = position_ids[0] if vision.one_position else position_ids
        inputs = generate_inputs(vision, torch.tensor([ids]), shown) | {"position_ids": position_ids}
        with torch.inference_mode():
            logits = generator.backend.model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[0, -1]
            logits[config.suppress_tokens or []] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] in config.eos_token_id:
            break
    return ids[len(prompt[0]) :], position_ids


ASKED = [
    ("i", "What is this?"),
    ("v", "What is this?"),
    ("ii", "Is <image> as large as\n<image>?"),
    ("vi", "First <image>, then <video>!"),
    ("iv", "<video> then"),
]


# Two images, or an image and a video, are harder than one; qwen3_vl_moe has the positions of qwen3_vl.
@pytest.mark.extended("i", "v", "qwen3_vl_moe")
@pytest.mark.parametrize(
    ("family", "kinds", "text"),
    [(family, *asked) for family in FAMILIES for asked in ASKED if family not in OF_IMAGES or "v" not in asked[0]],
)
def test_a_greedy_answer_is_that_of_full_forward_passes(
    family: str, kinds: str, text: str, folders: Callable[[str], Path], files: Path
) -> None:
    generator = Generator.load(folders(family), GenerationOptions(max_new_tokens=8))
    shows = with_media(generator, prepared(folders(family), files, kinds))
    # A placeholder in the answer of a random model would have no picture in a full forward pass.
    vision = prepared(folders(family), files, "").vision
    shows.backend.model.generation_config.suppress_tokens = [
        token for token in (vision.image_token_id, vision.video_token_id) if token >= 0
    ]
    used: list[torch.Tensor] = []
    rotary = shows.backend.model.model.language_model.rotary_emb

    def note(_: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        # Gemma 3's is called for layers with a window, too.
        if kwargs.get("layer_type", args[-1]) != "sliding_attention":
            used.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

    hook = rotary.register_forward_pre_hook(note, with_kwargs=True)
    reply = shows.answer([{"role": "user", "content": text}])
    hook.remove()
    prompt = prompted(shows, text)
    expected, position_ids = greedy(shows, prompt, 8)
    assert reply.num_tokens == len(expected)
    assert reply.text == shows.tokenizer.decode(expected, skip_special_tokens=True)
    # The last token is never read.
    rows = slice(None) if vision.one_position else slice(1, None)
    assert torch.equal(torch.cat([ids[-3:] for ids in used], dim=-1), position_ids[rows])
    assert len(prompt[1]) == len(kinds)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pictures_and_not_their_tokens_alone_make_the_answer(
    family: str, folders: Callable[[str], Path], files: Path
) -> None:
    generator = Generator.load(folders(family), GenerationOptions(max_new_tokens=12))
    wide, again = prepared(folders(family), files, "ii").items
    vision = prepared(folders(family), files, "").vision
    black = dataclasses.replace(wide, pixels=np.zeros_like(wide.pixels))
    question = [{"role": "user", "content": "What is this?"}]
    answers = [
        with_media(generator, PromptMedia(vision, (picture,))).answer(question).text for picture in (wide, black, again)
    ]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_is_what_transformers_generates(family: str, folders: Callable[[str], Path]) -> None:
    folder = folders(family)
    generator = Generator.load(folder, GenerationOptions(max_new_tokens=8))
    question = [{"role": "user", "content": "Who are you?"}]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    inputs = generator.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert generator.answer(question).text == generator.tokenizer.decode(generated, skip_special_tokens=True)


def test_pictures_take_the_place_of_their_tags_or_go_before_the_text(
    folders: Callable[[str], Path], files: Path
) -> None:
    media = prepared(folders("qwen2_vl"), files, "ivi")
    first, video, second = (each.placeholder for each in media.items)
    assert media.placed("Hi")[0] == f"{first}{video}{second}Hi"
    text, shown = media.placed("a<video>b<image>c<image>")
    assert text == f"a{video}b{first}c{second}"
    assert [each.kind for each in shown] == ["video", "image", "image"]
    text, shown = media.placed("a<image><image>b")
    assert text == f"{video}a{first}{second}b"
    assert [each.placeholder for each in shown] == [video, first, second]
    with pytest.raises(MegatuneError) as raised:
        media.placed("<image>, <video> and <video>")
    assert raised.value.exit_code == ExitCode.DATA
    assert [finding.what for finding in raised.value.findings] == [
        "the prompt has 1 <image> for 2 images",
        "the prompt has 2 <video> for 1 video",
    ]


def test_a_chat_shows_them_in_its_first_message(
    folders: Callable[[str], Path], files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders("qwen3_vl")
    options = GenerationOptions(max_new_tokens=6, media=(image(files / "wide.png"),))
    generator = Generator.load(folder, options)
    lines = iter(["In <image>?", "Sure?", "clear", "And?", "exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    chat(generator, stream=False)
    printed = [answer.removesuffix("\n") for answer in capsys.readouterr().out.split("Assistant: ")[1:]]
    first = [{"role": "user", "content": "In <image>?"}]
    history = [*first, {"role": "assistant", "content": printed[0]}, {"role": "user", "content": "Sure?"}]
    after = [{"role": "user", "content": "And?"}]
    assert printed == [generator.answer(messages).text for messages in (first, history, after)]
    blind = Generator.load(folder, GenerationOptions(max_new_tokens=6))
    assert blind.answer(after).text != printed[2]


def run(folder: Path, *more: str) -> int:
    return infer.run("infer", [str(folder), "--max_new_tokens", "6", *more])


def test_the_verb_shows_images_in_the_order_given(
    folders: Callable[[str], Path], files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wide, tall = folders("qwen2_5_vl"), files / "wide.png", files / "tall.jpg"
    answers = []
    for order in ((wide, tall), (tall, wide)):
        flags = [argument for path in order for argument in ("--image", str(path))]
        assert run(folder, "--prompt", "Is <image> in <image>?", *flags) == ExitCode.DONE
        options = GenerationOptions(max_new_tokens=6, media=tuple(image(path) for path in order))
        reply = Generator.load(folder, options).answer([{"role": "user", "content": "Is <image> in <image>?"}])
        answers.append(capsys.readouterr().out)
        assert answers[-1] == f"{reply.text}\n"
    assert answers[0] != answers[1]
    assert run(folder, "--raw", "--prompt", "It is", "--image", str(wide)) == ExitCode.DONE


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_verb_shows_a_video(
    family: str, folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    av = pytest.importorskip("av")
    clip = str(tmp_path / "clip.mp4")
    with av.open(clip, "w") as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height = 112, 64
        for number in range(12):  # two seconds
            container.mux(stream.encode(av.VideoFrame.from_image(noise(112, 64, number))))
        container.mux(stream.encode(None))
    options = GenerationOptions(max_new_tokens=6, media=(MediaFile("video", clip),), video_fps=3.0)
    generator = Generator.load(folders(family), options)
    assert generator.media is not None
    (video,) = generator.media.items
    assert video.measured.grid[0] == 3
    assert video.measured.seconds_per_grid == pytest.approx(2 / 3)
    expected, _ = greedy(generator, prompted(generator, "What is <video>?"), 6)
    flags = ("--video", clip, "--video-fps", "3")
    assert run(folders(family), "--prompt", "What is <video>?", *flags) == ExitCode.DONE
    assert capsys.readouterr().out == generator.tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_sizes_are_settings_of_training(folders: Callable[[str], Path], tmp_path: Path) -> None:
    noise(560, 560, 0).save(tmp_path / "a.png")

    def tokens(**settings: Any) -> int:
        options = GenerationOptions(media=(image(tmp_path / "a.png"),), **settings)
        media = Generator.load(folders("qwen2_vl"), options).media
        assert media is not None
        return media.items[0].placeholder.count("<|image_pad|>")

    assert tokens() == 20 * 20
    assert tokens(image_max_pixels=112 * 112) == 4 * 4


def refused(folder: Path, code: ExitCode, *flags: str, says: tuple[str, ...]) -> None:
    with pytest.raises(MegatuneError) as raised:
        run(folder, *flags)
    assert raised.value.exit_code == code
    assert [text for text in says if text not in str(raised.value)] == []


def test_what_cannot_be_shown_is_refused(folders: Callable[[str], Path], files: Path, tmp_path: Path) -> None:
    wide, ask, folder = str(files / "wide.png"), ("--prompt", "Hi"), folders("qwen3_vl")
    text_only = make_checkpoint("qwen3", tmp_path / "qwen3", num_layers=1)
    says: tuple[str, ...] = ("the model reads text only", "no vision_config", "leave out --image")
    refused(text_only, ExitCode.INPUT, *ask, "--image", wide, says=says)

    missing = ("--image", str(files / "wild.png"), "--video", str(files))
    says = (f"there is no file {files / 'wild.png'}", f"did you mean {wide}?", f"{files} is a folder")
    refused(folder, ExitCode.INPUT, *ask, "--image", wide, *missing, says=says)

    broken, empty = tmp_path / "broken.png", tmp_path / "empty.jpg"
    broken.write_bytes(b"no image")
    empty.touch()
    refused(folder, ExitCode.DATA, *ask, "--image", str(broken), "--image", str(empty), says=(str(broken), str(empty)))

    says = ("the prompt has 1 <image> for 0 images",)
    refused(folder, ExitCode.DATA, "--prompt", "<image> Hi", says=says)
    says = ("more placeholders than images and videos",)
    refused(folder, ExitCode.DATA, "--image", wide, "--prompt", "<|image_pad|> Hi", says=says)
    numbers = ("--image_max_pixels", "0")
    refused(folder, ExitCode.SETTINGS, *ask, "--image", wide, *numbers, says=("a whole number, at least 1",))
    refused(folder, ExitCode.SETTINGS, *ask, "--image", wide, "--video_fps", "1", says=("there is no video",))


def test_a_prompt_longer_than_the_context_names_the_pictures(files: Path, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_vl", tmp_path / "m", num_layers=1, max_position_embeddings=24)
    flags = ("--prompt", "Hi", "--image", str(files / "wide.png"))
    refused(folder, ExitCode.DATA, *flags, says=("24 tokens at most", "--image_max_pixels"))
