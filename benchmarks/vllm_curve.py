"""The learning curve of a small task with a vLLM in the trainer's process, beside the same task with `generate`.

    .venv-vllm/bin/python benchmarks/vllm_curve.py [--seeds 0,1,2,3,4] [--steps 30]

A random Qwen2 of .3 M parameters writes 16 tokens; the reward is how many of their signs are ASCII. 8 prompts x 8 completions a
step. Both samplers start from the same weights and see the same prompts. They draw other numbers, so that the curves agree in the
mean alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch

from spanwise.measure import compare_arms

BATCH, LAST = 8, 5


def ascii_signs(completions: list[str], **columns: Any) -> list[float]:
    """A reward that a random model earns."""
    return [float(sum(sign.isascii() for sign in text)) for text in completions]


def curve(folder: Path, model: Path, *, seed: int, steps: int, vllm: bool) -> list[float]:
    """The mean reward of every step."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from spanwise import Layout, Objective, Scheme
    from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer

    sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 256}
    args = SpanGRPOConfig(
        str(folder), per_device_train_batch_size=BATCH * 8, num_generations=8, max_completion_length=16, max_steps=steps,
        learning_rate=3e-3, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1,
        report_to="none", disable_tqdm=True, seed=seed, log_metrics="few", **(sampler if vllm else {}),
    )  # fmt: skip
    run = SpanGRPOTrainer(
        model=str(model),
        args=args,
        scheme=Scheme.preset("bae", Layout({"all": []}), objectives=[Objective(ascii_signs, pays="all", baseline="group")]),
        train_dataset=Dataset.from_list([{"prompt": f"{n}+2="} for n in range(BATCH * 4)]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    run.train()
    return [line["reward"] for line in run.state.log_history if "reward" in line]


def main() -> None:
    """Train with both samplers and show the curves."""
    options = argparse.ArgumentParser(description="vLLM beside generate.")
    options.add_argument("--seeds", default="0,1,2,3,4")
    options.add_argument("--steps", type=int, default=30)
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import vllm.model_executor.layers.utils as layers

    from served_small import keep_weights, write_model
    from tokenizers_small import byte_level

    layers.dispatch_cpu_unquantized_gemm = keep_weights
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    curves: dict[str, dict[int, list[float]]] = {"generate": {}, "vLLM": {}}
    with tempfile.TemporaryDirectory() as place:
        tokenizer = byte_level()
        tokenizer.pad_token = tokenizer.eos_token
        write_model(Path(place) / "model", tokenizer)
        for seed in seeds:
            for name in curves:
                settings = {"seed": seed, "steps": arguments.steps, "vllm": name == "vLLM"}
                curves[name][seed] = curve(Path(place) / "out", Path(place) / "model", **settings)
    figures: dict[str, dict[int, dict[str, float | None]]] = {
        name: {
            seed: {"whole run": fmean(rewards), "last five steps": fmean(rewards[-LAST:])}
            for seed, rewards in by_seed.items()
        }
        for name, by_seed in curves.items()
    }
    comparison = compare_arms(figures, reference="generate")
    print(comparison.markdown(), *(difference.sentence() for difference in comparison.differences), sep="\n")
    for name, by_seed in curves.items():
        means = [fmean(rewards[step] for rewards in by_seed.values()) for step in range(arguments.steps)]
        print(f"{name}:", " ".join(f"{mean:.1f}" for mean in means[::LAST]))


if __name__ == "__main__":
    main()
