"""Problems with gold answers, and the one function that renders a problem to prompt token ids."""

from rlm.data.experiences import experience_block, load_experiences, with_experiences
from rlm.data.loaders import HELD_OUT, is_file, load_gsm8k, load_jsonl, load_problems, only_numbers
from rlm.data.problem import Problem
from rlm.data.prompts import (
    FORMATS,
    IGNORED,
    Format,
    encode_text,
    end_of_turn_id,
    longest_prompts,
    render_completion,
    render_problem,
    render_prompt,
    stop_token_ids,
)
from rlm.data.word_problems import generate_word_problems, load_word_problem_table

__all__ = [
    "FORMATS",
    "HELD_OUT",
    "IGNORED",
    "Format",
    "Problem",
    "encode_text",
    "end_of_turn_id",
    "experience_block",
    "generate_word_problems",
    "is_file",
    "load_experiences",
    "load_gsm8k",
    "load_jsonl",
    "load_problems",
    "load_word_problem_table",
    "longest_prompts",
    "only_numbers",
    "render_completion",
    "render_problem",
    "render_prompt",
    "stop_token_ids",
    "with_experiences",
]
