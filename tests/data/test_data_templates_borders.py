"""Tokenizers that put a space before every text: conversations become the tokens of their text as a whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import groupby

import pytest
from formats_kit import pair_of
from tokenizer_kit import CORPUS, qwen_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatune.config.settings import DataSettings, Settings
from megatune.data.conversation import Conversation, Message
from megatune.data.encode import Encoded, Encoder, make_encoder
from megatune.data.rows import IGNORE_INDEX
from megatune.data.templates import load_template
from megatune.data.templates.turns import needs_whole_text
from megatune.errors import ExitCode, MegatuneError

# Mixtral-8x7B-Instruct-v0.1's text, with the marks from which Transformers computes what the assistant wrote.
MIXTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
# Like Zephyr's: prompts end with a new line.
ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '\\n<|user|>\\n' + m.content + eos_token }}"
    "{{ '\\n<|assistant|>\\n' }}{% else %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)


def plain(source: str) -> str:
    """As it was published: without marks."""
    return source.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def prepending() -> Tokenizer:
    """Llama 2's and Mixtral's: a space before every stretch between special tokens."""
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def metaspace() -> Tokenizer:
    """Newer ones: a space before a text, if none is there."""
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def wrapped(backend: Tokenizer, source: str) -> PreTrainedTokenizerFast:
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=source
    )


CHAT = Conversation(
    (
        Message("user", "What is the weather\nin Paris today?"),
        Message("assistant", "It is sunny. 今天天气 <s"),
        Message("user", "Warm?"),
        Message("assistant", "Yes 🙂", trained=False),
        Message("user", "  Sure? "),
        Message("assistant", "print(add(1, 2))  # 3"),
    )
)


@pytest.mark.parametrize("source", [MIXTRAL, ZEPHYR], ids=["mixtral", "zephyr"])
@pytest.mark.parametrize("backend", [prepending, metaspace])
def test_tokens_and_labels_are_those_of_transformers(backend: Callable[[], Tokenizer], source: str) -> None:
    tokenizer = wrapped(backend(), plain(source))
    template = load_template(None, tokenizer)
    whole = needs_whole_text(template, tokenizer)
    assert whole == (backend is prepending or source == ZEPHYR)  # a space before an answer that has one changes nothing
    encoder = make_encoder(Settings(data=DataSettings(template=None)), tokenizer)
    assert encoder.whole_text == whole
    (encoded,) = pickle.loads(pickle.dumps(encoder)).encode([CHAT])  # as worker processes have it
    assert isinstance(encoded, Encoded)
    tokenizer.chat_template = source
    chat = [{"role": message.role, "content": message.content} for message in CHAT.messages]
    expected = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, labels = encoded.documents[0].input_ids.tolist(), encoded.documents[0].labels.tolist()
    assert expected["input_ids"] == ids
    answers = [
        list(group)
        for mask, group in groupby(range(len(ids)), lambda place: expected["assistant_masks"][place])
        if mask
    ]
    assert len(answers) == 3
    trained = {*answers[0], *answers[2]}
    assert labels == [token if place in trained else IGNORE_INDEX for place, token in enumerate(ids)]


def test_pairs_share_their_prompt() -> None:
    tokenizer = wrapped(prepending(), plain(MIXTRAL))
    pair = pair_of((Message("user", "Warm?"),), Message("assistant", "Yes."), Message("assistant", "No."))
    encoder = Encoder(tokenizer, load_template(None, tokenizer), cutoff_len=100, whole_text=True)
    (encoded,) = encoder.encode([pair])
    assert isinstance(encoded, Encoded)
    prompt = tokenizer.encode("<s> [INST] Warm? [/INST]", add_special_tokens=False)
    for document, answer in zip(encoded.documents, ("Yes.", "No."), strict=True):
        ids = document.input_ids.tolist()
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(ids[len(prompt) :]).strip() == f"{answer}</s>"
        assert document.labels.tolist() == [IGNORE_INDEX] * len(prompt) + ids[len(prompt) :]


def test_a_prompt_that_an_answer_changes_is_refused() -> None:
    """The model would be asked with other tokens than it was trained on."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + ' a' }}{% else %}{{ m.content + eos_token }}"
        "{% endif %}{% endfor %}"
    )
    letters = ["<unk>", "▁", *"Heloai", "aH"]
    vocab = {token: number for number, token in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "H")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    with pytest.raises(MegatuneError, match="the tokens of a prompt change when an answer follows") as refusal:
        load_template(None, wrapped(backend, source))
    assert refusal.value.exit_code == ExitCode.INPUT


def test_other_tokenizers_keep_prompts_and_answers_apart() -> None:
    tokenizer = qwen_tokenizer()
    assert not needs_whole_text(load_template("qwen", tokenizer), tokenizer)
