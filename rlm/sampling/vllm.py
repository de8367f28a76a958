"""Generates completions on vLLM servers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from rlm.api_client import APIClient, APIError
from rlm.cli import UsageError
from rlm.sampling.requests import Completion, SamplingParams

LOAD_TIMEOUT = 300.0  # seconds to wait until the main process has loaded an adapter


class ManagedServers(Protocol):
    """The vLLM servers that this run starts itself."""

    def start(self) -> Sequence[APIClient]:
        """Start the servers, and return their clients."""
        ...

    def check(self) -> None:
        """Raise UsageError if a server has exited."""

    def stop(self) -> None:
        """Stop the servers."""


class VLLMSampler:
    """Generates completions on vLLM servers; `sample` works as in `rlm.sampling.Sampler`.

    One request is sent per prompt, for all completions of the prompt. vLLM prefills the prompt once
    and samples completion i with the seed + i, as `Sampler` does. Equal seeds give equal
    completions on vLLM, but not the completions of `Sampler`, which uses other random streams. With
    several servers, prompts are distributed round-robin, and the adapter is loaded on each server.
    """

    matches_trainer = False  # vLLM uses other kernels, and possibly another dtype

    def __init__(
        self,
        servers: Sequence[APIClient] | ManagedServers,
        stop_ids: Collection[int],
        export: Callable[[], Path] | None = None,
        *,
        run: str | None = None,
        is_main: bool = True,
    ) -> None:
        """Find the base model on each server, and check the log-probabilities that it returns.

        Args:
            servers: clients of running servers, or the run's own servers, which `start` starts.
            stop_ids: every token that ends a completion (`rlm.data.prompts.stop_token_ids`).
            export: a function that saves the adapter being trained and returns its path. The
                adapter is loaded before the first batch, and again before the first batch after a
                call of `invalidate_weights`.
            run: a part of the adapter's name that is the same in all processes of the run (None: a
                random one).
            is_main: False in processes that wait for the main process to load the adapter.
        """
        self._export, self._is_main = export, is_main
        self._run = run or uuid.uuid4().hex[:12]
        self._version = 0  # number of adapter changes, the same in all processes
        self.stop_ids = frozenset(stop_ids)
        self.max_model_len: int | None = None  # the longest sequence that all servers accept
        self._models: list[tuple[APIClient, str]] = []  # client, base model's name on its server
        self._adapter: str | None = None
        self._managed: ManagedServers | None = None
        if isinstance(servers, Sequence):
            self.description = f"vLLM at {' and '.join(client.url for client in servers)}"
            self._connect(servers)
        else:
            self._managed, self.description = servers, "vLLM, started for this run"

    def start(self) -> None:
        """Start this run's own servers if they are not running. `sample` calls this method, too."""
        if self._managed and not self._models:
            self._connect(self._managed.start())

    def close(self) -> None:
        """Stop this run's own servers. The next batch would start the servers again."""
        if self._managed:
            self._managed.stop()
            self._models, self._adapter = [], None

    def _connect(self, clients: Sequence[APIClient]) -> None:
        lengths = set()
        for client in clients:
            # For an adapter, vLLM reports the base model as `parent`; a base model has no parent.
            base = next(model for model in client.models() if not model.get("parent"))
            lengths |= {base.get("max_model_len")} - {None}
            self._models.append((client, base["id"]))
            self._check_logprobs(client, base["id"])
        self.max_model_len = min(lengths, default=None)

    def bytes_for(self, *_: object) -> int:
        """Return 0, because a batch uses no memory of this process."""
        return 0

    def release(self) -> None:
        """Do nothing, because the servers keep their memory between batches."""

    def invalidate_weights(self) -> None:
        """Reload the adapter before the next batch, because training has changed it.

        All processes of a run must call this method equally often, because the number of calls is
        part of the adapter's name.
        """
        self._version += 1

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seeds: Sequence[int],
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """Generate completions with the current adapter, as `rlm.sampling.Sampler.sample` does.

        Raises:
            APIError: a request failed, or a completion ended with a token that does not end
                completions of the model being trained.
            UsageError: a server does not return token ids with log-probabilities, or has exited.
        """
        if not prompts:
            return []
        self.start()
        try:
            self._follow_adapter()
            at_once = sum(client.concurrency for client, _ in self._models)
            with ThreadPoolExecutor(min(len(prompts), at_once)) as pool:
                futures = []
                for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                    client, base = self._models[i % len(self._models)]
                    request = client, self._adapter or base, prompt, n, params, seed
                    futures.append(pool.submit(self._group, *request))
                try:
                    for future in as_completed(futures):
                        future.result()
                        for _ in range(n):
                            on_finish()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)  # send no more requests
                    raise
        except APIError:
            if self._managed:
                self._managed.check()
            raise
        return [future.result() for future in futures]

    def _follow_adapter(self) -> None:
        """Load the current adapter, or wait until the main process has loaded it.

        Every process can compute the adapter's name. No process is still sampling with the previous
        adapter, because all processes have exchanged the rewards of the last batch.
        """
        # The name is new each time, because vLLM caches prompts by the adapter's name.
        name = f"rlm-{self._run}-{self._version}"
        if name == self._adapter or not self._export:
            return
        if self._is_main:
            self._load(name, self._export().resolve())
        else:
            self._wait_for(name)
        self._adapter = name

    def _load(self, name: str, path: Path) -> None:
        """Load an adapter on every server under the given name, then unload the previous adapter.

        Raises:
            UsageError: a server does not load the adapter, for example because it has no access to
                the directory.
        """
        for client, _ in self._models:
            try:
                client.post("load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            except UsageError as error:
                if self._managed:
                    self._managed.check()
                raise UsageError(
                    f"{client.url} did not load the adapter {path}: {error}; start the server with "
                    "--enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and "
                    "check that the server can read this directory"
                ) from error
        if self._adapter:
            for client, _ in self._models:
                client.post("unload_lora_adapter", {"lora_name": self._adapter})

    def _wait_for(self, name: str) -> None:
        until = time.monotonic() + LOAD_TIMEOUT
        for client, _ in self._models:
            while name not in {model["id"] for model in client.models()}:
                if time.monotonic() > until:
                    raise UsageError(
                        f"the main process has not loaded {name} on {client.url} within "
                        f"{LOAD_TIMEOUT:g} s: see its error message"
                    )
                time.sleep(0.05)

    def _group(
        self,
        client: APIClient,
        model: str,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        seed: int,
    ) -> list[Completion]:
        greedy = params.temperature == 0  # all n completions are equal, and vLLM rejects n > 1
        body = {
            "model": model,
            "prompt": list(prompt),
            "n": 1 if greedy else n,
            "seed": seed,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": 0,  # return the log-probabilities of the sampled tokens only
            "return_token_ids": True,
            # Without these values, vLLM would use those in the model's generation_config.json.
            "top_k": 0,
            "min_p": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        }
        choices = client.post("completions", body).get("choices", [])
        if len(choices) != body["n"]:
            raise APIError(
                f"{client.url} returned {len(choices)} completions instead of {body['n']}", 200
            )
        choices = sorted(choices, key=lambda choice: choice["index"])
        return [
            self._completion(client.url, choice) for choice in (choices * n if greedy else choices)
        ]

    def _completion(self, url: str, choice: dict[str, Any]) -> Completion:
        ids = choice.get("token_ids") or []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        reason = choice.get("finish_reason")
        if not ids or len(ids) != len(logprobs) or None in logprobs:
            raise UsageError(
                f"{url} does not return token ids with log-probabilities: "
                "check that it is the address of a vLLM server"
            )
        ended = ids[-1] in self.stop_ids
        if reason not in ("stop", "length") or (reason == "stop" and not ended):
            raise APIError(
                f"{url} ended a completion ({reason}) at token {ids[-1]}, which does not end "
                "completions of the model being trained: check that the server serves this model"
            )
        # Older versions of vLLM say "length" if the end token is the last token that was allowed.
        reason = "stop" if ended else "length"
        return Completion(list(ids), [float(logprob) for logprob in logprobs], reason)

    def _check_logprobs(self, client: APIClient, model: str) -> None:
        """Check that the server returns log-probabilities under the sampled distribution.

        By default, vLLM returns the log-probabilities before temperature, top_p and top_k are
        applied. A small top_p leaves one token, so the log-probability under the sampled
        distribution is 0. Several tokens are requested, because the model may assign a probability
        near 1 to a single token anyway.
        """
        params = SamplingParams(max_new_tokens=8, top_p=1e-6)
        (drawn,) = self._group(client, model, [min(self.stop_ids)], 1, params, 0)
        if min(drawn.logprobs) < -1e-4:
            raise UsageError(
                f"{client.url} computes log-probabilities before temperature, top_p and top_k are "
                "applied: start it with --logprobs-mode processed_logprobs"
            )
