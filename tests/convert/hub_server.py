"""A small server on loopback that speaks the hub's protocol, and can fail in every way that the hub does."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPO = "org/tiny"
FIRST, SECOND = "1" * 40, "2" * 40
TOKEN = "hf_thetokenofthetests"


@dataclass
class Hub:
    """What is served: folders by commit, commits by the names of branches, and what goes wrong."""

    folders: dict[str, Path]
    branches: dict[str, str]
    url: str = ""
    fail: dict[str, tuple[int, dict]] = field(default_factory=dict)  # pattern of "GET /path": status, headers
    cut: dict[str, int] = field(default_factory=dict)  # file: bytes after which the next answer breaks off
    wrong: set[str] = field(default_factory=set)  # files of which other bytes are sent
    private: bool = False  # only TOKEN may read
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def fetched(self, name: str) -> list[str]:
        """Ranges of the GET requests for a file, '' for the whole."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(f"/{name}")]

    def listing(self, commit: str) -> list[dict]:
        siblings = []
        for file in sorted(p for p in self.folders[commit].rglob("*") if p.is_file()):
            content = file.read_bytes()
            entry = {"rfilename": str(file.relative_to(self.folders[commit])), "size": len(content)}
            entry["blobId"] = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            if file.suffix in (".safetensors", ".bin"):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return siblings


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and content go out in two pieces
    hub: Hub

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        for pattern, (status, headers) in self.hub.fail.items():
            if re.search(pattern, f"{self.command} {path}"):
                return self._send(status, b"{}", headers)
        if self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path == f"/api/models/{REPO}/refs":
            refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in self.hub.branches.items()]
            return self._json({"branches": refs, "tags": [], "converts": []})
        if match := re.fullmatch(rf"/api/models/{REPO}/revision/(.+)", path):
            commit = self._commit(match[1])
            if commit is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self._json({"id": REPO, "sha": commit, "siblings": self.hub.listing(commit)})
        if match := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
            return self._file(self._commit(match[1]), match[2])
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _commit(self, revision: str) -> str | None:
        commit = self.hub.branches.get(revision, revision)
        return commit if commit in self.hub.folders else None

    def _file(self, commit: str | None, name: str) -> None:
        file = self.hub.folders.get(commit, Path("/nowhere")) / name
        if not file.is_file():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit or ""})
        content = file.read_bytes()
        listed = next(s for s in self.hub.listing(commit) if s["rfilename"] == name)
        etag = listed["lfs"]["sha256"] if "lfs" in listed else listed["blobId"]
        if name in self.hub.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "lfs" in listed:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        whole = not match or not match[2]
        self._send(status, content, headers, self.hub.cut.pop(name, None) if whole and self.command == "GET" else None)

    def _json(self, value) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def serve(folders: dict[str, Path], branches: dict[str, str]):
    """A hub with one repository on a free port, until the block ends."""
    hub = Hub(folders, branches)
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
