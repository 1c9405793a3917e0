"""The soak on its smallest model, for seconds; and that it would notice."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import soak
from bench.soak_adapters import Variants, Weights
from bench.soak_answers import NEAR, Answers, Question, gap_between
from bench.soak_watch import FEWEST_SAMPLES, Times, Watch
from lorry.engine.llm import Completion
from lorry.types import TokenLogprobs

SMALL = ["--model", "tiny", "--device", "cpu", "--adapters", "40", "--on-host", "10", "--on-device", "4"]


def test_a_soak_of_seconds_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "soak.jsonl"
    assert soak.main([*SMALL, "--minutes", "0.05", "--commit", "abc", "--out", str(out)]) == 0
    line = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert (line["benchmark"], line["model"], line["commit"], line["adapters"]) == ("soak", "tiny", "abc", 40)
    assert (line["faults"], line["differed"], line["parted"]) == (0, 0, 0)
    assert 0 < line["compared"] == sum(line["outcomes"].get(reason, 0) for reason in ("stop", "length"))
    assert sum(line["outcomes"].values()) == line["requests"]
    assert line["different_references"] > line["references"] / 2
    assert min(line[name] for name in ("evictions", "reads", "copies")) > 0
    assert line["most_on_device"] <= 4
    assert 0 < line["step_ms"]["p50"] <= line["step_ms"]["p99"] <= line["step_ms"]["longest"]


def test_a_wrong_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The answers are compared with those of other weights: only the base's are equal."""
    content = Variants.content
    other = lambda self, weights: content(self, weights._replace(number=weights.number + 7))  # noqa: E731
    compare_all = soak.compare_all

    def compare_with_others(*args: object):
        monkeypatch.setattr(Variants, "content", other)
        compare_all(*args)

    monkeypatch.setattr(soak, "compare_all", compare_with_others)
    out = tmp_path / "soak.jsonl"
    assert soak.main([*SMALL, "--minutes", "0.02", "--out", str(out)]) == 1
    line = json.loads(out.read_text())
    assert line["faults"] == 0
    assert line["differed"] > line["compared"] / 2


def completion(tokens: list[int], lead: float | None = None) -> Completion:
    """Each token leads 0 or 1, the other one, by so many nats."""
    if lead is None:
        return Completion(token_ids=tokens)
    found = [TokenLogprobs(-1.0, ((token, -1.0), (1 - token, -1.0 - lead))) for token in tokens]
    return Completion(token_ids=tokens, logprobs=found)


def test_answers_are_counted_and_compared_as_far_as_they_go():
    answers, question = Answers(), Question(Weights(3, 0), 0)
    for tokens in ([5, 6], [5, 6], [5, 6, 7], [5, 9, 7]):
        answers.add(question, len(tokens), completion(tokens))
    assert [given.times for given in answers.given[question]] == [2, 1, 1]
    answers.judge(question, completion([5, 6, 7, 8]))
    assert (answers.num_compared, answers.num_parted, answers.num_differed) == (4, 1, 1)


def test_near_ties_are_excused_only_where_they_are_known():
    assert gap_between(completion([0, 1], 0.1), completion([0, 0], NEAR)) == pytest.approx(NEAR)
    assert gap_between(completion([0, 1]), completion([0, 0])) == float("inf")
    assert gap_between(completion([0, 1], 0.1), completion([0], 0.1)) == float("inf")


def test_growth_is_noticed(monkeypatch: pytest.MonkeyPatch):
    watch = Watch(SimpleNamespace(stats=lambda: None), print)
    watch._rss.extend([1e9] * FEWEST_SAMPLES)
    assert watch.growth() is None
    watch._rss.extend([1.2e9] * FEWEST_SAMPLES)
    assert watch.growth() == "the process grew from 954 to 1144 MiB"


def test_times_in_milliseconds():
    times = Times()
    assert times.summary() == {"count": 0, "p50": 0.0, "p99": 0.0, "longest": 0.0}
    for seconds in (0.003, 0.001, 0.002):
        times.add(seconds)
    assert times.summary() == {"count": 3, "p50": 2.0, "p99": 2.0, "longest": 3.0}
