"""Groups of options: the headings of --help, and which options stand under each.

An option has one name in all scripts, so one table serves them all. A script whose list is long has
a class attribute `CHANGED_FIRST`: the names of the options that come before all groups.
"""

from collections.abc import Collection

FIRST = "options that people change first"
GROUPS = {
    "model and data": (
        "model dataset columns split max_samples max_problems problems "
        "max_prompt_length max_length sft_adapter adapter adapters base base_only "
        "reasoning_format system_prompt tool keep_code few_shot experiences nearest library "
        "graph_form agent_model agent_adapter agent_url agent_key max_agents api_config role"
    ),
    "start and output": (
        "start_questions start_from library_dir run_dir output merge gguf gguf_type "
        "push_to_hub yes json"
    ),
    "sampling": (
        "max_new_tokens temperature top_p top_k max_num_seqs sampler sampler_url vllm_command "
        "samples n budget max_tokens instructions agent_max_tokens agent_temperature"
    ),
    "learning": (
        "steps epochs num_epochs batch_size group_size micro_batch learning_rate lr_schedule "
        "min_lr_ratio warmup_steps warmup_share weight_decay max_grad_norm updates_per_batch "
        "lora_r lora_alpha lora_dropout use_lora rollouts tau library_items library_tokens"
    ),
    "algorithm": (
        "reward reward_timeout algorithm use_std_normalization token_level_loss "
        "fixed_length_normalizer clip_eps clip_eps_low clip_eps_high dynamic_sampling "
        "max_refill_rounds overlong_buffer overlong_penalty mask_truncated kl_weight "
        "kl_estimator kl_target zero_leaks format_reward weights groups kinds held_out "
        "trial_size alpha"
    ),
    "evaluation and saving": (
        "eval_every eval_samples test_samples save_every keep_checkpoints sample_every "
        "audit_reward placebo committee"
    ),
    "network and access": ("host port allow_host key_file allow_origin ngrok ngrok_url public"),
    "limits": ("requests_per_minute max_prompt_tokens queue deadline max_cost"),
    "hardware": (
        "quantize use_4bit use_8bit dtype sampler_dtype attn_implementation checkpointing "
        "train_batch_size train_batch_tokens deterministic"
    ),
    "run": (
        "doctor plan dry_run debug max_minutes resume accept_changes tracker use_wandb "
        "wandb_project seed"
    ),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
_PLACES = {group: place for place, group in enumerate((FIRST, *GROUPS), 1)}


def group_of(name: str, first: Collection[str]) -> str | None:
    """Return the heading of an option; None in a script with a short list, without `first`."""
    if not first:
        return None
    return FIRST if name in first else _GROUP_OF.get(name)


def place_of(group: str | None) -> int:
    """Return where a group stands in --help: those without a heading first, unknown ones last."""
    return 0 if group is None else _PLACES.get(group, len(_PLACES) + 1)
