#!/usr/bin/env bash
# Packed rows of 32,768 tokens with every layer recomputed, on 4 tensor-parallel processes.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron sft \
    --model Qwen/Qwen2.5-7B --finetune true \
    --dataset ZhipuAI/LongWriter-6k --split_dataset_ratio 0.01 --packing true --max_length 32768 \
    --tensor_model_parallel_size 4 --sequence_parallel true \
    --micro_batch_size 1 --global_batch_size 8 --train_iters 1000 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --attention_backend flash \
    --output_dir megatron_output/Qwen2.5-7B --save_steps 200 --eval_steps 200 --eval_iters 50 \
    --save_safetensors true --no_save_optim true --no_save_rng true \
    --dataloader_num_workers 8 --dataset_num_proc 8 --load_from_cache_file true
