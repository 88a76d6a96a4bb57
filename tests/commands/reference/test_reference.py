"""`spanwise reference`: the mean over completions of the starting policy, against one pass for each of them."""

import statistics

import pytest
from rich.console import Console

from spanwise.commands.reference import reference as room
from spanwise.engines.sample import prompt_ids, sample
from spanwise.errors import RecipeError
from spanwise.recipe import load
from spanwise.tasks import Task
from trl_small import LAYOUT, PIECES, THIRD_PARTY, policy, prompts, tokenizer

pytestmark = THIRD_PARTY


def test_the_reference_is_the_mean_over_those_that_ended(tmp_path, monkeypatch):
    model, encoder = policy(), tokenizer()
    model.save_pretrained(tmp_path)
    without_padding = tokenizer()
    without_padding.pad_token = None  # as in Llama 3
    without_padding.save_pretrained(tmp_path)
    task = Task("confidence", str(tmp_path), prompts(4), prompts(2), LAYOUT, 12)
    monkeypatch.setattr(room, "make_task", lambda *_: task)
    recipe = load(None, {"laser": {"token": "?", "beta": 1.0}, "seed": 3, "temperature": 2.0})
    measured = room.reference(recipe, prompts=3, samples=8, console=Console(quiet=True))

    questions = task.train["prompt"][:3]
    ids_nt, mask_nt = sample(model, encoder, questions, samples=8, max_new_tokens=12, temperature=2.0, seed=3)
    starts = [row for row in prompt_ids(encoder, questions) for _ in range(8)]
    logps = []
    for start, ids, mask in zip(starts, ids_nt, mask_nt, strict=True):
        row = [*start, *ids[mask].tolist()]
        if row[-1] == encoder.eos_token_id:
            logits = model(ids.new_tensor([row])).logits[0, -1] / 2
            logps.append(2 * float(logits.log_softmax(dim=-1)[PIECES.index("?")].detach()))
    assert 0 < len(logps) < 24
    figures = [statistics.mean(logps), statistics.stdev(logps)]
    assert [measured["reference"], measured["std"]] == pytest.approx(figures, abs=1e-5)
    told = {"token": "?", "id": PIECES.index("?"), "temperature": 2.0, "completions": len(logps)}
    assert measured.items() >= told.items()
    with pytest.raises(RecipeError, match="no laser section"):
        room.reference(load(None, {}), prompts=1, samples=1, console=Console(quiet=True))
