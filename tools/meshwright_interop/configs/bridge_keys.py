"""Tables of Megatron-Bridge's fields: their flags in Megatron-LM, their usual values,
and the rest.
"""

from __future__ import annotations

from meshwright_interop.configs.source_keys import (
    FLOAT8,
    METRICS,
    PRETRAINED,
    TOKENIZER,
    TRACING,
    DropReason,
    KeyRule,
    Refusal,
    rules,
)

SAME_NAME = {
    "model": (
        """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
        hidden_dropout attention_dropout normalization qk_layernorm add_qkv_bias window_size
        window_attn_skip_freq rotary_base rotary_percent rotary_interleaved
        position_embedding_type rope_scaling_factor qk_l2_norm init_method_std
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
        sequence_parallel recompute_granularity recompute_method recompute_num_layers
        recompute_modules multi_latent_attention mtp_num_layers mtp_loss_scaling_factor
        mtp_use_repeated_layer apply_residual_connection_post_layernorm vocab_size
        make_vocab_size_divisible_by linear_attention_freq experimental_attention_variant
        attention_output_gate softmax_scale no_rope_freq qk_clip glu_linear_offset
        activation_func_clamp_value enable_mhc_connections embedding_init_method_std
        heterogeneous_layers_config_path hybrid_layer_pattern hybrid_override_pattern use_mup
        calculate_per_token_loss fp8 fp8_recipe fp4 cross_entropy_fusion_impl bf16 fp16
        max_position_embeddings
        """
    ),
    "dataset": "seq_length data_path split reset_position_ids reset_attention_mask eod_mask_loss",
    "train": (
        """
        micro_batch_size global_batch_size rampup_batch_size train_iters train_samples
        iterations_to_skip check_weight_hash_across_dp_replicas_interval eval_iters
        eval_interval
        """
    ),
    "validation": "eval_iters eval_interval",
    "optimizer": (
        """
        apply_wd_to_qk_layernorm lr min_lr optimizer adam_beta1 adam_beta2 adam_eps sgd_momentum
        weight_decay clip_grad bf16 fp16 use_distributed_optimizer decoupled_lr decoupled_min_lr
        optimizer_cpu_offload optimizer_offload_fraction loss_scale initial_loss_scale
        min_loss_scale loss_scale_window hysteresis
        """
    ),
    "scheduler": (
        """
        lr_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_style lr_wsd_decay_iters
        lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init
        start_weight_decay end_weight_decay weight_decay_incr_style no_weight_decay_cond_type
        """
    ),
    "mixed_precision": (
        "bf16 fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    "ddp": (
        """
        use_distributed_optimizer data_parallel_sharding_strategy
        num_distributed_optimizer_instances use_megatron_fsdp
        """
    ),
    "dist": "use_megatron_fsdp use_torch_fsdp2 distributed_timeout_minutes",
    "checkpoint": "save_interval save load async_save pretrained_checkpoint finetune",
    "rng": "seed",
    "logger": "log_interval wandb_project wandb_exp_name",
    "tokenizer": "tokenizer_type vocab_size tokenizer_model",
}
"""Section -> fields with the name of their flag."""
FLAGS = {
    **{
        f"{section}.{name}": name.replace("_", "-")
        for section, names in SAME_NAME.items()
        for name in names.split()
    },
    "model.layernorm_epsilon": "norm-epsilon",
    "model.num_moe_experts": "num-experts",
    "model.seq_len_interpolation_factor": "rotary-seq-len-interpolation-factor",
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "dataset.sequence_length": "seq-length",
    "ddp.grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32",
    "ddp.bucket_size": "ddp-bucket-size",
}
"""Field -> flag of Megatron-LM. Of two fields for one flag, the first that is set counts."""
INVERTED = {
    "model.share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "model.add_bias_linear": "disable-bias-linear",
    "model.bias_activation_fusion": "no-bias-gelu-fusion",
}
"""Field -> flag of the opposite meaning."""
CONVERSATIONS = "data of conversations is not read here"
NEEDLESS = """
    model.moe_* model.linear_* model.mamba_* model.dsa_* model.mhc_* checkpoint.* ckpt_* dist.*
    ddp.* ft* straggler* nvrx_straggler* rerun_state_machine* inprocess_restart* comm_overlap*
    tensor_inspect* env_vars* rng.* validation.* train.* scheduler.* optimizer.* mixed_precision*
    dataset.* optimizer_config_override_provider* _target_ *._target_ *._call_ *._args_ inference*
    model.cuda_graph* model.*fusion* model.tp_comm_* model.*overlap* model.*_parallel_*
    model.params_dtype* model.*dtype* model.transformer_impl model.transformer_layer_spec*
    model.attention_backend* model.cpu_offload* model.deallocate_* model.batch_p2p_*
    model.microbatch_* model.hf_model_* model.generation_config* model.*inference*
    model.distribute_saved_* model.gradient_accumulation* model.async_* model.barrier_*
    model.fine_grained_* model.*offload* model.wgrad_* model.defer_* model.symmetric_*
    model.*_graph* model.use_te_* model.*init_method* model.account_for_* model.parallel_output
    model.should_pad_vocab model.scatter_* model.clone_scatter_* model.memory_* model.persist_*
    model.bias_* model.masked_* model.use_cpu_* model.perform_* model.timers* model.finalize_*
    model.bf16 model.fp16 model.grad_* model.no_sync_* model.param_sync_* model.enable_autocast
    model.variable_seq_* model.seq_length model.autocast* model.num_microbatches_* model.overlap_*
    model.config_logger_dir model.disable_* model.flash_* model.batch_invariant_* model.test_mode
    model.log_* model.mlp_chunks_* model.use_kitchen* model.kitchen_* model.quant_* model.restore_*
    model.is_hybrid_model model.gdp_* model.*_spec* model.fused_* model.apply_rope_fusion
    model.apply_query_key_layer_scaling model.hetereogenous_* model.min_offloaded_* model.delay_*
    model.delta_* model.external_* model.use_arbitrary_* model.tp_only_* model.num_layers_at_*
    model.first_last_* model.rope_scaling_factor model.yarn_* model.init_model_*
    model.cross_entropy_* model.heterogeneous_block_specs model.mrope_section
    model.fp32_residual_connection model.attention_softmax_in_fp32
    model.layernorm_zero_centered_gamma model.qk_clip_* model.fp16_lm_cross_entropy
"""
"""Fields of other models, of speed and of other programs; the file holds every one."""
RULES = (
    *rules(
        Refusal.RECIPE,
        {
            "train.step_batch_size_schedule": "in samples or tokens, which the file does not say",
            "model.rotary_scaling_factor": "the positions of a latent attention, not imported",
            "model.layernorm_across_heads": "a norm of q and k is over one head here",
            "dataset.dataset_root": CONVERSATIONS,
            "dataset.dataset_name": CONVERSATIONS,
            "dataset.hf_dataset": CONVERSATIONS,
            "peft.dim": "import without it, then set adapter.*: docs/adapters.md",
        },
    ),
    KeyRule("model.softmax_type", Refusal.RECIPE, "one kind of softmax here", ("vanilla",)),
    KeyRule("peft* optimizer.muon_* optimizer.lion_* model.mtp_* model.mup_*", DropReason.NEEDLESS),
    KeyRule("model.fp8* mixed_precision.fp8*", DropReason.BY_HAND, FLOAT8),
    KeyRule("model.fp4* mixed_precision.fp4*", DropReason.NONE, "no float4"),
    KeyRule("tokenizer.*", DropReason.BY_HAND, TOKENIZER),
    KeyRule("profiling.*", DropReason.NONE, TRACING),
    KeyRule("checkpoint.hf_source_path", DropReason.BY_HAND, PRETRAINED),
    KeyRule("logger.*", DropReason.NEEDLESS, METRICS),
    KeyRule(
        "dataset.blend* dataset.*path*",
        DropReason.BY_HAND,
        "data.train, the path of a .bin/.idx pair",
    ),
    KeyRule(NEEDLESS, DropReason.NEEDLESS),
)
"""Rows for all fields that are no flags; the first match applies."""
