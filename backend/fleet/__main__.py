"""``python -m backend.fleet``: a Dynamo worker, which the launcher starts next to tritonserver."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import MISSING, fields

import uvloop
from dynamo.common.backend.worker import Worker

from backend.fleet.worker import Replica, SpindleEngine


def main() -> None:
    """Serve until SIGTERM. Each option is a field of ``Replica``."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Replica):
        option = f"--{field.name.replace('_', '-')}"
        kind = {"int": int, "float": float}.get(str(field.type), str)
        is_required = field.default is MISSING
        default = None if is_required else field.default
        parser.add_argument(option, type=kind, required=is_required, default=default)
    logging.basicConfig(level=logging.INFO)
    engine = SpindleEngine(Replica(**vars(parser.parse_args())))
    discovery = os.environ.get("DYN_DISCOVERY_BACKEND") or "etcd"
    uvloop.run(Worker(engine, engine.config(discovery)).run())


if __name__ == "__main__":
    main()
