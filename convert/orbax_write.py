"""Writing an Orbax tree with bounded memory: one zarr3 array a leaf in an OCDBT store, chunk by chunk.

The files are those of `ocp.v1.save` with one process (tests read them back with plain Orbax, three ways), but leaves
need not exist in memory, and JAX is not imported.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from .orbax_io import MARKER, TREE_FILE, first_line
from .places import BucketPath, array_context, is_remote, store_spec

CHUNK_BYTES = 64 << 20  # a restore of one shard reads whole chunks; four of these are in memory for each worker
HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
COMPRESSION = ("zstd", "none")
ZSTD_LEVEL = 1
STORE_STATUS = re.compile(r"[A-Z_]+: ")  # how TensorStore's messages begin: RESOURCE_EXHAUSTED: ...
OPTIMIZER = "optimizer"  # the second item of a step, where optimizer state is brought along


@dataclass(frozen=True)
class Leaf:
    """One array to be written. path: keys joined by /; shape and chunk_shape in the tree's orientation."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chunk_shape(shape: tuple[int, ...], axis: int, itemsize: int, chunk_bytes: int, unit: int = 1) -> tuple[int, ...]:
    """Chunks that cut `axis` alone, as evenly as possible: the last one is padded on disk to the size of the others.

    unit: what along the axis must stay together, such as the values of one head.
    """
    across = math.prod(shape) // max(shape[axis], 1) * itemsize * unit  # bytes for one step along the axis
    most = max(chunk_bytes // max(across, 1), 1)
    units = shape[axis] // unit
    count = max(math.ceil(units / most), 1)
    return tuple(max(math.ceil(units / count), 1) * unit if i == axis else n for i, n in enumerate(shape))


class TreeWriter:
    """Writes the arrays of one item. Each `write` returns when the bytes are in the store and the store is consistent.

    store: a folder below the item that takes the arrays until `merge`: several processes do not wait for each other's commits.
    """

    def __init__(self, item: Path, compression: str = "none", threads: int = 2, store: str = ""):
        import tensorstore as ts

        self.item, self.store = item, store
        self.prepared: list[str] = []
        self.codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if compression == "zstd":
            self.codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL}})
        self.codecs.append({"name": "crc32c"})  # a flipped bit fails the read instead of changing a weight
        limits = {"data_copy_concurrency": {"limit": threads}, "file_io_concurrency": {"limit": max(threads, 4)}}
        self._context = ts.Context(array_context(**limits))
        if not is_remote(item):
            item.mkdir(parents=True, exist_ok=True)

    def spec(self, leaf: Leaf) -> dict:
        """How a leaf lies in the store."""
        return {
            "driver": "zarr3",
            "kvstore": {**self._kvstore(self.store), "path": f"{leaf.path.replace('/', '.')}/"},
            "metadata": {
                "shape": list(leaf.shape),
                "data_type": leaf.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(leaf.chunk_shape)}},
                "codecs": self.codecs,
            },
            # A chunk of zeros must lie on disk like any other: a chunk that was lost would read as zeros.
            "store_data_equal_to_fill_value": True,
        }

    def create(self, leaf: Leaf, transaction=None):
        """The TensorStore of a new leaf; one that is there already is replaced."""
        import tensorstore as ts

        options = {"create": True, "delete_existing": True, "context": self._context, "transaction": transaction}
        return ts.open(self.spec(leaf), **options).result()

    def prepare(self, leaves: Iterable[Leaf]) -> None:
        """Make the arrays that several weights share, before any of them is written; those that are there keep what is in them."""
        import tensorstore as ts

        for leaf in leaves:
            ts.open(self.spec(leaf), create=True, open=True, context=self._context).result()
            self.prepared.append(leaf.path)

    def open(self, leaf: Leaf, transaction=None):
        """The TensorStore of a leaf that `prepare` made."""
        import tensorstore as ts

        return ts.open(self.spec(leaf), open=True, context=self._context, transaction=transaction).result()

    def write(self, leaf: Leaf, values: np.ndarray) -> None:
        """A small leaf, whole."""
        self.create(leaf).write(values).result()

    def merge(self, stores: Mapping[str, Iterable[str]]) -> None:
        """Take arrays over, by store and path, in that order. Only references are copied: their data stays where it is."""
        import tensorstore as ts

        whole = ts.KvStore.open(self._kvstore(""), context=self._context).result()
        for store, paths in stores.items():
            part = ts.KvStore.open(self._kvstore(store), context=self._context).result()
            with ts.Transaction(atomic=True) as transaction:
                target = whole.with_transaction(transaction)
                for prefix in sorted({f"{path.replace('/', '.')}/" for path in paths}):
                    (part / prefix).experimental_copy_range_to(target / prefix).result()

    def _kvstore(self, store: str) -> dict:
        return {
            "driver": "ocdbt",
            "base": store_spec(self.item, store),
            "config": {"max_inline_value_bytes": 1024, "compression": {"id": "zstd"}},
        }

    def transaction(self):
        """Several leaves in one commit: pass it to `create`, write, then commit it."""
        import tensorstore as ts

        return ts.Transaction()

    def finish(self, paths: Iterable[str], empty: Iterable[str] = ()) -> None:
        """Write the tree's metadata, which makes the item one that Orbax can open. empty: dicts that hold nothing."""
        array = {"value_type": "np.ndarray", "skip_deserialize": False}
        nothing = {"value_type": "Dict", "skip_deserialize": True}
        tree = {}
        for path, value in sorted(
            [*((p, array) for p in set(paths)), *((p, nothing) for p in empty)], key=lambda x: x[0]
        ):
            keys = path.split("/")
            tree[repr(tuple(keys))] = {
                "key_metadata": [{"key": key, "key_type": 2} for key in keys],
                "value_metadata": value,
            }
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self.item / TREE_FILE).write_text(json.dumps(metadata), encoding="utf-8")


@contextlib.contextmanager
def store_errors(item: Path) -> Iterator[None]:
    """Turn TensorStore's errors into OSError with the folder's name: a full disk is no fault of the input."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, BadInput) or not STORE_STATUS.match(str(error)):
            raise
        full = "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error)
        text = "the disk is full" if full else f"the store could not be written ({first_line(error)})"
        kept = "what is finished is kept: run the same command again to go on"
        raise OSError(errno.ENOSPC if full else errno.EIO, f"{text}; {kept}", str(item)) from None


def finish_step(step: Path, items: Iterable[str], started_ns: int, custom: Mapping[str, object]) -> None:
    """Write what makes a folder an Orbax step: its items, and outside buckets the marker, which is Orbax's on file systems too.

    custom: Orbax's custom_metadata, for whoever wrote the tree's reader.
    """
    metadata = {
        "item_handlers": dict.fromkeys(items, HANDLER),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": dict(custom),
    }
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata), encoding="utf-8")
    (step / "orbax.checkpoint").write_bytes(b"")
    if not is_remote(step):
        write_markers(step, ())


def write_markers(step: Path | BucketPath, items: Iterable[str]) -> None:
    """Say that a step is whole. In a bucket Orbax asks each item too; the step's own marker comes last."""
    for folder in [*(step / item for item in sorted(items)), step]:
        (folder / MARKER).write_text("Checkpoint commit was successful", encoding="utf-8")
