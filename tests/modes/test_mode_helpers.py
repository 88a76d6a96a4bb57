"""Small helpers of modes on rows that one can check by hand, and the log-probability after an end on small models."""

import pytest
import torch

from critic_small import TRUNKS, policy
from spanwise import Batch, Layout, RecipeError, Scheme, Vocabulary, read
from spanwise.modes.critic.config import returns
from spanwise.modes.critic.critic import megabytes
from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.logps import Appended, end_logp, reserved_id
from spanwise.modes.parts import token_logp, with_token
from spanwise.modes.sequences import cut_off, sampled_end, sequences
from spanwise.tasks.embedded import build_tokenizer


def completions(*rows, **fields):
    return Batch.jagged(list(rows), [0] * len(rows), columns={"completion_ids": list(rows)}, **fields)


def test_a_critic_with_one_value_is_fitted_to_the_reward():
    vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
    batch = Batch.jagged([[0, 1, 3]], [0], columns={"answer": ["4"]}, value_nt=torch.tensor([[0.5, 0.5, 0.8]]))
    scheme = Scheme.preset("gae", Layout({"all": ["answer"]}))
    assert returns(read(batch, scheme, vocabulary), batch, scheme, lam=1.0)[0].tolist() == [[1.0, 1.0, 1.0]]


def test_trained_weights_take_four_times_their_size():
    assert megabytes(torch.nn.Linear(1000, 250, bias=False)) == 4.0


def test_the_reserved_token_is_no_text():
    assert reserved_id(Laser("<unk>"), build_tokenizer(), size=61, ends=[1]) == 2
    for token in ("<|vision_start|>", 400, "7", "<eos>", 0):  # nothing, nothing, text, an end, padding
        with pytest.raises(RecipeError):
            reserved_id(Laser(token), build_tokenizer(), size=61, ends=[1])


def test_the_loss_of_the_score_is_split_off_behind_trained_tokens_alone():
    logp_nt, mask_nt = torch.tensor([[-1.0, -20.0], [-1.0, -2.0]]), torch.tensor([[1, 0], [0, 0]])
    old_nt, adv_nt = torch.tensor([[-1.5, -13.0], [-1.0, -2.0]]), torch.tensor([[0.5, 0.01], [0.6, 0.6]])
    old_nt, adv_nt, error_nt = Appended.parted(logp_nt, old_nt, adv_nt, mask_nt)
    assert (old_nt.tolist(), adv_nt[0].tolist()) == ([[-1.5, -20.0], [-1.0, -2.0]], [0.5, 0.0])
    assert float(error_nt.sum()) == pytest.approx(0.49)


def test_a_column_of_minus_one_is_no_column():
    column_n = torch.tensor([1, -1])
    logp_n = token_logp(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), column_n)
    assert logp_n.nan_to_num(9.0).tolist() == [-2.0, 9.0]
    assert with_token(torch.zeros(2, 2), column_n, torch.tensor([3.0, 4.0])).tolist() == [[0.0, 3.0], [0.0, 0.0]]


def test_prompts_and_completions_lie_side_by_side():
    ids_nt = torch.tensor([[5, 6, 0], [7, 0, 0]])
    output = {"prompt_ids": torch.tensor([[1], [1]]), "prompt_mask": torch.ones(2, 1).long(), "completion_ids": ids_nt}
    rows = sequences(output, completions([5, 6], [7]))
    assert rows.ids_nl.tolist() == [[1, 5, 6], [1, 7, 0]]
    assert rows.attention_nl.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert rows.end_n.tolist() == [2, 1]


def test_an_end_that_a_tool_wrote_is_neither_cut_off_nor_sampled():
    batch = completions([5, 2], [5], [5, 2], sampled=[[1, 1], [1], [1, 0]])
    assert cut_off(batch, [2]).tolist() == [False, True, False]
    assert sampled_end(batch, [2]).tolist() == [True, False, False]


ROWS = [[5, 6, 7, 8, 9, 1], [5, 1], [3, 4, 1]]


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_padding_and_dropout_change_no_log_probability_after_an_end(name, temperature):
    model = policy(name).eval()
    logits_rv = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1].detach() for row in ROWS])
    unpadded_r = temperature * (logits_rv / temperature).log_softmax(dim=1)[:, 2]
    model.train()
    found_r = end_logp(model, ROWS, 2, pad=0, temperature=temperature, batch_size=2)
    assert model.training
    torch.testing.assert_close(found_r, unpadded_r, atol=1e-5, rtol=0)
    assert len(set(unpadded_r.tolist())) == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_does_not_hide_positions():
    peft = pytest.importorskip("peft")
    model = policy("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight.normal_()
    unpadded_r = torch.cat([end_logp(model, [row], 2, pad=0) for row in ROWS])
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    torch.testing.assert_close(end_logp(peft.get_peft_model(model, config), ROWS, 2, pad=0), unpadded_r, atol=1e-5, rtol=0)
