#!/usr/bin/env bash
# A classifier of two classes: LoRA on the linear layers of a mixture of experts, and the scores beside them, on 2 processes.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --task_type seq_cls --num_labels 2 --model Qwen/Qwen3-30B-A3B-Instruct-2507 --finetune true \
    --dataset reviews.jsonl --split_dataset_ratio 0.01 --max_length 2048 --packing true \
    --tuner_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear --merge_lora true \
    --expert_model_parallel_size 2 --sequence_parallel true \
    --moe_permute_fusion true --moe_grouped_gemm true --moe_aux_loss_coeff 1e-6 \
    --micro_batch_size 1 --global_batch_size 2 --num_train_epochs 1 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true \
    --lr 1e-4 --min_lr 1e-5 --lr_warmup_fraction 0.05 \
    --output_dir megatron_output/Qwen3-30B-A3B-Instruct-2507 --eval_steps 200 --save_steps 200 --save_safetensors true \
    --no_save_optim true --no_save_rng true \
    --dataloader_num_workers 4 --dataset_num_proc 4
