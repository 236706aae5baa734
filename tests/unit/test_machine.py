import json
import platform
import socket

import numpy as np

from backend import machine


def test_the_description_is_json_and_names_neither_host_nor_missing_packages(monkeypatch):
    monkeypatch.setattr(machine, "_PACKAGES", ("numpy", "no-such-package-anywhere"))
    text = json.dumps(machine.describe())
    assert machine.versions() == {"python": platform.python_version(), "numpy": np.__version__}
    assert socket.gethostname() not in text
    assert machine.describe()["cores"] >= 1


def test_a_machine_without_cpuinfo_still_has_a_name(monkeypatch):
    monkeypatch.setattr(machine.Path, "read_text", lambda *args: (_ for _ in ()).throw(OSError))
    assert machine.processor()
