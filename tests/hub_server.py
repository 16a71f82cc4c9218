"""A small hub on this machine, for the real clients: what `huggingface_hub` and `modelscope_hub` ask for."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_aSecretThatIsNowhereElse"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
REVISIONS = {"v1": OLDER, COMMIT: COMMIT, OLDER: OLDER}

Files = Mapping[str, bytes | str]


class Hub(ThreadingHTTPServer):
    """Repositories by their ids; team/gated, team/down, team/dropped and team/denied answer as their names say.

    Attributes:
        asked: the path of every request.
        sent: the path and the first byte of every file that was sent.
        cuts: how often to break the connection in the middle of a file, by its path.
        damaged: files of which another content of the same size is sent.
        sizes: of files, where the list lies about them.
        commits: repository, message and paths of every commit that was made.
        refuses: status of the answer to each commit, while there are any; 0 is none at all.
        ended: that nobody asks any more, for requests that have no answer.
        account: whom a token belongs to; "" where the hub knows none.
        main: the commit that the branch main is at.
    """

    daemon_threads = True

    def __init__(self, datasets: Mapping[str, Files] | None = None, models: Mapping[str, Files] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {
            kind: {repo: {path: _bytes(content) for path, content in files.items()} for repo, files in found.items()}
            for kind, found in (("datasets", datasets or {}), ("models", models or {}))
        }
        self.asked: list[str] = []
        self.sent: list[tuple[str, int]] = []
        self.cuts: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.commits: list[tuple[str, str, list[str]]] = []
        self.refuses: list[int] = []
        self.account = "team"
        self.main = COMMIT
        self.ended = Event()
        self.blobs: dict[str, bytes] = {}  # that ModelScope's library sends before its commit

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that went away is no fault; and Python 3.11 parses source to write a traceback, which fails another
        # thread's ast.parse.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Of a client whose caches are in a folder."""
        own = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
            "MODELSCOPE_ENDPOINT": self.url,
            "MODELSCOPE_API_TOKEN": TOKEN,
            "MODELSCOPE_CACHE": str(folder / "ms"),
            "MODELSCOPE_HOME": str(folder / "ms-home"),
            "MEGATUNE_CACHE": str(folder / "cache"),
            **more,
        }
        return {**{name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}, **own}


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    Thread(target=hub.serve_forever, daemon=True).start()
    yield hub
    hub.ended.set()
    hub.shutdown()
    hub.server_close()


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/")
        self.server.asked.append(path)
        if path == "openapi/v1/users/me":
            return self.answer(200, json.dumps({"success": True, "data": {"username": self.server.account}}).encode())
        if path == "api/whoami-v2":
            known = self.server.account and self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self.answer(
                200 if known else 401, json.dumps({"type": "user", "name": self.server.account}).encode()
            )
        for kind in ("datasets", "models"):
            if path.startswith(f"api/v1/{kind}/"):
                return self.modelscope(kind, path.removeprefix(f"api/v1/{kind}/"), parse_qs(url.query))
            if path.startswith(f"api/{kind}/"):
                return self.api(kind, path.removeprefix(f"api/{kind}/"))
        if "/resolve/" in path:
            kind = "datasets" if path.startswith("datasets/") else "models"
            repo, _, rest = path.removeprefix("datasets/").partition("/resolve/")
            return self.file(kind, repo, rest.partition("/")[2])
        return self.answer(404, b"{}")

    def do_POST(self) -> None:
        """Of Hugging Face's hub: repositories are created, and committed to, every file in the commit itself."""
        path = unquote(urlsplit(self.path).path).strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}")
        if path.startswith("api/v1/"):
            return self.modelscope_post(path.removeprefix("api/v1/"), json.loads(body))
        if path == "api/validate-yaml":
            return self.answer(200, b'{"errors": [], "warnings": []}')
        if path == "api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or self.server.account}/{asked['name']}"
            is_new = repo not in self.server.repositories["models"]
            self.server.repositories["models"].setdefault(repo, {})
            return self.answer(200 if is_new else 409, json.dumps({"url": f"{self.server.url}/{repo}"}).encode())
        repo, _, what = path.removeprefix("api/models/").partition("/preupload/")
        if what:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, json.dumps({"files": files}).encode())
        return self.commit(path.removeprefix("api/models/").partition("/commit/")[0], body)

    def do_PUT(self) -> None:
        """Of ModelScope's hub: a large file, by its digest."""
        self.server.blobs[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, b"{}")

    def modelscope_post(self, path: str, asked: dict[str, Any]) -> None:
        """Of ModelScope's hub: repositories are created, and committed to, large files beforehand."""
        data: dict[str, Any] = {}
        if path == "models":
            self.server.repositories["models"].setdefault(f"{asked['Path']}/{asked['Name']}", {})
        elif path.endswith("/info/lfs/objects/batch"):
            href = f"{self.server.url}/blobs"
            objects = [{**each, "actions": {"upload": {"href": f"{href}/{each['oid']}"}}} for each in asked["objects"]]
            data = {"objects": objects}
        else:
            repo = path.removeprefix("repos/models/").partition("/commit/")[0]
            files = self.server.repositories["models"][repo]
            for action in asked["actions"]:
                is_large = action["type"] == "lfs"
                content = self.server.blobs[action["sha256"]] if is_large else b64decode(action["content"])
                files[action["path"]] = content
            self.server.commits.append((repo, asked["commit_message"], sorted(files)))
        self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": data}).encode())

    def commit(self, repo: str, body: bytes) -> None:
        if self.server.refuses:
            status = self.server.refuses.pop(0)
            if status == 0:
                self.server.ended.wait()
                raise ConnectionAbortedError
            return self.answer(status, TOKEN.encode())
        lines = [json.loads(line) for line in body.splitlines()]
        files = self.server.repositories["models"][repo]
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        self.server.commits.append((repo, message, sorted(files)))
        found = {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.url}/{repo}/commit/{COMMIT}"}
        return self.answer(200, json.dumps(found).encode())

    def api(self, kind: str, path: str) -> None:
        repo = next((name for name in self.server.repositories[kind] if path.startswith(f"{name}/")), "")
        rest = path.removeprefix(f"{repo}/")
        if path.startswith("team/gated/"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("team/denied/"):
            self.answer(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif path.startswith("team/down/"):
            self.answer(500, f"{TOKEN}".encode())
        elif path.startswith("team/dropped/"):
            self.close_connection = True
        elif not repo:
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": f"token {TOKEN}"})
        elif rest.startswith("tree/"):
            files = self.server.repositories[kind][repo].items()
            self.answer(200, json.dumps([self.entry(path, content) for path, content in files]).encode())
        elif (commit := self.commit_of(rest.removeprefix("revision/"))) is None:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.answer(200, json.dumps({"id": repo, "sha": commit, "siblings": []}).encode())

    def commit_of(self, revision: str) -> str | None:
        return self.server.main if revision == "main" else REVISIONS.get(revision)

    def entry(self, path: str, content: bytes) -> dict[str, object]:
        size = self.server.sizes.get(path, len(content))
        entry: dict[str, object] = {
            "type": "file",
            "path": path,
            "size": size,
            "oid": hashlib.sha1(content).hexdigest(),
        }
        if path.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def modelscope(self, kind: str, path: str, query: dict[str, list[str]]) -> None:
        repo, of_repo, what = path.partition("/repo")
        if not of_repo and repo in self.server.repositories[kind]:
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Name": repo}}).encode())
        elif repo not in self.server.repositories[kind] or query.get("Revision", ["master"])[0] != "master":
            self.answer(404, json.dumps({"Code": 404, "Message": f"not there {TOKEN}"}).encode())
        elif what.startswith(("/tree", "/files")):
            files = [
                {"Path": name, "Size": len(content), "Sha256": hashlib.sha256(content).hexdigest(), "Type": "blob"}
                for name, content in self.server.repositories[kind][repo].items()
            ]
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())
        else:
            self.file(kind, repo, query["FilePath"][0])

    def file(self, kind: str, repo: str, path: str) -> None:
        content = self.server.repositories[kind].get(repo, {}).get(path)
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        digest = hashlib.sha256(content) if path.endswith(".safetensors") else hashlib.sha1(content)
        headers = {"ETag": f'"{digest.hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if path in self.server.damaged:
            content = bytes(byte ^ 1 for byte in content)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.server.sent.append((path, start))
        if self.command == "GET" and self.server.cuts.get(path, 0) > 0:
            self.server.cuts[path] -= 1
            headers["Content-Length"] = str(len(content) - start)
            self.close_connection = True
            content = content[: start + (len(content) - start) // 2]
        return self.answer(206 if start else 200, content[start:], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
