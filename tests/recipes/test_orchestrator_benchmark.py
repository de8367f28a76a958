"""The speed of graphs, all at once and one at a time: the same work in both."""

from itertools import chain

from recipes.orchestrator import benchmark
from recipes.orchestrator.agents import Reply


def test_both_ways_run_the_same_graphs_in_other_batches():
    class Counting:
        def __init__(self):
            self.batches = []

        def chat(self, calls, params):
            self.batches.append([(call.system_prompt, call.text) for call in calls])
            return [Reply("4")] * len(calls)

        def release(self):
            pass

    agents = Counting()
    report = benchmark.measure(benchmark.BenchmarkConfig(graphs=3, repeats=1), agents)
    assert [len(batch) for batch in agents.batches] == [3, 3, 1, 1, 1, 1, 1, 1] * 2
    together, alone = agents.batches[8:10], agents.batches[10:]  # after the warm-up
    assert sorted(chain(*alone)) == sorted(chain(*together))
    assert report["ratio_range"][0] <= report["ratio"] <= report["ratio_range"][1]
