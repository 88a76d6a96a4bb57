"""docs/howto: the diffs that turn one script into another are run, on both sides."""

import re

import pytest
import torch
from datasets import Dataset

import trl_small
from pages import DOCS, README, blocks

pytestmark = [pytest.mark.usefixtures("unchecked_shapes"), *trl_small.THIRD_PARTY]


def side(sign):
    """Return the script before (-) or after (+) the only diff of the page."""
    (diff,) = blocks(DOCS / "howto" / "from_grpotrainer.md", "diff")
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def solved(completions, answer, **columns):
    return [float(len(text) % 3) for text in completions]


def stated(completions, **columns):
    return [float(len(text) % 2) for text in completions]


def small_model(folder):
    trl_small.policy(dtype=torch.float32).save_pretrained(folder)
    trl_small.tokenizer().save_pretrained(folder)
    return str(folder)


def trainer_of(code, names, folder):
    small = "max_steps=1, max_completion_length=8, use_cpu=True, bf16=False, report_to='none', per_device_train_batch_size=8"
    written = r'GRPOConfig\("out", (num_generations=\d)(, max_completion_length=64)?'
    namespace = {**names}
    exec(re.sub(written, rf'GRPOConfig("{folder}", \1, {small}', code), namespace)
    assert namespace["trainer"].state.global_step == 1
    return namespace["trainer"]


@pytest.mark.filterwarnings("ignore")
def test_the_whole_script_of_the_readme_trains(tmp_path):
    (code,) = blocks(README, "python", "notest")
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    assert model in code
    trainer = trainer_of(code.replace(model, small_model(tmp_path / "model")), {}, tmp_path)
    assert trainer.scheme.names == ("equals.customer", "equals.due", "equals.total", "short")
    assert trainer.last_metrics["rewards/short/mean"] == 1.0


@pytest.mark.filterwarnings("ignore")  # a policy that nobody warmed up writes no tags, which is said
@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_diff_train(tmp_path, sign):
    code = side(sign)
    data = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+2=", "answer": "3"}] * 4)
    names = {"model": small_model(tmp_path / "model"), "data": data, "solved": solved, "stated": stated}
    trainer = trainer_of(code, names, tmp_path)
    assert type(trainer).__name__ == ("GRPOTrainer" if sign == "-" else "SpanGRPOTrainer")
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
