"""Builds the wheel of the vLLM plug-in, whose one import name is ``spindle_vllm``.

    make vllm-wheel        # or: python -m engines_build.vllm_wheel --out dist

``policy`` and the rooms of ``backend`` that a host needs are copied into one package, and what they
import from each other is renamed. No generic name gets into vLLM's environment.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from backend import __version__

ROOT = Path(__file__).resolve().parent.parent
NAME = "spindle_vllm"
SOURCES = ("policy", "backend")
LEFT_OUT = frozenset(
    f"backend/{room}"
    for room in (
        "advise",
        "app.py",
        "cli.py",
        "engine_process.py",
        "fleet",
        "ipc",
        "launcher",
        "openai_frontend",
        "reloading.py",
        "triton_adapter",
        "hosts/tensorrt_llm.py",
    )
)
"""Rooms of our own server, and other hosts."""

DEPENDENCIES = ("numpy>=1.26", "numba>=0.60")
"""All that drafts without a model import; vLLM has prometheus_client, torch and transformers."""

_IMPORT = re.compile(r"^(\s*)(from|import) (policy|backend)\b", re.MULTILINE)
_MODULE_NAME = re.compile(r"([\"'])((?:policy|backend)(?:\.\w+)+)\1")
_INIT = '''"""Spindle's planner for vLLM: classes that vLLM's settings name."""

from importlib import import_module
from typing import Any

__version__ = "{version}"
_MODULES = {{
    "AsyncProbeScheduler": "vllm_probe",
    "ProbeScheduler": "vllm_probe",
    "SpindleAsyncLengthScheduler": "vllm_lengths",
    "SpindleLengthScheduler": "vllm_lengths",
    "SpindleProposer": "vllm",
    "SpindleScheduler": "vllm",
}}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import vLLM only when one of the classes is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
    return getattr(import_module(f"spindle_vllm.backend.hosts.{{_MODULES[name]}}"), name)
'''
_PROJECT = """[project]
name = "spindle-vllm"
version = "{version}"
description = "Spindle's planner of speculative decoding as a plug-in of vLLM"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.10"
classifiers = ["Private :: Do Not Upload"]
dependencies = [{dependencies}]

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools.packages.find]
include = ["spindle_vllm*"]
"""


def write_tree(folder: Path) -> None:
    """Write what the wheel is built from into an empty folder."""
    paths = [*_modules()]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
    for path in paths:
        copy = folder / NAME / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_rename((ROOT / path).read_text("utf-8"), modules), "utf-8")
    (folder / NAME / "__init__.py").write_text(_INIT.format(version=__version__), "utf-8")
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    dependencies = ", ".join(f'"{one}"' for one in DEPENDENCIES)
    project = _PROJECT.format(version=__version__, dependencies=dependencies)
    (folder / "pyproject.toml").write_text(project, "utf-8")


def build(out: Path) -> Path:
    """Build the wheel into a folder and return its path. Raises CalledProcessError."""
    with TemporaryDirectory() as folder:
        write_tree(Path(folder))
        wheels = Path(folder) / "dist"
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", folder]
        subprocess.run([*command, "--wheel-dir", str(wheels)], check=True)
        (wheel,) = wheels.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def _modules() -> Iterator[Path]:
    """Yield the paths of the modules to copy, from the root."""
    for source in SOURCES:
        for file in sorted((ROOT / source).rglob("*.py")):
            path = file.relative_to(ROOT)
            if not LEFT_OUT & {path.as_posix(), *map(Path.as_posix, path.parents)}:
                yield path


def _rename(text: str, modules: set[str]) -> str:
    """Return a module's source with its imports, and names of modules in strings, in the wheel's
    package.
    """
    text = _IMPORT.sub(_rename_import, text)
    return _MODULE_NAME.sub(
        lambda m: f"{m[1]}{NAME}.{m[2]}{m[1]}" if m[2] in modules else m[0], text
    )


def _rename_import(match: re.Match[str]) -> str:
    space, word, package = match.groups()
    rest = match.string[match.end() :].partition("\n")[0]
    if word == "from":
        return f"{space}from {NAME}.{package}"
    if rest.strip():
        raise ValueError(f"only 'import {package}' can be renamed, got {match[0].strip()}{rest}")
    return f"{space}from {NAME} import {package}"


def main() -> None:
    """Build the wheel and print its path."""
    parser = argparse.ArgumentParser(description="Build the wheel of the vLLM plug-in.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the wheel (default: dist)"
    )
    sys.stdout.write(f"{build(parser.parse_args().out)}\n")


if __name__ == "__main__":
    main()
