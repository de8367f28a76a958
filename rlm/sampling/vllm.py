"""Generates completions on a vLLM server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rlm.api_client import APIClient, APIError
from rlm.cli import UsageError
from rlm.sampling.params import Completion, SamplingParams

# Said although it is nothing: vLLM would look into the model's generation_config.json instead.
NEUTRAL = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


class VLLMSampler:
    """Generates completions on a vLLM server: the same `sample` as `rlm.sampling.Sampler`.

    One request a prompt, for all its completions: vLLM gives completion i the seed + i, which is
    our own rule, reads the prompt once and answers with 1/n of the messages. Equal seeds give
    equal completions again, but not those of our own sampler: it has other random streams.
    """

    exact = False  # other kernels, maybe another number type: not quite what training scores

    def __init__(
        self,
        client: APIClient,
        stop_ids: Collection[int],
        export: Callable[[], Path] | None = None,
    ) -> None:
        """Finds the base model that is served, and checks that log-probabilities are right.

        Args:
            stop_ids: every token that ends a completion (`rlm.data.prompts.stop_token_ids`).
            export: writes the adapter that is trained and says where. What it wrote is loaded
                before the first batch, and before the next one after each `release`.

        Raises:
            UsageError: there is no server, or one that can not give what training needs.
        """
        self._client, self._export, self._stale = client, export, True
        self.stop_ids = frozenset(stop_ids)
        # vLLM names what an adapter stands on as its parent; the base model has none.
        self._model = next(m["id"] for m in client.models() if not m.get("parent"))
        self._adapter: str | None = None
        self._check_logprobs()
        self.description = f"vLLM at {client.url}"

    def bytes_for(self, *_: object) -> int:
        """A batch takes no memory here."""
        return 0

    def release(self) -> None:
        """The batch is over: training goes on, and the adapter on the server is then stale."""
        self._stale = True

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seeds: Sequence[int],
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """Generate as `rlm.sampling.Sampler.sample` does, from the adapter of the last `sync`.

        Raises:
            APIError: the server failed, or ends completions on other tokens than the model.
            UsageError: it does not return token ids and log-probabilities.
        """
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds")
        if not prompts:
            return []
        if self._export and self._stale:
            self.sync(self._export())
            self._stale = False
        groups: list[list[Completion]] = [[] for _ in prompts]
        with ThreadPoolExecutor(min(len(prompts), self._client.concurrency)) as pool:
            futures = {
                pool.submit(self._group, prompt, n, params, seed): i
                for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            }
            try:
                for future in as_completed(futures):
                    groups[futures[future]] = future.result()
                    for _ in range(n):
                        on_finish()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # nothing new is sent
                raise
        return groups

    def sync(self, adapter_dir: Path) -> None:
        """Sample from this adapter from now on. The server reads the directory itself.

        Raises:
            UsageError: it refuses; it goes on with the adapter that it had.
        """
        # A new name each time: vLLM keeps the keys and values of prompts by the adapter's name.
        name = f"rlm-{uuid.uuid4().hex[:12]}"
        path = str(adapter_dir.resolve())
        try:
            self._client.post("load_lora_adapter", {"lora_name": name, "lora_path": path})
        except UsageError as error:
            raise UsageError(
                f"the server did not load the adapter {path}: {error}; it needs --enable-lora, "
                "--max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and to see that directory"
            ) from error
        previous, self._adapter = self._adapter, name
        if previous:
            self._client.post("unload_lora_adapter", {"lora_name": previous})

    def _group(
        self, prompt: Sequence[int], n: int, params: SamplingParams, seed: int
    ) -> list[Completion]:
        greedy = params.temperature == 0  # n times the same: asked once, and vLLM insists on it
        body = {
            "model": self._adapter or self._model,
            "prompt": list(prompt),
            "n": 1 if greedy else n,
            "seed": seed,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop": list(params.stop),
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": 0,  # of the drawn tokens, no others
            "return_token_ids": True,
            **NEUTRAL,
        }
        choices = self._client.post("completions", body).get("choices", [])
        if len(choices) != body["n"]:
            raise APIError(f"asked for {body['n']} completions, got {len(choices)}", 200)
        choices = sorted(choices, key=lambda choice: choice["index"])
        return [
            self._completion(choice, stop_texts=bool(params.stop))
            for choice in (choices * n if greedy else choices)
        ]

    def _completion(self, choice: dict[str, Any], *, stop_texts: bool) -> Completion:
        ids = choice.get("token_ids") or []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        reason = choice.get("finish_reason")
        if not ids or len(ids) != len(logprobs) or None in logprobs:
            raise UsageError(
                f"{self._client.url} returns no token ids with their log-probabilities; "
                "sampling there needs a vLLM server"
            )
        ended = ids[-1] in self.stop_ids
        if reason not in ("stop", "length") or ((reason == "stop") != ended and not stop_texts):
            raise APIError(
                f"{self._client.url} ended a completion ({reason}) at token {ids[-1]}: that is "
                "not how the model being trained ends; is another one served?"
            )
        return Completion(list(ids), [float(logprob) for logprob in logprobs], reason)

    def _check_logprobs(self) -> None:
        """Check that log-probabilities are of what was drawn from: 0 where top_k = 1 leaves one.

        vLLM's default are those before temperature, top_p and top_k. A few tokens are asked for,
        because of a single one the model may be sure anyway.
        """
        params = SamplingParams(max_new_tokens=8, top_k=1)
        (drawn,) = self._group([min(self.stop_ids)], 1, params, 0)
        if min(drawn.logprobs) < -1e-4:
            raise UsageError(
                f"{self._client.url} gives log-probabilities that leave out temperature, top_p "
                "and top_k: start it with --logprobs-mode processed_logprobs"
            )
