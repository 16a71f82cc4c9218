#!/usr/bin/env bash
# Mixture of experts: experts over 4 processes, in a pipeline of 2 stages with unlike numbers of layers.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft \
    --model Qwen/Qwen1.5-MoE-A2.7B --finetune true \
    --dataset liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT --split_dataset_ratio 0.01 --packing true \
    --max_length 8192 \
    --pipeline_model_parallel_size 2 --decoder_last_pipeline_num_layers 11 --expert_model_parallel_size 4 \
    --sequence_parallel true \
    --moe_grouped_gemm true --moe_permute_fusion true --moe_shared_expert_overlap true --moe_aux_loss_coeff 1e-3 \
    --moe_router_dtype fp32 \
    --micro_batch_size 1 --global_batch_size 16 --num_train_epochs 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --attention_backend flash --overlap_grad_reduce true \
    --overlap_param_gather true \
    --output_dir megatron_output/Qwen1.5-MoE-A2.7B --save_steps 200 --eval_steps 200 --save_safetensors true \
    --no_save_optim true --no_save_rng true \
    --dataloader_num_workers 8 --dataset_num_proc 8 --load_from_cache_file true
