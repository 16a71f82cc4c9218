"""A tokenizer that is not the model's is refused with ids and texts, and a config.json that is not the weights'."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import LlamaTokenizer

from megatune.data.encode import load_tokenizer
from megatune.data.templates import load_template
from megatune.data.tokenizer_files import check_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.training.checks import check_weights

Tell = Callable[..., None]
TEXT = "Hello 2024\n 你好"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    make_checkpoint("qwen3", folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "m"))


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | values), encoding="utf-8")


def refused(load: Callable[[], object]) -> tuple[str, float]:
    """What is said as an input is refused, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(MegatuneError) as caught:
        load()
    assert caught.value.exit_code == ExitCode.INPUT
    (finding,) = caught.value.findings
    assert finding.fix
    return f"{finding.what}; {finding.why}", time.monotonic() - began


def test_tokens_beyond_the_vocabulary(model: Path, told: Tell) -> None:
    """Whether any row uses them or not."""
    file = model / "tokenizer.json"
    added = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
    more = [{**added[0], "id": 2000 + at, "content": f"<|more{at}|>"} for at in range(5)]
    change(file, added_tokens=[*added, *more])
    got, seconds = refused(lambda: load_tokenizer(model))
    start = "the tokenizer is larger than the model's vocabulary of 2000: 2000 '<|more0|>', 2001 '<|more1|>'"
    assert got.startswith(start)
    assert got.partition(";")[0].endswith("and 2 more")
    told(case="T43", fault="the tokenizer has tokens that the model has no embedding for", got=got, seconds=seconds)


@pytest.mark.parametrize(("name", "why"), [
    ("LlamaTokenizer", "belongs to another model; it produces"),
    ("BertTokenizer", "cannot be loaded; tokenizer_class: BertTokenizer of tokenizer_config.json belongs to another"),
    ("T5Tokenizer", "cannot be loaded; tokenizer_class: T5Tokenizer of tokenizer_config.json belongs to another"),
])  # fmt: skip
def test_the_class_of_another_models_tokenizer(model: Path, sound: Path, name: str, why: str, told: Tell) -> None:
    change(model / "tokenizer_config.json", tokenizer_class=name)
    load: Callable[[], object] = partial(load_tokenizer, model)
    if name == "LlamaTokenizer" and Version(transformers.__version__) >= Version("5.22"):
        # Since then AutoTokenizer itself reads a tokenizer.json that no Llama can have.
        assert load_tokenizer(model)(TEXT)["input_ids"] == load_tokenizer(sound)(TEXT)["input_ids"]
        load = lambda: check_tokenizer(LlamaTokenizer.from_pretrained(model), model)  # noqa: E731
    got, seconds = refused(load)
    assert why in got
    told(case="T43", fault=f"tokenizer_class of a Qwen3 is {name}", got=got, seconds=seconds)


@pytest.mark.parametrize("name", ["Qwen2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"])
def test_classes_that_make_the_same_tokens_are_taken(model: Path, sound: Path, name: str) -> None:
    change(model / "tokenizer_config.json", tokenizer_class=name)
    assert load_tokenizer(model)(TEXT)["input_ids"] == load_tokenizer(sound)(TEXT)["input_ids"]


def test_answers_that_nothing_ends(model: Path, told: Tell) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(source + "{% if add_generation_prompt %}assistant: {% endif %}")
    tokenizer = load_tokenizer(model)
    got, seconds = refused(lambda: load_template(None, tokenizer))
    assert got.startswith("template: null does not teach the model to stop; the last tokens of an answer are ")
    told(case="T43", fault="the chat template ends answers with no special token", got=got, seconds=seconds)


@pytest.mark.parametrize(("values", "what"), [
    ({"num_hidden_layers": 6, "layer_types": None}, "config.json has 6 layers, but the weights have 4"),
    ({"num_hidden_layers": 6}, "layer_types has 4 entries, but num_hidden_layers is 6"),
    ({"layer_types": "full_attention"}, "layer_types = 'full_attention' is not a list of names"),
])  # fmt: skip
def test_layers_that_the_weights_do_not_have(model: Path, values: dict[str, Any], what: str) -> None:
    check_weights(model)
    change(model / "config.json", **values)

    def look() -> None:
        load_architecture(model)
        check_weights(model)

    assert refused(look)[0].startswith(what)


def test_layers_are_counted_by_the_index_too(model: Path) -> None:
    names = {f"model.layers.{layer}.mlp.up_proj.weight": "a.safetensors" for layer in range(3)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (model / "a.safetensors").touch()
    assert refused(lambda: check_weights(model))[0].startswith("config.json has 4 layers, but the weights have 3")
