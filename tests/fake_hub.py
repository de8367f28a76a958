"""A server that imitates the Hugging Face hub, and serves folders of this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """A hub on a free port of this machine, which runs during the `with` block.

    Args:
        folders: "datasets/org/name" or "models/org/name" → the files of the repository.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self.requests: list[str] = []

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def not_found(self) -> None:
        self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/(.+?)/resolve/[^/]+/(.+)", path):
            return self.resolve(match[1], match[2])
        if match := re.fullmatch(
            r"/api/((?:datasets|models)/[^/]+/[^/]+)(?:/(revision|tree)/[^/]+(?:/(.*))?)?", path
        ):
            return self.describe(match[1], match[2], match[3] or "")
        return self.not_found()

    def resolve(self, name: str, file: str) -> None:
        """Send a file."""
        folder = self.hub.folders.get(name if "datasets/" in name else f"models/{name}")
        if folder is None:
            return self.not_found()
        if not (folder / file).is_file():
            return self.answer(404, b"", X_Error_Code="EntryNotFound")
        content = (folder / file).read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        self.answer(200, content, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)

    def describe(self, name: str, what: str | None, under: str) -> None:
        """Send the description of a repository, or the list of its files."""
        folder = self.hub.folders.get(name)
        if folder is None:
            return self.not_found()
        entries = [self.entry(folder, p) for p in sorted(folder.rglob("*"))]
        if what == "tree":
            start = f"{under}/" if under else ""
            found = [entry for entry in entries if entry["path"].startswith(start)]
            if under and not found:
                return self.answer(404, b"", X_Error_Code="EntryNotFound")
            recursive = "recursive=true" in self.path.lower()
            depth = start.count("/")
            found = [e for e in found if recursive or e["path"].count("/") == depth]
            return self.answer(200, found)
        files = [{"rfilename": entry["path"]} for entry in entries if entry["type"] == "file"]
        short = name.partition("/")[2]
        about = {"id": short, "sha": COMMIT, "siblings": files, "private": False, "gated": False}
        return self.answer(200, about | {"downloads": 0, "likes": 0, "tags": [], "disabled": False})

    @staticmethod
    def entry(folder: Path, path: Path) -> dict[str, object]:
        kind = "file" if path.is_file() else "directory"
        oid = hashlib.sha1(path.read_bytes() if path.is_file() else b"").hexdigest()
        size = path.stat().st_size if path.is_file() else 0
        name = path.relative_to(folder).as_posix()
        return {"type": kind, "oid": oid, "size": size, "path": name}

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if match := re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/paths-info/[^/]+", path):
            folder = self.hub.folders.get(match[1])
            if folder is None:
                return self.not_found()
            asked = json.loads(body)["paths"]
            found = [self.entry(folder, folder / p) for p in asked if (folder / p).exists()]
            return self.answer(200, found)
        return self.not_found()
