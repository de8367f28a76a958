"""Problems with gold answers, and the one function that renders a problem to prompt token ids."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "experiences": (
        "Experience NEAREST WORKED_EXAMPLE apply_experiences experience_block load_experiences "
        "similarity with_experiences"
    ),
    "loaders": (
        "check_dataset dataset_name dataset_parts peek_problems is_local_file load_gsm8k "
        "load_jsonl load_problems needs_hub own_files require_numeric_answers"
    ),
    "own_data": "HELD_OUT",
    "problem": "Problem answer_types as_problems example_questions",
    "prompts": (
        "FORMATS IGNORE_INDEX Format drop_long_prompts encode_text end_of_turn_id longest_prompts "
        "read_system_prompt render_completion render_problem render_prompt stop_token_ids"
    ),
    "word_problems": "generate_word_problems load_word_problem_table",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
