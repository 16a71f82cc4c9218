#!/usr/bin/env bash
# Mixture of experts on as many machines as there are: experts over 8 processes, tensors over 2, packed rows.
# Each machine runs it with WORLD_SIZE, the number of machines, its own number RANK, MASTER_ADDR and MASTER_PORT set.
# Flags of ms-swift 3. `megatune shims` makes a program of this name; without it write `megatune megatron`.
NNODES=$WORLD_SIZE NODE_RANK=$RANK \
megatron sft \
    --load Qwen3-30B-A3B-Base-mcore --finetune true \
    --dataset liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT --packing true --max_length 8192 \
    --tensor_model_parallel_size 2 --expert_model_parallel_size 8 --sequence_parallel true \
    --moe_grouped_gemm true --moe_shared_expert_overlap true --moe_aux_loss_coeff 0.01 \
    --micro_batch_size 1 --global_batch_size 16 --train_iters 2000 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_iters 100 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --use_flash_attn true \
    --save megatron_output/Qwen3-30B-A3B-Base --save_interval 200 --eval_interval 200 --eval_iters 50 \
    --no_save_optim true --no_save_rng true \
    --num_workers 8 --dataset_num_proc 8
