"""Training of a small byte-level BPE tokenizer on the demo text, structured like a family's published tokenizer."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from megatune.demo.family import DemoFamily

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from tokenizers.processors import PostProcessor
    from transformers import PreTrainedTokenizerFast

NUM_BYTES = 256  # a byte-level vocabulary starts with one token per byte


def demo_texts() -> list[str]:
    """Return the paragraphs of the demo text, English and Chinese prose written for this project."""
    folder = files("megatune.demo") / "text"
    whole = [(folder / name).read_text(encoding="utf-8") for name in ("en.txt", "zh.txt")]
    return [paragraph for text in whole for paragraph in text.split("\n\n")]


def chat_template(family: DemoFamily) -> str:
    """Return the family's chat template, as Jinja source."""
    return (files("megatune.demo") / "templates" / family.chat_template).read_text(encoding="utf-8")


def smallest_vocab_size(family: DemoFamily) -> int:
    """Return the number of tokens without merges: every byte, and the family's added tokens."""
    return NUM_BYTES + len(family.added_tokens)


def make_tokenizer(family: DemoFamily, vocab_size: int = 2000) -> PreTrainedTokenizerFast:
    """Train the family's tokenizer.

    Args:
        vocab_size: maximum number of tokens, with added ones; fewer if the demo text has no more pairs to merge. At
            least `smallest_vocab_size(family)`.

    Returns:
        A Transformers tokenizer with the family's added tokens, bos, eos and pad tokens and chat template.
    """
    if vocab_size < smallest_vocab_size(family):
        raise ValueError(f"vocab_size must be at least {smallest_vocab_size(family)}, got {vocab_size}")
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": family.bos_token, "eos_token": family.eos_token, "pad_token": family.pad_token}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=_train(family, vocab_size),
        model_max_length=131_072,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{key: value for key, value in names.items() if value is not None},
    )
    wrapped.chat_template = chat_template(family)
    return wrapped


def _train(family: DemoFamily, vocab_size: int) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(family.digits_per_token)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(family.added_tokens),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(demo_texts(), trainer)
    # Published vocabularies have added tokens after the merges, so they are added after training.
    tokenizer.add_tokens(
        [AddedToken(token.text, special=token.special, normalized=False) for token in family.added_tokens]
    )
    tokenizer.post_processor = _post_processor(family, tokenizer)
    return tokenizer


def _pre_tokenizer(digits_per_token: int) -> PreTokenizer:
    """Split text into words as GPT-4-style tokenizers do, then into bytes."""
    from tokenizers import Regex, pre_tokenizers

    digits = r"\p{N}" if digits_per_token == 1 else rf"\p{{N}}{{1,{digits_per_token}}}"
    alternatives = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with the space or mark before it
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line breaks that follow
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(alternatives)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _post_processor(family: DemoFamily, tokenizer: Tokenizer) -> PostProcessor:
    """Return the post-processor that puts bos_token, if there is one, before encoded text."""
    from tokenizers import processors

    byte_level, bos = processors.ByteLevel(trim_offsets=False), family.bos_token
    if bos is None:
        return byte_level
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return processors.Sequence([byte_level, template])
