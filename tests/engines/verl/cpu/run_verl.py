"""Command lines for `python -m verl.trainer.main_ppo` on CPU: the digit chain's model and prompts, and every option it takes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_LIBC = ctypes.CDLL(None)
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_task(folder: Path, task: Any) -> None:
    """The model with a chat template (verl sends prompts as conversations), and the prompts as verl's parquet files."""
    from transformers import AutoTokenizer

    shutil.copytree(task.model, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    for name, part in (("train", task.train), ("eval", task.evaluation)):
        part.map(_row, with_indices=True, remove_columns=part.column_names).to_parquet(folder / f"{name}.parquet")


def _row(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "data_source": "digits",
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": index},
    }


def options(folder: Path, *, prompts: int, group: int, steps: int, **others: Any) -> list[str]:
    """Overrides for one run; `others` are more of them, with `__` for a dot and a leading `_` for `+`."""
    size, root, actor = prompts * group, "actor_rollout_ref", "actor_rollout_ref.actor"
    fields: list[tuple[str, dict[str, Any]]] = [
        ("data", {"train_files": folder / "train.parquet", "val_files": folder / "eval.parquet"}),
        ("data", {"max_prompt_length": 16, "max_response_length": 32, "train_batch_size": prompts}),
        ("data", {"dataloader_num_workers": 0, "shuffle": False}),
        (f"{root}.model", {"path": folder / "model", "use_remove_padding": False, "enable_gradient_checkpointing": False}),
        (f"+{root}.model.override_config", {"attn_implementation": "eager"}),
        (actor, {"strategy": "fsdp2", "use_torch_compile": False, "ppo_mini_batch_size": prompts}),
        (actor, {"ppo_micro_batch_size_per_gpu": size, "optim.lr": 1e-3, "optim.weight_decay": 0.0}),
        (f"{actor}.fsdp_config", {"strategy": "fsdp2", "use_torch_compile": False}),
        (f"+{actor}.fsdp_config", {"mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"}),
        (f"{root}.rollout", {"name": "generate", "n": group, "tensor_model_parallel_size": 1, "agent.num_workers": 1}),
        (f"{root}.rollout", {"log_prob_micro_batch_size_per_gpu": size, "dtype": "float32"}),
        ("reward", {"num_workers": 1}),
        ("transfer_queue.backend.SimpleStorage", {"num_data_storage_units": 1}),
        ("trainer", {"device": "cpu", "n_gpus_per_node": 1, "logger": "[console,file]", "project_name": "spanwise"}),
        ("trainer", {"experiment_name": folder.name, "val_before_train": False, "total_training_steps": steps}),
        ("trainer", {"total_epochs": 1000, "default_local_dir": folder / "checkpoints"}),
        ("trainer", {"rollout_data_dir": folder / "rollouts"}),
        ("+ray_kwargs.ray_init", {"num_gpus": 1, "include_dashboard": False}),
        ("ray_kwargs.ray_init", {"num_cpus": 16}),
        ("hydra.run", {"dir": folder / "hydra"}),
    ]
    ours = {f"{place}.{name}": value for place, part in fields for name, value in part.items()}
    theirs = {("+" if key[0] == "_" else "") + key.lstrip("_").replace("__", "."): value for key, value in others.items()}
    return [f"{key}={value}" for key, value in {**ours, **theirs}.items()]


def run(folder: Path, overrides: list[str], *, timeout: float, python: str = sys.executable, **variables: str) -> str:
    """Run verl in a process of its own, its log in `folder/log.txt`; fails with the end of the log."""
    (folder / "record").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for cuda and npu only
        "VERL_ON_CPU_RECORD": str(folder / "record"),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **variables,
    }
    command = [python, "-m", "verl.trainer.main_ppo", *overrides]
    with (folder / "log.txt").open("w") as log:
        verl = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=_tied_to_parent)
        try:
            code = verl.wait(timeout)
        finally:
            if verl.poll() is None:  # too slow, or given up: Ray takes its own processes down when it may leave in order
                verl.send_signal(signal.SIGINT)
                try:
                    verl.wait(60)
                finally:
                    verl.kill()
    text = (folder / "log.txt").read_text()
    assert code == 0, f"verl ended with code {code}:\n{text[-6000:]}"
    return text


def _tied_to_parent() -> None:
    """Let a child be interrupted, and interrupt it when its parent dies, however it dies; Ray then takes its processes down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background starts with SIGINT ignored
    _LIBC.prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG


@dataclass
class Run:
    """The folder of a finished run, its name (the mode of the trainer) and its log."""

    folder: Path
    name: str
    log: str

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line)["data"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "model")

    def dumped(self, step: int) -> list[dict[str, Any]]:
        lines = (self.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @cached_property
    def trained_steps(self) -> list[int]:
        """The steps in which the policy was updated; a critic may be alone before them."""
        return [step for step, line in enumerate(self.metrics, 1) if "actor/grad_norm" in line]

    def trained(self, step: int) -> list[dict[str, Any]]:
        """The rows that the policy's loss took in all updates of a step, as `seen` returns them."""
        updates = len(list((self.folder / "record" / "actor").iterdir())) // len(self.trained_steps)
        first = self.trained_steps.index(step) * updates + 1
        return [row for call in range(first, first + updates) for row in self.seen("actor", call)]

    def seen(self, loss: str, call: int) -> list[dict[str, Any]]:
        """The rows of one call of a loss ("actor" or "critic"): prompt, sampled tokens, and the numbers of each token."""
        import torch

        file = sorted((self.folder / "record" / loss).iterdir(), key=lambda file: file.name.split("-")[1])[call - 1]
        data, rows = torch.load(file), []
        for n, (prompt, ids, mask) in enumerate(zip(data["prompts"], data["responses"], data["response_mask"], strict=True)):
            mask = mask.bool()
            per_token = {name: data[name][n][: len(mask)] for name in set(data) - {"prompts", "responses", "response_mask"}}
            for name in {"advantages", "returns"} & set(per_token):
                assert (per_token[name][~mask] == 0).all()
            sampled = {name: values[mask].tolist() for name, values in per_token.items()}
            text = self.tokenizer.decode(prompt, skip_special_tokens=True)
            rows.append({"prompt": text, "ids": ids[: len(mask)][mask].tolist(), **sampled})
        return rows
