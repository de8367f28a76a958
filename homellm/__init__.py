"""Makes homellm.training.rl, the package name in another README, an alias of rlm (see
docs/reference/names.md)."""

import runpy
import sys
from importlib import import_module
from types import ModuleType

if "homellm.training.rl.train_rl" in sys.orig_argv:
    if not any(word.startswith(("--dataset", "--config", "--resume")) for word in sys.argv):
        sys.argv += ["--dataset", "gsm8k"]
    runpy.run_module("train_grpo", run_name="__main__", alter_sys=True)
sys.modules["homellm.training"] = ModuleType("homellm.training")
MODULES = {  # the modules with these names in that README are aliases of these packages
    "rlm": ("", ".trainer"),
    "rlm.training": (".config", ".loss", ".experience", ".rollout", ".algorithms"),
    "rlm.rewards": (".rewards", ".rewards.base", ".rewards.format", ".rewards.math"),
    "rlm.data": (".data", ".data.base", ".data.gsm8k"),
}
for package, names in MODULES.items():
    for name in names:
        sys.modules[f"homellm.training.rl{name}"] = import_module(package)
