"""Runs recipes.experience.train under the commands of another README (see
docs/reference/names.md)."""

import runpy
import sys

COMMANDS = {"critic": ["critic"]} | {f"generator{n}": ["generator", f"{n}"] for n in (1, 2, 3)}

module = next((word for word in sys.orig_argv if word.startswith("grpo_training.")), "")
command = COMMANDS.get(module.removeprefix("grpo_training."))
if command is None:
    raise ImportError("use recipes.experience instead (all names: docs/reference/names.md)")
if not any(word.startswith(("--run-dir", "--run_dir", "--config")) for word in sys.argv):
    command = [*command, "--run-dir", "grpo_training/cache"]
sys.argv[1:1] = command
runpy.run_module("recipes.experience.train", run_name="__main__", alter_sys=True)
