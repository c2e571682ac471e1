"""A place where files lie: a local folder, or a prefix of a bucket (s3://, gs://) with the methods of pathlib used here.

Buckets are reached through TensorStore alone, as the arrays in them are: one set of credentials, one set of retries.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import total_ordering
from pathlib import Path, PurePosixPath

from ..olmo_jax.errors import BadInput
from .bucket import DRIVERS, Bucket, EndedEarly

URL = re.compile(r"([a-z][a-z0-9+.-]*):/{1,2}(.*)", re.DOTALL)  # one slash is left where the text went through a Path
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}[a-z0-9]")
ARRAY_RETRIES = {"max_retries": 16, "initial_delay": "1s", "max_delay": "32s"}  # a conversion outlives five minutes
REQUESTS_AT_ONCE = 32


def place(path: str | Path | BucketPath) -> Path | BucketPath:
    """What a user named: a local path with ~ filled in, or a prefix of a bucket. Raises BadInput where it is neither."""
    if isinstance(path, BucketPath):
        return path
    text = str(path)
    match = URL.fullmatch(text)
    if not match:
        return local_path(path)
    scheme, rest = match.groups()
    if scheme == "file":
        return local_path(f"/{rest.lstrip('/')}")
    if scheme not in DRIVERS:
        raise BadInput(f"{text}: {scheme}:// is not read. s3://BUCKET/..., gs://BUCKET/... or a local path is wanted")
    bucket, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if not NAME.fullmatch(bucket) or {".", ".."} & set(parts) or not text.isprintable():
        raise BadInput(f"{text!r} names no place in a bucket: {scheme}://BUCKET/FOLDER is wanted")
    return BucketPath(Bucket(scheme, bucket), "/".join(parts))


def local_path(path: str | Path) -> Path:
    """What a user named, with ~ filled in. Raises BadInput where no such name can be used."""
    try:
        found = Path(path).expanduser()
        str(found).encode()
    except RuntimeError:
        raise BadInput(f"{path}: there is no home folder of that name. Write the path out") from None
    except UnicodeEncodeError:  # TensorStore takes UTF-8 alone
        raise BadInput(f"{path} is no valid UTF-8: rename it, or name a link to it") from None
    return found


def is_remote(path) -> bool:
    """Whether a place is in a bucket."""
    return isinstance(path, BucketPath)


def store_spec(folder: Path | BucketPath, name: str = "") -> dict:
    """The TensorStore key-value store of a folder, or of a folder in it. Raises BadInput where TensorStore would take another
    folder than the one that is named.

    Never a URL: in one, %20 is a space and what follows # or ? is cut off.
    """
    if is_remote(folder):
        return folder.bucket.spec("/".join(filter(None, (folder.key, name))) + "/")
    path = os.path.realpath(folder) if ".." in folder.parts else str(folder.absolute())  # TensorStore refuses ..
    path = "/".join([path.rstrip("/"), *filter(None, [name]), ""])
    if "\\" in path:
        raise BadInput(
            f"{path}: the store of arrays takes a backslash for a slash. Rename the folder, or name a link to it"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{path!r} is no valid UTF-8: rename it, or name a link to it") from None
    return {"driver": "file", "path": path}


def array_context(**more) -> dict:
    """TensorStore's settings for arrays: nothing cached, and patience with a bucket that answers badly for minutes."""
    return {
        "cache_pool": {"total_bytes_limit": 0},
        "s3_request_retries": ARRAY_RETRIES,
        "gcs_request_retries": ARRAY_RETRIES,
        **more,
    }


def fingerprint(files: Iterable[Path | BucketPath]) -> list[list]:
    """Name, size and time of change of every file (in a bucket: its generation): notices one that is not the same any more."""
    files = sorted(files, key=str)
    remote = [f for f in files if is_remote(f)]
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        generations = dict(zip(remote, pool.map(BucketPath.generation, remote), strict=True))
    found = []
    for f in files:
        if is_remote(f):
            found.append([str(f), str(f), None, generations[f]])
        else:
            found.append([str(f), str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns])
    return found


def shorter_than(ends: Mapping[BucketPath, int]) -> dict[BucketPath, int]:
    """Of objects and the bytes that each must have at least: those that are shorter, and their true lengths."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        enough = list(pool.map(lambda wanted: wanted[0].bucket.reaches(wanted[0].key, wanted[1]), ends.items()))
    return {file: file.stat().st_size for file, long in zip(ends, enough, strict=True) if not long}


@total_ordering
class BucketPath:
    """A name in a bucket. Folders are prefixes: one exists where a key lies in it."""

    def __init__(self, bucket: Bucket, key: str):
        self.bucket, self.key = bucket, key

    def __str__(self) -> str:
        return f"{self.bucket.scheme}://{self.bucket.name}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __eq__(self, other) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __lt__(self, other) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | PurePosixPath) -> BucketPath:
        return BucketPath(self.bucket, "/".join(filter(None, (self.key, str(name)))))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> BucketPath:
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    @property
    def parents(self) -> list[BucketPath]:
        found = [self]
        while found[-1].key:
            found.append(found[-1].parent)
        return found[1:]

    def relative_to(self, other: BucketPath) -> PurePosixPath:
        return PurePosixPath(self.key).relative_to(other.key)

    def absolute(self) -> BucketPath:
        return self

    resolve = absolute

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return bool(self.key) and self.bucket.has(self.key)

    def is_dir(self) -> bool:
        return bool(self.bucket.keys(self._prefix))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[BucketPath]:
        names = {key.removeprefix(self._prefix).partition("/")[0] for key in self.bucket.keys(self._prefix)}
        return (self / name for name in sorted(names) if name)

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Files and folders that match the pattern, part by part."""
        wanted = pattern.split("/")
        found = {}
        for key in self.bucket.keys(self._prefix):
            parts = key.removeprefix(self._prefix).split("/")[: len(wanted)]
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
                found[self / "/".join(parts)] = None
        return iter(found)

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        for key in self.bucket.keys(self._prefix):
            if not key.endswith("/") and fnmatch.fnmatchcase(key.rpartition("/")[2], pattern):
                yield BucketPath(self.bucket, key)

    def stat(self) -> os.stat_result:
        """The length alone."""
        if not self.is_file():
            raise FileNotFoundError(2, "there is no such object", str(self))
        return os.stat_result((0o100644, 0, 0, 1, 0, 0, self.bucket.length(self.key), 0, 0, 0))

    def generation(self) -> str:
        """What the store calls this version of the object."""
        return self.bucket.read(self.key, slice(0, 0)).stamp.generation.hex()

    def read_bytes(self) -> bytes:
        return self._value(None)

    def read_span(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Raises EndedEarly where the object ends before."""
        return self._value(slice(start, stop))

    def _value(self, span: slice | None) -> bytes:
        answer = self.bucket.read(self.key, span)
        if answer.state != "value":
            raise FileNotFoundError(2, "there is no such object", str(self))
        return answer.value

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        self.bucket.write(self.key, content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def unlink(self) -> None:
        self.bucket.write(self.key, None)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(_Object(self), 1 << 16)


class _Object(io.RawIOBase):
    """An object as a file that is read from anywhere in it."""

    def __init__(self, path: BucketPath):
        self.path, self.at = path, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.path.stat().st_size if whence == 2 else 0)[whence]
        return self.at

    def readinto(self, buffer) -> int:
        stop = self.at + len(buffer)
        try:
            content = self.path.read_span(self.at, stop)
        except EndedEarly:
            stop = min(stop, self.path.stat().st_size)
            content = self.path.read_span(self.at, stop) if self.at < stop else b""
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)
