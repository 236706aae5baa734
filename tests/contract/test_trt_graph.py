"""The engine over compiled networks: the exactness suite once more, every network executed by ONNX Runtime in the place of TensorRT."""

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from backend.engines.torch_engine import TorchEngine
from tests.contract import checks, tree_checks
from tests.contract.onnx_runtime import onnx_engine
from tests.contract.reference import Reference

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Make every tiny engine one of compiled networks, and compare it with the torch engine of the same weights."""
    of_torch, reference = TorchEngine.from_weights, Reference.__init__

    def from_weights(*arguments, **options):
        engine = onnx_engine(*arguments, **options)
        engine.of_torch = lambda: of_torch(*arguments, **options)
        return engine

    monkeypatch.setattr(TorchEngine, "from_weights", staticmethod(from_weights))
    monkeypatch.setattr(Reference, "__init__", lambda self, engine: reference(self, engine.of_torch()))


NOT_HERE = {checks.no_number_decides_twice}
"""A network is given the numbers of all its rows, padding too; which it reads is compared with the torch rule elsewhere."""

SUITE = [check for check in (*checks.SUITE, *tree_checks.SUITE) if check not in NOT_HERE]


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_over_compiled_networks_it_holds_that(check):
    check()
