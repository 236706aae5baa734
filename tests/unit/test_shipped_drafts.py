import json
from pathlib import Path

import pytest
from safetensors import safe_open

from backend.config import load_config
from backend.core.session import Session
from backend.engine_config import EMBEDDED_MODEL
from backend.engines.head.network import load as load_head
from backend.engines.models.loading import load_decoder
from backend.model_folders import model_path
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Proposal, Sequence
from backend.storage.manifest import check_pair, read_manifest, weights_sha256
from engines_build.prepare import bring_embedded_model

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.parent for path in (ROOT / "engines_build/drafts").glob("*/config.json"))
MAX_FILE_BYTES = 16 * 2**20


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_model_loads_is_small_files_and_says_what_it_learnt_from(folder):
    load_head(folder) if folder.name.endswith("-head") else load_decoder(folder)
    files = [file for file in folder.iterdir() if file.is_file()]
    assert max(file.stat().st_size for file in files) <= MAX_FILE_BYTES
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        kept = {dtype for name, dtype in dtypes.items() if not name.endswith("token_ids")}
        assert kept <= {"BF16"}
    card = (folder / "README.md").read_text("utf-8")
    for said in (
        "Apache-2.0",
        "- training `",
        "- held-out `",
        "Seed ",
        "python -m engines_build.distill",
    ):
        assert said in card


def test_the_drafts_of_one_target_share_its_vocabulary():
    of_smollm2 = [
        read_manifest(folder)
        for folder in SHIPPED
        if folder.name.startswith("smollm2-135m-instruct")
    ]
    assert of_smollm2
    assert len({(manifest.vocab_size, manifest.vocabulary_sha256) for manifest in of_smollm2}) == 1
    tiny = {
        folder.name: read_manifest(folder) for folder in SHIPPED if folder.name.startswith("tiny-")
    }
    for name, manifest in tiny.items():
        if name != "tiny-target":
            check_pair(tiny["tiny-target"], manifest, same_size=True)


def test_the_default_configuration_serves_the_head_of_its_target_and_suffix():
    config = load_config(ROOT / "model_repository/spindle/1/serving.json")
    assert (config.target.engine, config.target.model) == ("openvino", EMBEDDED_MODEL)
    assert [(draft.name, draft.engine) for draft in config.drafts] == [
        ("head", "head"),
        ("suffix", "suffix"),
    ]
    raw = json.loads((ROOT / config.drafts[0].model / "config.json").read_text())
    bring_embedded_model()
    assert raw["target_sha256"] == weights_sha256(model_path(config.target))
    assert (config.policy.kind, config.switches.speculation, config.switches.canary_share) == (
        "adaptive",
        "on",
        1.0,
    )


def test_a_request_s_drafts_are_listed_one_by_one():
    sequence, request = Sequence(1, [1], 1, SamplingParams()), GenerationRequest("", 9)
    session = Session(sequence, request, frozenset(), None, None)
    session.count_speculated(Proposal.chain("small", [5, 6, 7]), 2)
    session.count_speculated(Proposal.chain("small", [5, 6, 7]), 1)
    session.count_speculated(Proposal("lookup", [5, 8, 6], [-1, -1, 0], [0.5, 0.4, 0.3]), 1)
    assert session.drafts == {"small": (6, 3), "lookup": (3, 1)}
    assert (session.drafted, session.accepted) == (9, 4)
    assert session.usage().drafts == session.drafts
