"""Files that are made to keep a reader busy: one message, at once, whichever dialect reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatune.config.dialects.roll import read_roll
from megatune.config.entry import is_rl_file
from megatune.config.load import load
from megatune.config.model import new_tokens
from megatune.config.values import compose, value_of
from megatune.errors import MegatuneError

_TIMES = 9
_BOMB = "\n".join(
    [f"a0: &a0 [{', '.join(['x'] * _TIMES)}]"]
    + [f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * _TIMES)}]" for depth in range(1, 12)]
)
_WIDE = f"a: &a [{', '.join(['x'] * 2000)}]\nb: [{', '.join(['*a'] * 2000)}]\n"
_BLOCK = "\n".join(f"{' ' * depth}a:" for depth in range(1500)) + " 1"
HOSTILE = {
    "a bomb of aliases": (_BOMB, "values after its aliases are expanded"),
    "a wide anchor": (_WIDE, "4,004,005 values after its aliases are expanded"),
    "nested lists": ("a: " + "[" * 50_000, "nested deeper than 64"),
    "nested mappings": ("{a: " * 5_000 + "1" + "}" * 5_000, "nested deeper than 64"),
    "nested blocks": (_BLOCK, "longer than 1 MiB"),
    "a long file": ("a: " + "x" * 2**20, "longer than 1 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_told_at_once(name: str, tmp_path: Path) -> None:
    text, said = HOSTILE[name]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert any(said in finding.what for finding in load(path).findings)
    assert any(said in finding.what for finding in read_roll(path).findings)
    assert not is_rl_file(path)
    with pytest.raises(MegatuneError, match=r"new_special_tokens_config: .* cannot be read"):
        new_tokens(load(overrides=[f"new_special_tokens_config={path}"]).settings)


def test_an_anchor_inside_itself_and_common_anchors_are_no_bombs(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("dataset: &names [a, b]\neval_dataset: *names\n")
    assert not load(path).findings
    path.write_text("dataset: &names [*names]\n")
    assert any("nested too deeply" in f"{finding}" for finding in load(path).findings)


_DOUBLED = "\n".join(["a0: x", *(f"a{depth}: ${{a{depth - 1}}}${{a{depth - 1}}}" for depth in range(1, 60))])
_BRANCHES = "\n".join([
    "a0: {x: 1}", *(f"a{depth}: {{x: '${{a{depth - 1}}}', y: '${{a{depth - 1}}}'}}" for depth in range(1, 60)),
])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_DOUBLED, "values after resolving references"),
        (_BRANCHES, "values after resolving references"),
        ("a: &a {b: *a}", "nested too deeply"),
        ("a: ${b}\nb: {c: '${a}'}", "it refers to itself"),
    ],
    ids=["texts", "mappings", "an anchor in itself", "a circle"],
)
def test_references_without_end_are_told_at_once(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert any(said in finding.what for finding in read_roll(path).findings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", {"x": 1, "y": 3}),
        ("a: &a {x: 1, y: 2}\nb: {y: 3, <<: *a}\n", {"x": 1, "y": 3}),
        ("a: &a {x: 1}\nc: &c {x: 2, z: {w: 4}}\nb: {<<: [*a, *c]}\n", {"x": 1, "z": {"w": 4}}),
        ("a: &a {x: 1}\nc: &c {<<: *a, y: 2}\nb:\n  <<: *c\n", {"x": 1, "y": 2}),
        ('b: {"<<": 1}\n', {"<<": 1}),
    ],
)
def test_keys_of_an_anchor_are_merged(text: str, expected: dict[str, object]) -> None:
    node = compose(text)
    assert node is not None
    assert value_of(node).data["b"] == expected


def test_a_mapping_that_merges_itself_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr_scheduler_kwargs: &a {<<: *a}\n")
    assert "nested too deeply" in str(load(path).findings[0])


def test_a_merged_key_of_a_role_is_where_its_anchor_has_it(tmp_path: Path) -> None:
    path = tmp_path / "rl.yaml"
    path.write_text(
        "actor_train:\n  training_args: &t\n    learning_rate: 1.0e-5\n    seed: 1\n"
        "critic:\n  training_args: {<<: *t, seed: 2}\n"
    )
    reading = read_roll(path).reading
    assert reading is not None
    assert reading.data["critic"] == {"training_args": {"seed": 2, "learning_rate": 1e-5}}
    places = {key: reading.entries[f"critic.training_args.{key}"].where for key in ("learning_rate", "seed")}
    assert places == {"learning_rate": f"{path}:3", "seed": f"{path}:6"}
