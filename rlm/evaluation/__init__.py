"""Evaluation: sample, grade, accuracy with intervals, paired comparison, tables and records."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "audit": "audit_run",
    "config": "EvaluateConfig pairs_to_compare",
    "evaluator": "Evaluation Graded evaluate",
    "model_card": "model_card",
    "records": "RowRecord open_journal",
    "report": "GRADINGS percent points show_table write_report",
    "statistics": (
        "bootstrap_interval holm mcnemar paired_bootstrap pass_at_k summarize_scores t_interval "
        "wilson_interval"
    ),
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
