"""The Hugging Face hub's API, as much as its client needs for a download, on a real socket.

Repositories are folders; each revision of one is a name and a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from support.file_server import serving

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+)(/.*)?)?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


class HubServer(ThreadingHTTPServer):
    """`repos`: name → revision → folder. `token`: what gated repositories ask for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.token = "hf_secret"
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit_of(self, repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo} {self.repos[repo][revision]}".encode()).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        found = API.fullmatch(path) or FILE.fullmatch(path)
        repo = found["repo"] if found else ""
        if repo not in self.server.repos:
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
        elif repo in self.server.gated and self.headers.get("authorization") != f"Bearer {self.server.token}":
            self.refuse(401, "GatedRepo", f"Access to model {repo} is restricted.")
        elif found is not None:
            self.answer(repo, found["revision"] or "main", found.groupdict().get("path"), found.groupdict().get("what"))

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, repo: str, revision: str, file: str | None, what: str | None) -> None:
        known = self.server.repos[repo]
        commits = {self.server.commit_of(repo, name): name for name in known}
        name = commits.get(revision, revision)
        if name not in known:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        folder, commit = known[name], self.server.commit_of(repo, name)
        files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
        if file is not None and file in files:
            content = files[file].read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self.send(200, content, "application/octet-stream", {"ETag": f'"{tag}"', "X-Repo-Commit": commit})
        elif file is not None:
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif what == "tree":
            entries = [
                {
                    "type": "file",
                    "path": path,
                    "size": p.stat().st_size,
                    "oid": hashlib.sha1(p.read_bytes()).hexdigest(),
                }
                for path, p in files.items()
            ]
            self.send(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            document = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": [], "private": False}
            self.send(200, json.dumps(document).encode())

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send(
            status, json.dumps({"error": message}).encode(), headers={"X-Error-Code": code, "X-Error-Message": message}
        )

    def send(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serving_hub() -> AbstractContextManager[HubServer]:
    return serving(HubServer())
