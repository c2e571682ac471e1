"""One bucket through TensorStore: listing, reading spans, writing, deleting; and sentences for what it answers."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from ..olmo_jax.errors import BadInput

DRIVERS = {"s3": "s3", "gs": "gcs"}
RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "8s"}  # of a small request: 15 s at most
PROBES = 32  # reads at once while the length of an object is searched
MAX_LENGTH = 1 << 46
LAST_SPAN = 1 << 16  # bytes that are read at once when the length is known so well


RIGHTS = {
    "s3": {
        "open": "s3:ListBucket",
        "list": "s3:ListBucket",
        "read": "s3:GetObject",
        "write": "s3:PutObject",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "open": "storage.objects.list",
        "list": "storage.objects.list",
        "read": "storage.objects.get",
        "write": "storage.objects.create",
        "delete": "storage.objects.delete",
    },
}


class EndedEarly(OSError):
    """An object is shorter than what was asked of it."""


class Bucket:
    """One bucket, and what is known of it since it was named: its keys are listed once."""

    def __init__(self, scheme: str, name: str):
        self.scheme, self.name = scheme, name
        self._listed: dict[str, list[str]] = {}  # keys by the prefix that was listed
        self._lengths: dict[str, int] = {}

    def spec(self, prefix: str) -> dict:
        """TensorStore's spec of a prefix. Endpoint and region of S3 come from the variables that AWS's tools read."""
        spec = {"driver": DRIVERS[self.scheme], "bucket": self.name, "path": prefix}
        if self.scheme == "s3":
            env = os.environ
            endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
            region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else None)
            spec |= {"endpoint": endpoint} if endpoint else {}
            spec |= {"aws_region": region} if region else {}
            if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
                spec["aws_credentials"] = {"type": "environment"}  # the search for others writes to stderr
        return spec

    @cached_property
    def store(self):
        """The whole bucket as a key-value store."""
        import tensorstore as ts

        context = ts.Context({"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES})
        return self._do("open", "", lambda: ts.KvStore.open(self.spec(""), context=context))

    def keys(self, prefix: str) -> list[str]:
        """Every key that begins with prefix, sorted."""
        for listed, keys in self._listed.items():
            if prefix.startswith(listed):
                return [key for key in keys if key.startswith(prefix)]
        import tensorstore as ts

        within = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else None
        found = self._do("list", prefix, lambda: self.store.list(within))
        self._listed[prefix] = sorted(key.decode("utf-8", "surrogateescape") for key in found)
        return self._listed[prefix]

    def read(self, key: str, span: slice | None = None):
        """TensorStore's answer to a read: state, value, stamp. Raises EndedEarly where the object is shorter than the span."""
        return self._do("read", key, lambda: self.store.read(key, byte_range=span))

    def write(self, key: str, content: bytes | None, if_generation: bytes | None = None) -> bytes:
        """Write an object, or delete it where content is None. Returns its generation; empty where it was not if_generation."""
        self._lengths.pop(key, None)
        self._listed.clear()
        right = "write" if content is not None else "delete"
        return self._do(right, key, lambda: self.store.write(key, content, if_equal=if_generation)).generation

    def has(self, key: str) -> bool:
        """Whether there is such an object: from the listing where it was listed, else by asking for it."""
        listed = next((keys for prefix, keys in self._listed.items() if key.startswith(prefix)), None)
        return key in listed if listed is not None else self.read(key, slice(0, 0)).state == "value"

    def length(self, key: str) -> int:
        """Bytes of an object. TensorStore does not tell, so it is searched for: a few rounds of one-byte reads at once."""
        low, high = 0, MAX_LENGTH  # it has at least low bytes, and fewer than high
        at = [1 << i for i in range(MAX_LENGTH.bit_length() - 1)]
        with ThreadPoolExecutor(PROBES) as pool:
            while key not in self._lengths and high - low > 1:
                for end, long in zip(at, pool.map(lambda end: self.reaches(key, end), at), strict=True):
                    low, high = (max(low, end), high) if long else (low, min(high, end))
                if 0 < low < high - 1 < low + LAST_SPAN:
                    with contextlib.suppress(EndedEarly):
                        self.read(key, slice(low - 1, high))  # too long by intention: the refusal may name the length
                at = sorted({low + max((high - low) * i // (PROBES + 1), 1) for i in range(1, PROBES + 1)} - {high})
        return self._lengths.setdefault(key, low)

    def reaches(self, key: str, end: int) -> bool:
        """Whether an object has at least so many bytes."""
        if key in self._lengths:
            return self._lengths[key] >= end
        try:
            return end == 0 or self.read(key, slice(end - 1, end)).state == "value"
        except EndedEarly:
            return False

    def right(self, action: str) -> str:
        """What the store calls the right to do that."""
        return RIGHTS[self.scheme][action]

    def forget(self) -> None:
        """Ask the bucket again: arrays were written to it."""
        self._listed.clear()
        self._lengths.clear()

    def _do(self, right: str, key: str, action):
        try:
            return action().result()
        except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
            if total := re.search(r"byte range .* total size (\d+)", str(error)):
                self._lengths[key] = int(total[1])
            raise store_error(error, right, f"{self.scheme}://{self.name}/{key}", self) from None


def store_error(error: Exception, right: str, url: str, bucket: Bucket) -> Exception:
    """What a bucket answered, as OSError with a sentence; BadInput where there is no such bucket.

    Only the first words are kept: answers of S3 hold key ids and signatures.
    """
    text = re.sub(r"\s*\[\w+=.*", "", str(error), flags=re.DOTALL).strip()[:300]
    if "OUT_OF_RANGE" in text or "Content-Range" in text:
        return EndedEarly(errno.EIO, "the object ended early: was it changed while it was read?", url)
    if re.search(r"PERMISSION_DENIED|AccessDenied|\b403\b|Forbidden", text):
        needed = bucket.right(right)
        return PermissionError(errno.EACCES, f"{needed} is missing, or the credentials are refused ({text})", url)
    if re.search(r"UNAUTHENTICATED|[Cc]redential|InvalidAccessKeyId|SignatureDoesNotMatch|\b401\b", text):
        return PermissionError(errno.EACCES, f"the credentials are missing or refused ({text})", url)
    if re.search(r"NOT_FOUND|NoSuchBucket", text):
        return BadInput(f"{url}: the bucket {bucket.name} does not exist, or is not visible with these credentials")
    return OSError(errno.EIO, f"the store failed to {right} ({text})", url)
