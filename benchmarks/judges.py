"""How long 1,000 questions to a server that takes 200 ms take, beside the bound, and the same again from the cache.

    python benchmarks/judges.py [--where files,trl] [--items 1000] [--delay 0.2] [--concurrent 64]
    .venv-verl/bin/python benchmarks/judges.py --where verl    # verl's own reward workers, eight processes

The bound is items / concurrent x delay. The server runs in a process of its own. In TRL the time is that of a training step with
the judge minus that of the same step with a function that answers at once; in verl it is that of
`RewardLoopManager.compute_rm_score`, minus the same. Needs `spanwise[judge]` and aiohttp.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines" / "verl"))

from judge_server import Server, verdict
from spanwise import Layout, Objective, Scheme, score_all

GROUP = 4


def serve(delay, pipe):
    """Serve until the pipe says something; tell the most requests that were in flight."""
    with Server(lambda part, request, times: verdict("yes"), delay).serving() as server:
        pipe.send(server.url)
        while pipe.recv() != "end":
            pipe.send((len(server.requests), server.most))


def judge_of(url, concurrent, cache):
    """The judge as an objective of the block `all`."""
    options = {"model": "judge", "base_url": url, "max_concurrent": concurrent, "cache": cache}
    return Objective("judge", pays="all", options=options)


async def instant(blocks):
    """Answer at once."""
    return [1.0 for _ in blocks]


def in_files(items, objective):
    """The seconds that a batch of different completions takes."""
    text = [{"all": {"": f"step {n} of a proof"}} for n in range(items)]
    started = time.perf_counter()
    rewards = score_all([objective], text, columns={}).reward_nm
    assert rewards.sum() == items
    return time.perf_counter() - started


def in_trl(items, objective):
    """The seconds of a training step of TRL on as many completions, each of a prompt of its own to be different."""
    from datasets import Dataset

    import trl_small as small

    rows = [{"prompt": f"{n}+{n}=", "answer": "4"} for n in range(items // GROUP)]
    scripts = [small.say("ab" * (n % GROUP + 1), "4", 0.9, 1.0) for n in range(items)]
    with tempfile.TemporaryDirectory() as folder:
        run = small.trainer(
            folder,
            scripts=scripts,
            extra={"scheme": Scheme.preset("bae", Layout({"all": []}), objectives=[objective]),
                   "train_dataset": Dataset.from_list(rows)},
            per_device_train_batch_size=items,
            num_generations=GROUP,
        )  # fmt: skip
        started = time.perf_counter()
        run.train()
    return time.perf_counter() - started


def rollouts(items):
    """Different rollouts as verl hands them to its reward workers."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    ids = torch.tensor([[*f"step {n:05} of a proof".encode()] for n in range(items)])
    mask = torch.ones(items, ids.shape[1] + 2, dtype=torch.long)
    tensors = TensorDict({"prompts": ids[:, :2], "responses": ids, "attention_mask": mask}, batch_size=items)
    fields = {
        "data_source": ["small"] * items,
        "reward_model": [{"ground_truth": "4"}] * items,
        "extra_info": [{} for _ in range(items)],
        "raw_prompt": [f"{n}+{n}=" for n in range(items)],
    }
    columns = {name: np.array(values, dtype=object) for name, values in fields.items()}
    return DataProto(batch=tensors, non_tensor_batch=columns)


def in_verl(items, objective):
    """The seconds that eight of verl's reward workers take for as many rollouts, after a first few that load everything."""
    import ray
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager
    from verl_small import config_of

    from spanwise.engines.verl.settings import prepare

    reward = "judges:instant" if objective.reward is instant else objective.reward
    plain = {"reward": reward, "pays": ["all"], "options": dict(objective.options)}
    with tempfile.TemporaryDirectory() as folder:
        recipe = f"{{layout: {{all: []}}, method: bae, objectives: [{plain}]}}"
        config = config_of(Path(folder), "reward.num_workers=8", recipe=recipe)
        prepare(config)
        if not ray.is_initialized():
            environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path[:3]), "OMP_NUM_THREADS": "1"}}
            ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", runtime_env=environment)
        manager, data = RewardLoopManager(config), rollouts(items)
        manager.compute_rm_score(data[:16])
        started = time.perf_counter()
        scores = manager.compute_rm_score(data).batch["rm_scores"]
        seconds = time.perf_counter() - started
    assert scores.sum() == items
    for worker in manager.reward_loop_workers:
        ray.kill(worker)
    return seconds


def main():
    """Print the seconds of the first and of the second run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="files,trl")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--concurrent", type=int, default=64)
    options = parser.parse_args()
    bound = options.items / options.concurrent * options.delay
    for where in options.where.split(","):
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.delay, theirs), daemon=True)
        server.start()
        url, measure = ours.recv(), {"files": in_files, "trl": in_trl, "verl": in_verl}[where]
        with tempfile.TemporaryDirectory() as folder:
            in_files(8, judge_of(url, 8, None))  # loads the client
            objective = judge_of(url, options.concurrent, f"{folder}/judge.sqlite")
            beside = (
                0.0 if where == "files" else min(measure(options.items, Objective(instant, pays="all")) for _ in range(2))
            )
            first, second = (measure(options.items, objective) - beside for _ in range(2))
        ours.send("count")
        requests, most = ours.recv()
        ours.send("end")
        share = (
            f"bound {bound:.2f} s, first run {first:.2f} s ({first / bound:.2f}), second run from the cache {second:.2f} s"
        )
        print(f"{where}: {share}; {requests} requests, at most {most} at a time, the rest {beside:.2f} s", flush=True)


if __name__ == "__main__":
    main()
