"""Starts the vLLM servers of a GRPO run: one on each card that trains, or one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download

from rlm.api_client import APIClient
from rlm.cli import UsageError
from rlm.sampling import ManagedVLLM, server_command, server_options
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed

if TYPE_CHECKING:
    from peft import PeftModel

LONGEST_PROMPT = 2048  # tokens that a server takes, where --max-prompt-length says nothing


class RunServers:
    """The vLLM servers of a run: the main process starts and ends them, all sample from them."""

    def __init__(self, policy: PeftModel, config: GRPOConfig, distributed: Distributed) -> None:
        self._policy, self._config, self._distributed = policy, config, distributed
        self._servers: list[ManagedVLLM] = []  # of the main process

    def start(self) -> list[APIClient]:
        """Start them, wait until they answer, and return a client for each.

        Raises:
            UsageError: one cannot be started, or processes on another machine could not reach it.
        """
        if self._distributed.on_several_machines:
            raise UsageError(
                "--sampler vllm starts servers that only this machine reaches; with several "
                "machines start them yourself and name them: --sampler-url A,B"
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
        """Do nothing while they run.

        Raises:
            UsageError: one has ended.
        """
        for server in self._servers:
            server.check()

    def stop(self) -> None:
        """End them, and wait until they have ended."""
        for server in self._servers:
            server.stop()
        self._servers.clear()

    def _command(self) -> list[str]:
        policy, config = self._policy, self._config
        model = policy.get_base_model().name_or_path
        if not Path(model).is_dir():  # the very files that were loaded here, without the network
            model = snapshot_download(model, local_files_only=True)
        length = (config.max_prompt_length or LONGEST_PROMPT) + config.max_new_tokens
        context = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        rank = policy.peft_config["default"].r
        options = server_options(policy, min(length, context or length), config.max_num_seqs, rank)
        return server_command(config.vllm_command, model, options)

    def _environments(self) -> list[dict[str, str]]:
        """Return what each server's environment has of its own: the card that it sees."""
        size = self._distributed.size
        if size == 1 or self._policy.device.type != "cuda":
            return [{}]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
        return [{"CUDA_VISIBLE_DEVICES": card} for card in visible.split(",")[:size]]
