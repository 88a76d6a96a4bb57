"""TRL's trainer with a critic: its values make the advantages, masked ones never, and nothing is trained on a diverged one."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForTokenClassification, BertConfig, LlamaConfig

from critic_small import equal, optimizer_state, state
from helpers import NAN
from oracles import slow_recursion
from spanwise.errors import DataError, DivergedError, RecipeError
from trl_critic_small import ONE, PAIR, Watched, fast, with_critic
from trl_small import PIECES, SAID_WITH_TOOLS, policy, tokenizer, trainer


def test_advantages_are_gae_of_what_the_critic_said(tmp_path):
    """With one reward at the end: the definition, token by token, over the policy's own tokens."""
    run = with_critic(tmp_path, objectives=ONE, credit={"lam": 0.95})
    watched = Watched(run)
    run.train()
    value_nt = watched.estimates[-1].value_nts[..., 0]
    assert value_nt.std() > 0.02
    mask_nt, reward_nt = torch.zeros(value_nt.shape, dtype=torch.bool), torch.zeros(value_nt.shape)
    for n, completion in enumerate(SAID_WITH_TOOLS):
        mask_nt[n, : len(completion.blocks)] = torch.tensor(completion.blocks) >= 0
        reward_nt[n, len(completion.blocks) - 1] = completion.right
    slow = slow_recursion(reward_nt, value_nt, mask_nt, gamma=1.0, lam_after=lambda *_: 0.95)
    slow = slow / mask_nt.sum(dim=1, keepdim=True)  # per completion: the mean over its tokens is in the advantage
    torch.testing.assert_close(run.last_rollouts.advantages_nt.double(), slow, atol=1e-6, rtol=0)


def test_blocks_that_are_paid_apart_have_a_value_each(trained):
    run, watched, _ = trained
    assert run.critic.model.names == ("correct", "brier")
    _, streams = watched.inputs[-1]
    mask = torch.zeros_like(streams.mask_snt)
    for n, completion in enumerate(SAID_WITH_TOOLS):
        for block in (0, 1):
            mask[block, n, : len(completion.blocks)] = torch.tensor(completion.blocks) == block
        if completion.confidence is None:  # left out: the last token is the decision to stop
            mask[1, n, len(completion.blocks) - 1] = True
    assert torch.equal(streams.mask_snt, mask)
    values = run.last_rollouts.batch.value_nt  # the value of an objective means nothing outside its blocks
    assert torch.equal(~values.isnan(), mask.permute(1, 2, 0))


def test_the_policy_waits_for_its_critic(tmp_path):
    """The policy's weights and optimizer are untouched before the third batch."""
    ends = {}
    for steps in (2, 3):
        run = with_critic(tmp_path / str(steps), fast(policy_training_start_step=2), max_steps=steps, weight_decay=0.5)
        before, value_before = state(run.model), state(run.critic.model)
        with pytest.warns(UserWarning, match="This run would train only the critic") if steps == 2 else nullcontext():
            run.train()
        ends[steps] = equal(state(run.model), before), bool(run.optimizer.state_dict()["state"])
        assert not equal(state(run.critic.model), value_before)
        assert run.critic.batches == steps
    assert ends == {2: (True, False), 3: (False, True)}


def test_accumulated_and_repeated_steps_fit_once_per_generation_batch(tmp_path):
    run = with_critic(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2, max_steps=4)
    run.train()
    assert run.critic.batches == 2  # each batch of eight is stepped on twice
    assert run.state.global_step == 4


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("method", "critic"), [("gae", None), ("bae", fast()), ("gae", {"learning_rate": 1})])
def test_a_method_and_a_critic_that_do_not_fit_are_refused(tmp_path, method, critic):
    with pytest.raises(RecipeError, match="critic"):
        trainer(tmp_path, extra={"method": method, "objectives": PAIR, "critic": critic})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two values after three steps, what its critic was asked, and the folder that the critic was saved in."""
    folder = tmp_path_factory.mktemp("critic")
    run = with_critic(folder / "run")
    watched = Watched(run)
    run.train()
    run.critic.save(folder / "critic", run.processing_class, state=False)
    return run, watched, folder / "critic"


@pytest.fixture
def saved(trained, tmp_path):
    return shutil.copytree(trained[2], tmp_path / "critic")


def test_a_saved_critic_says_what_it_said(tmp_path, trained):
    run, watched, folder = trained
    assert not (folder / "optimizer.pt").exists()
    loaded = with_critic(tmp_path / "again", fast(model=str(folder)))
    assert equal(state(loaded.critic.model), state(run.critic.model))
    rows, streams = watched.inputs[-1]
    no_end = torch.zeros(8, dtype=torch.bool)
    values = [either.critic.learn(rows, streams, no_end, fit=False).value_nts for either in (run, loaded)]
    assert torch.equal(*values)
    assert AutoModelForTokenClassification.from_pretrained(folder).config.num_labels == 2


def test_a_critic_of_another_tokenizer_is_refused(tmp_path, saved):
    other = tokenizer([*PIECES[:-2], PIECES[-1], PIECES[-2]])  # the same words, two of them with swapped ids
    with pytest.raises(DataError, match="have different tokenizers"):
        with_critic(tmp_path / "b", fast(model=str(saved)), extra={"processing_class": other})
    with_critic(tmp_path / "c", fast(model=str(saved)))  # its own tokenizer is taken
    about = json.loads((saved / "critic.json").read_text())
    del about["tokenizer"]
    (saved / "critic.json").write_text(json.dumps(about))
    with_critic(tmp_path / "d", fast(model=str(saved)))  # an unknown one, too


FEWER = LlamaConfig(vocab_size=7, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
BOTH_WAYS = BertConfig(vocab_size=24, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize(("model", "match"), [(FEWER, "knows 7 token ids"), (BOTH_WAYS, "sees later tokens")])
def test_a_classifier_that_is_no_critic_is_refused(tmp_path, model, match):
    """A value that depends on the token after it would bias the gradient."""
    AutoModelForTokenClassification.from_config(model).save_pretrained(tmp_path / "model")
    with pytest.raises(DataError, match=match):
        with_critic(tmp_path / "a", fast(model=str(tmp_path / "model")))


def test_a_critic_with_another_head_or_that_cannot_be_read_is_refused(tmp_path, saved):
    with pytest.raises(RecipeError, match="has the head scalar"):
        with_critic(tmp_path / "a", fast(model=str(saved), head="hl_gauss"))
    for name in ("model.safetensors", "critic.json"):
        (saved / name).write_text("{")
        with pytest.raises(DataError) as caught:
            with_critic(tmp_path / "b", fast(model=str(saved)))
        assert "\n" not in str(caught.value)


def test_a_diverged_critic_stops_the_run_before_anything_learns_from_it(tmp_path):
    run = with_critic(tmp_path, fast(epochs=2), max_steps=4)
    learn, states = run.critic.learn, {}

    def breaks_at_the_third(*arguments, **options):
        if run.critic.batches == 2:
            list(run.critic.model.parameters())[-1].data.view(-1)[0] = NAN
            states.update(policy=state(run.model), adam=optimizer_state(run.optimizer))
        return learn(*arguments, **options)

    run.critic.learn = breaks_at_the_third
    with pytest.raises(DivergedError):
        run.train()
    assert run.state.global_step == 2
    assert equal(state(run.model), states["policy"])
    assert equal(optimizer_state(run.optimizer), states["adam"])  # its own weights and moments: tests/engines/test_critic.py


@pytest.mark.filterwarnings("ignore")  # peft and transformers about themselves
def test_a_policy_with_adapters(tmp_path):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def run_in(folder, **options):
        return with_critic(folder, extra={"peft_config": adapters, "model": policy(dtype=torch.float32)}, **options)

    run = run_in(tmp_path, save_strategy="steps", save_steps=2)
    before = state(run.model)
    run.train()
    moved = {"lora" in name for name, value in state(run.model).items() if not torch.equal(value, before[name])}
    assert moved == {True}
    assert not any("lora" in name for name in run.critic.model.state_dict())
    resumed = run_in(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal(state(resumed.critic.model), state(run.critic.model))
