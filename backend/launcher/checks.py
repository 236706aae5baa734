"""Whether this machine can serve, checked before anything is started."""

from __future__ import annotations

import importlib.util
import platform
import re
import resource
import sys
from importlib import metadata
from pathlib import Path
from textwrap import shorten

from backend.launcher.environment import PORTS, LaunchError, LaunchSettings, port_trouble
from backend.launcher.processes import command_line, listening_process, listening_sockets
from backend.launcher.run_folder import packaged_stub
from backend.machine import Machine, machine

MINIMUM_GLIBC = (2, 35)
PYTHONS = ((3, 11), (3, 12))
MINIMUM_OPEN_FILES = 256
"""Files: tritonserver has 72 open at rest on two cores, and one more for each connection."""
WANTED_OPEN_FILES = 65_536
"""Files, for tens of thousands of connections."""
PLAIN_PATH = re.compile(r"[\w./+=,@%:~#-]+", re.ASCII)
"""A path that Triton can start its stubs from: by a shell line without quotes, with a Python whose
paths are ASCII.
"""
OPEN_TRITON = (
    "opens Triton's ports to other machines: this Triton (24.10) has known flaws, and clients need "
    "no key. Let others reach the OpenAI port alone (SECURITY.md)"
)
"""A warning about the packaged tritonserver, after the address."""


def check_ports(settings: LaunchSettings) -> None:
    """Raise LaunchError when a port is in use or the address is not this machine's."""
    for (name, option, _), port in zip(PORTS, settings.ports, strict=True):
        if why := port_trouble(settings.bind, port):
            label = name.lower().replace("_", " ")
            text = f"{label} {port} cannot be used on {settings.bind}: {why}{listener(port)}"
            raise LaunchError(f"{text}. Choose another with {option}")


def listener(port: int) -> str:
    """Return the process that listens on a port, as far as this user may know."""
    if pid := listening_process(port):
        program, *arguments = command_line(pid) or [""]
        command = shorten(" ".join((Path(program).name, *arguments)), 60, placeholder=" ...")
        return f", by process {pid} ({command})"
    return ", by a process that this user cannot see" if [*listening_sockets(port)] else ""


def check_machine(machine: Machine = machine) -> None:
    """Raise LaunchError unless the packaged tritonserver runs here."""
    check_system(machine)
    check_python(machine)
    check_triton()
    check_temporary(machine)
    check_open_files(machine)


def check_system(machine: Machine) -> str:
    """Return the system and its glibc. Raises LaunchError where tritonserver does not run."""
    if machine.system() != ("Linux", "x86_64"):
        system = " on ".join(machine.system())
        raise LaunchError(f"the packaged tritonserver needs Linux on x86-64, this is {system}")
    version = machine.glibc()
    parts = version.split(".")
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < MINIMUM_GLIBC:
        raise LaunchError(
            f"the packaged tritonserver needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12), "
            f"this machine has {version}"
        )
    return f"Linux on x86-64, glibc {version}"


def check_python(machine: Machine) -> str:
    """Return the version of Python and where its shared library is. Raises LaunchError."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise LaunchError(
            f"Python 3.11 or 3.12 is needed, this is {platform.python_version()}: "
            "create an environment with one of these (make serve PYTHON=python3.11)"
        )
    return f"{platform.python_version()}, its shared library in {python_library_folder(machine)}"


def check_triton() -> str:
    """Return the tritonserver's package. Raises LaunchError where it, or its stub, is missing."""
    if importlib.util.find_spec("pytriton") is None:
        text = "the package nvidia-pytriton, which contains tritonserver, is not installed"
        raise LaunchError(f"{text}: install spindle[serve] (in a clone: make serve)")
    if not packaged_stub().is_file():
        text = "nvidia-pytriton has no stub for this Python"
        raise LaunchError(f"{text}: {packaged_stub()} is missing")
    return f"nvidia-pytriton {metadata.version('nvidia-pytriton')}, with its stub for this Python"


def python_library_folder(machine: Machine = machine) -> Path:
    """Return the folder of this Python's shared library, which Triton's stub loads. Raises
    LaunchError when there is none.
    """
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    folder = machine.library_folder(name)
    if folder is None:
        raise LaunchError(
            f"{name} is missing: Triton needs a Python with a shared library (on Debian and "
            f"Ubuntu the package "
            f"libpython{sys.version_info[0]}.{sys.version_info[1]}; with pyenv, "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared)"
        )
    return folder


def check_temporary(machine: Machine = machine) -> str:
    """Return where run folders are. Raises LaunchError where stubs cannot start from there."""
    folder = machine.temporary_folder()
    if not PLAIN_PATH.fullmatch(str(folder)):
        letters = "ASCII letters, digits and _ - . /"
        raise LaunchError(
            f"TMPDIR {str(folder)!r} cannot hold tritonserver's stubs, which start only from "
            f"paths of {letters}. Set TMPDIR to such a folder"
        )
    if machine.is_noexec(folder):
        raise LaunchError(
            f"TMPDIR {folder} is mounted noexec, and tritonserver's stubs start from there. "
            "Set TMPDIR to another folder"
        )
    return f"tritonserver's stubs can start from {folder}"


def check_open_files(machine: Machine = machine) -> str:
    """Return how many files a process may open. Raises LaunchError for too few."""
    _, most = machine.open_files()
    if most < MINIMUM_OPEN_FILES:
        raise LaunchError(
            f"the limit of open files (ulimit -n) is {most}, tritonserver needs "
            f"{MINIMUM_OPEN_FILES} or more"
        )
    return f"{min(most, WANTED_OPEN_FILES)} open files"


def raise_open_files(machine: Machine = machine) -> None:
    """Let this process and its children open as many files as they are allowed to, and want."""
    now, most = machine.open_files()
    if now < (wanted := min(most, WANTED_OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
