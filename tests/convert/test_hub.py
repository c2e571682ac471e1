"""A hub id as SOURCE: only what is needed is fetched, every byte is checked, and each way to fail has its own sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from olmo_parity.convert import hub_commit, hub_files
from olmo_parity.convert.describe import inspect
from olmo_parity.convert.diff import diff
from olmo_parity.convert.export import orbax2hf
from olmo_parity.convert.hub import hub_id, near_revisions, with_revision
from olmo_parity.convert.pipeline import core2orbax, hf2orbax
from olmo_parity.convert.verify import verify, verify_manifest
from olmo_parity.olmo_jax.errors import BadInput

from .conftest import random_tensors, tiny_config, write_hf
from .hub_server import FIRST, REPO, SECOND, TOKEN, serve

STEP0 = f"{REPO}@stage1-step0"
SHARDS = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    config = tiny_config(num_hidden_layers=1)
    folder = write_hf(tmp_path_factory.mktemp("hub") / "repo", random_tensors(config), config, shard_bytes=30_000)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == SHARDS
    for name in ("tokenizer_config.json", "generation_config.json", "pytorch_model.bin", "README.md", "training.pt"):
        (folder / name).write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """The server with `repository` as its only commit, and huggingface_hub pointed to it and to a cache of the test's own."""
    branches = {"main": FIRST, "stage1-step0": FIRST, "stage1-step1000": FIRST, "stage1-step20000": FIRST}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    with serve({FIRST: repository}, branches) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits between its tries
        yield served


def source_of(step: Path) -> dict:
    return json.loads((step / "manifest.json").read_text())["source"]


def lasting(step: Path) -> dict:
    """The manifest without what differs from run to run: times and the names of the store's files."""
    return {
        k: v for k, v in json.loads((step / "manifest.json").read_text()).items() if k not in ("made", "tree_files")
    }


def said(action, *arguments, **options) -> str:
    with pytest.raises((BadInput, OSError)) as caught:
        action(*arguments, **options)
    return str(caught.value)


def test_a_commit_of_the_hub_converts_to_the_bits_of_its_folder(hub, repository, tmp_path):
    hf2orbax(repository, tmp_path / "local", quiet=True)
    hf2orbax(with_revision(REPO, "stage1-step0"), tmp_path / "cached", quiet=True)
    hf2orbax(STEP0, tmp_path / "streamed", stream=True, quiet=True)
    for step in ("cached", "streamed"):
        assert diff(tmp_path / "local", tmp_path / step, quiet=True).equal
        assert verify(STEP0, tmp_path / step, quiet=True).equal
        assert verify_manifest(tmp_path / step, quiet=True).equal
        assert (tmp_path / step / "tokenizer_config.json").is_file()
    assert lasting(tmp_path / "cached") == lasting(tmp_path / "streamed")


def test_the_manifest_says_repository_revision_and_commit(hub, tmp_path):
    hf2orbax(STEP0, tmp_path / "0", quiet=True)
    source = source_of(tmp_path / "0")
    assert source["hub"] == {"repo": REPO, "asked": "stage1-step0", "commit": FIRST}
    assert source["path"] == f"hf://{REPO}@{FIRST}"
    assert {f["file"]: f["hash"] for f in source["files"]}[SHARDS[0]] == hub.listing(FIRST)[3]["lfs"]["sha256"]


def test_only_config_tokenizer_index_and_its_shards_are_fetched(hub, tmp_path):
    hf2orbax(STEP0, tmp_path / "0", quiet=True)
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.requests if "/resolve/" in path}
    small = {"config.json", "model.safetensors.index.json", "tokenizer_config.json", "generation_config.json"}
    assert fetched == {*small, *SHARDS}
    assert not any("original" in path for _, path, _ in hub.requests)


def test_inspect_reads_headers_alone(hub):
    found = inspect(STEP0)
    assert not found.source.faults and len(found.source.tensors) == 14
    assert all(
        ranges == [r] and r.startswith("bytes=0-") for n in SHARDS for ranges in [hub.fetched(n)] for r in ranges
    )
    assert found.as_json()["tensors"][0]["file"] == f"hf://{REPO}@{FIRST}/{SHARDS[0]}"


def test_inspect_leaves_no_file_behind(hub, tmp_path):
    inspect(STEP0)
    assert not list((tmp_path / "tmp").iterdir()) and not (tmp_path / "cache").exists()


def test_a_repository_that_does_not_fit_is_refused_before_a_shard_is_fetched(hub, repository, tmp_path):
    broken = shutil.copytree(repository, tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=1, intermediate_size=100)))
    hub.folders[FIRST] = broken
    assert "mlp.up_proj.weight" in said(hf2orbax, STEP0, tmp_path / "0", quiet=True)
    assert all(r for name in SHARDS for r in hub.fetched(name))  # ranges only


def test_a_shard_that_the_index_names_and_the_repository_lacks_is_said(hub, repository, tmp_path):
    broken = shutil.copytree(repository, tmp_path / "broken")
    (broken / SHARDS[2]).unlink()
    hub.folders[FIRST] = broken
    assert f"{SHARDS[2]} does not exist" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)


def test_a_second_conversion_fetches_nothing_again(hub, tmp_path):
    hf2orbax(STEP0, tmp_path / "0", quiet=True)
    hub.requests.clear()
    hf2orbax(STEP0, tmp_path / "1", quiet=True)
    assert not any(hub.fetched(name) for name in SHARDS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_download_goes_on_where_the_connection_was_cut(stream, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what huggingface_hub keeps at a time
    hub.cut[SHARDS[1]] = 5000
    hf2orbax(STEP0, tmp_path / "0", stream=stream, quiet=True)
    assert hub.fetched(SHARDS[1])[-1] == "bytes=5000-"
    assert verify(STEP0, tmp_path / "0", quiet=True).equal


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [SHARDS[1], "generation_config.json"])
def test_a_file_with_other_bytes_than_the_hub_lists_is_refused(stream, name, hub, tmp_path):
    hub.wrong.add(name)
    text = said(hf2orbax, STEP0, tmp_path / "0", stream=stream, quiet=True)
    assert name in text and "the hub lists" in text and "fetched twice" in text
    assert not (tmp_path / "0").exists()


def test_a_cached_shard_that_changed_is_fetched_again(hub, tmp_path):
    hf2orbax(STEP0, tmp_path / "0", quiet=True)
    blob = next(p.resolve() for p in (tmp_path / "cache").rglob(SHARDS[1]))
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    hf2orbax(STEP0, tmp_path / "1", quiet=True)
    assert diff(tmp_path / "0", tmp_path / "1", quiet=True).equal


def test_streaming_holds_one_shard_and_leaves_none(hub, tmp_path, monkeypatch):
    seen = []
    real = hub_files.Checkout.holding

    def watched(self, file, room, quiet):
        seen.append([p.name for p in tmp_path.rglob("*.safetensors") if p.stat().st_size > 20_000])
        return real(self, file, room, quiet)

    monkeypatch.setattr(hub_files.Checkout, "holding", watched)
    hf2orbax(STEP0, tmp_path / "0", stream=True, quiet=True)
    assert seen == [[], [], [], []]
    left = {p.name for p in tmp_path.rglob("*") if p.is_file() and tmp_path / "0" not in p.parents}
    assert not left
    assert not (tmp_path / "0" / "shards").exists()


def test_a_streamed_conversion_that_was_cut_short_fetches_only_what_is_missing(hub, tmp_path):
    hub.fail[f"^HEAD .*/{SHARDS[2]}"] = (503, {})  # its header, asked for with GET, came through
    assert "fails (503)" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)
    assert not (tmp_path / "0").exists()
    hub.fail.clear()
    hub.requests.clear()
    record = hf2orbax(STEP0, tmp_path / "0", stream=True, quiet=True)
    assert record.resumed
    assert [name for name in SHARDS if "" in hub.fetched(name)] == SHARDS[2:]
    assert verify(STEP0, tmp_path / "0", quiet=True).equal


def test_a_stack_of_maxtexts_layout_whose_layers_lie_in_several_shards_is_streamed(hub, tmp_path):
    config = tiny_config(num_hidden_layers=8)
    hub.folders[FIRST] = write_hf(tmp_path / "eight", random_tensors(config), config, shard_bytes=60_000)
    shards = sorted(p.name for p in hub.folders[FIRST].glob("*.safetensors"))
    hub.fail[f"^HEAD .*/{shards[-2]}"] = (503, {})
    said(hf2orbax, STEP0, tmp_path / "0", stream=True, layout="maxtext", quiet=True)
    hub.fail.clear()
    assert hf2orbax(STEP0, tmp_path / "0", stream=True, layout="maxtext", quiet=True).resumed
    assert verify(hub.folders[FIRST], tmp_path / "0", quiet=True).equal
    assert verify_manifest(tmp_path / "0", quiet=True).equal


def test_a_shard_that_a_killed_run_left_is_not_published(hub, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("olmo_parity.convert.pipeline.finish_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        hf2orbax(STEP0, tmp_path / "0", stream=True, quiet=True)
    shards = tmp_path / ".0.converting" / "shards"
    shards.mkdir()
    (shards / SHARDS[3]).write_text("whole, and converted")
    assert hf2orbax(STEP0, tmp_path / "0", stream=True, quiet=True).resumed == 14
    assert not (tmp_path / "0" / "shards").exists()


def test_a_streamed_shard_that_is_read_back_differently_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("olmo_parity.convert.copying.transposed", lambda a: a.reshape(a.shape[::-1]))
    assert "not what was meant" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)


def test_a_streamed_tree_that_changes_after_its_shard_is_gone_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("olmo_parity.convert.stream.array_sha256", lambda *_: "0" * 64)
    assert "sha256" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)
    assert not (tmp_path / "0").exists()


def test_a_shard_that_is_not_the_one_whose_header_was_read_is_refused(hub, repository, tmp_path, monkeypatch):
    swapped = shutil.copytree(repository, tmp_path / "swapped")
    hub.folders[FIRST] = swapped
    real = hub_files.Checkout.holding

    def swap_first(self, *arguments):
        shutil.copyfile(swapped / SHARDS[2], swapped / SHARDS[0])
        return real(self, *arguments)

    monkeypatch.setattr(hub_files.Checkout, "holding", swap_first)
    monkeypatch.setattr(hub_files, "_problem", lambda *_: None)  # a hub that lists no hashes
    assert "header was read before" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)


def test_the_space_asked_for_counts_the_shard_that_is_held(hub, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("olmo_parity.convert.staging.Staging.check_space", lambda self, needed: asked.append(needed))
    hf2orbax(STEP0, tmp_path / "0", stream=True, quiet=True)
    hf2orbax(STEP0, tmp_path / "1", quiet=True)
    assert asked[0] - asked[1] == max(s["size"] for s in hub.listing(FIRST))


def test_a_tied_head_cannot_be_streamed(hub, repository, tmp_path):
    tied = shutil.copytree(repository, tmp_path / "tied")
    (tied / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=1, tie_word_embeddings=True)))
    hub.folders[FIRST] = tied
    assert "without --stream" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)
    assert "differs from" in said(hf2orbax, STEP0, tmp_path / "0", quiet=True)


def test_a_missing_revision_lists_near_ones(hub):
    text = said(inspect, f"{REPO}@stage1-step900")
    assert "has no revision stage1-step900 (it has 4). Near ones: stage1-step1000, stage1-step0" in text


def test_near_revisions_go_by_number_then_by_letters():
    names = [f"stage1-step{n}" for n in range(0, 100_000, 1000)] + ["main", "stage2-ingredient1-step500"]
    assert near_revisions("stage1-step41500", names)[:2] == ["stage1-step41000", "stage1-step42000"]
    assert near_revisions("step41000-stage1", names)
    assert near_revisions("mian", names) == ["main"]


ANSWERS = {
    "no such repository": (404, {"X-Error-Code": "RepoNotFound"}, "has no repository org/tiny, or it is private"),
    "unauthorized": (401, {}, "has no repository org/tiny, or it is private"),
    "bad token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "wrong or has expired"),
    "gated": (403, {"X-Error-Code": "GatedRepo"}, "is gated: ask for access"),
    "forbidden": (403, {"X-Error-Message": "no such right"}, "forbids reading org/tiny"),
    "rate limit": (429, {"Retry-After": "77"}, "wait 77 seconds"),
    "server error": (500, {}, "fails (500)"),
    "teapot": (418, {}, "answered 418"),
}


@pytest.mark.parametrize("status, headers, sentence", ANSWERS.values(), ids=ANSWERS)
def test_each_refusal_of_the_hub_has_its_sentence(status, headers, sentence, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fail["/api/models/"] = (status, headers)
    text = said(inspect, STEP0)
    assert sentence in text and TOKEN not in text


@pytest.mark.parametrize("status, headers, sentence", ANSWERS.values(), ids=ANSWERS)
def test_the_same_for_a_shard(status, headers, sentence, hub, tmp_path):
    hub.fail[f"resolve/.*/{SHARDS[1]}"] = (status, headers)
    assert sentence in said(hf2orbax, STEP0, tmp_path / "0", quiet=True)
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize("stream", [False, True])
def test_a_shard_that_a_redirect_does_not_find_is_no_missing_repository(stream, hub, tmp_path):
    hub.fail[f"resolve/.*/{SHARDS[1]}"] = (404, {})
    text = said(hf2orbax, STEP0, tmp_path / "0", stream=stream, quiet=True)
    assert "a file that the hub lists cannot be had (404)" in text and "no repository" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_network_that_fails_after_the_commit_is_known_is_no_question_of_the_name(stream, hub, tmp_path, monkeypatch):
    def fetch(*arguments, **options):
        raise ConnectionError("stalled")

    monkeypatch.setattr(hub_files.Checkout, "_fetch", fetch)
    text = said(hf2orbax, STEP0, tmp_path / "0", stream=stream, quiet=True)
    assert "cannot be reached" in text and "stalled" in text and "does not exist here" not in text


def test_a_private_repository_is_read_with_the_token_which_is_kept_nowhere(hub, tmp_path, monkeypatch):
    hub.private = True
    assert "no token was found" in said(inspect, STEP0)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hf2orbax(STEP0, tmp_path / "0", stream=True, quiet=True)
    assert all(TOKEN.encode() not in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_without_a_network_the_sentence_says_so(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = said(inspect, STEP0)
    assert "does not exist here, so it was taken for a hub id" in text and "cannot be reached" in text
    assert "does not exist here" not in said(inspect, f"hf://{STEP0}")


def test_off_the_network_the_cache_is_used(hub, tmp_path, monkeypatch):
    hf2orbax(STEP0, tmp_path / "0", quiet=True)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    record = hf2orbax(STEP0, tmp_path / "1", quiet=True)
    assert FIRST in record.said and diff(tmp_path / "0", tmp_path / "1", quiet=True).equal
    hf2orbax(STEP0, tmp_path / "streamed", stream=True, quiet=True)
    assert diff(tmp_path / "0", tmp_path / "streamed", quiet=True).equal
    assert not hub.requests
    assert "is not in the cache" in said(inspect, f"{REPO}@stage1-step1000")
    blob = next(p.resolve() for p in (tmp_path / "cache").rglob(SHARDS[1]))
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    for stream in (False, True):
        assert "the cache is damaged" in said(hf2orbax, STEP0, tmp_path / "2", stream=stream, quiet=True)
        assert not (tmp_path / "2").exists()


def test_a_branch_that_moved_gives_the_new_commit(hub, repository, tmp_path):
    hf2orbax(REPO, tmp_path / "0", quiet=True)
    hub.folders[SECOND] = repository
    hub.branches["main"] = SECOND
    hf2orbax(REPO, tmp_path / "1", quiet=True)
    assert [source_of(tmp_path / n)["hub"]["commit"] for n in "01"] == [FIRST, SECOND]


def test_a_local_folder_of_that_name_wins_and_has_no_revisions(hub, repository, tmp_path):
    shutil.copytree(repository, tmp_path / "org" / "tiny")
    assert hub_id(REPO) is None and hub_id(f"hf://{REPO}").repo == REPO
    assert inspect(REPO).source.path == tmp_path / "org" / "tiny" and not hub.requests
    assert "a local folder has none" in said(with_revision, REPO, "main")
    assert "write hf://org/other" in said(inspect, "org/other")


def test_words_that_name_no_repository():
    assert hub_id("a/b/c") is None and hub_id("/a/b") is None and hub_id("../b") is None and hub_id("a") is None
    assert hub_id("hf:/org/name@refs/pr/1").revision == "refs/pr/1"  # what a Path leaves of it
    assert "ORG/NAME" in said(hub_id, "hf://name")
    assert "leave one out" in said(with_revision, f"{REPO}@main", "main")
    assert "no hub id is given" in said(with_revision, "a/b/c", "main")
    assert "is wanted" in said(with_revision, REPO, "")


def test_other_directions_refuse_a_hub_id_without_a_download(hub, tmp_path):
    assert "core2orbax wants" in said(core2orbax, STEP0, tmp_path / "0")
    assert "orbax2hf wants" in said(orbax2hf, STEP0, tmp_path / "0")
    assert all(r for name in SHARDS for r in hub.fetched(name))
    assert "--stream" in said(hf2orbax, tmp_path, tmp_path / "0", stream=True)


def test_a_cache_on_a_full_disk_is_said_before_the_download(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_files, "SPARE_BYTES", 1 << 60)
    text = said(hf2orbax, STEP0, tmp_path / "0", quiet=True)
    assert "--stream" in text and all(r for name in SHARDS for r in hub.fetched(name))


def test_a_path_that_leaves_the_folder_is_not_written(hub, repository, tmp_path):
    hostile = shutil.copytree(repository, tmp_path / "hostile")
    index = hostile / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["model.norm.weight"] = "../../../escaped.safetensors"
    index.write_text(json.dumps(text))
    hub.folders[FIRST] = hostile
    assert "leaves the checkpoint folder" in said(hf2orbax, STEP0, tmp_path / "0", stream=True, quiet=True)


def test_signed_addresses_are_not_shown():
    assert "secret" not in hub_commit._quoted("cannot GET https://cdn/x?Signature=secret&Expires=1")


def test_a_hub_id_as_reference_is_fetched_for_transformers(hub, tmp_path):
    from olmo_parity.parity import sides
    from olmo_parity.parity.options import GateOptions

    pytest.importorskip("transformers")
    hf2orbax(STEP0, tmp_path / "0", quiet=True)
    folder = sides.on_this_machine(Path(f"hf://{STEP0}"), tmp_path / "0", GateOptions())
    assert (folder / "config.json").is_file() and folder.name == FIRST and os.path.exists(folder / SHARDS[3])
    assert "does not exist" in said(sides.on_this_machine, STEP0, tmp_path / "missing", GateOptions())
