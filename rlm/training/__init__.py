"""Training: config and algorithms, advantages, batches, log-probabilities, loss, state,
processes, doctor, dry run, SFT."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "advantages": (
        "Group group_advantages has_signal overlong_penalties reward_tensor without_copies"
    ),
    "algorithms": "PRESETS algorithms_help",
    "batches": (
        "MicroBatch Rollout draw_problems make_micro_batches make_rollouts mini_batches "
        "problems_for_step rollout_seeds"
    ),
    "config": "GRPOConfig",
    "distributed": "Distributed",
    "doctor": "Doctor",
    "dry_run": "DryRun",
    "fused_layers": "use_fused_layers",
    "logprobs": "reference_logprobs score_tokens set_constant_logprobs token_logprobs",
    "loss": "policy_loss",
    "memory_plan": "micro_batch_tokens plan_memory",
    "metrics": "LearnMetrics mean_metrics step_metrics summary_card timer",
    "mixed_precision": "MixedPrecisionAdapter",
    "resolve": "check_arguments resolve_start",
    "selection": "ProblemScores choose_export validation_facts",
    "sft": "CheckpointCallback SFTTrainer make_trainer",
    "sft_config": "ENOUGH_STEPS SFTConfig",
    "sft_examples": "Example drop_unsolved show_counts show_example to_examples",
    "state": "TrainingState",
    "trainer": (
        "StepScorer TrainingData TrainingRun Validator fit_prompts load_data load_policy "
        "make_sampler validation_measure"
    ),
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
