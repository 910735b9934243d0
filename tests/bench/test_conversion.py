"""The measurement of a conversion, on two layers of a real model's names in sparse sizes."""

import json

from bench import conversion
from bench.__main__ import main


def test_a_conversion_is_measured_and_cleared_away(tmp_path, monkeypatch, capsys):
    said = {
        "convert": "dst: 1.00 GB in 2 groups\n2.0 s, 0.50 GB/s, peak memory 0.30 GB\n",
        "verify": "12 parameters copied and 3 transformed: every bit is right\n",
    }

    def run(command, *arguments):
        if command == "synthetic":
            arguments[1].mkdir()
            (arguments[1] / "model.safetensors").write_bytes(bytes(1000))
        return said.get(command, "")

    monkeypatch.setattr(conversion, "_convert", run)
    out = tmp_path / "rows.jsonl"
    assert main(["conversion", str(tmp_path / "work"), "--out", str(out), "--sha", "abc"]) == 0
    row = json.loads(out.read_text())
    assert (row["bytes"], row["seconds"], row["peak_memory_gigabytes"]) == (1000, 2.0, 0.3)
    assert row["verdict"].endswith("every bit is right")
    assert row["ratio_to_copy"] > 0
    assert not (tmp_path / "work").exists()


def test_a_folder_in_use_is_left_alone(tmp_path, capsys):
    assert main(["conversion", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert tmp_path.exists()
