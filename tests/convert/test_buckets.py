"""Buckets as SOURCE and TARGET: the bits of a local conversion, a marker written last, and every missing right by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_parity.convert import bucket_staging, places, staging
from olmo_parity.convert.bucket import Bucket
from olmo_parity.convert.describe import inspect
from olmo_parity.convert.diff import diff
from olmo_parity.convert.export import orbax2hf
from olmo_parity.convert.mapping import weights
from olmo_parity.convert.pipeline import core2orbax, hf2orbax
from olmo_parity.convert.places import BucketPath, place
from olmo_parity.convert.sources import open_source
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.errors import BadInput

from .bucket_server import BUCKET, PAGE, serve
from .conftest import random_tensors, tiny_config, write_hf

RUN = f"s3://{BUCKET}/run/0"
MARKER = "run/0/commit_success.txt"
JOURNAL = "run/.0.converting.json"


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    config = tiny_config(num_hidden_layers=1)
    folder = write_hf(tmp_path_factory.mktemp("bucket") / "hf", random_tensors(config), config, shard_bytes=30_000)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def s3(monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-tests")
    monkeypatch.setattr(bucket_staging, "JOURNAL_SECONDS", 0.0)
    quick = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    monkeypatch.setattr("olmo_parity.convert.bucket.RETRIES", quick)
    monkeypatch.setattr(places, "ARRAY_RETRIES", quick)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token-of-the-tests")
    with serve() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        yield server


@pytest.fixture(params=["s3", "gs"])
def run(request) -> str:
    """A target in the one bucket, in the words of either store."""
    return f"{request.param}://{BUCKET}/run/0"


def upload(s3, folder: Path, prefix: str) -> str:
    for file in folder.rglob("*"):
        if file.is_file():
            s3.objects[f"{prefix}/{file.relative_to(folder).as_posix()}"] = file.read_bytes()
    return f"s3://{BUCKET}/{prefix}"


def said(action, *arguments, **options) -> str:
    with pytest.raises((BadInput, OSError)) as caught:
        action(*arguments, **options)
    error = caught.value
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


class Killed(BaseException):
    """What nothing catches."""


def kill_after(monkeypatch, count: int) -> None:
    """Let a conversion end as a kill would, after so many leaves."""
    real = bucket_staging.BucketStaging.record

    def record(self, key, entry):
        if len(self.finished) >= count:
            raise Killed
        real(self, key, entry)

    monkeypatch.setattr(bucket_staging.BucketStaging, "record", record)
    monkeypatch.setattr(bucket_staging.BucketStaging, "__exit__", lambda *_: None)


def test_a_tree_in_a_bucket_has_the_bits_of_the_local_one(local, s3, run, tmp_path):
    record = hf2orbax(local, run, quiet=True, chunk_bytes=3000)
    hf2orbax(local, tmp_path / "0", quiet=True, chunk_bytes=3000)
    assert record.verified and str(record.target) == run
    assert diff(tmp_path / "0", run, quiet=True).equal and verify(local, run, quiet=True).equal
    found = verify_manifest(run, quiet=True)
    assert found.equal and found.tensors == 14 and any("files between the arrays" in n for n in found.notes)
    hashes = [
        {e["target_path"]: e["target_sha256"] for e in json.loads(text)["tensors"]}
        for text in (s3.objects["run/0/manifest.json"], (tmp_path / "0" / "manifest.json").read_text())
    ]
    assert hashes[0] == hashes[1]
    assert "run/0/tokenizer_config.json" in s3.objects
    assert not any(key.startswith("run/.0") for key in s3.objects)  # neither journal nor probe stays


def test_plain_orbax_reads_what_was_written_to_a_bucket(local, s3, tmp_path):
    from orbax.checkpoint import v1

    hf2orbax(local, RUN, quiet=True)
    for key, content in s3.objects.items():
        file = tmp_path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    source = open_source(local)
    loaded = v1.load(tmp_path / "run" / "0")
    for weight in weights(source.config):
        leaf = loaded
        for key in weight.jax.split("/"):
            leaf = leaf[key]
        wanted = source.tensors[weight.hf].read()
        assert np.array_equal(
            np.asarray(leaf).view(np.uint16), (wanted.T if weight.layout == "TRANSPOSED" else wanted).view(np.uint16)
        )


def test_the_marker_is_the_last_object_and_the_items_have_theirs(local, s3, run):
    hf2orbax(local, run, quiet=True)
    written = [line.removeprefix("PUT ") for line in s3.log if line.startswith("PUT ")]
    assert written[-2:] == ["run/0/state/commit_success.txt", MARKER]
    assert "run/0/manifest.json" in written[:-2]
    assert written.count(MARKER) == 1  # and not before


@pytest.mark.parametrize("form", ["hf", "core", "orbax"])
def test_every_form_is_read_from_a_bucket(form, local, s3, tmp_path, fixture_path):
    if form == "core":
        step = fixture_path("tiny-yarn/native/step0")
        there = upload(s3, step, "source")
        core2orbax(step, tmp_path / "a", quiet=True)
        core2orbax(there, tmp_path / "b", quiet=True)
    elif form == "hf":
        there = upload(s3, local, "source")
        hf2orbax(local, tmp_path / "a", quiet=True)
        hf2orbax(there, tmp_path / "b", quiet=True)
    else:
        hf2orbax(local, tmp_path / "a", quiet=True)
        there = upload(s3, tmp_path / "a", "source")
        orbax2hf(there, tmp_path / "b", quiet=True)
    assert diff(tmp_path / "a", tmp_path / "b", quiet=True).equal
    assert verify(there, tmp_path / "b", quiet=True).equal
    assert inspect(there).source.path == place(there)
    source = json.loads((tmp_path / "b" / "manifest.json").read_text())["source"]
    assert source["path"] == there


def test_a_path_object_and_a_file_url_name_the_same_places(local, s3):
    upload(s3, local, "source")
    assert str(place(Path(f"s3://{BUCKET}/source"))) == f"s3://{BUCKET}/source"
    assert inspect(Path(f"s3://{BUCKET}/source/")).source.path == place(f"s3://{BUCKET}/source")
    assert place(f"file://{local}") == local


def test_a_tree_without_its_marker_is_refused_by_every_reader(local, s3, tmp_path):
    from olmo_parity.parity import check, sides
    from olmo_parity.parity.devices import placement
    from olmo_parity.parity.options import GateOptions

    hf2orbax(local, RUN, quiet=True)
    del s3.objects[MARKER]
    readers = {
        "inspect": lambda: inspect(RUN),
        "parent": lambda: inspect(f"s3://{BUCKET}/run"),
        "item": lambda: inspect(f"{RUN}/state"),
        "verify": lambda: verify(local, RUN, quiet=True),
        "manifest": lambda: verify_manifest(RUN, quiet=True),
        "diff": lambda: diff(local, RUN, quiet=True),
        "orbax2hf": lambda: orbax2hf(RUN, tmp_path / "back", quiet=True),
        "gate": lambda: sides.open_sides(local, Path(RUN), GateOptions(), placement()),
        "check-report": lambda: check._config_of(place(RUN)),
    }
    for name, read in readers.items():
        assert "the tree is unfinished" in said(read), name
    s3.objects[MARKER] = b""
    for name in ("inspect", "parent", "item", "check-report"):
        readers[name]()


def test_a_killed_conversion_is_refused_by_readers_and_goes_on_where_it_stopped(local, s3, run, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 6)
        hf2orbax(local, run, quiet=True, workers=1)
    assert MARKER not in s3.objects and JOURNAL in s3.objects
    assert said(inspect, run)
    assert "another source" not in said(verify_manifest, run)
    s3.log.clear()
    record = hf2orbax(local, run, quiet=True)
    assert record.resumed == 6 and verify(local, run, quiet=True).equal and verify_manifest(run, quiet=True).equal


def test_unfinished_work_of_another_job_is_not_mixed_in(local, s3, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 6)
        hf2orbax(local, RUN, quiet=True, workers=1)
    assert "dtype: was null, is" in said(hf2orbax, local, RUN, dtype="float32", quiet=True)
    s3.objects[JOURNAL] = b"not ours"
    assert "is in the way" in said(hf2orbax, local, RUN, quiet=True)


def test_a_store_that_fails_in_the_middle_keeps_what_is_finished(local, s3, monkeypatch):
    monkeypatch.setattr(
        "olmo_parity.convert.copying.SMALL_BYTES", 1000
    )  # so that most weights are committed one by one
    s3.put_left = 30
    text = said(hf2orbax, local, RUN, quiet=True, workers=1)
    assert "run the same command again" in text or "s3:PutObject" in text
    assert MARKER not in s3.objects and said(inspect, RUN)
    s3.put_left = None
    s3.deny.clear()
    assert hf2orbax(local, RUN, quiet=True).resumed
    assert verify(local, RUN, quiet=True).equal


def test_bad_weights_leave_nothing(local, s3, tmp_path):
    config = tiny_config(num_hidden_layers=1)
    tensors = random_tensors(config)
    tensors["model.norm.weight"][3] = np.nan
    bad = write_hf(tmp_path / "bad", tensors, config)
    assert "model.norm.weight" in said(hf2orbax, bad, RUN, quiet=True)
    assert not s3.objects


def test_an_existing_target_is_replaced_only_on_request_and_its_marker_goes_first(local, s3, run):
    hf2orbax(local, run, quiet=True)
    before = dict(s3.objects)
    assert "pass --overwrite" in said(hf2orbax, local, run, quiet=True)
    assert s3.objects == before
    s3.log.clear()
    hf2orbax(local, run, overwrite=True, quiet=True)
    deleted = [line.removeprefix("DELETE ") for line in s3.log if line.startswith("DELETE ") and "probe" not in line]
    assert deleted[0] == MARKER and verify_manifest(run, quiet=True).equal
    data = {key for key in before if "/d/" in key}
    assert not data & s3.objects.keys()


def test_a_run_killed_while_it_cleared_the_old_tree_clears_the_rest(local, s3, monkeypatch):
    hf2orbax(local, RUN, quiet=True)
    s3.objects["run/0/state/stray"] = b"of the old tree"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        real = Bucket.write

        def write(self, key, content, if_generation=None):
            if content is None and "probe" not in key and key != MARKER:
                raise Killed
            return real(self, key, content, if_generation)

        patch.setattr(Bucket, "write", write)
        patch.setattr(bucket_staging.BucketStaging, "__exit__", lambda *_: None)
        hf2orbax(local, RUN, overwrite=True, quiet=True)
    assert MARKER not in s3.objects and "unfinished" in said(inspect, RUN)
    hf2orbax(local, RUN, overwrite=True, quiet=True)
    assert "run/0/state/stray" not in s3.objects and verify_manifest(RUN, quiet=True).equal


def test_what_no_conversion_wrote_is_never_replaced(local, s3, run):
    s3.objects["run/0/precious.txt"] = b"mine"
    for overwrite in (False, True):
        assert "exists" in said(hf2orbax, local, run, overwrite=overwrite, quiet=True)
    assert s3.objects == {"run/0/precious.txt": b"mine"}


def test_of_two_runs_into_one_target_the_first_one_stops(local, s3, run, monkeypatch):
    real = bucket_staging.BucketStaging.record
    taken = []

    def record(self, key, entry):
        if not taken:
            taken.append(key)
            other = json.loads(s3.objects[JOURNAL]) | {"run": "another"}
            s3.objects[JOURNAL] = json.dumps(other).encode()
        real(self, key, entry)

    monkeypatch.setattr(bucket_staging.BucketStaging, "record", record)
    assert "another run is converting into" in said(hf2orbax, local, run, quiet=True, workers=1)
    assert JOURNAL in s3.objects  # it is the other's now


KINDS = {"PUT": "write", "DELETE": "delete", "GET": "read", "LIST": "list"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_that_is_missing_at_the_target_is_named_before_the_work(kind, local, s3, run):
    s3.deny.add(kind)
    text = said(hf2orbax, local, run, quiet=True)
    right = place(run).bucket.right
    assert right(KINDS[kind]) in text and not any(right(name) in text for k, name in KINDS.items() if k != kind)
    assert not any("run/0/" in key for key in s3.objects)
    assert s3.requests["PUT"] <= 1


@pytest.mark.parametrize("kind", ["GET", "LIST"])
def test_a_right_that_is_missing_at_the_source_is_named(kind, local, s3, tmp_path):
    there = upload(s3, local, "source")
    s3.deny.add(kind)
    assert place(there).bucket.right(KINDS[kind]) in said(hf2orbax, there, tmp_path / "0", quiet=True)


def test_neither_keys_nor_answers_of_the_server_are_shown(local, s3, monkeypatch):
    s3.deny.add("PUT")
    text = said(hf2orbax, local, RUN, quiet=True)
    assert "of-the-tests" not in text and "http_response" not in text and "<Error>" not in text
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")


def test_a_bucket_that_does_not_exist_and_places_that_are_none(local, s3):
    assert "the bucket other-bucket does not exist" in said(inspect, "s3://other-bucket/run")
    assert "does not exist" in said(inspect, f"s3://{BUCKET}/nothing")
    assert "ftp:// is not read" in said(inspect, "ftp://host/x")
    assert "is a whole bucket" in said(hf2orbax, local, f"s3://{BUCKET}")
    for odd in ("s3://", "s3://UPPER/x", f"s3://{BUCKET}/../x", f"s3://{BUCKET}/a\nb"):
        assert "names no place" in said(inspect, odd)


def test_a_store_that_cannot_be_reached_is_said(local, s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "the store failed to" in said(inspect, RUN)


def test_safetensors_are_not_written_to_a_bucket(local, s3):
    hf2orbax(local, RUN, quiet=True)
    assert "writes safetensors to a local folder" in said(orbax2hf, RUN, f"s3://{BUCKET}/back")


def test_several_processes_do_not_write_into_a_bucket(local, s3):
    assert "without --distributed" in said(hf2orbax, local, RUN, processes=(0, 2), quiet=True)
    assert not s3.objects


def test_source_and_target_in_one_bucket_must_not_lie_in_each_other(local, s3):
    there = upload(s3, local, "source")
    assert "lie in each other" in said(hf2orbax, there, f"{there}/0", quiet=True)
    hf2orbax(there, f"s3://{BUCKET}/target", quiet=True)
    assert verify(there, f"s3://{BUCKET}/target", quiet=True).equal


def test_a_source_that_changes_during_the_run_is_noticed(local, s3, tmp_path, monkeypatch):
    there = upload(s3, local, "source")
    real = staging.Staging.record

    def record(self, key, entry):
        s3.objects["source/tokenizer_config.json"] = b'{"a": 1}'
        real(self, key, entry)

    monkeypatch.setattr(staging.Staging, "record", record)
    assert "was changed while it was converted" in said(hf2orbax, there, tmp_path / "0", quiet=True)


def test_a_flipped_bit_in_a_bucket_is_found(local, s3):
    hf2orbax(local, RUN, quiet=True)
    key = max((k for k in s3.objects if "/d/" in k), key=lambda k: len(s3.objects[k]))
    content = bytearray(s3.objects[key])
    content[len(content) // 2] ^= 1
    s3.objects[key] = bytes(content)
    assert not verify(local, RUN, quiet=True).equal or not verify_manifest(RUN, quiet=True).equal


@pytest.mark.parametrize("cut", [1, 5000, 29_000])
def test_a_shard_that_is_cut_short_in_a_bucket_is_refused(cut, local, s3, tmp_path):
    there = upload(s3, local, "source")
    key = "source/model-00001-of-00004.safetensors"
    s3.objects[key] = s3.objects[key][:-cut]
    text = said(hf2orbax, there, tmp_path / "0", quiet=True)
    assert "cut short" in text or "header length" in text


def test_a_distributed_checkpoint_that_is_cut_short_in_a_bucket_is_refused(s3, tmp_path, fixture_path):
    there = upload(s3, fixture_path("tiny-yarn/native/step0"), "core")
    key = max((k for k in s3.objects if k.endswith(".distcp")), key=lambda k: len(s3.objects[k]))
    s3.objects[key] = s3.objects[key][:-1]
    assert f"has {len(s3.objects[key])}" in said(core2orbax, there, tmp_path / "0", quiet=True)


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 1000, 65_535, 65_536, 65_537, 300_001])
def test_the_length_of_an_object_is_found_without_being_told(length, s3):
    s3.objects["x"] = bytes(length)
    assert place(f"s3://{BUCKET}/x").stat().st_size == length
    assert s3.requests["GET"] < 120


def test_the_methods_of_pathlib_behave_as_in_a_folder(local, s3, tmp_path):
    names = ["a/b.txt", "a/c/d.txt", "a/c/e.json", "f.txt"] + [f"many/{i}" for i in range(3 * PAGE)]
    for name in names:
        (tmp_path / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name).write_text(name)
    there, here = place(upload(s3, tmp_path / "r", "r")), tmp_path / "r"

    def relative(found, root):
        return sorted(str(p.relative_to(root)) for p in found)

    for pattern in ("*", "a/*", "*/*.txt", "*.txt", "a/c/*", "z*"):
        assert relative(there.glob(pattern), there) == relative(here.glob(pattern), here), pattern
    assert relative(there.iterdir(), there) == relative(here.iterdir(), here)
    files = [p for p in here.rglob("*") if p.is_file()]
    assert relative(there.rglob("*"), there) == relative(files, here)
    for name in ("a", "a/b.txt", "a/c", "a/x", "f.txt", "f"):
        for method in ("exists", "is_file", "is_dir"):
            assert getattr(there / name, method)() == getattr(here / name, method)(), (name, method)
    assert (there / "a" / "b.txt").read_text() == "a/b.txt" and (there / "a").name == "a"
    assert [p.name for p in (there / "a/c/d.txt").parents][:2] == ["c", "a"]
    with (there / "a/b.txt").open("rb") as stream:
        stream.seek(2)
        assert stream.read() == b"b.txt"
    assert isinstance(there, BucketPath) and there in {place(str(there))}


def test_a_hub_commit_streams_into_a_bucket(local, s3, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from . import hub_server

    with hub_server.serve({hub_server.FIRST: local}, {"main": hub_server.FIRST}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hf2orbax(f"hf://{hub_server.REPO}", RUN, stream=True, quiet=True)
    assert verify(local, RUN, quiet=True).equal and not any("shards" in key for key in s3.objects)


def test_the_command_ends_in_a_sentence(local, s3):
    s3.deny.add("DELETE")
    code = "from olmo_parity.cli import convert_main; convert_main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "hf2orbax", local, RUN], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "s3:DeleteObject is missing" in done.stderr and "Traceback" not in done.stderr
