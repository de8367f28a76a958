"""The vLLM servers that sample the rollouts of a GRPO run. The servers are either already running,
or the run starts one server per training GPU."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download

from rlm.api_client import APIClient
from rlm.cli import UsageError, terminal
from rlm.data import stop_token_ids
from rlm.sampling import ManagedVLLM, VLLMSampler, server_command, server_options
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

LONGEST_PROMPT = 2048  # maximum prompt length, in tokens, of a server that the run starts


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
        """Check that the servers are running.

        Raises:
            UsageError: a server has exited.
        """
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
        rank = getattr(policy.peft_config["default"], "r")  # LoraConfig's  # noqa: B009
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
    """Make the sampler for --sampler vllm.

    Raises:
        UsageError: a server given by --server does not answer.
    """
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
