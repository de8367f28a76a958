"""A name of another README (docs/reference/names.md). There is nothing here but what to type."""

import sys

ROLES = {f"generator{number}": f"generator {number}" for number in (1, 2, 3)}
asked = next((word for word in sys.orig_argv if word.startswith("grpo_training.")), "")
role = ROLES.get(asked.rpartition(".")[2], "critic" if asked.endswith("critic") else "all")
line = (
    f"error: here it is: python -m recipes.experience.train {role} "
    "(all names: docs/reference/names.md)"
)
if not asked:
    raise ImportError(line)
sys.stderr.write(f"{line}\n")
sys.exit(2)
