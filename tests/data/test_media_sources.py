"""Where pictures are: paths, bytes, base64, columns of the datasets library, lists of frames."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from hostile_media import encoded, picture
from hypothesis import given
from hypothesis import strategies as st

from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource, media_source
from megatune.data.media.images import image_size
from megatune.data.media.processor import MediaShape
from megatune.data.media_table import packed, unpacked

PNG = encoded(picture(), "PNG")
TEXT = base64.b64encode(PNG).decode()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_base64(kind: str) -> None:
    content = encoded(picture(), kind)
    text = base64.b64encode(content).decode()
    for written in (text, f"data:image/{kind.lower()};base64,{text}", "\n".join([text[:76], text[76:]])):
        assert media_source(written, "image", "/nowhere") == MediaSource("image", data=content)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (PNG, MediaSource("image", data=PNG)),
        (bytearray(PNG), MediaSource("image", data=PNG)),
        ({"bytes": PNG, "path": None}, MediaSource("image", data=PNG)),
        ({"bytes": PNG, "path": "a.png"}, MediaSource("image", "a.png", PNG)),
        ({"bytes": TEXT}, MediaSource("image", data=PNG)),
    ],
)
def test_bytes_of_the_row(value: object, expected: MediaSource) -> None:
    assert media_source(value, "image", "/nowhere") == expected
    assert image_size(expected) == (97, 61)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    inside = str(tmp_path / "media" / "a.png")
    for value in ("a.png", Path("a.png"), inside, {"bytes": None, "path": "a.png"}):
        assert media_source(value, "image", str(tmp_path / "media")) == MediaSource("image", inside)
    assert media_source("b.png", "image", "media") == MediaSource("image", "b.png")
    assert media_source("c.png", "image", "media") == MediaSource("image", "media/c.png")
    # A file counts, whatever its name begins with.
    (tmp_path / "media" / f"iVBORw0KGgo{'a' * 80}").write_bytes(PNG)
    assert media_source(f"iVBORw0KGgo{'a' * 80}", "image", "media").path == f"media/iVBORw0KGgo{'a' * 80}"


def test_frames_of_a_video() -> None:
    frames = (MediaSource("image", "/nowhere/a.png"), MediaSource("image", data=PNG))
    source = media_source(["a.png", {"bytes": PNG}], "video", "/nowhere")
    assert source == MediaSource("video", frames=frames)
    assert source.name == "2 frames"


def test_an_url_of_a_local_file() -> None:
    assert media_source("file:///nowhere/a.png", "image", "here") == MediaSource("image", "/nowhere/a.png")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("https://example.org/a.png", "picture-url"),
        ("S3://bucket/a.png", "picture-url"),
        ("ftp://a.png", "picture-url"),
        ("data:text/html,a", "picture-url"),
        (None, "bad-picture"),
        ("", "bad-picture"),
        (3, "bad-picture"),
        (["a.png"], "bad-picture"),
        ({"bytes": None, "path": None}, "bad-picture"),
        ({"url": "a.png"}, "bad-picture"),
        ({"bytes": 3}, "bad-picture"),
        ({"bytes": "a.png"}, "bad-base64"),
        (f"{TEXT[:-9]}.png", "bad-base64"),
    ],
)
def test_what_is_no_picture(value: object, code: str) -> None:
    with pytest.raises(RowError) as caught:
        media_source(value, "image", "/nowhere")
    assert caught.value.code == code
    assert caught.value.reason.startswith("image: ")


def test_a_long_url_is_not_repeated_whole() -> None:
    with pytest.raises(RowError) as caught:
        media_source(f"https://example.org/{'a' * 10_000}", "video", "")
    assert len(caught.value.detail) < 250


PATHS = st.none() | st.text(max_size=20) | st.just("half-\udcff.png")
IMAGES = st.builds(MediaSource, st.just("image"), PATHS, st.none() | st.binary(max_size=30))
SOURCES = st.one_of(
    IMAGES,
    st.builds(MediaSource, st.just("video"), PATHS, st.none() | st.binary(max_size=30)),
    st.builds(MediaSource, st.just("video"), frames=st.lists(IMAGES, max_size=4).map(tuple)),
)


@given(SOURCES)
def test_sources_are_kept_as_bytes(source: MediaSource) -> None:
    measured = MediaShape((3, 4, 6), 0.1 + 0.2, (0.25, 1.5), (0, 5, 9), (640, 480))
    with patch("megatune.data.media_table.os.stat", return_value=Mock(st_size=7)):
        assert unpacked(packed(source, measured)) == (source, measured)
    assert pickle.loads(pickle.dumps(source)) == source
