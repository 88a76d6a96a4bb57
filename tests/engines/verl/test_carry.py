"""Readings as text and back, and the advantages that come of them; no verl needed."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, read
from spanwise.engines.verl.carry import ChunkedCredit, Rows, credited, pack, unpack
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.score import Reward
from spanwise.step import Step, turn_rows
from tokenizers_small import byte_level

TOKENIZER = byte_level()
VOCABULARY = Vocabulary.from_tokenizer(TOKENIZER)
LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
BRIER = Objective("brier", pays="confidence", given="correct", baseline="outcome", if_missing=-1.0)
SCHEME = Scheme.preset("bae", LAYOUT, objectives=[Objective("correct", pays="solution", if_missing=0.0), BRIER])
BY_TURN = Scheme("bae", LAYOUT, [Objective("correct", pays="solution", scope="turn")])
RIGHT, SURE = "<answer>4</answer>", "<confidence>0.9</confidence>"
TEXTS = [RIGHT + SURE, f"<answer>5</answer>{SURE}", RIGHT, f"{RIGHT}<confidence>high</confidence>", "So"]


def test_a_batch_of_turns_without_any_sampled_token_gets_nothing():
    """A rejected batch: every rollout was read turn by turn, and none has a token that was sampled."""
    ids = TOKENIZER("tool says 4")["input_ids"]
    batch = Batch.jagged([ids], [0], sampled=[[False] * len(ids)], columns={"answer": ["4"]})
    nobody, turns = turn_rows(batch, BY_TURN)
    text = pack(read(nobody, BY_TURN, VOCABULARY), [len(ids)], masked=True, turns=turns)
    result = credited(Rows([text, text]), ["u", "u"], torch.zeros(2, len(ids)).bool(), Step(BY_TURN))
    assert torch.equal(result.adv_nt, torch.zeros(2, len(ids)))


def batch_of(*texts):
    """The outputs of one rollout, or the rollouts of one prompt."""
    ids = [TOKENIZER(text)["input_ids"] for text in texts]
    return Batch.jagged(ids, [0] * len(ids), columns={"answer": ["4"] * len(ids)})


def packed(*texts, scheme=SCHEME, **more):
    """A rollout as text."""
    batch = batch_of(*texts)
    return pack(read(batch, scheme, VOCABULARY), batch.mask_nt.sum(dim=1).tolist(), masked=True, **more)


class Tables(TorchDispatchMode):
    """Record the operations that allocate a table of numbers (4 bytes or more each) for all tokens of a batch."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.operations = tokens, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (tensor for tensor in (*args, *(kwargs or {}).values()) if isinstance(tensor, torch.Tensor))
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if isinstance(result, torch.Tensor) and result.element_size() >= 4 and result.numel() >= self.tokens:
            self.operations += [] if result.untyped_storage().data_ptr() in storages else [str(func)]
        return result


def test_a_step_makes_no_second_table_of_numbers_for_all_tokens():
    """Only the advantages are one, so the driver's memory is a few masks and its output."""
    rows, mask_nt = Rows([packed(text) for text in TEXTS] * 20), batch_of(*TEXTS).mask_nt.repeat(20, 1)
    with Tables(mask_nt.numel()) as tables:
        adv_nt = credited(rows, ["u"] * 100, mask_nt, Step(SCHEME)).adv_nt
    assert adv_nt.shape == mask_nt.shape
    assert tables.operations == []


@pytest.mark.parametrize("tokens", [1, 70, 150, 10_000])
@pytest.mark.parametrize("turns", [False, True])
def test_shares_of_a_batch_get_what_the_whole_batch_gets(turns, tokens):
    """Groups, outputs of a rollout and turns may lie in different shares; padding and rejected tokens are in one of them."""
    scheme = BY_TURN if turns else SCHEME
    ids = [TOKENIZER(text)["input_ids"] for text in (*TEXTS, *TEXTS)]
    sampled = [[not (turns and n % 2 and 2 <= t < 5) for t in range(len(ids_t))] for n, ids_t in enumerate(ids)]
    texts = []
    for rows in (*([n] for n in range(8)), [8, 9]):  # the last rollout has two outputs
        columns = {"answer": ["4"] * len(rows)}
        batch = Batch.jagged([ids[n] for n in rows], [0] * len(rows), sampled=[sampled[n] for n in rows], columns=columns)
        split, places = turn_rows(batch, scheme) if turns else (batch, None)
        text = pack(read(split, scheme, VOCABULARY), [len(ids[n]) for n in rows], masked=True, turns=places)
        texts += [text] * len(rows)
    mask_nt = torch.zeros(12, max(map(len, ids)), dtype=torch.long)
    for n, sampled_t in enumerate(sampled):
        mask_nt[n, : len(sampled_t)] = torch.tensor(sampled_t).long()
    mask_nt[3, 8:] = 0  # rejected
    session, step = [*range(8), 8, 8, "pad", "pad"], [0] * 9 + [1, 0, 0]
    rows = Rows([*texts, *texts[:2]], session=session, output_number=step, padding=[False] * 10 + [True] * 2)
    uids = [*"ababababaa", "pad0", "pad1"]
    whole, shares = credited(rows, uids, mask_nt, Step(scheme)), ChunkedCredit.of(rows, uids, Step(scheme))
    adv_nt = torch.full(mask_nt.shape, torch.nan)
    for share in shares.split(tokens):
        width = max(len(ids[n % 10]) for n in share)  # verl pads to the longest row of a share
        adv_nt[list(share), :width] = shares.advantages(share, mask_nt[list(share), :width], scheme)
    assert torch.equal(adv_nt.nan_to_num(), whole.adv_nt)
    assert adv_nt.nan_to_num().any()
    assert shares.batch.metrics == pytest.approx(whole.result.metrics, nan_ok=True)
    assert {1: 12, 10_000: 1}.get(tokens, len(shares.split(tokens))) == len(shares.split(tokens))


@pytest.mark.parametrize("state", [torch.Tensor.numpy, torch.Tensor.tolist, lambda board: tuple(map(tuple, board.tolist()))])
def test_states_are_told_apart_by_all_that_is_in_them(state):
    """A board of 40 by 40, which differs in the middle."""
    boards = torch.zeros(3, 40, 40, dtype=torch.long)
    boards[2, 20, 20] = 1
    first, second, third = unpack([packed(TEXTS[0], anchor=[state(board)]) for board in boards], SCHEME).anchor
    assert hash(first) == hash(second)
    assert first == second != third


@pytest.mark.parametrize("state", [{"a", "b"}, object(), [b"door"]])
def test_a_state_whose_text_may_differ_where_it_is_equal_is_refused(state):
    with pytest.raises(RecipeError, match="Use text, numbers, or lists"):
        packed(TEXTS[0], anchor=[state])


BOTH = [Objective("correct", pays="all"), Objective("brier", pays="all", given="correct")]
PPO = Scheme.preset("gae", Layout({"all": ["answer", "confidence"]}), objectives=BOTH, lam=0.5, per=1.0)
SURE_AND_WRONG, SURE_AND_RIGHT = (f"<answer>{digit}</answer><confidence>1</confidence>" for digit in (5, 4))


def critic_rows(*texts):
    """Completions of one prompt under a critic, with a value of 1/4 at every token, and 7 where there is none."""
    mask_nt = batch_of(*texts).mask_nt
    return Rows([packed(text, scheme=PPO) for text in texts], tokens={"value_nt": torch.where(mask_nt, 0.25, 7.0)}), mask_nt


@pytest.mark.parametrize("critic", [False, True])
def test_a_rejected_token_gets_nothing_and_is_still_read_and_run_over(critic):
    """Rejection concerns the loss only: the rollout had that token, so the other tokens keep their credit."""
    texts = Rows([packed(text) for text in TEXTS]), batch_of(*TEXTS).mask_nt
    rows, mask_nt = critic_rows(SURE_AND_WRONG, SURE_AND_RIGHT) if critic else texts
    scheme, fewer_nt, uids = PPO if critic else SCHEME, mask_nt.clone(), ["u"] * len(mask_nt)
    fewer_nt[0, 1] = fewer_nt[1] = False
    full, rejected = credited(rows, uids, mask_nt, Step(scheme)), credited(rows, uids, fewer_nt, Step(scheme))
    assert torch.equal(rejected.adv_nt, torch.where(fewer_nt, full.adv_nt, 0.0))
    assert not critic or torch.equal(rejected.return_nt, torch.where(fewer_nt, full.return_nt, 0.0))


def test_padding_is_no_completion_of_a_critic_and_one_that_has_diverged_stops_the_run():
    rows, mask_nt = critic_rows(SURE_AND_WRONG, SURE_AND_RIGHT, SURE_AND_WRONG)
    mask_nt[2] = False
    rows.tokens["value_nt"][2] = torch.nan
    padded = credited(replace(rows, padding=[False, False, True]), ["u", "u", "pad0"], mask_nt, Step(PPO))
    pair = Rows(rows.packed[:2], tokens={"value_nt": rows.tokens["value_nt"][:2]})
    unpadded = credited(pair, ["u"] * 2, mask_nt[:2], Step(PPO))
    assert torch.equal(padded.return_nt[:2], unpadded.return_nt)
    assert torch.equal(padded.adv_nt[:2], unpadded.adv_nt)
    assert not padded.return_nt[2].any()
    pair.tokens["value_nt"][1, 2] = torch.nan  # a critic that has diverged stops the run
    with pytest.raises(RewardError, match="value"):
        credited(pair, ["u"] * 2, mask_nt[:2], Step(PPO))


def test_a_rollout_of_several_outputs_is_no_sequence():
    text, mask_nt = packed(SURE_AND_WRONG, SURE_AND_RIGHT, scheme=PPO), batch_of(SURE_AND_WRONG, SURE_AND_RIGHT).mask_nt
    rows = Rows([text, text], session=["x", "x"], output_number=[0, 1], tokens={"value_nt": torch.zeros(mask_nt.shape)})
    with pytest.raises(RecipeError, match="gae"):
        credited(rows, ["u"] * 2, mask_nt, Step(PPO))


def test_what_cannot_be_read():
    with pytest.raises(AlignmentError, match="has only 3"):
        unpack([packed(TEXTS[0])], SCHEME).blocks_of(SCHEME, torch.ones(1, 3).bool(), range(1))


def test_what_a_judge_says_of_a_reward_is_carried_beside_it():
    """A rollout whose rewards say nothing carries no notes, and a batch of such rollouts has none."""
    batch, recorded = batch_of(*TEXTS[:2]), {"correct": Reward.of([1.0, 0.0], notes=["it says 4", None])}
    reading = read(batch, SCHEME, VOCABULARY, recorded=recorded)
    texts = [pack(reading, batch.mask_nt.sum(dim=1).tolist(), masked=True)] * 2 + [packed(TEXTS[2])]
    notes = unpack(texts, SCHEME, [1, 0, 0]).reading.scores.note_nm
    assert notes.tolist() == [[None, None], ["it says 4", None], [None, None]]
    assert unpack(texts[2:], SCHEME).reading.scores.note_nm is None
