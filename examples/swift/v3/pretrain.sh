#!/usr/bin/env bash
# Continued pretraining on texts that are read while it trains, on 4 processes.
# Flags of ms-swift 3. `megatune shims` makes a program of this name; without it write `megatune megatron`.
NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron pt \
    --load Qwen2.5-7B-mcore --finetune true \
    --dataset swift/chinese-c4 --streaming true --packing true --max_length 8192 \
    --tensor_model_parallel_size 4 --sequence_parallel true \
    --micro_batch_size 1 --global_batch_size 16 --train_iters 10000 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_iters 300 \
    --recompute_granularity selective \
    --cross_entropy_loss_fusion true --use_flash_attn true \
    --save megatron_output/Qwen2.5-7B --save_interval 500 --eval_interval 500 --eval_iters 100 --no_save_optim true \
    --no_save_rng true \
    --num_workers 4 --dataset_num_proc 8
