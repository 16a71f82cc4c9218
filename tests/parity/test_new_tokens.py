"""Models with further tokens against Transformers' models after `resize_token_embeddings`, with the same new rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from computing import LENGTHS, differences, failures
from layouts import LAYOUTS
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from megatune.config.load import load
from megatune.config.model import open_changed
from megatune.demo.checkpoint import make_checkpoint
from megatune.families import load_architecture
from megatune.generation.transformers_backend import load_pretrained
from megatune.verify.samples import Sample, SampleMedia, random_samples

PLAIN, SPECIAL = ["<fish>", "sea weed"], ["<|begin|>", "<|end|>"]
DESCRIBED = "the fish swims"


CASES = [("llama", False, 0), ("qwen3", True, 1101), ("qwen2_5_vl", True, 0)]


def grown(model: Path, *words: str) -> Path:
    settings = load(None, ["seed=7", f"add_tokens={','.join(PLAIN)}", *words]).settings
    return open_changed(settings, str(model)).fetch()


def matrices(model: PreTrainedModel) -> list[Tensor]:
    """The word embedding and, where it is another one, the output layer."""
    found = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return [found[0].detach()] if found[0] is found[1] else [each.detach() for each in found]


def with_new(sample: Sample, ids: Sequence[int]) -> Sample:
    """Put new tokens in the place of some."""
    input_ids, labels = (
        tuple(ids[token % 4] if token > 0 and token % 3 == 0 and token < 900 else token for token in tokens)
        for tokens in (sample.input_ids, sample.labels)
    )
    return replace(sample, input_ids=input_ids, labels=labels)


def noise(place: int, token: int, width: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([7, place, token]).standard_normal(width)).float() / math.sqrt(width)


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2", "dp2"])
@pytest.mark.parametrize(
    ("family", "tied", "rows"), [("llama", False, 0), ("qwen3", True, 1101), ("qwen2_5_vl", True, 0)]
)
def test_resized_models_agree(pool, reference, tmp_path, family, tied, rows, layout):
    """Of 1,101 rows, which no layout can split without padding, some are spare: new tokens take these."""
    folder = make_checkpoint(family, tmp_path / "model", num_layers=2, vocab_size=1001, tie_word_embeddings=tied)
    stock, tokenizer = load_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if rows:
        stock.resize_token_embeddings(rows, mean_resizing=False).weight.data.normal_()
        stock.save_pretrained(folder)
    before = [each.clone() for each in matrices(stock)]
    assert len(before) == 2 - tied
    view = grown(folder, f"add_special_tokens={','.join(SPECIAL)}")

    assert tokenizer.add_tokens(PLAIN) == tokenizer.add_tokens(SPECIAL, special_tokens=True) == 2
    ours, ids = AutoTokenizer.from_pretrained(view), tokenizer.convert_tokens_to_ids(PLAIN + SPECIAL)
    text = f"a{PLAIN[0]} b {PLAIN[1]}c {SPECIAL[0]}"
    assert (len(ours), ours(text).input_ids) == (len(tokenizer), tokenizer(text).input_ids)
    assert SPECIAL[0] not in ours.decode(ours(text).input_ids, skip_special_tokens=True)

    stock.resize_token_embeddings(rows or 1024, mean_resizing=False)
    assert load_architecture(view).vocab_size == (rows or 1024)
    assert stock.config.get_text_config().vocab_size == load_pretrained(view).config.get_text_config().vocab_size
    for place, (target, source, old) in enumerate(
        zip(matrices(stock), matrices(load_pretrained(view)), before, strict=True)
    ):
        kept = [row for row in range(len(old)) if row not in ids]
        assert torch.equal(source[kept], old[kept])
        mean = old[kept].double().mean(0).float()
        for token in ids:
            torch.testing.assert_close(source[token], mean + noise(place, token, old.shape[1]), atol=1e-6, rtol=0)
        rest = sorted(set(range(len(old), len(source))) - {*ids})
        torch.testing.assert_close(source[rest], mean.expand(len(rest), -1), atol=1e-6, rtol=0)
        target[[*ids, *rest]] = source[[*ids, *rest]]
    stock.save_pretrained(tmp_path / "resized")

    vision = load_architecture(view).vision
    picture = [[SampleMedia("image", (1, 4, 4), 3)]] if vision else []
    samples = [with_new(each, ids) for each in random_samples(900, LENGTHS, media=picture, vision=vision)]
    truth = reference(tmp_path / "resized", samples)
    assert not failures(differences(pool, view, LAYOUTS[layout], samples, truth, tmp_path))


@pytest.mark.parametrize(("init", "is_noisy"), [("desc_init", False), ("desc_init_w_noise", True)])
def test_rows_begin_as_what_their_description_means(tmp_path, init, is_noisy):
    """Each matrix takes the mean of its own rows; a token without a description begins as by itself."""
    folder = make_checkpoint("llama", tmp_path / "model", num_layers=1, dtype="bfloat16")
    (tmp_path / "tokens.yaml").write_text(f"<|fish|>: {DESCRIBED} <|fish|>\n<|empty|>: <|fish|>\n")
    view = grown(folder, f"new_special_tokens_config={tmp_path / 'tokens.yaml'}", f"init_special_tokens={init}")
    tokenizer = AutoTokenizer.from_pretrained(view)
    meant = [*tokenizer(DESCRIBED).input_ids, *tokenizer(" ", add_special_tokens=False).input_ids]
    plain, fish, empty = tokenizer.convert_tokens_to_ids([PLAIN[0], "<|fish|>", "<|empty|>"])
    old, new = matrices(load_pretrained(folder)), matrices(load_pretrained(view))
    meant = [token for token in meant if token != tokenizer.bos_token_id]
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        width, before = before.shape[1], before.double()
        wanted = before[meant].mean(0) + (noise(place, fish, width) if is_noisy else 0)
        torch.testing.assert_close(after[fish], wanted.bfloat16(), atol=0, rtol=2**-7)
        for token in (plain, empty):
            torch.testing.assert_close(
                after[token], (before.mean(0) + noise(place, token, width)).bfloat16(), atol=0, rtol=2**-7
            )
