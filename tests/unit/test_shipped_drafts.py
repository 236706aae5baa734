from pathlib import Path

import pytest
from safetensors import safe_open

from backend.engines.checkpoint import load
from backend.manifest import check_pair, read_manifest

SHIPPED = sorted(path.parent for path in (Path(__file__).parents[2] / "engines_build/drafts").glob("*/config.json"))
MAX_FILE_BYTES = 16 * 2**20


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_model_loads_is_small_files_and_says_what_it_learnt_from(folder):
    load(folder, "bf16")
    files = [file for file in folder.iterdir() if file.is_file()]
    assert max(file.stat().st_size for file in files) <= MAX_FILE_BYTES
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        assert {dtype for name, dtype in dtypes.items() if name != "lm_head.token_ids"} <= {"BF16"}
    card = (folder / "README.md").read_text("utf-8")
    for said in ("Apache-2.0", "- training `", "- held-out `", "Seed ", "python -m engines_build.distill"):
        assert said in card


def test_the_drafts_of_one_target_share_its_vocabulary():
    of_smollm2 = [read_manifest(folder) for folder in SHIPPED if folder.name.startswith("smollm2-135m-instruct")]
    assert of_smollm2
    assert len({(manifest.vocab_size, manifest.vocabulary_sha256) for manifest in of_smollm2}) == 1
    tiny = {folder.name: read_manifest(folder) for folder in SHIPPED if folder.name.startswith("tiny-")}
    for name, manifest in tiny.items():
        if name != "tiny-target":
            check_pair(tiny["tiny-target"], manifest)
