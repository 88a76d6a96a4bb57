"""Models as rewards in TRL's training: a judge, its cache, an async function of its verdicts, a reward model."""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from judge_server import Server, verdict
from spanwise.objective import Objective
from spanwise.rollouts.schema import score_columns
from tokenizers_small import byte_level
from trl_small import THIRD_PARTY, trainer

pytestmark = THIRD_PARTY
SOLVED = Objective("correct", pays="solution", options={"verify": "exact"})


def sure(part):
    """Whether a completion is sure of itself, as the stand-in judges it."""
    return float(any(f">0.{digit}" in part for digit in "6789"))


def answer(part, request, times):
    return verdict("yes" if sure(part) else "no", f"I read {part}")


async def awaited(blocks):
    return [sure(block["confidence"][""]) if block["confidence"] else None for block in blocks]


def trained(folder, objective):
    run = trainer(folder, extra={"objectives": [SOLVED, objective]})
    run.train()
    return run


def test_judge_cache_and_async_function_train_with_the_same_advantages(tmp_path):
    options = {"model": "m", "cache": str(tmp_path / "judge.sqlite"), "criterion": "Is it sure?"}
    with Server(answer).serving() as server:
        judge = Objective("judge", pays="confidence", if_missing=-1.0, options={**options, "base_url": server.url})
        first = trained(tmp_path / "a", judge)
        requests = len(server.requests)
        second = trained(tmp_path / "b", judge)
        assert len(server.requests) == requests
    function = trained(tmp_path / "c", Objective(awaited, pays="confidence", if_missing=-1.0, name="judge"))
    adv_nt = first.last_rollouts.advantages_nt
    assert (adv_nt != 0).any()
    for other in (second, function):
        assert torch.equal(adv_nt, other.last_rollouts.advantages_nt)
    logs = [run.state.log_history[0] for run in (first, second, function)]
    counts = [(log.get("cost/judge/calls"), log.get("cost/judge/cached")) for log in logs]
    assert counts == [(requests, 0), (0, requests), (None, None)]
    notes = score_columns(first.last_rollouts.reading.scores)["note/judge"]
    text = first.last_rollouts.reading.text
    own = [block["confidence"] and block["confidence"][""].removesuffix("<eos>") for block in text]
    assert notes == [part and f"I read {part}" for part in own]


def test_a_reward_model_trains_as_a_function_of_its_numbers(tmp_path):
    torch.manual_seed(0)
    tokenizer = byte_level(special=("<pad>",))
    tokenizer.pad_token = "<pad>"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5, **sizes
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def number(prompts, completions):
        texts = [prompt + text.removesuffix("<eos>") for prompt, text in zip(prompts, completions, strict=True)]
        with torch.no_grad():
            return [float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in texts]

    asked = Objective("reward_model", pays="solution", options={"model": str(tmp_path / "model"), "sees": "whole"})
    runs = trained(tmp_path / "a", asked), trained(tmp_path / "b", Objective(number, pays="solution", name="reward_model"))
    first, second = (run.last_rollouts.advantages_nt for run in runs)
    assert first.abs().max() > 0.1
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
