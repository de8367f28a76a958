"""A script name from the orchestrator's published README: runs recipes.orchestrator.train."""

import runpy

if __name__ == "__main__":
    runpy.run_module("recipes.orchestrator.train", run_name="__main__", alter_sys=True)
