"""Samples and trains on a server that implements Tinker's protocol.

The server is either Thinking Machines' service or SkyRL's server with the JAX backend. The base
model, the adapter and the optimizer are on the server. Rewards, advantages and the loss are
computed in this process. Any loss L of the log-probabilities is supported: this process computes
the gradient g = dL/d log π for each token, and dL/dθ is the sum of g ∇ log π over the tokens. The
server computes this sum as the gradient of its `importance_sampling` loss, with -g as the
advantages and the current log-probabilities as the old log-probabilities.
"""

from __future__ import annotations

import os
import tarfile
import threading
import urllib.request
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlm.cli import UsageError, terminal
from rlm.model import ADAPTER_FILES, adapter_tensors, fill_adapter
from rlm.sampling.requests import Completion, SamplingParams

if TYPE_CHECKING:
    import tinker
    from peft import PeftModel

T = TypeVar("T")
Sequences = list[tuple[list[int], list[int]]]  # (prompt, completion) pairs of token ids
WAIT = 1800.0  # seconds to wait for a reply; a step of a large model takes minutes
HOSTED = "Thinking Machines' service"


class Batch(Protocol):
    """A batch whose tokens are scored, such as `rlm.training.MicroBatch`."""

    def sequences(self) -> Sequences: ...


def served_name(model: str, served: Collection[str], where: str) -> str:
    """Return the server's name for a base model.

    Hub ids must be equal, because models of different owners may have the same name. If the model
    is a folder here or on the server, only the last parts of the two names must be equal.

    Raises:
        UsageError: the server does not serve this model. Without this check, SkyRL would silently
            train the model that it serves.
    """
    if model in served:
        return model
    for name in served:
        is_folder = Path(model).is_dir() or Path(name).is_absolute()
        if is_folder and Path(name).name == Path(model).name:
            return name
    named = ", ".join(sorted(served)) or "nothing"
    raise UsageError(f"{where} does not serve --model {model}: choose one of its models ({named})")


def read_archive(archive: Path, folder: Path) -> None:
    """Extract the adapter's tensors from a server's archive of the adapter.

    The adapter_config.json in the archive is ignored: SkyRL's file lists no target modules, so PEFT
    would silently drop tensors.
    """
    name = ADAPTER_FILES[1]
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if Path(member.name).name == name else None
            if file:
                (folder / name).write_bytes(file.read())
                return
    raise UsageError(f"the server's archive has no {name}: start SkyRL's server with --backend jax")


class TinkerOptimizer(torch.optim.Adam):
    """Adam on the server, with the learning rate and the other settings of this object."""

    def __init__(self, engine: TinkerEngine, learning_rate: float) -> None:
        super().__init__(engine.master_weights.values(), lr=learning_rate)
        self._engine = engine

    # torch declares two overloads of `step`.
    def step(self, closure: None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send the gradients, update the adapter, and return the gradient norm if it is known."""
        return self._engine.update(self.param_groups[0])


class TinkerEngine:
    """A base model with an adapter on a server that implements Tinker's protocol.

    This class has the sampling interface of `rlm.sampling.Sampler` and the training interface of
    `rlm.training.MixedPrecisionAdapter`.

    master_weights: a local copy of the adapter, made by the last `fetch`.
    """

    matches_trainer = False  # sampling uses other kernels, and possibly another dtype

    def __init__(
        self,
        policy: PeftModel,
        model: str,
        stop_ids: Collection[int],
        *,
        rank: int,
        seed: int,
        max_grad_norm: float,
        url: str | None = None,
    ) -> None:
        """Connect to the server and find the base model. The adapter is created at its first use.

        Args:
            policy: an adapter on a base model without weights (`rlm.model.adapter_without_base`).
            rank: the LoRA rank of a new adapter.
            seed: the random seed for the initialization of a new adapter.
            url: the server's URL; None selects Thinking Machines' service.
        """
        try:
            import tinker
        except ImportError as error:
            needs = "--backend tinker needs its SDK: pip install 'tinker>=0.24.1,<0.25'"
            raise UsageError(needs) from error
        key, release = os.environ.get("TINKER_API_KEY"), version("tinker")
        if not (key or url):
            raise UsageError(
                f"{HOSTED} requires an API key: set TINKER_API_KEY, or pass --server URL"
            )
        if url:
            terminal.line("SkyRL's server does not clip gradients: --max-grad-norm has no effect")
        if url and tuple(map(int, release.split(".")[:2])) >= (0, 25):
            terminal.line(
                f"warning: SkyRL 0.3 does not answer tinker {release}, which uses a newer wire "
                "format: install tinker 0.24.1, or use SkyRL 0.4 or later"
            )
        self.policy, self.stop_ids = policy, frozenset(stop_ids)
        self.model_weights = self.master_weights = adapter_tensors(policy)
        self.where = f"the server at {url}" if url else HOSTED
        self.description = f"{self.where}, with Tinker's protocol"
        self.scored: list[tuple[Sequences, Tensor]] = []  # batches since the last update
        self._new, self._max_grad_norm = (rank, seed), max_grad_norm
        self._sdk, self._is_skyrl, self._is_closed = tinker, url is not None, False
        self._training: tinker.TrainingClient | None = None
        self._sampling: tinker.SamplingClient | None = None  # samples with the current adapter
        self._is_fetched = False
        self._service = tinker.ServiceClient(base_url=url, api_key=key or "tml-local")
        found = self._ask("answer", self._service.get_server_capabilities).supported_models
        lengths = {m.model_name: m.max_context_length for m in found if m.model_name}
        self._base = served_name(model, lengths, self.where)
        self.max_model_len = lengths[self._base]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seeds: Sequence[int],
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[list[Completion]]:
        """Generate completions with the current adapter, as `rlm.sampling.Sampler.sample` does.

        The server also samples completion i of a prompt with the seed + i.
        """
        if self._sampling is None:
            save = self._client().save_weights_and_get_sampling_client
            self._sampling = self._ask("make a sampler", save)
        types, futures = self._sdk.types, []
        for prompt, seed in zip(prompts, seeds, strict=True):
            wanted = types.SamplingParams(
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=-1,  # off
                seed=seed % 2**30,  # seed + i must fit into 32 bits
                stop=sorted(self.stop_ids),
            )
            ids = types.ModelInput.from_ints(list(prompt))
            futures.append(self._sampling.sample(ids, n, wanted))
        groups: list[list[Completion]] = []
        for future in futures:
            sequences = self._ask("sample", future.result).sequences
            groups.append([self._completion(sequence) for sequence in sequences])
            for _ in sequences:
                on_finish()
        return groups

    def _completion(self, sequence: tinker.SampledSequence) -> Completion:
        ids, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
        ended, reason = bool(ids) and ids[-1] in self.stop_ids, sequence.stop_reason
        if len(ids) != len(logprobs) or (reason == "stop" and not ended):
            raise UsageError(
                f"{self.where} ended a completion ({reason}) at token {ids[-1:]}, with "
                f"{len(logprobs)} log-probabilities for {len(ids)} tokens: check that the server "
                "serves the model being trained"
            )
        return Completion(ids, logprobs, "stop" if ended else "length")

    def invalidate_weights(self) -> None:
        """Discard the current sampling client, so that the next batch uses the current adapter.

        An old sampling client must never be used again: SkyRL would load the old weights into its
        only adapter slot, and training would continue from the old weights.
        """
        self._sampling, self._is_fetched = None, False

    def bytes_for(self, *_: object) -> int:
        """Return 0, because a batch uses no memory of this process."""
        return 0

    def start(self) -> None:
        """Do nothing, because the server is already running."""

    release = copy_to_model = start  # the server has the cache and the adapter

    def close(self) -> None:
        """End the session. The server then drops the adapter, but keeps saved states."""
        self._is_closed = True
        if self._training is not None:
            self._training.holder.close()

    def token_logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities of completion tokens under the current adapter.

        Returns:
            The log-probabilities (n, T), and the negative log-probabilities (n, T) as an estimate
            of the entropy. If gradients are enabled, the backward pass stores a gradient in the
            first tensor, and `update` sends this gradient.
        """
        assert temperature == 1, "servers score only at temperature 1, as the config has checked"
        sequences = batch.sequences()
        scored = self._score(self._client(), sequences)
        rows = [
            torch.tensor(output["logprobs"].data[-len(completion) :])
            for output, (_, completion) in zip(scored, sequences, strict=True)
        ]
        logprobs = pad_sequence(rows, batch_first=True)  # (n, T)
        if torch.is_grad_enabled():
            self.scored.append((sequences, logprobs.requires_grad_()))
        return logprobs, -logprobs.detach()

    def _score(
        self, client: tinker.TrainingClient, sequences: Sequences
    ) -> list[tinker.types.LossFnOutput]:
        # Any loss returns the log-probabilities. Use cross_entropy, which needs the fewest inputs.
        data = [self._datum(*pair, weights=[0.0] * len(pair[1])) for pair in sequences]
        forward = client.forward
        return self._ask("score", lambda: forward(data, "cross_entropy").result().loss_fn_outputs)

    def make_optimizer(self, learning_rate: float) -> TinkerOptimizer:
        """Create the optimizer that runs on the server."""
        return TinkerOptimizer(self, learning_rate)

    def update(self, adam: Mapping[str, Any]) -> float | None:
        """Send the gradients of the scored batches, and update the adapter.

        Args:
            adam: the settings of the update, in the form of a parameter group of
                `torch.optim.Adam`.

        Returns:
            The norm of the gradient; None if the server does not report the norm; NaN if a gradient
            is missing or not finite, in which case nothing is sent.
        """
        scored, self.scored = self.scored, []
        count, data = sum(len(sequences) for sequences, _ in scored), []
        for sequences, logprobs in scored:
            if logprobs.grad is None or not logprobs.grad.isfinite().all():
                return float("nan")
            rows = zip(sequences, logprobs.detach(), logprobs.grad, strict=True)
            for (prompt, completion), old, gradient in rows:
                n, tokens = len(completion), len(prompt) + len(completion) - 1
                # Tinker's loss is a sum over tokens. SkyRL's loss is a mean over the tokens of a
                # sequence, and then a mean over the sequences of an update.
                advantages = -gradient[:n] * (tokens * count if self._is_skyrl else 1)
                inputs = {"logprobs": old[:n].tolist(), "advantages": advantages.tolist()}
                data.append(self._datum(prompt, completion, **inputs))
        beta1, beta2 = adam["betas"]
        params = self._sdk.types.AdamParams(
            learning_rate=adam["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
            grad_clip_norm=self._max_grad_norm,
        )
        gradient = self._client().forward_backward(data, "importance_sampling")
        step = self._client().optim_step(params)  # sent before the gradient is awaited
        self._ask("compute a gradient", gradient.result)
        metrics = self._ask("update", step.result).metrics or {}
        return next((v for name, v in metrics.items() if name.endswith("grad_norm")), None)

    def _datum(
        self, prompt: Sequence[int], completion: Sequence[int], **inputs: Sequence[float]
    ) -> tinker.Datum:
        """Build the server's input for one sequence.

        Args:
            inputs: the inputs of the loss, with one value for each token of the completion.
        """
        ids, before = [*prompt, *completion], [0.0] * (len(prompt) - 1)
        named: dict[str, Any] = {name: [*before, *values] for name, values in inputs.items()}
        types = self._sdk.types
        return types.Datum(types.ModelInput.from_ints(ids[:-1]), named | {"target_tokens": ids[1:]})

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the scored log-probabilities, which `update` sends."""
        loss.backward()

    def adapt_loss_scale(self, *, skipped: bool) -> bool:
        """Return False, because the loss is not scaled."""
        return False

    def fetch(self) -> None:
        """Copy the adapter from the server into `master_weights`.

        Raises:
            UsageError: the server's adapter has other layers or another rank.
        """
        if self._is_fetched:
            return
        client, name, rest = self._client(), _new_name(), self._service.create_rest_client()
        self._ask("save its adapter", lambda: client.save_weights_for_sampler(name).result())
        # Request the archive by name, because SkyRL rejects the path that it returned itself.
        archived = rest.get_checkpoint_archive_url
        link = self._ask("send its adapter", lambda: archived(client.model_id, name).result().url)
        with TemporaryDirectory() as scratch:
            folder, archive = Path(scratch), Path(scratch) / "archive"
            self._ask("send its adapter", lambda: urllib.request.urlretrieve(link, archive))
            read_archive(archive, folder)
            fill_adapter(self.policy, folder)
        self._is_fetched = True

    def state_dict(self) -> dict[str, str]:
        """Save the adapter and the optimizer on the server, and return the path on the server."""
        save = self._client().save_state
        return {"path": self._ask("save its state", lambda: save(_new_name()).result().path)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue training from a state that `state_dict` saved on the server."""
        load, path = self._service.create_training_client_from_state_with_optimizer, state["path"]
        self._training = self._ask(f"load {path}", lambda: load(path))
        self.invalidate_weights()

    def _client(self) -> tinker.TrainingClient:
        """Return the client that trains the adapter; create a new adapter if there is none yet.

        Raises:
            UsageError: the server at the user's URL is not SkyRL's server with the JAX backend.
                Other servers sum the loss in another way, so they are rejected.
        """
        if self._training is None:
            create, (rank, seed) = self._service.create_lora_training_client, self._new
            options = {"rank": rank, "seed": seed, "train_unembed": False}
            made = self._ask("make an adapter", lambda: create(self._base, **options))
            if self._is_skyrl and "elementwise_loss" not in self._score(made, [([0], [0])])[0]:
                raise UsageError(
                    f"{self.where} does not return losses in the format of SkyRL's JAX backend: "
                    "start SkyRL's server with --backend jax"
                )
            self._training = made
        return self._training

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Run a call to the server, and wait at most WAIT seconds for its result.

        Raises:
            UsageError: the call has failed. The message explains how to continue.
        """
        if self._is_closed:
            raise UsageError(
                f"the run on {self.where} has ended: use its adapter with inference.py"
            )
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        # Use a daemon thread: at exit, the process would wait for the thread of an executor.
        threading.Thread(target=run, daemon=True).start()
        try:
            return answer.result(WAIT)
        except (self._sdk.TinkerError, OSError, TimeoutError) as error:
            lines = str(error).strip().splitlines() or [f"no reply in {WAIT:g} s"]
            raise UsageError(
                f"{self.where} did not {what} ({type(error).__name__}: {lines[0]:.200}); when the "
                "server runs again, start this run again with --resume"
            ) from error


def _new_name() -> str:
    """Return a unique name: the server rejects an existing name, but only after minutes."""
    return f"rlm-{uuid.uuid4().hex[:12]}"
