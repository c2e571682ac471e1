"""Files of one hub commit on this machine: all of them in the hub's cache, or headers first and then shard after shard."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from ..olmo_jax.errors import BadInput
from .carry import PATTERNS
from .hub import HubId
from .hub_commit import TIMEOUT, Commit, HubFile, is_transport, sentences
from .progress import in_bytes
from .safetensors_io import INDEX, MAX_HEADER, SINGLE, Entry, plain_name, read_header, read_index

CONFIG = "config.json"
FIRST_BYTES = 100_000  # of a shard at first: holds the header of nearly every one
READ_BYTES = 8 << 20
TRIES = 3  # for one file where the connection breaks; huggingface_hub resumes within each of them
HEADERS_AT_ONCE = 8
SPARE_BYTES = 1 << 30  # that a download leaves free


class Checkout:
    """A commit's small files, and its shards as headers alone, in a folder that goes away with this object.

    `folder` reads like any HF folder as long as no tensor is asked for; `sizes` gives the true length of each shard.
    """

    def __init__(self, commit: Commit):
        self.commit = commit
        self._temporary = tempfile.TemporaryDirectory(prefix="olmo-convert-")
        # The names are those of the hub, for messages about these files.
        self.folder = Path(self._temporary.name) / commit.wanted.repo / commit.sha
        self.folder.mkdir(parents=True)
        with sentences(commit.wanted):
            for name in small_files(commit):
                self._checked(name, self.folder, Path(self._fetch(name, self.folder)))
        self.shards = _shards(commit, self.folder)
        self.sizes = {self.folder / name: commit.files[name].size for name in self.shards}
        with sentences(commit.wanted), ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
            list(pool.map(self._fetch_header, self.shards))

    @property
    def largest(self) -> int:
        """Bytes of the largest shard."""
        return max((self.commit.files[name].size for name in self.shards), default=0)

    def identity(self) -> list[list]:
        """What the files are, wherever they lie: name, hash and size."""
        files = [self.commit.files[name] for name in sorted([*small_files(self.commit), *self.shards])]
        return [[f.name, f.sha256 or f.git_sha1, f.size] for f in files]

    def download(self, quiet: bool) -> Path:
        """All files in the hub's cache, every hash checked; returns the snapshot folder there."""
        from huggingface_hub import hf_hub_download

        names = [*small_files(self.commit), *self.shards]
        _check_cache_space([self.commit.files[name] for name in names], self.commit)
        folder = None
        with _progress_bars(quiet), sentences(self.commit.wanted), ThreadPoolExecutor(1) as hashing:
            checks = []
            for name in names:  # one after the other: Ctrl-C must not wait for several shards
                path = self._fetch(name)
                folder = Path(path).parents[len(Path(name).parts) - 1]
                checks.append(hashing.submit(self._checked, name, None, Path(path)))
            for check in checks:
                check.result()
            # Once more by the name that was asked for, so that the cache knows what it means when there is no network.
            hf_hub_download(self.commit.wanted.repo, CONFIG, revision=self.commit.wanted.revision)
        return folder

    @contextlib.contextmanager
    def holding(self, file: Path, room: Path, quiet: bool) -> Iterator[None]:
        """While in here, `file` of this folder is a whole shard, its hash checked; it lies in `room`, which is removed
        after."""
        name = file.relative_to(self.folder).as_posix()
        header = file.read_bytes()
        entries = read_header(file, [], self.sizes[file])
        try:
            whole = self._whole(name, room, entries, quiet)
            file.unlink()
            file.symlink_to(whole.absolute())
            yield
        finally:
            file.unlink(missing_ok=True)
            file.write_bytes(header)
            shutil.rmtree(room, ignore_errors=True)

    def _whole(self, name: str, room: Path, entries: list[Entry], quiet: bool) -> Path:
        """A shard in `room`, checked. Raises OSError, not BadInput: what was converted before stays."""
        try:
            with _progress_bars(quiet), sentences(self.commit.wanted):
                path = self._checked(name, room, Path(self._fetch(name, room)))
            faults: list[str] = []
            found = read_header(path, faults)
            if faults or [replace(e, file=path) for e in entries] != found:
                raise BadInput(f"{name} is not the file whose header was read before", faults)
        except BadInput as error:
            kept = "what is finished is kept: run the same command again to go on"
            raise OSError(errno.EIO, f"{error}; {kept}", f"{self.commit}/{name}") from None
        return path

    def _fetch(self, name: str, folder: Path | None = None, again: bool = False) -> str:
        """A file into the hub's cache, or into a folder."""
        from huggingface_hub import hf_hub_download

        for left in reversed(range(TRIES)):
            try:
                return hf_hub_download(
                    self.commit.wanted.repo, name, revision=self.commit.sha, local_dir=folder, force_download=again
                )
            except Exception as error:
                if not left or not is_transport(error.__cause__ or error):
                    raise
                print(f"{name}: the connection broke ({type(error).__name__}), trying again", file=sys.stderr)
        raise AssertionError

    def _checked(self, name: str, folder: Path | None, path: Path) -> Path:
        """The file, if its bytes are those that the hub lists; where they are not, it is fetched once more."""
        problem = _problem(path, self.commit.files[name])
        if problem:
            print(f"{problem}: fetching it again", file=sys.stderr)
            path = Path(self._fetch(name, folder, again=True))
            problem = _problem(path, self.commit.files[name])
        if problem:
            raise BadInput(f"{problem}, fetched twice. It is not used: is there a proxy or a mirror between?")
        return path

    def _fetch_header(self, name: str) -> None:
        """Write a shard's header, and no more of it, under its name."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.commit.wanted.repo, name, revision=self.commit.sha)

        def read(start: int, stop: int) -> bytes:
            if not isinstance(cached, str):
                return self._range(name, start, stop)
            with open(cached, "rb") as stream:
                stream.seek(start)
                return stream.read(stop - start)

        first = read(0, FIRST_BYTES)
        end = 8 + int.from_bytes(first[:8], "little")
        if len(first) < end <= MAX_HEADER + 8:
            first += read(len(first), end)
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(first[:end])

    def _range(self, name: str, start: int, stop: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        stop = min(stop, self.commit.files[name].size)
        if start >= stop:
            return b""
        url = hf_hub_url(self.commit.wanted.repo, name, revision=self.commit.sha)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        answer = http_backoff("GET", url, headers=headers, timeout=TIMEOUT)
        hf_raise_for_status(answer)
        return answer.content[: stop - start] if answer.status_code == 206 else answer.content[start:stop]


def cached_folder(wanted: HubId) -> Path:
    """The snapshot folder in the hub's cache, without asking the hub."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(wanted.repo, CONFIG, revision=wanted.revision)
    if not isinstance(found, str):
        raise BadInput(
            f"{wanted} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE keeps this process off the "
            "network: unset it"
        )
    return Path(found).parent


def check_cached(files: list[Path]) -> None:
    """The hub's cache names large files by their sha256: raise BadInput where one is not what its name says."""
    faults = []
    for file in files:
        blob = file.resolve()
        if blob.parent.name == "blobs" and len(blob.name) == 64:
            problem = _problem(file, HubFile(file.name, blob.stat().st_size, blob.name, None))
            faults += [problem] if problem else []
    if faults:
        raise BadInput("the cache is damaged: fetch these files again, with the network on", faults)


def small_files(commit: Commit) -> list[str]:
    """Names of the files that go along with the shards: config, index, tokenizer. Everything else stays on the hub."""
    wanted = (CONFIG, INDEX, *PATTERNS)
    return sorted(n for n in commit.files if "/" not in n and any(fnmatch(n, pattern) for pattern in wanted))


def _shards(commit: Commit, folder: Path) -> list[str]:
    """The safetensors files that make up the model. What is wrong with them is said when the folder is opened."""
    if INDEX in commit.files:
        named = set(read_index(folder / INDEX, []).values())
    elif SINGLE in commit.files:
        named = [SINGLE]
    else:
        named = [name for name in commit.files if "/" not in name and name.endswith(".safetensors")]
        if not named:
            other = sorted(n for n in commit.files if n.endswith((".bin", ".pth", ".pt", ".gguf")))
            raise BadInput(
                f"{commit} holds no safetensors"
                + (f", only {', '.join(other[:4])}: save it as safetensors first" if other else "")
            )
    return sorted(name for name in named if name in commit.files and plain_name(name))


def _problem(path: Path, listed: HubFile) -> str | None:
    """Why the bytes are not those that the hub lists; None if they are."""
    size = path.stat().st_size
    if size != listed.size:
        return f"{path} has {size} bytes, the hub lists {listed.size}"
    if not (listed.sha256 or listed.git_sha1):
        return None
    digest = hashlib.sha256() if listed.sha256 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    wanted = listed.sha256 or listed.git_sha1
    if digest.hexdigest() == wanted:
        return None
    kind = "sha256" if listed.sha256 else "git hash"
    return f"{path} has the {kind} {digest.hexdigest()}, the hub lists {wanted}"


def _check_cache_space(files: list[HubFile], commit: Commit) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    repo = commit.wanted.repo
    needed = sum(
        f.size for f in files if not isinstance(try_to_load_from_cache(repo, f.name, revision=commit.sha), str)
    )
    free = shutil.disk_usage(there).free
    if needed and free < needed + SPARE_BYTES:
        raise BadInput(
            f"{commit} takes {in_bytes(needed)} in the cache {cache}, which has {in_bytes(free)} free. Set HF_HOME to a "
            f"larger disk, or convert with --stream: it holds one shard at a time ({in_bytes(max(f.size for f in files))})"
        )


@contextlib.contextmanager
def _progress_bars(quiet: bool) -> Iterator[None]:
    """huggingface_hub draws bars for each file: on a terminal only, elsewhere they fill the log."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = (quiet or not sys.stderr.isatty()) and not are_progress_bars_disabled()
    restore: Callable[[], None] | None = enable_progress_bars if silence else None
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if restore:
            restore()
