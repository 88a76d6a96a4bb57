"""The run's own critic: which it is, what it says before every token, what is refused."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from spanwise.errors import DataError, RecipeError
from spanwise.fidelity.rerolls import FirstBlocks, own_critic, own_critic_folder, values
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.critic import ValueModel
from spanwise.tasks.embedded import build_model, build_tokenizer


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer()
    return build_model(tokenizer, 0).eval(), tokenizer


def saved(tiny, folder, *, names=("return",), **config):
    critic = ValueModel.of_policy(tiny[0], names, CriticConfig(**config))
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.model.score.weight, std=0.3)
    critic.save(folder, tiny[1])
    return critic


@pytest.fixture
def blocks(tiny):
    heads = [tiny[1](prompt)["input_ids"] for prompt in ("1+1_____=", "7=", "2*3-1__=")]
    ids_nt = torch.randint(5, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    return FirstBlocks(torch.arange(3), heads, ids_nt, torch.ones(3, 6).bool(), torch.ones(3).double())


BINS = {"head": "hl_gauss", "bins": 7, "value_range": (-1.0, 2.0)}


@pytest.mark.parametrize(
    ("names", "config"), [(("return",), {}), (("calibration", "correct"), {}), (("return",), BINS)], ids=str
)
def test_values_are_those_after_reading_the_prefix_alone(tiny, tmp_path, blocks, names, config):
    """One number, that of the reward among two, and the expectation over seven bins."""
    saved(tiny, tmp_path / "critic", names=names, **config)
    objectives = ["correct"] if len(names) == 1 else ["correct", "calibration"]
    critic, stream = own_critic(tmp_path / "critic", tiny[1], objectives)
    said_nt = values(critic, blocks, stream=stream)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32).eval()
    centre_b = -1 + 3 / 7 * (torch.arange(7) + 0.5)
    for n, head in enumerate(blocks.heads):
        for t in range(6):
            ids = torch.tensor([[*head, *blocks.ids_nt[n, :t].tolist()]])
            with torch.no_grad():
                logits = plain(input_ids=ids).logits[0, -1]
            expected = logits.softmax(dim=0) @ centre_b if config else logits[len(names) - 1]
            assert float(said_nt[n, t]) == pytest.approx(float(expected), abs=1e-5)


def test_where_the_critic_lies(tiny, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    for folder in (tmp_path / "run", checkpoints / "checkpoint-2"):
        saved(tiny, folder / "critic")
    for folder in (tmp_path / "run" / "model", checkpoints / "checkpoint-4"):
        folder.mkdir()
    assert own_critic_folder(tmp_path / "run" / "model") == tmp_path / "run" / "critic"
    assert own_critic_folder(checkpoints / "checkpoint-2") == checkpoints / "checkpoint-2" / "critic"
    assert own_critic_folder(checkpoints / "checkpoint-4") is None


def test_what_is_refused(tiny, tmp_path):
    place = tmp_path / "critic"
    saved(tiny, place)
    with pytest.raises(RecipeError, match=r"correct \+ calibration"):
        own_critic(place, tiny[1], ["correct", "calibration"])
    saved(tiny, place, names=("a", "b"))
    with pytest.raises(RecipeError, match="a, b"):
        own_critic(place, tiny[1], ["a", "b"])
    (place / "critic.json").write_text("{}")
    with pytest.raises(DataError, match="head"):
        own_critic(place, tiny[1], ["correct"])
