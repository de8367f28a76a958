"""A question in, reasoning and answer out: what inference.py, server.py and the recipes share."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "answers": (
        "Answer Confidence Sample Thinking Usage Verification VoteCounts length_warnings "
        "read_answer read_sample trace verify without_marks"
    ),
    "local": "HOW_TO_TRAIN Reply TEMPERATURE_OF_SEVERAL ask load_rlm_model",
    "stream": "ReasoningStream",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
