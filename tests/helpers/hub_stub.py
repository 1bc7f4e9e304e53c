"""A stand-in for the Hub on this machine: what its package asks when it makes, fills and fetches a repository."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_these_tests"


class Hub:
    """What the stand-in holds and was asked. repositories: by name, their files; private: those that need the token."""

    def __init__(self) -> None:
        self.address = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.asked: list[str] = []

    def commit(self, name: str) -> str:
        """The present commit of a repository: of its files' contents."""
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()

    def answer(self, path: str, body: bytes, known: bool) -> tuple[int, Any, str]:
        """Status, JSON or bytes, commit. known: whether the token came along."""
        kind, _, rest = path.removeprefix("/api/").partition("/")
        if path.startswith("/api/") and kind != "models":
            valid = {"errors": [], "warnings": []}  # the model card's metadata
            return self._create(json.loads(body), known) if kind == "repos" else (200, valid, "")
        owner, name, *deed = (rest if path.startswith("/api/") else path.removeprefix("/")).split("/")
        name = f"{owner}/{name}"
        if name not in self.repositories or (name in self.private and not known):
            return (404 if known else 401), {"error": "Repository not found"}, ""
        return self._about(name, deed, body)

    def _create(self, wanted: dict[str, Any], known: bool) -> tuple[int, Any, str]:
        name = f"{wanted['organization']}/{wanted['name']}"
        if not known:
            return 401, {"error": "Invalid credentials"}, ""
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}, ""
        self.repositories[name] = {}
        if wanted.get("visibility") == "private" or wanted.get("private"):
            self.private.add(name)
        return 200, {"url": f"{self.address}/{name}"}, ""

    def _about(self, name: str, deed: list[str], body: bytes) -> tuple[int, Any, str]:
        files, commit = self.repositories[name], self.commit(name)
        if deed[:1] == ["resolve"]:
            return (200, files[deed[2]], commit) if deed[2] in files else (404, {"error": "Entry not found"}, commit)
        if deed[:1] == ["tree"]:
            return 200, [{"type": "file", "path": f, "size": len(c), "oid": "0" * 40} for f, c in files.items()], commit
        if deed[:1] == ["preupload"]:
            paths = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}, commit
        if deed[:1] == ["commit"]:
            lines = [json.loads(line) for line in body.splitlines()]
            new = [line["value"] for line in lines if line["key"] == "file"]
            files.update({one["path"]: base64.b64decode(one["content"]) for one in new})
            return 200, {"commitUrl": f"{self.address}/{name}/commit/{commit}", "commitOid": self.commit(name)}, ""
        siblings = [{"rfilename": file} for file in files]
        return 200, {"id": name, "sha": commit, "private": name in self.private, "siblings": siblings}, ""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, found, commit = hub.answer(path, body, known)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound" if commit else "RepoNotFound")
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    return Handler


@contextlib.contextmanager
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Within the block, huggingface_hub takes the stand-in for the Hub, and keeps what it fetches in the folder."""
    pytest.importorskip("huggingface_hub._snapshot_download")  # with all modules that read the settings below
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    settings: dict[str, Any] = {"ENDPOINT": hub.address, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": False}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    for module in [module for name, module in sys.modules.items() if name.startswith("huggingface_hub")]:
        for key in settings.keys() & vars(module).keys():
            monkeypatch.setattr(module, key, settings[key])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
