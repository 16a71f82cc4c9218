"""What is written is what Transformers' generate writes, streamed or not, and what would have no effect is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import CONTEXT, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatune.cli.infer import COMMAND
from megatune.errors import ExitCode, MegatuneError
from megatune.generation.generator import Generator
from megatune.generation.options import GenerationOptions, check_options
from megatune.generation.stopping import StopWordBuffer

QUESTION = [{"role": "user", "content": "Who are you? 你是谁？"}]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3")


@pytest.fixture(scope="module")
def generator(qwen3: Path) -> Generator:
    return Generator.load(qwen3, GenerationOptions(max_new_tokens=8))


def with_options(generator: Generator, **changes: Any) -> Generator:
    options = generator.options.model_copy(update=changes)
    return Generator(generator.backend, generator.tokenizer, options, generator.source)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1_distill_llama"])
def test_a_greedy_answer_is_that_of_generate(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_model(tmp_path_factory, family)
    reply = Generator.load(folder, GenerationOptions(max_new_tokens=24)).answer(QUESTION)

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert reply.text == tokenizer.decode(generated, skip_special_tokens=True)
    assert reply.num_tokens == len(generated)


@pytest.mark.parametrize("seed", range(8))
def test_streamed_pieces_make_the_whole_answer(generator: Generator, seed: int) -> None:
    sampled = with_options(generator, temperature=2.0, top_k=2000, seed=seed, max_new_tokens=40)
    pieces: list[str] = []
    streamed = sampled.answer(QUESTION, pieces.append)
    assert "".join(pieces) == streamed.text
    assert streamed == sampled.answer(QUESTION)
    assert len(pieces) > 1


def test_the_seed_decides_a_sampled_answer(generator: Generator) -> None:
    answers = [
        with_options(generator, temperature=2.0, seed=seed, max_new_tokens=20).answer(QUESTION).text
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_the_temperature_can_be_left_to_the_model(generator: Generator) -> None:
    assert with_options(generator, temperature=None).answer(QUESTION) == generator.answer(QUESTION)
    config = generator.backend.model.generation_config
    try:
        config.do_sample, config.temperature = True, 2.0
        left = with_options(generator, temperature=None, seed=1, max_new_tokens=20).answer(QUESTION)
        assert left == with_options(generator, temperature=2.0, seed=1, max_new_tokens=20).answer(QUESTION)
    finally:
        config.do_sample, config.temperature = None, None


def test_top_k_one_is_greedy(generator: Generator) -> None:
    assert with_options(generator, temperature=5.0, top_k=1).answer(QUESTION) == generator.answer(QUESTION)


def test_a_repetition_penalty_reaches_the_model(generator: Generator) -> None:
    punished = with_options(generator, repetition_penalty=5.0, max_new_tokens=30, raw=True).complete("a b c")
    inputs = generator.tokenizer("a b c", return_tensors="pt")
    generated = generator.backend.model.generate(**inputs, max_new_tokens=30, do_sample=False, repetition_penalty=5.0)
    new_ids = generated[0, inputs["input_ids"].shape[1] :]
    assert punished.text == generator.tokenizer.decode(new_ids, skip_special_tokens=True)
    assert punished.text != with_options(generator, max_new_tokens=30, raw=True).complete("a b c").text


def test_raw_continues_the_text_itself(generator: Generator) -> None:
    raw = with_options(generator, raw=True)
    inputs = generator.tokenizer("The river", return_tensors="pt")
    generated = generator.backend.model.generate(**inputs, max_new_tokens=8, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert raw.reply("The river").text == generator.tokenizer.decode(generated, skip_special_tokens=True)


def test_the_system_message_and_the_thinking_switch_reach_the_model(generator: Generator) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert with_options(generator, system="Be brief.").answer(QUESTION) == generator.answer([system, *QUESTION])
    without_thinking = with_options(generator, enable_thinking=False).answer(QUESTION)
    prompt = generator.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert without_thinking == with_options(generator, raw=True).complete(prompt)


def test_stopped_says_whether_the_model_ended_by_itself(generator: Generator) -> None:
    reply = generator.answer(QUESTION)
    assert (reply.num_tokens, reply.stopped) == (8, False)
    first = generator.backend.model.generation_config.eos_token_id
    inputs = generator.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    third = generator.backend.model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, -1].item()
    try:
        generator.backend.model.generation_config.eos_token_id = third
        reply = generator.answer(QUESTION)
        assert (reply.num_tokens <= 3, reply.stopped) == (True, True)
    finally:
        generator.backend.model.generation_config.eos_token_id = first


def test_the_context_bounds_prompt_and_answer(generator: Generator) -> None:
    raw = with_options(generator, raw=True, max_new_tokens=1000)
    num_tokens = len(generator.tokenizer("a b c d")["input_ids"])
    assert raw.complete("a b c d").num_tokens <= CONTEXT - num_tokens
    with pytest.raises(MegatuneError, match="64 tokens at most") as raised:
        raw.complete("a b c d " * 20)
    assert raised.value.exit_code == ExitCode.DATA


def test_an_empty_prompt_is_refused(generator: Generator) -> None:
    with pytest.raises(MegatuneError, match="empty") as raised:
        with_options(generator, raw=True).complete("")
    assert raised.value.exit_code == ExitCode.DATA


@pytest.mark.parametrize("ask", ["complete", "reply"])
def test_a_prompt_that_is_not_valid_unicode_is_refused(generator: Generator, ask: str) -> None:
    """As Python reads a byte of a command line that is not UTF-8."""
    with pytest.raises(MegatuneError, match="half of a surrogate pair") as raised:
        getattr(generator, ask)(b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert raised.value.exit_code == ExitCode.DATA


def test_every_option_out_of_range_is_named() -> None:
    wrong = {"max_new_tokens": 0, "temperature": -1, "top_p": 1.5, "top_k": 0, "repetition_penalty": 0, "seed": 2**63}
    words = [word for name, value in wrong.items() for word in (f"--{name}", f"{value}")]
    findings = COMMAND.read(["m", *words]).findings
    assert [finding.where for finding in findings] == [f"--{name}" for name in wrong]
    assert str(findings[2]) == "\n".join(
        ("--top_p: top_p is 1.5", "    why: expected a number, above 0, at most 1", "    fix: write --top_p 1")
    )


def test_sampling_options_without_sampling_are_refused() -> None:
    with pytest.raises(MegatuneError) as raised:
        check_options(GenerationOptions(top_p=0.9, top_k=20, raw=True, system="s"))
    assert [finding.where for finding in raised.value.findings] == ["--top_p", "--top_k", "--system"]


def test_a_thinking_switch_that_the_template_lacks_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(MegatuneError, match="no such switch") as raised:
        Generator.load(tiny_model(tmp_path_factory, "llama"), GenerationOptions(enable_thinking=False))
    assert raised.value.exit_code == ExitCode.SETTINGS


def test_a_stop_word_ends_an_answer_and_streams_no_further(generator: Generator) -> None:
    whole = generator.answer(QUESTION).text
    word = whole[3:5]
    for keep in (True, False):
        sampling = generator.options.model_copy(
            update={"stop_words": ["never", word, word + "x"], "keep_stop_word": keep}
        )
        pieces: list[str] = []
        reply = generator.backend.write(generator.chat_prompt(QUESTION), sampling, pieces.append)
        end = whole.index(word) + len(word) * keep
        assert (reply.text, "".join(pieces), reply.stopped) == (whole[:end], whole[:end], True)
        assert reply.num_tokens < 8


def test_text_waits_while_it_may_begin_a_stop_word() -> None:
    sampling = GenerationOptions(stop_words=["</end>", "STOP"], keep_stop_word=False)
    for pieces, shown in (
        (["a<", "/en", "x"], ["a", "</enx"]),
        (["a<", "/end", ">b", "c"], ["a"]),
        (["ST", "ST", "OPS"], ["ST"]),
        (["12</"], ["12", "</"]),
    ):
        seen: list[str] = []
        held = StopWordBuffer(sampling, seen.append)
        for piece in pieces:
            held.add(piece)
        held.add("", is_last=True)
        assert seen == shown


def test_an_answer_can_be_ended_from_outside(generator: Generator) -> None:
    seen: list[str] = []
    sampling = generator.options.model_copy(update={"max_new_tokens": 40})
    prompt = generator.chat_prompt(QUESTION)
    reply = generator.backend.write(prompt, sampling, seen.append, is_stopped=lambda: bool(seen))
    assert reply.num_tokens < 10
    assert not reply.stopped
