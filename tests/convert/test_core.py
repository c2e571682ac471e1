"""OLMo-core's distributed checkpoints: every bit arrives, however tensors are cut, and no pickle runs anything."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert import core_io
from olmo_parity.convert.mapping import weights
from olmo_parity.convert.orbax_io import read_tree
from olmo_parity.convert.pipeline import core2orbax
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.unpickle import METADATA_NAMES, unpickle
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import read_hf, run_convert, same_bits
from .test_pipeline import all_patterns, assert_holds

CASES = [
    ("tiny-gqa/native/step0", "tiny-gqa/hf-float32"),
    ("tiny-step0/native/step0", "tiny-step0/hf-float32"),
    ("tiny-yarn/native/step0", "tiny-yarn/hf-float32"),
    ("tiny-sharded/native/step0", "tiny-sharded/hf-float32"),
    ("tiny-trained/native/step900", "tiny-trained/hf-float32-step900"),
]


@pytest.fixture
def native(fixture_path, tmp_path) -> Path:
    """A copy of AI2's own step folder of tiny-gqa."""
    return Path(shutil.copytree(fixture_path("tiny-gqa/native/step0"), tmp_path / "native" / "step0"))


@pytest.mark.parametrize(("native_case", "hf_case"), CASES)
def test_the_native_form_equals_ai2s_own_hf_form_bit_for_bit(native_case, hf_case, fixture_path, tmp_path):
    source, hf = fixture_path(native_case), fixture_path(hf_case)
    if not (source / "model_and_optim").is_dir():
        pytest.skip("only the full set has the native weights of this case")
    core2orbax(source, tmp_path / "0", quiet=True)
    config = open_source(hf).config
    assert_holds(read_tree(tmp_path / "0"), read_hf(hf), config)
    assert open_source(tmp_path / "0").config.differences(config) == []


def test_cast_to_bfloat16_it_equals_ai2s_own_bfloat16_form(fixture_path, native, tmp_path):
    core2orbax(native, tmp_path / "0", dtype="bfloat16", quiet=True)
    hf = fixture_path("tiny-gqa/hf-bfloat16")
    assert_holds(read_tree(tmp_path / "0"), read_hf(hf), open_source(hf).config)


def test_it_agrees_with_torchs_own_reader(native):
    """Independent of this package: torch reads each chunk with its own code."""
    torch = pytest.importorskip("torch")
    faults = []
    tensors = core_io.read_metadata(native / "model_and_optim", faults)
    assert not faults
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            content = chunk.file.read_bytes()[chunk.start : chunk.start + chunk.length]
            theirs = torch.load(io.BytesIO(content), weights_only=True)
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert same_bits(tensor.read()[box], theirs.numpy())


@pytest.mark.parametrize("policy", ["cut", "keep", "check"])
def test_the_padded_vocabulary_follows_the_policy_and_is_recorded(policy, native, tmp_path):
    if policy == "check":
        with pytest.raises(BadInput, match="512 rows for 500 entries"):
            core2orbax(native, tmp_path / "0", vocabulary=policy, quiet=True)
        return
    core2orbax(native, tmp_path / "0", vocabulary=policy, quiet=True)
    rows = {"cut": 500, "keep": 512}[policy]
    tree = read_tree(tmp_path / "0")
    assert tree["embed_tokens"]["embedding"].shape == (rows, 96)
    assert tree["lm_head"]["kernel"].shape == (96, rows)
    manifest = json.loads((tmp_path / "0" / "manifest.json").read_text())
    assert manifest["vocabulary"] == {"logical": 500, "padded": 512, "rows": rows, "policy": policy}
    stored = core_io.read_metadata(native / "model_and_optim", [])["model.embeddings.weight"].read()
    assert same_bits(tree["embed_tokens"]["embedding"], stored[:rows])
    assert open_source(tmp_path / "0").config.vocab_size == rows


def test_the_step_its_parent_and_the_item_are_accepted_and_said(native):
    for given in (native, native.parent, native / "model_and_optim"):
        source = open_source(given)
        assert source.kind == "core" and source.path == native and str(native) in source.said
    shutil.copytree(native, native.parent / "step10")
    with pytest.raises(BadInput, match="2 steps of OLMo-core .step0, step10."):
        open_source(native.parent)


def test_the_older_config_form_is_read_too(native, fixture_path, tmp_path):
    new = open_source(native).config
    shutil.copy(fixture_path("tiny-gqa/native-config-v2.json"), native / "config.json")
    assert open_source(native).config.differences(new) == []


def test_adams_moments_come_along_as_a_second_item(fixture_path, tmp_path):
    import orbax.checkpoint as ocp

    source = fixture_path("tiny-sharded/native/step0")
    if not (source / "model_and_optim").is_dir():
        pytest.skip("only the full set has optimizer state")
    core2orbax(source, tmp_path / "0", optimizer=True, quiet=True)
    with ocp.CheckpointManager(tmp_path) as manager:
        items = {"state": ocp.args.PyTreeRestore(), "optimizer": ocp.args.PyTreeRestore()}
        restored = manager.restore(0, args=ocp.args.Composite(**items))
    stored = core_io.read_metadata(source / "model_and_optim", [])
    config = open_source(source).config
    for moment in ("exp_avg", "exp_avg_sq"):
        wanted = {w.hf: stored[f"optim.state.{w.core}.{moment}"].read()[: w.shape[0]] for w in weights(config)}
        assert_holds(restored["optimizer"][moment], wanted, config)
    training = json.loads((tmp_path / "0" / "manifest.json").read_text())["training"]
    assert training["global_step"] == 0 and training["optimizer_step"] == 1 and "data_loader" in training


def test_optimizer_state_that_is_not_there_is_refused(native, tmp_path):
    with pytest.raises(BadInput, match="no optimizer state"):
        core2orbax(native, tmp_path / "0", optimizer=True, quiet=True)


# Checkpoints built here: chunks cut along any axes, as other parallel layouts store them.


def torch_archive(array: np.ndarray) -> bytes:
    import torch

    stream = io.BytesIO()
    bits = array.view(np.uint16) if array.dtype.itemsize == 2 else array
    tensor = torch.from_numpy(bits.copy())
    torch.save(tensor.view(torch.bfloat16) if array.dtype.itemsize == 2 else tensor, stream)
    return stream.getvalue()


def store(folder: Path, tensors: dict[str, np.ndarray], cuts) -> None:
    """Write a distributed checkpoint with torch's own metadata classes; cuts(name, shape) gives boxes (offsets, sizes)."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir(parents=True, exist_ok=True)
    described, placed, files = {}, {}, {}
    for name, array in tensors.items():
        boxes = cuts(name, array.shape)
        for rank, (offsets, sizes) in enumerate(boxes):
            content = torch_archive(array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])
            file = f"__{rank}_0.distcp"
            start = len(files.setdefault(file, b""))
            files[file] += content
            index = dcp.MetadataIndex(name, torch.Size(offsets))
            placed[index] = _StorageInfo(file, start, len(content))
        dtype = torch.bfloat16 if array.dtype.itemsize == 2 else torch.float32
        described[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=dtype),
            torch.Size(array.shape),
            [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes],
        )
    for file, content in files.items():
        (folder / file).write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(described, None, placed)))


def in_quarters(name: str, shape: tuple[int, ...]):
    """Both axes cut, unevenly."""
    if len(shape) == 1:
        half = shape[0] // 3
        return [((0,), (half,)), ((half,), (shape[0] - half,))]
    a, b = shape[0] // 3, shape[1] // 2 - 1
    return [((r, c), (h, w)) for r, h in ((0, a), (a, shape[0] - a)) for c, w in ((0, b), (b, shape[1] - b))]


def along_last(name: str, shape: tuple[int, ...]):
    n = shape[-1] // 4
    return [((0,) * (len(shape) - 1) + (i * n,), (*shape[:-1], n)) for i in range(4)]


def whole(name: str, shape: tuple[int, ...]):
    return [((0,) * len(shape), shape)]


@pytest.mark.parametrize("cuts", [in_quarters, along_last, whole])
@pytest.mark.parametrize("chunk_bytes", [64 << 20, 7000])
def test_tensors_cut_along_any_dims_are_put_together(cuts, chunk_bytes, native, tmp_path):
    pytest.importorskip("torch")
    before = {n: t.read() for n, t in core_io.read_metadata(native / "model_and_optim", []).items()}
    shutil.rmtree(native / "model_and_optim")
    store(native / "model_and_optim", before, cuts)
    source = open_source(native)
    core2orbax(native, tmp_path / "0", quiet=True, chunk_bytes=chunk_bytes)
    wanted = {w.hf: before[f"model.{w.core}"][: w.shape[0]] for w in weights(source.config)}
    assert_holds(read_tree(tmp_path / "0"), wanted, source.config)


def test_all_bfloat16_bit_patterns_survive_the_native_path(native, tmp_path):
    pytest.importorskip("torch")
    from .conftest import BF16

    raw = json.loads((native / "config.json").read_text())
    raw["model"]["vocab_size"] = 1024
    (native / "config.json").write_text(json.dumps(raw))
    before = {n: t.read().astype(BF16) for n, t in core_io.read_metadata(native / "model_and_optim", []).items()}
    patterns = np.tile(all_patterns().reshape(-1), 2)[: 1024 * 96].reshape(1024, 96)
    before["model.embeddings.weight"] = before["model.lm_head.w_out.weight"] = patterns
    shutil.rmtree(native / "model_and_optim")
    store(native / "model_and_optim", before, in_quarters)
    core2orbax(native, tmp_path / "0", vocabulary="keep", allow_nonfinite=True, quiet=True)
    tree = read_tree(tmp_path / "0")
    assert same_bits(tree["embed_tokens"]["embedding"], patterns)
    assert same_bits(tree["lm_head"]["kernel"], patterns.T)


# Damage and malice.


class Evil:
    """Pickled as a call that would leave a file behind."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (__import__("os").mkdir, (str(self.mark),))


@pytest.mark.parametrize("kind", ["call", "old protocol", "eval", "any class"])
def test_a_pickle_that_asks_for_anything_else_is_refused_by_name(kind, native, tmp_path):
    content = {
        "call": pickle.dumps(Evil(tmp_path / "mark")),
        "old protocol": f"cos\nmkdir\n(S'{tmp_path}/mark'\ntR.".encode(),
        "eval": b"cbuiltins\neval\n(S'1'\ntR.",
        "any class": pickle.dumps({"a": pytest.approx}),
    }[kind]
    (native / "model_and_optim" / ".metadata").write_bytes(content)
    with pytest.raises(BadInput, match="which no checkpoint of OLMo-core needs: refused, nothing was run"):
        open_source(native)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([1]), b"\x80\x04" + b"]" * 5000 + b"."]
)
def test_damaged_metadata_is_a_sentence(content, native):
    (native / "model_and_optim" / ".metadata").write_bytes(content)
    with pytest.raises(BadInput, match="metadata"):
        open_source(native)


def test_random_damage_to_the_metadata_never_runs_or_crashes(native):
    good = (native / "model_and_optim" / ".metadata").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        bad = bytearray(good)
        for _ in range(3):
            bad[int(rng.integers(len(bad)))] = int(rng.integers(256))
        try:
            unpickle(bytes(bad), METADATA_NAMES, ".metadata")
        except BadInput:
            refused += 1
    assert refused > 3


def spoil(native: Path, how: str) -> str:
    folder = native / "model_and_optim"
    file = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    if how == "missing file":
        file.unlink()
        return f"{file.name} does not exist"
    if how == "cut file":
        file.write_bytes(file.read_bytes()[:-100])
        return f"{file.name} is cut short"
    if how == "not an archive":
        file.write_bytes(bytes(file.stat().st_size))
        return "damaged"
    if how == "no metadata":
        (folder / ".metadata").unlink()
        return "metadata does not exist"
    if how == "no config":
        (native / "config.json").unlink()
        return "config.json does not exist"
    (native / "config.json").write_text("{")
    return "not JSON"


@pytest.mark.parametrize(
    "how", ["missing file", "cut file", "not an archive", "no metadata", "no config", "bad config"]
)
def test_a_damaged_native_checkpoint_is_refused_and_leaves_no_target(how, native, tmp_path):
    words = spoil(native, how)
    done = run_convert("core2orbax", native, tmp_path / "0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert words in done.stderr
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd"])
def test_a_chunk_that_lies_outside_the_folder_is_refused(path, native):
    pytest.importorskip("torch")
    folder = native / "model_and_optim"
    store(folder, {"model.embeddings.weight": np.zeros((512, 96), np.float32)}, whole)
    content = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    info = next(iter(metadata.storage_data.values()))
    info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match="leaves"):
        open_source(native)


def test_chunks_that_overlap_or_leave_holes_are_refused(native):
    pytest.importorskip("torch")
    array = np.zeros((512, 96), np.float32)
    for boxes in ([((0, 0), (256, 96)), ((255, 0), (256, 96))], [((0, 0), (256, 96))]):
        store(native / "model_and_optim", {"model.embeddings.weight": array}, lambda n, s, b=boxes: b)
        with pytest.raises(BadInput, match="chunks"):
            open_source(native)
