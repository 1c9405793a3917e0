"""The benchmark of the host's part of a step runs: it stands in for parts of the engine, which change."""

from bench import host


def test_every_part_of_a_step_is_timed(capsys):
    host.main(["--vocab", "32", "--context", "20", "--max-context", "512", "--batch", "1", "3", "--steps", "8"])
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["batch", *host.PARTS, "total"]
    assert [int(line[0]) for line in lines] == [1, 3]
    for _, *parts, total in lines:
        assert all(float(part) >= 0 for part in parts)
        assert 0 < float(total) < 1e6
        assert float(parts[host.PARTS.index("route")]) > 0
