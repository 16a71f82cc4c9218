"""`megatune data preview` and `data stats` of rows with pictures: sizes, grids, tokens, and a page with all in it."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pictures_kit import Model, asks, draw, make_model, write_rows
from PIL import Image
from rich.console import Console

from megatune.data.preview import Preview, read_preview
from megatune.data.preview.show import show_preview, write_page
from megatune.data.statistics import describe, lines
from megatune.errors import ExitCode, MegatuneError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("models"), "qwen3_vl")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    draw(tmp_path / "wide.png", 128, 64)
    draw(tmp_path / "<b>.jpg", 64, 64)
    rows = [
        asks("<image>What, <b>?", "A wide one.", images=["wide.png"]),
        asks("<video> or <image>?", "Both.", images=["<b>.jpg"], videos=[["wide.png"] * 4]),
        asks(images=["none.png"]),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


def preview(model: Model, data: Path, last: int = 3, **changes: Any) -> Preview:
    settings = model.settings(data, ["rows.jsonl"], **changes)
    return read_preview(settings, model.tokenizer, model.vision(settings), wanted=range(1, last))


def shown(model: Model, found: Preview) -> list[str]:
    file = io.StringIO()
    show_preview(found, model.tokenizer, Console(file=file))
    return file.getvalue().splitlines()


def test_sizes_grids_and_tokens(model: Model, data: Path) -> None:
    found = shown(model, preview(model, data))
    (at,) = (number for number, line in enumerate(found) if line.startswith("── rows.jsonl row 1"))
    assert found[at + 1] == f"image 1 ({data}/wide.png): 128 × 64 pixels, 2 × 6 patches, 3 tokens"
    assert found[at + 3] == "<|vision_start|><|image_pad|> × 3<|vision_end|>What, <b>?<|im_end|>↵"
    (at,) = (number for number, line in enumerate(found) if line.startswith("── rows.jsonl row 2"))
    assert found[at + 1] == "video 1 (4 frames): 4 frames of 128 × 64 pixels, 2 × 4 × 8 patches, 16 tokens"
    assert found[at + 2].startswith(f"image 2 ({data}/<b>.jpg): 64 × 64 pixels")
    assert re.search(
        r"<0\.2 seconds><\|vision_start\|><\|video_pad\|> × 8<\|vision_end\|><1\.2 seconds>", found[at + 4]
    )


def test_rows_that_are_held_out_show_their_pictures(model: Model, data: Path) -> None:
    settings = model.settings(data, ["rows.jsonl"], val_size=1.0)
    found = read_preview(settings, model.tokenizer, model.vision(settings), wanted=range(1, 2), evaluation=True)
    assert sum(" patches, " in line for line in shown(model, found)) >= 1


class Page(HTMLParser):
    """The images of a page, its text, and whether every tag is closed."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attributes)["src"] or "")
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_everything_in_it(model: Model, data: Path, tmp_path: Path) -> None:
    found = preview(model, data, 4)
    write_page(found, model.tokenizer, tmp_path / "made" / "page.html")
    content = (tmp_path / "made" / "page.html").read_text(encoding="utf-8")
    page = Page(content)
    assert page.open == []
    assert "http" not in content
    sizes = []
    for each in page.images:
        kind, _, encoded = each.partition(",")
        assert kind == "data:image/jpeg;base64"
        sizes.append(Image.open(io.BytesIO(base64.b64decode(encoded))).size)
    assert sizes == [(128, 64)] * 5 + [(64, 64)]
    assert "What, <b>?<|im_end|>" in page.text, "escaped"
    assert f"{data}/<b>.jpg): 64 × 64 pixels" in page.text
    (trained,) = re.findall(r'<span class="(\w+)">A wide one\.</span>', content)
    assert re.search(rf"\.{trained} {{color: #008000", content), "what is trained is green"
    assert "picture-missing" in page.text


def test_a_page_names_what_cannot_be_decoded(model: Model, data: Path, tmp_path: Path) -> None:
    found = preview(model, data)
    draw(data / "wide.png", 64, 128)
    (data / "<b>.jpg").unlink()
    write_page(found, model.tokenizer, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "there is no such file" in page.text


def test_a_page_that_cannot_be_written(model: Model, data: Path) -> None:
    with pytest.raises(MegatuneError) as caught:
        write_page(preview(model, data), model.tokenizer, data / "rows.jsonl" / "page.html")
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_pairs_and_packed_rows(model: Model, data: Path, tmp_path: Path) -> None:
    packed = shown(model, preview(model, data, packing=True, cutoff_len=256))
    assert sum(" patches, " in line for line in packed) == 3
    row = {"instruction": "<image>What?", "chosen": "A.", "rejected": "B.", "images": ["wide.png"]}
    write_rows(data / "rows.jsonl", [row])
    pairs = preview(model, data, stage="dpo")
    assert sum(" patches, " in line for line in shown(model, pairs)) == 1
    write_page(pairs, model.tokenizer, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(page.images) == 1, "the pictures of a pair belong to its prompt"
    both = preview(model, data, stage="dpo", packing=True)
    assert sum(" patches, " in line for line in shown(model, both)) == 1


def test_statistics_count_tokens_of_pictures(model: Model, data: Path) -> None:
    settings = model.settings(data, ["rows.jsonl"])
    model_settings = settings.model.model_copy(update={"model_name_or_path": str(model.folder)})
    settings = settings.model_copy(update={"model": model_settings})
    found = describe(settings, model.tokenizer, model.prepared(data, "rows.jsonl"))
    counts = found.report.train.media
    assert (counts.images, counts.videos, counts.largest) == (2, 1, 16)
    (line,) = (line for line in lines(found) if line.startswith("media"))
    share = counts.tokens / found.report.train.tokens
    assert f"2 images and 1 video with {counts.tokens} tokens, " in line
    assert line.endswith(f"16 at most; {share:.1%} of all tokens")
    assert json.loads(found.to_json())["report"]["train"]["media"]["tokens"] == counts.tokens
