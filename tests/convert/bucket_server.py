"""A small server on loopback with one bucket in memory, in the words of S3 and in those of Google's JSON API.

It answers what TensorStore asks: lists, reads of ranges, writes and deletes with conditions. Rights can be taken away, and
requests are counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "runs"
PAGE = 7  # keys of one answer to a list: small, so that every listing has several pages


@dataclass
class Store:
    """What the bucket holds, and what is refused."""

    objects: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    deny: set[str] = field(default_factory=set)  # PUT, DELETE, GET, LIST
    fail: dict[str, int] = field(default_factory=dict)  # status by pattern of "PUT /key"
    put_left: int | None = None  # after so many the server is gone, as for a killed process
    requests: Counter = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    digests: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # of a content, by key


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    s3: Store
    lock: threading.Lock

    def log_message(self, *arguments) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.google = match = re.fullmatch(r"/(?:upload/)?storage/v1/b/([^/]+)/o(?:/(.*))?", path, re.DOTALL)
        if not match:
            match = re.fullmatch(r"/([^/]+)/?(.*)", path, re.DOTALL)
        bucket, key = match[1], match[2] or ""
        kind = {"POST": "PUT", "HEAD": "GET"}.get(self.command, self.command)
        if kind == "GET" and not key:
            kind = "LIST"
        key = query.get("name", [key])[0]
        with self.lock:
            self.s3.requests[kind] += 1
            self.s3.log.append(f"{kind} {key}")
        if bucket != BUCKET:
            return self._error(404, "NoSuchBucket")
        signed = "Bearer " if self.google else "AWS4-HMAC-SHA256"
        if not self.headers.get("Authorization", "").startswith(signed) or kind in self.s3.deny:
            return self._error(403, "AccessDenied")
        for pattern, status in self.s3.fail.items():
            if re.search(pattern, f"{kind} {key}"):
                return self._error(status, "InternalError")
        getattr(self, f"_{kind.lower()}")(key, query)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _list(self, key: str, query: dict) -> None:
        def given(name: str) -> str:
            return query.get(name, [""])[0]

        after = max(given("continuation-token"), given("start-after"), given("pageToken"))
        found = sorted(k for k in self.s3.objects if k.startswith(given("prefix")) and k > after)
        if self.google:
            found = [
                k for k in found if k >= given("startOffset") and (not given("endOffset") or k < given("endOffset"))
            ]
        page, more = found[:PAGE], len(found) > PAGE
        if self.google:
            items = [{"name": k, "size": str(len(self.s3.objects[k]))} for k in page]
            return self._json({"items": items, **({"nextPageToken": page[-1]} if more else {})})
        entries = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.s3.objects[k])}</Size>"
            f'<ETag>"{self._version(k)}"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'
            for k in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self._xml(
            200,
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{BUCKET}</Name>'
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
            "</ListBucketResult>",
        )

    def _get(self, key: str, query: dict) -> None:
        if key not in self.s3.objects:
            return self._error(404, "NoSuchKey")
        if not self._fits(key, query):
            wanted = "If-Match" in self.headers or "ifGenerationMatch" in query
            return self._error(412 if wanted else 304, "PreconditionFailed")
        data, status = self.s3.objects[key], 200
        if self.google and query["alt"] == ["json"]:
            return self._json({"name": key, "size": str(len(data)), "generation": self._version(key)})
        version = self._version(key)
        headers = {"ETag": f'"{version}"', "x-goog-generation": version, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            size = len(data)
            first = int(match[1]) if match[1] else max(size - int(match[2]), 0)
            last = min(int(match[2]) if match[1] and match[2] else size - 1, size - 1)
            if first > last:
                return self._error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            data, status = data[first : last + 1], 206
        self._send(status, data, headers)

    def _put(self, key: str, query: dict) -> None:
        with self.lock:
            fits = self._fits(key, query)
            if fits and self.s3.put_left is not None:
                if self.s3.put_left == 0:
                    self.s3.deny.add("PUT")
                    return self._error(403, "AccessDenied")
                self.s3.put_left -= 1
            if fits:
                self.s3.objects[key] = self.content
        if not fits:
            return self._error(412, "PreconditionFailed")
        if self.google:
            return self._json({"name": key, "generation": self._version(key)})
        self._send(200, b"", {"ETag": f'"{self._version(key)}"'})

    def _delete(self, key: str, query: dict) -> None:
        with self.lock:
            fits = self._fits(key, query)
            if fits:
                self.s3.objects.pop(key, None)
        if not fits:
            return self._error(412, "PreconditionFailed")
        self._send(204, b"", {})

    def _version(self, key: str) -> str:
        """Of an object's content: S3's entity tag, or a number for Google."""
        content = self.s3.objects[key]
        known, digest = self.s3.digests.get(key, (None, ""))
        if known is not content:
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            self.s3.digests[key] = content, digest
        return str(int(digest[:12], 16)) if self.google else digest

    def _fits(self, key: str, query: dict) -> bool:
        now = self._version(key) if key in self.s3.objects else None
        if self.google:
            wanted, unwanted = (query.get(f"ifGeneration{name}", [None])[0] for name in ("Match", "NotMatch"))
            now = now or "0"
        else:
            wanted, unwanted = (self.headers.get(name) for name in ("If-Match", "If-None-Match"))
            wanted, unwanted = (value and value.strip('"') for value in (wanted, unwanted))
            if unwanted == "*":
                return now is None
        return wanted in (None, now) and (unwanted is None or now != unwanted)

    def _error(self, status: int, code: str) -> None:
        if self.google:
            return self._json({"error": {"code": status, "message": code}}, status)
        self._xml(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _json(self, value: dict, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _xml(self, status: int, text: str) -> None:
        self._send(
            status, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), {"Content-Type": "application/xml"}
        )

    def _send(self, status: int, content: bytes, headers: dict) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        bare = status in (204, 304)
        if not bare:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and not bare:
            self.wfile.write(content)


@contextmanager
def serve():
    """An empty bucket on a free port, until the block ends."""
    s3 = Store()
    handler = type("Handler", (Handler,), {"s3": s3, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients that went away
    s3.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield s3
    finally:
        server.shutdown()
        server.server_close()
