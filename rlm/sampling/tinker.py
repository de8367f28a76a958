"""Samples and trains on a server that speaks Tinker's protocol: Thinking Machines' service, or
SkyRL's server (its JAX backend).

The server has the base, the adapter and the optimizer; rewards, advantages and the loss stay here.
This suffices for any loss of log-probabilities: with g = dL/d log π of each token, computed here,
dL/dθ is the sum of g ∇ log π. That is the gradient of the server's `importance_sampling` loss with
-g as advantages and the current log-probabilities as the old ones.
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
from rlm.sampling.params import Completion, SamplingParams

if TYPE_CHECKING:
    import tinker
    from peft import PeftModel

T = TypeVar("T")
Sequences = list[tuple[list[int], list[int]]]  # prompts and completions, as token ids
WAIT = 1800.0  # seconds to wait for an answer: a step of a large model takes minutes
HOSTED = "Thinking Machines' service"


class Batch(Protocol):
    """A batch to score, such as `rlm.training.MicroBatch`."""

    def sequences(self) -> Sequences: ...


def token_advantages(gradient: Tensor, divided_by: int = 1) -> list[float]:
    """Convert the gradient of a loss with respect to the log-probabilities, (tokens,), into
    advantages for which `importance_sampling` has the same gradient at the current weights.

    Args:
        divided_by: the number by which the server divides a token's loss. Tinker's loss is a sum
            over tokens; SkyRL's is a mean over a sequence's tokens, then over the sequences of an
            update.
    """
    return (-gradient * divided_by).tolist()


def served_name(model: str, served: Collection[str], where: str) -> str:
    """Return the server's name for a base: the same hub id, or a folder of the same name. Raise
    UsageError if it serves only others, because SkyRL would silently train its own."""
    for name in served:
        if Path(name).name == Path(model).name:
            return name
    named = ", ".join(sorted(served)) or "nothing"
    raise UsageError(f"--model {model} is not what {where} serves: {named}; name one of these")


def read_archive(archive: Path, folder: Path) -> None:
    """Extract only the tensors from a server's archive of an adapter: SkyRL's adapter_config.json
    names no modules, so PEFT would silently drop tensors."""
    name = ADAPTER_FILES[1]
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if Path(member.name).name == name else None
            if file:
                (folder / name).write_bytes(file.read())
                return
    raise UsageError(f"the server's archive has no {name}: start it with SkyRL's JAX backend")


class TinkerOptimizer(torch.optim.Adam):
    """Adam on the server, with the learning rate and constants of this object."""

    def __init__(self, engine: TinkerEngine, learning_rate: float) -> None:
        super().__init__(engine.master_weights.values(), lr=learning_rate)
        self._engine = engine

    # torch declares two overloads.
    def step(self, closure: None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send the gradients, and update; return their norm if the server reports it."""
        return self._engine.update(self.param_groups[0])


class TinkerEngine:
    """A base with an adapter on such a server: it samples as `rlm.sampling.Sampler` does, and
    trains as `rlm.training.MixedPrecisionAdapter` does.

    master_weights: a copy of the adapter from the last `fetch`.
    """

    matches_trainer = False  # other kernels, and maybe another dtype
    loss_scale, good_updates = 1.0, 0  # the loss is not scaled

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
        """Connect, and find the base. The adapter is created at its first use.

        Args:
            policy: an adapter on a base without weights (`rlm.model.adapter_without_base`).
            seed: the seed for the matrices of a new adapter.
            url: the server's URL; None is Thinking Machines' service.
        """
        try:
            import tinker
        except ImportError as error:
            needs = "--backend tinker needs its SDK: pip install 'tinker>=0.24.1,<0.25'"
            raise UsageError(needs) from error
        key, release = os.environ.get("TINKER_API_KEY"), version("tinker")
        if not (key or url):
            raise UsageError(f"{HOSTED} needs a key: set TINKER_API_KEY, or give --server URL")
        if url:
            terminal.line("SkyRL's server does not clip gradients: --max-grad-norm has no effect")
        if url and tuple(map(int, release.split(".")[:2])) >= (0, 25):
            terminal.line(
                f"warning: SkyRL 0.3 never answers tinker {release}, which has another wire "
                "format: install tinker 0.24.1, or serve with SkyRL 0.4 or later"
            )
        self.policy, self.stop_ids = policy, frozenset(stop_ids)
        self.model_weights = self.master_weights = adapter_tensors(policy)
        self.where = f"the server at {url}" if url else HOSTED
        self.description = f"{self.where}, by Tinker's protocol"
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
        """Generate as `rlm.sampling.Sampler.sample` does, with the current adapter. The server also
        gives completion i of a prompt the seed + i."""
        if self._sampling is None:
            save = self._client().save_weights_and_get_sampling_client
            self._sampling = self._ask("make a sampler", save)
        types, futures = self._sdk.types, []
        for prompt, seed in zip(prompts, seeds, strict=True):
            wanted = types.SamplingParams(
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k or -1,
                seed=seed % 2**30,  # the server takes 32 bits
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
                f"{len(logprobs)} log-probabilities of {len(ids)} tokens: is another model served?"
            )
        return Completion(ids, logprobs, "stop" if ended else "length")

    def invalidate_weights(self) -> None:
        """Sample with the current adapter from now on. An older sampler is never used again: SkyRL
        would load its weights into its only slot, and training would continue from them."""
        self._sampling, self._is_fetched = None, False

    def bytes_for(self, *_: object) -> int:
        """Return 0: a batch takes no memory of this process."""
        return 0

    def start(self) -> None:
        """Do nothing: the server is running, keeps its memory, and gets gradients in `update`."""

    release = accumulate = copy_to_model = start

    def close(self) -> None:
        """End the session: the server then forgets the adapter, but not what was saved."""
        self._is_closed = True
        if self._training is not None:
            self._training.holder.close()

    def token_logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each completion token under the current adapter, and its
        negative, an estimate of the entropy: two (n, T). If gradients are enabled, `update` sends
        the gradient that the backward pass leaves in the first."""
        assert temperature == 1, "servers score only at temperature 1; the config checks it"
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
        # Only the log-probabilities are used, and this loss needs the fewest inputs.
        data = [self._datum(*pair, weights=[0.0] * len(pair[1])) for pair in sequences]
        forward = client.forward
        return self._ask("score", lambda: forward(data, "cross_entropy").result().loss_fn_outputs)

    def make_optimizer(self, learning_rate: float) -> TinkerOptimizer:
        """Make the server's optimizer."""
        return TinkerOptimizer(self, learning_rate)

    def update(self, adam: Mapping[str, Any]) -> float | None:
        """Send the gradients of the scored batches, and update the adapter with the settings of a
        parameter group of `torch.optim.Adam`. Return the gradient's norm, None if the server does
        not report it, or NaN if a gradient is not finite and nothing was sent."""
        scored, self.scored = self.scored, []
        count, data = sum(len(sequences) for sequences, _ in scored), []
        for sequences, logprobs in scored:
            if logprobs.grad is None or not logprobs.grad.isfinite().all():
                return float("nan")
            rows = zip(sequences, logprobs.detach(), logprobs.grad, strict=True)
            for (prompt, completion), old, gradient in rows:
                n, tokens = len(completion), len(prompt) + len(completion) - 1
                advantages = token_advantages(gradient[:n], tokens * count if self._is_skyrl else 1)
                inputs = {"logprobs": old[:n].tolist(), "advantages": advantages}
                data.append(self._datum(prompt, completion, **inputs))
        (beta1, beta2), decay = adam["betas"], adam["weight_decay"]
        rates = {"learning_rate": adam["lr"], "eps": adam["eps"], "weight_decay": decay}
        rates |= {"beta1": beta1, "beta2": beta2, "grad_clip_norm": self._max_grad_norm}
        params = self._sdk.types.AdamParams(**rates)
        gradient = self._client().forward_backward(data, "importance_sampling")
        step = self._client().optim_step(params)  # both requests are in flight
        self._ask("compute a gradient", gradient.result)
        metrics = self._ask("update", step.result).metrics or {}
        return next((v for name, v in metrics.items() if name.endswith("grad_norm")), None)

    def _datum(
        self, prompt: Sequence[int], completion: Sequence[int], **inputs: Sequence[float]
    ) -> tinker.Datum:
        """Make the server's input; `inputs` have a value for each token of the completion."""
        ids, before = [*prompt, *completion], [0.0] * (len(prompt) - 1)
        named: dict[str, Any] = {name: [*before, *values] for name, values in inputs.items()}
        types = self._sdk.types
        return types.Datum(types.ModelInput.from_ints(ids[:-1]), named | {"target_tokens": ids[1:]})

    def adapt_loss_scale(self, *, skipped: bool) -> bool:
        """Return False: the loss is not scaled."""
        return False

    def fetch(self) -> None:
        """Copy the adapter from the server into `master_weights`. Raise UsageError if its tensors
        are not a LoRA of these layers and this rank."""
        if self._is_fetched:
            return
        client, name, rest = self._client(), _new_name(), self._service.create_rest_client()
        self._ask("save its adapter", lambda: client.save_weights_for_sampler(name).result())
        archived = rest.get_checkpoint_archive_url  # by name: SkyRL refuses its own path
        link = self._ask("send its adapter", lambda: archived(client.model_id, name).result().url)
        with TemporaryDirectory() as scratch:
            folder, archive = Path(scratch), Path(scratch) / "archive"
            self._ask("send its adapter", lambda: urllib.request.urlretrieve(link, archive))
            read_archive(archive, folder)
            fill_adapter(self.policy, folder)
        self._is_fetched = True

    def save_state(self) -> str:
        """Save adapter and optimizer on the server, and return the path there."""
        client = self._client()
        return self._ask("save its state", lambda: client.save_state(_new_name()).result().path)

    def load_state(self, path: str | None) -> None:
        """Continue training from a state that the server saved."""
        load = self._service.create_training_client_from_state_with_optimizer
        self._training = self._ask(f"load {path}", lambda: load(str(path)))
        self.invalidate_weights()

    def _client(self) -> tinker.TrainingClient:
        """Return the client that trains the adapter; create a new adapter if none was loaded.

        A server at the user's URL is refused unless it returns what SkyRL's JAX backend returns,
        because others sum the loss in another way.
        """
        if self._training is None:
            create, (rank, seed) = self._service.create_lora_training_client, self._new
            options = {"rank": rank, "seed": seed, "train_unembed": False}
            made = self._ask("make an adapter", lambda: create(self._base, **options))
            if self._is_skyrl and "elementwise_loss" not in self._score(made, [([0], [0])])[0]:
                raise UsageError(
                    f"{self.where} does not return losses as SkyRL's JAX backend does: start "
                    "SkyRL's server with --backend jax"
                )
            self._training = made
        return self._training

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that waits for the server for at most WAIT seconds. If it fails, the message
        of the UsageError says how to continue."""
        if self._is_closed:
            raise UsageError(f"the run on {self.where} has ended: ask its adapter (inference.py)")
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        # A daemon thread, because at exit the process would wait for a thread of an executor.
        threading.Thread(target=run, daemon=True).start()
        try:
            return answer.result(WAIT)
        except (self._sdk.TinkerError, OSError, TimeoutError) as error:
            lines = str(error).strip().splitlines() or [f"no answer in {WAIT:g} s"]
            raise UsageError(
                f"{self.where} did not {what} ({type(error).__name__}: {lines[0]:.200}); when it "
                "runs again, start this run again with --resume"
            ) from error


def _new_name() -> str:
    """Make a new name for something to save: the server refuses an existing one, after minutes."""
    return f"rlm-{uuid.uuid4().hex[:12]}"
