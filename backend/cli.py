"""``spindle COMMAND``: everything that a user starts, by one name. Also ``python -m backend.cli``.

A command's modules are imported when it runs: ``--help`` is quick, and the runtime never imports
the build tools.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from backend import PROJECT_ROOT, __version__

DELEGATED_COMMANDS = {
    "prepare": (
        "engines_build.prepare",
        "convert",
        "convert the models and measure the latency tables that a configuration needs",
    ),
    "admin": (
        "backend.launcher.admin",
        "serve",
        "turn speculation on or off, explain plans, reload drafts",
    ),
    "measure": (
        "engines_build.measure",
        "serve",
        "measure the engines' speed on this machine again",
    ),
    "simulate": ("policy.simulate", "sim", "compare policies on a simulated deployment"),
    "advise": (
        "backend.advise.cli",
        "advise",
        "recommend lengths for a vLLM, SGLang or TensorRT-LLM server that you run",
    ),
    "replay": ("policy.replay", "sim", "replay and explain a trace of the policy's decisions"),
    "bench": (
        "bench.sweep.run",
        "serve",
        "load-test the server and compare policies (only in a clone)",
    ),
}
"""Commands that have an option parser of their own: its module, the extra that brings what it
imports, and what it does.
"""

_DOTTED = re.compile(r"(?:^|[,=])[^\W\d]\w*(?:\.[^\W\d]\w*)+(?:$|[,:])")
"""The path of a user's policy among arguments."""

EXAMPLES = """examples:
  spindle serve                             the embedded model on HTTP 8000, gRPC 8001, OpenAI 9000
  spindle serve --model ~/models/llama-1b   a model of your own
  spindle doctor                            what this machine can do, and what is missing
  spindle COMMAND --help                    the options of a command
"""
SERVE_EXAMPLES = """examples:
  spindle serve
  spindle serve --model ~/models/llama-1b --drafts small=~/models/llama-160m,suffix
  spindle serve --port 8080 --dtype fp32 --policy none
  spindle serve --config my/serving.json -- --log-verbose=1

Arguments after -- go to tritonserver. With --model but without --drafts, suffix is the only draft,
because the shipped drafts fit only the shipped model. The command `reload drafts` reads --config
again; with --model, --drafts, --engine, --dtype or --policy it reads the file that contains these
options.
"""
VARIABLES = {
    "config": "SPINDLE_CONFIG",
    "cache": "SPINDLE_CACHE",
    "bind": "BIND",
    "port": "HTTP_PORT",
    "grpc_port": "GRPC_PORT",
    "metrics_port": "METRICS_PORT",
    "openai_port": "OPENAI_PORT",
    "dynamo": "DYNAMO_NAMESPACE",
    "kv_events": "KV_EVENTS",
    "served_model_name": "SERVED_MODEL_NAME",
}
"""The environment variable that each of these options takes the place of."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in DELEGATED_COMMANDS:
        return _delegate(words[0], words[1:])
    rest: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    parser, commands = _parser()
    if words and words[0] not in commands and (near := get_close_matches(words[0], commands, 1)):
        parser.error(f"there is no command {words[0]!r}: did you mean {near[0]!r}?")
    options = parser.parse_args(words)
    for name, variable in VARIABLES.items():
        if (value := getattr(options, name, None)) is not None:
            if name in ("config", "cache"):
                value = str(Path(value).expanduser().absolute())
            os.environ[variable] = ",".join(value) if isinstance(value, list) else value
    if options.command == "doctor":
        from backend.launcher import doctor, model_report

        if options.model:
            return model_report.report(options.model, as_json=options.json)
        return doctor.report(as_json=options.json)
    from backend.launcher.overrides import Overrides
    from backend.launcher.serving import serve

    overrides = Overrides(
        model=options.model,
        drafts=options.drafts,
        engine=options.engine,
        dtype=options.dtype,
        policy=options.policy,
    )
    return serve(overrides, rest, verbose=options.verbose)


def _delegate(command: str, arguments: list[str]) -> int:
    """Run a command by its module's name, with the arguments that follow."""
    module, extra, _ = DELEGATED_COMMANDS[command]
    if str(PROJECT_ROOT) not in sys.path:
        sys.path.insert(0, str(PROJECT_ROOT))
    if any(map(_DOTTED.search, arguments)):
        sys.path.append(os.getcwd())  # a policy of the user's
    if not PROJECT_ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file():
        where = "is not in the installed package. It runs in a clone of the source: make bench"
        print(f"spindle: error: `spindle {command}` {where}", file=sys.stderr)
        return 1
    sys.argv = [f"spindle {command}", *arguments]
    try:
        return int(importlib.import_module(module).main() or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or PROJECT_ROOT.joinpath(package).exists():
            raise
        remedy = "run `make dev`" if command == "bench" else f"install spindle[{extra}]"
        text = f"needs the package {package}: {remedy}"
        print(f"spindle: error: `spindle {command}` {text}", file=sys.stderr)
        return 1


def _parser() -> tuple[argparse.ArgumentParser, tuple[str, ...]]:
    """Return the parser and the names of its commands."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="spindle",
        description="Speculative decoding that tunes itself, on Triton Inference Server.",
        epilog=EXAMPLES,
        formatter_class=text,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model until Ctrl-C.",
        epilog=SERVE_EXAMPLES,
        formatter_class=text,
    )
    serve.add_argument(
        "--model",
        help="model: a decoder's Hugging Face folder, a GGUF file, or the embedded model's name",
    )
    serve.add_argument(
        "--drafts",
        help="drafts: none, or a list of name=FOLDER, lookup, suffix, or names from the settings",
    )
    serve.add_argument(
        "--engine", metavar="KIND", help="engine for the target: auto, openvino, vllm, ..."
    )
    serve.add_argument("--dtype", help="number format for the target: auto, bf16, int8, int4, ...")
    serve.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        help="names for OpenAI clients (env SERVED_MODEL_NAME; default: the folder's)",
    )
    serve.add_argument("--policy", metavar="KIND", help="policy: adaptive, none, ...")
    serve.add_argument(
        "--verbose", action="store_true", help="print the log instead of writing a file"
    )
    doctor = commands.add_parser(
        "doctor",
        help="report what this machine can do and what is missing",
        description="Check this machine; exit with 1 if `spindle serve` will not work.",
        epilog="examples:\n  spindle doctor\n  spindle doctor --json --port 8080\n"
        "  spindle doctor --model ~/models/qwen3-1.7b",
        formatter_class=text,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON objects: name, state, text")
    doctor.add_argument(
        "--model",
        metavar="FOLDER",
        help="report only which engines can serve this folder, and the memory each would take",
    )
    serve.add_argument(
        "--dynamo",
        metavar="NAMESPACE",
        help="join NVIDIA Dynamo's fleet with this name (env DYNAMO_NAMESPACE)",
    )
    serve.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish KV events for routers here, such as tcp://*:5557 (env KV_EVENTS)",
    )
    for command in (serve, doctor):
        _add_places(command)
    for name, (*_, purpose) in DELEGATED_COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return parser, tuple(commands.choices)


def _add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand in for environment variables."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings file (env SPINDLE_CONFIG; default: the shipped serving.json)",
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="folder for converted models and tables (env SPINDLE_CACHE; default: "
        "~/.cache/spindle)",
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="address to listen on (env BIND; default: 127.0.0.1; all: 0.0.0.0 or ::)",
    )
    parser.add_argument("--port", help="HTTP port (env HTTP_PORT; default: 8000)")
    parser.add_argument(
        "--grpc-port", metavar="PORT", help="gRPC port (env GRPC_PORT; default: 8001)"
    )
    parser.add_argument(
        "--metrics-port", metavar="PORT", help="metrics port (env METRICS_PORT; default: 8002)"
    )
    parser.add_argument(
        "--openai-port",
        metavar="PORT",
        help="port for OpenAI clients and the status page (env OPENAI_PORT; default: 9000; 0: "
        "none)",
    )


if __name__ == "__main__":
    sys.exit(main())
