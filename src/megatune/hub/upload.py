"""Upload of a model's folder to a hub, in a separate process that may take long, hang or be killed.

It reads one JSON object from standard input and writes another one to standard output:

    {"task": "prepare", "hub": "hf" | "ms", "repo_id": ..., "private": ...}    -> {"repo_id": "OWNER/NAME"}
    {"task": "send", ..., "folder": ..., "message": ...}                       -> {"repo_id": ..., "url": ...}
    on failure: {"why": ..., "is_refused": whether the hub refused, so that another attempt would fail, too}
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from megatune.errors import ExitCode, Finding, MegatuneError, without_secrets
from megatune.hub.failures import why
from megatune.hub.repository import Hub, host_of
from megatune.processes import when_parent_ends

CARD = "README.md"
OWN_CARD = "<!-- made by megatune: remove this line to keep what you write here -->"
# Files of another model in the repository, which could be loaded instead of the uploaded one.
_WEIGHTS = ["model*.safetensors", "adapter_model*.safetensors", "model.safetensors.index.json"]
_REFUSALS = (400, 401, 403, 404)
_PREPARE_SECONDS = 30.0
TOKEN_VARIABLES: Mapping[Hub, str] = {"hf": "HF_TOKEN", "ms": "MODELSCOPE_API_TOKEN"}


def start(order: Mapping[str, Any], log: Path | int) -> subprocess.Popen[bytes]:
    """Start the process with a request; its answer is on its standard output when it has ended.

    Args:
        log: for the output of the hub's library.
    """
    words = [sys.executable, "-P", "-m", "megatune.hub.upload"]
    stderr: IO[bytes] | int = log.open("ab") if isinstance(log, Path) else log
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    finally:
        if not isinstance(stderr, int):
            stderr.close()
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode())
    process.stdin.close()
    return process


def read_answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the answer of a process that has ended."""
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    try:
        return dict(json.loads(said))
    except ValueError:
        return {"why": f"its process ended with code {process.wait()}", "is_refused": False}


def push_command(hub: Hub, repo_id: str, checkpoint: Path) -> str:
    """Return the command that pushes a checkpoint by hand."""
    program = "hf upload" if hub == "hf" else "modelscope upload"
    return f'{program} {repo_id} {shlex.quote(str(checkpoint))} . --exclude "training/*" --exclude "iter_*"'


def prepare_repository(hub: Hub, repo_id: str, private: bool | None) -> tuple[str, str]:
    """Check that the token may write to a repository, and create it if it does not exist.

    Returns:
        OWNER/NAME, and ""; or `repo_id` and a warning, if the hub does not answer.

    Raises:
        MegatuneError: INPUT, if the hub refuses.
    """
    order = {"task": "prepare", "hub": hub, "repo_id": repo_id, "private": private}
    process = start(order, subprocess.DEVNULL)
    try:
        process.wait(_PREPARE_SECONDS)
        answer = read_answer(process)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        answer = {"why": f"it does not answer within {_PREPARE_SECONDS:.0f} s", "is_refused": False}
    if "repo_id" in answer:
        return answer["repo_id"], ""
    what = f"cannot push to {repo_id} on {endpoint(hub)}"
    if answer["is_refused"]:
        fix = f"set {TOKEN_VARIABLES[hub]} to a token that may write there, name another hub_model_id, or write"
        finding = Finding(what, "push_to_hub", answer["why"], f"{fix} push_to_hub: false")
        raise MegatuneError(finding, ExitCode.INPUT)
    return repo_id, f"{what} so far: {answer['why']}; the run tries again when there is something to push"


def main() -> int:
    when_parent_ends(os.getppid(), lambda: os._exit(1))
    os.nice(10)  # digests of large files take CPU time that training may need
    order, answer = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        found = (_HuggingFace if order["hub"] == "hf" else _ModelScope)(order).follow()
    except Exception as error:
        print(without_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
        found = _failure(error)
    print(json.dumps(found), file=answer, flush=True)
    return 0


def _failure(error: Exception) -> dict[str, Any]:
    """Return the reason without quoting the hub."""
    no_token = type(error).__name__ in ("LocalTokenNotFoundError", "AuthenticationError")
    said = "there is no token, or the hub does not know it" if no_token else why(error)
    is_refused = no_token or isinstance(error, ValueError) or any(f"HTTP {code}" in said for code in _REFUSALS)
    return {"why": said, "is_refused": is_refused}


class _HuggingFace:
    def __init__(self, order: Mapping[str, Any]) -> None:
        from huggingface_hub import HfApi

        self._order, self._api = order, HfApi()

    def follow(self) -> dict[str, Any]:
        repo_id = self._order["repo_id"]
        if "/" not in repo_id:
            repo_id = f"{self._api.whoami()['name']}/{repo_id}"
        elif self._order["task"] == "prepare":
            self._api.whoami()
        repo_id = self._api.create_repo(repo_id, private=self._order["private"], exist_ok=True).repo_id
        if self._order["task"] == "prepare":
            return {"repo_id": repo_id}
        sent = self._api.upload_folder(
            repo_id=repo_id,
            folder_path=self._order["folder"],
            commit_message=self._order["message"],
            ignore_patterns=[CARD] if self._has_card(repo_id) else None,
            delete_patterns=_WEIGHTS,
        )
        return {"repo_id": repo_id, "url": getattr(sent, "commit_url", "")}

    def _has_card(self, repo_id: str) -> bool:
        """Return whether the repository has a card that a user wrote."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = self._api.hf_hub_download(repo_id, CARD)
        except EntryNotFoundError:
            return False
        return OWN_CARD not in Path(path).read_text(encoding="utf-8", errors="replace")


class _ModelScope:
    def __init__(self, order: Mapping[str, Any]) -> None:
        from modelscope_hub import HubApi, HubConfig

        config = HubConfig()
        self._order, self._api, self._endpoint = order, HubApi(config), config.endpoint

    def follow(self) -> dict[str, Any]:
        repo_id, private = self._order["repo_id"], self._order["private"]
        if "/" not in repo_id or self._order["task"] == "prepare":
            name = self._api.whoami().username
            repo_id = repo_id if "/" in repo_id else f"{name}/{repo_id}"
        if not self._api.repo_exists(repo_id, "model"):
            visibility = "private" if private else "public"
            self._api.create_repo(repo_id, "model", visibility=visibility)
        if self._order["task"] == "prepare":
            return {"repo_id": repo_id}
        self._api.upload_folder(
            repo_id,
            "model",
            self._order["folder"],
            commit_message=self._order["message"],
            ignore_patterns=[CARD] if self._has_card(repo_id) else None,
            use_cache=False,
            disable_tqdm=True,
        )
        return {"repo_id": repo_id, "url": f"{self._endpoint}/models/{repo_id}"}

    def _has_card(self, repo_id: str) -> bool:
        """Return whether the repository has a card that a user wrote, not the one that the hub creates."""
        if CARD not in [file.path for file in self._api.list_repo_files(repo_id, "model")]:
            return False
        text = Path(self._api.download_file(repo_id, "model", CARD, force=True)).read_text("utf-8", "replace")
        return OWN_CARD not in text and "git clone" not in text


def endpoint(hub: Hub) -> str:
    """Return the hub's host, for messages."""
    names = {"hf": ("HF_ENDPOINT", "https://huggingface.co"), "ms": ("MODELSCOPE_ENDPOINT", "https://modelscope.cn")}
    variable, default = names[hub]
    return host_of(os.environ.get(variable) or default)


if __name__ == "__main__":
    sys.exit(main())
