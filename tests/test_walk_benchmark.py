"""The walks of benchmarks/critic.py: what is right, and their true values against every walk written out."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from walk_task import LAST, MOVES, STATES, STEP, WALKS, Walk, build_walk_tokenizer, right, traces
from walk_told import StateWriter, _rollout, tell
from walk_truth import Measured, Policy, Sampled, best_of, places

import trl_small
from spanwise.modes.sequences import Sequences

pytestmark = trl_small.THIRD_PARTY

SHORT = Walk("short", 2, (1, 2) * 8, "short")


def written(start, moves, walk=SHORT):
    state, text = start, ""
    for number, move in enumerate(moves, 1):
        state = int(STEP[state, move])
        text += walk.line(number, move, state)
    return text, state


def test_every_state_is_moved_by_the_same_sixteen_deltas_and_a_walk_is_right_if_it_follows_and_ends_at_nine():
    for state in range(2, 8):
        assert sorted(STEP[state] - state) == [-2] * 2 + [-1] * 3 + [0] * 6 + [1] * 3 + [2] * 2
    assert (STEP[0] == 0).all()
    assert (STEP[LAST] == LAST).all()
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
    first, (text, _) = 5, written(7, (5, 0))
    words = [*tokenizer.tokenize(text), "<eos>"]
    mask_nt = torch.ones(1, len(words), dtype=torch.bool)
    walks = Sampled(SHORT, None, mask_nt, [words], [7], torch.zeros(1, len(words), len(ids)), ids)
    value_nt, adv_nt = walks.truth(policy)
    total, at = sum(chances.values()), words.index("#2")
    after_first = sum(chance for moves, chance in chances.items() if moves[0] == first) / float(policy.move_sm[7, first])
    assert value_nt[0, 1:at].tolist() == pytest.approx([total, *[after_first] * (at - 2)])
    assert value_nt[0, at + 1].item() == pytest.approx(after_first / keeps)
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


def test_an_environment_writes_the_state_that_follows_the_last_move_and_nothing_else():
    tokenizer, move = build_walk_tokenizer(), MOVES[3]
    writer, ids = StateWriter(tokenizer), tokenizer.get_vocab()
    cases = {
        f"5=#1{move}(2)(1)": STEP[5, 3],
        f"5=#1{move}(1)9#2{move}(1)": STEP[9, 3],
        "5=#1(1)": 5,
        f"5=#1b{move}(1)": STEP[5, 3],
    }
    scores = torch.randn(1, len(ids), generator=torch.Generator().manual_seed(0))
    for text, state in cases.items():
        tokens = tokenizer.tokenize(text)
        seen = torch.tensor([[ids[token] for token in tokens]])
        assert writer.state_after(seen[0].tolist()) == state, text
        kept = [torch.equal(writer(seen[:, :place], scores.clone()), scores) for place in range(1, len(tokens) + 1)]
        assert kept == [token != "(1)" for token in tokens]


def test_a_rollout_masks_the_states_and_they_follow():
    torch.manual_seed(0)
    tokenizer = build_walk_tokenizer()
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    tell(model, tokenizer)
    trainer = SimpleNamespace(
        processing_class=tokenizer, args=SimpleNamespace(max_completion_length=80), model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped),
    )  # fmt: skip
    rollouts, names = _rollout(["5=", "3="] * 12, trainer), {index: word for word, index in tokenizer.get_vocab().items()}
    states = 0
    for start, ids, mask in zip("53" * 12, rollouts["completion_ids"], rollouts["env_mask"], strict=True):
        words = [start, *(names[token] for token in ids)]
        for place, is_policys in enumerate(mask, 1):
            assert is_policys == (words[place - 1] != "(1)")
            if not is_policys:
                before = "".join(word for word in words[:place] if word in "0123456789" or word in MOVES)
                state, moves = int(before.rstrip(MOVES)[-1]), before[len(before.rstrip(MOVES)) :]
                assert words[place] == str(STEP[state, MOVES.index(moves[-1])] if moves else state)
                states += 1
    assert states > 5


def walk_of_environment(logp):
    """A walk of two lines that an environment told, each token with this log-probability."""
    tokenizer, walk = build_walk_tokenizer(), Walk("told", 2, (1, 2) * 8, "short", is_told=True)
    ids, (text, _) = tokenizer.get_vocab(), written(7, (0, 1), walk)
    words = [*tokenizer.tokenize(text), "<eos>"]
    ids_nl, logp_nlv = torch.tensor([[ids[word] for word in words]]), torch.full((1, len(words), len(ids)), logp)
    rows = Sequences(ids_nl, torch.ones_like(ids_nl), len(words))
    return Sampled(walk, rows, rows.attention_nl.bool(), [words], [7], logp_nlv, ids)


def test_what_an_environment_wrote_is_neither_trained_on_nor_a_slip_of_the_policy():
    walks = walk_of_environment(math.log(0.9))
    assert [word for word, by_policy in zip(walks.words[0], walks.written_nt[0], strict=True) if not by_policy] == [
        walks.words[0][3],
        walks.words[0][8],
    ]
    keeps = (0.9**2 + 0.9**3) / 2  # number and countdown; the state is the environment's
    assert walks.policy().keeps == pytest.approx(keeps)
    untold = replace(walks, walk=replace(walks.walk, is_told=False))
    assert untold.policy().keeps == pytest.approx(0.9 * keeps)
    assert untold.written_nt.all()


def test_estimators_are_compared_at_the_moves_batch_by_batch():
    walks = walk_of_environment(-1.0)
    true_nt = torch.zeros(4, 10, dtype=torch.float64)
    true_nt[:, [1, 5]] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, -1.0], [2.0, 0.5]], dtype=torch.float64)
    rows = Sequences(*(part.expand(4, 10) for part in (walks.rows.ids_nl, walks.rows.attention_nl)), 10)
    walks = replace(walks, mask_nt=walks.mask_nt.expand(4, 10), rows=rows)
    measured = Measured(walks, None, torch.zeros(4), {}, true_nt, [torch.tensor([0, 1]), torch.tensor([2, 3])])
    adv_nt = torch.where(true_nt != 0, 2 * true_nt + 1, 7.0)
    assert measured.correlations(adv_nt) == pytest.approx([1.0, 1.0])
    adv_nt[2:] *= -1
    assert measured.correlations(adv_nt) == pytest.approx([1.0, -1.0])
    assert measured.last_n.tolist() == [9] * 4
    # The best lambda is chosen within its kind.
    means = {"gae 0.5": [0.1, 0.2], "gae 1": [0.3, 0.1], "sae 0.5": [0.9, 0.0], "sae 1": [0.4, 0.4]}
    series = {name: torch.tensor(values) for name, values in means.items()}
    assert [best_of(kind, series) for kind in ("gae", "sae")] == ["gae 1", "sae 0.5"]
