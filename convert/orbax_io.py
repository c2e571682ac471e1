"""Orbax trees read with TensorStore: metadata, slices, whole trees, whatever the device count that saved them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..olmo_jax.errors import BadInput
from . import maxtext
from .maxtext import MaxTextReader, is_maxtext
from .places import BucketPath, array_context, is_remote, place, store_spec

ITEM = "state"  # the item of OLMO_JAX_LAYOUT.md
MARKER = "commit_success.txt"
STEP_FILES = ("_CHECKPOINT_METADATA", "orbax.checkpoint", MARKER)
TREE_FILE = "_METADATA"


@dataclass(frozen=True)
class Resolved:
    """Which tree a path was taken to mean. `step` holds olmo_config.json and manifest.json, `item` holds the arrays."""

    step: Path
    item: Path
    said: str  # for the user: which of step, parent or item was given

    @property
    def path(self) -> Path:
        """What means this tree wherever it is resolved again: the step, unless that would be taken for another of its items."""
        try:
            same = _resolve(self.step, ITEM).item == self.item
        except BadInput:
            same = False
        return self.step if same else self.item


@dataclass(frozen=True)
class LeafMetadata:
    """One array of a tree as it lies on disk. chunk_shape is what one read costs at least."""

    path: str  # keys joined by /
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]
    stored: str | None = None  # what holds it, where that has another name

    @property
    def name(self) -> str:
        """As stored, for the user."""
        return self.stored or self.path

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def resolve_tree(path: str | Path, item: str = ITEM) -> Resolved:
    """The tree that a path names: a step folder, its parent (one step in it), or the item itself.

    Raises BadInput where nothing, or more than one thing, is meant.
    """
    given = place(path)
    if not given.exists():
        more = f", or {given.bucket.right('list')} is missing: nothing is listed there" if is_remote(given) else ""
        raise BadInput(f"{given} does not exist{more}")
    if not given.is_dir():
        raise BadInput(f"{given} is a file, a folder with an Orbax tree is wanted")
    found = _resolve(given.absolute(), item)
    _check_marker(found)
    return found


def _resolve(given: Path | BucketPath, item: str) -> Resolved:
    if (given / TREE_FILE).is_file():
        if _is_step(given.parent):
            return Resolved(given.parent, given, f"{given} is the item of step folder {given.parent}")
        return Resolved(given, given, f"{given} is a tree without a step folder around it")
    items = _items(given)
    for name in (item, maxtext.ITEM):
        if name in items:
            return Resolved(given, given / name, f"{given} is a step folder, its item {name} was taken")
    if len(items) == 1:
        return Resolved(given, given / items[0], f"{given} is a step folder, its only item {items[0]} was taken")
    if items:
        raise BadInput(f"{given} holds the items {', '.join(items)} and none is named {item}: name one of them")
    steps = [p for p in given.iterdir() if p.is_dir() and not p.name.startswith(".") and _items(p)]
    steps.sort(key=lambda p: (int(p.name) if p.name.isdigit() else -1, p.name))
    if len(steps) == 1:
        inner = _resolve(steps[0], item)
        return Resolved(inner.step, inner.item, f"{given} holds one step, {steps[0].name}: it was taken")
    if steps:
        raise BadInput(f"{given} holds {len(steps)} steps ({', '.join(p.name for p in steps)}): name one of them")
    unfinished = [p.name for p in given.glob("*.orbax-checkpoint-tmp*")] + [
        p.name for p in given.glob("*.partial_save")
    ]
    hint = f": only unfinished saves ({', '.join(unfinished[:3])})" if unfinished else ""
    raise BadInput(f"{given} holds no Orbax tree{hint}. A step folder holds {ITEM}/{TREE_FILE}")


def _check_marker(found: Resolved) -> None:
    """In a bucket nothing is renamed when it is finished: a tree there counts once its marker is written, as for Orbax."""
    if is_remote(found.step) and not (found.step / MARKER).is_file():
        raise BadInput(
            f"{found.step} has no {MARKER}: the tree is unfinished (a run was killed, or is still writing). If it was copied "
            "from a file system and is known to be whole, put an empty object of that name there"
        )


def is_tree(path: Path) -> bool:
    """Whether a folder is an Orbax item, a step folder, or holds step folders."""
    if (path / TREE_FILE).is_file() or _items(path):
        return True
    return any(p.is_dir() and not p.name.startswith(".") and _items(p) for p in path.iterdir())


class TreeReader:
    """The arrays of one item. Opening reads the small files only; `open(path)` gives a TensorStore to slice."""

    def __init__(self, item: Path):
        self.item = item
        self._store = store_spec(item)
        self.readable: dict[str, LeafMetadata] = {}  # after `leaves` was asked for: those that can be opened
        file = item / TREE_FILE
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            self.use_ocdbt = bool(raw.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
            self.driver = "zarr3" if raw.get("use_zarr3", False) else "zarr"
            # Empty nodes (an opt_state that was never filled) are listed too and hold no array.
            listed = [(key, value) for key, value in raw["tree_metadata"].items() if not _is_empty(value)]
            self.keys = [_keys(key, value) for key, value in listed]
        except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
            raise BadInput(f"{file} is not the metadata of an Orbax tree: {error!r}") from None
        if self.use_ocdbt and not (item / "manifest.ocdbt").is_file():
            raise BadInput(
                f"{item / 'manifest.ocdbt'} is missing: the tree's arrays cannot be found. Was the save cut short?"
            )

    @cached_property
    def leaves(self) -> dict[str, LeafMetadata]:
        """Every array by path. No data is read. Raises BadInput naming every array whose own metadata cannot be read."""
        pending, found, faults = {}, {}, []
        for path, keys in {"/".join(keys): keys for keys in self.keys}.items():
            try:
                pending[path] = self._start_open(keys)
            except (ValueError, RuntimeError) as error:  # a name that no store can have
                faults.append(f"{path!r} in {self.item}: {first_line(error)}")
        for path, future in pending.items():
            try:
                store = future.result()
            except (ValueError, OSError) as error:
                faults.append(f"{path} in {self.item}: {first_line(error)}")
                continue
            self._open[path] = store
            chunk = store.chunk_layout.write_chunk.shape or store.shape
            found[path] = LeafMetadata(path, tuple(store.shape), store.dtype.numpy_dtype, tuple(chunk))
        self.readable = found
        if faults:
            raise BadInput(f"{self.item} holds arrays that cannot be opened", faults)
        return found

    def leaf(self, path: str) -> LeafMetadata:
        """One array's metadata, even where others cannot be opened."""
        return self.readable[path]

    def read(self, path: str, index: tuple = ()) -> np.ndarray:
        """One array, or a part of it by slices. Raises BadInput naming the array where its bytes do not decode."""
        store = self.open(path)
        try:
            return np.asarray((store[index] if index else store).read(order="C").result())
        except (ValueError, OSError) as error:
            raise BadInput(f"{path} in {self.item} cannot be read: {first_line(error)}") from None

    def open(self, path: str):
        """The TensorStore of one array."""
        if path not in self._open:
            self.leaves  # noqa: B018 - opens all of them at once
        return self._open[path]

    @cached_property
    def _open(self) -> dict:
        return {}

    @cached_property
    def _context(self):
        import tensorstore as ts

        return ts.Context(array_context())

    def _start_open(self, keys: tuple[str, ...]):
        import tensorstore as ts

        name = ".".join(keys)
        if self.use_ocdbt:
            kvstore = {"driver": "ocdbt", "base": self._store, "path": f"{name}/"}
        else:
            kvstore = store_spec(self.item, name)
        spec = {"driver": self.driver, "kvstore": kvstore, "fill_missing_data_reads": False}
        return ts.open(spec, read=True, open=True, context=self._context)


def open_item(item: Path) -> TreeReader | MaxTextReader:
    """The weights of an item under olmo_jax's paths and in its axes, whichever of the layouts it has."""
    tree = TreeReader(item)
    return MaxTextReader(tree) if is_maxtext(tree.keys) else tree


def tree_metadata(path: str | Path) -> dict[str, LeafMetadata]:
    """Shape, dtype and chunk of every leaf by path (keys joined by /), without reading data or building shardings."""
    return open_item(resolve_tree(path).item).leaves


def read_tree(path: str | Path) -> dict:
    """The whole tree as nested dicts of NumPy arrays in olmo_jax's layout, on one host, whatever devices saved it."""
    reader = open_item(resolve_tree(path).item)
    tree: dict = {}
    for leaf in reader.leaves:
        *parents, last = leaf.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = reader.read(leaf)
    return tree


def read_leaf(path: str | Path, leaf: str) -> np.ndarray:
    """One leaf of a tree by its path (keys joined by /)."""
    return open_item(resolve_tree(path).item).read(leaf)


def _keys(key: str, value: dict) -> tuple[str, ...]:
    stated = value.get("key_metadata")
    if stated:
        return tuple(str(part["key"]) for part in stated)
    return tuple(str(part) for part in ast.literal_eval(key))


def _is_empty(value: dict) -> bool:
    return bool(value.get("value_metadata", {}).get("skip_deserialize"))


def _items(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(p.parent.name for p in folder.glob(f"*/{TREE_FILE}") if not p.parent.name.startswith("."))


def _is_step(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*STEP_FILES, "olmo_config.json"))


def first_line(error: Exception) -> str:
    """TensorStore's own words without its source locations, which say nothing to a user, and without what a server sent."""
    return re.sub(
        r"\s*\[(source locations|tensorstore_spec|transform|domain|http_\w+|curl_code)=.*",
        "",
        str(error),
        flags=re.DOTALL,
    ).strip()
