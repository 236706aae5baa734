import fcntl
import json

import pytest

from backend.checked_settings import ConfigError
from backend.storage import cache
from tests.fakes.machine import FakeMachine


def write_model(folder, text="weights"):
    with cache.publish(folder, {"source": "test"}) as fresh:
        (fresh / "model.safetensors").write_text(text)
        (fresh / "sub").mkdir()
        (fresh / "sub" / "extra").write_text("x")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    assert cache.model_folder("m") == tmp_path / "models" / "m"
    monkeypatch.delenv("SPINDLE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.table_file("k") == tmp_path / "home" / ".cache" / "spindle" / "latency" / "k.json"


def test_a_published_folder_passes_its_check_and_leaves_nothing_next_to_it(tmp_path):
    folder = tmp_path / "models" / "m"
    write_model(folder)
    manifest = cache.check(folder, hashes=True)
    assert manifest["provenance"] == {"source": "test"}
    assert set(manifest["files"]) == {"model.safetensors", "sub/extra"}
    assert [path.name for path in folder.parent.iterdir()] == ["m"]


def test_publishing_again_replaces_the_old_folder(tmp_path):
    folder = tmp_path / "m"
    write_model(folder, "old")
    write_model(folder, "newer")
    assert (folder / "model.safetensors").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_nothing_is_published_when_writing_fails(tmp_path):
    def fail():
        with cache.publish(tmp_path / "m", {}) as fresh:
            (fresh / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_size_is_named(tmp_path):
    write_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_text("weigh")
    with pytest.raises(
        cache.CacheError,
        match=r"model\.safetensors has 5 bytes, its manifest says 7.*spindle prepare",
    ):
        cache.check(tmp_path / "m")


def test_a_missing_file_is_named(tmp_path):
    write_model(tmp_path / "m")
    (tmp_path / "m" / "sub" / "extra").unlink()
    with pytest.raises(cache.CacheError, match=r"sub/extra is missing"):
        cache.check(tmp_path / "m")


def test_a_changed_byte_is_seen_by_the_hash(tmp_path):
    write_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_text("weightz")
    cache.check(tmp_path / "m")
    with pytest.raises(cache.CacheError, match=r"model\.safetensors has SHA-256"):
        cache.check(tmp_path / "m", hashes=True)


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"provenance": {}})])
def test_a_folder_without_a_sound_manifest_is_refused(tmp_path, content):
    write_model(tmp_path / "m")
    manifest = tmp_path / "m" / cache.MANIFEST
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)
    with pytest.raises(cache.CacheError, match=r"manifest\.json is missing or damaged"):
        cache.check(tmp_path / "m")


def test_the_writer_lock_excludes_others_and_sweeps_what_a_killed_writer_left(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    (tmp_path / "models" / ".m.half").mkdir(parents=True)
    write_model(cache.model_folder("m"))
    with cache.exclusive():
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["m"]
        with (tmp_path / ".lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_is_published_whole(tmp_path):
    path = tmp_path / "latency" / "k.json"
    cache.publish_file(path, "one")
    cache.publish_file(path, "two")
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("installed", "outdated"),
    [("2.13.0", False), ("2.13.0+cu130", False), ("2.14.0", True), (None, False)],
)
def test_another_version_of_a_package_makes_its_files_again_and_none_reads_them(
    monkeypatch, tmp_path, installed, outdated
):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    made = []

    def make():
        made.append(1)
        return {"layers": [2, 3]}

    def recall(version):
        monkeypatch.setattr(cache, "machine", FakeMachine(packages={"torch": version}))
        return cache.recall("a", "torch", make)

    assert recall("2.13.0+cpu") == recall(installed) == {"layers": [2, 3]}
    assert len(made) == 1 + outdated


def test_a_damaged_file_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    assert cache.recall("a", "torch", lambda: {"a": 1}) == {"a": 1}
    assert cache.recall("a", "torch", lambda: {"a": 2}) == {"a": 1}
    (file,) = (tmp_path / "decoders").iterdir()
    file.write_text("{")
    assert cache.recall("a", "torch", lambda: {"a": 3}) == {"a": 3}


def test_a_missing_package_is_an_error_that_names_the_extra():
    text = r"^reading a needs the package no_such_package: install spindle\[convert\]"
    with pytest.raises(ConfigError, match=text), cache.require_packages("reading a"):
        import no_such_package  # noqa: F401
