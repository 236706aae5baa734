"""What the engine process is started with."""

from backend.triton_adapter.engine_child import engine_environment
from backend.triton_adapter.paths import PROJECT_ROOT


def test_the_policys_matrices_run_on_one_thread_unless_the_operator_says_otherwise(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert engine_environment()["OPENBLAS_NUM_THREADS"] == "1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert engine_environment()["OPENBLAS_NUM_THREADS"] == "3"


def test_the_project_is_on_the_path_and_tritons_own_libraries_are_off_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/pytriton/libs:/opt/cuda")
    environment = engine_environment()
    assert environment["PYTHONPATH"] == f"{PROJECT_ROOT}:/elsewhere"
    assert environment["LD_LIBRARY_PATH"] == "/opt/cuda"
