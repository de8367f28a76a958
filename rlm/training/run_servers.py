"""vLLM servers for the rollouts of a GRPO run. They are already running, or the run starts one per
training GPU."""

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

LONGEST_PROMPT = 2048  # tokens of the longest prompt that a started server accepts


class RunServers:
    """The vLLM servers of a run. The main process starts and stops them; all processes use them."""

    def __init__(self, policy: PeftModel, config: GRPOConfig, distributed: Distributed) -> None:
        self._policy, self._config, self._distributed = policy, config, distributed
        self._servers: list[ManagedVLLM] = []  # on the main process

    def start(self) -> list[APIClient]:
        """Start the servers, wait until they answer, and return a client for each.

        Raises:
            UsageError: a server cannot be started, or other machines could not reach it.
        """
        if self._distributed.on_several_machines:
            raise UsageError(
                "--sampler vllm starts servers that only this machine reaches; with several "
                "machines start them yourself and name them: --server A,B"
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
        if not Path(model).is_dir():  # the local files that were loaded here, found offline
            model = snapshot_download(model, local_files_only=True)
        length = LONGEST_PROMPT + config.max_new_tokens
        context = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        rank = getattr(policy.peft_config["default"], "r")  # LoraConfig's  # noqa: B009
        options = server_options(policy, min(length, context or length), config.max_num_seqs, rank)
        return server_command(config.vllm_command, model, options)

    def _environments(self) -> list[dict[str, str]]:
        """Return the environment variables of each server, which select its GPU."""
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
    """Make the sampler of --sampler vllm.

    Raises:
        UsageError: no server answers at --server.
    """
    if config.quantize != "none" and "quantization" not in config.vllm_command:
        terminal.line(
            f"warning: --quantize {config.quantize} changes the model that is trained, but not the "
            "one that vLLM samples from (sampler/logprob_gap_mean shows how far they differ): use "
            "--quantize none"
        )

    def export() -> Path:
        path = config.run_dir / "sampler_adapter"
        # save_embedding_layers="auto" would ask the hub for the base's config each time.
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
