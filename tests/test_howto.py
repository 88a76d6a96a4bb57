"""docs/howto: the diffs that turn one script into another are run, on both sides."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import trl_small

pytestmark = [pytest.mark.usefixtures("unchecked_shapes"), *trl_small.THIRD_PARTY]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto" / "from_grpotrainer.md"


def side(sign):
    """What the one diff of the page takes away (-) or leaves behind (+), as a script."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def solved(completions, answer, **columns):
    return [float(len(text) % 3) for text in completions]


def stated(completions, **columns):
    return [float(len(text) % 2) for text in completions]


@pytest.mark.filterwarnings("ignore")  # a policy that nobody warmed up writes no tags, which is said
@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_diff_train(tmp_path, sign):
    code = side(sign)
    small = "num_generations=4, max_steps=1, max_completion_length=8, use_cpu=True, bf16=False, report_to='none'"
    assert "num_generations=4" in code
    code = code.replace("num_generations=4", small).replace('"out"', f'"{tmp_path}"')
    trl_small.policy(dtype=torch.float32).save_pretrained(tmp_path / "model")
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    data = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+2=", "answer": "3"}] * 4)
    namespace = {"model": str(tmp_path / "model"), "data": data, "solved": solved, "stated": stated}
    exec(compile(code, f"the side {sign} of the diff", "exec"), namespace)
    trainer = namespace["trainer"]
    assert trainer.state.global_step == 1
    assert type(trainer).__name__ == ("GRPOTrainer" if sign == "-" else "SpanGRPOTrainer")
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
