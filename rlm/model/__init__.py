"""Models: hardware and number type, base models, LoRA adapters, quantization, attention, export."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "adapter_info": (
        "ADAPTER ADAPTER_FILES AdapterInfo HOW_TO_TRAIN_SFT TRAINED_ADAPTER check_adapter "
        "public_dataset"
    ),
    "adapters": (
        "active_lora_tensors adapter_hash adapter_mismatch "
        "adapter_tensors check_base load_adapter lora_layers merged_weight "
        "new_adapter same_weights set_gradient_checkpointing using_adapter using_reference"
    ),
    "attention": "ATTN_IMPLEMENTATION softmax_scale",
    "base": (
        "base_model_hash context_window decoder_and_head head_dim kernels_for load_base "
        "load_tokenizer model_directory num_key_value_heads"
    ),
    "export": "check_new check_output merge_adapter save_adapter save_merged",
    "gguf_export": "check_convertible write_gguf",
    "hardware": (
        "Device EMBEDDED_MODEL available_memory default_setup default_values hub_base licence_of "
        "model_download peak_memory_gb pick_device pick_quantization prepare_process "
        "release_memory"
    ),
    "number_types": "DTYPES fast_dtype learning_dtype",
    "quantize": "QUANTIZATIONS",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
