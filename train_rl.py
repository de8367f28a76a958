"""Runs recipes.orchestrator.train under the script name of another README (see
docs/reference/names.md)."""

import runpy

if __name__ == "__main__":
    runpy.run_module("recipes.orchestrator.train", run_name="__main__", alter_sys=True)
