"""Names that options have elsewhere: which are taken here, and what is said of all others.

They are those of TRL's GRPOConfig and SFTConfig, of transformers' TrainingArguments, and of other
GRPO trainers.
"""

import difflib
import re
from collections.abc import Collection, Mapping

CUTOFF = 0.75  # of difflib's likeness; below it a guess is seldom what was meant

# Name → the option of the same meaning and unit: the first of these that a script has.
SYNONYMS = {
    "model_name": "model",
    "model_name_or_path": "model",
    "dataset_file": "dataset",
    "dataset_name": "dataset",
    "dataset_split": "split",
    "dataset_train_split": "split",
    "max_seq_length": "max_length",
    "max_completion_length": "max_new_tokens",
    "num_generations": "group_size",
    "per_device_train_batch_size": "micro_batch",
    "max_steps": "steps",
    "epochs": "num_epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "num_epochs epochs",
    "num_iterations": "updates_per_batch",
    "epochs_per_step": "updates_per_batch",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "warmup_ratio": "warmup_share",
    "epsilon": "clip_eps",
    "epsilon_high": "clip_eps_high",
    "beta": "kl_weight",
    "mask_truncated_completions": "mask_truncated",
    "gradient_checkpointing": "checkpointing",
    "lora_rank": "lora_r",
    "load_in_4bit": "use_4bit",
    "load_in_8bit": "use_8bit",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "resume_from_checkpoint": "resume",
    "report_to": "tracker",
    "project": "wandb_project",
    "output_dir": "output",
}
# Names → what is said of them, in a script that has all the options which the sentence names.
FOREIGN_NAMES = (
    # data
    (
        "dataset_test_split",
        "--eval-samples problems kept back from --split are validated on; evaluate.py takes any "
        "split",
    ),
    ("dataset_config", "type --dataset NAME:CONFIG"),
    (
        "shuffle_dataset data_seed shuffle",
        "the order of the data is drawn by --seed; leave it out",
    ),
    (
        "dataset_text_field dataset_kwargs dataset_num_proc packing packing_strategy eval_packing "
        "padding_free completion_only_loss assistant_only_loss truncation_mode",
        "the loss is on the completion alone, unpacked, and examples above --max-length are left "
        "out; leave it out",
    ),
    (
        "chat_template chat_template_path chat_template_kwargs eos_token pad_token",
        "prompts have the model's own chat template; --system-prompt sets its system message",
    ),
    # batches
    (
        "gradient_accumulation gradient_accumulation_steps",
        "an update is over all completions of a step; --train-batch-size cuts it into "
        "micro-batches",
    ),
    (
        "gradient_accumulation gradient_accumulation_steps",
        "an update is over --batch-size examples, --micro-batch of them in a forward pass",
    ),
    (
        "per_device_train_batch_size",
        "--batch-size counts problems in a step, --group-size completions of each, "
        "--train-batch-size completions in a micro-batch",
    ),
    (
        "generation_batch_size steps_per_generation",
        "every step samples --batch-size problems x --group-size completions and learns from them "
        "--updates-per-batch times",
    ),
    (
        "per_device_eval_batch_size num_generations_eval",
        "validation draws one greedy completion for each of --eval-samples problems, "
        "--max-num-seqs at a time",
    ),
    (
        "per_device_eval_batch_size",
        "the validation loss of --eval-samples examples is taken --micro-batch at a time",
    ),
    ("auto_find_batch_size", "type --micro-batch, a number of examples"),
    (
        "auto_find_batch_size",
        "micro-batches are planned by memory unless --train-batch-tokens sets them; leave it out",
    ),
    # how long, how often
    (
        "max_steps",
        "a run is --epochs passes over --max-samples examples; --max-minutes ends it sooner",
    ),
    ("warmup_ratio", "type --warmup-steps, a number of steps"),
    ("warmup_steps", "type --warmup-share, a share of all steps"),
    (
        "log_steps logging_steps logging_strategy logging_first_step",
        "every step is logged; --sample-every says how often completions are printed",
    ),
    (
        "log_completions num_completions_to_print",
        "all completions are written to --run-dir; --sample-every says how often some are printed",
    ),
    (
        "log_steps logging_steps logging_strategy logging_first_step",
        "the loss is logged to --run-dir about twenty times a run; leave it out",
    ),
    ("save_strategy", "type --save-every, a number of steps (0: only at the end)"),
    (
        "save_steps save_strategy save_total_limit",
        "a checkpoint is written to --run-dir every minute, or at each step if steps are longer; "
        "leave it out",
    ),
    ("eval_strategy", "type --eval-every, a number of steps (0: only first and last)"),
    (
        "do_eval eval_on_start load_best_model_at_end metric_for_best_model greater_is_better",
        "the start is validated too, and the best adapter of all --eval-every is exported; leave "
        "it out",
    ),
    (
        "do_eval eval_steps eval_strategy eval_on_start load_best_model_at_end "
        "metric_for_best_model greater_is_better",
        "the adapter after the last step is written, then its loss on --eval-samples validation "
        "problems is measured",
    ),
    (
        "eval_delay eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "prediction_loss_only include_for_metrics batch_eval_metrics label_names",
        "validation is of --eval-samples problems, and of nothing else; leave it out",
    ),
    (
        "save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint",
        "a checkpoint holds all that --resume needs; leave it out",
    ),
    (
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level_replica "
        "skip_memory_metrics log_unique_prompts log_multimodal",
        "the main process writes all metrics to --run-dir; leave it out",
    ),
    (
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        "--tracker trackio keeps the run on this machine; leave it out",
    ),
    # the algorithm
    (
        "loss_type",
        "type --algorithm; --token-level-loss and --fixed-length-normalizer change the loss alone",
    ),
    (
        "importance_sampling_level",
        "type --algorithm gspo for one ratio a sequence; the others have one a token",
    ),
    ("scale_rewards", "type --use-std-normalization or --no-use-std-normalization"),
    (
        "reward_funcs reward_fn reward_function reward_weights reward_model "
        "multi_objective_aggregation",
        "type --reward FILE.py:NAME (in Python: GRPOTrainer(…, reward_fn=…)); a CombinedReward "
        "weighs several",
    ),
    (
        "min_p repetition_penalty generation_kwargs",
        "completions are scored as they are drawn: --temperature is free, --top-p is 1, --top-k 0",
    ),
    (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_model",
        "the reference is the adapter that training starts from, frozen; --kl-weight turns it on",
    ),
    (
        "delta top_entropy_quantile off_policy_mask_threshold use_bias_correction_kl entropy_coef "
        "entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy "
        "sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg "
        "vespo_lambda_pos router_aux_loss_coef neftune_noise_alpha label_smoothing_factor",
        "not offered; docs/explanation/algorithms.md has what each --algorithm computes",
    ),
    (
        "loss_type neftune_noise_alpha label_smoothing_factor router_aux_loss_coef",
        "not offered: the loss is the cross-entropy of the completions of at most --max-length "
        "tokens",
    ),
    (
        "optim optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon",
        "the optimizer is PyTorch's AdamW",
    ),
    ("full_determinism", "what a step draws is decided by --seed alone; leave it out"),
    (
        "vllm_structured_outputs_regex",
        "not offered: completions are free text, and --reward scores them",
    ),
    (
        "max_tool_calling_iterations",
        "a --tool writes as often as the completion calls it; --max-new-tokens ends it",
    ),
    ("lr_scheduler_kwargs", "type --lr-schedule and --min-lr-ratio"),
    (
        "lr_scheduler_type lr_scheduler_kwargs lr_schedule weight_decay max_grad_norm",
        "not an option here: after --warmup-share the rate falls by a cosine, weight decay is 0, "
        "gradients are scaled down to norm 1",
    ),
    # the model
    (
        "use_peft no_lora peft_config",
        "the base is never written: an adapter of rank --lora-r is trained",
    ),
    (
        "target_modules lora_target_modules lora_modules_to_save",
        "the adapter is on all linear layers but the head; leave it out",
    ),
    ("use_4bit load_in_4bit", "type --quantize 4bit"),
    ("use_8bit load_in_8bit", "type --quantize 8bit"),
    (
        "use_flash_attention flash_attention",
        "type --attn-implementation (auto is the fastest that fits; flash_attention_2 is for "
        "train_sft.py)",
    ),
    (
        "bf16 fp16 tf32 bf16_full_eval fp16_full_eval dtype torch_dtype",
        "the number type is the fastest that the machine computes in; leave it out",
    ),
    (
        "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs "
        "activation_offloading",
        "type --checkpointing",
    ),
    (
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
        "activation_checkpointing_kwargs activation_offloading",
        "it is on where there is a GPU; a smaller --micro-batch takes less memory too",
    ),
    (
        "model_init_kwargs device_map trust_remote_code model_revision cache_implementation",
        "not offered; --model, --quantize and --attn-implementation say how it is loaded",
    ),
    ("use_cache", "the cache is on in sampling and off in learning; leave it out"),
    ("torch_empty_cache_steps", "free memory is handed back between sampling and learning"),
    ("disable_dropout", "--lora-dropout is 0 in training; leave it out"),
    # where
    (
        "use_vllm fast_inference vllm_mode vllm_server_base_url vllm_server_host vllm_server_port",
        "type --sampler vllm --sampler-url URL (docs/how-to/vllm.md)",
    ),
    (
        "gpu_memory_utilization vllm_gpu_memory_utilization vllm_tensor_parallel_size "
        "vllm_max_model_length vllm_model_impl vllm_enable_sleep_mode vllm_server_timeout "
        "vllm_group_port",
        "it belongs to the server that --sampler-url names (docs/how-to/vllm.md)",
    ),
    (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
        "the correction is on where --sampler computes other numbers than training; leave it out",
    ),
    (
        "use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config",
        "batching is continuous already: --max-num-seqs completions at a time",
    ),
    ("device use_cpu no_cuda", "a GPU is used if there is one; CUDA_VISIBLE_DEVICES= hides it"),
    (
        "deepspeed fsdp fsdp_config accelerator_config parallelism_config ddp_backend local_rank "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_timeout "
        "ds3_gather_for_generation",
        "not offered: each GPU holds the whole model; torchrun starts a process for each and "
        "shares out the --batch-size problems",
    ),
    (
        "average_tokens_across_devices",
        "the loss of an update has one denominator over all processes; leave it out",
    ),
    (
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
        "liger_kernel_config cast_lm_head_to_fp32 pad_to_multiple_of",
        "not offered; the layers are fused as the machine needs it",
    ),
    ("debug", "type --doctor, or --plan"),
    ("debug", "type --dry-run, which shows examples of --max-samples"),
    ("run_name logging_dir", "type --run-dir, whose name is the run's"),
    (
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_always_push "
        "hub_revision log_completions_hub_repo",
        "training uploads nothing; inference.py uploads the adapter in --output",
    ),
    (
        "overwrite_output_dir",
        "an adapter in --output is replaced at the end, an old --run-dir is kept as DIR.prev",
    ),
    (
        "do_train do_predict disable_tqdm remove_unused_columns group_by_length "
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last log_level "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context train_sampling_strategy length_column_name "
        "ddp_find_unused_parameters",
        "not needed for --output; leave it out",
    ),
)


def synonyms(fields: Collection[str]) -> dict[str, list[str]]:
    """Return the names of `SYNONYMS` that each field of a script has, where it has any."""
    found: dict[str, list[str]] = {}
    for name, options in SYNONYMS.items():
        ours = [option for option in options.split() if option in fields]
        if ours and name not in fields:
            found.setdefault(ours[0], []).append(name)
    return found


def hint(word: str, known: Mapping[str, str]) -> str:
    """Return what to say behind an unknown name: why it is not here, or which one is like it.

    Args:
        known: every name of a script, with underscores → the option that it names.
    """
    name = with_underscores(word)
    for names, sentence in FOREIGN_NAMES:
        if name in names.split() and all(
            with_underscores(option).removeprefix("no_") in known
            for option in re.findall(r"--([a-z-]+)", sentence)
        ):
            return f": {sentence}"
    own = [key for key, option in known.items() if with_underscores(option) == key]
    begun = [key for key in own if name and key.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, 1, CUTOFF)
    return f"; did you mean {known[close[0]]}?" if close else ""


def with_underscores(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
