"""Builds the wheel: the five scripts and the adapter of weights/ go into the package.

At the top level of site-packages a module `evaluate` would hide Hugging Face's.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SCRIPTS = ("train_sft", "train_grpo", "evaluate", "inference", "server")
ADAPTER = "weights/final_rlm_lora"


class BuildWithScripts(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they are found in the checkout
            return
        package = Path(self.build_lib, "rlm")
        for script in SCRIPTS:
            self.copy_file(f"{script}.py", str(package / "scripts"))
        self.copy_tree(ADAPTER, str(package / ADAPTER))


setup(cmdclass={"build_py": BuildWithScripts})
