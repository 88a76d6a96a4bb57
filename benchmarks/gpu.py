"""Credit on a GPU: the same numbers as on the CPU, what waits for the device, seconds beside the memory floor, work side by side.

    make gpu                                    # and benchmarks/gpu_training.py behind it; twenty minutes at most, offline
    python benchmarks/gpu.py --device cpu --completions 64 --tokens 64      # the smallest size, anywhere

Four questions, each answered by itself:
    1. Are the credits of a CUDA device those of the CPU? The largest difference of each estimator, in float32.
    2. Which calls wait for the device? Every operation whose result the CPU must know is counted as it is called (it is the same on
       any device). On CUDA torch's own debug mode says so, too.
    3. What does an estimator cost beside writing its result once (the floor), and beside verl's function where verl is installed?
    4. How much of the segmentation, which runs on the CPU, is hidden behind a policy's forward pass?
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from estimators import Batch, rows
from segment_credit import LAYOUT, synthetic_batch
from torch.utils._python_dispatch import TorchDispatchMode

from spanwise.segment import find_blocks

#: Operations whose result or size the CPU must know before it goes on.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "is_nonzero",
    "equal",
)


class Waits(TorchDispatchMode):
    """Counts the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and call."""
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in WAITS or by_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def moved(value: Any, device: torch.device) -> Any:
    """A batch, or a part of it, on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value):
        parts = {each.name: moved(getattr(value, each.name), device) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Batch):
        twin = copy.copy(value)
        vars(twin).update({name: moved(part, device) for name, part in vars(value).items()})
        return twin
    return value


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The least time of a call."""
    times = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def waits_of(call: Callable[[], Any]) -> Counter[str]:
    """How often a call waits for the device, by the operation."""
    with Waits() as waits:
        call()
    return waits.counts


def estimators(batch: Batch, device: torch.device, repeats: int) -> None:
    """Print equality, waits and seconds of every estimator."""
    try:
        from verl.trainer.ppo import core_algos as peer
    except ImportError:
        peer = None
    there = moved(batch, device)
    floor = seconds_of(there.floor, device, repeats)
    print(f"floor: {floor * 1e3:.2f} ms to write {tuple(batch.mask_nt.shape)} once on {device}\n")
    print(f"{'estimator':22s} {'largest difference':>18s} {'by floor':>9s} {'verl by floor':>14s}  waits for the device")
    for (name, ours, _, _), (_, theirs, peers, _) in zip(rows(batch, None), rows(there, peer), strict=True):
        difference = float((ours() - theirs().cpu()).abs().max())
        counts = waits_of(theirs)
        own = seconds_of(theirs, device, repeats) / floor
        other = min((seconds_of(call, device, repeats) / floor for call in peers.values()), default=None)
        counted = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"
        other_text = "-" if other is None else f"{other:.1f}"
        print(f"{name:22s} {difference:18.1e} {own:9.1f} {other_text:>14s}  {counted}{debugged(theirs, device)}")


def debugged(call: Callable[[], Any], device: torch.device) -> str:
    """What torch's own debug mode says, on CUDA."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"; torch counts {sum('synchronizing' in str(each.message) for each in caught)}"


def overlapped(completions: int, tokens: int, width: int, layers: int, device: torch.device) -> None:
    """Print the seconds of segmentation and of a policy's pass, one after the other and side by side."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, ids_nt, mask_nt = synthetic_batch(completions, tokens, words=2_000)
    config = LlamaConfig(
        vocab_size=len(vocabulary.pieces), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), max_position_embeddings=tokens,
    )  # fmt: skip
    policy = LlamaForCausalLM(config).to(device).eval()

    def forward() -> None:
        with torch.no_grad():
            for row in range(0, completions, 8):
                policy(input_ids=ids_nt[row : row + 8].to(device), logits_to_keep=1)
        wait(device)

    def segment() -> None:
        find_blocks(ids_nt, mask_nt, layout=LAYOUT, vocabulary=vocabulary)

    def both() -> None:
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(segment)
            forward()
            ahead.result()

    alone = {name: seconds_of(call, device, 2) for name, call in (("segmentation", segment), ("forward pass", forward))}
    together = seconds_of(both, device, 2)
    hidden = (sum(alone.values()) - together) / alone["segmentation"]
    print(f"\npolicy of {policy.num_parameters() / 1e6:.1f} M parameters: ", end="")
    print(", ".join(f"{name} {value:.3f} s" for name, value in alone.items()), f"side by side {together:.3f} s", sep=", ")
    print(f"{max(0.0, min(1.0, hidden)):.0%} of the segmentation is hidden behind the forward pass")


def main() -> None:
    """Answer the four questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--completions", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64, help="of the policy of the last question")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    what = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "the CPU, which tells nothing of a GPU but the waits"
    )
    print(f"torch {torch.__version__} on {what}\n")
    estimators(Batch(options.completions, options.tokens), device, options.repeats)
    overlapped(min(options.completions, 256), options.tokens, options.width, options.layers, device)


if __name__ == "__main__":
    main()
