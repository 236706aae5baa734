"""A head's cost is measured on its own passes, next to its target's."""

import json
import sys

from bench.cuda.random_models import DecoderShape
from bench.micro import eagle_cost


def test_a_record_has_the_shares_of_every_shape(monkeypatch, capsys):
    tiny = DecoderShape(6, 32, 48, 4, 2, 8, 96, ties_embeddings=True)
    monkeypatch.setattr(eagle_cost, "SHAPES", {"tiny": (tiny, 40)})
    monkeypatch.setattr(sys, "argv", ["eagle_cost", "--rounds", "1", "--dtype", "fp32"])
    eagle_cost.main()
    record = json.loads(capsys.readouterr().out)
    shape = record["shapes"]["tiny"]
    assert record["command"].endswith("--rounds 1 --dtype fp32")
    forms = "absorb", "depth", "depth in int8"
    arms = {f"{form}, {rows} rows" for form in forms for rows in eagle_cost.ROWS}
    assert shape["of_the_target_s_pass"].keys() == arms | {"absorb, 256 tokens"}
    assert shape["kv_of_the_target_s"] == round(1 / 6, 4)
