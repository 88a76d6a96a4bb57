"""Advantages of Tinker's datums: of dicts, and of tinker's and SkyRL's own types if they are installed."""

import numpy as np
import pytest
import torch

import conformance
from spanwise import Layout, Scheme
from spanwise.engines.tinker import credit_datums
from spanwise.errors import AlignmentError
from spanwise.segment import Vocabulary
from spanwise.types import Status

PIECES = [b"<answer>", b"4", b"5", b"</answer>", b"<confidence>", b".9", b".5", b"</confidence>", b"?", b"#"]
VOCABULARY = Vocabulary(tuple(PIECES))
RLOO = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")


def ids_of(answer, confidence):
    """Two prompt tokens, then what the model wrote: solution of three tokens, confidence of three."""
    return [8, 9, 0, answer, 3, 4, confidence, 7], [0, 0, 1, 1, 1, 1, 1, 1]


def as_dict(ids, mask):
    """As a client sends it: the input drops the last token, the targets the first."""
    inputs = {"target_tokens": ids[1:], "mask": [float(flag) for flag in mask[1:]], "advantages": [0.0] * (len(ids) - 1)}
    return {"model_input": ids[:-1], "loss_fn_inputs": {**inputs, "logprobs": [-0.5] * (len(ids) - 1)}}


def field(record, name):
    return record[name] if isinstance(record, dict) else getattr(record, name)


def advantages_of(datum):
    return field(field(datum, "loss_fn_inputs"), "advantages")


def numbers(datum):
    adv = advantages_of(datum)
    is_plain = isinstance(adv, list | torch.Tensor | np.ndarray)
    return [float(value) for value in (adv if is_plain else field(adv, "data"))]


@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")  # leaving list elements out is free
@pytest.mark.parametrize("name", ["blocks", "waits", "fields"])
def test_it_gives_every_token_the_advantage_of_the_file_and_changes_nothing_else(tmp_path, name):
    """The file's other recipes pay turns, which Tinker's datums do not have."""
    rows, expected = conformance.expected(name)
    groups = [[n for n, row in enumerate(rows) if row["group"] == group] for group in ("g4", "g3", "g2", "g1")]
    datums = [as_dict(row["prompt"] + row["ids"], [0] * len(row["prompt"]) + row["sampled"]) for row in rows]
    columns = {"answer": [rows[members[0]]["answer"] for members in groups]}
    rule, vocabulary = conformance.scheme(name, tmp_path), Vocabulary.from_tokenizer(conformance.tokenizer())
    results = credit_datums([[datums[n] for n in members] for members in groups], rule, vocabulary, columns=columns)
    for members, credited in zip(groups, results, strict=True):
        for n, (datum,) in zip(members, credited, strict=True):
            assert numbers(datum)[len(rows[n]["prompt"]) - 1 :] == pytest.approx(expected[n], abs=1e-6)
            assert not any(numbers(datums[n]))  # the input is not changed
            inputs, original = ({**part["loss_fn_inputs"], "advantages": None} for part in (datum, datums[n]))
            assert inputs == original


def test_a_rollout_of_several_datums_has_one_vote():
    """Rewards 1 (three datums), 0, 0: each token of the first gets 1 over its 18 tokens, of the others -.5 over 6."""
    several = [as_dict(*ids_of(1, 5))] * 3
    others = [as_dict(*ids_of(2, 5)), [as_dict(*ids_of(2, 6))]]
    credited = credit_datums([[several, *others]], RLOO, VOCABULARY, rewards={"correct": [[1.0, 0.0, 0.0]]})
    assert [len(rollout) for rollout in credited[0]] == [3, 1, 1]
    for datum in credited[0][0]:
        assert numbers(datum) == pytest.approx([0.0] + [1 / 18] * 6)
    for rollout in credited[0][1:]:
        assert numbers(rollout[0]) == pytest.approx([0.0] + [-0.5 / 6] * 6)


def test_a_reward_that_is_not_there_joins_no_baseline_and_groups_do_not_mix():
    groups = [[as_dict(*ids_of(1, 5))] * 3, [as_dict(*ids_of(1, 5))] * 2]
    credited = credit_datums(groups, RLOO, VOCABULARY, rewards={"correct": [[1.0, Status.TIMEOUT, 0.0], [5.0, 5.0]]})
    sums = [[sum(numbers(datum)) for datum in rollout] for group in credited for rollout in group]
    assert sums == [[pytest.approx(1.0)], [0.0], [pytest.approx(-1.0)], [0.0], [0.0]]


def plain(kind):
    """A datum without advantages, its numbers as torch, numpy or a client have them."""
    numbers = lambda inputs: {name: kind(inputs[name]) for name in ("target_tokens", "mask")}  # noqa: E731
    return lambda datum: {"loss_fn_inputs": numbers(datum["loss_fn_inputs"])}


def of_tinker(datum):
    tinker = pytest.importorskip("tinker")
    inputs = {name: torch.tensor(values) for name, values in datum["loss_fn_inputs"].items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(datum["model_input"]), loss_fn_inputs=inputs)


def of_skyrl(datum):
    types = pytest.importorskip("skyrl.tinker.types")
    inputs = {name: types.TensorData(data=values) for name, values in datum["loss_fn_inputs"].items()}
    inputs["weights"] = inputs.pop("mask")
    chunk = types.EncodedTextChunk(tokens=datum["model_input"])
    return types.Datum(loss_fn_inputs=types.LossFnInputs(**inputs), model_input=types.ModelInput(chunks=[chunk]))


KINDS = {
    "torch": plain(torch.tensor),
    "numpy": plain(np.array),
    "dict": plain(lambda values: {"data": values, "dtype": "int64" if isinstance(values[0], int) else "float32"}),
    "tinker": of_tinker,
    "skyrl": of_skyrl,
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_stay_of_their_kind(kind):
    group = [KINDS[kind](as_dict(*ids_of(answer, 5))) for answer in (1, 2)]
    (((first,), (second,)),) = credit_datums([group], RLOO, VOCABULARY, rewards={"correct": [[1.0, 0.0]]})
    assert type(first) is type(group[0])
    assert numbers(first) == pytest.approx([0.0] + [1 / 6] * 6)
    assert numbers(second) == pytest.approx([0.0] + [-1 / 6] * 6)
    advantages = advantages_of(first)
    assert kind not in ("torch", "numpy") or str(advantages.dtype).endswith("float32")
    assert kind != "dict" or advantages["dtype"] == "float32"
    assert kind != "tinker" or (advantages.dtype, advantages.shape) == ("float32", [7])
    assert kind != "skyrl" or type(first).model_validate(first.model_dump()) == first


@pytest.mark.parametrize(
    ("groups", "options", "match"),
    [
        ([[0, {"target_tokens": [1, 2]}]], {"rewards": {"correct": [[1.0, 0.0]]}}, "Datum 0 of rollout 1"),  # and no mask
        ([[{"target_tokens": [1, 2], "weights": [1.0]}]], {"rewards": {"correct": [[1.0]]}}, "Datum 0 of rollout 0"),
        ([[0, 0]], {"rewards": {"correct": [[1.0]]}}, "rewards of 'correct'"),
        ([[0]], {"columns": {"answer": ["4", "4"]}}, "Column 'answer'"),
    ],
)
def test_what_is_not_nested_as_the_groups_are_is_refused(groups, options, match):
    groups = [[{"loss_fn_inputs": datum} if datum else as_dict(*ids_of(1, 5)) for datum in group] for group in groups]
    with pytest.raises(AlignmentError, match=match):
        credit_datums(groups, RLOO, VOCABULARY, **options)
