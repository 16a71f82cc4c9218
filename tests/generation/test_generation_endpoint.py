"""The endpoint as OpenAI's own client uses it, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from PIL import Image

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.generation.endpoint.app import App, Limits
from megatune.generation.endpoint.server import Server, listening_socket
from megatune.generation.endpoint.streams import Streams
from megatune.generation.generator import Generator
from megatune.generation.options import GenerationOptions, Sampling
from megatune.generation.prompt import Backend, Prompt, Reply

OPTIONS = GenerationOptions(max_new_tokens=12)
HI = [{"role": "user", "content": "Hi"}]
PAGE = "https://page.example"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


class Recorded:
    """A backend that keeps its replies, and counts what it has begun."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.context, self.max_concurrency = backend, backend.context, backend.max_concurrency
        self.close = backend.close
        self.replies: list[Reply] = []
        self.begun = 0

    def write(self, *arguments: Any) -> Reply:
        self.begun += 1
        self.replies.append(self.backend.write(*arguments))
        return self.replies[-1]

    def write_all(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        raise AssertionError


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return Generator.load(make_checkpoint("qwen3", folder, num_layers=2, hidden_size=32), OPTIONS)


@pytest.fixture(scope="module")
def recorded(generator: Generator) -> Recorded:
    return Recorded(generator.backend)


@contextmanager
def serving(app: App, streams: Any, key: str | None) -> Iterator[int]:
    taken = listening_socket("127.0.0.1", 0, has_key=key is not None)
    server = Server(app.asgi([PAGE]), streams)
    thread = threading.Thread(target=server.serve_on, args=(taken,))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield taken.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def streams(recorded: Recorded) -> Streams:
    return Streams(recorded, max_waiting=0)


@pytest.fixture(scope="module")
def port(generator: Generator, streams: Streams) -> Iterator[int]:
    limits = Limits(body_bytes=20_000)
    app = App(generator, streams, "tiny", 1, defaults=OPTIONS, api_key="secret", limits=limits)
    with serving(app, streams, "secret") as port:
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> openai.OpenAI:
    return client_of(port)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def client_of(port: int, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


def asked(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, {"Content-Type": "application/json", **given})
    return connection.getresponse()


def test_models_and_health(client: openai.OpenAI, port: int) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "megatune"
    assert json.load(asked(port, "GET", "/health")) == {"status": "ok"}


def test_a_chat_is_answered_as_infer_answers(client: openai.OpenAI, generator: Generator) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    expected = generator.answer(messages)
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "length")
    prompt = len(generator.chat_prompt(messages).token_ids)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 12, prompt + 12)
    developer = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    ]
    again = client.chat.completions.create(
        model="tiny", messages=[*developer, *HI], n=1, frequency_penalty=0.0, user="me", logprobs=False
    )
    assert again.choices[0].message.content == expected.text
    # Answers of other endpoints have empty lists.
    said = {**answer.choices[0].message.model_dump(), "annotations": [], "tool_calls": []}
    history = [*messages, said, *HI]
    turns = [*messages, {"role": "assistant", "content": expected.text}, *HI]
    again = client.chat.completions.create(model="tiny", messages=history)
    assert again.choices[0].message.content == generator.answer(turns).text
    thoughtless = client.chat.completions.create(
        model="tiny", messages=HI, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    without = generator.backend.write(generator.chat_prompt(HI, enable_thinking=False), OPTIONS)
    assert thoughtless.choices[0].message.content == without.text


def test_streams_end_with_the_reason_and_the_usage(client: openai.OpenAI, generator: Generator) -> None:
    chunks = list(
        client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options={"include_usage": True})
    )
    *pieces, end, usage = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == generator.answer(HI).text
    assert len(pieces) > 2
    assert all(piece.usage is None for piece in (*pieces, end))
    assert end.choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage and usage.usage.completion_tokens) == ([], 12)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_continue_a_text(client: openai.OpenAI, generator: Generator) -> None:
    whole = generator.complete("The river").text
    answer = client.completions.create(model="tiny", prompt=["The river"])
    assert (answer.choices[0].text, answer.object) == (whole, "text_completion")
    stop = whole[3:5]
    for stream in (False, True):
        given = client.completions.create(model="tiny", prompt="The river", stop=[stop], stream=stream)
        chunks = list(given) if stream else [given]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_ended_answer_makes_room_for_the_next(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the client is faster than the thread that answered."""
    streams = Streams(generator.backend, max_waiting=0)

    async def ask() -> list[Any]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def delayed(*arguments: Any) -> None:
            call(*arguments)
            time.sleep(0.05)

        monkeypatch.setattr(loop, "call_soon_threadsafe", delayed)
        return [
            [event async for event in streams.stream(lambda: generator.chat_prompt(HI), OPTIONS)][-1] for _ in range(2)
        ]

    assert [type(last) for last in asyncio.run(ask())] == [Reply, Reply]


def test_sampling_is_that_of_the_request(client: openai.OpenAI) -> None:
    def sampled(**given: Any) -> str:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, temperature=2.0, extra_body={"top_k": 500}, **given
        )
        return answer.choices[0].message.content or ""

    assert sampled(seed=1) == sampled(seed=1, top_p=1.0) != sampled(seed=2)
    assert sampled(seed=1, max_tokens=2) != sampled(seed=1)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"extra_body": {"beams": 3}}, "beams", "unknown_parameter"),
        ({"temperature": -1}, "temperature", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"stop": [""]}, "stop", None),
        ({"seed": 2**70}, "seed", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user", "content": "1" * 5000}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", None),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", None),
        ({"messages": [{**HI[0], "name": "ann"}]}, "messages.0.name", "unsupported_parameter"),
        ({"messages": [{**HI[0], "tool_calls": [{}]}]}, "messages.0.tool_calls", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content", None),
    ],
)  # fmt: skip
def test_requests_that_are_wrong(client: openai.OpenAI, given: dict, param: str, code: str | None) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**{"model": "tiny", "messages": HI, "stream": stream, **given})
        assert (raised.value.param, raised.value.code) == (param, code)
        assert raised.value.type == "invalid_request_error"


def test_what_is_not_json_too_large_or_elsewhere(client: openai.OpenAI, port: int) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="other", messages=HI)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as too_large:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 30_000}])
    assert too_large.value.status_code == 413
    key = {"Authorization": "Bearer secret"}
    for body, headers, path, status in (
        (b"{", {}, "/v1/completions", 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', {}, "/v1/completions", 400),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', {}, "/v1/completions", 400),
        (b"{}", {"Content-Type": "text/plain"}, "/v1/completions", 415),
        (b"", {}, "/v1/embeddings", 404),
    ):
        answer = asked(port, "POST", path, body, **key, **headers)
        assert answer.status == status
        assert json.load(answer)["error"]["message"]
    assert asked(port, "GET", "/v1/completions", **key).status == 405


def test_the_key_and_the_pages(client: openai.OpenAI, port: int) -> None:
    with pytest.raises(openai.AuthenticationError) as raised:
        client_of(port, "secret2").models.list()
    assert raised.value.code == "invalid_api_key"
    for header in ("Bearer sécret", "Basic secret", "secret", "Bearer "):
        assert asked(port, "GET", "/v1/models", Authorization=header).status == 401
    assert asked(port, "POST", "/v1/chat/completions", b"{}").status == 401
    for origin, allowed in ((PAGE, PAGE), ("https://other.example", None)):
        asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = asked(port, "OPTIONS", "/v1/chat/completions", **asking)
        assert answer.headers["Access-Control-Allow-Origin"] == allowed


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(
    client: openai.OpenAI, port: int, recorded: Recorded, streams: Streams, stream: bool
) -> None:
    recorded.replies.clear()
    begun = recorded.begun
    body = {"model": "tiny", "prompt": "The river", "max_tokens": 3000, "stream": stream}
    text = json.dumps(body).encode()
    headers = ("Host: localhost", "Authorization: Bearer secret", "Content-Type: application/json")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, f"Content-Length: {len(text)}", "", ""))
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + text)
    wait_until(lambda: recorded.begun > begun)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    with pytest.raises(openai.InternalServerError) as raised:  # one is answered, and none may wait
        client.completions.create(model="tiny", prompt="x")
    assert (raised.value.status_code, raised.value.code) == (503, "queue_full")
    connection.close()
    wait_until(lambda: bool(recorded.replies))
    assert recorded.replies[0].num_tokens < 3000
    wait_until(lambda: not streams._unfinished)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_an_answer_that_takes_too_long(generator: Generator) -> None:
    streams = Streams(generator.backend, 4)
    app = App(generator, streams, "tiny", 1, defaults=OPTIONS, limits=Limits(seconds=0.3))
    with serving(app, streams, None) as port:
        client = client_of(port)
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(model="tiny", prompt="x", max_tokens=3000)
        assert (raised.value.status_code, raised.value.code) == (504, "timeout")
        with pytest.raises(openai.APIError, match="in time"):
            list(client.completions.create(model="tiny", prompt="x", max_tokens=3000, stream=True))
        # Without a key, pages that call this machine by a name of theirs are turned away.
        assert asked(port, "GET", "/v1/models", Host="page.example").status == 403
        assert asked(port, "GET", "/v1/models", Host="[page").status == 403
        assert asked(port, "GET", "/v1/models", Host=f"localhost:{port}").status == 200


def test_images_are_shown_where_they_stand(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "vl", num_layers=2)
    prompter = Generator.load(folder, OPTIONS, chats=False)
    streams = Streams(prompter.backend, 16)
    assert prompter.media is not None

    def part(colour: str) -> dict[str, Any]:
        file = io.BytesIO()
        Image.new("RGB", (56, 56), colour).save(file, "png")
        data = base64.b64encode(file.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}

    app = App(prompter, streams, "vl", 1, defaults=OPTIONS)
    with serving(app, streams, None) as port:

        def answer(*parts: dict[str, Any]) -> Any:
            content = [{"type": "text", "text": "Is <image> "}, *parts, {"type": "text", "text": "?"}]
            return client_of(port).chat.completions.create(model="vl", messages=[{"role": "user", "content": content}])

        red, blue = answer(part("red"), part("blue")), answer(part("blue"), part("red"))
        assert red.usage.prompt_tokens == blue.usage.prompt_tokens == answer(part("red")).usage.prompt_tokens + 6
        assert red.choices[0].message.content != blue.choices[0].message.content
        for url in ("https://x.example/a.png", "/etc/hostname", "data:image/png;base64,AAAA"):
            with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content"):
                answer({"type": "image_url", "image_url": {"url": url}})


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_ends_the_verb_and_the_answer_that_it_finds(generator: Generator) -> None:
    command = [sys.executable, "-m", "megatune", "serve", "--model", generator.source, "--port", "0"]
    environment = {**os.environ, "MEGATUNE_API_KEY": "k"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("tiny is served at http://127.0.0.1:")
        libraries = {each.path for each in psutil.Process(process.pid).memory_maps()}
        client = client_of(int(said.split(":")[2].partition("/")[0]), "k")
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=3500, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="is ending"):
            list(stream)
        assert (process.wait(30), process.stderr.read()) == (ExitCode.DONE, "")
    assert not [path for path in libraries if "sklearn" in path]  # Transformers would import it, for a second


def test_addresses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with listening_socket("127.0.0.1", 0, has_key=False) as taken:
        taken.listen()
        with pytest.raises(MegatuneError, match="cannot be listened on") as raised:
            listening_socket("localhost", taken.getsockname()[1], has_key=False)
        assert raised.value.exit_code == ExitCode.UNAVAILABLE
    monkeypatch.delenv("MEGATUNE_API_KEY", raising=False)
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == ExitCode.SETTINGS
    assert "there is no API key" in capsys.readouterr().err
    monkeypatch.setenv("MEGATUNE_API_KEY", "")
    assert main(["serve", str(tmp_path), "--port", "99999"]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    assert "MEGATUNE_API_KEY: is empty" in said
    assert "--port: port is 99999" in said
    monkeypatch.setenv("MEGATUNE_API_KEY", "k")
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["serve", str(tmp_path)]) == ExitCode.UNAVAILABLE
    assert "pip install 'megatune[serve]'" in capsys.readouterr().err
