#!/usr/bin/env bash
# A dense model of 72 billion parameters on 8 processes, with the optimizer's state on the host.
# Flags of ms-swift 3. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft \
    --load Qwen2.5-72B-Instruct-mcore --finetune true \
    --dataset liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT --split_dataset_ratio 0.01 --packing true \
    --max_length 8192 \
    --tensor_model_parallel_size 8 --sequence_parallel true \
    --micro_batch_size 1 --global_batch_size 16 --max_epochs 5 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --attention_backend flash --optimizer_cpu_offload true \
    --use_precision_aware_optimizer true \
    --save megatron_output/Qwen2.5-72B-Instruct --save_interval 500 --eval_interval 500 --no_save_optim true \
    --no_save_rng true \
    --num_workers 8 --dataset_num_proc 8
