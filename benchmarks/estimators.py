"""Speed and memory of the estimators against verl's own functions and against the memory floor, in one run on one thread.

    pip install --no-deps verl==0.9.1   # and what its import asks for; without verl its columns stay empty
    python benchmarks/estimators.py [--completions 2048] [--tokens 4096] [--repeats 5] [--growth]

float32, groups of 16, string group ids, lengths uniform in [T/2, T], int64 mask for verl as its trainer passes it. The floor is
writing the (N, T) result once with a plain broadcast multiply by a float mask. Calls take turns; times are CPU seconds of the one
thread (page faults included), so that other work on the machine matters less. verl whitens inside its GAE.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise import credit
from spanwise.credit import group_index, spread
from spanwise.credit.spread import to_tokens
from spanwise.types import Credit, Spans

Call = Callable[[], Any]


class Batch:
    """One synthetic batch in both libraries' form."""

    def __init__(self, completions: int, tokens: int, group: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.length_n = torch.randint(tokens // 2, tokens + 1, (completions,), generator=generator)
        self.mask_nt = torch.arange(tokens) < self.length_n[:, None]
        self.mask_int_nt = self.mask_nt.long()
        self.mask_float_nt = self.mask_nt.float()
        self.reward_n = torch.randint(0, 2, (completions,), generator=generator).float()
        self.reward_nt = torch.zeros(completions, tokens)
        self.reward_nt[torch.arange(completions), self.length_n - 1] = self.reward_n
        self.value_nt = torch.rand(completions, tokens, generator=generator)
        self.logp_nt = -torch.rand(completions, tokens, generator=generator) * 2
        names = [f"prompt-{number // group:08x}" for number in range(completions)]
        self.index = np.array(names, dtype=object)
        self.ids = names
        half_n = self.length_n // 2
        block_nt = torch.where(
            self.mask_nt, (torch.arange(tokens) >= half_n[:, None]).to(torch.int8), torch.tensor(-1).to(torch.int8)
        )
        start_nk = torch.stack([torch.zeros_like(half_n), half_n], dim=1)
        end_nk = torch.stack([half_n, self.length_n], dim=1)
        self.spans = Spans(
            ("solution", "confidence"), start_nk, end_nk, block_nt, torch.zeros(completions, dtype=torch.long)
        )
        report_n = torch.rand(completions, generator=generator)
        self.reward_nk = torch.stack([self.reward_n, -((report_n - self.reward_n) ** 2)], dim=1)

    def floor(self) -> torch.Tensor:
        """Write the result once."""
        return self.reward_n[:, None] * self.mask_float_nt

    def groups(self) -> torch.Tensor:
        """The groups by number, where the rewards are."""
        return group_index(self.ids).to(self.reward_n.device)

    def blockwise(self, **options: Any) -> torch.Tensor:
        """Credit per block, spread over tokens."""
        block_nk = credit.bae(self.reward_nk, self.groups(), **options)
        nothing_m, stop_n = torch.zeros(2, dtype=torch.long), block_nk.new_zeros(len(block_nk), dtype=torch.float64)
        return spread(Credit(block_nk, stop_n, nothing_m, nothing_m), self.spans)

    def grouped(self, estimator: Callable[..., torch.Tensor], **options: Any) -> torch.Tensor:
        """From token rewards to token advantages with a per-completion estimator, as verl's functions do."""
        return to_tokens(estimator(self.reward_nt.sum(dim=1), self.groups(), **options), self.mask_nt)


def rows(batch: Batch, peer: Any) -> list[tuple[str, Call, dict[str, Call], str]]:
    """(name, ours, peers by label, kind) for each estimator."""

    def verl(name: str, **options: Any) -> Call:
        function = getattr(peer, name)
        return lambda: function(
            token_level_rewards=batch.reward_nt, response_mask=batch.mask_int_nt, index=batch.index, **options
        )

    def peers(**names: Call | None) -> dict[str, Call]:
        return {label: call for label, call in names.items() if call is not None}

    has = peer is not None
    gae_peer = (
        (lambda: peer.compute_gae_advantage_return(batch.reward_nt, batch.value_nt, batch.mask_int_nt, 1.0, 0.95))
        if has
        else None
    )
    vectorised = verl("compute_grpo_vectorized_outcome_advantage") if has else None
    return [
        (
            "grpo",
            lambda: batch.grouped(credit.grpo),
            peers(vectorised=vectorised, loop=verl("compute_grpo_outcome_advantage") if has else None),
            "group",
        ),
        (
            "rloo",
            lambda: batch.grouped(credit.rloo),
            peers(
                vectorised=verl("compute_rloo_vectorized_outcome_advantage") if has else None,
                loop=verl("compute_rloo_outcome_advantage") if has else None,
            ),
            "group",
        ),
        (
            "opo",
            lambda: batch.grouped(credit.opo, length_n=batch.length_n),
            peers(loop=verl("compute_opo_outcome_advantage") if has else None),
            "group",
        ),
        ("bae, outcome", lambda: batch.blockwise(), peers(grpo_vectorised=vectorised), "block"),
        ("bae, blended", lambda: batch.blockwise(baseline="blended"), peers(grpo_vectorised=vectorised), "block"),
        (
            "reinforce++",
            lambda: credit.reinforce_plus_plus(batch.reward_nt, batch.mask_nt),
            peers(
                loop=(lambda: peer.compute_reinforce_plus_plus_outcome_advantage(
                    token_level_rewards=batch.reward_nt, response_mask=batch.mask_int_nt, config=Gamma()
                )) if has else None
            ),
            "recursion",
        ),
        (
            "gae (not whitened)",
            lambda: credit.gae(batch.reward_nt, batch.value_nt, batch.mask_nt, lam=0.95),
            peers(loop=gae_peer),
            "recursion",
        ),
        (
            "gae, whitened",
            lambda: credit.gae(batch.reward_nt, batch.value_nt, batch.mask_nt, lam=0.95, whiten=True),
            peers(loop=gae_peer),
            "recursion",
        ),
        (
            "sae",
            lambda: credit.sae(batch.reward_nt, batch.value_nt, batch.logp_nt, batch.mask_nt, lam=0.9),
            peers(gae_loop=gae_peer),
            "recursion",
        ),
    ]  # fmt: skip


class Gamma(dict):
    """verl's config as its function reads it."""

    gamma = 1.0


def median_times(calls: list[Call], repeats: int) -> list[float]:
    """Median CPU seconds of each call, the calls taking turns."""
    for call in calls:
        call()
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, sample in zip(calls, samples, strict=True):
            started = time.thread_time()
            call()
            sample.append(time.thread_time() - started)
    return [statistics.median(sample) for sample in samples]


def peak_extra(call: Call) -> float:
    """Most resident bytes during a call beyond those before it, its result included (Linux)."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, or a call would reuse it unseen
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
    before = resident("VmRSS:")
    call()
    return resident("VmHWM:") - before


def compare(completions: int, tokens: int, repeats: int, peer: Any) -> None:
    """One table for one size."""
    batch = Batch(completions, tokens)
    table = rows(batch, peer)
    times, floors = {}, []
    for name, ours, others, _ in table:
        floor, own, *theirs = median_times([batch.floor, ours, *others.values()], repeats)
        floors.append(floor)
        times[name] = own, dict(zip(others, theirs, strict=True))
    floor = statistics.median(floors)
    print(f"\nN x T = {completions} x {tokens}, medians of {repeats}; the floor takes {floor * 1e3:.1f} ms")
    print(f"{'':20s} {'ms':>8s} {'x floor':>8s} {'x output, peak memory':>22s}   how many times faster than verl")
    for name, ours, *_ in table:
        own, theirs = times[name]
        memory = peak_extra(ours) / (completions * tokens * 4)
        against = "  ".join(f"{label} {seconds / own:.1f}" for label, seconds in theirs.items())
        print(f"{name:20s} {own * 1e3:8.1f} {own / floor:8.2f} {memory:22.2f}   {against}")


def growth(repeats: int) -> None:
    """Time per million tokens as T grows and as N grows: flat lines are linear growth."""
    print("\nns per token")
    sizes = [(64, tokens) for tokens in (512, 2048, 8192, 32768)] + [(n, 512) for n in (64, 256, 1024, 4096)]
    for completions, tokens in sizes:
        batch = Batch(completions, tokens)
        cells = []
        for name, ours, _, _ in rows(batch, None):
            (own,) = median_times([ours], repeats)
            cells.append(f"{name} {own / (completions * tokens) * 1e9:.2f}")
        print(f"{completions:5d} x {tokens:5d}  " + "  ".join(cells))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--completions", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        from verl.trainer.ppo import core_algos as peer
    except ImportError as error:
        print(f"verl is not importable ({error}); only our own times follow")
        peer = None
    compare(options.completions, options.tokens, options.repeats, peer)
    if options.growth:
        growth(options.repeats)


if __name__ == "__main__":
    main()
