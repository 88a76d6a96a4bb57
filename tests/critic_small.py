"""A question a small critic can learn, and the fit of a critic written out as an ordinary torch loop."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from oracles import textbook
from spanwise.credit.spread import Streams
from spanwise.modes.critic.critic import Critic, Sequences, ValueModel

PAD, GOOD, BAD, TOOL = 0, 5, 6, 11
SIZES = {"vocab_size": 12, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": 1}
LLAMA = {
    **SIZES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TRUNKS = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "qwen2": lambda: Qwen2Config(**LLAMA),
    "gpt2": lambda: GPT2Config(**{**SIZES, "bos_token_id": 1, "initializer_range": 0.2}, **GPT2),
}


def policy(kind="llama", seed=0):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(TRUNKS[kind]())


def accelerator(precision="no"):
    """Return an accelerator on the CPU; the precision belongs to the process, so an earlier test's is reset."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, mixed_precision=precision)


def critic(config, *, model=None, names=("return",), precision="no", micro_batch=64, seed=0):
    value_model = ValueModel.of_policy(model if model is not None else policy(), names, config)
    return Critic(value_model, config, accelerator(precision), micro_batch=micro_batch, seed=seed)


def question(completions=64, seed=0, width=6, names=("return",)):
    """Sequences and streams: the first token of a completion decides its reward, what follows is noise.

    Prompts are 1 to 3 tokens, completions 4 to `width`, the second token of each is a tool's. The reward 1 or 0 lies on the last
    token; a second stream has half of it, on the same tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    ids, attention = torch.full((completions, 3 + width), PAD), torch.zeros(completions, 3 + width, dtype=torch.long)
    mask, reward = torch.zeros(completions, width, dtype=torch.bool), torch.zeros(completions, width)
    for i in range(completions):
        prompt, length, good = int(draw(1, 4, 1)), int(draw(4, width + 1, 1)), i % 2 == 0
        ids[i, 3 - prompt : 3 + length] = draw(2, 5, prompt + length)
        ids[i, 3], ids[i, 4] = (GOOD if good else BAD), TOOL
        attention[i, 3 - prompt : 3 + length] = 1
        mask[i, :length] = True
        mask[i, 1] = False
        reward[i, length - 1] = float(good)
    rows = Sequences(ids, attention, width)
    size = torch.tensor([1.0, 0.5])[: len(names)]
    last = torch.ones(len(names), completions, dtype=torch.bool)
    reward_snt, mask_snt = reward * size[:, None, None], mask.expand(len(names), -1, -1).clone()
    weight_s = torch.ones(len(names), dtype=torch.float64)
    return rows, Streams(tuple(names), reward_snt, mask_snt, weight_s=weight_s, stop_sn=~last, last_sn=last)


def learn(fitted, rows, streams, *, fit=True, truncated=None):
    whole = torch.zeros(len(rows.ids_nl), dtype=torch.bool)  # no completion was cut off
    return fitted.learn(rows, streams, whole if truncated is None else truncated, fit=fit)


def head(fitted):
    """The parameters that are not the trunk's: weights, and a bias of one value if there is one."""
    trunk = {id(value) for value in fitted.model.model.base_model.parameters()}
    return [value for value in fitted.model.model.parameters() if id(value) not in trunk]


def state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def optimizer_state(optimizer):
    saved = optimizer.state_dict()
    numbers = {f"{key}.{name}": value for key, values in saved["state"].items() for name, value in values.items()}
    numbers |= {f"rate {i}": group["lr"] for i, group in enumerate(saved["param_groups"])}
    return {name: torch.as_tensor(value).clone() for name, value in numbers.items()}


def equal(left, right):
    """Bit by bit; two NaN are the same."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name].nan_to_num(nan=12345.0), right[name].nan_to_num(nan=12345.0)) for name in left
    )


def slow_targets(value_nt, streams, s, lam):
    """V + GAE by the textbook loop over the tokens of the stream, completion by completion."""
    target = torch.zeros_like(value_nt)
    for n in range(len(value_nt)):
        kept = streams.mask_snt[s, n].nonzero().flatten().tolist()
        rewards = {t: float(streams.reward_snt[s, n, t]) for t in kept}
        advantage = textbook(kept, rewards, value_nt[n], 0.0, 1.0, lambda k, after: lam)
        target[n, kept] = value_nt[n, kept] + torch.tensor(advantage, dtype=value_nt.dtype)
    return target


def slow_fit(model, rows, streams, config):
    """One batch, whole, by an ordinary loop: squared error of each token, PPO's clipping, AdamW. Gives the first values."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    width, first = rows.width, None
    for _ in range(config.epochs):
        places = (rows.attention_nl.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=rows.ids_nl, attention_mask=rows.attention_nl, position_ids=places).logits
        value_nts = logits[:, -width - 1 : -1]
        first = value_nts.detach() if first is None else first
        total, count = 0.0, 0
        for s in range(len(streams.names)):
            target = slow_targets(first[..., s], streams, s, config.gae_lambda_value)
            for n, t in streams.mask_snt[s].nonzero().tolist():
                v, old = value_nts[n, t, s], first[n, t, s]
                error = (v - target[n, t]) ** 2
                if config.value_clip is not None:
                    near = old + (v - old).clamp(-config.value_clip, config.value_clip)
                    error = torch.maximum(error, (near - target[n, t]) ** 2)
                total, count = total + error, count + 1
        optimiser.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimiser.step()
    return first
