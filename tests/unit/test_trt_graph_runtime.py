"""The contents of an engine folder for TensorRT, and what is said at start where it, the library or
the GPU is missing.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from backend.engines.trt_graph.engine import PassShape
from backend.engines.trt_graph.runtime import (
    NetworkManifest,
    TrtGraphError,
    TrtRuntime,
    _library,
    open_engine,
)

MANIFEST = {
    "library": "tensorrt_rtx",
    "version": "1.7.1.116",
    "dtype": "bf16",
    "shared": True,
    "max_context_tokens": 128,
    "max_draft_tokens": 4,
    "passes": [{"batch": 8, "queries": 6}],
    "engines": {"logits": "logits.engine"},
}
SIZES = {"kv_blocks": 8, "max_context_tokens": 128, "max_draft_tokens": 4}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "trt_graph.json").write_text(json.dumps(MANIFEST))
    return tmp_path


def test_a_manifest_is_read(folder):
    manifest = NetworkManifest.read(folder)
    assert manifest.passes == (PassShape(8, 6),)
    assert manifest.engines == {"logits": "logits.engine"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({**MANIFEST, "extra": 1}),
        json.dumps({**MANIFEST, "passes": [{"batch": 1}]}),
    ],
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "trt_graph.json").write_text(text)
    with pytest.raises(TrtGraphError, match=r"trt_graph.json is damaged"):
        NetworkManifest.read(tmp_path)


def test_a_folder_that_was_not_built_is_an_error_that_says_how(tmp_path):
    with pytest.raises(
        TrtGraphError, match=r"build it: python -m engines_build.build --engine trt_graph"
    ):
        open_engine("target", tmp_path, "cuda", **SIZES)


@pytest.mark.parametrize(("what", "asked"), [("max_context_tokens", 256), ("max_draft_tokens", 5)])
def test_more_than_was_compiled_is_an_error(folder, what, asked):
    with pytest.raises(TrtGraphError, match=f"{asked} is over the"):
        open_engine("target", folder, "cuda", **{**SIZES, what: asked})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_without_a_gpu_the_start_says_what_is_needed(folder):
    with pytest.raises(
        TrtGraphError, match="trt_graph needs a CUDA GPU and a torch built for CUDA"
    ):
        TrtRuntime(folder)


def test_another_version_of_the_library_is_an_error(folder):
    pytest.importorskip("tensorrt_rtx")
    (folder / "trt_graph.json").write_text(json.dumps({**MANIFEST, "version": "0.1"}))
    with pytest.raises(
        TrtGraphError, match=r"engines need tensorrt_rtx 0.1, installed is .*: build them again"
    ):
        _library(NetworkManifest.read(folder))


def test_a_library_that_is_missing_is_an_error(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(
        TrtGraphError, match=r"needs tensorrt_rtx 1.7.1.116, which cannot be imported"
    ):
        _library(NetworkManifest.read(folder))


def test_a_folder_names_no_other_module(folder, tmp_path, monkeypatch):
    (planted := tmp_path / "evil").mkdir()
    (planted / "__init__.py").write_text("from pathlib import Path; Path('sprung').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "trt_graph.json").write_text(json.dumps({**MANIFEST, "library": "evil"}))
    with pytest.raises(TrtGraphError, match="must be one of tensorrt_rtx, tensorrt: 'evil'"):
        _library(NetworkManifest.read(folder))
    assert not Path("sprung").exists()
