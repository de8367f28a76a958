"""The real sampler of a tiny model, whose completions are scripted by the test.

Only the logits are replaced, by logits that allow a single token. The batch, the cache, the seeds,
the forced tokens and the abortion of requests are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from rlm.sampling import Sampler

END = 257  # <|im_end|> of the tests' tokenizer
Script = Mapping[str, str | Sequence[str]]  # part of the question → the completion (of each row)


class ScriptedSampler(Sampler):
    """Continues each row with its script, or with `after_forced` after forced tokens."""

    def __init__(
        self, model, tokenizer, script: Script, *, max_num_seqs=4, pause: float = 0.0, tool=None
    ):
        super().__init__(model, tokenizer, max_num_seqs=max_num_seqs, tool=tool)
        self.script, self.pause, self.after_forced = script, pause, "7</answer>"
        self.before_step: Callable[[list[str]], None] = lambda questions: None
        self.steps = 0
        # Cached, because decoding at each step would take longer than the model.
        self._question = cache(lambda prompt: tokenizer.decode([*prompt]))
        self._script = cache(lambda text: [*tokenizer.encode(text, add_special_tokens=False), END])
        head = self._weights.head
        self._weights.head = lambda hidden: self._scripted(head(hidden))

    def step(self):
        self.steps += 1
        time.sleep(self.pause)
        return super().step()

    def _scripted(self, logits):
        rows = self._scheduler.running
        self.before_step([self._question(tuple(row.request.prompt)) for row in rows])
        logits = torch.full_like(logits, -1e4)
        for i, row in enumerate(rows):
            logits[i, self._next(row)] = 1e4
        return logits

    def _next(self, row) -> int:
        question = self._question(tuple(row.request.prompt))
        wanted = next((text for part, text in self.script.items() if part in question), "")
        wanted = wanted if isinstance(wanted, str) else wanted[row.index]
        script = self._script(wanted)
        if row.ids == script[: len(row.ids)]:
            return script[len(row.ids)]
        said = self.tokenizer.decode(row.ids).rpartition("<answer>")[2]
        rest = self.after_forced.removeprefix(said)
        return self.tokenizer.encode(rest, add_special_tokens=False)[0] if rest else END
