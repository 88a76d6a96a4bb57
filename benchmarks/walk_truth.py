"""The true value of every prefix of a walk, an exact critic for training, and estimators of the advantage against the truth.

    python benchmarks/walk_truth.py [--walks walk,walk_uneven] [--starts 0,1] [--folder runs/critic] [--completions 1024]
    python benchmarks/walk_truth.py --lambdas --walks walk_uneven --starts 0,1,2    # the best lambda of GAE beside the best of SAE
    python benchmarks/walk_truth.py --slips runs/critic/walk/gae-.95-0       # what a critic says of states that do not follow

The policy is taken as a function of the state: the mean probability of each move wherever a state was reached, and the mean
probability that a line keeps the form and the rule. Then dynamic programming over lines and states gives the probability that a
walk ends right from any prefix.

The table needs critics that `benchmarks/critic.py --task walk` has fitted. It samples completions of the start, and compares each
estimator's advantages with the true ones: the correlation at the moves, and the cosine between the policy gradient of 64
completions and the true gradient of all the others. Intervals are over these batches of 64 completions, pooled over the starts.
They leave out how starts and critics differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from walk_task import LAST, MOVES, STARTS, STATES, STEP, WALKS, Walk, walk_start
from walk_told import LAST_COUNT, tell

from spanwise.commands.shared.progress import quiet
from spanwise.credit import gae, sae
from spanwise.engines.sample import continue_ids
from spanwise.losses import critic_error
from spanwise.measure import mean_interval
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.critic import CriticInTrl
from spanwise.modes.critic.value_model import ValueModel
from spanwise.modes.sequences import Sequences, positions, sequences


@dataclass(frozen=True)
class Place:
    """A sampled token of a walk that kept the form and the rule so far: what it may be, and where the walk stands."""

    row: int
    token: int
    line: int
    state: int
    move: int | None  # of this line, once it is written
    expected: str | None  # the only token that keeps form and rule; None where the move is chosen


def places(walk: Walk, words: Sequence[Sequence[str]], start_n: Sequence[int]) -> Iterator[Place]:
    """Follow each walk token by token, up to and with its first false token."""
    for row, (tokens, start) in enumerate(zip(words, start_n, strict=True)):
        line, state, token, is_right = 0, start, 0, True

        while is_right and token < len(tokens) and line < walk.lines:
            yield Place(row, token, line, state, None, f"#{line + 1}")
            is_right, token = tokens[token] == f"#{line + 1}", token + 1
            if not is_right or token >= len(tokens):
                break
            yield Place(row, token, line, state, None, None)
            if tokens[token] not in MOVES:
                is_right = False
                break
            move, token = MOVES.index(tokens[token]), token + 1
            for expected in [*(f"({left})" for left in range(walk.countdown_m[move], 0, -1)), str(STEP[state, move])]:
                if not is_right or token >= len(tokens):
                    break
                yield Place(row, token, line, state, move, expected)
                is_right, token = tokens[token] == expected, token + 1
            line, state = line + 1, int(STEP[state, move])
        if is_right and line == walk.lines and token < len(tokens):
            yield Place(row, token, line, state, None, "<eos>")


@dataclass(frozen=True)
class Policy:
    """What a policy does, as a function of the state."""

    move_sm: Tensor  # the probability of each move
    keeps: float  # the probability that a line keeps form and rule

    def worth(self, walk: Walk) -> Tensor:
        """Return the probability (lines + 1, states) that a walk ends right which has come to a state before a line."""
        worth_ls = torch.zeros(walk.lines + 1, STATES, dtype=torch.float64)
        worth_ls[walk.lines, LAST] = 1.0
        after_sm = torch.from_numpy(STEP)
        for line in reversed(range(walk.lines)):
            worth_ls[line] = self.keeps * (self.move_sm * worth_ls[line + 1][after_sm]).sum(dim=1)
        return worth_ls


@dataclass(frozen=True)
class Sampled:
    """Walks that a policy sampled, and the model's log-probabilities of all tokens there."""

    walk: Walk
    rows: Sequences
    mask_nt: Tensor
    words: list[list[str]]
    start_n: list[int]
    logp_ntv: Tensor
    ids: Mapping[str, int]

    @property
    def written_nt(self) -> Tensor:
        """True at each token that the policy wrote: all but the states that an environment wrote."""
        if not self.walk.is_told:
            return self.mask_nt
        ids_nt = self.rows.ids_nl[:, -self.rows.width :]
        is_told_nt = torch.zeros_like(self.mask_nt)
        is_told_nt[:, 1:] = ids_nt[:, :-1] == self.ids[LAST_COUNT]
        return self.mask_nt & ~is_told_nt

    @property
    def reward_n(self) -> Tensor:
        """1 for each right walk."""
        pairs = zip(self.start_n, self.words, strict=True)
        return torch.tensor(
            [
                float(words[-1] == "<eos>" and self.walk.is_right(start, "".join(words[:-1])))
                for start, words in pairs
                if words
            ]
        )

    def policy(self) -> Policy:
        """Average what the policy does over all places that it reached."""
        ids_m = torch.tensor([self.ids[move] for move in MOVES])
        sum_sm = torch.full((STATES, len(MOVES)), 1e-3, dtype=torch.float64)
        logp_by_line = dict[tuple[int, int], Tensor]()
        for place in places(self.walk, self.words, self.start_n):
            logp_v = self.logp_ntv[place.row, place.token]
            if place.expected is None:
                sum_sm[place.state] += logp_v[ids_m].exp()
            elif place.line < self.walk.lines and not (self.walk.is_told and place.expected.isdigit()):
                line = (place.row, place.line)
                logp_by_line[line] = logp_by_line.get(line, torch.zeros(())) + logp_v[self.ids[place.expected]]
        return Policy(sum_sm / sum_sm.sum(dim=1, keepdim=True), float(torch.stack([*logp_by_line.values()]).exp().mean()))

    def truth(self, policy: Policy | None = None) -> tuple[Tensor, Tensor]:
        """Return the true value before each token, and the true advantage of each move (0 at other tokens)."""
        policy = policy or self.policy()
        worth_ls = policy.worth(self.walk)
        value_nt, adv_nt = (torch.zeros(self.mask_nt.shape, dtype=torch.float64) for _ in range(2))
        for place in places(self.walk, self.words, self.start_n):
            here = worth_ls[place.line, place.state]
            after_move = None if place.move is None else STEP[place.state, place.move]
            if after_move is not None:
                here = policy.keeps * worth_ls[place.line + 1, after_move]
            value_nt[place.row, place.token] = here
            word = self.words[place.row][place.token]
            if place.expected is None and word in MOVES:
                after = policy.keeps * worth_ls[place.line + 1, STEP[place.state, MOVES.index(word)]]
                adv_nt[place.row, place.token] = after - here
        return value_nt, adv_nt


def logp_of(model: Any, rows: Sequences) -> Tensor:
    """Return the log-probabilities of all tokens at every token of the completions."""
    options = positions(model, rows.attention_nl)
    ids = {"input_ids": rows.ids_nl, "attention_mask": rows.attention_nl}
    return model(**ids, **options, logits_to_keep=rows.width + 1).logits[:, :-1].log_softmax(dim=-1)


@torch.no_grad()
def sampled(walk: Walk, model: Any, tokenizer: Any, rows: Sequences, mask_nt: Tensor) -> Sampled:
    """Read walks with the model that sampled them. All that is worked out of them is on the CPU."""
    logps = [logp_of(model, rows.take(part)).cpu() for part in torch.arange(len(mask_nt)).split(64)]
    names = {index: word for word, index in tokenizer.get_vocab().items()}
    completion_nt = rows.ids_nl[:, -rows.width :]
    words = [[names[int(one)] for one in ids[mask]] for ids, mask in zip(completion_nt, mask_nt.bool(), strict=True)]
    prompts = tokenizer.batch_decode(rows.ids_nl[:, : -rows.width], skip_special_tokens=True)
    starts = [int(prompt.strip()[0]) for prompt in prompts]
    return Sampled(walk, rows, mask_nt.bool().cpu(), words, starts, torch.cat(logps), tokenizer.get_vocab())


def sample_walks(walk: Walk, model: Any, tokenizer: Any, *, per_start: int, seed: int) -> Sampled:
    """Sample walks from every start, and read them."""
    if walk.is_told:
        tell(model, tokenizer)
    prefixes = [tokenizer(f"{place}=")["input_ids"] for place in STARTS]
    ids_nt, mask_nt = continue_ids(model, tokenizer, prefixes, samples=per_start, max_new_tokens=walk.longest, seed=seed)
    prompt_nl = torch.tensor(prefixes).repeat_interleave(per_start, dim=0)
    attention_nl = torch.cat([torch.ones_like(prompt_nl), mask_nt.long()], dim=1)
    rows = Sequences(torch.cat([prompt_nl, ids_nt], dim=1), attention_nl, ids_nt.shape[1])
    return sampled(walk, model, tokenizer, rows, mask_nt)


@torch.no_grad()
def values_of(place: str, tokenizer: Any, rows: Sequences) -> Tensor:
    """Return what a saved critic says before every token, and after the last column."""
    critic = ValueModel.load(place, ("correct",), CriticConfig(), tokenizer)
    parts = torch.arange(len(rows.ids_nl)).split(64)
    return torch.cat([critic.value(critic(rows.take(part)))[..., 0] for part in parts])


class ExactInTrl(CriticInTrl):
    """A critic that knows: the true values of each batch under the policy that sampled it. It replaces the learned one."""

    def fill(self, own: Any, output: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Add the true values to a batch."""
        trainer, batch = self.trainer, own.batch
        walk = WALKS[batch.columns["answer"][0]]
        model = trainer.accelerator.unwrap_model(trainer.model)
        walks = sampled(walk, model, trainer._text_tokenizer, sequences(output, batch), batch.mask_nt)
        value_nt = walks.truth()[0].to(batch.mask_nt.device, torch.float32)
        target_nt = walks.reward_n.to(value_nt.device)[:, None].expand_as(value_nt)
        error = critic_error(value_nt, target_nt, batch.mask_nt.bool())
        filled = replace(batch, value_nt=value_nt[..., None], bootstrap_n=value_nt.new_zeros(len(value_nt), 1))
        return replace(own, batch=filled), {f"critic/{name}": number for name, number in error.items()}

    @property
    def waits(self) -> bool:
        """A critic that knows is never waited for."""
        return False


# ------------------------------------------------------------------------------------------- against the truth

Estimator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _gae(lam: float) -> Estimator:
    return lambda reward_nt, value_nt, _, mask_nt: gae(reward_nt, value_nt, mask_nt, lam=lam)


def _sae(lam: float) -> Estimator:
    return lambda reward_nt, value_nt, logp_nt, mask_nt: sae(reward_nt, value_nt, logp_nt, mask_nt, lam=lam)


def estimators(walk: Walk) -> dict[str, Estimator]:
    """Return every estimator of the runs that reads values."""
    return {
        "gae-1": _gae(1.0), "gae-.95": _gae(0.95), f"gae-{walk.horizon:.4f}": _gae(walk.horizon), "sae-start-.2": _sae(0.95),
        "sae-start-.2-lam-.8": _sae(0.8), "sae-start-.2-lam-.5": _sae(0.5),
    }  # fmt: skip


#: The lambdas that the best of GAE and of SAE is chosen from; GAE also has that of the horizon of SAE .95.
GAE_LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
SAE_LAMBDAS = (0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", default="walk,walk_uneven")
    parser.add_argument("--starts", default="0,1")
    parser.add_argument("--folder", default="runs/critic")
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--lambdas", action="store_true", help="the best lambda of GAE and of SAE by the correlation alone")
    parser.add_argument(
        "--slips", help="a finished run of a walk: its policy's false states, and what its critic says of them"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    if options.slips:
        show_slips(Path(options.slips), options.completions)
        return
    starts = [int(start) for start in options.starts.split(",")]
    for name in options.walks.split(","):
        if options.lambdas:
            show_lambdas(WALKS[name], [measured(WALKS[name], start, options) for start in starts])
            continue
        parts = [_measure(WALKS[name], start, options) for start in starts]
        print(f"\n## {name}, intervals over batches of 64 walks\n")
        print("| estimator | critic | correlation at the moves | cosine of the gradient |\n|---|---|---|---|")
        for key in parts[0]:
            cells = []
            for figure in ("correlation", "cosine"):
                values = torch.tensor([value for part in parts for value in part[key][figure]], dtype=torch.float64)
                interval = mean_interval(values)
                cells.append(f"{interval.value:.2f} ({interval.low:.2f}, {interval.high:.2f})")
            print(f"| `{key[0]}` | {key[1]} | {' | '.join(cells)} |")


@dataclass(frozen=True)
class Measured:
    """Completions of a warm start with the values of two critics, and what they are compared by."""

    walks: Sampled
    model: Any
    prompt_n: Tensor
    value_by_critic: Mapping[str, Tensor]
    true_nt: Tensor
    batches: Sequence[Tensor]

    @property
    def logp_nt(self) -> Tensor:
        """The log-probability of each sampled token."""
        rows = self.walks.rows
        return self.walks.logp_ntv.gather(2, rows.ids_nl[:, -rows.width :, None])[..., 0].double()

    @property
    def reward_nt(self) -> Tensor:
        """The reward of each walk, on its last token."""
        reward_nt = torch.zeros(self.walks.mask_nt.shape, dtype=torch.float64)
        return reward_nt.scatter_(1, self.last_n[:, None], self.walks.reward_n[:, None].double())

    @property
    def last_n(self) -> Tensor:
        """The place of each walk's last token."""
        return self.walks.mask_nt.sum(dim=1) - 1

    def advantages(self, arms: Mapping[str, Estimator]) -> dict[tuple[str, str], Tensor]:
        """Return the advantages of each estimator with each critic."""
        reward_nt, logp_nt, mask_nt = self.reward_nt, self.logp_nt, self.walks.written_nt
        return {
            (name, critic): estimate(reward_nt, value_nt, logp_nt, mask_nt)
            for critic, value_nt in self.value_by_critic.items()
            for name, estimate in arms.items()
        }

    def correlations(self, adv_nt: Tensor) -> list[float]:
        """Correlate advantages with the true ones at the moves, batch by batch."""
        at_nt = self.walks.mask_nt & (self.true_nt != 0)
        pairs = (torch.stack([adv_nt[part][at_nt[part]], self.true_nt[part][at_nt[part]]]) for part in self.batches)
        return [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]


def measured(walk: Walk, start: int, options: Any) -> Measured:
    """Sample completions of a warm start, and read the values of the critic that was fitted on it."""
    folder = walk_start(walk, seed=start)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    per_start = options.completions // len(STARTS) + 1
    walks = sample_walks(walk, model, tokenizer, per_start=per_start, seed=start + 1)
    exact_nt, true_nt = walks.truth()
    learned_nt = values_of(f"{options.folder}/{walk.name}/pre-{start}/critic", tokenizer, walks.rows)
    value_by_critic = {"learned": learned_nt[:, :-1].double(), "exact": exact_nt}
    reward_n = walks.reward_n.double()
    target_nt = reward_n[:, None].expand_as(exact_nt)
    errors = {critic: critic_error(value_nt, target_nt, walks.written_nt) for critic, value_nt in value_by_critic.items()}
    explained = {critic: round(float(error["explained_variance"]), 3) for critic, error in errors.items()}
    print(
        f"{walk.name}, start {start}: {float(reward_n.mean()):.3f} right, {float(exact_nt[:, 0].mean()):.3f} by the true values; "
        f"explained variance {explained}"
    )
    batches = torch.randperm(len(reward_n), generator=torch.Generator().manual_seed(0)).split(64)[:-1]
    prompt_n = torch.arange(len(reward_n)) // per_start
    return Measured(walks, model, prompt_n, value_by_critic, true_nt, batches)


def _measure(walk: Walk, start: int, options: Any) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Compare every estimator with the truth in each batch of 64 completions of a start."""
    one = measured(walk, start, options)
    walks, mask_nt, last_n = one.walks, one.walks.written_nt, one.last_n
    adv = one.advantages(estimators(walk))
    centred_n = walks.reward_n.double()
    for place in range(len(STARTS)):
        centred_n[one.prompt_n == place] -= centred_n[one.prompt_n == place].mean()
    adv["grpo", "none"] = torch.where(mask_nt, centred_n[:, None], 0.0)
    # The truth pays slips, too: what each token changed, V after it minus V before.
    exact_nt = one.value_by_critic["exact"]
    after_nt = torch.cat([exact_nt[:, 1:], torch.zeros(len(exact_nt), 1, dtype=torch.float64)], dim=1)
    after_nt[torch.arange(len(last_n)), last_n] = walks.reward_n.double()
    adv["the truth", "exact"] = torch.where(mask_nt, after_nt - exact_nt, 0.0)
    true_grads = torch.stack(
        [_gradient(one.model, walks.rows.take(part), adv["the truth", "exact"][part]) for part in one.batches]
    )
    figures: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key, adv_nt in adv.items():
        cosines = []
        for number, part in enumerate(one.batches):
            others = (true_grads.sum(dim=0) - true_grads[number]) / (len(one.batches) - 1)
            own = true_grads[number] if key[0] == "the truth" else _gradient(one.model, walks.rows.take(part), adv_nt[part])
            cosines.append(float(torch.nn.functional.cosine_similarity(own, others, dim=0)))
        figures[key] = {"correlation": one.correlations(adv_nt), "cosine": cosines}
    return figures


def show_lambdas(walk: Walk, parts: Sequence[Measured]) -> None:
    """Print the best lambda of GAE and of SAE by the correlation at the moves, and how far apart the two are.

    Every other batch chooses the lambdas, and the others show what they are worth.
    """
    gae_lambdas = sorted({*GAE_LAMBDAS, walk.horizon})
    arms = {f"gae {lam:.4g}": _gae(lam) for lam in gae_lambdas} | {f"sae {lam:g}": _sae(lam) for lam in SAE_LAMBDAS}
    correlations: dict[tuple[str, str], list[float]] = {}
    for part in parts:
        for key, adv_nt in part.advantages(arms).items():
            correlations.setdefault(key, []).extend(part.correlations(adv_nt))
    print(f"\n## {walk.name}\n\n| critic | {' | '.join(arms)} |\n|{'---|' * (1 + len(arms))}")
    series = {key: torch.tensor(values, dtype=torch.float64) for key, values in correlations.items()}
    for critic in ("learned", "exact"):
        print(f"| {critic} | {' | '.join(f'{series[name, critic].mean():.3f}' for name in arms)} |")
    print("\n| critic | best GAE | best SAE | best SAE minus best GAE (over batches of 64 walks) |\n|---|---|---|---|")
    for critic in ("learned", "exact"):
        gae_name, sae_name = (best_of(kind, {name: series[name, critic][::2] for name in arms}) for kind in ("gae", "sae"))
        cells = [f"{name[4:]}: {series[name, critic][1::2].mean():.3f}" for name in (gae_name, sae_name)]
        apart = mean_interval(series[sae_name, critic][1::2] - series[gae_name, critic][1::2])
        print(f"| {critic} | {' | '.join(cells)} | {apart.value:+.3f} ({apart.low:+.3f}, {apart.high:+.3f}) |")


def best_of(kind: str, series: Mapping[str, Tensor]) -> str:
    """Return the estimator of a kind with the largest mean."""
    return max((name for name in series if name.startswith(kind)), key=lambda name: float(series[name].mean()))


def show_slips(run: Path, count: int) -> None:
    """Print how often the first false state of a walk is a higher one, and the critic's values; the truth behind it is 0."""
    walk = WALKS[run.parent.name]
    model, tokenizer = (kind.from_pretrained(run / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    walks = sample_walks(walk, model, tokenizer, per_start=count // len(STARTS), seed=1)
    value_nt = values_of(f"{run}/critic", tokenizer, walks.rows)
    print(f"{run.name}: {len(value_nt)} walks, {float(walks.reward_n.mean()):.3f} right")
    last: dict[int, Place] = {place.row: place for place in places(walk, walks.words, walks.start_n)}
    kinds: dict[str, list[tuple[float, float, float]]] = {"higher": [], "lower": []}
    example = None
    for place in last.values():
        word = walks.words[place.row][place.token]
        if place.move is None or not (place.expected or "").isdigit() or not word.isdigit() or word == place.expected:
            continue
        kind = "higher" if int(word) > int(place.expected or 0) else "lower"
        around = [place.token, place.token + 1, min(place.token + 24, len(walks.words[place.row]) - 1)]
        kinds[kind].append(tuple(float(value_nt[place.row, token]) for token in around))
        example = place if kind == "higher" and example is None else example
    for kind, values in kinds.items():
        if values:
            before, after, later = torch.tensor(values).mean(dim=0).tolist()
            values_text = f"critic before {before:.2f}, after {after:.2f}, 24 tokens on {later:.2f}"
            print(f"{len(values)} first slips to a {kind} state: {values_text}")
    if example is not None:
        text = "".join(walks.words[example.row][max(0, example.token - 9) : example.token + 9])
        around = ", ".join(f"{one:.2f}" for one in value_nt[example.row, example.token - 1 : example.token + 4].tolist())
        print(f"{text}: {example.expected} would follow; the critic around the false state: {around}")


def _gradient(model: Any, rows: Sequences, adv_nt: Tensor) -> Tensor:
    """Return the policy gradient of some completions with the advantages of their tokens, as one vector."""
    logp_nt = logp_of(model, rows).gather(2, rows.ids_nl[:, -rows.width :, None])[..., 0]
    grads = torch.autograd.grad((logp_nt * adv_nt.float()).sum() / len(adv_nt), [*model.parameters()])
    return torch.cat([grad.flatten() for grad in grads])


if __name__ == "__main__":
    main()
