#!/usr/bin/env bash
# DPO on pairs of similar length, with the chosen answer's own loss beside it, on 4 tensor-parallel processes.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron rlhf \
    --rlhf_type dpo --model Qwen/Qwen3-4B-Instruct-2507 --finetune true \
    --dataset AI-ModelScope/orpo-dpo-mix-40k --split_dataset_ratio 0.01 --padding_free false --group_by_length true \
    --max_length 8192 \
    --beta 0.1 --loss_type sigmoid --rpo_alpha 0.1 \
    --tensor_model_parallel_size 4 --sequence_parallel true \
    --micro_batch_size 4 --global_batch_size 16 --num_train_epochs 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --attention_backend flash \
    --output_dir megatron_output/Qwen3-4B-Instruct-2507 --save_steps 200 --eval_steps 200 --save_safetensors true \
    --no_save_optim true --no_save_rng true \
    --dataloader_num_workers 8 --dataset_num_proc 8 --load_from_cache_file true
