"""bench.churn on a tiny model."""

import json
from pathlib import Path

import pytest

from bench.churn import Timed, describe, main


def test_times_are_from_the_arrival():
    timed = [Timed(1.0, [1.5, 1.7, 2.0]), Timed(2.0, [2.1, 2.2, 2.4])]
    found = describe(timed)
    assert found["requests"] == 2
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["gap_ms"]["p50"] == pytest.approx(200)
    assert found["whole_ms"]["mean"] == pytest.approx(700)


def test_more_adapters_than_there_is_room_for(tmp_path: Path):
    out = tmp_path / "lines"
    arguments = "--workload tiny --seconds 1.0 --rate 8 --input 9 --output 3 --adapters 4 --room 2 --commit c --out"
    main([*arguments.split(), str(out)])
    fits, small = [json.loads(line) for line in out.read_text().splitlines()]
    assert (fits["room"], small["room"]) == (4, 2)
    assert fits["requests"] == small["requests"] > 4
    assert fits["num_adapter_evictions"] == 0
    assert small["num_adapter_evictions"] > 0
