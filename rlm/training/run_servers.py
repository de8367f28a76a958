"""The vLLM servers that sample the rollouts of a GRPO run. The servers are either already running,
or the run starts one server per training GPU and stops the servers when it ends."""

from __future__ import annotations

import http.client
import math
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from huggingface_hub import snapshot_download

from rlm.api_client import APIClient
from rlm.cli import UsageError, terminal
from rlm.data import stop_token_ids
from rlm.model import available_memory, release_memory
from rlm.sampling import VLLMSampler
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST_PROMPT = 2048  # maximum prompt length, in tokens, of a server that the run starts
START_TIMEOUT = 900.0  # seconds; compiling a large model for the first time takes minutes
PROGRESS_INTERVAL = 20.0  # seconds between two progress messages
PORTS_TRIED = 3  # maximum number of ports to try
LOG_LINES = 15  # number of log lines to print when the server has exited
MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank accepts
# vLLM's KV cache gets this share of the memory that its weights leave free; training gets the rest.
KV_SHARE = 0.4
# Names or prefixes of the environment variables that torchrun sets for each process. The server
# must not inherit these variables.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
# A shell script that ends the server's process group ($1) when its standard input is closed. The
# system closes this input when the trainer ends for any reason, even by kill -9. The script first
# sends SIGTERM, so that vLLM's processes free the GPU, and sends SIGKILL after ten seconds.
WATCHDOG = """
read -r _
kill -s TERM -- "-$1"
for _ in $(seq 100); do kill -s 0 -- "-$1" || exit; sleep 0.1; done
kill -s KILL -- "-$1"
"""


class RunServers:
    """The vLLM servers that a run starts.

    The main process starts and stops the servers; all processes of the run use them.
    """

    def __init__(self, policy: PeftModel, config: GRPOConfig, distributed: Distributed) -> None:
        self._policy, self._config, self._distributed = policy, config, distributed
        self._servers: list[ManagedVLLM] = []  # empty except in the main process

    def start(self) -> list[APIClient]:
        """Start the servers, wait until they answer, and return a client for each server.

        Raises:
            UsageError: a server cannot be started, or the run uses several machines, which could
                not reach the servers.
        """
        if self._distributed.on_several_machines:
            raise UsageError(
                "--sampler vllm starts servers that only this machine can reach: with several "
                "machines, start the servers yourself and pass their URLs with --server A,B"
            )
        if self._distributed.is_main:
            command, config = self._command(), self._config
            for i, env in enumerate(self._environments()):
                log = config.run_dir / f"vllm{f'_{i}' if i else ''}.log"
                self._servers.append(ManagedVLLM(command, log, env))
            for server in self._servers:
                server.wait_until_healthy()
        addresses = [(server.url, server.key) for server in self._servers]
        return [
            APIClient(url, api_key=key, concurrency=self._config.max_num_seqs)
            for url, key in self._distributed.broadcast(addresses)
        ]

    def check(self) -> None:
        """Check that the servers are running."""
        for server in self._servers:
            server.check()

    def stop(self) -> None:
        """Stop the servers and wait until they have exited."""
        for server in self._servers:
            server.stop()
        self._servers.clear()

    def _command(self) -> list[str]:
        policy, config = self._policy, self._config
        model = str(policy.get_base_model().name_or_path)
        if not Path(model).is_dir():  # find the downloaded files without the network
            model = snapshot_download(model, local_files_only=True)
        length = LONGEST_PROMPT + config.max_new_tokens
        context = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        rank = getattr(policy.peft_config["default"], "r")  # PeftConfig declares no r  # noqa: B009
        options = server_options(policy, min(length, context or length), config.max_num_seqs, rank)
        return server_command(config.vllm_command, model, options)

    def _environments(self) -> list[dict[str, str]]:
        """Return the environment variables for each server, which select the server's GPU."""
        size = self._distributed.size
        if size == 1 or self._policy.device.type != "cuda":
            return [{}]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
        return [{"CUDA_VISIBLE_DEVICES": card} for card in visible.split(",")[:size]]


def make_vllm_sampler(
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig,
    distributed: Distributed,
) -> VLLMSampler:
    """Make the sampler for --sampler vllm."""
    if config.quantize != "none" and "quantization" not in config.vllm_command:
        terminal.line(
            f"warning: --quantize {config.quantize} changes the model that is trained, but not the "
            "model that vLLM samples from (sampler/logprob_gap_mean shows how far the two differ): "
            "use --quantize none"
        )

    def export() -> Path:
        path = config.run_dir / "sampler_adapter"
        # save_embedding_layers="auto" would request the base model's config from the hub each time.
        policy.save_pretrained(
            str(path), selected_adapters=["default"], save_embedding_layers=False
        )
        return path

    servers: RunServers | Sequence[APIClient] = RunServers(policy, config, distributed)
    if urls := config.server_urls:
        key = "VLLM_API_KEY" if "VLLM_API_KEY" in os.environ else None
        servers = [APIClient(url, concurrency=config.max_num_seqs, api_key_env=key) for url in urls]
    return VLLMSampler(
        servers,
        stop_token_ids(tokenizer, policy.generation_config),
        export,
        run=distributed.broadcast(uuid.uuid4().hex[:12]),
        is_main=distributed.is_main,
    )


class ManagedVLLM:
    """A vLLM server on this machine that is stopped when this object or this process ends."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] = {}) -> None:
        """Start the server; `wait_until_healthy` returns when the server is ready.

        Args:
            command: the command line from `server_command`, to which host and port are added.
            log: the file to which the server's output is written.
            env: environment variables to set in addition to those of this process.
        """
        self.log, self._command = log, list(command)
        self.key = secrets.token_urlsafe(24)
        ours = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)}
        switches = {"VLLM_API_KEY": self.key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        self._env = {**ours, **env, **switches}
        self._launch()

    @property
    def url(self) -> str:
        """Return the address of the server's API."""
        return f"http://127.0.0.1:{self._port}/v1"

    def wait_until_healthy(self) -> None:
        """Wait until the server is ready, and print progress; retry if the port is already in use.

        Raises:
            UsageError: the server has exited or is not ready in time. The last lines of its log are
                printed first.
        """
        began = said = time.monotonic()
        ports = 1
        terminal.line(f"starting vLLM (its log: {self.log})")
        while self._process.poll() is not None or not self._is_healthy():
            if self._process.poll() is not None:
                taken = any("address already in use" in line.lower() for line in self._last_lines())
                if ports == PORTS_TRIED or not taken:
                    self.check()
                ports += 1
                self._launch()
            now = time.monotonic()
            if now - began > START_TIMEOUT:
                self.stop()
                self._print_last_lines()
                raise UsageError(f"vLLM was not ready after {START_TIMEOUT:.0f} s: see {self.log}")
            if now - said > PROGRESS_INTERVAL:
                said = now
                last = "".join(self._last_lines(1)).split("] ")[-1].strip()[:80]
                terminal.line(f"vLLM is starting: {terminal.duration(now - began)} so far: {last}")
            time.sleep(0.1)
        terminal.line(f"vLLM is ready after {terminal.duration(time.monotonic() - began)}")

    def check(self) -> None:
        """Check that the server is still running.

        Raises:
            UsageError: the server has exited. The last lines of its log are printed first.
        """
        code = self._process.poll()
        if code is not None:
            self._print_last_lines()
            raise UsageError(f"vLLM has exited with code {code}: see {self.log}")

    def _launch(self) -> None:
        self._port = _free_port()
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The server gets its own session, so that Ctrl-C in the terminal reaches only the trainer.
        detached = {"start_new_session": True, "stderr": subprocess.STDOUT}
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*self._command, *address],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                **detached,
            )
        watchdog = subprocess.Popen(
            ["sh", "-c", WATCHDOG, "sh", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            **detached,
        )
        self.stop = weakref.finalize(self, _stop, self._process, watchdog)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_lines(self, count: int = LOG_LINES) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 2**16))
            lines = log.read().decode(errors="replace").splitlines()
        return [line.rstrip()[:300] for line in lines if line.strip()][-count:]

    def _print_last_lines(self) -> None:
        lines = [f"  | {line}" for line in self._last_lines()]
        terminal.line("\n".join([f"the last lines of {self.log}:", *lines]))


def _stop(process: subprocess.Popen, watchdog: subprocess.Popen) -> None:
    assert watchdog.stdin  # a pipe, opened in `_launch`
    watchdog.stdin.close()
    process.wait()  # ends when the watchdog sends SIGKILL, if not before
    watchdog.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def split_command(command: str) -> list[str]:
    """Split the command from --server into words, and look up the program on PATH.

    Raises:
        UsageError: the program is not found, or the command is malformed.
    """
    try:
        program, *words = shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"--server {command!r} is not a valid command: {error or 'it is empty'}"
        ) from error
    found = shutil.which(os.path.expanduser(program))
    if not found:
        raise UsageError(
            f"{program} is not found: vLLM needs an environment of its own "
            "(python -m venv ~/vllm-env && ~/vllm-env/bin/pip install vllm); then add "
            "--server '~/vllm-env/bin/vllm serve', or pass the --server URL of a running server"
        )
    return [found, *map(os.path.expanduser, words)]


def server_command(command: str, model: str, options: Mapping[str, object]) -> list[str]:
    """Return the command line that serves a model.

    Args:
        command: the command from --server. Options in this command override `options`.
        options: the values by option name; None for a flag without a value.
    """
    words = split_command(command)
    # `vllm serve` takes the model as an argument; `python -m vllm…` needs --model.
    if "serve" in words:
        words.insert(words.index("serve") + 1, model)
    else:
        words += ["--model", model]
    named = {word.split("=")[0].replace("_", "-") for word in words}
    for name, value in options.items():
        if f"--{name}" not in named:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def server_options(
    policy: PreTrainedModel | PeftModel, max_model_len: int, max_num_seqs: int, rank: int
) -> dict[str, object]:
    """Return the options for `server_command` with which a run's server is started.

    Args:
        rank: the LoRA rank of the adapter.

    Raises:
        UsageError: vLLM does not support the rank of the adapter, or there is not enough memory.
    """
    if rank > MAX_LORA_RANKS[-1]:
        raise UsageError(f"vLLM supports adapters of rank {MAX_LORA_RANKS[-1]} at most, not {rank}")
    return {
        "dtype": str(policy.dtype).removeprefix("torch."),
        "max-model-len": max_model_len,
        "max-num-seqs": max_num_seqs,
        "enable-lora": None,
        "max-lora-rank": next(allowed for allowed in MAX_LORA_RANKS if allowed >= rank),
        "max-loras": 1,
        "max-cpu-loras": 2,  # a new adapter is loaded before the previous adapter is unloaded
        "logprobs-mode": "processed_logprobs",
        "gpu-memory-utilization": _memory_share(policy),
    }


def _memory_share(policy: PreTrainedModel | PeftModel) -> float:
    """Compute the server's share of the memory of the training GPU (without a GPU, of the RAM).

    vLLM's own default is nine tenths of the total memory.
    """
    release_memory()
    free = available_memory(policy.device.type)
    if policy.device.type == "cuda":
        total = torch.cuda.mem_get_info()[1]
    else:
        total = psutil.virtual_memory().total
    weights = policy.num_parameters() * policy.dtype.itemsize  # vLLM loads them unquantized
    if free < 1.2 * weights:
        raise UsageError(
            f"vLLM would need {1.2 * weights / 2**30:.1f} GB besides the model being trained, "
            f"but only {free / 2**30:.1f} GB are free: use a smaller --model, --sampler auto, or "
            "another GPU (docs/how-to/vllm.md)"
        )
    return math.floor(100 * (weights + KV_SHARE * (free - weights)) / total) / 100
