"""benchmarks/stranger.py: rewards and outcomes meet completions with all that they read; its page has the numbers of its cases."""

import re
import time

import pytest
import stranger

from pages import DOCS
from spanwise.score import OUTCOMES, REWARDS
from spanwise.segment import Vocabulary
from tokenizers_small import byte_level

NAMES = [name for name in [*REWARDS, *OUTCOMES] if name != "runs"]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    with stranger.Server(lambda *_: stranger.verdict("yes")).serving() as server:
        yield stranger.options_of(server.url, stranger.reward_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("name", NAMES)
def test_a_good_completion_gets_every_reward(options, name):
    vocabulary = Vocabulary.from_tokenizer(byte_level())
    good = [vocabulary.pieces.index(bytes([byte])) for byte in stranger.GOOD]
    scheme = stranger.scheme_of(name, options)
    scores = stranger.read_beside_good(scheme, good, vocabulary, good)[0].scores
    assert scores.status_nm.tolist() == [[0] * len(scheme.objectives)] * 2
    assert not scores.reward_nm.isnan().any()
    if name in OUTCOMES:
        assert scores.outcome(name).tolist() == [1, 1]


def test_the_page_has_the_numbers_of_the_cases(tmp_path):
    section = (DOCS / "reliability.md").read_text().partition("## What a stranger")[2].partition("\n## ")[0]
    rows = {what: int(cases) for what, cases in re.findall(r"^\| ([^|]+) \| (\d+) \|", section, re.MULTILINE)}
    folders = stranger.folders(tmp_path)
    assert rows == {
        "folders": 2 * sum(len(stranger.looking(folder, tmp_path)) for folder, _ in folders.values()),
        "segmenters": len(stranger.READERS) * len(stranger.HOSTILE), "rewards and outcomes": len(NAMES) * len(stranger.HOSTILE),
        "`credit` and its page": len(stranger.HOSTILE), "reward functions": len(stranger.BAD),
    }  # fmt: skip
    assert f"{sum(rows.values()):,} hostile inputs" in section


def be_busy():
    while True:
        pass


@pytest.mark.parametrize("call", [be_busy, lambda: time.sleep(9)], ids=["busy", "idle"])
def test_a_case_ends_in_its_time(monkeypatch, call):
    limits = [(*limit[:2], seconds) for limit, seconds in zip(stranger._LIMITS, (0.2, 0.6), strict=True)]
    monkeypatch.setattr(stranger, "_LIMITS", limits)
    monkeypatch.setattr(stranger, "FAILURES", [])
    stranger.case("a case", "an endless one", call)
    assert stranger.FAILURES == [("a case", "an endless one", "longer than 10 s")]
