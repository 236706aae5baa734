import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend import cli
from backend.launcher import serving
from backend.launcher.overrides import Overrides

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served(monkeypatch):
    """The calls to ``serve``, in place of a service; the environment is put back."""
    calls = []
    monkeypatch.setattr(
        serving, "serve", lambda *arguments, **options: calls.append((arguments, options)) or 0
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return calls


def test_options_take_the_place_of_variables_and_the_rest_goes_to_triton(
    served, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    words = [
        "serve",
        "--port",
        "18000",
        "--openai-port=0",
        "--bind",
        "0.0.0.0",
        "--cache",
        "here",
        "--model",
        "m",
        "--verbose",
    ]
    assert cli.main([*words, "--", "--log-verbose=1", "--", "x"]) == 0
    assert served == [((Overrides(model="m"), ["--log-verbose=1", "--", "x"]), {"verbose": True})]
    assert {
        name: os.environ[name] for name in ("HTTP_PORT", "OPENAI_PORT", "BIND", "SPINDLE_CACHE")
    } == {
        "HTTP_PORT": "18000",
        "OPENAI_PORT": "0",
        "BIND": "0.0.0.0",
        "SPINDLE_CACHE": str(tmp_path / "here"),
    }


def test_without_options_the_variables_stay(served):
    os.environ["GRPC_PORT"] = "7"
    assert cli.main(["serve"]) == 0
    assert os.environ["GRPC_PORT"] == "7"
    assert served == [((Overrides(), []), {"verbose": False})]


@pytest.mark.parametrize("command", ["", "serve", "doctor", *cli.DELEGATED_COMMANDS])
def test_every_command_has_help_by_its_own_name_with_an_example(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", [])  # put back at the end
    with pytest.raises(SystemExit, match="0"):
        cli.main([*filter(None, [command]), "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {' '.join(filter(None, ['spindle', command]))} ")
    assert shown.count(f"spindle {command}") > 1  # its usage, and an example


def test_the_start_imports_nothing_heavy():
    heavy = "len({'numpy', 'torch', 'yaml'} & set(sys.modules))"
    code = f"import sys, backend.cli\ntry: backend.cli.main(['--help'])\nfinally: sys.exit({heavy})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


def test_a_command_that_is_elsewhere_gives_its_own_errors_and_status(tmp_path):
    words = [sys.executable, "-m", "backend.cli", "replay", str(tmp_path / "absent")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: [Errno 2] No such file or directory: '{tmp_path / 'absent'}'\n",
    )


def test_benchmarks_without_a_clone_say_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "PROJECT_ROOT", tmp_path)
    assert cli.main(["bench", "--quick"]) == 1
    assert capsys.readouterr().err == (
        "spindle: error: `spindle bench` is not in the installed package. It runs in a clone of "
        "the source: make bench\n"
    )


def test_a_command_without_its_extra_names_it(tmp_path):
    words = [sys.executable, "-S", "-m", "backend.cli", "replay", str(tmp_path / "absent")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "spindle: error: `spindle replay` needs the package numpy: install spindle[sim]\n",
    )


def test_a_misspelt_command_gets_a_suggestion(capsys):
    for word, text in (("sevre", "did you mean 'serve'?"), ("fly", "invalid choice: 'fly'")):
        with pytest.raises(SystemExit):
            cli.main([word])
        assert text in capsys.readouterr().err
