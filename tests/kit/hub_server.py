"""A Hugging Face Hub on loopback, as small as huggingface_hub lets it be: repositories in memory, served with ranges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

ADDRESS = re.compile(
    r"/(?P<api>api/models/|api/datasets/|datasets/|)(?P<id>[\w.-]+/[\w.-]+)"
    r"(/(?P<verb>revision|tree|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?)?"
)


@dataclass
class Hub:
    """What the server has, and the requests that it got.

    Attributes:
        repositories: "model org/name" or "dataset org/name" -> branch or commit -> (commit, file -> content).
        gated: ids whose files nobody gets.
        cut: file -> so many bytes of it are sent once, then the connection breaks.
        served: (file, bytes) of every answer to a GET of a file.
    """

    address: str = ""
    repositories: dict[str, dict[str, tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    served: list[tuple[str, int]] = field(default_factory=list)

    def add(self, name: str, source: Path | dict[str, bytes], revision: str = "main", kind: str = "model") -> str:
        """Publish a folder, or contents by name; returns the commit."""
        if isinstance(source, Path):
            source = {p.relative_to(source).as_posix(): p.read_bytes() for p in source.rglob("*") if p.is_file()}
        commit = hashlib.sha1(repr(sorted(source.items())).encode()).hexdigest()
        versions = self.repositories.setdefault(f"{kind} {name}", {})
        versions[revision] = versions[commit] = (commit, dict(source))
        return commit

    def files(self) -> list[str]:
        """The names of the files that were sent, once each."""
        return sorted({name for name, _ in self.served})


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub while the block runs."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        address = ADDRESS.fullmatch(unquote(urlparse(self.path).path))
        kind = "dataset" if address and "datasets" in address["api"] else "model"
        versions = self.hub.repositories.get(f"{kind} {address['id']}") if address else None
        if address is None or versions is None:
            return self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        version = versions.get(address["revision"] or "main")
        if version is None:
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit, files = version
        if not address["api"].startswith("api/"):
            return self._file(address["id"], commit, address["file"], files)
        if address["verb"] == "tree":
            listed = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()]
            return self._answer(200, json.dumps(listed).encode())
        siblings = [{"rfilename": n, "size": len(c), "blobId": _etag(c)} for n, c in files.items()]
        return self._answer(200, json.dumps({"id": address["id"], "sha": commit, "siblings": siblings}).encode())

    def _file(self, repository: str, commit: str, name: str, files: dict[str, bytes]) -> None:
        if repository in self.hub.gated:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content, status = files[name], 200
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        if self.command == "GET":
            self.hub.served.append((name, min(len(content), self.hub.cut.get(name, len(content)))))
        return self._answer(status, content, headers, name)

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None, name: str = "") -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET" and name in self.hub.cut:
            self.wfile.write(content[: self.hub.cut.pop(name)])
            self.wfile.flush()
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
