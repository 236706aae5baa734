"""Build the TensorRT-LLM engines of a deployment: ``python -m engines_build.build FILE
[--dry-run]``, inside NVIDIA's container.

Checks tokenizers and vocabularies first, then converts, builds and checks each engine, and writes
``serving.json``. A stage is done when its folder says that it was made by the same commands from
the same checkpoint; one that broke off begins again, the others are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from backend.checked_settings import ConfigError
from backend.engines.tensorrt_llm.folder import read_engine_folder
from backend.storage.manifest import check_pair, read_manifest
from engines_build.trtllm.commands import convert_command, engine_command
from engines_build.trtllm.deployment import EngineBuild, TrtllmDeployment, load_deployment, serving

MANIFEST = "manifest.json"
SERVING = Path(__file__).parent.parent / "model_repository" / "spindle" / "1" / "serving.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

Run = Callable[[Sequence[str]], None]


class BuildError(Exception):
    """A stage that failed; the message says which and how."""


def build(deployment: TrtllmDeployment, run: Run, *, dry_run: bool = False) -> None:
    """Bring every engine of a deployment. Raises ConfigError for what does not fit, BuildError for
    a program that failed.
    """
    check_checkpoints(deployment, dry_run=dry_run)
    output = Path(deployment.output).resolve()
    folders = {engine.name: output / engine.name for engine in deployment.engines}
    for engine in deployment.engines:
        _build_engine(deployment, engine, output, run, dry_run=dry_run)
    if dry_run:
        return
    check_engines(deployment, folders)
    _write(output / "serving.json", serving(deployment, folders[deployment.target.name]))
    print(f"{output / 'serving.json'} is ready")


def check_checkpoints(deployment: TrtllmDeployment, *, dry_run: bool = False) -> None:
    """Look for what quantisation reads, and compare the drafts' tokenizers with the target's, token
    by token.

    Raises ConfigError naming what is missing, or the first difference.
    """
    missing = [
        engine.checkpoint
        for engine in deployment.engines
        if not Path(engine.checkpoint, "config.json").is_file()
    ]
    if missing and dry_run:
        print(f"# not checked: there is no checkpoint {', '.join(missing)}")
        return
    for engine in deployment.engines:
        if engine.calibration and not Path(engine.calibration).is_dir():
            raise ConfigError(
                f"calibration of {engine.name} must be a folder, got {engine.calibration!r}"
            )
    target = read_manifest(Path(deployment.target.checkpoint))
    if target.max_context_tokens < deployment.max_context_tokens:
        raise ConfigError(
            f"max_context_tokens {deployment.max_context_tokens} is over the "
            f"{target.max_context_tokens} of {deployment.target.checkpoint}"
        )
    for draft in deployment.drafts:
        check_pair(target, read_manifest(Path(draft.checkpoint)), same_size=True)


def check_engines(deployment: TrtllmDeployment, folders: dict[str, Path]) -> None:
    """Read what was built back, and refuse engines that are not as asked. Raises ConfigError."""
    for build in deployment.engines:
        engine, draft_len = read_engine_folder(folders[build.name]), 0
        if build is deployment.target:
            draft_len = deployment.max_draft_len
        wrong = []
        if not engine.paged_context_fmha:
            wrong.append("without --use_paged_context_fmha enable: KV cannot be reused")
        if engine.verifies_drafts != bool(draft_len) or engine.max_draft_len != draft_len:
            wrong.append(f"with max_draft_len {engine.max_draft_len} instead of {draft_len}")
        if wrong:
            raise ConfigError(f"{engine.folder} was built {'; '.join(wrong)}")


def _build_engine(
    deployment: TrtllmDeployment, engine: EngineBuild, output: Path, run: Run, *, dry_run: bool
) -> None:
    checkpoint, folder = output / "checkpoints" / engine.name, output / engine.name
    convert = convert_command(deployment, engine, checkpoint)
    compile_ = engine_command(deployment, engine, checkpoint, folder)
    if dry_run:
        print(shlex.join(convert), shlex.join(compile_), sep="\n")
        return
    source = read_manifest(Path(engine.checkpoint)).layout_sha256
    if _stage(folder, [convert, compile_], source):
        if _stage(checkpoint, [convert], source):
            _run(convert, checkpoint, [convert], source, run, deployment)
        _run(compile_, folder, [convert, compile_], source, run, deployment)
    for name in TOKENIZER_FILES:
        if Path(engine.checkpoint, name).is_file():
            shutil.copyfile(Path(engine.checkpoint, name), folder / name)


def _stage(folder: Path, commands: list[list[str]], source: str) -> bool:
    """Return whether a stage is yet to be done; clear what is left of another."""
    try:
        done = json.loads((folder / MANIFEST).read_text("utf-8"))
        if (
            done["commands_sha256"] == _sha256(commands)
            and done["checkpoint_layout_sha256"] == source
            and _whole(folder, done["files"])
        ):
            print(f"{folder} exists already")
            return False
    except (OSError, ValueError, KeyError):
        pass
    if folder.exists():
        print(f"{folder} was built by other commands or is incomplete: building it again")
        shutil.rmtree(folder)
    return True


def _run(
    command: list[str],
    folder: Path,
    commands: list[list[str]],
    source: str,
    run: Run,
    deployment: TrtllmDeployment,
) -> None:
    """Run a program that fills a folder; its manifest is written last."""
    print(shlex.join(command), flush=True)
    folder.mkdir(parents=True)
    run(command)
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    if "config.json" not in files:
        raise BuildError(f"{command[0]} succeeded and left no config.json in {folder}")
    manifest = {
        "commands": [shlex.join(one) for one in commands],
        "commands_sha256": _sha256(commands),
        "checkpoint_layout_sha256": source,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "tensorrt_llm": json.loads((folder / "config.json").read_text("utf-8")).get(
                "version", "unknown"
            )
        },
        "limits": {
            "max_batch_size": deployment.max_batch_size,
            "max_context_tokens": deployment.max_context_tokens,
            "max_draft_len": deployment.max_draft_len,
        },
        "files": files,
        "sha256": {name: _file_sha256(folder / name) for name in files},
    }
    _write(folder / MANIFEST, manifest)


def _whole(folder: Path, files: dict[str, int]) -> bool:
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in files.items()
    )


def _sha256(commands: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(commands).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _write(path: Path, content: Mapping[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    os.replace(part, path)


def run_program(command: Sequence[str]) -> None:
    """Run a program of the container. Raises BuildError saying how it ended."""
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise BuildError(
            f"{command[0]} cannot be run ({error.strerror}): this needs NVIDIA's TensorRT-LLM "
            f"container"
        ) from error
    if code:
        raise BuildError(f"{shlex.join(command)} ended with code {code}")


def main() -> None:
    """Build, or say what would be run."""
    parser = argparse.ArgumentParser(
        prog="python -m engines_build.build",
        description="Build a deployment's TensorRT-LLM engines in NVIDIA's container.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="deployment file, YAML or JSON (examples: docker/deployments)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the files and print every command line without running it",
    )
    kinds = "trt_graph is for tests, not for serving; it compiles here, without a GPU"
    parser.add_argument("--engine", choices=("trtllm", "trt_graph"), default="trtllm", help=kinds)
    trt = parser.add_argument_group(
        "--engine trt_graph", "FILE is a serving.json, by default the repository's"
    )
    trt.add_argument("--out", type=Path, help="folder for the engines")
    trt.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="number format for all models (default: each model's own)",
    )
    trt.add_argument(
        "--weights-inside",
        action="store_true",
        help="compile the weights into each engine instead of sharing one copy",
    )
    trt.add_argument(
        "--library",
        choices=("tensorrt_rtx", "tensorrt"),
        help="library to build with (default: the first that is installed)",
    )
    args = parser.parse_args()
    try:
        BUILDERS[args.engine](parser, args)
    except (ConfigError, BuildError) as error:
        sys.exit(f"error: {error}")


def build_engines(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Build the engines of a deployment file."""
    if args.file is None:
        parser.error("a deployment file is needed")
    build(load_deployment(args.file), run_program, dry_run=args.dry_run)


def build_networks(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Compile the networks of a ``serving.json``."""
    # torch and TensorRT, only where they are asked for
    from engines_build.trt_graph.build import BuildOptions, build_all
    from engines_build.trt_graph.library import TrtError

    if args.out is None or args.dry_run:
        parser.error("--engine trt_graph needs --out and has no --dry-run")
    try:
        build_all(
            args.file or SERVING,
            args.out,
            BuildOptions(args.dtype, args.weights_inside, library=args.library),
        )
    except TrtError as error:
        raise BuildError(str(error)) from error


BUILDERS = {"trtllm": build_engines, "trt_graph": build_networks}
"""The kinds that ``--engine`` names."""

if __name__ == "__main__":
    main()
