"""Whether a start can learn when the due date of a letter is null: what one step changes, and a random walk with these figures.

    python benchmarks/due_choice.py                  # the published start
    python benchmarks/due_choice.py --careful due    # a start that benchmarks/invoices.py makes

The log-odds of null are followed apart for letters that state a due date and letters that state none. A step is one step of Adam
on the credit of `recipes/invoices.yaml` for the due date alone; its divisor comes from the gradient of the whole credit. Letters
are those of training, sampled once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import invoices as benchmark
import numpy as np
import torch

from spanwise import Batch, Vocabulary, credit_batch, read
from spanwise.commands.shared.task import load_model
from spanwise.pipeline import advantages
from spanwise.recipe import load, scheme_of
from spanwise.tasks import task_layout, warm_start
from spanwise.tasks.embedded import STARTS
from spanwise.tasks.invoices import INVOICES, LONGEST

RECIPE = Path(__file__).parents[1] / "recipes" / "invoices.yaml"
#: Null is one token, a date and its quotes are twelve; each token gets an even share of its field's credit.
DATE_TOKENS = 12
LETTERS, GROUP, RATE, MOMENTUM = 32, 8, 3e-4, 0.9


def null_push(null: Any) -> Any:
    """Return the expected gradient on the log-odds of null, per unit of reward between null and a date."""
    return null * (1 - null) * ((1 - null) + null / DATE_TOKENS)


def walk(
    response: np.ndarray,
    start: tuple[float, float],
    *,
    right: float = 1.0,
    steps: int = 48,
    runs: int = 2_000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of null at the end of each run, in letters with and without a due date.

    Args:
        response: [i, j] is the change of the log-odds in letters i by a step on letters j; 0 have a due date, 1 have none.
        start: the probability of null in both.
        right: what a date is worth in a letter that has one; 1 if the choice is paid by itself.
        steps, runs, seed: of the walk; each step has eight letters, each with a due date or without by the toss of a coin.
    """
    rng, logits = np.random.default_rng(seed), np.tile(np.log(np.divide(start, np.subtract(1, start))), (runs, 1))
    speed, first_push = np.zeros_like(logits), null_push(np.array(start))
    for _ in range(steps):
        stated_share = rng.binomial(8, 0.5, runs) / 8
        shares = np.stack([stated_share * right, 1 - stated_share], axis=1)
        change = (shares * null_push(1 / (1 + np.exp(-logits))) / first_push) @ response.T
        speed = MOMENTUM * speed + (1 - MOMENTUM) * change
        logits = logits + speed
    null = 1 / (1 + np.exp(-logits))
    return null[:, 0], null[:, 1]


def measure(folder: Path) -> tuple[np.ndarray, tuple[float, float]]:
    """Return the response of a model's choice to a step (see `walk`), and its probability of null."""
    model, tokenizer = load_model(folder)
    model.to("cpu")  # where the letters and the sums are
    letters, vocabulary = INVOICES.training(LETTERS, rng=np.random.default_rng(779)), tokenizer.get_vocab()
    prompts = [prompt for prompt in letters.prompts for _ in range(GROUP)]
    completions = sample(model, tokenizer, prompts)
    golds = [gold for gold in letters.gold_n for _ in range(GROUP)]
    recipe = load(RECIPE)
    scheme = scheme_of(recipe, task_layout(recipe), LONGEST)
    columns = {"answer": list(map(json.dumps, golds))}
    batch = Batch.jagged(completions, [n // GROUP for n in range(len(prompts))], columns=columns)
    reading = read(batch, scheme, Vocabulary.from_tokenizer(tokenizer))
    adv_nt = advantages(credit_batch(reading, batch, scheme), reading.spans, scheme)
    in_due_nt = reading.spans.block_nt == scheme.layout.names.index("due")
    weights = list(model.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights, retain_graph=True)])

    step_gradients, credit_gradients, odds_gradients = [], [0.0, 0.0], [0.0, 0.0]
    rows_by_kind: tuple[list[int], list[int]] = ([], [])
    null_by_kind: tuple[list[float], list[float]] = ([], [])
    for first in range(0, len(prompts), 64):
        whole = torch.zeros(())
        credits, odds = [torch.zeros(()), torch.zeros(())], [torch.zeros(()), torch.zeros(())]
        for n in range(first, first + 64):
            kind, length = int(golds[n]["due"] is None), len(completions[n])
            prompt_ids = tokenizer(prompts[n])["input_ids"]
            ids = torch.tensor([prompt_ids + completions[n]])
            logps_tv = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(dim=-1)
            paid = logps_tv[torch.arange(length), ids[0, len(prompt_ids) :]] * adv_nt[n, :length]
            whole, credits[kind] = whole + paid.sum(), credits[kind] + paid[in_due_nt[n, :length]].sum()
            rows_by_kind[kind].append(n)
            if (key := vocabulary[', "due": ']) in completions[n]:
                choice_v = logps_tv[completions[n].index(key) + 1]
                odds[kind] = odds[kind] + choice_v[vocabulary["null"]] - choice_v[vocabulary['"']]
                null_by_kind[kind].append(float(choice_v[vocabulary["null"]].detach().exp()))
        step_gradients.append(gradient(whole) / 64)
        for kind in (0, 1):
            if credits[kind].requires_grad:
                credit_gradients[kind] = credit_gradients[kind] + gradient(credits[kind])
            if odds[kind].requires_grad:
                odds_gradients[kind] = odds_gradients[kind] + gradient(odds[kind])
    step = RATE / (torch.stack(step_gradients).pow(2).mean(dim=0).sqrt() + 1e-8)
    response = [
        [
            float((odds_gradients[i] / len(null_by_kind[i])) @ (step * credit_gradients[j] / len(rows_by_kind[j])))
            for j in (0, 1)
        ]
        for i in (0, 1)
    ]
    return np.array(response), (float(np.mean(null_by_kind[0])), float(np.mean(null_by_kind[1])))


def sample(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Sample a completion of each prompt at temperature 1, with the token that ends it."""
    tokens = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    torch.manual_seed(3)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        ids_nt = model.generate(**tokens, max_new_tokens=LONGEST, **options)[:, tokens["input_ids"].shape[1] :]
    end = tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in ids_nt.tolist()]


def main() -> None:
    """Print the response and the walk, with the choice paid by itself and with dates worth what they are at the start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--careful", choices=list(benchmark.CAREFUL), help="see benchmarks/invoices.py")
    parser.add_argument("--right", default="1,0.5", help="what a date is worth in a letter that states one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.careful:
        STARTS["invoices"] = benchmark.careful(STARTS["invoices"], options.careful)
    response, null = measure(warm_start(STARTS["invoices"].course) if options.careful else warm_start("invoices"))
    print(
        f"null at the start: {null[0]:.2f} with a due date, {null[1]:.2f} without; change of the log-odds in a step:\n{response}"
    )
    print(f"the difference grows by {(response[1] - response[0]).sum() / 2:.3f} in a step on as many letters of both kinds")
    for right in map(float, options.right.split(",")):
        stated, absent = walk(response, null, right=right)
        always_null, told_apart = (stated > 0.9) & (absent > 0.9), (stated < 0.3) & (absent > 0.7)
        print(
            f"a date is worth {right}: written in {1 - stated.mean():.2f} of letters with one, {1 - absent.mean():.2f} of others; "
            f"runs with null everywhere {always_null.mean():.2f}, with letters told apart {told_apart.mean():.2f}"
        )


if __name__ == "__main__":
    main()
