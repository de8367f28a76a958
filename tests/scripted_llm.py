"""An LLM whose replies are set by the test, in place of a model or an API."""

from recipes.orchestrator.runner import Reply
from rlm.data import FORMATS


class ScriptedLLM:
    """Replies with `answer(call)`, which is a text or a whole Reply, and records the batches."""

    format = FORMATS["deepseek"]

    def __init__(self, answer=lambda call: f"<{call.system_prompt}|{call.text}>"):
        self.answer, self.batches = answer, []

    def chat(self, calls, params):
        self.batches.append(list(calls))
        said = [self.answer(call) for call in calls]
        return [s if isinstance(s, Reply) else Reply(s, 10, len(s)) for s in said]

    @property
    def sizes(self):
        return [len(batch) for batch in self.batches]
