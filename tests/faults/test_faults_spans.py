"""Masks, spans and tokens."""

import re
from dataclasses import replace

import torch

from faults.catches import catches, equals, refuses
from helpers import assert_close
from oracles import owners_of_tokens, slow_segment
from spanwise import Batch, Fault, Layout, Objective, Scheme, Spans, Vocabulary, advantages, credit_batch, find_blocks, read
from spanwise.credit import Trajectory, Turn
from spanwise.credit.spread import restrict
from spanwise.engines.sample import prompt_ids
from spanwise.modes.sequences import cut_off
from spanwise.score import Reward
from spanwise.score.score import score_one
from tokenizers_small import byte_level
from trl_small import tokenizer as small_tokenizer

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
TAGS = (b"<eos>", b"<answer>", b"</answer>", b"<confidence>", b"</confidence>")
PIECES = (*TAGS, b"4", b".9", "é".encode(), b"</answer>.<", b"confidence>", b".\n")
VOCABULARY = Vocabulary(PIECES)
PLAIN = [1, 5, 2, 3, 6, 4, 0]  # <answer>4</answer><confidence>.9</confidence><eos>
STRADDLING = [1, 5, 8, 9, 6, 4, 0]  # the third token closes the answer and opens the confidence


def located(ids, layout=LAYOUT, vocabulary=VOCABULARY):
    rows = torch.tensor([ids])
    return find_blocks(rows, torch.ones_like(rows), layout=layout, vocabulary=vocabulary)


def blocks_of(ids, vocabulary=VOCABULARY):
    return located(ids, vocabulary=vocabulary)[0].block_nt[0].tolist()


def format_reward(texts):
    return score_one(Objective("format", "solution"), texts, columns={}, scored={}).value_n.tolist()


WORDS = Vocabulary((b"he", b"llo", b"hello", b"Hi?", b"yes", b"\n"))


def sampled(trajectory):
    """The tokens that train, in order."""
    pairs = (pair for branch in trajectory.branches() for pair in zip(branch.response_ids, branch.mask, strict=True))
    return [token for token, flag in pairs if flag]


def test_f24_what_was_sampled_is_never_tokenised_again():
    """huggingface/trl#5224. Between turns text was decoded and encoded again: he + llo came back as hello."""
    rows = Trajectory("a", 0, (Turn([3], [0, 1], [1, 1]), Turn([3, 2, 3], [4], [1])))  # the second prompt was encoded again
    catches(equals([0, 1, 4]), sampled(rows.merged()), [2, 4])  # encoded again
    refuses(lambda: rows.merged(WORDS))


def test_f25_what_the_template_adds_after_a_turn_is_not_trained():
    """verl-project/verl#3720, #6719. The engine stops before the newline that the chat template puts behind a turn."""
    first, second = Turn([3], [0, 1], [1, 1]), Turn([3, 0, 1, 5, 3], [4], [1])
    (branch,) = Trajectory("a", 0, (first, second)).merged(WORDS).branches()
    assert branch.response_ids == (0, 1, 5, 3, 4)
    # the turn as the template writes it, newline and all
    catches(equals((1, 1, 0, 0, 1)), branch.mask, (1, 1, 1, 0, 1))


def test_f27_boundaries_are_in_bytes_of_tokens_and_not_in_characters():
    """opendilab/LightRFT#53. A boundary counted in characters landed on the next token in 16 of 16 cases; training ran."""
    ids = [7, 7, 7, 1, 5, 2, 10, 3, 6, 4, 0]
    tokens = [PIECES[i] for i in ids]
    cut = b"".join(tokens).decode().index("<confidence>")
    in_characters = [int(sum(map(len, tokens[:t])) >= cut) for t in range(len(ids))]  # bytes counted against characters
    assert owners_of_tokens(tokens, slow_segment(b"".join(tokens), LAYOUT)[0]) == [0] * 7 + [1] * 4
    catches(equals([0] * 7 + [1] * 4), blocks_of(ids), in_characters)


def wholly_inside(ids):
    """The block of each token that lies in one block with all its bytes; -1 of one that straddles."""
    owners = iter(slow_segment(b"".join(PIECES[i] for i in ids), LAYOUT)[0])
    inside = [{next(owners) for _ in PIECES[i]} for i in ids]
    return [min(blocks) if len(blocks) == 1 else -1 for blocks in inside]


def test_f28_a_token_across_the_border_is_counted_once():
    """huggingface/trl#5885, #5461. A token across a border was counted on one side of the sum and not on the other."""
    batch = Batch.jagged([STRADDLING, PLAIN], [0, 0])
    scheme = Scheme("bae", LAYOUT, [Objective("environment", name, name=name) for name in LAYOUT.names])
    recorded = {"solution": Reward.of([1.0, 0.0]), "confidence": Reward.of([0.0, 1.0])}
    credit = credit_batch(read(batch, scheme, VOCABULARY, recorded=recorded), batch, scheme)

    def check(find):
        spans = Spans.of_blocks(LAYOUT.names, torch.tensor([find(STRADDLING), find(PLAIN)]))
        adv_nt = advantages(credit, spans, scheme, dtype=torch.float64)
        assert bool((adv_nt != 0).all())
        assert_close(adv_nt[0, [0, -1]], [0.5 / 3, -0.5 / 4], 1e-12)
        assert_close(adv_nt.sum(dim=1), [0.0, 0.0], 1e-12)

    catches(check, blocks_of, wholly_inside)


def test_f29_no_token_lies_between_two_spans():
    """ohdearquant/lattice#1545. A merge across the border (`.memory`) let the mask begin one token late."""
    catches(equals([0, 0, 0, 1, 1, 1, 1]), blocks_of(STRADDLING), wholly_inside(STRADDLING))  # with its first byte


def test_f30_a_span_decodes_to_its_text():
    """OpenHands/codescout#60. A marker was taken to be two tokens where it is four, and wrong tokens were trained."""
    vocabulary = Vocabulary.from_tokenizer(byte_level())
    text = b"So <answer>4</answer><confidence>0.9</confidence>"
    ids = [vocabulary.pieces.index(bytes([byte])) for byte in text]  # every tag is many tokens
    start = text.index(b"</answer>") + 2  # a tag of two tokens

    def check(k_t):
        pieces = [b"".join(vocabulary.pieces[i] for i, k in zip(ids, k_t, strict=True) if k == block) for block in (0, 1)]
        assert pieces == [b"So <answer>4</answer>", b"<confidence>0.9</confidence>"]

    catches(check, blocks_of(ids, vocabulary=vocabulary), [int(t >= start) for t in range(len(ids))])


def test_f31_an_inverted_mask_and_unbalanced_tags_are_told():
    """mll-lab-nu/RAGEN#71. The mask was inverted, states trained and actions not; and markers were unbalanced."""
    ids_nt, mask_nt = torch.tensor([[1, 5, 2, 7, 7, 3, 6, 4]]), torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]]).bool()
    spans, _ = find_blocks(ids_nt, mask_nt, layout=LAYOUT, vocabulary=VOCABULARY)
    # the faulty one trains states
    catches(refuses, lambda: restrict(spans, ~mask_nt), lambda: replace(spans, block_nt=(~mask_nt).long() - 1))
    assert int(located([1, 5, 3, 6, 4])[0].fault_n[0]) & int(Fault.TRUNCATED | Fault.NESTED)


def test_f32_the_first_and_the_last_token_of_every_span():
    """verl-project/verl#3287. A mask was shifted by one at the first token of the response."""
    catches(equals([0] * 3 + [1] * 4), blocks_of(PLAIN), [0, *blocks_of(PLAIN)[:-1]])


def test_f33_what_ends_a_completion_belongs_to_one_block():
    """huggingface/trl#5988. The stop token fell outside the assistant's mask, so nothing taught the model to stop."""

    def check(find):
        assert find(PLAIN)[-1] == 1
        assert find([1, 5, 2, 0]) == [0] * 4  # of the last block that is there

    def up_to_the_tag(ids):
        last = max(t for t, i in enumerate(ids) if i in (2, 4))
        return [k if t <= last else -1 for t, k in enumerate(blocks_of(ids))]

    catches(check, blocks_of, up_to_the_tag)


def test_f35_a_prompt_is_as_long_as_its_tokens():
    """huggingface/trl#6105. `apply_chat_template` began to return a dict, and its two keys became the prompt's length."""
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "12+34="}]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True)
    catches(equals(6), len(prompt_ids(tokenizer, [messages])[0]), len(theirs))


def test_f36_a_mask_is_never_made_from_ids():
    """huggingface/trl#6357, #4970. Padding had the id of the end of sequence, and with it the end was masked away."""
    ids_nt = torch.tensor([[1, 5, 2, 0, 0, 0]])  # ends with 0 and is padded with 0
    sampled_nt = torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()

    def check(mask_nt):
        spans, _ = find_blocks(ids_nt, mask_nt, layout=LAYOUT, vocabulary=VOCABULARY)
        assert spans.block_nt.tolist() == [[0, 0, 0, 0, -1, -1]]

    catches(check, sampled_nt, ids_nt != 0)


def test_f37_any_of_several_ends_is_an_end():
    """huggingface/trl#7039. With several end tokens 97 % of the finished answers counted as cut off."""
    batch = Batch.jagged([[5, 2], [5, 3], [5, 5]], [0, 0, 0], columns={"completion_ids": [[5, 2], [5, 3], [5, 5]]})
    catches(equals([False, False, True]), cut_off(batch, [2, 3]).tolist(), cut_off(batch, [2]).tolist())


def test_f38_tags_that_are_special_tokens_are_read():
    """huggingface/trl#2897, verl#1724, unsloth#2980. Decoding without special tokens took the tags away before scoring."""
    tokenizer = byte_level(special=("<answer>", "</answer>", "<confidence>", "</confidence>"))
    ids = tokenizer.encode("<answer>4</answer><confidence>0.9</confidence>", add_special_tokens=False)
    _, (text,) = located(ids, vocabulary=Vocabulary.from_tokenizer(tokenizer))
    decoded = re.findall("<answer>(.*?)</answer>", tokenizer.decode(ids, skip_special_tokens=True))
    catches(equals(["4"]), [text["solution"]["answer"]], decoded)


def test_f39_a_tag_that_the_prompt_opens_counts():
    """huggingface/trl#6966, open-r1#560. With <think> in the prompt the format reward was 0 for every completion."""
    vocabulary = Vocabulary((b"so", b"</think>", b"<answer>", b"4", b"</answer>"))

    def rewarded(prefilled):
        spans, texts = located([0, 1, 2, 3, 4], Layout({"solution": ["think", "answer"]}, prefilled=prefilled), vocabulary)
        return int(spans.fault_n[0]), format_reward(texts)

    catches(equals((0, [1.0])), rewarded("think"), rewarded(None))


def test_f40_repeated_nested_and_misplaced_tags_earn_no_format_reward():
    """open-r1#359. Repeated and nested blocks of tags still earned the reward for the format."""
    think, answer = "<think>a</think>", "<answer>4</answer>"
    good, nested = think + answer, "<think>a<answer>4</answer></think>"
    texts = [good, good + good, nested, answer + think, think, f"{think}<answer>4"]
    layout, vocabulary = Layout({"solution": ["think", "answer"]}), Vocabulary(tuple(bytes([byte]) for byte in range(256)))
    ours = [format_reward(located(list(text.encode()), layout, vocabulary)[1])[0] for text in texts]
    pattern = [float(bool(re.search(r"<think>.*</think>.*<answer>.*</answer>", text))) for text in texts]
    catches(equals([1.0, *[0.0] * 5]), ours, pattern)


def test_f41_a_place_without_a_block_stays_without_one():
    """huggingface/trl#2127. Labels of steps were cast to bool, and -100, which means none, became True."""
    block_nt = torch.tensor([[-1, 0, 1, -1]])
    ours, theirs = (Spans.of_blocks(("a", "b"), k_nt).length_nk.tolist() for k_nt in (block_nt, block_nt.bool().long()))
    catches(equals([[1, 1]]), ours, theirs)


def test_f42_padding_on_the_left_and_on_the_right_give_one_credit():
    """huggingface/trl#2708, #6819, OpenRLHF#217. Padding on the left without a mask of its own changed every number."""
    scheme, padding = Scheme("bae", LAYOUT, [Objective("environment", "solution", name="won")]), [0] * 4

    def run(row, flags):
        batch = Batch([0, 0], torch.tensor([row, PLAIN]), torch.tensor([flags, [1] * 7]).bool())
        reading = read(batch, scheme, VOCABULARY, recorded={"won": Reward.of([1.0, 0.0])})
        return advantages(credit_batch(reading, batch, scheme), reading.spans, scheme)

    right = run([1, 5, 2, *padding], [1, 1, 1, *padding])

    def check(left):
        assert_close(left[0, 4:], right[0, :3], 0)
        assert_close(left[1], right[1], 0)
        assert not left[0, :4].any()

    catches(check, run([*padding, 1, 5, 2], [*padding, 1, 1, 1]), run([*padding, 1, 5, 2], [1] * 7))
