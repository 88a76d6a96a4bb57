"""The walks of benchmarks/critic.py: what is right, and their true values against every walk written out."""

import itertools

import numpy as np
import pytest
import torch
from walk_task import LAST, MOVES, STATES, STEP, WALKS, Walk, build_walk_tokenizer, right, traces
from walk_truth import Policy, Sampled, places

import trl_small

pytestmark = trl_small.THIRD_PARTY

SHORT = Walk("short", 2, (1, 2) * 8)


def written(start, moves, walk=SHORT):
    state, text = start, ""
    for number, move in enumerate(moves, 1):
        state = int(STEP[state, move])
        text += walk.line(number, move, state)
    return text, state


def test_every_state_is_moved_by_the_same_sixteen_deltas():
    for state in range(2, 8):
        deltas = sorted(int(after) - state for after in STEP[state])
        assert deltas == [-2] * 2 + [-1] * 3 + [0] * 6 + [1] * 3 + [2] * 2
    assert (STEP[0] == 0).all()
    assert (STEP[LAST] == LAST).all()


def test_a_walk_is_right_if_it_follows_and_ends_at_nine():
    text, state = written(8, (int(np.flatnonzero(STEP[8] == LAST)[0]), 3))
    assert state == LAST
    assert SHORT.is_right(8, text)
    for fault in (text[:-1] + "8", text + "9", text.replace("#2", "#3"), text.replace("(1)", ""), text[:-1], "", "x" + text):
        assert not SHORT.is_right(8, fault), fault
    assert not SHORT.is_right(7, text)
    assert right(["8="], [text], ["walk"]) == [0.0]  # too few lines for that walk


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_traces_are_right_as_often_as_chains_of_the_table(walk):
    pairs = traces(walk, 0.0, 400, np.random.default_rng(0))
    chain_ss = np.stack([np.bincount(STEP[state], minlength=STATES) for state in range(STATES)]) / len(MOVES)
    expected = np.mean([np.linalg.matrix_power(chain_ss, walk.lines)[start, LAST] for start in (3, 4, 5)])
    share = np.mean([walk.is_right(int(prompt[0]), text) for prompt, text in pairs])
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 400)
    tokenizer = build_walk_tokenizer()
    ids = tokenizer([text for _, text in pairs[:9]])["input_ids"]
    assert tokenizer.batch_decode(ids) == [text for _, text in pairs[:9]]
    assert max(map(len, ids)) <= walk.longest


def test_true_values_are_those_of_every_walk_written_out():
    tokenizer, generator = build_walk_tokenizer(), torch.Generator().manual_seed(0)
    ids = tokenizer.get_vocab()
    move_sm, keeps = torch.rand(STATES, len(MOVES), generator=generator, dtype=torch.float64), 0.9
    policy = Policy(move_sm / move_sm.sum(dim=1, keepdim=True), keeps)
    chances = {}
    for moves in itertools.product(range(len(MOVES)), repeat=SHORT.lines):
        state, chance = 7, 1.0
        for move in moves:
            chance, state = chance * float(policy.move_sm[state, move]) * keeps, int(STEP[state, move])
        chances[moves] = chance * (state == LAST)
    first = 5
    text, _ = written(7, (first, 0))
    words = [*tokenizer.tokenize(text), "<eos>"]
    mask_nt = torch.ones(1, len(words), dtype=torch.bool)
    walks = Sampled(SHORT, None, mask_nt, [words], [7], torch.zeros(1, len(words), len(ids)), ids)
    value_nt, adv_nt = walks.truth(policy)
    total = sum(chances.values())
    after_first = sum(chance for moves, chance in chances.items() if moves[0] == first) / float(policy.move_sm[7, first])
    before_second = after_first / keeps
    at = words.index("#2")
    assert value_nt[0, 1].item() == pytest.approx(total)
    assert value_nt[0, 2:at].tolist() == pytest.approx([after_first] * (at - 2))
    assert value_nt[0, at + 1].item() == pytest.approx(before_second)
    assert adv_nt[0, 1].item() == pytest.approx(after_first - total)
    assert adv_nt[0].count_nonzero() == 2


def test_behind_a_false_token_nothing_is_worth_anything():
    text, _ = written(5, (0, 0))
    words = build_walk_tokenizer().tokenize(text)
    for false in range(len(words)):
        spoiled = [*words[:false], "=", *words[false + 1 :]]
        seen = [(place.token, place.expected) for place in places(SHORT, [spoiled], [5])]
        assert [token for token, _ in seen] == list(range(false + 1))
        assert all(expected in (None, words[token]) for token, expected in seen)
