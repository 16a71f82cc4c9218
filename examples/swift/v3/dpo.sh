#!/usr/bin/env bash
# DPO with the chosen answer's own loss beside it; one pair of a hundred is held out. 4 processes.
# Flags of ms-swift 3. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron rlhf \
    --rlhf_type dpo --load Qwen3-8B-Base-mcore --finetune true \
    --dataset 'hjh0119/shareAI-Llama3-DPO-zh-en-emoji#20000' --split_dataset_ratio 0.01 --max_length 8192 \
    --beta 0.1 --loss_type sigmoid --rpo_alpha 1 \
    --tensor_model_parallel_size 4 --sequence_parallel true \
    --micro_batch_size 8 --global_batch_size 16 --max_epochs 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --attention_backend flash \
    --save megatron_output/Qwen3-8B-Base --save_interval 200 --eval_interval 200 --no_save_optim true \
    --no_save_rng true \
    --num_workers 8 --dataset_num_proc 8
